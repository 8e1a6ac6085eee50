"""The engine of tables whose ranks differ: in a slot each rank runs its own operation, F, B, I, W or none.

    slot       0   1   2   3   4   5   6   7      ZB-H1 (Qi et al. 2023), 2 ranks, the first slots
    rank 0    F0  F1   .  I0  W0  F2  I1  W1
    rank 1     .  F0  I0  F1  I1  W0  F2  I2

    one slot    look the operation up -> F | B | I | W -> epilogue -> prologue's backward -> messages

One scan goes over the slots. Collectives over `pipe` stand where all ranks come: messages, in every slot; the epilogue,
in the slots in which a microbatch leaves the last stage; the prologue, in those in which one enters the first, or its
cotangents leave it. The others stand inside operations: their groups lie within one pipe rank, and take the same way.

An operation is a loop of no iteration or one. As a branch of `lax.switch` it would be handed the gradients and what is
stashed, and hand them back: XLA copies both for a conditional, in every branch and once more behind it (jax 0.10.2, CPU
and H100: 39.8 and 38.8 MB of temporaries where loops take 3.1 and 6.3), and writes in place in loops. A loop's compiler
moves out what is the same in all its iterations, so all that an operation looks up depends on the iteration's number.
"""

import collections as counts
import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ... import collectives
from ...program import trip_counts
from ...slicing.halves import WeightGradResiduals, pick
from ...slicing.program import backward, forward
from ...slicing.stash import Stash
from ...strategy.schedules.orders import orders_of
from .buffers import CODES
from .chunks import AXIS, Message, before, side
from .distributed_prologue import shared
from .ranks import Engine, dce, with_totals

_LOOKED_UP = ("kind", "chunk", "microbatch", "stash", "kept", "read", "below", "above", "here", "epilogue")


class Once(Protocol):
    """How a slot runs one of its parts, `fun(number, carry)`, where a condition holds; `number` is 0."""

    def __call__(self, name: str, here: jax.Array, fun: Callable[[jax.Array, Any], Any], carry: Any) -> Any:
        """The carry after it."""
        ...


def scope(part: str) -> str:
    """In which a part of a slot stands, in a program's names."""
    return f"slot_{part}"


@dataclass(frozen=True)
class SlotCarry:
    """What one slot hands to the next.

    Attributes:
      buffers: messages and cotangents that wait, [buffers, ...].
      stash: what backwards need of forwards, [stashes, ...]; no weights.
      kept: what I left for W, [keeps, ...].
      ahead: what enters the first layer, of the microbatches whose prologues this rank computes, [microbatches, ...];
        empty where all compute them when they are read (`distributed_prologue.py`).
      behind: cotangents of these.
      grads: accumulated gradients, one for each leaf.
      sums: outputs of the loss, added up over microbatches.
    """

    buffers: Message
    stash: list[jax.Array]
    kept: list[jax.Array]
    ahead: list[jax.Array]
    behind: list[jax.Array]
    grads: list[jax.Array | None]
    sums: list[jax.Array]


jax.tree_util.register_dataclass(SlotCarry, [f.name for f in dataclasses.fields(SlotCarry)], [])


def _at(tree: Any, index: jax.Array) -> Any:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), tree)


def _put(tree: Any, values: Any, index: jax.Array) -> Any:
    return jax.tree.map(lambda x, v: lax.dynamic_update_index_in_dim(x, v, index, axis=0), tree, values)


