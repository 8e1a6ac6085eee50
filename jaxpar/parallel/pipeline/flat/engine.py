"""A pipeline whose stages are different programs: in a slot each rank runs one operation of its own stages, or none.

    one slot    F of stage 0 | F of stage 1 | ... | B (or I, W) of stage 0 | B of stage 1 | ... -> messages

One scan goes over the slots of the table. Each of a stage's operations stands in the program once, in a loop of one
iteration on the rank whose operation it is, and of none on the others; why loops, and not `lax.switch`, is said in
`parallel/pipeline/slots.py`. Collectives over `pipe` stand outside of these loops: the all-to-alls of weights and
gradients at both ends of a step, and messages behind every slot.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .... import collectives
from ....program import trip_counts
from ....slicing.program import Program
from ....strategy.schedules.operations import KINDS
from .exchange import AXIS, Exchange, everywhere
from .packing import Buffers, widest, zeros
from .runs import Spread, StageRun, run
from .stages import SlotOrder, Stage, is_linear, paces, stages, used

_LOOKED_UP = ("kind", "chunk", "microbatch", "stash", "kept", "read", "below", "above", "here")


@dataclass(frozen=True)
class FlatCarry:
    """What one slot hands to the next.

    Attributes:
      buffers: messages and cotangents that wait, [buffers, width].
      stash: what backwards need of forwards, [stashes, width].
      kept: what I leaves for W, [keeps, width].
      grads: accumulated gradients of the leaves that move, [pipe, width], and `small`, of those that all ranks have.
      sums: outputs of the loss, added up over microbatches.
      variables: the model's variables after the microbatches so far, right on the rank that changes them.
    """

    buffers: Buffers
    stash: Buffers
    kept: Buffers
    grads: Buffers
    small: dict[int, jax.Array]
    sums: list[jax.Array]
    variables: list[jax.Array]


jax.tree_util.register_dataclass(FlatCarry, [f.name for f in dataclasses.fields(FlatCarry)], [])


@dataclass(frozen=True)
class FlatPipeline:
    """One cut loss under one schedule, to be run inside `shard_map`.

    Attributes:
      program, schedule: the loss on the rows of one microbatch, cut into p v segments, and its schedule.
      rows: what its slots look up (`parallel/pipeline/buffers.SlotTables`), one operation a rank in each.
      access: how parameters are fetched and gradients given.
      parts: what this rank stores of every leaf, in the compute dtype.
      values: `values(microbatch)`, those of the program's inputs; the first are `variables`.
      variables: their values before the step.
      summed: positions of the outputs to add up.
      changed: positions of the outputs that are the variables' new values.
      seeds: cotangents of outputs, by position; None for a forward pass alone (under `schedule.forwards`).
    """

    program: Program
    schedule: SlotOrder
    rows: Any
    access: Spread
    parts: Sequence[jax.Array]
    values: Callable[[jax.Array], list[Any]]
    variables: list[jax.Array]
    summed: Sequence[int]
    changed: Sequence[int]
    seeds: dict[int, jax.Array] | None = None

    def run(self) -> tuple[list[jax.Array | None], list[jax.Array], list[jax.Array]]:
        """This rank's part of each leaf's gradient, None if none, and of the summed outputs; the new variables."""
        weights = self.weights.dispatch(self.parts)
        state, _ = lax.scan(lambda state, row: (self.slot(state, row, weights), None), self.first(), self.lookups())
        grads: list[jax.Array | None] = [None] * len(self.parts)
        if self.seeds is not None:
            grads = self.gradients.collect(state.grads, len(self.parts))
            for i, x in state.small.items():
                grads[i] = x
        return grads, state.sums, self._everywhere(state.variables)

    def held(self) -> tuple[list[jax.Array], list[jax.Array]]:
        """What forwards leave for backwards, in all slots and of zeros, and what I leaves for W."""
        first = self.first()
        return list(first.stash.values()), list(first.kept.values())

    def separated(self) -> list[tuple[int, int | None, Any]]:
        """The step's slots for a reader who counts: how many, on which rank (None for all), and what one returns for
        zeros. The first has no operation; each of the others runs one of one stage, or stands outside of the slots. No
        all-to-alls.
        """
        row = {name: x[0] for name, x in self.lookups().items()}
        state, weights = self.first(), zeros(self.weights.widths, self.schedule.ranks)
        message = {name: x[0] for name, x in state.buffers.items()}
        found: list[Any] = [(len(self.rows.kind), None, self._sent(message, state.buffers, row))]
        m, number = self.schedule.microbatches, jnp.int32(0)
        for stage, made in zip(self.stages, self.runs, strict=True):
            ahead, rank = (message, state.stash, state.sums, state.variables), self.schedule.place(stage.number).rank
            found.append((m, rank, self._forward(stage, made, row, weights, number, ahead)))
            back = (message, state.kept, state.grads, state.small)
            for kind in made.backwards:
                found.append((m, rank, self._backward(kind, stage, made, (row, weights, state.stash), number, back)))
        return [*found, (1, None, self._everywhere(state.variables))]

    @functools.cached_property
    def stages(self) -> list[Stage]:
        """In the order of the program."""
        return stages(self.program)

    @property
    def forwards(self) -> bool:
        """Whether this is an evaluation."""
        return self.seeds is None

    @functools.cached_property
    def kinds(self) -> str:
        """Of operations in the schedule."""
        return "".join(kind for code, kind in enumerate(KINDS, start=1) if (self.rows.kind == code).any())

    @functools.cached_property
    def paces(self) -> dict[tuple[str, int], int]:
        """The slots in which all ranks wait for one of a stage's operations."""
        numbers = {self.schedule.place(stage.number): stage.number for stage in self.stages}
        return paces(self.program, numbers, self.rows.kind, self.rows.chunk)

    def lookups(self) -> dict[str, jax.Array]:
        """What each slot of this rank looks up."""
        rank = lax.axis_index(AXIS)
        return {name: jnp.asarray(getattr(self.rows, name))[:, rank] for name in _LOOKED_UP}

    def _used(self) -> list[list[int]]:
        return used(self.program, self.schedule)

    @functools.cached_property
    def weights(self) -> Exchange:
        """How weights move."""
        moved = [
            None if leaf.dim is None else jax.typeof(x) for leaf, x in zip(self.access.leaves, self.parts, strict=True)
        ]
        return Exchange.of(self._used(), moved)

    def _stored(self, index: int) -> jax.ShapeDtypeStruct:
        """A leaf as a stage has it."""
        x = self.parts[index]
        lead = () if self.access.leaves[index].dim is None else (self.schedule.ranks,)
        return jax.ShapeDtypeStruct((*lead, *x.shape), x.dtype)

    @functools.cached_property
    def given(self) -> dict[int, jax.ShapeDtypeStruct]:
        """Gradients as they accumulate, of the leaves that have one."""
        out = {}
        for i in sorted({i for some in self._used() for i in some}):
            if self.access.leaves[i].trainable:
                one = lambda x, i=i: self.access.give(i, self.access.fetch(i, x, False), False)
                out[i] = jax.eval_shape(one, self._stored(i))
        return out

    @functools.cached_property
    def gradients(self) -> Exchange:
        """How gradients move."""
        moved: list[Any] = [None] * len(self.parts)
        for i, x in self.given.items():
            if self.access.leaves[i].dim is not None:
                moved[i] = jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
        return Exchange.of(self._used(), moved)

    @functools.cached_property
    def runs(self) -> list[StageRun]:
        """For each stage, in the order of the program, its traced operations."""
        inputs = jax.eval_shape(self.values, jax.ShapeDtypeStruct((), jnp.int32))
        changing = set(self._changing)
        fixed = [at not in changing for at in range(len(inputs))]
        of = lambda stage: [self._stored(i) for i in stage.piece.unit.leaves]
        seeds, kinds = self.seeds, self.kinds
        return [run(s, self.program, self.access, of(s), inputs, fixed, seeds, kinds) for s in self.stages]

    @functools.cached_property
    def _changing(self) -> list[int]:
        """The variables that the loss changes, by their number."""
        consts = len(self.program.consts)
        olds = self.program.inputs[consts : consts + len(self.variables)]
        return [
            at for at, (old, i) in enumerate(zip(olds, self.changed, strict=True)) if self.program.outputs[i] is not old
        ]

    @functools.cached_property
    def width(self) -> dict[str, int]:
        """Of messages, whichever stages they are between."""
        return widest(stage.before for stage in self.stages)

    def first(self) -> FlatCarry:
        """The state before the first slot."""
        stash, kept = (widest(made) for made in ((r.stash for r in self.runs), (r.left for r in self.runs)))
        given = {} if self.forwards else self.given
        small = {i: jnp.zeros(x.shape, x.dtype) for i, x in given.items() if self.access.leaves[i].dim is None}
        grads = {} if self.forwards else zeros(self.gradients.widths, self.schedule.ranks)
        sums = [jnp.zeros((), jnp.float32) for _ in self.summed]
        return FlatCarry(
            zeros(self.width, self.rows.buffers),
            zeros(stash, self.rows.stashes),
            zeros(kept, self.rows.keeps),
            grads,
            small,
            sums,
            list(self.variables),
        )

    def slot(self, state: FlatCarry, row: Any, weights: Buffers) -> FlatCarry:
        """Every stage's operation, if it is this rank's now; then messages."""
        message = {name: lax.dynamic_index_in_dim(x, row["read"], keepdims=False) for name, x in state.buffers.items()}
        stash, sums, variables = state.stash, state.sums, state.variables
        for stage, made in zip(self.stages, self.runs, strict=True):
            ahead = functools.partial(self._forward, stage, made, row, weights)
            message, stash, sums, variables = self._once("F", stage, row, ahead, (message, stash, sums, variables))
        carry = (message, state.kept, state.grads, state.small)
        for kind in self.kinds.replace("F", ""):
            for stage, made in zip(reversed(self.stages), reversed(self.runs), strict=True):
                back = functools.partial(self._backward, kind, stage, made, (row, weights, stash))
                carry = self._once(kind, stage, row, back, carry)
        message, kept, grads, small = carry
        return FlatCarry(self._sent(message, state.buffers, row), stash, kept, grads, small, sums, variables)

    def _once(self, kind: str, stage: Stage, row: Any, fun: Callable[[jax.Array, Any], Any], carry: Any) -> Any:
        """`fun(0, carry)` on the rank whose operation it is, `carry` on the others."""
        rank, chunk = self.schedule.place(stage.number)
        here = (row["kind"] == (1 + KINDS.index(kind))) & (row["chunk"] == chunk) & (lax.axis_index(AXIS) == rank)
        more = lambda state: state[0] < here.astype(jnp.int32)
        share = trip_counts.name_of(
            self.schedule.microbatches, self.paces[kind, stage.number], len(self.rows.kind), rank
        )
        with jax.named_scope(share):
            return lax.while_loop(more, lambda state: (state[0] + 1, fun(*state)), (jnp.int32(0), carry))[1]

    def _read(self, stage: Stage, weights: Buffers, number: jax.Array) -> list[jax.Array]:
        """The leaves of a stage."""
        rank = self.schedule.place(stage.number).rank
        spread = lambda i: self.access.leaves[i].dim is not None
        return [
            self.weights.read(weights, rank, i, number) if spread(i) else self.parts[i] for i in stage.piece.unit.leaves
        ]

    def _forward(self, stage: Stage, made: StageRun, row: Any, weights: Buffers, number: jax.Array, carry: Any) -> Any:
        message, stash, sums, variables = carry
        inputs = self.values(row["microbatch"] + number)
        inputs[: len(variables)] = variables
        outs, found, stashed = made.forward(self._read(stage, weights, number), inputs, stage.before.unpack(message))
        results = dict(zip(stage.results, found, strict=True))
        sums = [s + results[i].astype(s.dtype) if i in results else s for s, i in zip(sums, self.summed, strict=True)]
        new = list(variables)
        for at in self._changing:
            new[at] = results.get(self.changed[at], variables[at])
        if not self.forwards:
            stash = made.stash.put(stash, row["stash"] + number, stashed)
        return stage.behind.pack(outs, self.width), stash, sums, new

    def _backward(self, kind: str, stage: Stage, made: StageRun, of: Any, number: jax.Array, carry: Any) -> Any:
        """B, I or W; `of` are what the slot looks up, weights, and what is stashed."""
        (row, weights, stash), (message, kept, grads, small) = of, carry
        inputs, rank = self.values(row["microbatch"] + number), self.schedule.place(stage.number).rank
        if kind == "W":
            given = made.left.at(kept, row["kept"] + number)
        else:
            came = zip(stage.outgoing, stage.behind.unpack(message), strict=True)
            given = [x for v, x in came if is_linear(self.program, v)]
        stashed = made.stash.at(stash, row["stash"] + number)
        cts, found, left = made.backwards[kind](self._read(stage, weights, number), inputs, stashed, given)
        if kind == "I":
            kept = made.left.put(kept, row["kept"] + number, left)
        else:
            small = dict(small)
            for i, x in zip(stage.piece.unit.leaves, found, strict=True):
                if x is not None and i in small:
                    small[i] = small[i] + x
                elif x is not None:
                    grads = self.gradients.add(grads, rank, i, x, number)
        if kind != "W":
            cts = iter(cts)
            outs = [next(cts) if is_linear(self.program, v) else None for v in stage.incoming]
            message = stage.before.pack(outs, self.width)
        return message, kept, grads, small

    def _sent(self, message: Buffers, buffers: Buffers, row: Any) -> Buffers:
        """The buffers after the slot's messages: to both neighbours, and over the turn of a V."""
        below, above, here, _ = map(bool, np.any(self.rows.sent, axis=0))
        out = dict(buffers)
        for name, x in message.items():
            for on, way, by in ((below, "below", 1), (above, "above", -1)):
                if on:
                    moved = collectives.shift(x, AXIS, by)
                    out[name] = lax.dynamic_update_index_in_dim(out[name], moved, row[way], axis=0)
            if here:
                out[name] = lax.dynamic_update_index_in_dim(out[name], x, row["here"], axis=0)
        return out

    def _everywhere(self, variables: list[jax.Array]) -> list[jax.Array]:
        """The variables on every rank, from the ranks that change them."""
        homes = {i: self.schedule.place(stage.number).rank for stage in self.stages for i in stage.results}
        out, changing = list(variables), self._changing
        news = everywhere([variables[at] for at in changing], [homes[self.changed[at]] for at in changing])
        for at, x in zip(changing, news, strict=True):
            out[at] = x
        return out
