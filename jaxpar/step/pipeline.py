"""One pipe rank's microbatches: it binds a loss and its rows to an engine of `parallel/pipeline/`.

Three engines run a schedule. `Piped.pipeline` chooses among them and says what each tick reads:

    Pipeline       all ranks run the same operation in a tick, so that collectives within a stage need no branch
    Slots          ranks run different operations in a slot, by loops of one iteration or none
    FlatPipeline   the stages are parts of any program, without a stack of layers
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..model.model import is_replicated
from ..parallel.pipeline.buffers import SlotTables, Walk
from ..parallel.pipeline.chunks import shareable
from ..parallel.pipeline.flat.engine import FlatPipeline
from ..parallel.pipeline.schedules import Schedule
from ..parallel.pipeline.slots import Slots
from ..parallel.pipeline.ticks import Pipeline
from ..parallel.pipeline.unstaged_params import UnstagedParams, unstaged
from ..slicing.program import Program
from .tracing import Loss, Tracing

Values = Callable[[jax.Array], list[Any]]  # microbatch number -> values of a program's inputs


def slot_tables_of(schedule: Schedule) -> SlotTables:
    """Return the tables that ranks look up, with one operation per rank in each slot.

    A tick of a schedule in lockstep may run a forward and a backward. It becomes two slots, forwards first.
    """
    if schedule.branches:
        return schedule.rows
    half_ticks = [
        tuple(tuple(op for op in ops if op.kind == kind) for ops in column)
        for column in schedule.table()
        for kind in "FB"
    ]
    slots = tuple(half_tick for half_tick in half_ticks if any(half_tick))
    return Walk(slots, schedule.placement, schedule.chunks, schedule.forwards_only).slot_tables()


@dataclass(frozen=True)
class Piped:
    """The microbatches of one pipe rank.

    Attributes:
      tracing: traces the loss, also on a part of a microbatch's rows.
      loss: the loss on what this rank stores.
      variables: the model's variables before the step.
      rows: the rows of all microbatches, [m, r, ...].
      keys: their keys, [m]; None in an evaluation.
    """

    tracing: Tracing
    loss: Loss
    variables: Any
    rows: Any
    keys: jax.Array | None

    def pipeline(self, seed: jax.Array | None) -> Pipeline | Slots | FlatPipeline:
        """Return the pipeline of a training step, or of an evaluation.

        Args:
          seed: the cotangent of one microbatch's total; None for an evaluation, which runs forwards alone.
        """
        schedule, traced = self.tracing.schedule, self.loss.traced
        assert schedule is not None
        if self.tracing.layout.storage.cut:
            return self._flat_pipeline(seed)
        seeds = None if seed is None else {traced.total: seed}

        # 1. Let the ranks share the epilogue, each on its part of a microbatch's rows, if that gives the same result.
        shared_program, part_values = self._shared_epilogue(schedule.ranks)
        if shared_program is not None and seeds and not traced.counts:
            # The loss is total/count on a microbatch, but each rank computes the total of its part. With a count of 1
            # (a plain mean) the totals of p parts add up to p times the mean; with a count of rows they add up to the
            # total itself. The ratio of the two constant counts tells which.
            programs = ((traced.program, self._values), (shared_program, part_values))
            count, part_count = (program.only(traced.count)(values(jnp.int32(0))) for program, values in programs)
            seeds = {i: x * count / (part_count * schedule.ranks) for i, x in seeds.items()}

        # 2. The parameters that ticks read. They are cast once here instead of in every tick.
        stored = [x.astype(leaf.dtype) for x, leaf in zip(self.loss.stored, traced.leaves, strict=True)]
        summed = range(len(jax.tree.leaves(traced.outputs[0])))

        # 3. The engine that runs the schedule.
        schedule = schedule if seeds is not None else schedule.forwards
        engine = Slots if schedule.branches else Pipeline
        # Leaves that no stage owns (embedding, head) are fetched once per step, before the first tick.
        access = UnstagedParams(self.loss.access, unstaged(traced.program))
        leaves = access.ahead(stored)
        return engine(
            traced.program, schedule, access, leaves, self._values, summed, seeds, shared_program, part_values
        )

    def run(self, seed: jax.Array | None) -> tuple[list[Any], list[jax.Array], Any]:
        """Run all microbatches of a step, or of an evaluation.

        Args:
          seed: as for `pipeline`.

        Returns:
          The accumulated gradients, None where the loss does not depend on a leaf; this rank's part of the summed
          outputs; and the new variables.
        """
        pipeline = self.pipeline(seed)
        if not isinstance(pipeline, FlatPipeline):
            # No variable may change here: `check_pipe` raises an error for a loss that changes one.
            grads, sums = pipeline.run()
            return pipeline.access.after(grads), sums, self.variables
        grads, sums, variables = pipeline.run()
        return grads, sums, jax.tree.unflatten(jax.tree.structure(self.variables), variables)

    def _flat_pipeline(self, seed: jax.Array | None) -> FlatPipeline:
        """Return the pipeline whose stages are parts of the loss's program; `seed` as for `pipeline`."""
        schedule, traced = self.tracing.schedule, self.loss.traced
        assert schedule is not None
        sums, new_variables = (jax.tree.leaves(part) for part in traced.outputs)
        stored = [x.astype(leaf.dtype) for x, leaf in zip(self.loss.stored, traced.leaves, strict=True)]
        variables = jax.tree.leaves(self.variables)
        seeds = None if seed is None else {traced.total: seed}
        schedule = schedule if seed is not None else schedule.forwards
        inputs = (self.loss.access, stored, self._values, variables)
        return FlatPipeline(traced.program, schedule, slot_tables_of(schedule), *inputs, sums, new_variables, seeds)

    def _values(self, microbatch: jax.Array) -> list[Any]:
        """Return the values of the program's inputs for one microbatch."""
        take = lambda x: x[microbatch]
        rows, key = jax.tree.map(take, self.rows), None if self.keys is None else take(self.keys)
        return jax.tree.leaves((self.variables, rows, key))

    def _shared_epilogue(self, ranks: int) -> tuple[Program | None, Values]:
        """Trace the loss on one rank's part of a microbatch's rows, by which the ranks share the epilogue.

        Returns:
          The program of the loss on r / ranks rows, or None if the ranks cannot share the epilogue; and the values of
          its inputs on this rank.
        """

        def inputs(microbatch: jax.Array) -> Any:
            def take_part(x: Any) -> Any:
                if is_replicated(x):
                    return jax.tree.map(lambda v: v[microbatch], x)
                rows_per_rank = x.shape[1] // ranks
                return lax.dynamic_slice_in_dim(x[microbatch], lax.axis_index("pipe") * rows_per_rank, rows_per_rank)

            rows = jax.tree.map(take_part, self.rows, is_leaf=is_replicated)
            return self.variables, rows, None if self.keys is None else self.keys[microbatch]

        values: Values = lambda microbatch: jax.tree.leaves(inputs(microbatch))
        rows = jax.tree.leaves(self.rows, is_leaf=is_replicated)
        if any(not is_replicated(x) and x.shape[1] % ranks for x in rows):
            return None, values
        try:
            part = self.tracing(*jax.eval_shape(inputs, jax.ShapeDtypeStruct((), jnp.int32)))
        except (TypeError, ValueError):
            # The loss ran on whole microbatches, so that it must have their number of rows written down.
            return None, values
        program = self.loss.traced.program
        # The key is the last input.
        key_inputs = program.inputs[len(program.inputs) - 1 :] if self.keys is not None else ()
        if not shareable(program, part.program, key_inputs, ranks):
            return None, values
        # Reports then show the logits of a part, which are what a rank makes.
        self.loss.traced.notes.logits.update(part.notes.logits)
        return part.program, values
