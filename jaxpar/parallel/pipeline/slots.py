"""The engine of schedules whose ranks branch: in a slot, each rank runs its own operation, F, B, I, W or none.

    ZB-H1 (Qi et al. 2023), 2 ranks, the first slots

    slot       0   1   2   3   4   5   6   7
    rank 0    F0  F1   .  I0  W0  F2  I1  W1
    rank 1     .  F0  I0  F1  I1  W0  F2  I2

    one slot, on every rank
      look up the operation -> F, B, I or W -> epilogue -> prologue's backward -> messages to neighbours

    memory per rank    L/p layers, their gradients and optimizer state; a stash of `num_stash_slots` slots with the
                       residuals of forwards, one of `num_residual_slots` slots with the residuals that I leaves for W,
                       `num_buffers` messages
    sends per slot     one message each way, also from ranks whose message nobody reads

One scan goes over the slots. Collectives over `pipe` run outside the operations, where all ranks meet:

- messages: in every slot
- epilogue: in slots in which a microbatch leaves the last stage
- shared prologue: in slots in which a microbatch enters the first stage, or its cotangents leave it

Other collectives run inside operations. Their groups lie within one pipe rank, so that all members run the operation.
Each operation is a loop of one iteration or none (`branching.py`).
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from ...program import trip_counts
from ...program.buffers import uninitialized
from ...slicing.halves import WeightGradResiduals, pick
from ...slicing.program import backward
from ...slicing.stash import Stash
from ...strategy.schedules.orders import orders_of
from .branching import read_row, receive, run_if, write_row
from .buffers import CODES, WAYS
from .chunks import AXIS, Message, bypass_variables, prologue_pieces
from .ranks import Engine, eliminate_dead_code, replace_grads

# The fields of `SlotTables` that a slot looks up.
_LOOKUPS = ("kind", "chunk", "microbatch", "stash", "residuals", "read", *WAYS)


class RunIf(Protocol):
    """Run `fun(number, carry)`, a part of a slot, if a condition holds; `number` is 0."""

    def __call__(self, name: str, condition: jax.Array, fun: Callable[[jax.Array, Any], Any], carry: Any) -> Any:
        """Return the carry after the part, or as it was."""
        ...


def scope(part: str) -> str:
    """Return the name of a slot's part in the compiled program."""
    return f"slot_{part}"


@dataclass(frozen=True)
class SlotCarry:
    """The state between two slots.

    Attributes:
      buffers: messages and cotangents that wait, [num_buffers, ...].
      stash: residuals of forwards for their backwards, [num_stash_slots, layers of a chunk, ...]; no weights.
      residuals: residuals of I for W, [num_residual_slots, layers of a chunk, ...].
      prologues: the first carries of the microbatches whose prologues this rank computes, and their cotangents once
        they are known, [microbatches, ...]; empty without early prologues (`early_prologue.py`).
      grads: accumulated gradients, one for each leaf.
      sums: outputs of the loss, summed over microbatches.
    """

    buffers: Message
    stash: list[jax.Array]
    residuals: list[jax.Array]
    prologues: list[jax.Array]
    grads: list[jax.Array | None]
    sums: list[jax.Array]


jax.tree_util.register_dataclass(SlotCarry, [f.name for f in dataclasses.fields(SlotCarry)], [])