@dataclass(frozen=True)
class Slots(Engine):
    """One sliced loss under a schedule whose ranks branch; fields as those of `Engine`."""

    def run(self) -> tuple[list[jax.Array | None], list[jax.Array]]:
        """Gradients as accumulated, None where there are none, and this rank's part of the summed outputs."""
        rows = self.rows()
        first = _at(rows, jnp.int32(0))
        state, saved, left = self._first(first)
        if shared(self.program):
            state = dataclasses.replace(state, ahead=self.prologues.run())
        body = dce(lambda state, row: self.slot(state, row, saved, left, self._loop), state, first)
        state, _ = lax.scan(lambda state, row: (body(state, row), None), state, rows)
        return self.with_prologues(state.grads, state.behind), state.sums

    def _loop(self, name: str, here: jax.Array, fun: Callable[[jax.Array, Any], Any], carry: Any) -> Any:
        """As a loop of one iteration, or of none."""
        body = dce(fun, jnp.int32(0), carry)
        more = lambda state: state[0] < here.astype(jnp.int32)
        share = trip_counts.name_of(self.runs[name], self.paces[name], self.schedule.ticks)
        with jax.named_scope(f"{scope(name)}/{share}"):
            return lax.while_loop(more, lambda state: (state[0] + 1, body(*state)), (jnp.int32(0), carry))[1]

    def held(self) -> tuple[list[jax.Array], list[jax.Array]]:
        """What forwards leave for backwards, in all slots and of zeros, and what I leaves for W."""
        state, _, _ = self._first(_at(self.rows(), jnp.int32(0)))
        return state.stash, state.kept

    def separated(self) -> list[tuple[int, Any]]:
        """How many slots run no part, and how many each, and what one returns that runs it alone: for who counts."""
        row = _at(self.rows(), jnp.int32(0))
        state, saved, left = self._first(row)

        def look(part: str) -> Any:
            made = []  # by the part: some of it is for another part alone, as cotangents for the prologue's backward

            def once(name: str, here: jax.Array, fun: Callable[[jax.Array, Any], Any], carry: Any) -> Any:
                if name == part:
                    made.append(fun(jnp.int32(0), carry))
                return made[-1] if name == part else carry

            env, _ = self._before(row["microbatch"], False)  # what operations read is there in every slot
            consts, _, xs = self._inputs(env, row)
            return self.slot(state, row, saved, left, once), made, consts, xs

        parts = [(n, look(part)) for part, n in self.runs.items() if n]
        if shared(self.program):
            parts.append((1, (self.prologues.run(), self.with_prologues(state.grads, state.behind))))
        return [(self.schedule.ticks - sum(self.runs.values()), look("")), *parts]

    @functools.cached_property
    def runs(self) -> dict[str, int]:
        """Slots in which a rank runs each part of a slot; of the operations, what the busiest rank runs."""
        ran = {k: [sum(op.kind == k for op in order) for order in orders_of(self.schedule.table())] for k in self.kinds}
        return {k: max(of_ranks) for k, of_ranks in ran.items()} | self._uniform

    @functools.cached_property
    def paces(self) -> dict[str, int]:
        """For each part, the slots whose length it sets. A slot lasts as long as the longest operation that any rank
        runs in it; from the longest: B, I (which recomputes, if anything does), F, W.
        """
        waits = counts.Counter(
            next(kind for kind in "BIFW" if kind in ran)
            for column in self.schedule.table()
            if (ran := "".join(op.kind for ops in column for op in ops))
        )
        return {kind: waits[kind] for kind in self.kinds} | self._uniform

    @property
    def _uniform(self) -> dict[str, int]:
        return {name: sum(on) for name, on in self.marks.items()}

    def rows(self) -> dict[str, jax.Array]:
        """What each slot of this rank looks up: its own, and what is the same on all ranks."""
        own = {name: jnp.asarray(getattr(self.schedule.rows, name))[:, lax.axis_index(AXIS)] for name in _LOOKED_UP}
        left = [self.schedule.epilogue(slot) for slot in range(self.schedule.ticks)]
        uniform = {name: jnp.array(each) for name, each in {**self.marks, **self.entering()}.items()}
        return own | uniform | {"left": jnp.array([x or 0 for x in left])}

    @functools.cached_property
    def marks(self) -> dict[str, list[bool]]:
        """For each slot whether a microbatch enters stage 0, leaves the last, and gives the prologue cotangents."""
        schedule, stack = self.schedule, self.stack
        consts, _, xs = stack.parts(stack.unit.linear)
        everywhere = any((*consts, *xs))
        out: dict[str, list[bool]] = {"enters": [], "leaves": [], "pulls": []}
        for slot, column in enumerate(schedule.table()):
            ran = [(op.kind, schedule.stage(rank, op.chunk)) for rank, ops in enumerate(column) for op in ops]
            out["enters"].append(("F", 0) in ran)
            out["leaves"].append(schedule.epilogue(slot) is not None)
            out["pulls"].append(any(kind in "BI" and (everywhere or stage == 0) for kind, stage in ran))
        return out

    @functools.cached_property
    def kinds(self) -> frozenset[str]:
        """The kinds of operations that the table has."""
        return frozenset(op.kind for column in self.schedule.table() for ops in column for op in ops)

    def _first(self, row: Any) -> tuple[SlotCarry, Any, WeightGradResiduals | None]:
        """The first state, all zeros, and the structures of what is stashed and of what I leaves."""
        rows, variables = self.schedule.rows, self.message(self.program)
        message = self.padded(jax.tree.map(lambda v: jnp.zeros(v.aval.shape, v.aval.dtype), variables))
        zeros = lambda n, tree: jax.tree.map(lambda x: jnp.zeros((n, *x.shape), x.dtype), tree)
        sums = [jnp.zeros((), jnp.float32) for _ in self.summed]
        ahead = self.prologues.zeros() if shared(self.program) else []
        state = SlotCarry(zeros(rows.buffers, message), [], [], ahead, [], [None] * len(self.leaves), sums)
        if self.seeds is None:
            return state, None, None

        def one(row: Any) -> Any:
            env, _ = self._before(row["microbatch"], False)
            _, saved = self.chunk(env, row, message, True).run()
            return saved, self.inputs(env, row, saved, message.where(self.linear))[1]

        saved, left = jax.eval_shape(one, row)
        kept = left.values if "I" in self.kinds else []
        state = dataclasses.replace(state, stash=zeros(rows.stashes, saved.values), kept=zeros(rows.keeps, kept))
        state = dataclasses.replace(state, behind=ahead)
        once: Once = lambda name, here, fun, carry: fun(jnp.int32(0), carry)

        def last(state: SlotCarry, row: Any) -> list[Any]:
            state = self.slot(state, row, saved, left, once)
            return self.with_prologues(state.grads, state.behind)

        grads = jax.eval_shape(last, state, row)
        grads = [None if g is None else jnp.zeros(g.shape, g.dtype) for g in grads]
        return dataclasses.replace(state, grads=grads), saved, left

    def slot(self, state: SlotCarry, row: Any, saved: Any, left: WeightGradResiduals | None, once: Once) -> SlotCarry:
        """One slot; `saved` and `left` are the structures of what is stashed, and of what I leaves."""
        stash, kept, behind, buffers = state.stash, state.kept, state.behind, state.buffers
        grads, sums = list(state.grads), state.sums
        env, _ = self._before(row["microbatch"], False)
        message = _at(buffers, row["read"])

        def enter(number: jax.Array, message: Message) -> Message:
            env, _ = self._before(row["microbatch"] + number, False)
            if state.ahead:
                env |= self.prologues.entering(state.ahead, row["entered"] + number)
            return self.entered(env, {"chunk": jnp.where(row["kind"] == CODES["F"], row["chunk"], 1)}, message)

        message = once("enters", row["enters"], enter, message)
        run = _Operations(self, env, row, saved, left)
        of = lambda kind: row["kind"] == CODES[kind]
        message, stash = once("F", of("F"), run.forward, (message, stash))
        extras = self.no_extras()
        if "B" in self.kinds:
            back = functools.partial(run.backward, stash)
            message, extras, grads = once("B", of("B"), back, (message, extras, grads))
        if "I" in self.kinds:
            message, extras, kept = once("I", of("I"), functools.partial(run.inputs, stash), (message, extras, kept))
            grads = once("W", of("W"), functools.partial(run.weights, stash, kept), grads)

        def epilogue(number: jax.Array, carry: Any) -> Any:
            buffers, grads, sums = carry
            env, tape = self._before(row["left"] + number, bool(self.seeds))
            grads, sums, made = self.epilogue(env, message, row["left"] + number, list(grads), sums)
            if made is not None:
                full = self.full(self.padded(made.message), _at(buffers, row["epilogue"] + number))
                buffers = _put(buffers, full, row["epilogue"] + number)
                pairs = zip(side(self.program), made.side, strict=True)
                beside = {v: jnp.where(self.is_last, ct, jnp.zeros_like(ct)) for v, ct in pairs}
                grads = backward(before(self.program), self.access, self.leaves, tape, beside, grads)
            return buffers, grads, sums

        def pull(number: jax.Array, carry: Any) -> Any:
            grads, behind = carry
            valid = (row["kind"] == CODES["B"]) | (row["kind"] == CODES["I"])
            consts, xs = extras
            first = pick(self.linear.carry, message.carry)
            made = self.of_prologue({"valid": valid, "chunk": row["chunk"]}, consts, first, xs)
            if behind:
                return grads, self.prologues.kept(behind, made, row["pulled"] + number)
            _, tape = self._before(row["microbatch"] + number, True)
            return backward(before(self.program), self.access, self.leaves, tape, made, grads), behind

        buffers, grads, sums = once("leaves", row["leaves"], epilogue, (buffers, grads, sums))
        if self.seeds is not None:
            grads, behind = once("pulls", row["pulls"], pull, (grads, behind))
        return SlotCarry(self._sent(message, buffers, row), stash, kept, state.ahead, behind, grads, sums)

    def _sent(self, message: Message, buffers: Message, row: Any) -> Message:
        """The buffers after the slot's messages: to both neighbours, and over the turn of a V."""
        below, above, here, _ = map(bool, np.any(self.schedule.rows.sent, axis=0))
        for used, way, by in ((below, "below", 1), (above, "above", -1)):
            if used:
                came = jax.tree.map(lambda x, by=by: collectives.shift(x, AXIS, by), message)
                buffers = _put(buffers, came, row[way])
        return _put(buffers, message, row["here"]) if here else buffers

    def _before(self, microbatch: jax.Array, grad: bool) -> tuple[dict[Any, Any], list[Any]]:
        """What the prologue makes of a microbatch, and its tape."""
        env = self.program.environment(self.values(microbatch))
        return env, forward(before(self.program), self.access, self.leaves, env, grad)

    def inputs(self, env: Any, op: Any, saved: Any, cts: Message, *stashes: Stash) -> tuple[list[Any], Any]:
        """Cotangents of a chunk's inputs, and what is left for W; `stashes` as for `Stack.backward_inputs`."""
        known, given = self.known(env, op), self.given(op, cts)
        return self.stage.backward_inputs(self.access, self.leaves, known, saved, given, *self.layers(op), *stashes)


