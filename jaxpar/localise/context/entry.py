"""Where the sequence begins to be split: where a batch's ids [rows, positions] become features, by a lookup, or frames
[rows, positions, features] do, by a matmul.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from ...program import factors
from ...program import jaxpr as jx
from ..tensor.localiser import Found, Localiser, LocalValue


@dataclass(frozen=True)
class FirstSplit:
    """An equation whose operand `side`, whole so far, is split along dim 1.

    Attributes:
      eqn: the equation. It is known by its `id`, which is its own while it is held: rules of differentiation are
        rewritten when the program that they came from may be gone.
      side: which of the two operands has the sequence.
      dim: the dim of the sequence in the result.
      tokens: the number of positions in all rows.
    """

    eqn: Any
    side: int
    dim: int
    tokens: int

    def run(self, work: Localiser, inputs: Sequence[LocalValue]) -> Found:
        """The equation on this rank's positions."""
        values = [work.part(x, 1) if i == self.side else work.whole(x) for i, x in enumerate(inputs)]
        return [(jx.bind(self.eqn, values)[0], self.dim)]


def starts(flat: jx.Flat, leaves: int, batch: Collection[int], ranks: int) -> dict[int, FirstSplit]:
    """The equations where a split begins, by `id`. ValueError: none, or ranks do not divide positions."""
    weights = jx.depends(flat.eqns, flat.invars[:leaves])
    fed = jx.depends(flat.eqns, [flat.invars[i] for i in batch])
    found: dict[int, FirstSplit] = {}
    for eqn in flat.eqns:
        sides = [
            "fed" if v in fed - weights else "weight" if v in weights - fed else ""
            for v in eqn.invars
            if not jx.is_literal(v)
        ]
        start = _start(eqn, sides) if len(eqn.invars) == len(sides) == 2 else None
        if start is None:
            continue
        length = eqn.invars[start.side].aval.shape[1]
        if length % ranks:
            raise ValueError(
                f"context={ranks} does not divide the {length} positions of {list(eqn.invars[start.side].aval.shape)} "
                f"({jx.where(eqn)}); use {length + -length % ranks} positions, padded and masked out of the loss"
            )
        found[id(eqn)] = start
    if not found:
        raise ValueError(
            f"context={ranks} splits sequences, and the loss looks up no ids [rows, positions] of the batch in a "
            "parameter, nor multiplies [rows, positions, features] by one; use data, fsdp or tensor for context"
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
