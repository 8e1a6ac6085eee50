"""Where a pipeline cuts a loss: what runs before the layers, what after, and whether the ranks may share the latter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from .. import jaxpr as jx
from ..layers import Program


def before(program: Program) -> tuple[Any, ...]:
    """The prologue: what runs before the stack that is cut."""
    return program.pieces[: program.pieces.index(program.main)]  # type: ignore[arg-type]


def after(program: Program) -> tuple[Any, ...]:
    """The epilogue."""
    return program.pieces[program.pieces.index(program.main) + 1 :]  # type: ignore[arg-type]


def side(program: Program) -> list[Any]:
    """Variables of the prologue that the epilogue differentiates."""
    pairs = [pair for p in after(program) for pair in zip(p.inputs, p.unit.linear, strict=True)]
    linear = {v for v, on in pairs if on and not jx.is_literal(v)}
    return [v for piece in before(program) for v in piece.outputs if v in linear]


def shareable(program: Program, part: Program, keys: Sequence[Any], ranks: int) -> bool:
    """Whether the epilogue on parts of a microbatch's rows gives what it gives on all of them.

    `part` is the loss on a part. Not so where the epilogue draws random numbers (`keys` are their variables), reads the
    prologue's activations or outputs by layer, reads anything but rows from the stack, or where rows are coupled.
    """
    assert program.main is not None
    random = jx.depends(program.eqns, keys)
    own = set(program.main.outputs)
    inputs = {v for p in after(program) for v in p.inputs if not jx.is_literal(v)}
    pairs: list[Any] = list(zip(program.main.outputs, part.main.outputs if part.main else (), strict=False))
    return (
        len(pairs) == len(own)
        and not side(program)
        and not any(v in random for v in inputs - own)
        and not inputs & set(program.main.outputs[program.main.carry :])
        and not program.coupled
        and all(
            v.aval.ndim > 0
            and v.aval.shape == (w.aval.shape[0] * ranks, *w.aval.shape[1:])
            and jnp.issubdtype(v.aval.dtype, jnp.number)
            for v, w in pairs[: program.main.carry]
        )
    )