@dataclass(frozen=True)
class Slots(Engine):
    """One sliced loss under a schedule whose ranks branch; see `Engine` for its fields."""

    def run(self) -> tuple[list[jax.Array | None], list[jax.Array]]:
        """Run a step's slots.

        Returns:
          The accumulated gradient of each leaf (None if it has none), and this rank's part of the summed outputs.
        """
        lookups = self.lookups()
        first_row = read_row(lookups, jnp.int32(0))
        state, saved, weight_residuals = self._initial_state(first_row)
        if self.has_early_prologues:
            state = dataclasses.replace(state, prologues=self.prologues.compute())
        body = eliminate_dead_code(
            lambda state, row: self.slot(state, row, saved, weight_residuals, self._loop), state, first_row
        )
        state, _ = lax.scan(lambda state, row: (body(state, row), None), state, lookups)
        return self.add_prologue_grads(state.grads, state.prologues), state.sums

    def _loop(self, name: str, condition: jax.Array, fun: Callable[[jax.Array, Any], Any], carry: Any) -> Any:
        """Run a part of a slot if the condition holds; the name of its loop says how often it runs."""
        body = eliminate_dead_code(fun, jnp.int32(0), carry)
        trips = trip_counts.name_of(self.runs[name], self.paces[name], self.schedule.ticks)
        return run_if(condition, body, carry, f"{scope(name)}/{trips}")

    def held(self) -> tuple[list[jax.Array], list[jax.Array]]:
        """Return the stash of forwards' residuals and the stash of I's residuals for W."""
        state, _, _ = self._initial_state(read_row(self.lookups(), jnp.int32(0)))
        return state.stash, state.residuals

    def separated(self) -> list[tuple[int, Any]]:
        """Return the parts of slots, each run alone, for counting what they fetch and send.

        Returns:
          Pairs: how many slots run a part, and the results of running it alone. The first pair is a slot without parts.
        """
        row = read_row(self.lookups(), jnp.int32(0))
        state, saved, weight_residuals = self._initial_state(row)

        def run_part(part: str) -> Any:
            # The part's own results: the slot may drop some of them, such as cotangents for the prologue's backward.
            results = []

            def run_if(name: str, condition: jax.Array, fun: Callable[[jax.Array, Any], Any], carry: Any) -> Any:
                if name == part:
                    results.append(fun(jnp.int32(0), carry))
                return results[-1] if name == part else carry

            env, _ = self.prologue(row["microbatch"], False)  # every slot computes the operation's inputs
            consts, _, xs = self._stack_inputs(env, row)
            return self.slot(state, row, saved, weight_residuals, run_if), results, consts, xs

        parts = [(n, run_part(part)) for part, n in self.runs.items() if n]
        if self.has_early_prologues:
            parts.append((1, (self.prologues.compute(), self.add_prologue_grads(state.grads, state.prologues))))
        return [(self.schedule.ticks - sum(self.runs.values()), run_part("")), *parts]

    # ------------------------------------------------------------------------------------------------------------------
    # What the table says about slots.

    @functools.cached_property
    def runs(self) -> dict[str, int]:
        """Return, for each part of a slot, the number of slots in which a rank runs it; for F, B, I, W, at most."""
        rank_counts = {
            k: [sum(op.kind == k for op in order) for order in orders_of(self.schedule.table())] for k in self.kinds
        }
        return {k: max(counts_of_ranks) for k, counts_of_ranks in rank_counts.items()} | self._uniform_runs

    @functools.cached_property
    def paces(self) -> dict[str, int]:
        """Return, for each part of a slot, the number of slots whose length it determines.

        A slot lasts as long as the longest operation of any rank.
        """
        longest = Counter(
            next(kind for kind in "BIFW" if kind in slot_kinds)  # from the longest: I includes recomputation, if any
            for column in self.schedule.table()
            if (slot_kinds := "".join(op.kind for ops in column for op in ops))
        )
        return {kind: longest[kind] for kind in self.kinds} | self._uniform_runs

    @property
    def _uniform_runs(self) -> dict[str, int]:
        """Return the number of slots of the parts that all ranks run together."""
        return {name: sum(flags) for name, flags in self.marks.items()}

    def lookups(self) -> dict[str, jax.Array]:
        """Return the arrays that this rank looks up by slot: its operations, and the marks that all ranks share."""
        of_rank = {name: jnp.asarray(getattr(self.schedule.rows, name))[:, lax.axis_index(AXIS)] for name in _LOOKUPS}
        leaving = [self.schedule.epilogue(slot) for slot in range(self.schedule.ticks)]
        uniform = {name: jnp.array(by_slot) for name, by_slot in {**self.marks, **self.prologue_microbatches()}.items()}
        # 0 where no microbatch leaves: the mark `leaves` keeps the epilogue from running there.
        return of_rank | uniform | {"leaving": jnp.array([microbatch or 0 for microbatch in leaving])}

    @functools.cached_property
    def marks(self) -> dict[str, list[bool]]:
        """Return marks by slot, the same on all ranks.

        Returns:
          `enters`: a microbatch enters the first stage. `leaves`: a microbatch leaves the last stage. `returns`:
          cotangents of the prologue's variables come out of a stage.
        """
        schedule, stack = self.schedule, self.stack
        consts, _, xs = stack.parts(stack.unit.active_inputs)
        # The carry's cotangents return from the first stage. Constants and scanned inputs have some from every stage.
        all_stages_return = any((*consts, *xs))
        marks: dict[str, list[bool]] = {"enters": [], "leaves": [], "returns": []}
        for slot, column in enumerate(schedule.table()):
            slot_ops = [(op.kind, schedule.stage(rank, op.chunk)) for rank, ops in enumerate(column) for op in ops]
            marks["enters"].append(("F", 0) in slot_ops)
            marks["leaves"].append(schedule.epilogue(slot) is not None)
            marks["returns"].append(any(kind in "BI" and (all_stages_return or stage == 0) for kind, stage in slot_ops))
        return marks

    @functools.cached_property
    def kinds(self) -> frozenset[str]:
        """Return the kinds of operations in the table."""
        return frozenset(op.kind for column in self.schedule.table() for ops in column for op in ops)

    # ------------------------------------------------------------------------------------------------------------------
    # The state before the first slot.

    def _initial_state(self, row: Any) -> tuple[SlotCarry, Any, WeightGradResiduals | None]:
        """Return the first state, and the structures of the residuals of F, and of I for W."""
        # 1. Message buffers and sums: all that an evaluation needs.
        tables = self.schedule.rows
        message, sums, prologues = self.zeros()
        # Idle ranks send messages on, and epilogues compute on them in all ranks: these must be zeros.
        zeros = lambda n, tree: jax.tree.map(lambda x: jnp.zeros((n, *x.shape), x.dtype), tree)
        stash = lambda n, values: [uninitialized((n, *x.shape), x.dtype) for x in values]
        state = SlotCarry(zeros(tables.num_buffers, message), [], [], prologues, [None] * len(self.leaves), sums)
        if self.seeds is None:
            return state, None, None

        # 2. Both stashes: trace one chunk forwards and backwards for the shapes of residuals.
        def residuals(row: Any) -> Any:
            env, _ = self.prologue(row["microbatch"], False)
            _, saved = self.chunk_forward(env, row, message, True).run()
            return saved, self.input_grads(env, row, message.select(self.has_cotangent), saved)[1]

        saved, weight_residuals = jax.eval_shape(residuals, row)
        of_weights = weight_residuals.values if "I" in self.kinds else []
        state = dataclasses.replace(
            state,
            # Only the operations of the table run, so that each slot is written before it is read.
            stash=stash(tables.num_stash_slots, saved.values),
            residuals=stash(tables.num_residual_slots, of_weights),
        )

        # 3. Gradients: trace one slot that runs every part. A scan's carry has one structure, so that leaves without a
        # gradient are None, and all others start with zeros.
        always: RunIf = lambda name, condition, fun, carry: fun(jnp.int32(0), carry)

        def grads_of_step(state: SlotCarry, row: Any) -> list[Any]:
            state = self.slot(state, row, saved, weight_residuals, always)
            return self.add_prologue_grads(state.grads, state.prologues)

        grads = jax.eval_shape(grads_of_step, state, row)
        grads = [None if g is None else jnp.zeros(g.shape, g.dtype) for g in grads]
        return dataclasses.replace(state, grads=grads), saved, weight_residuals

    # ------------------------------------------------------------------------------------------------------------------
    # One slot.

    def slot(
        self, state: SlotCarry, row: Any, saved: Any, weight_residuals: WeightGradResiduals | None, run_if: RunIf
    ) -> SlotCarry:
        """Run one slot.

        Args:
          state: the state after the slot before.
          row: this rank's row of `lookups`.
          saved: the structure of the residuals of F.
          weight_residuals: the structure of the residuals of I for W.
          run_if: runs a part of the slot if its condition holds.
        """
        # 1. The operation's input: from its message buffer, or in the first stage from the prologue.
        stash, residuals, prologues, buffers = state.stash, state.residuals, state.prologues, state.buffers
        grads, sums = list(state.grads), state.sums
        env, _ = self.prologue(row["microbatch"], False)
        message = read_row(buffers, row["read"])

        def enter(number: jax.Array, message: Message) -> Message:
            env, _ = self.prologue(row["microbatch"] + number, False)
            if state.prologues:
                env |= self.prologues.read(state.prologues, row["entering"] + number)
            # On ranks that do not run F, chunk 1 is never the first stage: their message stays.
            return self.chunk_input(env, {"chunk": jnp.where(row["kind"] == CODES["F"], row["chunk"], 1)}, message)

        message = run_if("enters", row["enters"], enter, message)

        # 2. The operation. Its result replaces the message: activations for the next stage, or cotangents.
        operations = _Operations(self, env, row, saved, weight_residuals)
        is_kind = lambda kind: row["kind"] == CODES[kind]
        message, stash = run_if("F", is_kind("F"), operations.forward, (message, stash))
        extra_cts = self.zero_extra_cotangents()
        if "B" in self.kinds:
            run_backward = functools.partial(operations.backward, stash)
            message, extra_cts, grads = run_if("B", is_kind("B"), run_backward, (message, extra_cts, grads))
        if "I" in self.kinds:
            message, extra_cts, residuals = run_if(
                "I", is_kind("I"), functools.partial(operations.input_grads, stash), (message, extra_cts, residuals)
            )
            grads = run_if("W", is_kind("W"), functools.partial(operations.weight_grads, stash, residuals), grads)

        # 3. The epilogue of the microbatch that leaves the last stage. Its cotangents wait in a buffer for B or I.
        def epilogue(number: jax.Array, carry: Any) -> Any:
            buffers, grads, sums = carry
            env, tape = self.prologue(row["leaving"] + number, bool(self.seeds))
            grads, sums, cts = self.epilogue(env, message, row["leaving"] + number, list(grads), sums)
            if cts is not None:
                position = row["from_epilogue"] + number
                last_cts = self.merge_cotangents(self.pad_by_layer(cts.message), read_row(buffers, position))
                buffers = write_row(buffers, last_cts, position)
                pairs = zip(bypass_variables(self.program), cts.bypass, strict=True)
                # Every rank has these cotangents; they count once, on the last rank.
                bypass_cts = {v: jnp.where(self.is_last, ct, jnp.zeros_like(ct)) for v, ct in pairs}
                grads = backward(prologue_pieces(self.program), self.access, self.leaves, tape, bypass_cts, grads)
            return buffers, grads, sums

        # 4. The prologue's backward. Early prologues run theirs after the last slot: store their cotangents.
        def prologue_backward(number: jax.Array, carry: Any) -> Any:
            grads, prologues = carry
            valid = (row["kind"] == CODES["B"]) | (row["kind"] == CODES["I"])
            consts, xs = extra_cts
            carry_cts = pick(self.has_cotangent.carry, message.carry)
            cts = self.prologue_cotangents({"valid": valid, "chunk": row["chunk"]}, consts, carry_cts, xs)
            if prologues:
                return grads, self.prologues.store_cotangents(prologues, cts, row["returning"] + number)
            _, tape = self.prologue(row["microbatch"] + number, True)
            grads = backward(prologue_pieces(self.program), self.access, self.leaves, tape, cts, grads)
            return grads, prologues

        buffers, grads, sums = run_if("leaves", row["leaves"], epilogue, (buffers, grads, sums))
        if self.seeds is not None:
            grads, prologues = run_if("returns", row["returns"], prologue_backward, (grads, prologues))

        # 5. Messages.
        buffers = receive(message, buffers, row, self.schedule.rows.sent)
        return SlotCarry(buffers, stash, residuals, prologues, grads, sums)

    def input_grads(self, env: Any, op: Any, cts: Message, saved: Any, *stash: Stash) -> tuple[list[Any], Any]:
        """Return the cotangents of a chunk's inputs, and residuals for W; see `Stack.backward_inputs`."""
        inputs, output_cts = self.inputs_without_carry(env, op), self.output_cotangents(op, cts)
        return self.chunk_stack.backward_inputs(self.chunk_layers(op), inputs, saved, output_cts, *stash)


