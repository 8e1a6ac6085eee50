"""A device's microbatches as a pipeline (`parallel/pipeline/`): what each tick of it reads."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..model.model import Replicated
from ..parallel.pipeline.buffers import SlotTables, Walk
from ..parallel.pipeline.chunks import shareable
from ..parallel.pipeline.flat.engine import FlatPipeline
from ..parallel.pipeline.schedules import Schedule
from ..parallel.pipeline.slots import Slots
from ..parallel.pipeline.ticks import Pipeline
from ..parallel.pipeline.unstaged_params import UnstagedParams, unstaged
from ..slicing.program import Program
from .tracing import Loss, Tracing

Values = Callable[[jax.Array], list[Any]]  # of a program's inputs, for the number of a microbatch


def rows_of(schedule: Schedule) -> SlotTables:
    """What slots of one operation a rank look up: of a table in lockstep, a tick's forwards and then its backwards."""
    if schedule.branches:
        return schedule.rows
    parts = [
        tuple(tuple(op for op in ops if op.kind == kind) for ops in column)
        for column in schedule.table()
        for kind in "FB"
    ]
    slots = tuple(part for part in parts if any(part))
    return Walk(slots, schedule.placement, schedule.chunks, schedule.forwards_only).rows()


@dataclass(frozen=True)
class Piped:
    """The microbatches of one pipe rank: `rows` are [m, r, ...], `keys` [m], or None in an evaluation."""

    tracing: Tracing
    loss: Loss
    variables: Any
    rows: Any
    keys: jax.Array | None

    def pipeline(self, seed: jax.Array | None) -> Pipeline | Slots | FlatPipeline:
        """That of a step with `seed`, its loss's gradient by one microbatch's sum; else of an evaluation."""
        schedule, traced = self.tracing.schedule, self.loss.traced
        assert schedule is not None
        if self.tracing.layout.storage.cut:
            return self._cut(seed)
        seeds = None if seed is None else {traced.total: seed}
        shared, part = self._shared(schedule.ranks)
        if shared is not None and seeds and not traced.counts:
            # Counts that are constants: one for a mean over the rows of each part, or the size of an array of rows.
            programs = ((traced.program, self._values), (shared, part))
            whole, mine = (program.only(traced.count)(values(jnp.int32(0))) for program, values in programs)
            seeds = {i: x * whole / (mine * schedule.ranks) for i, x in seeds.items()}
        # Cast once, not in every tick.
        stored = [x.astype(leaf.dtype) for x, leaf in zip(self.loss.stored, traced.leaves, strict=True)]
        summed = range(len(jax.tree.leaves(traced.outputs[0])))
        schedule = schedule if seeds is not None else schedule.forwards
        engine = Slots if schedule.branches else Pipeline
        access = UnstagedParams(self.loss.access, unstaged(traced.program))
        leaves = access.ahead(stored)
        return engine(traced.program, schedule, access, leaves, self._values, summed, seeds, shared, part)

    def run(self, seed: jax.Array | None) -> tuple[list[Any], list[jax.Array], Any]:
        """Accumulated gradients, this rank's part of the summed outputs, new variables; `seed` as for `pipeline`."""
        pipeline = self.pipeline(seed)
        if not isinstance(pipeline, FlatPipeline):
            grads, sums = pipeline.run()
            return pipeline.access.after(grads), sums, self.variables
        grads, sums, variables = pipeline.run()
        return grads, sums, jax.tree.unflatten(jax.tree.structure(self.variables), variables)

    def _cut(self, seed: jax.Array | None) -> FlatPipeline:
        """That of stages which are parts of the program."""
        schedule, traced = self.tracing.schedule, self.loss.traced
        assert schedule is not None
        sums, changed = (jax.tree.leaves(part) for part in traced.outputs)
        stored = [x.astype(leaf.dtype) for x, leaf in zip(self.loss.stored, traced.leaves, strict=True)]
        variables = jax.tree.leaves(self.variables)
        seeds = None if seed is None else {traced.total: seed}
        schedule = schedule if seed is not None else schedule.forwards
        given = (self.loss.access, stored, self._values, variables)
        return FlatPipeline(traced.program, schedule, rows_of(schedule), *given, sums, changed, seeds)

    def _values(self, microbatch: jax.Array) -> list[Any]:
        at = lambda x: x[microbatch]
        rows, key = jax.tree.map(at, self.rows), None if self.keys is None else at(self.keys)
        return jax.tree.leaves((self.variables, rows, key))

    def _shared(self, ranks: int) -> tuple[Program | None, Values]:
        """The loss on one rank's part of the rows of a microbatch, and the values of its inputs by microbatch.

        With it the ranks share the epilogue, each on its rows. None in place of the program where they cannot.
        """

        def inputs(microbatch: jax.Array) -> Any:
            def leaf(x: Any) -> Any:
                if isinstance(x, Replicated):
                    return jax.tree.map(lambda v: v[microbatch], x)
                each = x.shape[1] // ranks
                return lax.dynamic_slice_in_dim(x[microbatch], lax.axis_index("pipe") * each, each)

            rows = jax.tree.map(leaf, self.rows, is_leaf=lambda x: isinstance(x, Replicated))
            return self.variables, rows, None if self.keys is None else self.keys[microbatch]

        values: Values = lambda microbatch: jax.tree.leaves(inputs(microbatch))
        rows = jax.tree.leaves(self.rows, is_leaf=lambda x: isinstance(x, Replicated))
        if any(not isinstance(x, Replicated) and x.shape[1] % ranks for x in rows):
            return None, values
        try:
            part = self.tracing(*jax.eval_shape(inputs, jax.ShapeDtypeStruct((), jnp.int32)))
        except (TypeError, ValueError):  # on whole microbatches it went: the loss has their number of rows written down
            return None, values
        program = self.loss.traced.program
        random = program.inputs[len(program.inputs) - 1 :] if self.keys is not None else ()
        if not shareable(program, part.program, random, ranks):
            return None, values
        self.loss.traced.notes.logits.update(part.notes.logits)  # each rank makes those of its share of the rows
        return part.program, values
