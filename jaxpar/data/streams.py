"""What a trainer accepts as data, as streams of global batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from ..model.batches import rows_of

Data = Any  # a `data.Source`, a function, or an iterable of batches


def training(data: Data, rows: int, seed: int, start: int = 0) -> Iterator[Any]:
    """Batches to train on, from batch `start` on.

    Args:
      data: a `jaxpar.data.Source`; or a function `data(start)` of an iterator that begins with batch `start`; or an
        iterable: a list or data loader is gone through again and again, an iterator once, and of either the first
        `start` batches are dropped.
      rows, seed: for a `Source`.

    Raises ValueError for anything else, and where the data ends.
    """
    if hasattr(data, "batches"):
        return data.batches(rows, seed, start)
    if callable(data):
        made = data(start)
        if not isinstance(made, Iterable):
            raise ValueError(f"data({start}) returned {type(made).__name__}; return an iterator of batches from there")
        return _endless(made, start)
    if not isinstance(data, Iterable) or isinstance(data, Mapping | str):
        raise ValueError(
            f"data is a {type(data).__name__}; pass a jaxpar.data.Source, an iterable of batches, or a function of the "
            "number of the first batch that returns one"
        )
    passes = (data,) if isinstance(data, Iterator) else itertools.repeat(data)
    return itertools.islice(_endless(_through(passes), 0), start, None)


def _through(passes: Iterable[Iterable[Any]]) -> Iterator[Any]:
    for each in passes:
        batch = None
        for batch in each:
            yield batch
        if batch is None:
            return


def _endless(batches: Any, start: int) -> Iterator[Any]:
    number = start
    for number, batch in enumerate(batches, start + 1):  # noqa: B007, the error names it
        yield batch
    raise ValueError(
        f"the data ended after {number} batches; train for so many steps, or pass data that can be gone through again "
        "(a list, a data loader, a function)"
    )


def held_out(data: Data, rows: int, most: int | None) -> Iterator[Any]:
    """Held-out batches: all of them, or `most` spread evenly (counting them goes through the data once more).

    `data` is a `Source`, a function without arguments that returns an iterator, or an iterable other than an iterator.
    """
    if isinstance(data, Iterator):
        raise ValueError(f"held_out is a {type(data).__name__}, which ends after one evaluation; pass a list, or a "
                         "function that returns an iterator")  # fmt: skip

    if data is None or isinstance(data, Mapping | str):
        raise ValueError(f"held_out is a {type(data).__name__}; pass a list of batches, or a function that returns an "
                         "iterator of them")  # fmt: skip

    def again() -> Any:
        return data.held_out(rows) if hasattr(data, "held_out") else data() if callable(data) else data

    if most is None:
        return iter(again())
    every = max(1, -(-sum(1 for _ in again()) // most))
    return itertools.islice(again(), 0, None, every)


def weight_of(batch: Any) -> float:
    """How much a batch's mean counts among others: the sum of its "mask" where it has one, else its rows."""
    return float(np.sum(batch["mask"])) if isinstance(batch, dict) and "mask" in batch else rows_of(batch)
