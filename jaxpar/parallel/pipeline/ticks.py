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

import dataclasses
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ... import collectives
from ...slicing.loop import LayerLoop
from ...slicing.pieces import InFlight
from ...slicing.program import backward, forward
from ...slicing.stash import Stash
from .chunks import AXIS, Cotangents, Message, before, side
from .distributed_prologue import shared
from .ranks import Engine, dce
from .schedules import Kind, Phase


def _op(kind: Kind, row: Any) -> dict[str, jax.Array]:
    """What this rank runs at a tick: whether anything, and for which chunk and microbatch."""
    return {name: row[f"{kind}_{name}"] for name in ("valid", "chunk", "microbatch")}


@dataclass(frozen=True)
class Carry:
    """What one tick hands to the next.

    Attributes:
      message: from the rank before.
      cotangents: those of a message, from the rank behind.
      stash: what backwards need of forwards, [slots, ...]; no weights.
      late: cotangents of the epilogue for backwards of later ticks [`Schedule.waiting`, ...], or None where there are
        none.
      ahead: what enters the first layer, of the microbatches whose prologues this rank computes, [microbatches, ...];
        empty where all compute them in every tick (`distributed_prologue.py`).
      behind: cotangents of these.
      grads: accumulated gradients, one for each leaf.
      sums: outputs of the loss, added up over microbatches.
      flight: what ticks send ahead (`Stack`): the weights of the layer that is next, the gradients of the one before.
    """

    message: Message
    cotangents: Message
    stash: list[jax.Array]
    late: Cotangents | None
    ahead: list[jax.Array]
    behind: list[jax.Array]
    grads: list[jax.Array | None]
    sums: list[jax.Array]
    flight: InFlight | None = None


jax.tree_util.register_dataclass(Carry, [f.name for f in dataclasses.fields(Carry)], [])


