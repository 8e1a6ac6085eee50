"""Rows of a data set, by index, as batches: arrays, lists, grain's and torch's data sets, Hugging Face's."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from ..model.contents import add_array, check_mapped
from ..model.paths import name_of
from .sampler import Position, Sampler

_LOOKED_AT = 256  # rows of a data set that is not arrays, for its fingerprint


class Rows:
    """A data set whose rows can be read by index, as batches for a `Trainer` or one's own loop.

    Args:
      data: a pytree of arrays [n, ...] (a dict or tuple; memory-mapped ones are read as they are needed); or anything
        with `len(data)` and `data[i]`, a row as a pytree: a list, a grain or torch data set, one of Hugging Face's
        `datasets`. Rows of text must have one length.
      last, shuffle: see `Sampler`. With "mask" rows must be dicts: batches get a "mask" [B], by which the loss must
        weigh (`jp.Mean`); if rows have a "mask" of their own, its product with that.
      name: for people.

    Raises ValueError where the data are no such thing or hold no row.
    """

    def __init__(self, data: Any, *, last: str = "mask", shuffle: bool = True, name: str = "rows"):
        self.data, self.last, self.shuffle, self.name = data, last, shuffle, name
        self.columns = isinstance(data, dict | tuple | np.ndarray | jax.Array)
        self.size = _count(data) if self.columns else _length(data)
        Sampler(self.size, last, shuffle)

    @property
    def description(self) -> str:
        """One line for people."""
        return f"{self.name}: {self.size:,} rows"

    @property
    def fingerprint(self) -> str:
        """What the data are, wherever they lie: of arrays a checksum of all values; of other data sets their length,
        and a checksum of up to 256 rows that are spread evenly.
        """
        digest = hashlib.sha256()
        looked = np.unique(np.linspace(0, self.size - 1, min(self.size, _LOOKED_AT)).astype(int))
        for path, x in jax.tree_util.tree_leaves_with_path(self.data if self.columns else self._read(looked)):
            digest.update(name_of(path).encode())
            add_array(digest, np.asarray(x))
        return f"{self.size:,} rows, sha256 {digest.hexdigest()[:16]}"

    def batches(self, rows: int, seed: int, start: int = 0) -> RowBatches:
        """Endless global batches of `rows` from batch `start` on: epoch follows epoch, and a loop over them must end by
        itself (`itertools.islice`). See `RowBatches`; `once` ends.
        """
        sampler = Sampler(self.size, self.last, self.shuffle, seed)
        return RowBatches(self, sampler, rows, sampler.after(start, rows))

    def once(self, rows: int) -> Iterator[Any]:
        """All rows once, in order, to evaluate on: batches of `rows`, the last filled up, with a "mask" [B]."""
        sampler, at = Sampler(self.size, shuffle=False), Position()
        while at.epoch == 0:
            taken, mask, at = sampler.batch(at, rows)
            yield _masked(self._read(taken), mask)

    def _read(self, taken: np.ndarray) -> Any:
        """Rows of the data as one batch."""
        if self.columns:
            for x in jax.tree.leaves(self.data):
                check_mapped(x)
            return jax.tree.map(lambda x: np.asarray(x[taken]), self.data)
        indices = taken.tolist()
        several = getattr(self.data, "__getitems__", None)  # torch's and Hugging Face's, faster than one by one
        found = several(indices) if several is not None else [self.data[i] for i in indices]
        try:
            stack = lambda *row: np.stack([np.asarray(x) for x in row])
            return jax.tree.map(stack, *found, is_leaf=lambda x: isinstance(x, list))  # of numbers
        except (ValueError, TypeError) as error:
            says = " ".join(str(error).split())
            raise ValueError(
                f"{len(indices)} rows of {self.name} make no batch ({says}); rows need the same keys and shapes: pad "
                "or cut them to one length"
            ) from error


class RowBatches:
    """Endless batches of rows, an iterator whose position is two integers, the same on every host.

    `part` is (index, count), for a step with `rows="host"`: of every batch it yields that part alone
    (`jaxpar.make.TrainStep.part` has it).
    """

    def __init__(self, source: Rows, sampler: Sampler, rows: int, at: Position):
        sampler.check(rows)
        self.source, self.sampler, self.rows, self.at, self.part = source, sampler, rows, at, (0, 1)
        self.fills = sampler.last == "mask" and sampler.size % rows > 0
        if self.fills and not isinstance(first := source._read(np.arange(1)), dict):
            raise ValueError(
                f"{sampler.size} rows in batches of {rows} leave a short one, and a {type(first).__name__} has no "
                "place for its mask: use dicts, a number of rows that divides, or last='pad' or 'drop_last'"
            )

    def __iter__(self) -> RowBatches:
        return self

    def __next__(self) -> Any:
        """The next batch."""
        taken, mask, after = self.sampler.batch(self.at, self.rows)
        index, count = self.part
        if self.rows % count:
            raise ValueError(
                f"batches of {self.rows} rows do not divide among {count} hosts; use a multiple of {count}"
            )
        mine = slice(index * self.rows // count, (index + 1) * self.rows // count)
        batch = self.source._read(taken[mine])
        if self.sampler.last == "mask" and (isinstance(batch, dict) or not mask.all()):
            batch = _masked(batch, mask[mine])
        self.at = after
        return batch

    def state(self) -> dict[str, int]:
        """The position of the next batch, as JSON."""
        return self.at._asdict()

    def restore(self, state: dict[str, int]) -> None:
        """Go on from a position, which may have been reached with another number of rows, hosts or devices."""
        at = Position.read(state)
        if at.row >= self.sampler.size:
            raise ValueError(f"row {at.row} of an epoch is beyond {self.source.description}; resume with the same data")
        self.at = at


def _masked(batch: Any, mask: np.ndarray) -> Any:
    if not isinstance(batch, dict):
        raise ValueError(
            f"the last batch of an epoch has {int(mask.sum())} rows of {mask.size}, and a {type(batch).__name__} has "
            "no place for the mask: use dicts, or last='pad' or 'drop_last'"
        )
    if "mask" not in batch:
        return {**batch, "mask": mask}
    own = batch["mask"]
    return {**batch, "mask": own * mask.reshape(-1, *[1] * (own.ndim - 1)).astype(own.dtype)}


def _count(data: Any) -> int:
    """Rows of a pytree of arrays."""
    sizes = {name_of(path) or "data": np.shape(x) for path, x in jax.tree_util.tree_leaves_with_path(data)}
    if () in sizes.values() or len({shape[0] for shape in sizes.values()}) != 1:
        raise ValueError(f"arrays of a data set need the same number of rows on dim 0, got {sizes}")
    return next(iter(sizes.values()))[0]


def _length(data: Any) -> int:
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise ValueError(
            f"a data set of rows is a {type(data).__name__}; pass arrays [n, ...] in a dict or tuple, or what has "
            "len(data) and data[i]"
        )
    return len(data)
