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

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ...program import factors, primitives
from ...program import jaxpr as jx
from ..tensor.localiser import Found, Localiser, LocalValue

PARTIAL = -1  # in the place of the dim along which a value is split: it is a partial sum


class Split(int):
    """A dim of `rows` equal stretches (1 unless merged), each split by itself, `overlap` beyond its chunks."""

    rows: int
    overlap: int

    def __new__(cls, dim: int, rows: int = 1, overlap: int = 0) -> "Split":
        """The dim of this number."""
        made = super().__new__(cls, dim)
        made.rows, made.overlap = rows, overlap
        return made

    def __add__(self, n: int) -> "Split":
        return Split(int(self) + n, self.rows, self.overlap)

    def __sub__(self, n: int) -> "Split":
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
    a dim of `after` in a way that no `Split` says, or where it is not in whole chunks (there are `parts`).

    >>> at = reshaped((3, 8, 5), Split(1), (24, 5), parts=2)
    >>> at, at.rows
    (0, 3)
    >>> reshaped((24, 5), at, (3, 8, 5), parts=2).rows
    1
    >>> reshaped((24, 5), at, (4, 6, 5), parts=2) is None
    True

    What overlaps stays a dim of its own:

    >>> reshaped((3, 9, 5, 1), Split(1, 1, 1), (3, 9, 5), parts=2).overlap
    1
    >>> reshaped((3, 9, 5), Split(1, 1, 1), (27, 5), parts=2) is None
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
        if dim.overlap:
            return Split(d, 1, dim.overlap) if rows == 1 and n == length else None
        chunked = n // rows == length or not (n // rows % parts or length % parts)
        return Split(d, rows) if chunked else None
    return None


def linear(eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """An equation, some of whose inputs are partial sums, where its output is one: a loss's total, say, divided by the
    number of tokens. None where it is not linear in them.
    """
    known, partial = primitives.of(eqn), [x.partial for x in inputs]
    whole = all(x.dim is None for x in inputs)
    if whole and (known.elementwise or known.linear == "all") and primitives.linear(eqn, partial):
        return [(value, PARTIAL) for value in jx.bind(eqn, [x.value for x in inputs])]
    return None


def pushed(
    work: Localiser, positions: Callable[[int, Split], jax.Array], x: LocalValue, dim: Split
) -> jax.Array | None:
    """The part of `x` along `dim`; None to cut it out of the whole. `positions(n, dim)` are this rank's of n."""
    assert x.made is not None
    eqn, inputs = x.made
    name = eqn.primitive.name
    if primitives.of(eqn).elementwise:
        return jx.bind(eqn, [y.value if alike(y, dim) else work.part(y, dim) for y in inputs])[0]
    if name == "broadcast_in_dim" and len(inputs) == 1:
        dims, shape = eqn.params["broadcast_dimensions"], work.local(x.shape, dim)
        (y,) = inputs
        at = dims.index(dim) if dim in dims else -1
        small = y.value if at < 0 or y.shape[at] == 1 else work.part(y, Split(at, dim.rows, dim.overlap))
        return jax.lax.broadcast_in_dim(small, shape, dims)
    if name == "iota" and not inputs:
        value = jax.lax.broadcasted_iota(eqn.params["dtype"], work.local(x.shape, dim), eqn.params["dimension"])
        if dim != eqn.params["dimension"]:
            return value
        places = positions(x.shape[dim], dim).astype(value.dtype)
        return jnp.broadcast_to(jnp.expand_dims(places, [d for d in range(len(x.shape)) if d != dim]), value.shape)
    if name in ("gather", "transpose") or primitives.of(eqn).view:  # a table's numbers for each distance, at other dims
        *table, y = inputs
        alone = (None,) * len(table)
        at = next((f.ins[-1] for f in factors.of(eqn) if f.outs[0] == dim and f.ins[:-1] == alone), None)
        if at is not None and y.shape[at] == x.shape[dim]:
            part = work.part(y, Split(at, dim.rows, dim.overlap))
            if name == "reshape":
                return part.reshape(work.local(x.shape, dim))
            return jx.bind(eqn, [*map(work.whole, table), part])[0]
    return None


def alike(x: LocalValue, dim: int) -> bool:
    """Whether a whole value is the same for all positions along a dim, where it meets others by broadcasting."""
    return not x.shape or x.shape[dim] == 1


def counts(x: LocalValue) -> int | None:
    """The dim along which a whole value is 0, 1, 2, ..., whatever else it has; None where it is not known to be."""
    if x.made is None:
        return None
    eqn, inputs = x.made
    name = eqn.primitive.name
    if name == "iota":
        return eqn.params["dimension"]
    if name == "select_n" and len(inputs) == 3 and (sign := inputs[0].made) is not None:
        # An index below 0 counts from the end: none is.
        less, sides = sign
        bound = sides[-1].value
        zero = not isinstance(bound, Tracer) and bool(np.all(bound == 0))
        never = less.primitive.name == "lt" and counts(sides[0]) is not None and zero
        return counts(inputs[1]) if never else None
    dim = counts(inputs[0]) if primitives.of(eqn).view else None
    if dim is None or inputs[0].shape[dim] == 1:
        return None
    to = next((f.outs[0] for f in factors.of(eqn) if f.ins[0] == dim), None)
    return to if to is not None and x.shape[to] == inputs[0].shape[dim] else None
