"""The output of a run while it trains: a live bar in a terminal, lines at intervals elsewhere.

`Progress` is the hook. It writes to a `_Console` on top of `_Output`, which end the run with a checkpoint if the reader
of the output or the terminal goes away. `_Bar` is the live bar, with the line of numbers below it.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, Any, cast

from rich import progress as rich
from rich.console import Console, RenderableType
from rich.text import Text

from ...backend.text import size
from ...checkpoint.about import resolved_strategy
from ...hardware.devices import peak_flops
from ...layout.mesh import devices_text
from .loop import Run
from .picture import loads

# How the first line explains the memory per device, by its source in `Trainer.memory`.
_MEMORY_SOURCES = {
    "peak": "peak so far",
    "compiled": "arguments and temporaries, as compiled",
    "state": "parameters, gradients and optimizer state",
}
_SLOW_INPUT = 0.1  # smallest share of a step spent waiting for data that is shown
_SMOOTHING_STEPS = 10  # steps over which the shown step time is averaged, because single steps jump
_REPEAT_SECONDS = 10.0  # interval at which a run repeats its current activity


def discard_output() -> None:
    """Redirect standard output to the null device, with everything that is still to be flushed.

    Python flushes at its exit, when no handler could catch the error of a closed pipe any more.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Output:
    """Standard output, looked up at each write. If its terminal has gone, the run ends as it does at SIGHUP.

    The kernel sends SIGHUP too, but perhaps only after the first write has failed. Without this class that failure
    would end the run without a checkpoint.
    """

    def write(self, text: str) -> int:
        try:
            return sys.stdout.write(text)
        except OSError as error:
            self._hang_up(error)
            return len(text)

    def flush(self) -> None:
        try:
            sys.stdout.flush()
        except OSError as error:
            self._hang_up(error)

    def _hang_up(self, error: OSError) -> None:
        if error.errno != errno.EIO:  # EIO: the terminal does not exist any more
            raise error
        discard_output()
        signal.raise_signal(signal.SIGHUP)

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)


class _Console(Console):
    """A console that ends the run as Ctrl-C does, with a checkpoint, if the reader closes the pipe (`| head`).

    rich itself would end the process.
    """

    def on_broken_pipe(self) -> None:
        # The run prints until its end. Each of these lines would fail again.
        self.quiet = True
        discard_output()
        signal.raise_signal(signal.SIGINT)


