"""Where the sequence begins to be split: where a batch's ids [rows, positions] become features, by a lookup, or frames
[rows, positions, features] do, by a matmul.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

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
    shapes = [v.aval.shape for v in eqn.invars]
    if sorted(sides) != ["fed", "weight"]:
        return None
    side = list(sides).index("fed")
    shape = shapes[side]
    if len(shape) < 3 or shape[1] == 1:
        return None
    tokens = math.prod(shape[:2])
    if eqn.primitive.name == "gather" and side == 1 and jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact):
        numbers = eqn.params["dimension_numbers"]
        if numbers.start_indices_batching_dims:
            return None
        rows = [d for d in range(len(eqn.outvars[0].aval.shape)) if d not in numbers.offset_dims]
        return FirstSplit(eqn, side, rows[1], tokens)
    if eqn.primitive.name == "dot_general":
        contracted, batch = (pair[side] for pair in eqn.params["dimension_numbers"])
        if batch or 0 in contracted or 1 in contracted:
            return None
        before = 0 if side == 0 else len(shapes[0]) - len(contracted)
        return FirstSplit(eqn, side, before + 1, tokens)
    return None
