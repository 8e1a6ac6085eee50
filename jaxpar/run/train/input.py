"""The input of a run: batches on their devices, the time spent waiting for them, and the programs that they need.

XLA compiles one program for each set of shapes and dtypes, so `Input` records these signatures and explains why a step
is compiled again.
"""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np

from ...data.prefetch import Ahead
from ...data.streams import Fitting, Stream
from ...hosts import consistency
from ...make import TrainStep
from ...model.batches import rows_of
from ...model.paths import name_of
from ...step.core import Step


class Input:
    """The batches of a run, in order: taken from a `Stream`, padded if needed (`Fitting`), and put on their devices.

    Call `first_batch`, then `start` with that batch, then `next_batch` for each later one.

    Args:
      step: the step that trains on the batches.
      batches: the source of the batches.
      prefetch: number of batches that a thread (`Ahead`) reads ahead while steps run; 0 reads a batch on demand.

    Attributes:
      rows: rows of the batch that `recompile_reason` saw last.
      waited: seconds for which the devices, done with their step, may have waited for the last batch; 0 if the batch
        was ready before they were done.
      signatures: the shapes and dtypes for which a program was compiled, each as {path of an array: "dtype[shape]"}.
    """

    def __init__(self, step: TrainStep, batches: Stream, prefetch: int):
        self._step, self._prefetch, self._fit = step, prefetch, Fitting(step.check_weighs)
        self._batches: Stream | Ahead = batches
        self.rows, self.waited = 0, 0.0
        self.signatures: list[dict[str, str]] = []
        self._rows_by_signature: dict[Any, int] = {}

    def first_batch(self, latest: int | None) -> Any:
        """Return the first batch, on its devices.

        Args:
          latest: the step of the checkpoint that this process resumes from, or None. All processes compare theirs.

        Raises:
          ValueError: in every process, if some of them resume from another checkpoint.
        """
        consistency.compare("where to begin", {"the last checkpoint": latest})
        # Batches that are read ahead are committed to their devices. The first one must be as well, or the step would
        # be compiled twice.
        put = self._step.send if self._prefetch else self._step.place
        return put(self._fit(next(self._batches), self._step.blocks))

    def start(self, first: Any) -> None:
        """Compare the first batch and the step's program among processes, and start to read ahead.

        Raises:
          ValueError: in every process, if these differ between processes.
        """
        self._step.compare(first)
        # The first batch may be full and a later one filled up: check now that the loss weighs rows by the mask.
        if isinstance(self._batches, Stream) and self._batches.fills:
            self._step.check_weighs(first)
        if self._prefetch:
            send = lambda batch: self._step.send(self._fit(batch, self._step.blocks))
            self._batches = Ahead(self._batches, send, self._prefetch)
        self.recompile_reason(first)

    def next_batch(self, step_result: Any) -> Any:
        """Return the next batch, on its devices, and set `waited`.

        If the array that the running step computes is ready by the time the batch is here, the devices may have been
        idle.
        """
        begin = time.perf_counter()
        batch = next(self._batches)
        # Without a thread the batch is put on its devices here, while the step still runs.
        if not self._prefetch:
            batch = self._step.place(self._fit(batch, self._step.blocks))
        # If the step still runs, the devices had work all the time.
        self.waited = time.perf_counter() - begin if step_result.is_ready() else 0.0
        return batch

    def position(self) -> dict[str, Any]:
        """Return the run's position in its data: see `Stream.state`."""
        return self._batches.state()

    def close(self) -> None:
        """End the thread that reads ahead."""
        if isinstance(self._batches, Ahead):
            self._batches.close()

    def recompile_reason(self, batch: Any) -> str:
        """Return why the step is compiled again for a batch; "" for the first batch and for known shapes and dtypes."""
        leaves, tree = jax.tree.flatten(batch)
        dtypes = [str(getattr(x, "dtype", type(x).__name__)) for x in leaves]
        key = tree, *((np.shape(x), dtype) for x, dtype in zip(leaves, dtypes, strict=True))
        last_rows = self.rows
        if key in self._rows_by_signature:  # the common case, for which no paths are spelt out
            self.rows = self._rows_by_signature[key]
            return ""
        self.rows = self._rows_by_signature[key] = rows_of(batch)
        paths = [name_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(batch)]
        signature = {path: f"{dtype}{list(np.shape(x))}" for path, x, dtype in zip(paths, leaves, dtypes, strict=True)}
        self.signatures.append(signature)
        if len(self.signatures) == 1:
            return ""
        # Another number of rows changes the shapes of all leaves with rows, so it explains them.
        if last_rows != self.rows:
            return f"compiled again: rows {self.rows}, {last_rows} before (program {len(self.signatures)})"
        earlier = self.signatures[-2]
        changed = [
            f"{path} {signature[path]}, {earlier.get(path, 'absent')} before"
            for path in signature
            if signature[path] != earlier.get(path)
        ]
        absent = [f"{path} is absent, {earlier[path]} before" for path in earlier if path not in signature]
        return f"compiled again: {'; '.join([*changed, *absent][:3])} (program {len(self.signatures)})"


def check_row_count(rows: int, step: Step) -> None:
    """Raise ValueError if `rows` rows cannot be split evenly over the step's replicas and microbatches."""
    replicas, microbatches = step.replicas, step.strategy.microbatches
    if remainder := rows % (blocks := replicas * microbatches):
        fewer_rows = f"{rows - remainder} or " if rows > blocks else ""
        raise ValueError(
            f"rows={rows} do not split over {replicas} replicas x {microbatches} microbatches: "
            f"use rows={fewer_rows}{rows - remainder + blocks}, or any multiple of {blocks}"
        )
