"""Along which dim a value is split, rows that are merged with positions included.

`logits.reshape(-1, V)` merges rows and positions into one dim [rows * positions]. It stays split as it was: a rank has
its positions of each row, one row after the other, which is not one stretch of the merged dim.

```
[2 rows, 4 positions]      a b c d        merged   a b c d e f g h
                           e f g h        rank 0   a b     e f
                                          rank 1       c d     g h
```
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax


class Split(int):
    """A dim, which consists of `rows` equal stretches, each split by itself: 1 but for a merged one."""

    rows: int

    def __new__(cls, dim: int, rows: int = 1) -> Split:
        """The dim of this number."""
        made = super().__new__(cls, dim)
        made.rows = rows
        return made

    def __add__(self, n: int) -> Split:
        return Split(int(self) + n, self.rows)

    def __sub__(self, n: int) -> Split:
        return Split(int(self) - n, self.rows)


def by_row(fun: Callable[[jax.Array, int], jax.Array], value: jax.Array, dim: Split) -> jax.Array:
    """`fun(value, dim)` of every stretch of a dim."""
    if dim.rows == 1:
        return fun(value, int(dim))
    before, after = value.shape[:dim], value.shape[dim + 1 :]
    out = fun(value.reshape(*before, dim.rows, value.shape[dim] // dim.rows, *after), dim + 1)
    return out.reshape(*before, -1, *after)


def reshaped(before: Sequence[int], dim: Split, after: Sequence[int], parts: int) -> Split | None:
    """Where a reshape from the shape `before`, split along a dim, to `after` puts the split; None where it goes through
    a dim of `after` in a way that no `Split` says, or where it is not in whole chunks, of which there are `parts`.

    >>> at = reshaped((3, 8, 5), Split(1), (24, 5), parts=2)
    >>> at, at.rows
    (0, 3)
    >>> reshaped((24, 5), at, (3, 8, 5), parts=2).rows
    1
    >>> reshaped((24, 5), at, (4, 6, 5), parts=2) is None
    True
    """
    outside, length = math.prod(before[:dim]) * dim.rows, before[dim] // dim.rows
    for d, n in enumerate(after):
        first = math.prod(after[:d])
        if not first <= outside < first * n:
            continue
        rows, rest = divmod(outside, first)
        if rest or n % rows:
            return None
        chunked = n // rows == length or not (n // rows % parts or length % parts)
        return Split(d, rows) if chunked else None
    return None
