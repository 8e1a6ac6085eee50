"""What a run shows while it trains: a live bar in a terminal, lines at intervals elsewhere."""

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
from ...checkpoint.about import exact
from ...hardware.devices import peak_flops
from .loop import Run
from .picture import loads

_MEMORY = {
    "peak": "peak so far",
    "compiled": "arguments and temporaries, as compiled",
    "state": "parameters, gradients and optimizer state",
}
_SLOW_INPUT = 0.1  # share of a step from which its wait for data is shown
_SMOOTH = 10  # steps that the step time shown is a mean of; single steps jump
_REPEATED = 10.0  # seconds after which a run says again what it is doing


def discard_output() -> None:
    """Sends standard output nowhere from here on, with what is still to be flushed: at its end, where Python does it,
    nothing could answer to a pipe that is closed.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Output:
    """Standard output, whatever that is when something is written. Where it is a terminal that is gone, a run ends as
    at SIGHUP, which may come later than the first line that fails, with a checkpoint.
    """

    def write(self, text: str) -> int:
        try:
            return sys.stdout.write(text)
        except OSError as error:
            self._ends(error)
            return len(text)

    def flush(self) -> None:
        try:
            sys.stdout.flush()
        except OSError as error:
            self._ends(error)

    def _ends(self, error: OSError) -> None:
        if error.errno != errno.EIO:
            raise error
        discard_output()
        signal.raise_signal(signal.SIGHUP)

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)


class _Console(Console):
    """Where nobody reads any more (`| head`) a run ends as at Ctrl-C, with a checkpoint; rich would end the process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        discard_output()
        signal.raise_signal(signal.SIGINT)


