"""The engine of schedules in lockstep: all ranks run the same operations in a tick, on different microbatches.

GPipe (Huang et al. 2019) and 1F1B (Narayanan et al. 2021, Megatron-LM) are such schedules. `slots.py` runs
the others (`Schedule.branches`), in which ranks do different operations at the same time: zero bubble, the V shapes.

    1F1B, 2 ranks, 3 microbatches

    tick       0     1     2     3     4
    rank 0    F0    F1   F2B0   B1    B2
    rank 1         F0B0  F1B1  F2B2
    phase    | F | F and B           | B |      a scan for each phase

    one tick, on every rank
      forward     prologue -> chunk -> epilogue -> message to the next rank
      backward    prologue -> chunk backward -> cotangents to the rank before

    memory per rank    L/p layers, their gradients and optimizer state; activations of `schedule.slots` microbatches
    sends per tick     one activation to the next rank, one cotangent to the rank before

Every rank runs one program without branches. The schedule's table names the chunk and the microbatch of each rank's
forward and backward in a tick. An idle rank computes as well, in the time that the other ranks need in any case, and
its results are dropped.

The prologue (an embedding) runs before the first tick, and its backward after the last (`early_prologue.py`). Masks and
positions are computed on every rank, for the microbatch of its tick, so that messages hold the residual stream alone.
The epilogue (norm, head, loss) and its backward follow as soon as a microbatch leaves the last layer. If a microbatch's
rows divide among the ranks, each rank takes its part: the head of a large vocabulary on the last rank alone would delay
all of them. Parameters of prologue and epilogue belong to no stage. Their gradients are summed over `pipe`, which is
right whichever ranks used them, tied parameters included.

Plain JAX versions to read first: `experiments/naive/gpipe.py`, `experiments/naive/one_f_one_b.py`.
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
from ...program.buffers import uninitialized
from ...slicing.flights import InFlight, Lookahead
from ...slicing.loop import LayerLoop
from ...slicing.pieces import add
from ...slicing.program import backward
from ...slicing.stash import Stash
from .chunks import AXIS, Cotangents, Message, bypass_variables, prologue_pieces
from .ranks import Engine, eliminate_dead_code
from .schedules import Kind, Phase


def _operation(kind: Kind, row: Any) -> dict[str, jax.Array]:
    """Return the forward or backward of this rank in a tick: `valid`, `chunk`, `microbatch`."""
    return {name: row[f"{kind}_{name}"] for name in ("valid", "chunk", "microbatch")}


@dataclass(frozen=True)
class TickState:
    """The state between two ticks.

    Attributes:
      message: the message from the rank before.
      cotangents: the cotangents of a message, from the next rank.
      stash: residuals of forwards for their backwards, [slots, layers of a chunk, ...]; no weights.
      waiting_cts: cotangents from epilogues, for backwards of later ticks, [`Schedule.waiting`, ...]; None if every
        backward begins in the tick of its epilogue.
      prologues: the first carries of the microbatches whose prologues this rank computes, and their cotangents once
        they are known, [microbatches, ...]; empty without early prologues (`early_prologue.py`).
      grads: accumulated gradients, one for each leaf.
      sums: outputs of the loss, summed over microbatches.
      flight: weights that are fetched early, and gradients that are not given yet (`InFlight`); None without them.
    """

    message: Message
    cotangents: Message
    stash: list[jax.Array]
    waiting_cts: Cotangents | None
    prologues: list[jax.Array]
    grads: list[jax.Array | None]
    sums: list[jax.Array]
    flight: InFlight | None = None


jax.tree_util.register_dataclass(TickState, [f.name for f in dataclasses.fields(TickState)], [])


@dataclass(frozen=True)
class Pipeline(Engine):
    """One sliced loss under a schedule in lockstep, to be run inside `shard_map`; see `Engine` for its fields."""

    def run(self) -> tuple[list[jax.Array | None], list[jax.Array]]:
        """Run a step's ticks.

        Returns:
          The accumulated gradient of each leaf (None if it has none), and this rank's part of the summed outputs.
        """
        # 1. This rank's columns of the schedule's arrays, which ticks look up, [tick] each.
        schedule, rank = self.schedule, lax.axis_index(AXIS)
        lookups = {name: jnp.asarray(table)[:, rank] for name, table in schedule.arrays().items()}
        # 0 where no microbatch leaves: the phases of such ticks have no epilogue that would look it up.
        lookups["epilogue"] = jnp.array([schedule.epilogue(tick) or 0 for tick in range(schedule.ticks)])
        lookups |= {name: jnp.array(microbatches) for name, microbatches in self.prologue_microbatches().items()}

        # 2. The state before the first tick.
        row = jax.tree.map(lambda x: x[0], lookups)
        carry, saved = self._initial_carry(row)
        if self.has_early_prologues:
            carry = dataclasses.replace(carry, prologues=self.prologues.compute())
        carry = carry if self.seeds is None else self._with_zero_grads(carry, saved, row)
        # Until here zeros stood for these weights, whose shapes were enough. This is the only fetch before the ticks.
        carry = dataclasses.replace(carry, flight=carry.flight and self._initial_flight())

        # 3. A scan for each phase. Two phases that alternate are one round, and rounds are an outer scan.
        for repeats, phases in schedule.phases():
            first, length = phases[0].start, sum(phase.length for phase in phases)

            def run_round(carry: TickState, lookups: Any, phases: list[Phase] = phases) -> tuple[TickState, None]:
                start = 0
                for phase in phases:
                    carry = self._refetch_flight(carry, phase) if phase.start in self._direction_changes else carry
                    of_phase = jax.tree.map(lambda x, start=start, n=phase.length: x[start : start + n], lookups)
                    carry, _ = lax.scan(self._phase_body(phase, saved, carry, of_phase), carry, of_phase)
                    start += phase.length
                return carry, None

            of_rounds = jax.tree.map(lambda x, a=first, n=repeats * length: x[a : a + n], lookups)
            if repeats == 1:
                carry, _ = run_round(carry, of_rounds)
            else:
                by_round = jax.tree.map(lambda x, n=repeats, k=length: x.reshape(n, k), of_rounds)
                carry, _ = lax.scan(run_round, carry, by_round)

        # 4. Gradients that are still in flight, and gradients of the prologues that ran before the ticks.
        return self.add_prologue_grads(self._add_flight_grads(carry).grads, carry.prologues), carry.sums

    def separated(self) -> list[tuple[int, Any]]:
        """Return the parts of a step, each run once, for counting what they fetch and send.

        Returns:
          Pairs: how often a step runs a part, and the state after the part has run alone.
        """
        schedule = self.schedule
        forwards, backwards, m = schedule.messages("F"), schedule.messages("B"), schedule.microbatches
        row = self._first_row()
        carry, saved = self._initial_carry(row)
        parts = []
        if self.has_early_prologues:
            grads = self.add_prologue_grads(carry.grads, carry.prologues)
            computed = dataclasses.replace(carry, prologues=self.prologues.compute())
            parts = [(1, computed), (1, dataclasses.replace(carry, grads=grads))]
        # m ticks have an epilogue: count them with a forward and a backward each, and the other ticks without it.
        for runs, flags in (
            (forwards - m, (True, False, False)),
            (backwards - m, (False, True, False)),
            (m, (True,) * 3),
        ):
            parts.append((runs, self.tick(Phase(0, 1, *flags), saved, carry, row)))
        if carry.flight is not None:
            with_grads = dataclasses.replace(carry, grads=jax.tree.map(jnp.zeros_like, parts[-1][1].grads))
            parts += [
                (1, dataclasses.replace(carry, flight=self._initial_flight())),
                (1, self._add_flight_grads(with_grads)),
            ]
            parts += [(len(self._direction_changes), self._refetch_flight(carry, Phase(0, 1, False, True, False)))]
        return parts

    # ------------------------------------------------------------------------------------------------------------------
    # Weights that are fetched early, and gradients that are not given yet (`prefetch=1`).

    def _initial_flight(self) -> InFlight | None:
        """Return the weights in flight before the first tick; None if ticks do not know which layers run next."""
        return self.chunk_stack.in_flight(self.access, self.leaves) if self.schedule.in_turn else None

    @functools.cached_property
    def _direction_changes(self) -> list[int]:
        """Return the first ticks of phases that have forwards where the phase before has none, or vice versa.

        The tick before such a phase fetches the first layer for a forward, where the last one is next, or vice versa.
        """
        phases = [phase for _, phases in self.schedule.phases() for phase in phases]
        return [phase.start for earlier, phase in itertools.pairwise(phases) if earlier.forward != phase.forward]

    def _refetch_flight(self, carry: TickState, phase: Phase) -> TickState:
        """Fetch the layer that a phase runs first, since the phase before has fetched another one."""
        if carry.flight is None:
            return carry
        flight = self.chunk_stack.refetched(self.access, self.leaves, carry.flight, back=not phase.forward)
        return dataclasses.replace(carry, flight=flight)

    def _add_flight_grads(self, carry: TickState) -> TickState:
        """Add the gradients that are in flight after the last tick to the accumulated ones."""
        if carry.flight is None:
            return carry
        grads = self.chunk_stack.with_pending_gradients(self.access, carry.flight, carry.grads)
        return dataclasses.replace(carry, grads=grads, flight=None)

    # ------------------------------------------------------------------------------------------------------------------
    # The state before the first tick.

    def _first_row(self) -> dict[str, jax.Array]:
        """Return this rank's row of the lookups in the first tick."""
        row = {name: jnp.asarray(table)[0, lax.axis_index(AXIS)] for name, table in self.schedule.arrays().items()}
        return row | {name: jnp.int32(0) for name in ("epilogue", "entering", "returning")}

    def held(self) -> tuple[list[jax.Array], list[jax.Array]]:
        """Return the stash of forwards' residuals, and the stash for W, which is empty in lockstep."""
        return self._initial_carry(self._first_row())[0].stash, []

    def _phase_body(self, phase: Phase, saved: Any, carry: TickState, lookups: Any) -> Callable[..., Any]:
        """Return the body of a phase's scan, without dead code: most ticks need only the masks of the prologue."""
        row = jax.tree.map(lambda x: x[0], lookups)
        body = eliminate_dead_code(lambda carry, row: self.tick(phase, saved, carry, row), carry, row)
        return lambda carry, row: (body(carry, row), None)

    def _initial_carry(self, row: Any) -> tuple[TickState, Any]:
        """Return the first carry, without gradients, and the structure of a chunk's residuals."""
        # 1. Messages, sums and prologues: all that an evaluation needs. Idle ranks compute on the first messages, and a
        # model may look up or loop by their values: these must be zeros.
        message, sums, prologues = self.zeros()
        if self.seeds is None:
            return TickState(message, Message([], []), [], None, prologues, [], sums), None

        # 2. The stash, which needs the shapes of residuals: trace one chunk's forward.
        def residuals(row: Any) -> Any:
            op = _operation("F", row)
            env, _ = self.prologue(op["microbatch"], False)
            return self.chunk_forward(env, op, self.chunk_input(env, op, message), True).run()[1]

        saved = jax.eval_shape(residuals, row)
        # Idle ranks read the stash and the waiting cotangents too, but only where an earlier tick has written: all
        # ranks write a slot in each tick with a forward, and run each epilogue.
        stash = [uninitialized((self.schedule.slots, *x.shape), x.dtype) for x in saved.values]
        # 3. Cotangents that wait for a backward, and weights in flight. `_with_zero_grads` adds the gradients.
        waiting_cts = None
        if self.schedule.waiting:
            variables = self.message_variables(self.program).select(self.has_cotangent)
            ct_variables = Cotangents(variables, bypass_variables(self.program))
            n = self.schedule.waiting
            waiting_cts = jax.tree.map(lambda v: uninitialized((n, *v.aval.shape), v.aval.dtype), ct_variables)
        no_grads: list[jax.Array | None] = [None] * len(self.leaves)
        flight = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(self._initial_flight))
        return TickState(
            message,
            message.select(self.has_cotangent),
            stash,
            waiting_cts,
            prologues,
            no_grads,
            sums,
            flight,
        ), saved

    def _with_zero_grads(self, carry: TickState, saved: Any, row: Any) -> TickState:
        """Return the first carry with zeros for all gradients that a step makes: a scan's carry has one structure."""
        all_operations = Phase(0, 1, True, True, True)

        def grads_of_step(carry: TickState, row: Any) -> list[Any]:
            carry = self._add_flight_grads(self.tick(all_operations, saved, carry, row))
            return self.add_prologue_grads(carry.grads, carry.prologues)

        grads = jax.eval_shape(grads_of_step, carry, row)
        return dataclasses.replace(carry, grads=[None if g is None else jnp.zeros(g.shape, g.dtype) for g in grads])

    # ------------------------------------------------------------------------------------------------------------------
    # One tick.

    def tick(self, phase: Phase, saved: Any, carry: TickState, row: Any) -> TickState:
        """Run one tick.

        Args:
          phase: which operations the tick has.
          saved: the structure of a chunk's residuals.
          carry: the state after the tick before.
          row: this rank's row of the lookups.

        Communicates each message to the next rank, and each message's cotangents to the rank before.
        """
        grads, stash, waiting_cts = list(carry.grads), carry.stash, carry.waiting_cts
        sums, message, cotangents = carry.sums, carry.message, carry.cotangents
        prologues, flight = carry.prologues, carry.flight
        chunk_prologue_cts: dict[Any, Any] = {}
        # Read before the epilogue writes: a position may be read and written in one tick.
        epilogue_cts = None if waiting_cts is None else self._read_waiting(waiting_cts, row)
        # If cotangents wait, forward and backward do not need each other: their loops over layers run side by side, and
        # one computes while the other communicates.
        side_by_side = phase.forward and phase.backward and waiting_cts is not None
        input_cts = None

        # 1. Forward, epilogue, message to the next rank.
        if phase.forward:
            op = _operation("F", row)
            env, _ = self.prologue(op["microbatch"], False)
            if prologues:
                env |= self.prologues.read(prologues, row["entering"])
            slot = Stash(stash, row["write"]) if self.seeds else None
            # Side by side, the backward reads the stash in the same loop: the forward writes all its layers afterwards.
            loop_slot = None if side_by_side else slot
            chunk_input = self.chunk_input(env, op, message)
            # Without a backward in this tick, the next loop is a forward again, and begins with the first layer.
            lookahead = flight and Lookahead(flight, again=not phase.backward)
            forward_loop = self.chunk_forward(env, op, chunk_input, bool(self.seeds), loop_slot, lookahead)
            if side_by_side and slot is not None:
                backward_loop = self._backward_loop(saved, stash, row, cotangents, epilogue_cts, grads)
                (outputs, residuals), (grads, input_cts, chunk_prologue_cts, _) = forward_loop.beside(backward_loop)
                if forward_loop.length == 1:
                    # XLA opens this loop. The backward must have read the stash before it is written: else XLA would
                    # copy all slots (jax 0.10.2).
                    stash, grads, input_cts = lax.optimization_barrier((stash, grads, input_cts))
                stash = Stash(stash, row["write"]).put_layers(residuals.values)
            else:
                # With `seeds`, the loop returns the whole stash with this microbatch's residuals in it.
                outputs, new_stash, *rest = forward_loop.run(is_alone=not phase.backward)
                flight = rest[0] if rest else None
                stash = new_stash if self.seeds else stash
            if phase.epilogue:
                grads, sums, epilogue_cts = self.epilogue(env, outputs, row["epilogue"], grads, sums)
                if waiting_cts is not None:
                    position = row["epilogue"] % self.schedule.waiting
                    waiting_cts = jax.tree.map(
                        lambda a, x: lax.dynamic_update_index_in_dim(a, x, position, axis=0), waiting_cts, epilogue_cts
                    )
            # Every rank sends, idle ones too: a permute has the same ranks in all ticks.
            message = jax.tree.map(lambda x: collectives.shift(x, AXIS, 1), outputs)

        # 2. Backward, cotangents to the rank before.
        if phase.backward:
            if input_cts is None:
                backward_loop = self._backward_loop(
                    saved, stash, row, cotangents, epilogue_cts, grads, flight, same_loop_next=not phase.forward
                )
                grads, input_cts, chunk_prologue_cts, flight = backward_loop.run()
            if prologues:
                prologues = self.prologues.store_cotangents(prologues, chunk_prologue_cts, row["returning"])
            cotangents = jax.tree.map(lambda x: collectives.shift(x, AXIS, -1), input_cts)
        return TickState(message, cotangents, stash, waiting_cts, prologues, grads, sums, flight)

    def _read_waiting(self, waiting_cts: Cotangents, row: Any) -> Cotangents:
        """Return the waiting cotangents of the microbatch whose backward runs in this tick."""
        position = _operation("B", row)["microbatch"] % self.schedule.waiting
        return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, position, keepdims=False), waiting_cts)

    def _backward_loop(
        self,
        saved: Any,
        stash: list[jax.Array],
        row: Any,
        cts: Message,
        epilogue_cts: Cotangents | None,
        grads: list[Any],
        flight: InFlight | None = None,
        same_loop_next: bool = False,
    ) -> LayerLoop:
        """Return the loop of a tick's backward.

        Args:
          saved: the structure of a chunk's residuals.
          stash: the stash, [slots, layers of a chunk, ...].
          row: this rank's row of the lookups.
          cts: the cotangents from the next rank.
          epilogue_cts: the cotangents from the epilogue, which the last stage reads instead; None without an epilogue.
          grads: accumulated gradients, one for each leaf.
          flight, same_loop_next: as for `Lookahead`.

        Returns:
          A loop with the results: accumulated gradients, cotangents for the rank before, cotangents of the prologue's
          variables if prologues are early, and `flight` after the loop.
        """
        op = _operation("B", row)
        env, tape = self.prologue(op["microbatch"], True)
        # The last rank has the last stage in its last chunk alone. All other chunks get cotangents by message.
        is_last_stage = self.is_last & (op["chunk"] == self.schedule.chunks - 1)
        if epilogue_cts is not None:
            cts = jax.tree.map(
                lambda a, b: jnp.where(is_last_stage, a, b), self.pad_by_layer(epilogue_cts.message), cts
            )

        def prologue_backward(result: tuple[Any, ...]) -> tuple[list[Any], Message, dict[Any, Any], InFlight | None]:
            grads, input_cts, prologue_cts, flight = result
            if self.has_early_prologues:  # their backwards run after the last tick
                return grads, input_cts, prologue_cts, flight
            # Cotangents of variables that the epilogue reads count once, on the rank of the last stage.
            if epilogue_cts is not None:
                for v, ct in zip(bypass_variables(self.program), epilogue_cts.bypass, strict=True):
                    ct = jnp.where(is_last_stage & op["valid"], ct, jnp.zeros_like(ct))
                    prologue_cts[v] = add(prologue_cts.get(v), ct)
            grads = backward(prologue_pieces(self.program), self.access, self.leaves, tape, prologue_cts, grads)
            return grads, input_cts, {}, flight

        slot, lookahead = Stash(stash, row["read"], saved), flight and Lookahead(flight, same_loop_next)
        return self.chunk_backward(env, op, slot, cts, grads, lookahead).then(prologue_backward)
