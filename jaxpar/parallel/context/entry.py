"""Find the equations where the sequence begins to be split: where a batch's positions become features.

Three kinds of equations turn a batch into features:

    lookup        ids [rows, positions] in a table
    matmul        frames [rows, positions, features] by a matrix
    convolution   images [rows, height, width, channels], or channels first, cut into patches that do not overlap
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from ...program import factors, primitives
from ...program import jaxpr as jx
from ..tensor.localiser import Found, Localiser, LocalValue


@dataclass(frozen=True)
class FirstSplit:
    """An equation where a split begins.

    Attributes:
      eqn: the equation. `id(eqn)` identifies it, so the object must stay alive: a rule of differentiation may be
        rewritten after the program that it came from is gone.
      side: the operand that has the sequence, whole before this equation. None if the whole result is cut instead.
      dim: the dim of the sequence in the result.
      tokens: the number of positions in all rows.
      operand_dim: the dim of the sequence in the operand.
    """

    eqn: Any
    side: int | None
    dim: int
    tokens: int
    operand_dim: int = 1

    def run(self, localiser: Localiser, inputs: Sequence[LocalValue]) -> Found:
        """Run the equation on this rank's positions."""
        values = [
            localiser.part(x, self.operand_dim) if i == self.side else localiser.whole(x) for i, x in enumerate(inputs)
        ]
        (value,) = jx.bind(self.eqn, values)
        return [(localiser.take(value, self.dim) if self.side is None else value, self.dim)]


@dataclass(frozen=True)
class WholeLoss:
    """The traced loss on whole arrays.

    Attributes:
      flat: its equations. Its first inputs are the parameters.
      num_leaves: the number of parameters.
      batch: the positions of the inputs that are rows of a batch [rows, positions, ...].
      num_sums: the number of outputs, from the first on, that are totals and counts.
    """

    flat: jx.Flat
    num_leaves: int
    batch: Collection[int]
    num_sums: int


def find_first_splits(loss: WholeLoss, ranks: int, parts: int) -> dict[int, FirstSplit]:
    """Return the equations where a split begins, by `id`.

    Args:
      ranks: the number of context ranks.
      parts: the number of chunks of a sequence.

    Raises:
      ValueError: if there is no such equation.
    """
    flat = loss.flat
    weights = jx.depends(flat.eqns, flat.invars[: loss.num_leaves])
    fed = jx.depends(flat.eqns, [flat.invars[i] for i in loss.batch])
    first_splits: dict[int, FirstSplit] = {}
    for eqn in flat.eqns:
        # A split begins where values of the batch alone meet values of parameters alone.
        sides = [
            "fed" if v in fed - weights else "weight" if v in weights - fed else ""
            for v in eqn.invars
            if not jx.is_literal(v)
        ]
        first_split = None
        if len(eqn.invars) == len(sides) == 2:
            makes_patches = eqn.primitive.name == "conv_general_dilated" and sides == ["fed", "weight"]
            first_split = _split_of_patches(eqn, flat, parts) if makes_patches else _split_of_product(eqn, sides)
        if first_split is not None:
            first_splits[id(first_split.eqn)] = first_split
    if not first_splits:
        raise ValueError(
            f"context={ranks} splits sequences, and the loss looks up no ids [rows, positions] of the batch in a "
            "parameter, nor multiplies [rows, positions, features] by one, nor takes patches of [rows, height, width, "
            "channels] or [rows, channels, height, width] by a convolution whose strides are its window; use data, "
            "fsdp or tensor instead of context"
        )
    return first_splits


def _split_of_product(eqn: Any, sides: Sequence[str]) -> FirstSplit | None:
    """Return the split that a lookup or a product begins.

    Rows and positions of the batch must remain separate dims of its result, and share no dim with the weight.
    """
    name, all_factors = eqn.primitive.name, factors.of(eqn)
    if sorted(sides) != ["fed", "weight"] or name not in ("gather", "dot_general"):
        return None
    side = list(sides).index("fed")
    # Only a lookup of features begins a split, and only if the batch gives the indices.
    if name == "gather" and not (side == 1 and jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact)):
        return None
    shape, free = eqn.invars[side].aval.shape, {f.ins[side]: f.outs[0] for f in all_factors if None in f.ins}
    # A factor of both operands and the result is a batch dim, such as one weight for each row.
    is_batched = any(None not in (*f.ins, *f.outs) for f in all_factors)
    if is_batched or len(shape) < 3 or shape[1] == 1 or 0 not in free or (dim := free.get(1)) is None:
        return None
    return FirstSplit(eqn, side, dim, math.prod(shape[:2]))


def _split_of_patches(eqn: Any, flat: jx.Flat, parts: int) -> FirstSplit | None:
    """Return the split that a convolution into patches begins.

    If the number of rows of patches allows it, each rank convolves only its own. Otherwise every rank convolves all,
    and the result is cut where the patches become one dim.
    """
    params, numbers, (out,) = eqn.params, eqn.params["dimension_numbers"], eqn.outvars
    (batch_dim, channel_dim, *window_dims), shape = numbers.out_spec, out.aval.shape
    are_consecutive = batch_dim == 0 and window_dims == [*range(window_dims[0], window_dims[0] + len(window_dims))]
    if numbers.lhs_spec != numbers.out_spec or not are_consecutive or params["batch_group_count"] > 1:
        return None
    tokens, dim = math.prod(shape) // shape[channel_dim], window_dims[0]
    if not windows_cover_once(eqn, window_dims) or tokens == shape[0]:
        return None
    # Each rank convolves whole rows of patches.
    if shape[dim] % parts == 0:
        return FirstSplit(eqn, 0, dim, tokens, dim)
    if len(window_dims) == 1:
        return FirstSplit(eqn, None, dim, tokens)

    # Follow the convolution's result to the reshape that merges the patches' dims.
    merged = (*shape[:dim], tokens // shape[0], *shape[dim + len(window_dims) :])
    wide_dims = lambda shape: [d for d, n in enumerate(shape) if n != 1]  # vmap inserts and removes dims of size 1
    sizes = lambda shape: [shape[d] for d in wide_dims(shape)]
    patches = {out}
    for reader in flat.eqns:
        if any(not jx.is_literal(v) and v in patches for v in reader.invars):
            new_shape = reader.outvars[0].aval.shape
            is_view = reader.primitive.name in ("reshape", "squeeze")
            if is_view and sizes(new_shape) == sizes(merged):
                return FirstSplit(reader, None, wide_dims(new_shape)[wide_dims(merged).index(dim)], tokens)
            # Elementwise equations and views that keep the sizes pass the patches on.
            if primitives.of(reader).elementwise or (is_view and sizes(new_shape) == sizes(shape)):
                patches.update(reader.outvars)
    return None


def windows_cover_once(eqn: Any, dims: Collection[int]) -> bool:
    """Return whether the windows of a convolution cover these dims of its first operand exactly once."""
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    kernel = eqn.invars[1].aval.shape
    for d in dims:
        # Strides, padding and dilation are given for the window's dims alone, without batch and channels.
        i = numbers.lhs_spec.index(d) - 2
        window = kernel[numbers.rhs_spec[2 + i]]
        is_dilated = (params["lhs_dilation"][i], params["rhs_dilation"][i]) != (1, 1)
        if (
            is_dilated
            or params["window_strides"][i] != window
            or params["padding"][i] != (0, 0)
            or eqn.invars[0].aval.shape[d] % window
        ):
            return False
    return True