@dataclass(frozen=True)
class _Operations:
    """F, B, I and W of one slot. What they look up depends on `number`, so that no compiler moves it out."""

    of: Slots
    env: dict[Any, Any]
    row: Any
    saved: Any
    left: WeightGradResiduals | None

    def _op(self, number: jax.Array) -> dict[str, jax.Array]:
        return {name: self.row[name] + number for name in ("chunk", "microbatch", "stash", "kept")}

    def forward(self, number: jax.Array, carry: Any) -> Any:
        (message, stash), op = carry, self._op(number)
        grad = self.of.seeds is not None
        into = Stash(stash, op["stash"]) if grad else None
        outs, new = self.of.chunk(self.env, op, message, grad, into).run()
        return outs, new if grad else stash

    def backward(self, stash: list[jax.Array], number: jax.Array, carry: Any) -> Any:
        (message, _, grads), op, of = carry, self._op(number), self.of
        saved, own = Stash(stash, op["stash"]), of.stack.unit.leaves
        given, into = of.given(op, message.where(of.linear)), [grads[i] for i in own]
        totals, cts = of.stage.backward(
            of.access, of.leaves, of.known(self.env, op), self.saved, given, into, *of.layers(op), saved
        )
        return *self._back(message, cts), with_totals(grads, own, totals)

    def inputs(self, stash: list[jax.Array], number: jax.Array, carry: Any) -> Any:
        (message, _, kept), op = carry, self._op(number)
        stashes = Stash(stash, op["stash"]), Stash(kept, op["kept"])
        cts, kept = self.of.inputs(self.env, op, self.saved, message.where(self.of.linear), *stashes)
        return *self._back(message, cts), kept

    def weights(self, stash: list[jax.Array], kept: list[jax.Array], number: jax.Array, grads: Any) -> Any:
        op, of = self._op(number), self.of
        assert self.left is not None
        own = of.stack.unit.leaves
        known, into = of.known(self.env, op), [grads[i] for i in own]
        stashes = Stash(pick(self.left.halves.saved, stash), op["stash"]), Stash(kept, op["kept"])
        totals = of.stage.backward_weights(of.access, of.leaves, known, [], self.left, into, *of.layers(op), *stashes)
        return with_totals(grads, own, totals)

    def _back(self, message: Message, cts: list[Any]) -> tuple[Message, Any]:
        """The message for the stage before, and cotangents of what layers read beside it."""
        consts, carry, xs = self.of.parts(cts)
        by_layer = message.where(self.of.linear).by_layer
        return self.of.full(Message(carry, by_layer), message), (consts, xs)
