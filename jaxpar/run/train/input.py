"""The batches of a run as its step takes them, how long it waits for them, and which of them need another program."""

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
    """The batches of a run, one after the other, from the first.

    Args:
      step: which takes them.
      batches: where they come from.
      prefetch: how many are read ahead, in a thread, and put on their devices; 0: each is read when it is asked for.

    Attributes:
      rows: of the batch that was looked at last.
      waited: seconds for which the devices, done with their step, may have waited for the last batch; 0 if it was
        there before they were done.
      kinds: shapes and dtypes of batches, by the paths of their arrays; each has a program of its own.
    """

    def __init__(self, step: TrainStep, batches: Stream, prefetch: int):
        self._step, self._prefetch, self._fit = step, prefetch, Fitting(step.check_weighs)
        self._batches: Stream | Ahead = batches
        self.rows, self.waited = 0, 0.0
        self.kinds: list[dict[str, str]] = []
        self._rows: dict[Any, int] = {}

    def first(self, latest: int | None) -> Any:
        """The first batch. Raises ValueError, in every process, where several go on from another checkpoint (`latest`,
        its step).
        """
        consistency.compare("where to begin", {"the last checkpoint": latest})
        # The batches read ahead lie on their devices. The first one does too, or the step would be compiled twice.
        put = self._step.send if self._prefetch else self._step.place
        return put(self._fit(next(self._batches), self._step.blocks))

    def begin(self, first: Any) -> None:
        """Compares the first batch and the step's program among processes; from then on others are read ahead. Raises
        ValueError, in every process, where any of them has another.
        """
        self._step.compare(first)
        if isinstance(self._batches, Stream) and self._batches.fills:
            self._step.check_weighs(first)
        if self._prefetch:
            send = lambda batch: self._step.send(self._fit(batch, self._step.blocks))
            self._batches = Ahead(self._batches, send, self._prefetch)
        self.look(first)

    def next(self, running: Any = None) -> Any:
        """The next batch; `running` is an array, a result of the step that runs meanwhile."""
        begin = time.perf_counter()
        batch = next(self._batches)
        if not self._prefetch:
            batch = self._step.place(self._fit(batch, self._step.blocks))
        done = running is not None and running.is_ready()
        self.waited = time.perf_counter() - begin if done else 0.0
        return batch

    def position(self) -> dict[str, Any]:
        """Where in its data the run is: see `Stream.state`."""
        return self._batches.state()

    def close(self) -> None:
        """Ends the thread that reads ahead."""
        if isinstance(self._batches, Ahead):
            self._batches.close()

    def look(self, batch: Any) -> str:
        """What is to be told of a batch: why the step is compiled for it, once it has been for another; else ""."""
        leaves, tree = jax.tree.flatten(batch)
        dtypes = [str(getattr(x, "dtype", type(x).__name__)) for x in leaves]
        key = tree, *((np.shape(x), dtype) for x, dtype in zip(leaves, dtypes, strict=True))
        before = self.rows
        if key in self._rows:  # in every step but few, which is why no path is spelt out
            self.rows = self._rows[key]
            return ""
        self.rows = self._rows[key] = rows_of(batch)
        paths = [name_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(batch)]
        kind = {path: f"{dtype}{list(np.shape(x))}" for path, x, dtype in zip(paths, leaves, dtypes, strict=True)}
        self.kinds.append(kind)
        if len(self.kinds) == 1:
            return ""
        if before != self.rows:
            return f"compiled again: rows {self.rows}, {before} before (program {len(self.kinds)})"
        old = self.kinds[-2]
        changed = [f"{x} {kind[x]}, {old.get(x, 'not there')} before" for x in kind if kind[x] != old.get(x)]
        gone = [f"{x} is not there, {old[x]} before" for x in old if x not in kind]
        return f"compiled again: {'; '.join([*changed, *gone][:3])} (program {len(self.kinds)})"


def check_row_count(rows: int, step: Step) -> None:
    """Raise ValueError where a batch of so many rows does not split over replicas and microbatches."""
    replicas, microbatches = step.replicas, step.strategy.microbatches
    if extra := rows % (blocks := replicas * microbatches):
        below = f"{rows - extra} or " if rows > blocks else ""
        raise ValueError(
            f"rows={rows} do not split over {replicas} replicas x {microbatches} microbatches: "
            f"use rows={below}{rows - extra + blocks}, or any multiple of {blocks}"
        )
