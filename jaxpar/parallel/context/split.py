"""Layouts of a value on a context rank: split along a dim, along merged rows and positions, or a partial sum.

`logits.reshape(-1, V)` merges rows and positions into one dim [rows * positions]. It stays split as before: a rank has
its positions of each row, one row after the other. These are several stretches of the merged dim.

```
[2 rows, 4 positions]      a b c d        merged   a b c d e f g h
                           e f g h        rank 0   a b     e f
                                          rank 1       c d     g h
```

A slice or a padding makes a value shorter or longer than the chunks of its operand. It stays in these chunks. Each
chunk then holds the positions that follow it as well (a positive overlap), or the last positions are unused (negative).

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

from ...program import factors, primitives
from ...program import jaxpr as jx
from ..tensor.localiser import Found, Localiser, LocalValue

PARTIAL = -1  # the dim that a rule returns for a partial sum


class Split(int):
    """A split dim, which consists of one or more merged rows, each split separately.

    Attributes:
      rows: the number of rows that are merged in the dim, 1 if none are.
      overlap: the number of positions that each chunk holds beyond its own; negative: unused positions at the end.
    """

    rows: int
    overlap: int

    def __new__(cls, dim: int, rows: int = 1, overlap: int = 0) -> "Split":
        """Return the dim with this number."""
        split = super().__new__(cls, dim)
        split.rows, split.overlap = rows, overlap
        return split

    def __add__(self, n: int) -> "Split":
        return Split(int(self) + n, self.rows, self.overlap)

    def __sub__(self, n: int) -> "Split":
        return Split(int(self) - n, self.rows, self.overlap)

    @property
    def as_tuple(self) -> tuple[int, int, int]:
        """(dim, rows, overlap), for comparison: as ints, two different splits of one dim are equal."""
        return int(self), self.rows, self.overlap


def map_rows(fun: Callable[[jax.Array, int], jax.Array], value: jax.Array, dim: Split) -> jax.Array:
    """Apply `fun(value, dim)` to every row of a dim."""
    if dim.rows == 1:
        return fun(value, int(dim))
    # Unmerge the rows: [.., rows * n, ..] -> [.., rows, n, ..].
    outer, inner = value.shape[:dim], value.shape[dim + 1 :]
    mapped = fun(value.reshape(*outer, dim.rows, value.shape[dim] // dim.rows, *inner), dim + 1)
    return mapped.reshape(*outer, -1, *inner)


def pad_positions(x: jax.Array, dim: int, length: int) -> jax.Array:
    """Pad a dim of positions to a length, by repeating the last one."""
    return jnp.pad(x, [(0, length - n if d == dim else 0) for d, n in enumerate(x.shape)], "edge")


def reshape_split(shape: Sequence[int], dim: Split, new_shape: Sequence[int], parts: int) -> Split | None:
    """Return the split dim after a reshape.

    Returns:
      The split dim; None if no `Split` describes it, or if the reshape cuts through one of the `parts` chunks.

    >>> merged = reshape_split((3, 8, 5), Split(1), (24, 5), parts=2)
    >>> merged, merged.rows
    (0, 3)
    >>> reshape_split((24, 5), merged, (3, 8, 5), parts=2).rows
    1
    >>> reshape_split((24, 5), merged, (4, 6, 5), parts=2) is None
    True

    A dim that overlaps remains a separate dim:

    >>> reshape_split((3, 9, 5, 1), Split(1, 1, 1), (3, 9, 5), parts=2).overlap
    1
    >>> reshape_split((3, 9, 5), Split(1, 1, 1), (27, 5), parts=2) is None
    True
    """
    # The split is the same if the same number of elements lies outside it: rows of earlier dims and merged rows.
    num_rows, length = math.prod(shape[:dim]) * dim.rows, shape[dim] // dim.rows
    for d, n in enumerate(new_shape):
        num_outer = math.prod(new_shape[:d])
        if not num_outer <= num_rows < num_outer * n:
            continue
        rows, remainder = divmod(num_rows, num_outer)
        if remainder or n % rows:
            return None
        # Chunks with an overlap are no equal parts of a merged dim.
        if dim.overlap:
            return Split(d, 1, dim.overlap) if rows == 1 and n == length else None
        # Inner dims may be merged or divided, as long as the chunks stay whole.
        keeps_chunks = n // rows == length or not (n // rows % parts or length % parts)
        return Split(d, rows) if keeps_chunks else None
    return None


def linear_in_partial_sums(eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """Run an equation on partial sums without adding them up, if it is linear in them; else return None.

    An example is the total of a loss that is divided by the number of tokens.
    """
    properties, is_partial = primitives.of(eqn), [x.partial for x in inputs]
    is_unsplit = all(x.dim is None for x in inputs)
    if is_unsplit and (properties.elementwise or properties.linear == "all") and primitives.linear(eqn, is_partial):
        return [(value, PARTIAL) for value in jx.bind(eqn, [x.value for x in inputs])]
    return None


def part_from_inputs(
    localiser: Localiser, positions: Callable[[int, Split], jax.Array], x: LocalValue, dim: Split
) -> jax.Array | None:
    """Compute this rank's part of a whole value from parts of the inputs of its equation.

    A rank computes its part of a mask from its positions, instead of slicing it out of the whole mask [T, S].

    `positions` maps (n, dim) to this rank's positions among the n of a dim.

    Returns:
      The part of `x` along `dim`; None if it must be sliced out of the whole.
    """
    assert x.made is not None
    eqn, inputs = x.made
    name = eqn.primitive.name
    if primitives.of(eqn).elementwise:
        return jx.bind(eqn, [y.value if is_constant_along(y, dim) else localiser.part(y, dim) for y in inputs])[0]
    if name == "broadcast_in_dim" and len(inputs) == 1:
        dims, shape = eqn.params["broadcast_dimensions"], localiser.local(x.shape, dim)
        (y,) = inputs
        input_dim = dims.index(dim) if dim in dims else -1
        is_constant = input_dim < 0 or y.shape[input_dim] == 1
        operand = y.value if is_constant else localiser.part(y, Split(input_dim, dim.rows, dim.overlap))
        return jax.lax.broadcast_in_dim(operand, shape, dims)
    if name == "iota" and not inputs:
        value = jax.lax.broadcasted_iota(eqn.params["dtype"], localiser.local(x.shape, dim), eqn.params["dimension"])
        if dim != eqn.params["dimension"]:
            return value
        # Here an iota counts positions: return the numbers of this rank's.
        numbers = positions(x.shape[dim], dim).astype(value.dtype)
        return jnp.broadcast_to(jnp.expand_dims(numbers, [d for d in range(len(x.shape)) if d != dim]), value.shape)
    # A gather looks up a table's entry for each distance, for instance, and leaves the positions in another dim.
    if name in ("gather", "transpose") or primitives.of(eqn).view:
        *table, y = inputs
        without_table = (None,) * len(table)
        input_dim = next((f.ins[-1] for f in factors.of(eqn) if f.outs[0] == dim and f.ins[:-1] == without_table), None)
        if input_dim is not None and y.shape[input_dim] == x.shape[dim]:
            part = localiser.part(y, Split(input_dim, dim.rows, dim.overlap))
            if name == "reshape":
                return part.reshape(localiser.local(x.shape, dim))
            return jx.bind(eqn, [*map(localiser.whole, table), part])[0]
    return None


def is_constant_along(x: LocalValue, dim: int) -> bool:
    """Return whether a whole value is the same for all positions along a dim, and is broadcast along it."""
    return not x.shape or x.shape[dim] == 1