class Progress:
    """A hook that shows loss, speed, step time, memory per device and, on GPUs, MFU.

    MFU is the share of the devices' peak at which the step's own floating-point operations run (PaLM, Chowdhery et al.
    2022, appendix B): recomputation does not count.

    Args:
      quiet: show nothing.
      console: where to; standard output if None.
    """

    def __init__(self, quiet: bool = False, console: Console | None = None):
        self.console = console or _Console(file=cast(IO[str], _Output()), highlight=False, quiet=quiet)
        self._bar: _Bar | None = None
        self._seconds, self._input, self._steps = 0.0, 0.0, 0
        self._values: dict[str, float] = {}

    def say(self, text: str) -> None:
        """Prints, above a live bar; in a pipe, lines stay as long as they are."""
        self.console.print(Text(text), soft_wrap=True)

    @contextlib.contextmanager
    def doing(self, what: str, at_once: bool = True) -> Iterator[None]:
        """Says what the run is doing while the block runs: "evaluating", and every 10 s "evaluating, 20 s so far".

        A live bar shows this in its line of numbers, so that the terminal does not scroll.

        Args:
          what: as people read it.
          at_once: say it when the block begins, and not only if the block takes 10 s.
        """
        if self.console.quiet:
            yield
            return
        before = "" if self._bar is None else self._bar.line.plain
        begin, ended = time.monotonic(), threading.Event()

        def repeat() -> None:
            while not ended.wait(_REPEATED):
                self._show(f"{what}, {time.monotonic() - begin:.0f} s so far")

        if at_once:
            self._show(what)
        # A thread, because whatever takes this long is one call, such as the compilation of a program.
        thread = threading.Thread(target=repeat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            if self._bar is not None:
                self._bar.line.plain = before

    def _show(self, text: str) -> None:
        if self._bar is None:
            self.say(text)
        else:
            self._bar.line.plain = text
            self._bar.refresh()

    def on_start(self, trainer: Run, metrics: Mapping[str, float]) -> None:
        """Says what trains where, and starts the bar in a terminal."""
        step = trainer.step
        parameters = sum(math.prod(leaf.shape) for leaf in step.layout.leaves)
        held, what = trainer.memory
        devices = f"{step.mesh.size} x {step.mesh.devices.flat[0].device_kind}"
        self.say(f"{parameters:,} parameters under {exact(step)} on {devices}, {size(held)} a device ({_MEMORY[what]})")
        if isinstance(why := _mfu(trainer, 1.0), str):
            self.say(f"MFU is not shown: {why}")
        if metrics["step"]:
            self.say(f"resumed after step {metrics['step']}")
        if self.console.is_terminal and not self.console.quiet:
            self._bar = _Bar(self.console)
            self._bar.begin(trainer.number, trainer.loop.steps)

    def on_step(self, trainer: Run, metrics: Mapping[str, float]) -> None:
        """Moves the bar, or prints a line at intervals."""
        number = int(metrics["step"])
        self._steps += 1
        self._seconds += (metrics["seconds"] - self._seconds) / min(self._steps, _SMOOTH)
        self._input += (metrics["input_share"] - self._input) / min(self._steps, _SMOOTH)
        if self._bar is not None:
            self._bar.move(number, self._line(trainer, metrics))
            return
        steps = trainer.loop.steps
        if number % (trainer.loop.print_every or max(1, steps // 20)) == 0 or number in (1, steps):
            self.say(f"step {number:{len(str(steps))}}/{steps}  {self._line(trainer, metrics)}")

    def on_evaluate(self, trainer: Run, metrics: Mapping[str, float]) -> None:
        """Prints the held-out metrics."""
        units, parts = trainer.units, []
        experts = loads(metrics)
        for name, value in metrics.items():
            if name == "held_out_loss":
                parts.insert(0, f"held out {value * units.factor:.4f} {units.loss}")
            elif name != "step" and name not in experts:
                parts.append(f"{name.removeprefix('held_out_').replace('_', ' ')} {value:.4f}")
        if found := [metrics[name] for name in experts]:
            parts.append(f"load {min(found):.2f} to {max(found):.2f}")
        some = f"  (of {n} {'batch' if n == 1 else 'batches'})" if (n := trainer.loop.evaluate_batches) else ""
        self.say(f"step {int(metrics['step']):{len(str(trainer.loop.steps))}}  {'  '.join(parts)}{some}")

    def on_end(self, trainer: Run, metrics: Mapping[str, float]) -> None:
        """Takes the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _line(self, trainer: Run, metrics: Mapping[str, float]) -> str:
        units = trainer.units
        parts = [
            f"{metrics['loss'] * units.factor:.3f} {units.loss}",
            f"{trainer.rows * units.per_row / self._seconds:,.0f} {units.rows}/s",
            f"{1e3 * self._seconds:.0f} ms/step" if self._seconds >= 0.01 else f"{1e3 * self._seconds:.2f} ms/step",
        ]
        held, what = trainer.memory
        parts += [f"{size(held)} {what}"] if self._bar is not None or what == "peak" else []
        parts += [f"input {self._input:.0%}"] if self._input >= _SLOW_INPUT else []
        share = _mfu(trainer, self._seconds)
        return "  ".join([*parts, *([f"MFU {share:.1%}"] if isinstance(share, float) else [])])


def _mfu(trainer: Run, seconds: float) -> float | str | None:
    """The MFU of a step of so many seconds; why there is none; or None on devices that nobody asks it of."""
    device, count = trainer.step.mesh.devices.flat[0], trainer.step.mesh.size
    if device.platform == "cpu":
        return None
    if trainer.units.flops is None:
        return "the model's floating-point operations are not known; pass Units(flops=...)"
    peak = peak_flops(device.device_kind, trainer.step.strategy.precision)
    if peak is None:
        return f"the peak of {device.device_kind!r} is not known"
    return trainer.units.flops / (seconds * count * peak)


class _Bar(rich.Progress):
    """A bar, and below it a line of numbers, cut where the terminal ends."""

    def __init__(self, console: Console):
        self.line = Text("the first step runs", style="dim", no_wrap=True, overflow="ellipsis")
        columns = (rich.TextColumn("step"), rich.MofNCompleteColumn(), rich.BarColumn(bar_width=None))
        super().__init__(*columns, rich.TimeRemainingColumn(), console=console, transient=True, refresh_per_second=4)

    def get_renderables(self) -> Iterable[RenderableType]:
        """The bar, and the line below it."""
        yield from super().get_renderables()
        yield self.line

    def begin(self, start: int, steps: int) -> None:
        """Appears."""
        self.add_task("", total=steps, completed=start)
        self.start()

    def move(self, number: int, line: str) -> None:
        """To step `number`."""
        self.line.plain = line
        for task in self.task_ids:
            self.update(task, completed=number)
