"""Where a pipeline cuts a loss: what runs before the layers, what after, whether the ranks may share the latter; which
layers are a chunk, and what the message between two chunks holds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ...jaxprs import jaxpr as jx
from ...slicing.pieces import Stack
from ...slicing.program import Program, read
from .schedules import Schedule

AXIS = "pipe"


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


@dataclass(frozen=True)
class Cut:
    """The stack of one loss cut into chunks of layers, and the message that goes from one to the next.

    Attributes:
      program: the loss on the rows of one microbatch.
      schedule: its schedule.
    """

    program: Program
    schedule: Schedule

    @property
    def stack(self) -> Stack:
        """The stack that is cut."""
        assert self.program.main is not None
        return self.program.main

    @property
    def each(self) -> int:
        """Layers in one chunk, the last chunk's padding included."""
        return -(-self.stack.length // (self.schedule.ranks * self.schedule.chunks))

    @property
    def stage(self) -> Stack:
        """The stack's layers of one chunk."""
        return dataclasses.replace(self.stack, length=self.each)

    @property
    def collected(self) -> list[int]:
        """The stack's outputs by layer that are read after it: they travel with the message."""
        read_later = {v for piece in after(self.program) for v in piece.inputs if not jx.is_literal(v)}
        read_later.update(v for v in self.program.outputs if not jx.is_literal(v))
        ys = self.stack.outputs[self.stack.carry :]
        return [j for j, v in enumerate(ys) if v in read_later]

    @property
    def linear(self) -> list[bool]:
        """Which parts of the message have cotangents."""
        active = self.stack.unit.active
        return [*active[: self.stack.carry], *(active[self.stack.carry + j] for j in self.collected)]

    def _message(self, program: Program) -> list[Any]:
        """The variables that the message holds after the last stage."""
        assert program.main is not None
        outputs, k = program.main.outputs, program.main.carry
        return [*outputs[:k], *(outputs[k + j] for j in self.collected)]

    @property
    def variables(self) -> list[Any]:
        """The same, of the loss on whole microbatches."""
        return self._message(self.program)

    def side(self) -> list[Any]:
        """Variables of the prologue that the epilogue differentiates."""
        return side(self.program)

    def _inputs(self, env: dict[Any, Any], op: Any) -> tuple[list[Any], list[Any], list[Any]]:
        """The stack's constants, first carry, and this chunk's part of what it scans besides parameters."""
        stack = self.stack
        consts, init, xs = stack.parts([read(env, v) for v in stack.inputs])
        missing = self.each * self.schedule.ranks * self.schedule.chunks - stack.length

        def part(x: jax.Array) -> jax.Array:
            if missing:  # the last layer's again: a layer that hands on must not meet what makes NaN
                x = jnp.concatenate([x, jnp.repeat(x[-1:], missing, axis=0)])
            return lax.dynamic_slice_in_dim(x, self._start(op), self.each, axis=0)

        return consts, init, [part(x) for x in xs]

    def _start(self, op: Any) -> jax.Array:
        """The first layer of this rank's chunk, counted in the stack."""
        return (op["chunk"] * self.schedule.ranks + lax.axis_index(AXIS)) * self.each

    def _real(self, op: Any) -> jax.Array | None:
        """Which layers of this rank's chunk are the model's; None if all are."""
        whole = self.each * self.schedule.ranks * self.schedule.chunks == self.stack.length
        return None if whole else self._start(op) + jnp.arange(self.each) < self.stack.length

    def _stacked(self, values: Sequence[jax.Array], every: bool = False) -> list[jax.Array]:
        """Parts of a message (all, or those with cotangents) with outputs by layer padded to whole stages."""
        by_layer = [False] * self.stack.carry + [True] * len(self.collected)
        flags = [b for b, on in zip(by_layer, self.linear, strict=True) if on or every]
        missing = self.each * self.schedule.ranks * self.schedule.chunks - self.stack.length
        widths = lambda x: [(0, missing)] + [(0, 0)] * (x.ndim - 1)
        return [jnp.pad(x, widths(x)) if pad and missing else x for x, pad in zip(values, flags, strict=True)]

    def _whole(self, message: Sequence[jax.Array]) -> list[jax.Array]:
        """A message as the stack's outputs."""
        k = self.stack.carry
        return [*message[:k], *(x[: self.stack.length] for x in message[k:])]
