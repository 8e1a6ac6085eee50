"""A hook that looks closely at a few steps: a trace of what ran when, and what held memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax


class Profile:
    """Writes a trace of some steps, and XLA's own profile of memory after them, into the run's folder.

    The first two steps are passed over where the run is long enough. Below `profile/rank-0` and so on, one for each
    process: `plugins/profile/TIME/*.xplane.pb`, which `jax.profiler.ProfileData`, TensorBoard and xprof read,
    `*.trace.json.gz` for https://ui.perfetto.dev, and `memory.prof` for pprof. Devices are waited for before and after,
    not between.

    Args:
      steps: how many.
    """

    def __init__(self, steps: int):
        if steps < 1:
            raise ValueError(f"profile={steps}: trace one step or more")
        self.steps = steps
        self._first = 0  # the number of the first step that is traced; 0 before and after
        self._begins: int | None = None

    def on_start(self, trainer: Any, metrics: dict[str, float]) -> None:
        """Begins, where there are too few steps to pass some over."""
        if trainer.loop.out is None:
            raise ValueError(f"profile={self.steps} needs somewhere to write to: give the run's folder as out=")
        if trainer.loop.steps < trainer.number + 2 + self.steps:
            self._begin(trainer)
        else:
            self._begins = trainer.number + 2

    def on_step(self, trainer: Any, metrics: dict[str, float]) -> None:
        """Begins before the third step, and ends after the last that was asked for."""
        # Metrics come one step late: step `trainer.number` is running.
        if self._first and trainer.number >= self._first + self.steps - 1:
            self._end(trainer)
        elif trainer.number == self._begins:
            self._begin(trainer)

    def on_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        """Ends, where the run is shorter."""
        if self._first:
            self._end(trainer)

    def _begin(self, trainer: Any) -> None:
        jax.block_until_ready(trainer.state)
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # Python's own calls fill the trace, and slow the steps down
        jax.profiler.start_trace(self._folder(trainer), profiler_options=options)
        self._first, self._begins = trainer.number + 1, None

    def _end(self, trainer: Any) -> None:
        jax.block_until_ready(trainer.state)
        jax.profiler.stop_trace()
        folder, first, self._first = self._folder(trainer), self._first, 0
        jax.profiler.save_device_memory_profile(str(folder / "memory.prof"))
        trainer.progress.say(f"steps {first} to {trainer.number} are traced in {trainer.loop.out / _place()}")

    def _folder(self, trainer: Any) -> Path:
        return trainer.files / _place()


def _place() -> str:
    return f"profile/rank-{jax.process_index()}"
