"""Which rows each batch holds, epoch after epoch, as torch's DistributedSampler assigns them; two integers of state.

    epoch's order    4 1 6 0 5 2 3        size 7, a permutation that (seed, epoch) alone gives
    batches of 3     4 1 6 | 0 5 2 | 3 . .
                                      mask       3 4 1   and the mask 1 0 0: the epoch's first rows do not count
                                      pad        3 4 1   they count, as with DistributedSampler
                                      drop_last  none: the next epoch begins

A position says how far a run has come in rows, not in batches, hosts or devices: whoever goes on from it, in
batches of any size, reads the rows that are left.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..backend.text import did_you_mean

LAST = ("mask", "pad", "drop_last")


class Position(NamedTuple):
    """Where the next batch begins: in which epoch, from 0, and at which row of that epoch's order."""

    epoch: int = 0
    row: int = 0

    @classmethod
    def read(cls, state: Mapping[str, Any]) -> Position:
        """From what `_asdict` gave, by way of JSON. Raises ValueError where it is something else."""
        if set(state) != set(cls._fields) or not all(isinstance(n, int) and n >= 0 for n in state.values()):
            raise ValueError(f"a position in the data is {dict(state)}; it needs epoch and row, whole numbers from 0")
        return cls(**state)


@dataclass(frozen=True)
class Sampler:
    """The order of `size` rows in every epoch, and what becomes of those at its end that do not fill a batch.

    Attributes:
      size: n, rows of the data set.
      last: "mask": they are a batch that is filled up with rows whose mask is 0, so that every row counts once in an
        epoch. "pad": these rows count, as in torch's DistributedSampler. "drop_last": they are left out.
      shuffle: every epoch in an order of its own; else all in that of the data.
      seed: of the orders.

    The order of the epoch that is read is in memory, 8 bytes for each row.
    """

    size: int
    last: str = "mask"
    shuffle: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size={self.size} leaves no rows; give a data set of at least one")
        if self.last not in LAST:
            raise ValueError(f"last={self.last!r}: use one of {', '.join(LAST)}{did_you_mean(str(self.last), LAST)}")

    def order(self, epoch: int) -> np.ndarray:
        """The rows of an epoch, int64 [n], each once."""
        return _order(self.size, self.seed if self.shuffle else None, epoch)

    def of_rank(self, rank: int, ranks: int, epoch: int = 0) -> np.ndarray:
        """What DistributedSampler(num_replicas=ranks, rank=rank) yields in an epoch of this order, int64: every
        `ranks`-th row, all ranks as many, from an order that is padded from its own beginning or with "drop_last" cut.

        With "mask" nothing is padded, and ranks may differ by one row. Raises ValueError unless 0 <= rank < ranks.
        """
        if not 0 <= rank < ranks:
            raise ValueError(f"rank={rank} of ranks={ranks}: number them 0 to {ranks - 1}")
        order = self.order(epoch)
        if self.last == "drop_last":
            order = order[: self.size // ranks * ranks]
        if self.last == "pad":
            order = np.resize(order, -(-self.size // ranks) * ranks)  # over and over, where ranks are more than rows
        return order[rank::ranks]

    def batch(self, at: Position, rows: int) -> tuple[np.ndarray, np.ndarray, Position]:
        """The batch of `rows` at a position: rows of the data, int64 [B], their mask, float32 [B], and what follows."""
        self.check(rows)
        if at.row + (rows if self.last == "drop_last" else 1) > self.size:
            at = Position(at.epoch + 1)
        order = self.order(at.epoch)
        taken = order[at.row : at.row + rows]
        mask = np.ones(rows, np.float32)
        if self.last == "mask":
            mask[taken.size :] = 0
        # Rows of the data, not zeros: what a model makes of them is finite, and 0 x NaN would not be 0.
        taken = np.concatenate([taken, np.resize(order, rows - taken.size)])
        after = Position(at.epoch, at.row + rows)
        return taken, mask, after if after.row < self.size else Position(at.epoch + 1)

    def after(self, batches: int, rows: int) -> Position:
        """Where the next batch begins after so many batches of `rows` from the first."""
        self.check(rows)
        each = self.size // rows if self.last == "drop_last" else -(-self.size // rows)
        return Position(batches // each, batches % each * rows)

    def check(self, rows: int) -> None:
        """Raise ValueError where batches of `rows` cannot be."""
        if rows < 1 or (self.last == "drop_last" and rows > self.size):
            raise ValueError(
                f"of {self.size} rows no batch of {rows} is full, and last='drop_last' leaves out the others; use "
                f"1 to {self.size} rows, or last='mask'"
            )


@functools.lru_cache(maxsize=4)  # of the runs of a process, each reads one epoch at a time
def _order(size: int, seed: int | None, epoch: int) -> np.ndarray:
    order = np.arange(size) if seed is None else np.random.default_rng((seed, epoch)).permutation(size)
    order.flags.writeable = False
    return order
