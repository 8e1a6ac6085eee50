"""What ranks of a pipeline run, whatever the schedule: one chunk of layers forwards and backwards, and the epilogue."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ... import collectives
from ...program import jaxpr as jx
from ...slicing.access import Access
from ...slicing.loop import LayerLoop
from ...slicing.pieces import InFlight
from ...slicing.program import Program, backward, forward, read
from ...slicing.stash import Stash
from .chunks import AXIS, Cotangents, Cut, Message, after, before, side
from .distributed_prologue import SharedPrologues
from .unstaged_params import UnstagedParams


class _Masked:
    """Access whose gradients count only where a condition holds. Never times zero: what is dropped may be NaN."""

    def __init__(self, access: Access, condition: jax.Array):
        self.fetch, self._give, self.condition = access.fetch, access.give, condition

    def give(self, index: int, cotangent: jax.Array, sliced: bool) -> jax.Array | None:
        return self._give(index, jnp.where(self.condition, cotangent, jnp.zeros_like(cotangent)), sliced)


def with_totals(grads: Sequence[Any], which: Sequence[int], totals: Sequence[Any]) -> list[Any]:
    """Gradients, some of them replaced."""
    out = list(grads)
    for i, total in zip(which, totals, strict=True):
        out[i] = total
    return out


def dce(fun: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """A function with dead code eliminated: the embedding where only its masks are needed."""
    flat, out = jx.trace(fun, *args)
    run = jx.run(jx.live(flat.eqns, flat.outvars), [*flat.constvars, *flat.invars], flat.outvars)
    tree = jax.tree.structure(out)
    return lambda *args: jax.tree.unflatten(tree, run(*flat.consts, *jax.tree.leaves(args)))


@dataclass(frozen=True)
class Engine(Cut):
    """One sliced loss under one schedule, to be run inside `shard_map`.

    Attributes:
      program, schedule: the loss on the rows of one microbatch, and its schedule.
      access: how parameters are fetched and gradients given (`unstaged_params.py`).
      leaves: what this rank stores, or of leaves that no stage owns what was fetched; of stages' own its layers, chunk
        by chunk, on dim 0.
      values: `values(microbatch)`, those of the program's inputs.
      summed: positions of the outputs to add up.
      seeds: cotangents of outputs, by position; None for a forward pass alone (under `schedule.forwards`).
      shared: the loss on the rows of one rank's part of a microbatch, if the ranks share the epilogue, and `part`, its
        values as `values`.
    """

    access: UnstagedParams
    leaves: Sequence[jax.Array]
    values: Callable[[jax.Array], list[Any]]
    summed: Sequence[int]
    seeds: dict[int, jax.Array] | None = None
    shared: Program | None = None
    part: Callable[[jax.Array], list[Any]] | None = None

    @property
    def prologues(self) -> SharedPrologues:
        """Those that the ranks share, if they do (`distributed_prologue.py`)."""
        ranks, m = self.schedule.ranks, self.schedule.microbatches
        return SharedPrologues(self.program, self.access, self.leaves, self.values, ranks, m)

    def with_prologues(self, grads: Sequence[Any], behind: Sequence[jax.Array]) -> list[Any]:
        """Gradients with those of the prologues that this rank has computed ahead, whose cotangents are `behind`."""
        return self.prologues.backward(behind, list(grads)) if behind else list(grads)

    def entering(self) -> dict[str, list[int]]:
        """By tick: the microbatch that enters stage 0, or 0, and whose cotangents leave it, or -1."""
        found: dict[str, list[int]] = {"entered": [], "pulled": []}
        for column in self.schedule.table():
            first = [op for op in column[0] if op.chunk == 0]
            found["entered"].append(next((op.microbatch for op in first if op.kind == "F"), 0))
            found["pulled"].append(next((op.microbatch for op in first if op.kind in "BI"), -1))
        return found

    def entered(self, env: dict[Any, Any], op: Any, message: Message) -> Message:
        """A message, or in the first stage what the prologue made."""
        _, init, _ = self._inputs(env, op)
        first = self._stage(op) == 0
        return Message([jnp.where(first, a, b) for a, b in zip(init, message.carry, strict=True)], message.by_layer)

    def chunk(
        self,
        env: dict[Any, Any],
        op: Any,
        message: Message,
        grad: bool,
        stash: Stash | None = None,
        flight: InFlight | None = None,
        again: bool = False,
    ) -> LayerLoop:
        """One chunk of layers on a message that has `entered`: the next message, and what the backward needs, as
        `Stack.forwards`; with what is in flight before it, and after.
        """
        k, first = self.stack.carry, self._stage(op) == 0
        consts, _, xs = self._inputs(env, op)

        def sent(made: tuple[Any, ...]) -> tuple[Any, ...]:
            outs, *rest = made
            by_layer = []
            for j, buffer in zip(self.collected, message.by_layer, strict=True):
                buffer = jnp.where(first, jnp.zeros_like(buffer), buffer)
                by_layer.append(lax.dynamic_update_slice_in_dim(buffer, outs[k + j], self._start(op), axis=0))
            return (Message(outs[:k], by_layer), *rest)

        inputs = [*consts, *message.carry, *xs]
        loop = self.stage.forwards(
            self.access, self.leaves, inputs, grad, *self.layers(op), stash, flight=flight, again=again
        )
        return loop.then(sent)

    def epilogue(
        self, env: dict[Any, Any], message: Message, microbatch: jax.Array, grads: list[Any], sums: list[jax.Array]
    ) -> tuple[list[Any], list[jax.Array], Cotangents | None]:
        """The loss of the microbatch that leaves the last layer: gradients, sums, cotangents if there are any."""
        last = self.is_last
        program, access = self.program, _Masked(self.access, last)
        message = self.whole(message)
        if self.shared is not None and self.part is not None:
            program, access = self.shared, self.access
            env = program.environment(self.part(microbatch))
            forward(before(program), access, self.leaves, env, False)
            mine = jax.tree.map(lambda x: jnp.where(last, x, jnp.zeros_like(x)), message)
            message = jax.tree.map(lambda x: collectives.reduce_scatter(x, [AXIS], 0), mine)
        variables = self.message(program)
        env.update(zip(jax.tree.leaves(variables), jax.tree.leaves(message), strict=True))
        tape = forward(after(program), access, self.leaves, env, bool(self.seeds))
        found = [read(env, program.outputs[i]) for i in self.summed]
        if self.shared is None:
            found = [jnp.where(last, x, 0) for x in found]
        sums = [s + x for s, x in zip(sums, found, strict=True)]
        if not self.seeds:
            return grads, sums, None
        cts = program.seeded(self.seeds)
        grads = backward(after(program), access, self.leaves, tape, cts, grads)
        wanted = Cotangents(variables.where(self.linear), side(self.program))
        made = jax.tree.map(lambda v: cts.get(v, jnp.zeros(v.aval.shape, v.aval.dtype)), wanted)
        if self.shared is not None:
            made = jax.tree.map(lambda x: collectives.all_gather(x, [AXIS], 0), made)
        return grads, sums, made

    def backward(
        self,
        env: dict[Any, Any],
        op: Any,
        saved: Any,
        stash: Stash,
        cts: Message,
        grads: list[Any],
        flight: InFlight | None = None,
        again: bool = False,
    ) -> LayerLoop:
        """Gradients, cotangents for the rank before, those of what the prologue made, and what is in flight after it.
        What the forward saved is in the stash; `saved` is its structure.
        """
        own, access = self.stack.unit.leaves, _Masked(self.access, op["valid"])
        start, real = self.layers(op)
        if flight is not None:  # a gradient is given in another tick, which may be valid where this one is not
            here = jnp.full(self.each, op["valid"])
            access, real = self.access, here if real is None else real & here

        def sent(made: tuple[Any, ...]) -> tuple[list[Any], Message, dict[Any, Any], InFlight | None]:
            totals, cotangents, *rest = made
            ct_consts, ct_carry, ct_xs = self.parts(cotangents)
            of_prologue = self.of_prologue(op, ct_consts, ct_carry, ct_xs)
            after = rest[0] if rest else None
            return with_totals(grads, own, totals), Message(ct_carry, cts.by_layer), of_prologue, after

        return self.stage.backwards(
            access,
            self.leaves,
            self.known(env, op),
            saved,
            self.given(op, cts),
            [grads[i] for i in own],
            start,
            real,
            stash,
            flight,
            again,
        ).then(sent)

    def layers(self, op: Any) -> tuple[jax.Array, jax.Array | None]:
        """The first of a chunk's layers among this rank's, and which of them are the model's; None if all are."""
        return op["chunk"] * self.each, self._real(op)

    def known(self, env: dict[Any, Any], op: Any) -> list[Any]:
        """The stack's inputs as a backward has them: without the carry."""
        consts, _, xs = self._inputs(env, op)
        return [*consts, *([None] * self.stack.carry), *xs]

    def given(self, op: Any, cts: Message) -> list[Any]:
        """Cotangents of one chunk's outputs."""
        stack, k = self.stack, self.stack.carry
        by_layer = dict(zip([j for j in self.collected if stack.unit.active[k + j]], cts.by_layer, strict=True))
        given = list(cts.carry)
        for j, v in enumerate(stack.outputs[k:]):
            if stack.unit.active[k + j]:
                shape = (self.each, *v.aval.shape[1:])
                given.append(
                    lax.dynamic_slice_in_dim(by_layer[j], self._start(op), self.each, axis=0)
                    if j in by_layer
                    else jnp.zeros(shape, v.aval.dtype)
                )
        return given

    def parts(self, cts: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Cotangents of a chunk's linear inputs: constants, carry, and what it scans."""
        consts, carry, _ = (sum(part) for part in self.stack.parts(self.stack.unit.linear))
        return list(cts[:consts]), list(cts[consts : consts + carry]), list(cts[consts + carry :])

    def of_prologue(
        self, op: Any, ct_consts: Sequence[Any], ct_carry: Sequence[Any], ct_xs: Sequence[Any]
    ) -> dict[Any, Any]:
        """The cotangents of what the prologue made, by variable."""
        stack = self.stack
        n, k, linear = stack.consts, stack.carry, stack.unit.linear
        first = self._stage(op) == 0
        made: dict[Any, Any] = {}

        def add(atom: Any, ct: jax.Array, condition: jax.Array) -> None:
            if not jx.is_literal(atom):
                ct = jnp.where(condition, ct, jnp.zeros_like(ct))
                made[atom] = made[atom] + ct if atom in made else ct

        atoms = [(i, a) for i, a in enumerate(stack.inputs) if linear[i]]
        for (i, atom), ct in zip(atoms, [*ct_consts, *ct_carry, *ct_xs], strict=True):
            if i < n:
                add(atom, ct, op["valid"])
            elif i < n + k:
                add(atom, ct, op["valid"] & first)
            else:
                whole = jnp.zeros((stack.length + self.padding, *ct.shape[1:]), ct.dtype)
                whole = lax.dynamic_update_slice_in_dim(whole, ct, self._start(op), axis=0)
                add(atom, whole[: stack.length], op["valid"])
        return made
