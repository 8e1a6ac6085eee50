"""The order in which batches read the rows of a data set, epoch after epoch; its state is two integers.

Ranks get the rows that torch's DistributedSampler assigns to them.

    order of an epoch    4 1 6 0 5 2 3        size 7, a permutation that depends only on (seed, epoch)
    batches of 3         4 1 6 | 0 5 2 | 3 . .
                                          mask       3 4 1   with the mask 1 0 0: the repeated rows do not count
                                          pad        3 4 1   the repeated rows count, as in DistributedSampler
                                          drop_last  none: the next epoch begins

A position counts rows, not batches, hosts or devices. A run that continues from it, with any batch size, reads the
remaining rows of the epoch.
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
    """The start of the next batch: the epoch, from 0, and the row in that epoch's order."""

    epoch: int = 0
    row: int = 0

    @classmethod
    def read(cls, state: Mapping[str, Any]) -> Position:
        """Return the position of a checkpoint, `_asdict` by way of JSON; raise ValueError if it is none."""
        if set(state) != set(cls._fields) or not all(isinstance(n, int) and n >= 0 for n in state.values()):
            raise ValueError(
                f"a position in the data is {dict(state)}; it needs epoch and row, whole numbers from 0: resume with "
                "the data that the run was trained on"
            )
        return cls(**state)


@dataclass(frozen=True)
class Sampler:
    """The order of a data set's rows in every epoch, and the treatment of the last rows that do not fill a batch.

    Memory holds the order of the current epoch, 8 bytes for each row.

    Attributes:
      size: n, the number of rows in the data set.
      last: the treatment of the last rows. "mask" fills their batch up with rows whose mask is 0, so that every row
        counts once in an epoch. "pad" fills it up with rows that count, as torch's DistributedSampler does.
        "drop_last" leaves them out.
      shuffle: gives every epoch a different order; else every epoch has the order of the data.
      seed: determines the orders.
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
        """Return the order of an epoch: row indices, int64 [n], each once."""
        return _order(self.size, self.seed if self.shuffle else None, epoch)

    def of_rank(self, rank: int, ranks: int, epoch: int = 0) -> np.ndarray:
        """Return the rows that `DistributedSampler(num_replicas=ranks, rank=rank)` yields in an epoch of this order.

        A rank gets every `ranks`-th row. For ranks to have equally many, "pad" repeats the first rows of the order at
        its end, and "drop_last" cuts the order. With "mask", ranks may differ by one row.

        Returns:
          Row indices, int64.

        Raises:
          ValueError: unless 0 <= rank < ranks.
        """
        if not 0 <= rank < ranks:
            raise ValueError(f"rank={rank} of ranks={ranks}: number them 0 to {ranks - 1}")
        order = self.order(epoch)
        if self.last == "drop_last":
            order = order[: self.size // ranks * ranks]
        if self.last == "pad":
            order = np.resize(order, -(-self.size // ranks) * ranks)  # repeats the order if ranks exceed rows
        return order[rank::ranks]

    def batch(self, position: Position, rows: int) -> tuple[np.ndarray, np.ndarray, Position]:
        """Return the batch of `rows` rows at a position.

        Returns:
          The row indices, int64 [B]; their mask, float32 [B]; and the position of the next batch.

        Raises:
          ValueError: no batch can have `rows` rows.
        """
        self.check(rows)
        position = self.begin(position, rows)
        order = self.order(position.epoch)
        # Fewer than `rows` indices at the end of an epoch.
        indices = order[position.row : position.row + rows]
        mask = np.ones(rows, np.float32)
        if self.last == "mask":
            mask[indices.size :] = 0
        # Fill up with rows of the data, not with zeros: a model's output may be NaN for zeros, and 0 x NaN is not 0.
        indices = np.concatenate([indices, np.resize(order, rows - indices.size)])
        next_position = Position(position.epoch, position.row + rows)
        return indices, mask, next_position if next_position.row < self.size else Position(position.epoch + 1)

    def begin(self, position: Position, rows: int) -> Position:
        """Return where the batch of `rows` rows at a position begins: there, or at the next epoch."""
        # With "drop_last", a full batch may not fit any more.
        is_over = position.row + (rows if self.last == "drop_last" else 1) > self.size
        return Position(position.epoch + 1) if is_over else position

    def after(self, batches: int, rows: int) -> Position:
        """Return the position after `batches` batches of `rows` rows, counted from the first."""
        self.check(rows)
        # A short last batch counts, unless it is left out.
        batches_per_epoch = self.size // rows if self.last == "drop_last" else -(-self.size // rows)
        return Position(batches // batches_per_epoch, batches % batches_per_epoch * rows)

    def check(self, rows: int) -> None:
        """Raise ValueError if no batch can have `rows` rows."""
        if rows < 1 or (self.last == "drop_last" and rows > self.size):
            raise ValueError(
                f"of {self.size} rows no batch of {rows} is full, and last='drop_last' leaves out the others; use "
                f"1 to {self.size} rows, or last='mask'"
            )


@functools.lru_cache(maxsize=4)  # a process may have several runs, each reading one epoch at a time
def _order(size: int, seed: int | None, epoch: int) -> np.ndarray:
    """Return the cached order of an epoch, read-only; `seed` None keeps the order of the data."""
    order = np.arange(size) if seed is None else np.random.default_rng((seed, epoch)).permutation(size)
    # The cache returns this very array to every caller.
    order.flags.writeable = False
    return order
