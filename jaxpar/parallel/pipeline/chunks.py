"""Cut a loss into prologue, chunks of layers and epilogue, and define the message between two chunks.

                          rank 0                     rank 1
    prologue    ->   layers 0..3   - Message ->   layers 4..7   ->   epilogue
    embedding,       chunk 0 of      carry,       chunk 0 of         norm, head,
    masks            rank 0          by_layer     rank 1             loss

    a message     carry      the stack's carry between two layers: usually the residual stream
                  by_layer   outputs that layers make and the epilogue reads: [layers, ...], zeros for later layers
    variables     bypass     the prologue computes them and the epilogue reads them; they are not sent, since every rank
                             computes the prologue of the microbatch that it works on

With L layers, p ranks and v chunks per rank, a chunk has ceil(L / (p v)) layers. The last chunks are padded with
identity layers if L is not a multiple of p v. `Staged` (`layout/leaves.py`) stores the layers so that each rank has
those of its chunks, also in the order of a V.
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
    """Return a sentence on the cost of padding; "" if the chunks are full.

    >>> padded(126, ranks=16, chunks=7)
    '126 layers in 16 x 7 chunks of 2 take the time and the memory of 224; with chunks=4, of 128'
    """

    def padded_layers(chunks: int) -> int:
        return -(-layers // (ranks * chunks)) * ranks * chunks

    if padded_layers(chunks) == layers:
        return ""
    # Among equal paddings, the most chunks: more chunks have a smaller bubble.
    best = min(range(chunks, 0, -1), key=padded_layers)
    hint = f"; with chunks={best}, of {padded_layers(best)}" if padded_layers(best) < padded_layers(chunks) else ""
    chunk = f"{ranks} x {chunks} chunks of {padded_layers(chunks) // ranks // chunks}"
    return f"{layers} layers in {chunk} take the time and the memory of {padded_layers(chunks)}{hint}"


def prologue_pieces(program: Program) -> tuple[Any, ...]:
    """Return the pieces that run before the stack that is cut."""
    return program.pieces[: program.pieces.index(program.main)]  # type: ignore[arg-type]


def epilogue_pieces(program: Program) -> tuple[Any, ...]:
    """Return the pieces that run after the stack that is cut."""
    return program.pieces[program.pieces.index(program.main) + 1 :]  # type: ignore[arg-type]


def bypass_variables(program: Program) -> list[Any]:
    """Return the variables with cotangents that the prologue computes and the epilogue reads."""
    pairs = [pair for p in epilogue_pieces(program) for pair in zip(p.inputs, p.unit.active_inputs, strict=True)]
    # Integers, such as tokens that a loss compares with, have no cotangents.
    active = {v for v, is_active in pairs if is_active and not jx.is_literal(v)}
    return [v for piece in prologue_pieces(program) for v in piece.outputs if v in active]


def shareable(program: Program, part: Program, keys: Sequence[Any], ranks: int) -> bool:
    """Return whether the ranks may share the epilogue, each on its part of a microbatch's rows.

    They may not if the epilogue draws random numbers, or reads activations of the prologue or outputs by layer. Nor if
    the stack's carry is not an array of rows, or if the loss couples rows.

    Args:
      program: the loss on the rows of one microbatch.
      part: the loss on one rank's part of these rows.
      keys: the variables of random keys.
    """
    assert program.main is not None
    random = jx.depends(program.eqns, keys)
    stack_outputs = set(program.main.outputs)
    inputs = {v for p in epilogue_pieces(program) for v in p.inputs if not jx.is_literal(v)}
    pairs: list[Any] = list(zip(program.main.outputs, part.main.outputs if part.main else (), strict=False))
    return (
        len(pairs) == len(stack_outputs)
        # Cotangents of bypass variables would belong to a prologue on a part, whose backward does not run.
        and not bypass_variables(program)
        # Random numbers for a part would differ from those for all rows.
        and not any(v in random for v in inputs - stack_outputs)
        # Outputs by layer are [layers, ...]: dim 0 has no rows to divide.
        and not inputs & set(program.main.outputs[program.main.num_carry :])
        # The loss of a row would need other ranks' rows.
        and not program.coupled
        # The carry must divide along dim 0, since a reduce-scatter gives each rank its rows.
        and all(
            v.aval.ndim > 0
            and v.aval.shape == (w.aval.shape[0] * ranks, *w.aval.shape[1:])
            and jnp.issubdtype(v.aval.dtype, jnp.number)
            for v, w in pairs[: program.main.num_carry]
        )
    )


@functools.partial(jax.tree_util.register_dataclass, data_fields=["carry", "by_layer"], meta_fields=[])
@dataclass(frozen=True)
class Message:
    """The message from one chunk of layers to the next; also used for its variables, flags and cotangents.

    Attributes:
      carry: the stack's carry between two layers, for most models the residual stream.
      by_layer: the stack's outputs by layer that are read after it, [layers, ...] each.
    """

    carry: list[Any]
    by_layer: list[Any]

    def select(self, flags: "Message") -> "Message":
        """Return the parts whose flag is true."""
        return Message(pick(flags.carry, self.carry), pick(flags.by_layer, self.by_layer))


class Cotangents(NamedTuple):
    """The cotangents that an epilogue's backward makes.

    Attributes:
      message: of the message's parts that have cotangents.
      bypass: of the `bypass_variables`.
    """

    message: Message
    bypass: list[Any]


@dataclass(frozen=True)
class Cut:
    """The stack of one loss, cut into chunks of layers.

    Methods take `op`, the operation of this rank: a dict with `chunk` and `microbatch`, and `valid`, which is false if
    the rank is idle.

    Attributes:
      program: the loss on the rows of one microbatch.
      schedule: its schedule.
    """

    program: Program
    schedule: Schedule

    @property
    def stack(self) -> Stack:
        """Return the stack that is cut, with all its layers."""
        assert self.program.main is not None
        return self.program.main

    @property
    def layers_per_chunk(self) -> int:
        """Return the number of layers in one chunk, padding included."""
        return -(-self.stack.length // (self.schedule.ranks * self.schedule.chunks))

    @property
    def chunk_stack(self) -> Stack:
        """Return the stack with the layers of one chunk."""
        return dataclasses.replace(self.stack, length=self.layers_per_chunk)

    @property
    def by_layer_positions(self) -> list[int]:
        """Return the positions of the stack's outputs by layer that are read after it, so that messages carry them."""
        read_later = {v for piece in epilogue_pieces(self.program) for v in piece.inputs if not jx.is_literal(v)}
        # Outputs of the loss itself count too, such as metrics by layer.
        read_later.update(v for v in self.program.outputs if not jx.is_literal(v))
        ys = self.stack.outputs[self.stack.num_carry :]
        return [j for j, v in enumerate(ys) if v in read_later]

    @property
    def padding(self) -> int:
        """Return the number of layers by which all chunks together exceed the stack."""
        return self.layers_per_chunk * self.schedule.ranks * self.schedule.chunks - self.stack.length

    @property
    def has_cotangent(self) -> Message:
        """Return flags: whether a part of the message has a cotangent (integers, for example, have none)."""
        k, active = self.stack.num_carry, self.stack.unit.active
        return Message(list(active[:k]), [active[k + j] for j in self.by_layer_positions])

    def message_variables(self, program: Program) -> Message:
        """Return the variables of the message that leaves the last stage, in a loss on a microbatch or a part of it."""
        assert program.main is not None
        k, outputs = program.main.num_carry, program.main.outputs
        return Message(list(outputs[:k]), [outputs[k + j] for j in self.by_layer_positions])

    def merge_cotangents(self, cotangents: Message, message: Message) -> Message:
        """Return cotangents in the form of a message; the parts without cotangents come from `message`."""
        flags = self.has_cotangent
        carry = merge(flags.carry, cotangents.carry, message.carry)
        return Message(carry, merge(flags.by_layer, cotangents.by_layer, message.by_layer))

    def zero_extra_cotangents(self) -> tuple[list[jax.Array], list[jax.Array]]:
        """Return zero cotangents of the stack's constants, and of one chunk's scanned inputs."""
        stack = self.stack
        atoms, active = stack.parts(stack.inputs), stack.parts(stack.unit.active_inputs)
        consts, _, xs = (pick(flags, parts) for flags, parts in zip(active, atoms, strict=True))
        zeros = lambda x, shape: jnp.zeros(shape, x.aval.dtype)
        # Scanned inputs are [layers of a chunk, ...] in a chunk's backward.
        return (
            [zeros(v, v.aval.shape) for v in consts],
            [zeros(v, (self.layers_per_chunk, *v.aval.shape[1:])) for v in xs],
        )

    def _stack_inputs(self, env: dict[Any, Any], op: Any) -> tuple[list[Any], list[Any], list[Any]]:
        """Return the stack's constants, its first carry, and this chunk's slices of scanned inputs (no parameters)."""
        stack = self.stack
        consts, init, xs = stack.parts([read(env, v) for v in stack.inputs])

        def chunk_slice(x: jax.Array) -> jax.Array:
            # Pad with copies of the last layer's slice: padded layers compute too, and must not make NaN.
            if self.padding:
                x = jnp.concatenate([x, jnp.repeat(x[-1:], self.padding, axis=0)])
            return lax.dynamic_slice_in_dim(x, self._chunk_start(op), self.layers_per_chunk, axis=0)

        return consts, init, [chunk_slice(x) for x in xs]

    def _stage(self, op: Any) -> jax.Array:
        """Return the stage of this rank's chunk."""
        return stage_of(self.schedule.placement, self.schedule.ranks, lax.axis_index(AXIS), op["chunk"])

    def _chunk_start(self, op: Any) -> jax.Array:
        """Return the first layer of this rank's chunk, as a number in the stack."""
        return self._stage(op) * self.layers_per_chunk

    @property
    def is_last(self) -> jax.Array:
        """Return whether this rank holds the last stage."""
        return lax.axis_index(AXIS) == self.schedule.place(self.schedule.ranks * self.schedule.chunks - 1).rank

    def _is_layer(self, op: Any) -> jax.Array | None:
        """Return the mask of the chunk's layers that belong to the model, not to padding; None if all do."""
        # Padding is at the end of the stack, in the last chunks.
        return self._chunk_start(op) + jnp.arange(self.layers_per_chunk) < self.stack.length if self.padding else None

    def pad_by_layer(self, message: Message) -> Message:
        """Return a message whose outputs by layer have room for the layers of all chunks, padding included."""
        # Chunks write their layers in place, and the last ones write padding too.
        widths = lambda x: [(0, self.padding)] + [(0, 0)] * (x.ndim - 1)
        return Message(message.carry, [jnp.pad(x, widths(x)) if self.padding else x for x in message.by_layer])

    def trim_by_layer(self, message: Message) -> Message:
        """Return a message whose outputs by layer have the stack's layers alone: the inverse of `pad_by_layer`."""
        return Message(message.carry, [x[: self.stack.length] for x in message.by_layer])