class Progress:
    """A hook that shows loss, speed, step time, memory per device and, on GPUs, MFU.

    MFU is the share of the devices' peak at which the step's own floating-point operations run (PaLM, Chowdhery et al.
    2022, appendix B): recomputation does not count. Without a `console` it prints to standard output.
    """

    def __init__(self, quiet: bool = False, console: Console | None = None):
        self.console = console or _Console(file=cast(IO[str], _Output()), highlight=False, quiet=quiet)
        self._bar: _Bar | None = None
        # Moving averages over `_SMOOTHING_STEPS`, and the number of steps seen.
        self._step_seconds, self._input_share, self._num_steps = 0.0, 0.0, 0

    def say(self, text: str) -> None:
        """Print text after the time of day, above a live bar."""
        self.write(f"{time.strftime('%H:%M:%S')}  {text}")

    def write(self, text: str) -> None:
        """Print text as it is; long lines are not wrapped, so that a pipe gets them whole."""
        self.console.print(Text(text), soft_wrap=True)

    @contextlib.contextmanager
    def activity(self, description: str, at_once: bool = True) -> Iterator[None]:
        """Show what the run is doing in the block: "evaluating", and every 10 s "evaluating, 20 s so far".

        A live bar shows this in its line of numbers, so that the terminal does not scroll. Without `at_once` nothing
        is shown until the block has taken 10 s.
        """
        if self.console.quiet:
            yield
            return
        last_line = "" if self._bar is None else self._bar.line.plain
        begin, ended = time.monotonic(), threading.Event()

        def repeat() -> None:
            while not ended.wait(_REPEAT_SECONDS):
                self._show(f"{description}, {time.monotonic() - begin:.0f} s so far")

        if at_once:
            self._show(description)
        # A thread, because the block may spend this time in one call, such as the compilation of a program.
        thread = threading.Thread(target=repeat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            # Wait for the thread, or it could write over the line that is restored below.
            thread.join()
            if self._bar is not None:
                self._bar.line.plain = last_line

    def _show(self, text: str) -> None:
        """Print text, or put it into the line below the bar."""
        # Read once: the run's end removes the bar while the thread of an activity may be here.
        if (bar := self._bar) is None:
            self.say(text)
        else:
            bar.line.plain = text
            bar.refresh()

    def on_start(self, trainer: Run, metrics: Mapping[str, float]) -> None:
        """Print the number of parameters, strategy, devices and memory, and start the bar in a terminal."""
        step = trainer.step
        num_params = sum(math.prod(leaf.shape) for leaf in step.layout.leaves)
        num_bytes, source = trainer.memory
        memory = f"{size(num_bytes)} a device ({_MEMORY_SOURCES[source]})"
        self.say(f"{num_params:,} parameters under {resolved_strategy(step)} on {devices_text(step.mesh)}, {memory}")
        # A text from `_mfu` says why the MFU is not known. The time does not matter here.
        if isinstance(reason := _mfu(trainer, 1.0), str):
            self.say(f"MFU is not shown: {reason}")
        if metrics["step"]:
            self.say(f"resumed after step {metrics['step']}")
        if self.console.is_terminal and not self.console.quiet:
            self._bar = _Bar(self.console)
            self._bar.begin(trainer.number, trainer.loop.steps)

    def on_step(self, trainer: Run, metrics: Mapping[str, float]) -> None:
        """Move the bar, or print a line at intervals."""
        number = int(metrics["step"])
        self._num_steps += 1
        # The mean of all steps at first, then an exponential average.
        self._step_seconds += (metrics["seconds"] - self._step_seconds) / min(self._num_steps, _SMOOTHING_STEPS)
        self._input_share += (metrics["input_share"] - self._input_share) / min(self._num_steps, _SMOOTHING_STEPS)
        if self._bar is not None:
            self._bar.move(number, self._line(trainer, metrics))
            return
        # Without a bar: some twenty lines in a run, and one each for the first and the last step.
        steps = trainer.loop.steps
        if number % (trainer.loop.print_every or max(1, steps // 20)) == 0 or number in (1, steps):
            self.say(f"step {number:{len(str(steps))}}/{steps}  {self._line(trainer, metrics)}")

    def on_evaluate(self, trainer: Run, metrics: Mapping[str, float]) -> None:
        """Print the held-out metrics: the loss first, and of the experts' loads the smallest and the largest."""
        units, parts = trainer.units, []
        # A mixture may have hundreds of experts: two loads stand for all.
        load_names = loads(metrics)
        for name, value in metrics.items():
            if name == "held_out_loss":
                parts.insert(0, f"held out {value * units.factor:.4f} {units.loss}")
            elif name != "step" and name not in load_names:
                parts.append(f"{name.removeprefix('held_out_').replace('_', ' ')} {value:.4f}")
        if expert_loads := [metrics[name] for name in load_names]:
            parts.append(f"load {min(expert_loads):.2f} to {max(expert_loads):.2f}")
        sample = f"  (of {n} {'batch' if n == 1 else 'batches'})" if (n := trainer.loop.evaluate_batches) else ""
        self.say(f"step {int(metrics['step']):{len(str(trainer.loop.steps))}}  {'  '.join(parts)}{sample}")

    def on_end(self, trainer: Run, metrics: Mapping[str, float]) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _line(self, trainer: Run, metrics: Mapping[str, float]) -> str:
        """Return the numbers of a step, as one line."""
        units = trainer.units
        parts = [
            f"{metrics['loss'] * units.factor:.3f} {units.loss}",
            f"{trainer.rows * units.per_row / self._step_seconds:,.0f} {units.rows}/s",
            f"{1e3 * self._step_seconds:.0f} ms/step"
            if self._step_seconds >= 0.01
            else f"{1e3 * self._step_seconds:.2f} ms/step",
        ]
        num_bytes, source = trainer.memory
        # A printed line repeats only a peak, which may grow; the other sources do not change during a run.
        parts += [f"{size(num_bytes)} {source}"] if self._bar is not None or source == "peak" else []
        parts += [f"input {self._input_share:.0%}"] if self._input_share >= _SLOW_INPUT else []
        mfu = _mfu(trainer, self._step_seconds)
        return "  ".join([*parts, *([f"MFU {mfu:.1%}"] if isinstance(mfu, float) else [])])


def _mfu(trainer: Run, seconds: float) -> float | str | None:
    """Return the MFU of a step that takes `seconds`, or why it is not known; None on CPUs, where nothing is shown."""
    device, count = trainer.step.mesh.devices.flat[0], trainer.step.mesh.size
    # The peak of simulated devices would mean nothing.
    if device.platform == "cpu":
        return None
    if trainer.units.flops is None:
        return "the model's floating-point operations are not known; pass Units(flops=...)"
    peak = peak_flops(device.device_kind, trainer.step.strategy.precision)
    if peak is None:
        return f"the peak of {device.device_kind!r} is not known"
    return trainer.units.flops / (seconds * count * peak)


class _Bar(rich.Progress):
    """A bar, and below it a line of numbers that is cut at the width of the terminal."""

    def __init__(self, console: Console):
        self.line = Text("the first step runs", style="dim", no_wrap=True, overflow="ellipsis")
        columns = (rich.TextColumn("step"), rich.MofNCompleteColumn(), rich.BarColumn(bar_width=None))
        super().__init__(*columns, rich.TimeRemainingColumn(), console=console, transient=True, refresh_per_second=4)

    def get_renderables(self) -> Iterable[RenderableType]:
        """Yield the bar, and the line below it."""
        yield from super().get_renderables()
        yield self.line

    def begin(self, start: int, steps: int) -> None:
        """Show the bar at step `start` of `steps`."""
        self.add_task("", total=steps, completed=start)
        self.start()

    def move(self, number: int, line: str) -> None:
        """Move the bar to step `number`, with `line` below it."""
        self.line.plain = line
        for task in self.task_ids:
            self.update(task, completed=number)