@dataclass(frozen=True)
class Pipeline(Engine):
    """One sliced loss under a schedule in lockstep, to be run inside `shard_map`; fields as those of `Engine`."""

    def run(self) -> tuple[list[jax.Array | None], list[jax.Array]]:
        """Gradients as accumulated, None where there are none, and this rank's part of the summed outputs."""
        schedule, rank = self.schedule, lax.axis_index(AXIS)
        rows = {name: jnp.asarray(table)[:, rank] for name, table in schedule.arrays().items()}
        rows["epilogue"] = jnp.array([schedule.epilogue(tick) or 0 for tick in range(schedule.ticks)])
        rows |= {name: jnp.array(at) for name, at in self.entering().items()}
        row = jax.tree.map(lambda x: x[0], rows)
        carry, saved = self._start_of(row)
        if shared(self.program):
            carry = dataclasses.replace(carry, ahead=self.prologues.run())
        carry = carry if self.seeds is None else self._with_grads(carry, saved, row)
        carry = dataclasses.replace(carry, flight=carry.flight and self._flight())
        for repeats, phases in schedule.phases():
            first, length = phases[0].start, sum(phase.length for phase in phases)

            def lap(carry: Carry, rows: Any, phases: list[Phase] = phases) -> tuple[Carry, None]:
                at = 0
                for phase in phases:
                    carry = self._turned(carry, phase) if phase.start in self._turns else carry
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
        return self.with_prologues(self._landed(carry).grads, carry.behind), carry.sums

    def separated(self) -> list[tuple[int, Any]]:
        """How often a step runs each of its parts, and what one returns that runs it alone: for who counts."""
        schedule = self.schedule
        forwards, backwards, m = schedule.messages("F"), schedule.messages("B"), schedule.microbatches
        row = self._row()
        carry, saved = self._start_of(row)
        parts = []
        if shared(self.program):
            grads = self.with_prologues(carry.grads, carry.behind)
            ahead = dataclasses.replace(carry, ahead=self.prologues.run())
            parts = [(1, ahead), (1, dataclasses.replace(carry, grads=grads))]
        # m ticks have an epilogue: a forward and a backward each, and what that adds to them.
        for runs, flags in (
            (forwards - m, (True, False, False)),
            (backwards - m, (False, True, False)),
            (m, (True,) * 3),
        ):
            parts.append((runs, self.tick(Phase(0, 1, *flags), saved, carry, row)))
        if carry.flight is not None:
            late = dataclasses.replace(carry, grads=jax.tree.map(jnp.zeros_like, parts[-1][1].grads))
            parts += [(1, dataclasses.replace(carry, flight=self._flight())), (1, self._landed(late))]
            parts += [(len(self._turns), self._turned(carry, Phase(0, 1, False, True, False)))]
        return parts

    def _flight(self) -> InFlight | None:
        """What is in flight before the first tick, where every tick knows which layers the next one runs."""
        return self.stage.in_flight(self.access, self.leaves) if self.schedule.in_turn else None

    @functools.cached_property
    def _turns(self) -> list[int]:
        """The ticks before which a forward ran, or none, and that have none, or one: another layer is next."""
        phases = [phase for _, phases in self.schedule.phases() for phase in phases]
        return [after.start for before, after in itertools.pairwise(phases) if before.forward != after.forward]

    def _turned(self, carry: Carry, phase: Phase) -> Carry:
        """The carry before a phase whose first layer another phase has not sent ahead."""
        if carry.flight is None:
            return carry
        flight = self.stage.skipped(self.access, self.leaves, carry.flight, back=not phase.forward)
        return dataclasses.replace(carry, flight=flight)

    def _landed(self, carry: Carry) -> Carry:
        """The carry behind the last tick, with the gradients that are in flight."""
        if carry.flight is None:
            return carry
        grads = self.stage.landed(self.access, carry.flight, carry.grads)
        return dataclasses.replace(carry, grads=grads, flight=None)

    def _row(self) -> dict[str, jax.Array]:
        """What this rank looks up in the first tick."""
        row = {name: jnp.asarray(table)[0, lax.axis_index(AXIS)] for name, table in self.schedule.arrays().items()}
        return row | {name: jnp.int32(0) for name in ("epilogue", "entered", "pulled")}

    def held(self) -> tuple[list[jax.Array], list[jax.Array]]:
        """What forwards leave for backwards, in all slots and of zeros, and what I leaves for W: nothing here."""
        return self._start_of(self._row())[0].stash, []

    def _tick(self, phase: Phase, saved: Any, carry: Carry, rows: Any) -> Callable[..., Any]:
        """The body of a phase's scan, without what nobody reads: the embedding in a tick that needs only its masks."""
        row = jax.tree.map(lambda x: x[0], rows)
        body = dce(lambda carry, row: self.tick(phase, saved, carry, row), carry, row)
        return lambda carry, row: (body(carry, row), None)

    def _start_of(self, row: Any) -> tuple[Carry, Any]:
        """The first carry, all zeros and without gradients, and the structure of what is stashed."""
        variables = self.message(self.program)
        padded = self.padded(jax.tree.map(lambda v: jnp.zeros(v.aval.shape, v.aval.dtype), variables))
        sums = [jnp.zeros((), jnp.float32) for _ in self.summed]
        ahead = self.prologues.zeros() if shared(self.program) else []
        if self.seeds is None:
            return Carry(padded, Message([], []), [], None, ahead, [], [], sums), None

        def stashed(row: Any) -> Any:
            op = _op("F", row)
            env = self.program.environment(self.values(op["microbatch"]))
            forward(before(self.program), self.access, self.leaves, env, False)
            return self.chunk(env, op, self.entered(env, op, padded), True).run()[1]

        saved = jax.eval_shape(stashed, row)
        stash = [jnp.zeros((self.schedule.slots, *x.shape), x.dtype) for x in saved.values]
        late = None
        if self.schedule.waiting:
            made = Cotangents(variables.where(self.linear), side(self.program))
            count = self.schedule.waiting
            late = jax.tree.map(lambda v: jnp.zeros((count, *v.aval.shape), v.aval.dtype), made)
        none: list[jax.Array | None] = [None] * len(self.leaves)
        flight = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(self._flight))
        return Carry(padded, padded.where(self.linear), stash, late, ahead, list(ahead), none, sums, flight), saved

    def _with_grads(self, carry: Carry, saved: Any, row: Any) -> Carry:
        """The first carry with zeros for the gradients that there will be."""
        every = Phase(0, 1, True, True, True)

        def last(carry: Carry, row: Any) -> list[Any]:
            carry = self._landed(self.tick(every, saved, carry, row))
            return self.with_prologues(carry.grads, carry.behind)

        grads = jax.eval_shape(last, carry, row)
        return dataclasses.replace(carry, grads=[None if g is None else jnp.zeros(g.shape, g.dtype) for g in grads])

    def tick(self, phase: Phase, saved: Any, carry: Carry, row: Any) -> Carry:
        """One tick. `row` is the schedule's for this rank; `saved` the structure of what is stashed."""
        grads, stash, late = list(carry.grads), carry.stash, carry.late
        sums, message, cotangents = carry.sums, carry.message, carry.cotangents
        ahead, behind, given, flight = carry.ahead, carry.behind, dict[Any, Any](), carry.flight
        made = None if late is None else self._waiting(late, row)
        # Neither needs what the other makes: layer by layer side by side, one computes while the other waits.
        beside = phase.forward and phase.backward and late is not None
        sent = None
        if phase.forward:
            op = _op("F", row)
            env = self.program.environment(self.values(op["microbatch"]))
            forward(before(self.program), self.access, self.leaves, env, False)
            if ahead:
                env |= self.prologues.entering(ahead, row["entered"])
            into = Stash(stash, row["write"]) if self.seeds else None
            stashed = None if beside else into
            entered = self.entered(env, op, message)
            front = self.chunk(env, op, entered, bool(self.seeds), stashed, flight, again=not phase.backward)
            if beside and into is not None:
                back = self._back(saved, stash, row, cotangents, made, grads)
                (outs, new), (grads, sent, given, _) = front.beside(back)
                stash = into.put_layers(new.values)
            else:
                outs, new, *rest = front.run()
                flight = rest[0] if rest else None
                stash = new if self.seeds else stash
            if phase.epilogue:
                grads, sums, made = self.epilogue(env, outs, row["epilogue"], grads, sums)
                if late is not None:
                    at = row["epilogue"] % self.schedule.waiting
                    late = jax.tree.map(lambda a, x: lax.dynamic_update_index_in_dim(a, x, at, axis=0), late, made)
            message = jax.tree.map(lambda x: collectives.shift(x, AXIS, 1), outs)
        if phase.backward:
            if sent is None:
                back = self._back(saved, stash, row, cotangents, made, grads, flight, again=not phase.forward)
                grads, sent, given, flight = back.run()
            if behind:
                behind = self.prologues.kept(behind, given, row["pulled"])
            cotangents = jax.tree.map(lambda x: collectives.shift(x, AXIS, -1), sent)
        return Carry(message, cotangents, stash, late, ahead, behind, grads, sums, flight)

    def _waiting(self, late: Cotangents, row: Any) -> Cotangents:
        """Of the cotangents that wait those of the microbatch of this tick's backward."""
        at = _op("B", row)["microbatch"] % self.schedule.waiting
        return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, at, keepdims=False), late)

    def _back(
        self,
        saved: Any,
        stash: list[jax.Array],
        row: Any,
        cts: Message,
        made: Cotangents | None,
        grads: list[Any],
        flight: InFlight | None = None,
        again: bool = False,
    ) -> LayerLoop:
        """A tick's backward: gradients, cotangents for the rank before, those of what the prologue made, and what is in
        flight. `cts` came from the rank behind, `made` from the epilogue.
        """
        op = _op("B", row)
        env = self.program.environment(self.values(op["microbatch"]))
        tape = forward(before(self.program), self.access, self.leaves, env, True)
        ends = self.is_last & (op["chunk"] == self.schedule.chunks - 1)
        if made is not None:
            cts = jax.tree.map(lambda a, b: jnp.where(ends, a, b), self.padded(made.message), cts)

        def given(found: tuple[Any, ...]) -> tuple[list[Any], Message, dict[Any, Any], InFlight | None]:
            grads, sent, of_prologue, flight = found
            if shared(self.program):
                return grads, sent, of_prologue, flight
            for v, ct in zip(side(self.program), made.side, strict=True) if made is not None else ():
                ct = jnp.where(ends & op["valid"], ct, jnp.zeros_like(ct))
                of_prologue[v] = of_prologue[v] + ct if v in of_prologue else ct
            return backward(before(self.program), self.access, self.leaves, tape, of_prologue, grads), sent, {}, flight

        return self.backward(env, op, saved, Stash(stash, row["read"]), cts, grads, flight, again).then(given)
