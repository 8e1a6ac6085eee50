"""Which row each element of a value is of: an array of numbers, of size 1 along dims in which they are the same.

    [B, T, D] as the batch has it    0 1 2 ...  [B, 1, 1]
    [B T, D] merged                  0 0 0 1 1 1 ...  [B T, 1]
    [2 B, D] two views laid out      0 1 2 ... 0 1 2 ...  [2 B, 1]
    [1, D] the last row              B-1  [1, 1]

What an equation does to dims, it does to these arrays, so that no layout of rows needs a rule of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

Shape = Sequence[int]


class Labels:
    """Integers by dim, of size 1 where all along a dim are equal; `dims` are those in which they differ."""

    __slots__ = ("array", "dims")

    def __init__(self, array: np.ndarray) -> None:
        for d in range(array.ndim):
            if array.shape[d] > 1 and (array == array.take([0], d)).all():
                array = array.take([0], d)
        self.array = array
        self.dims = frozenset(d for d, n in enumerate(array.shape) if n > 1)

    def equally(self, rows: int) -> bool:
        """Whether each of all rows has as many elements."""
        _, often = np.unique(self.array, return_counts=True)
        return len(often) == rows and bool((often == often[0]).all())

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Labels) and np.array_equal(self.array, other.array))

    def __hash__(self) -> int:
        return hash((self.array.shape, self.array.tobytes()))


NOWHERE = Labels(np.zeros((), np.int64))


def moved(array: np.ndarray, to: Sequence[int | None], ndim: int) -> np.ndarray:
    """An array whose dims have other numbers among `ndim`; those of size 1 may be gone."""
    kept = sorted((d for d, n in enumerate(array.shape) if n > 1), key=lambda d: to[d] or 0)
    shape = [1] * ndim
    for d in kept:
        shape[to[d] or 0] = array.shape[d]
    return array.transpose(*kept, *(d for d in range(array.ndim) if d not in kept)).reshape(shape)


def blocks(old: Shape, new: Shape) -> Iterator[tuple[range, range]]:
    """The dims of two shapes that a reshape keeps together: as few at a time as have one product."""
    i = j = 0
    while i < len(old) or j < len(new):
        start, a, b = (i, j), 1, 1
        while (i, j) == start or a != b:
            if j == len(new) or (i < len(old) and a <= b):
                a, i = a * old[i], i + 1
            else:
                b, j = b * new[j], j + 1
        yield range(start[0], i), range(start[1], j)


def reshaped(array: np.ndarray, old: Shape, new: Shape) -> np.ndarray:
    """An array after a reshape of what it labels."""
    if 0 in old:
        return np.zeros((1,) * len(new), array.dtype)
    full, shape = list(array.shape), [1] * len(new)
    for before, after in blocks(old, new):
        if any(array.shape[d] > 1 for d in before):
            full[before.start : before.stop] = old[before.start : before.stop]
            shape[after.start : after.stop] = new[after.start : after.stop]
    return np.broadcast_to(array, full).reshape(shape)


def alike(rows: np.ndarray, values: np.ndarray, twin: np.ndarray | None = None) -> bool:
    """Whether all rows have the same values, each in the order of its elements. Where these are all one number, they
    must be so for twice the rows too (`twin`): `arange(n) < 2` is true of all rows where a block has two.
    """
    dims = [d for d in range(rows.ndim) if rows.shape[d] > 1 and values.ndim == rows.ndim]
    one = lambda array: all((array == array.take([0], d)).all() for d in dims)
    if dims and twin is not None and twin.ndim == rows.ndim and one(values) and not one(twin):
        return False
    rows, values = (x.ravel() for x in np.broadcast_arrays(rows, values))
    order, n = np.argsort(rows, kind="stable"), len(np.unique(rows))
    if not n:
        return True
    if len(rows) % n:
        return False
    of, values = rows[order].reshape(n, -1), values[order].reshape(n, -1)
    return bool((of == of[:, :1]).all() and (values == values[:1]).all())


def ordinals(rows: np.ndarray) -> np.ndarray:
    """For each element, how many of its row come before it."""
    flat = rows.ravel()
    order = np.argsort(flat, kind="stable")
    found = np.empty(flat.size, np.int64)
    found[order] = np.arange(flat.size) - np.searchsorted(flat[order], flat[order])
    return found.reshape(rows.shape)


def numbered(shape: Shape, dims: Any) -> np.ndarray:
    """Other numbers for all elements along some dims."""
    sizes = [n if d in dims else 1 for d, n in enumerate(shape)]
    return np.arange(math.prod(sizes)).reshape(sizes)
