"""The progress of a plan on standard error: a bar on a terminal, elsewhere a line about every 10 s."""

import signal
import threading
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from ...strategy import Strategy
from .line import Line

LINE_SECONDS = 10.0


class PlanProgress(Progress):
    """The progress of a plan, which is shown while it is entered as a context.

    The lines come from a thread, because one program may compile for a minute. XLA releases Python's lock meanwhile.

    Ctrl-C raises KeyboardInterrupt as usual. Python drops an exception of a signal that arrives in a callback of its
    garbage collector, of which JAX has one. So `advance` and `compiling` raise it again.

    Args:
      console: where to show it; standard error if None.
    """

    def __init__(self, console: Console | None = None) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        super().__init__(*columns, console=console or Console(stderr=True), transient=True)
        self._stopped = threading.Event()
        self._interrupted = self._handles_interrupt = False

    def start(self) -> None:
        """Show the bar, or begin to print lines."""
        super().start()
        # Only the main thread receives signals. A handler of the user's program stays.
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGINT) == signal.default_int_handler:
            signal.signal(signal.SIGINT, self._on_interrupt)
            self._handles_interrupt = True
        if not self.console.is_terminal:
            threading.Thread(target=self._print_lines, daemon=True).start()

    def stop(self) -> None:
        """Remove the bar, or end the lines."""
        self._stopped.set()
        if self._handles_interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        super().stop()

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        """Note that a part of a task is done. Raises KeyboardInterrupt after Ctrl-C."""
        super().advance(task_id, advance)
        self._raise_if_interrupted()

    def compiling(self, task: TaskID, target: str, strategy: Strategy, best: Line | None) -> None:
        """Show the strategy that is compiled next for a target, and the best line so far."""
        self._raise_if_interrupted()
        best_so_far = f"{1e3 * best.seconds:,.0f} ms by {best.strategy}" if best and best.fits else "nothing that fits"
        self.update(task, description=f"{target}: compile {strategy}", remark=f", best so far: {best_so_far}")

    def _on_interrupt(self, *_: object) -> None:
        self._interrupted = True
        raise KeyboardInterrupt

    def _raise_if_interrupted(self) -> None:
        if self._interrupted:
            raise KeyboardInterrupt

    def _print_lines(self) -> None:
        """Print a line for each unfinished task, until the progress stops."""
        while not self._stopped.wait(LINE_SECONDS):
            for task in self.tasks:
                if task.total and not task.finished:
                    remark: Any = task.fields.get("remark", "")
                    text = f"{task.description} ({task.completed:.0f} of at most {task.total:.0f} done{remark})"
                    self.console.print(text, markup=False, highlight=False, soft_wrap=True)
