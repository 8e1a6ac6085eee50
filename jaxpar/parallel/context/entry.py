"""Where the sequence begins to be split: where a batch's ids [rows, positions] become features, by a lookup; frames
[rows, positions, features] do, by a matmul; or patches of images [rows, height, width, channels], or channels first,
do, by a convolution.
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
    """An equation whose operand `side`, whole so far, is split along its dim `at`; None: whose result is cut.

    Attributes:
      eqn: the equation. It is known by its `id`, which is its own while it is held: rules of differentiation are
        rewritten when the program that they came from may be gone.
      side: which of the two operands has the sequence.
      dim: the dim of the sequence in the result.
      tokens: the number of positions in all rows.
      at: the dim of the sequence in the operand.
    """

    eqn: Any
    side: int | None
    dim: int
    tokens: int
    at: int = 1

    def run(self, work: Localiser, inputs: Sequence[LocalValue]) -> Found:
        """The equation on this rank's positions."""
        values = [work.part(x, self.at) if i == self.side else work.whole(x) for i, x in enumerate(inputs)]
        (value,) = jx.bind(self.eqn, values)
        return [(work.take(value, self.dim) if self.side is None else value, self.dim)]


def starts(flat: jx.Flat, leaves: int, batch: Collection[int], ranks: int, parts: int) -> dict[int, FirstSplit]:
    """The equations where a split into `parts` begins, by `id`. Raises ValueError where there is none."""
    weights = jx.depends(flat.eqns, flat.invars[:leaves])
    fed = jx.depends(flat.eqns, [flat.invars[i] for i in batch])
    found: dict[int, FirstSplit] = {}
    for eqn in flat.eqns:
        sides = [
            "fed" if v in fed - weights else "weight" if v in weights - fed else ""
            for v in eqn.invars
            if not jx.is_literal(v)
        ]
        start = None
        if len(eqn.invars) == len(sides) == 2:
            patches = eqn.primitive.name == "conv_general_dilated" and sides == ["fed", "weight"]
            start = _patches(eqn, flat, parts) if patches else _start(eqn, sides)
        if start is not None:
            found[id(start.eqn)] = start
    if not found:
        raise ValueError(
            f"context={ranks} splits sequences, and the loss looks up no ids [rows, positions] of the batch in a "
            "parameter, nor multiplies [rows, positions, features] by one, nor takes patches of [rows, height, width, "
            "channels] or [rows, channels, height, width] by a convolution whose strides are its window; use data, "
            "fsdp or tensor for context"
        )
    return found


def _start(eqn: Any, sides: Sequence[str]) -> FirstSplit | None:
    """Of a lookup or a product that has rows and positions of what is fed apart, and shares no dim with the weight."""
    name, every = eqn.primitive.name, factors.of(eqn)
    if sorted(sides) != ["fed", "weight"] or name not in ("gather", "dot_general"):
        return None
    side = list(sides).index("fed")
    if name == "gather" and not (side == 1 and jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact)):
        return None
    shape, free = eqn.invars[side].aval.shape, {f.ins[side]: f.outs[0] for f in every if None in f.ins}
    shared = any(None not in (*f.ins, *f.outs) for f in every)
    if shared or len(shape) < 3 or shape[1] == 1 or 0 not in free or (dim := free.get(1)) is None:
        return None
    return FirstSplit(eqn, side, dim, math.prod(shape[:2]))


def _patches(eqn: Any, flat: jx.Flat, parts: int) -> FirstSplit | None:
    """Of a convolution of images whose windows lie side by side. Ranks convolve rows of patches of their own where they
    can; else all of them, and these are cut where they become one dim.
    """
    p, numbers, (out,) = eqn.params, eqn.params["dimension_numbers"], eqn.outvars
    (rows, channels, *across), shape = numbers.out_spec, out.aval.shape
    one_stretch = rows == 0 and across == [*range(across[0], across[0] + len(across))]
    if numbers.lhs_spec != numbers.out_spec or not one_stretch or p["batch_group_count"] > 1:
        return None
    tokens, first = math.prod(shape) // shape[channels], across[0]
    if not side_by_side(eqn, across) or tokens == shape[0]:
        return None
    if shape[first] % parts == 0:
        return FirstSplit(eqn, 0, first, tokens, first)
    if len(across) == 1:
        return FirstSplit(eqn, None, first, tokens)
    joined = (*shape[:first], tokens // shape[0], *shape[first + len(across) :])
    wide = lambda shape: [d for d, n in enumerate(shape) if n != 1]  # vmap has a dim of one element come and go
    sizes = lambda shape: [shape[d] for d in wide(shape)]
    same = {out}
    for other in flat.eqns:
        if any(not jx.is_literal(v) and v in same for v in other.invars):
            after = other.outvars[0].aval.shape
            view = other.primitive.name in ("reshape", "squeeze")
            if view and sizes(after) == sizes(joined):
                return FirstSplit(other, None, wide(after)[wide(joined).index(first)], tokens)
            if primitives.of(other).elementwise or (view and sizes(after) == sizes(shape)):
                same.update(other.outvars)
    return None


def side_by_side(eqn: Any, dims: Collection[int]) -> bool:
    """Whether the windows of a convolution cover these dims of its first operand once."""
    p, numbers = eqn.params, eqn.params["dimension_numbers"]
    kernel = eqn.invars[1].aval.shape
    for d in dims:
        at = numbers.lhs_spec.index(d) - 2
        window = kernel[numbers.rhs_spec[2 + at]]
        dilated = (p["lhs_dilation"][at], p["rhs_dilation"][at]) != (1, 1)
        if (
            dilated
            or p["window_strides"][at] != window
            or p["padding"][at] != (0, 0)
            or eqn.invars[0].aval.shape[d] % window
        ):
            return False
    return True
