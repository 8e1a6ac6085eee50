"""Where a pipeline cuts a loss: what runs before the layers, what after, whether the ranks may share the latter; which
layers are a chunk, and what the message between two chunks holds.
"""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ...program import jaxpr as jx
from ...slicing.halves import merge, pick
from ...slicing.pieces import Stack
from ...slicing.program import Program, read
from ...strategy.schedules.operations import stage_of
from .schedules import Schedule

AXIS = "pipe"


def padded(layers: int, ranks: int, chunks: int) -> str:
    """What the layers by which chunks have more room than the stack has cost, in a sentence; "" where they fill it.

    >>> padded(126, ranks=16, chunks=7)
    '126 layers in 16 x 7 chunks of 2 take the time and the memory of 224; with chunks=4, of 128'
    """

    def room(chunks: int) -> int:
        return -(-layers // (ranks * chunks)) * ranks * chunks

    if room(chunks) == layers:
        return ""
    best = min(range(chunks, 0, -1), key=room)
    less = f"; with chunks={best}, of {room(best)}" if room(best) < room(chunks) else ""
    chunk = f"{ranks} x {chunks} chunks of {room(chunks) // ranks // chunks}"
    return f"{layers} layers in {chunk} take the time and the memory of {room(chunks)}{less}"


def before(program: Program) -> tuple[Any, ...]:
    """The prologue: what runs before the stack that is cut."""
    return program.pieces[: program.pieces.index(program.main)]  # type: ignore[arg-type]


def after(program: Program) -> tuple[Any, ...]:
    """The epilogue."""
    return program.pieces[program.pieces.index(program.main) + 1 :]  # type: ignore[arg-type]


def side(program: Program) -> list[Any]:
    """Variables that the prologue computes and the epilogue reads, with derivatives."""
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


@functools.partial(jax.tree_util.register_dataclass, data_fields=["carry", "by_layer"], meta_fields=[])
@dataclass(frozen=True)
class Message:
    """What goes from one chunk of layers to the next; or for each part of it its variable, a flag, its cotangent.

    Attributes:
      carry: the stack's carry between two layers, for most models the residual stream.
      by_layer: those of the stack's outputs by layer that are read after it, [layers, ...], as far as there are any.
    """

    carry: list[Any]
    by_layer: list[Any]

    def where(self, flags: "Message") -> "Message":
        """The parts whose flag is true."""
        pick = lambda parts, flags: [x for x, on in zip(parts, flags, strict=True) if on]
        return Message(pick(self.carry, flags.carry), pick(self.by_layer, flags.by_layer))


class Cotangents(NamedTuple):
    """What an epilogue's backward makes: of the message's parts that have cotangents, and of `side` variables."""

    message: Message
    side: list[Any]


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
    def padding(self) -> int:
        """Layers by which the chunks have more room than the stack has layers."""
        return self.each * self.schedule.ranks * self.schedule.chunks - self.stack.length

    @property
    def linear(self) -> Message:
        """Which parts of the message have cotangents."""
        k, active = self.stack.carry, self.stack.unit.active
        return Message(list(active[:k]), [active[k + j] for j in self.collected])

    def message(self, program: Program) -> Message:
        """The variables of a program, of the loss on a microbatch or on a part of it, that leave the last stage."""
        assert program.main is not None
        k, outputs = program.main.carry, program.main.outputs
        return Message(list(outputs[:k]), [outputs[k + j] for j in self.collected])

    def full(self, cotangents: Message, others: Message) -> Message:
        """Cotangents as a message, whose other parts are `others`."""
        linear = self.linear
        carry = merge(linear.carry, cotangents.carry, others.carry)
        return Message(carry, merge(linear.by_layer, cotangents.by_layer, others.by_layer))

    def no_extras(self) -> tuple[list[jax.Array], list[jax.Array]]:
        """Zeros for cotangents of what layers read beside the carry."""
        stack = self.stack
        atoms, linear = stack.parts(stack.inputs), stack.parts(stack.unit.linear)
        consts, _, xs = (pick(on, some) for on, some in zip(linear, atoms, strict=True))
        zeros = lambda x, shape: jnp.zeros(shape, x.aval.dtype)
        return [zeros(v, v.aval.shape) for v in consts], [zeros(v, (self.each, *v.aval.shape[1:])) for v in xs]

    def _inputs(self, env: dict[Any, Any], op: Any) -> tuple[list[Any], list[Any], list[Any]]:
        """The stack's constants, first carry, and this chunk's part of what it scans besides parameters."""
        stack = self.stack
        consts, init, xs = stack.parts([read(env, v) for v in stack.inputs])

        def part(x: jax.Array) -> jax.Array:
            if self.padding:  # with copies of the last layer's: padded layers compute too, and must not make NaN
                x = jnp.concatenate([x, jnp.repeat(x[-1:], self.padding, axis=0)])
            return lax.dynamic_slice_in_dim(x, self._start(op), self.each, axis=0)

        return consts, init, [part(x) for x in xs]

    def _stage(self, op: Any) -> jax.Array:
        """The stage that this rank's chunk is."""
        return stage_of(self.schedule.placement, self.schedule.ranks, lax.axis_index(AXIS), op["chunk"])

    def _start(self, op: Any) -> jax.Array:
        """The first layer of this rank's chunk, counted in the stack."""
        return self._stage(op) * self.each

    @property
    def is_last(self) -> jax.Array:
        """Whether this rank holds the last stage."""
        return lax.axis_index(AXIS) == self.schedule.place(self.schedule.ranks * self.schedule.chunks - 1).rank

    def _real(self, op: Any) -> jax.Array | None:
        """Which layers of this rank's chunk are the model's; None if all are."""
        return self._start(op) + jnp.arange(self.each) < self.stack.length if self.padding else None

    def padded(self, message: Message) -> Message:
        """A message whose outputs by layer have room for all chunks' layers."""
        widths = lambda x: [(0, self.padding)] + [(0, 0)] * (x.ndim - 1)
        return Message(message.carry, [jnp.pad(x, widths(x)) if self.padding else x for x in message.by_layer])

    def whole(self, message: Message) -> Message:
        """A message as the stack's outputs: those by layer without padding."""
        return Message(message.carry, [x[: self.stack.length] for x in message.by_layer])
