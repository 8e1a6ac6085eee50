"""A hook that profiles a few steps: a trace of the programs on every device, and a profile of their memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax


class Profile:
    """A hook that writes a trace of some steps, and XLA's memory profile after them, into the run's folder.

    It skips the first two steps if the run is long enough. Each process writes below `profile/rank-0` and so on:
    `plugins/profile/TIME/*.xplane.pb`, which `jax.profiler.ProfileData`, TensorBoard and xprof read,
    `*.trace.json.gz` for https://ui.perfetto.dev, and `memory.prof` for pprof. The hook waits for the devices before
    the first traced step and after the last one, but not between steps.
    """

    def __init__(self, steps: int):
        if steps < 1:
            raise ValueError(f"profile={steps} traces no step; use 1 or more")
        self.steps = steps
        self._first_traced = 0  # number of the first traced step while the trace runs, else 0
        self._start_after: int | None = None  # the trace starts after this step; None once it has started

    def on_start(self, trainer: Any, metrics: dict[str, float]) -> None:
        """Start the trace at once if the run is too short to skip steps."""
        if trainer.loop.out is None:
            raise ValueError(f"profile={self.steps} needs a folder to write to; give the run's folder as out=")
        # Two steps to skip and then the steps to trace must fit into the run.
        if trainer.loop.steps < trainer.number + 2 + self.steps:
            self._start(trainer)
        else:
            self._start_after = trainer.number + 2

    def on_step(self, trainer: Any, metrics: dict[str, float]) -> None:
        """Start the trace before the third step, and stop it after the last step to trace."""
        # Metrics come one step late: step `trainer.number` is running.
        if self._first_traced and trainer.number >= self._first_traced + self.steps - 1:
            self._stop(trainer)
        elif trainer.number == self._start_after:
            self._start(trainer)

    def on_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        """Stop the trace if the run ends before it."""
        if self._first_traced:
            self._stop(trainer)

    def _start(self, trainer: Any) -> None:
        jax.block_until_ready(trainer.state)  # else the trace would begin within an earlier step
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # calls of Python functions fill the trace, and slow the steps down
        jax.profiler.start_trace(self._folder(trainer), profiler_options=options)
        self._first_traced, self._start_after = trainer.number + 1, None

    def _stop(self, trainer: Any) -> None:
        # The last traced step still runs: without waiting, the trace would end within it.
        jax.block_until_ready(trainer.state)
        jax.profiler.stop_trace()
        folder, first, self._first_traced = self._folder(trainer), self._first_traced, 0
        jax.profiler.save_device_memory_profile(str(folder / "memory.prof"))
        trainer.progress.say(f"steps {first} to {trainer.number} are traced in {trainer.loop.out / _rank_folder()}")

    def _folder(self, trainer: Any) -> Path:
        return trainer.files / _rank_folder()


def _rank_folder() -> str:
    """Return the folder of this process, relative to the run's folder."""
    return f"profile/rank-{jax.process_index()}"
