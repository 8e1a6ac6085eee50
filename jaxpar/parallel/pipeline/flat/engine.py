"""The engine of pipelines whose stages are different programs: in a slot, each rank runs one operation of its stages.

    2 stages, 2 microbatches, 1F1B                  the program of one slot, on every rank

    slot      0    1    2    3    4    5              F of stage 0    on rank 0, if the table names it
    rank 0   F0   F1        B0        B1              F of stage 1    on rank 1, if the table names it
    rank 1        F0   B0   F1   B1                   B of stage 1    on rank 1, if the table names it
                                                      B of stage 0    on rank 0, if the table names it
                                                      messages to both neighbours, on all ranks

    memory per rank    1/p of each leaf and of its optimizer state; the whole leaves of its stages and their gradients
    sends per step     an all-to-all of weights before the slots, an all-to-all of gradients after them
    sends per slot     one message each way: activations or cotangents

One scan goes over the slots of the table. Each operation is a loop: of one iteration on the rank that runs it, of none
on the others (`parallel/pipeline/branching.py`). Collectives over `pipe` run outside these loops, where all ranks meet.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ....program import trip_counts
from ....slicing.program import Program
from ....strategy.schedules.operations import KINDS
from ..branching import read_row, receive, run_if
from .exchange import AXIS, Exchange, broadcast
from .packing import Buffers, empty, widest, zeros
from .runs import LeafAccess, StageOperations, StageRun
from .stages import SlotOrder, Stage, is_linear, paces, stages, used

# The fields of `SlotTables` that a slot looks up. Epilogues are parts of the last stage: none sends cotangents.
_LOOKUPS = ("kind", "chunk", "microbatch", "stash", "residuals", "read", "from_previous", "from_next", "from_self")


@dataclass(frozen=True)
class FlatCarry:
    """The state between two slots.

    Attributes:
      buffers: messages and cotangents that wait, [buffers, width].
      stash: residuals of forwards for their backwards, [num_stash_slots, width].
      residuals: residuals of I for W, [num_residual_slots, width].
      grads: accumulated gradients of the leaves that `pipe` shards, [pipe, width].
      replicated_grads: accumulated gradients of the leaves that all ranks store, by number.
      sums: outputs of the loss, summed over microbatches.
      variables: the model's variables after the microbatches so far, up to date on the ranks that change them.
    """

    buffers: Buffers
    stash: Buffers
    residuals: Buffers
    grads: Buffers
    replicated_grads: dict[int, jax.Array]
    sums: list[jax.Array]
    variables: list[jax.Array]


jax.tree_util.register_dataclass(FlatCarry, [f.name for f in dataclasses.fields(FlatCarry)], [])


@dataclass(frozen=True)
class FlatPipeline:
    """One cut loss under one schedule, to be run inside `shard_map`.

    Attributes:
      program: the loss on the rows of one microbatch, cut into p v segments.
      schedule: its schedule.
      slot_tables: the tables that its slots look up (`parallel/pipeline/buffers.SlotTables`).
      access: how parameters are fetched and gradients given.
      parts: this rank's part of every leaf, in the compute dtype.
      values: `values(microbatch)` returns the values of the program's inputs; the first are `variables`.
      variables: the values of the model's variables before the step.
      summed: positions of the outputs that are summed over microbatches.
      changed: positions of the outputs that are the variables' new values.
      seeds: cotangents of outputs, by position; None for a forward pass alone (under `schedule.forwards`).
    """

    program: Program
    schedule: SlotOrder
    slot_tables: Any
    access: LeafAccess
    parts: Sequence[jax.Array]
    values: Callable[[jax.Array], list[Any]]
    variables: list[jax.Array]
    summed: Sequence[int]
    changed: Sequence[int]
    seeds: dict[int, jax.Array] | None = None

    def run(self) -> tuple[list[jax.Array | None], list[jax.Array], list[jax.Array]]:
        """Run a step: exchange weights, run the slots, exchange gradients.

        Returns:
          This rank's part of each leaf's gradient (None if it has none), its part of the summed outputs, and the new
          values of the variables.
        """
        weights = self.weight_exchange.dispatch(self.parts)
        state, _ = lax.scan(
            lambda state, row: (self.slot(state, row, weights), None), self.initial_state(), self.lookups()
        )
        # Gradients of leaves that `pipe` shards return to all ranks; the others stay on the ranks that used them.
        grads: list[jax.Array | None] = [None] * len(self.parts)
        if self.seeds is not None:
            grads = self.grad_exchange.collect(state.grads, len(self.parts))
            for i, x in state.replicated_grads.items():
                grads[i] = x
        return grads, state.sums, self._broadcast_variables(state.variables)

    def held(self) -> tuple[list[jax.Array], list[jax.Array]]:
        """Return the stash of forwards' residuals and the stash of I's residuals for W."""
        state = self.initial_state()
        return list(state.stash.values()), list(state.residuals.values())

    def separated(self) -> list[tuple[int, int | None, Any]]:
        """Return the parts of a step, each run once on zeros, for counting what they fetch and send.

        Returns:
          Triples: how often the step runs a part, on which rank (None for all), and the part's results. The first part
          is the messages of a slot, the last the broadcast of variables, the others are operations. The all-to-alls of
          weights and gradients are not included.
        """
        row = {name: x[0] for name, x in self.lookups().items()}
        state, weights = self.initial_state(), zeros(self.weight_exchange.widths, self.schedule.ranks)
        message = {name: x[0] for name, x in state.buffers.items()}
        parts: list[Any] = [
            (len(self.slot_tables.kind), None, receive(message, state.buffers, row, self.slot_tables.sent))
        ]
        m, number = self.schedule.microbatches, jnp.int32(0)
        # An operation runs once per microbatch, on its stage's rank.
        for stage, run in zip(self.stages, self.stage_runs, strict=True):
            carry, rank = (message, state.stash, state.sums, state.variables), self.schedule.place(stage.number).rank
            parts.append((m, rank, self._forward(stage, run, row, weights, number, carry)))
            backward_carry = (message, state.residuals, state.grads, state.replicated_grads)
            for kind in run.backwards:
                parts.append(
                    (m, rank, self._backward(kind, stage, run, (row, weights, state.stash), number, backward_carry))
                )
        return [*parts, (1, None, self._broadcast_variables(state.variables))]

    # ------------------------------------------------------------------------------------------------------------------
    # Stages, and what their operations read.

    @functools.cached_property
    def stages(self) -> list[Stage]:
        """Return the stages, in the order of the program."""
        return stages(self.program)

    @property
    def is_evaluation(self) -> bool:
        """Return whether this is an evaluation, without backwards."""
        return self.seeds is None

    @functools.cached_property
    def kinds(self) -> str:
        """Return the kinds of operations in the schedule, in the order of `KINDS`."""
        return "".join(kind for code, kind in enumerate(KINDS, start=1) if (self.slot_tables.kind == code).any())

    @functools.cached_property
    def paces(self) -> dict[tuple[str, int], int]:
        """Return, for each operation of each stage, the number of slots whose length it determines."""
        numbers = {self.schedule.place(stage.number): stage.number for stage in self.stages}
        return paces(self.program, numbers, self.slot_tables.kind, self.slot_tables.chunk)

    def lookups(self) -> dict[str, jax.Array]:
        """Return the arrays that this rank looks up, [slots] each."""
        rank = lax.axis_index(AXIS)
        return {name: jnp.asarray(getattr(self.slot_tables, name))[:, rank] for name in _LOOKUPS}

    def _leaves_by_rank(self) -> list[list[int]]:
        """Return the leaves that each rank's stages read."""
        return used(self.program, self.schedule)

    @functools.cached_property
    def weight_exchange(self) -> Exchange:
        """Return the exchange of weights; leaves that `pipe` does not shard do not move."""
        moved = [
            None if leaf.dim is None else jax.typeof(x) for leaf, x in zip(self.access.leaves, self.parts, strict=True)
        ]
        return Exchange.of_parts(self._leaves_by_rank(), moved)

    def _stage_leaf(self, index: int) -> jax.ShapeDtypeStruct:
        """Return a leaf as its stage reads it: [pipe, *part] if `pipe` shards it, else as stored."""
        x = self.parts[index]
        lead = () if self.access.leaves[index].dim is None else (self.schedule.ranks,)
        return jax.ShapeDtypeStruct((*lead, *x.shape), x.dtype)

    @functools.cached_property
    def grad_shapes(self) -> dict[int, jax.ShapeDtypeStruct]:
        """Return the abstract gradients as they accumulate, of the leaves that have one."""
        # `give` decides: it may reduce-scatter over `fsdp` at every use, or leave the gradient whole.
        shapes = {}
        for i in sorted({i for leaves in self._leaves_by_rank() for i in leaves}):
            if self.access.leaves[i].trainable:
                grad = lambda x, i=i: self.access.give(i, self.access.fetch(i, x, False), False)
                shapes[i] = jax.eval_shape(grad, self._stage_leaf(i))
        return shapes

    @functools.cached_property
    def grad_exchange(self) -> Exchange:
        """Return the exchange of gradients; leaves that `pipe` does not shard have none to move."""
        # Frozen leaves have no gradient, so that this exchange may have fewer leaves than the weights'.
        moved: list[Any] = [None] * len(self.parts)
        for i, x in self.grad_shapes.items():
            if self.access.leaves[i].dim is not None:
                moved[i] = jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
        return Exchange.of_parts(self._leaves_by_rank(), moved)

    @functools.cached_property
    def stage_runs(self) -> list[StageRun]:
        """Return the traced operations of each stage, in the order of the program."""
        inputs = jax.eval_shape(self.values, jax.ShapeDtypeStruct((), jnp.int32))
        # A backward reads its inputs again, but variables may have changed since its forward: those are stashed.
        changing = set(self._changing)
        is_fixed = [index not in changing for index in range(len(inputs))]
        leaves_of = lambda stage: [self._stage_leaf(i) for i in stage.piece.unit.leaf_indices]
        seeds, kinds = self.seeds, self.kinds
        operations = [StageOperations(stage, self.program, self.access, seeds) for stage in self.stages]
        return [fun.trace(leaves_of(fun.stage), inputs, is_fixed, kinds) for fun in operations]

    @functools.cached_property
    def _changing(self) -> list[int]:
        """Return the numbers of the variables that the loss changes."""
        # The program's inputs are constants, variables, then rows and keys. An unchanged variable is its own output.
        num_consts = len(self.program.consts)
        old_variables = self.program.inputs[num_consts : num_consts + len(self.variables)]
        return [
            index
            for index, (variable, i) in enumerate(zip(old_variables, self.changed, strict=True))
            if self.program.outputs[i] is not variable
        ]

    @functools.cached_property
    def message_widths(self) -> dict[str, int]:
        """Return the widths of a message, the same between all stages."""
        return widest(stage.incoming_packing for stage in self.stages)

    # ------------------------------------------------------------------------------------------------------------------
    # Slots.

    def initial_state(self) -> FlatCarry:
        """Return the state before the first slot: empty stashes, zeros, and the variables' values."""
        # Stages share a stash: its slots are as wide as the widest stage's residuals.
        stash, residuals = (
            widest(packings)
            for packings in ((run.stash for run in self.stage_runs), (run.weight_residuals for run in self.stage_runs))
        )
        shapes = {} if self.is_evaluation else self.grad_shapes
        replicated_grads = {
            i: jnp.zeros(x.shape, x.dtype) for i, x in shapes.items() if self.access.leaves[i].dim is None
        }
        grads = {} if self.is_evaluation else zeros(self.grad_exchange.widths, self.schedule.ranks)
        # Sums over microbatches are float32 whatever the loss computes in.
        sums = [jnp.zeros((), jnp.float32) for _ in self.summed]
        return FlatCarry(
            zeros(self.message_widths, self.slot_tables.num_buffers),
            empty(stash, self.slot_tables.num_stash_slots),
            empty(residuals, self.slot_tables.num_residual_slots),
            grads,
            replicated_grads,
            sums,
            list(self.variables),
        )

    def slot(self, state: FlatCarry, row: Any, weights: Buffers) -> FlatCarry:
        """Run one slot.

        Args:
          state: the state after the slot before.
          row: this rank's row of `lookups`.
          weights: the leaves of this rank's stages, [pipe, width].
        """
        # 1. Operations. At most one of these loops runs an iteration; its result replaces the message.
        message = read_row(state.buffers, row["read"])
        stash, sums, variables = state.stash, state.sums, state.variables
        for stage, run in zip(self.stages, self.stage_runs, strict=True):
            forward = functools.partial(self._forward, stage, run, row, weights)
            message, stash, sums, variables = self._loop("F", stage, row, forward, (message, stash, sums, variables))
        # Backwards in reverse order of stages; the order is of no consequence, as a rank runs one operation in a slot.
        carry = (message, state.residuals, state.grads, state.replicated_grads)
        for kind in self.kinds.replace("F", ""):
            for stage, run in zip(reversed(self.stages), reversed(self.stage_runs), strict=True):
                backward = functools.partial(self._backward, kind, stage, run, (row, weights, stash))
                carry = self._loop(kind, stage, row, backward, carry)
        message, residuals, grads, replicated_grads = carry

        # 2. Messages.
        buffers = receive(message, state.buffers, row, self.slot_tables.sent)
        return FlatCarry(buffers, stash, residuals, grads, replicated_grads, sums, variables)

    def _loop(self, kind: str, stage: Stage, row: Any, fun: Callable[[jax.Array, Any], Any], carry: Any) -> Any:
        """Return `fun(0, carry)` on the rank that runs the operation in this slot, and `carry` on the others."""
        rank, chunk = self.schedule.place(stage.number)
        is_run = (row["kind"] == (1 + KINDS.index(kind))) & (row["chunk"] == chunk) & (lax.axis_index(AXIS) == rank)
        m, slots = self.schedule.microbatches, len(self.slot_tables.kind)
        return run_if(is_run, fun, carry, trip_counts.name_of(m, self.paces[kind, stage.number], slots, rank))

    def _leaves(self, stage: Stage, weights: Buffers, number: jax.Array) -> list[jax.Array]:
        """Return the leaves of a stage."""
        rank = self.schedule.place(stage.number).rank
        is_exchanged = lambda i: self.access.leaves[i].dim is not None
        return [
            self.weight_exchange.read(weights, rank, i, number) if is_exchanged(i) else self.parts[i]
            for i in stage.piece.unit.leaf_indices
        ]

    def _forward(self, stage: Stage, run: StageRun, row: Any, weights: Buffers, number: jax.Array, carry: Any) -> Any:
        """Run F: the message becomes the stage's output, and the residuals go to the stash."""
        message, stash, sums, variables = carry
        inputs = self.values(row["microbatch"] + number)
        # The microbatch before may have changed the variables on this rank.
        inputs[: len(variables)] = variables
        outgoing, outputs, residuals = run.forward(
            self._leaves(stage, weights, number), inputs, stage.incoming_packing.unpack(message)
        )
        results = dict(zip(stage.results, outputs, strict=True))
        sums = [
            total + results[i].astype(total.dtype) if i in results else total
            for total, i in zip(sums, self.summed, strict=True)
        ]
        # A variable that another stage changes keeps its old value here, until `_broadcast_variables`.
        updated = list(variables)
        for index in self._changing:
            updated[index] = results.get(self.changed[index], variables[index])
        if not self.is_evaluation:
            stash = run.stash.write(stash, row["stash"] + number, residuals)
        return stage.outgoing_packing.pack(outgoing, self.message_widths), stash, sums, updated

    def _backward(self, kind: str, stage: Stage, run: StageRun, operands: Any, number: jax.Array, carry: Any) -> Any:
        """Run B, I or W.

        Args:
          operands: the slot's row, the weights, and the stash.
          number: 0, the iteration's number.
          carry: the message, residuals for W, and the accumulated gradients of both sorts of leaves.
        """
        (row, weights, stash), (message, weight_residuals, grads, replicated_grads) = operands, carry
        inputs, rank = self.values(row["microbatch"] + number), self.schedule.place(stage.number).rank
        # 1. B and I read cotangents from the next stage, W the residuals that I left.
        if kind == "W":
            values = run.weight_residuals.read(weight_residuals, row["residuals"] + number)
        else:
            pairs = zip(stage.outgoing, stage.outgoing_packing.unpack(message), strict=True)
            values = [x for v, x in pairs if is_linear(self.program, v)]
        # Inputs such as rows are looked up again by microbatch, so that the stash does not hold them.
        residuals = run.stash.read(stash, row["stash"] + number)
        cts, stage_grads, new_residuals = run.backwards[kind](
            self._leaves(stage, weights, number), inputs, residuals, values
        )

        # 2. B and W accumulate gradients; I leaves residuals for W.
        if kind == "I":
            weight_residuals = run.weight_residuals.write(weight_residuals, row["residuals"] + number, new_residuals)
        else:
            replicated_grads = dict(replicated_grads)
            for i, x in zip(stage.piece.unit.leaf_indices, stage_grads, strict=True):
                if x is not None and i in replicated_grads:
                    replicated_grads[i] = replicated_grads[i] + x
                elif x is not None:
                    grads = self.grad_exchange.add(grads, rank, i, x, number)

        # 3. B and I send cotangents to the stage before; integers have none.
        if kind != "W":
            cts = iter(cts)
            incoming_cts = [next(cts) if is_linear(self.program, v) else None for v in stage.incoming]
            message = stage.incoming_packing.pack(incoming_cts, self.message_widths)
        return message, weight_residuals, grads, replicated_grads

    def _broadcast_variables(self, variables: list[jax.Array]) -> list[jax.Array]:
        """Return the variables on every rank, from the ranks that change them; communicates an all-reduce per dtype."""
        owners = {i: self.schedule.place(stage.number).rank for stage in self.stages for i in stage.results}
        synced, changing = list(variables), self._changing
        values = broadcast(
            [variables[index] for index in changing], [owners[self.changed[index]] for index in changing]
        )
        for index, x in zip(changing, values, strict=True):
            synced[index] = x
        return synced
