"""Batches of a data set whose rows can be read by index: arrays, lists, data sets of grain, torch and Hugging Face.

`Rows` wraps the data, a `Sampler` says which rows the next batch has, and `RowBatches` reads them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from ..backend.counts import is_count
from ..model.contents import add_array, check_mapped
from ..model.paths import name_of
from .sampler import Position, Sampler

_FINGERPRINT_ROWS = 256  # rows that the fingerprint reads of a data set that is not arrays


class Rows:
    """A data set whose rows can be read by index, as batches for a `Trainer` or your own loop.

    Args:
      data: a pytree of arrays [n, ...], which is a dict or tuple (memory-mapped arrays are read on demand); or anything
        with `len(data)` and `data[i]`, a row as a pytree: a list, or a data set of grain, torch or Hugging Face's
        `datasets`. Rows of text must have one length.
      last: see `Sampler`. "mask" needs rows that are dicts: batches get a "mask" [B], by which the loss must weigh
        (`jp.Mean`). If rows have a "mask" already, the two are multiplied.
      shuffle: see `Sampler`.
      name: the data set's name in descriptions and errors.

    Raises:
      ValueError: the data have no such form, or no row.
    """

    def __init__(self, data: Any, *, last: str = "mask", shuffle: bool = True, name: str = "rows"):
        self.data, self.last, self.shuffle, self.name = data, last, shuffle, name
        # A list is a sequence of rows here, and not a tree of arrays as it is for JAX.
        self.columns = isinstance(data, dict | tuple | np.ndarray | jax.Array)
        self.size = _count(data) if self.columns else _length(data)
        # Only to check `last` and the size now, not when the first batch is read.
        Sampler(self.size, last, shuffle)

    @property
    def description(self) -> str:
        """One line for people: the name and the number of rows."""
        return f"{self.name}: {self.size:,} rows"

    @property
    def fingerprint(self) -> str:
        """The number of rows and a checksum of the contents, wherever they are stored.

        It covers all values of arrays, and up to 256 evenly spaced rows of other data sets.
        """
        digest = hashlib.sha256()
        # Rounding may give an index twice; `unique` also sorts.
        sample = np.unique(np.linspace(0, self.size - 1, min(self.size, _FINGERPRINT_ROWS)).astype(int))
        for path, array in jax.tree_util.tree_leaves_with_path(self.data if self.columns else self._read(sample)):
            digest.update(name_of(path).encode())
            add_array(digest, np.asarray(array))
        return f"{self.size:,} rows, sha256 {digest.hexdigest()[:16]}"

    def batches(self, rows: int, seed: int, start: int = 0, epochs: int | None = None) -> RowBatches:
        """Return global batches of `rows` rows, from batch `start` on; see `RowBatches`.

        Args:
          rows: the number of rows in a batch.
          seed: determines the orders of the epochs.
          start: the number of the first batch, counted from the beginning of the first epoch.
          epochs: the number of epochs, counted from the first, after which the batches end, also after `restore`. None
            means endless batches: epochs follow each other, and a loop over them must end itself.

        Raises:
          ValueError: no batch can have `rows` rows, or `epochs` is no whole number from 1.
        """
        if epochs is not None and not is_count(epochs):
            raise ValueError(f"epochs={epochs!r}: use a whole number from 1, or None for batches that never end")
        sampler = Sampler(self.size, self.last, self.shuffle, seed)
        return RowBatches(self, sampler, rows, sampler.after(start, rows), epochs)

    def once(self, rows: int) -> Iterator[Any]:
        """Yield all rows once, in order, for evaluation: batches of `rows` with a "mask" [B], the last filled up."""
        sampler, position = Sampler(self.size, shuffle=False), Position()
        # After the last batch of the data, the position is at the beginning of epoch 1.
        while position.epoch == 0:
            indices, mask, position = sampler.batch(position, rows)
            yield _add_mask(self._read(indices), mask)

    def _read(self, indices: np.ndarray) -> Any:
        """Read the rows with these indices, [B], as one batch."""
        if self.columns:
            for array in jax.tree.leaves(self.data):
                check_mapped(array)
            return jax.tree.map(lambda array: np.asarray(array[indices]), self.data)
        index_list = indices.tolist()
        read_rows = getattr(self.data, "__getitems__", None)  # of torch and Hugging Face; faster
        rows = read_rows(index_list) if read_rows is not None else [self.data[i] for i in index_list]
        try:
            stack = lambda *values: np.stack([np.asarray(value) for value in values])
            return jax.tree.map(stack, *rows, is_leaf=lambda x: isinstance(x, list))  # a list is a vector of numbers
        except (ValueError, TypeError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(
                f"{len(index_list)} rows of {self.name} make no batch ({reason}); rows need the same keys and shapes: "
                "pad or cut them to one length"
            ) from error


class RowBatches:
    """An iterator of batches whose position is two integers, the same on every host.

    Attributes:
      part: (index, count) of the part of every batch that this host reads, for a step with `rows="host"`; see
        `jaxpar.make.TrainStep.part`. (0, 1) reads whole batches.
      fills: whether batches may contain rows whose mask is 0.
      epochs: the number of epochs before the batches end; None if they never do.
    """

    def __init__(self, source: Rows, sampler: Sampler, rows: int, position: Position, epochs: int | None = None):
        sampler.check(rows)
        self.epochs = epochs
        self.source, self.sampler, self.rows, self.position, self.part = source, sampler, rows, position, (0, 1)
        self.fills = sampler.last == "mask" and sampler.size % rows > 0
        # Read one row now: otherwise a missing place for the mask would be found only at the end of the first epoch.
        if self.fills and not isinstance(first_batch := source._read(np.arange(1)), dict):
            raise ValueError(
                f"{sampler.size} rows in batches of {rows} leave a short one, and a {type(first_batch).__name__} has "
                "no place for its mask: use dicts, a number of rows that divides, or last='pad' or 'drop_last'"
            )

    def __iter__(self) -> RowBatches:
        return self

    def __next__(self) -> Any:
        """Read the next batch, or this host's part of it; raise StopIteration after the last epoch."""
        if self.epochs is not None and self.sampler.begin(self.position, self.rows).epoch >= self.epochs:
            raise StopIteration
        indices, mask, next_position = self.sampler.batch(self.position, self.rows)
        index, count = self.part
        # Hosts read equal parts, in the order of their indices.
        if self.rows % count:
            raise ValueError(
                f"batches of {self.rows} rows do not divide among {count} hosts; use a multiple of {count}"
            )
        local_rows = slice(index * self.rows // count, (index + 1) * self.rows // count)
        batch = self.source._read(indices[local_rows])
        # Full batches get a mask too, so that all batches have one structure and the step compiles once.
        if self.sampler.last == "mask" and (isinstance(batch, dict) or not mask.all()):
            batch = _add_mask(batch, mask[local_rows])
        # Only now: after an error the position is still that of the batch that could not be read.
        self.position = next_position
        return batch

    def state(self) -> dict[str, int]:
        """Return the position of the next batch, as JSON."""
        return self.position._asdict()

    def restore(self, state: dict[str, int]) -> None:
        """Continue from a position that may come from a run with another batch size, other hosts or devices."""
        position = Position.read(state)
        if position.row >= self.sampler.size:
            raise ValueError(
                f"row {position.row} of an epoch is beyond {self.source.description}; resume with the same data"
            )
        self.position = position


def _add_mask(batch: Any, mask: np.ndarray) -> Any:
    """Return the batch with a "mask" [B], multiplied by the mask that its rows may have, [B, ...]."""
    if not isinstance(batch, dict):
        raise ValueError(
            f"the last batch of an epoch has {int(mask.sum())} rows of {mask.size}, and a {type(batch).__name__} has "
            "no place for the mask: use dicts, or last='pad' or 'drop_last'"
        )
    if "mask" not in batch:
        return {**batch, "mask": mask}
    row_mask = batch["mask"]
    return {**batch, "mask": row_mask * mask.reshape(-1, *[1] * (row_mask.ndim - 1)).astype(row_mask.dtype)}


def _count(data: Any) -> int:
    """Return the number of rows in a pytree of arrays; raise ValueError if they differ."""
    shapes = {name_of(path) or "data": np.shape(x) for path, x in jax.tree_util.tree_leaves_with_path(data)}
    if () in shapes.values() or len({shape[0] for shape in shapes.values()}) != 1:
        raise ValueError(f"arrays of a data set need the same number of rows on dim 0, got {shapes}; cut them alike")
    return next(iter(shapes.values()))[0]


def _length(data: Any) -> int:
    """Return the number of rows in a data set with `len(data)` and `data[i]`."""
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise ValueError(
            f"the data set is a {type(data).__name__}; pass arrays [n, ...] in a dict or tuple, or an "
            "object with len(data) and data[i]"
        )
    return len(data)
