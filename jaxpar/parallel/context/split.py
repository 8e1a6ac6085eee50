"""How a rank has a value: split along a dim, rows that are merged with positions included, or as a partial sum.

`logits.reshape(-1, V)` merges rows and positions into one dim [rows * positions]. It stays split as it was: a rank has
its positions of each row, one row after the other, which is not one stretch of the merged dim.

```
[2 rows, 4 positions]      a b c d        merged   a b c d e f g h
                           e f g h        rank 0   a b     e f
                                          rank 1       c d     g h
```

A value that is longer or shorter than what its ranks share, by what a padding adds or a slice leaves out, stays in the
chunks of what it was made of: each chunk has the positions that follow it as well, or the last ones are nothing.

```
8 positions of 2 ranks     a b c d | e f g h
padded by 2 before         0 0 a b c d | c d e f g h      overlap 2: chunks of 4, each with the 2 that follow
without the last 2         a b c d | e f . .              overlap -2
```
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ...jaxprs import jaxpr as jx
from ..tensor.localiser import Found, Placed

PARTIAL = -1  # in the place of the dim along which a value is split: it is a partial sum
_ONE = ("neg", "copy", "copy_p", "reshape", "squeeze", "transpose", "broadcast_in_dim", "reduce_sum")


class Split(int):
    """A dim, which consists of `rows` equal stretches, each split by itself: 1 but for a merged one. A stretch is
    longer by `overlap` than what is in chunks.
    """

    rows: int
    overlap: int

    def __new__(cls, dim: int, rows: int = 1, overlap: int = 0) -> Split:
        """The dim of this number."""
        made = super().__new__(cls, dim)
        made.rows, made.overlap = rows, overlap
        return made

    def __add__(self, n: int) -> Split:
        return Split(int(self) + n, self.rows, self.overlap)

    def __sub__(self, n: int) -> Split:
        return Split(int(self) - n, self.rows, self.overlap)

    @property
    def how(self) -> tuple[int, int, int]:
        """All of it: two splits of one dim are one number."""
        return int(self), self.rows, self.overlap


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


def linear(eqn: Any, inputs: Sequence[Placed]) -> Found | None:
    """An equation, some of whose inputs are partial sums, where its output is one: a loss's total, say, divided by the
    number of tokens. None where it is not linear in them.
    """
    name, partial = eqn.primitive.name, [x.partial for x in inputs]
    inexact = jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact)
    others = all(x.dim is None for x in inputs)
    if (
        name in _ONE
        or (name == "convert_element_type" and inexact)
        or (name in ("add", "sub", "add_any") and all(partial))
        or (name == "mul" and sum(partial) == 1 and others)
        or (name == "div" and inexact and partial == [True, False] and others)
    ):
        return [(value, PARTIAL) for value in jx.bind(eqn, [x.value for x in inputs])]
    return None
