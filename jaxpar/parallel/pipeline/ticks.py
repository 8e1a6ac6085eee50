"""Pipeline parallelism: the layers of a stack on the ranks of `pipe`, microbatches passing through them (Huang et al.
2019, GPipe; Narayanan et al. 2021, Megatron-LM).

    per rank       L/p layers, their gradients and optimizer state; activations of `schedule.slots` microbatches
    sent per tick  one activation to the next rank, one cotangent to the one before

Every rank runs one program. A tick is a forward and a backward of one chunk of layers, each of a microbatch that the
schedule's table names; three scans go over the ticks: forwards only, both, backwards only. Nothing branches: where a
rank has nothing to do it computes all the same, as others do at that moment, and what it computes is dropped.

What stands before the stack (prologue: embedding, masks, positions) is computed by every rank for the microbatch at
hand, so that only the residual stream is sent. What stands after it (epilogue: norm, head, loss) follows at once when a
microbatch leaves the last layer, and its backward with it; where the rows of a microbatch divide among the ranks, each
takes its part of them, since the head of a large vocabulary on the last rank alone would hold up all. Parameters of
both belong to no stage: the sum of their gradients over `pipe` is right whatever ranks used them, tied ones included.

In plain JAX: `experiments/naive/gpipe.py`, `experiments/naive/one_f_one_b.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ... import collectives
from ...jaxprs import jaxpr as jx
from ...slicing.pieces import Access
from ...slicing.program import Program, backward, forward, read
from .chunks import AXIS, Cotangents, Cut, Message, after, before
from .schedules import Kind, Phase


class _Masked:
    """Access whose gradients count only where a condition holds. Never times zero: what is dropped may be NaN."""

    def __init__(self, access: Access, condition: jax.Array):
        self.fetch, self._give, self.condition = access.fetch, access.give, condition

    def give(self, index: int, cotangent: jax.Array, sliced: bool) -> jax.Array | None:
        return self._give(index, jnp.where(self.condition, cotangent, jnp.zeros_like(cotangent)), sliced)


def _op(kind: Kind, row: Any) -> dict[str, jax.Array]:
    """What this rank runs at a tick: whether anything, and of which chunk and microbatch."""
    return {name: row[f"{kind}_{name}"] for name in ("valid", "chunk", "microbatch")}


def with_totals(grads: Sequence[Any], which: Sequence[int], totals: Sequence[Any]) -> list[Any]:
    """Gradients, some of them replaced."""
    out = list(grads)
    for i, total in zip(which, totals, strict=True):
        out[i] = total
    return out


@dataclass(frozen=True)
class Carry:
    """What one tick hands to the next.

    Attributes:
      message: from the rank before.
      cotangents: those of a message, from the rank behind.
      stash: what backwards need of forwards, [slots, ...]; no weights.
      late: cotangents of the epilogue for backwards of later ticks [microbatches, ...], or None (`Schedule.late`).
      grads: accumulated gradients, one for each leaf.
      sums: outputs of the loss, added up over microbatches.
    """

    message: Message
    cotangents: Message
    stash: list[jax.Array]
    late: Cotangents | None
    grads: list[jax.Array | None]
    sums: list[jax.Array]


jax.tree_util.register_dataclass(Carry, [f.name for f in dataclasses.fields(Carry)], [])


@dataclass(frozen=True)
class Pipeline(Cut):
    """One sliced loss under one schedule, to be run inside `shard_map`.

    Attributes:
      program, schedule: the loss on the rows of one microbatch, and its schedule.
      access: how parameters are fetched and gradients given.
      leaves: what this rank stores; of stages' own leaves its layers, chunk by chunk, on dim 0.
      values: `values(microbatch)`, those of the program's inputs.
      summed: positions of the outputs to add up.
      seeds: cotangents of outputs, by position; None for a forward pass alone (under `schedule.forwards`).
      shared: the loss on the rows of one rank's part of a microbatch, if the ranks share the epilogue, and `part`, its
        values as `values`.
    """

    access: Access
    leaves: Sequence[jax.Array]
    values: Callable[[jax.Array], list[Any]]
    summed: Sequence[int]
    seeds: dict[int, jax.Array] | None = None
    shared: Program | None = None
    part: Callable[[jax.Array], list[Any]] | None = None

    # -- all ticks -----------------------------------------------------------------------------------------------------

    def run(self) -> tuple[list[jax.Array | None], list[jax.Array]]:
        """Gradients as accumulated, None where there are none, and this rank's part of the summed outputs."""
        schedule, rank = self.schedule, lax.axis_index(AXIS)
        rows = {name: jnp.asarray(table)[:, rank] for name, table in schedule.arrays().items()}
        rows["epilogue"] = jnp.array([schedule.epilogue(tick) or 0 for tick in range(schedule.ticks)])
        row = jax.tree.map(lambda x: x[0], rows)
        carry, saved = self._start_of(row)
        carry = carry if self.seeds is None else self._with_grads(carry, saved, row)
        for repeats, phases in schedule.phases():
            first, length = phases[0].start, sum(phase.length for phase in phases)

            def lap(carry: Carry, rows: Any, phases: list[Phase] = phases) -> tuple[Carry, None]:
                at = 0
                for phase in phases:
                    part = jax.tree.map(lambda x, at=at, n=phase.length: x[at : at + n], rows)
                    carry, _ = lax.scan(self._tick(phase, saved, carry, part), carry, part)
                    at += phase.length
                return carry, None

            part = jax.tree.map(lambda x, a=first, n=repeats * length: x[a : a + n], rows)
            if repeats == 1:
                carry, _ = lap(carry, part)
            else:
                laps = jax.tree.map(lambda x, n=repeats, k=length: x.reshape(n, k), part)
                carry, _ = lax.scan(lap, carry, laps)
        return carry.grads, carry.sums

    def once(self, phases: Sequence[Phase]) -> list[Carry]:
        """One tick of each of these phases, from zeros, to look at."""
        row = {name: jnp.asarray(table)[0, lax.axis_index(AXIS)] for name, table in self.schedule.arrays().items()}
        row["epilogue"] = jnp.int32(0)
        carry, saved = self._start_of(row)
        return [self.tick(phase, saved, carry, row) for phase in phases]

    def _tick(self, phase: Phase, saved: Any, carry: Carry, rows: Any) -> Callable[..., Any]:
        """The body of a phase's scan, without what nobody reads: the embedding in a tick that needs only its masks."""
        row = jax.tree.map(lambda x: x[0], rows)
        flat, out = jx.trace(lambda carry, row: self.tick(phase, saved, carry, row), carry, row)
        body = jx.run(jx.live(flat.eqns, flat.outvars), [*flat.constvars, *flat.invars], flat.outvars)
        tree = jax.tree.structure(out)
        return lambda carry, row: (jax.tree.unflatten(tree, body(*flat.consts, *jax.tree.leaves((carry, row)))), None)

    def _start_of(self, row: Any) -> tuple[Carry, Any]:
        """The first carry, all zeros and without gradients, and the structure of what is stashed."""
        variables = self.message(self.program)
        padded = self.padded(jax.tree.map(lambda v: jnp.zeros(v.aval.shape, v.aval.dtype), variables))
        sums = [jnp.zeros((), jnp.float32) for _ in self.summed]
        if self.seeds is None:
            return Carry(padded, Message([], []), [], None, [], sums), None

        def stashed(row: Any) -> Any:
            op = _op("F", row)
            env = self.program.environment(self.values(op["microbatch"]))
            forward(before(self.program), self.access, self.leaves, env, False)
            return self.forward(env, op, padded, True)[1]

        saved = jax.eval_shape(stashed, row)
        stash = [jnp.zeros((self.schedule.slots, *x.shape), x.dtype) for x in saved.values]
        late = None
        if self.schedule.late:
            made = Cotangents(variables.where(self.linear), self.side())
            late = jax.tree.map(lambda v: jnp.zeros((self.schedule.microbatches, *v.aval.shape), v.aval.dtype), made)
        return Carry(padded, padded.where(self.linear), stash, late, [None] * len(self.leaves), sums), saved

    def _with_grads(self, carry: Carry, saved: Any, row: Any) -> Carry:
        """The first carry with zeros for the gradients that there will be."""
        every = Phase(0, 1, True, True, True)
        grads = jax.eval_shape(lambda carry, row: self.tick(every, saved, carry, row), carry, row).grads
        return dataclasses.replace(carry, grads=[None if g is None else jnp.zeros(g.shape, g.dtype) for g in grads])

    # -- one tick ------------------------------------------------------------------------------------------------------

    def forward(self, env: dict[Any, Any], op: Any, message: Message, grad: bool) -> tuple[Message, Any]:
        """One chunk of layers on a message: the next message, and what the backward needs."""
        return self.chunk(env, op, self.entered(env, op, message), grad)

    def entered(self, env: dict[Any, Any], op: Any, message: Message) -> Message:
        """A message, or in the first stage what the prologue made."""
        _, init, _ = self._inputs(env, op)
        first = self._stage(op) == 0
        return Message([jnp.where(first, a, b) for a, b in zip(init, message.carry, strict=True)], message.by_layer)

    def chunk(self, env: dict[Any, Any], op: Any, message: Message, grad: bool) -> tuple[Message, Any]:
        """One chunk of layers on a message that is there, in the first stage too."""
        k, first = self.stack.carry, self._stage(op) == 0
        consts, _, xs = self._inputs(env, op)
        outs, saved = self.stage.forward(
            self.access, self.leaves, [*consts, *message.carry, *xs], grad, *self.layers(op)
        )
        by_layer = []
        for j, buffer in zip(self.collected, message.by_layer, strict=True):
            buffer = jnp.where(first, jnp.zeros_like(buffer), buffer)
            by_layer.append(lax.dynamic_update_slice_in_dim(buffer, outs[k + j], self._start(op), axis=0))
        return Message(outs[:k], by_layer), saved

    def epilogue(
        self, env: dict[Any, Any], message: Message, microbatch: jax.Array, grads: list[Any], sums: list[jax.Array]
    ) -> tuple[list[Any], list[jax.Array], Cotangents | None]:
        """The loss of the microbatch that has left the last layer, and its gradients: grads, sums, and cotangents, if
        there are any.
        """
        last = self._is_last
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
        wanted = Cotangents(variables.where(self.linear), self.side())
        made = jax.tree.map(lambda v: cts.get(v, jnp.zeros(v.aval.shape, v.aval.dtype)), wanted)
        if self.shared is not None:
            made = jax.tree.map(lambda x: collectives.all_gather(x, [AXIS], 0), made)
        return grads, sums, made

    def backward(
        self, env: dict[Any, Any], op: Any, saved: Any, cts: Message, grads: list[Any]
    ) -> tuple[list[Any], Message, dict[Any, Any]]:
        """Gradients, cotangents for the rank before, and those of what the prologue made."""
        own = self.stack.unit.leaves
        totals, ct_in = self.stage.backward(
            _Masked(self.access, op["valid"]),
            self.leaves,
            self.known(env, op),
            saved,
            self.given(op, cts),
            [grads[i] for i in own],
            *self.layers(op),
        )
        grads = with_totals(grads, own, totals)
        ct_consts, ct_carry, ct_xs = self.parts(ct_in)
        return grads, Message(ct_carry, cts.by_layer), self.of_prologue(op, ct_consts, ct_carry, ct_xs)

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

    def tick(self, phase: Phase, saved: Any, carry: Carry, row: Any) -> Carry:
        """One tick. `row` is the schedule's for this rank; `saved` the structure of what is stashed."""
        grads, stash, late = list(carry.grads), carry.stash, carry.late
        sums, message, cotangents = carry.sums, carry.message, carry.cotangents
        program, last = self.program, self._is_last
        made: Cotangents | None = None
        if phase.forward:
            op = _op("F", row)
            env = program.environment(self.values(op["microbatch"]))
            forward(before(self.program), self.access, self.leaves, env, False)
            outs, new = self.forward(env, op, message, bool(self.seeds))
            if self.seeds:
                stash = [
                    lax.dynamic_update_index_in_dim(a, x, row["write"], axis=0)
                    for a, x in zip(stash, new.values, strict=True)
                ]
            if phase.epilogue:
                grads, sums, made = self.epilogue(env, outs, row["epilogue"], grads, sums)
                if late is not None:
                    put = lambda a, x: lax.dynamic_update_index_in_dim(a, x, row["epilogue"], axis=0)
                    late = jax.tree.map(put, late, made)
            message = jax.tree.map(lambda x: collectives.shift(x, AXIS, 1), outs)
        if phase.backward:
            op = _op("B", row)
            env = program.environment(self.values(op["microbatch"]))
            tape = forward(before(self.program), self.access, self.leaves, env, True)
            if late is not None:
                made = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, op["microbatch"], keepdims=False), late)
            ends = last & (op["chunk"] == self.schedule.chunks - 1)
            if made is not None:
                cotangents = jax.tree.map(lambda a, b: jnp.where(ends, a, b), self.padded(made.message), cotangents)
            here = dataclasses.replace(
                saved, values=[lax.dynamic_index_in_dim(a, row["read"], keepdims=False) for a in stash]
            )
            grads, sent, of_prologue = self.backward(env, op, here, cotangents, grads)
            for v, ct in zip(self.side(), made.side, strict=True) if made is not None else ():
                ct = jnp.where(ends & op["valid"], ct, jnp.zeros_like(ct))
                of_prologue[v] = of_prologue[v] + ct if v in of_prologue else ct
            grads = backward(before(self.program), self.access, self.leaves, tape, of_prologue, grads)
            cotangents = jax.tree.map(lambda x: collectives.shift(x, AXIS, -1), sent)
        return Carry(message, cotangents, stash, late, grads, sums)