@dataclass(frozen=True)
class _Operations:
    """F, B, I and W of one slot, as bodies of loops.

    Attributes:
      engine: the pipeline.
      env: values of variables after the prologue of the operation's microbatch.
      row: this rank's row of the slot.
      saved: the structure of the residuals of F.
      weight_residuals: the structure of the residuals of I for W.
    """

    engine: Slots
    env: dict[Any, Any]
    row: Any
    saved: Any
    weight_residuals: WeightGradResiduals | None

    def _operation(self, number: jax.Array) -> dict[str, jax.Array]:
        # `number` is 0. Without it XLA would move the lookups out of the loop (`branching.py`).
        return {name: self.row[name] + number for name in ("chunk", "microbatch", "stash", "residuals")}

    def forward(self, number: jax.Array, carry: Any) -> Any:
        """Run F: the message becomes the chunk's output, and the residuals go to the stash."""
        (message, stash), op = carry, self._operation(number)
        grad = self.engine.seeds is not None
        slot = Stash(stash, op["stash"]) if grad else None
        outputs, stashed = self.engine.chunk_forward(self.env, op, message, grad, slot).run()
        return outputs, stashed if grad else stash

    def backward(self, stash: list[jax.Array], number: jax.Array, carry: Any) -> Any:
        """Run B: the message becomes the cotangents of the chunk's inputs, and gradients accumulate."""
        (message, _, grads), op, engine = carry, self._operation(number), self.engine
        slot, stack_leaves = Stash(stash, op["stash"], self.saved), engine.stack.unit.leaf_indices
        totals, cts = engine.chunk_stack.backward_loop(
            engine.chunk_layers(op),
            engine.inputs_without_carry(self.env, op),
            slot,
            engine.output_cotangents(op, message.select(engine.has_cotangent)),
            [grads[i] for i in stack_leaves],
        ).run()
        return *self._input_message(message, cts), replace_grads(grads, stack_leaves, totals)

    def input_grads(self, stash: list[jax.Array], number: jax.Array, carry: Any) -> Any:
        """Run I: the message becomes the cotangents of the chunk's inputs, and residuals for W are stored."""
        (message, _, residuals), op = carry, self._operation(number)
        stashes = Stash(stash, op["stash"], self.saved), Stash(residuals, op["residuals"])
        cts, residuals = self.engine.input_grads(self.env, op, message.select(self.engine.has_cotangent), *stashes)
        return *self._input_message(message, cts), residuals

    def weight_grads(self, stash: list[jax.Array], residuals: list[jax.Array], number: jax.Array, grads: Any) -> Any:
        """Run W: gradients accumulate."""
        op, engine = self._operation(number), self.engine
        assert self.weight_residuals is not None
        stack_leaves = engine.stack.unit.leaf_indices
        # W reads a part of F's residuals; the others are in the stash until W frees the slot.
        stashes = (
            Stash(pick(self.weight_residuals.halves.saved, stash), op["stash"]),
            Stash(residuals, op["residuals"], self.weight_residuals),
        )
        totals = engine.chunk_stack.backward_weights(
            engine.chunk_layers(op),
            engine.inputs_without_carry(self.env, op),
            *stashes,
            [grads[i] for i in stack_leaves],
        )
        return replace_grads(grads, stack_leaves, totals)

    def _input_message(self, message: Message, cts: list[Any]) -> tuple[Message, Any]:
        """Return the message for the stage before, and the cotangents of constants and scanned inputs."""
        consts, carry, xs = self.engine.stack.split_cotangents(cts)
        by_layer = message.select(self.engine.has_cotangent).by_layer
        return self.engine.merge_cotangents(Message(carry, by_layer), message), (consts, xs)
