"""The operations of a stage, each traced once, as functions of arrays.

    F    leaves, inputs, message from before               -> message, results, what is stashed
    B    leaves, inputs, stashed, cotangents from behind   -> cotangents, gradients
    I    leaves, inputs, stashed, cotangents from behind   -> cotangents, what is left for W
    W    leaves, inputs, stashed, what I left              -> gradients

A schedule has B, or I and W (`slicing/halves.py`). Of what a backward reads, rows and the like are looked up again;
each other value is stashed once, from F to B or W.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from ....layout.leaves import Leaf
from ....program import jaxpr as jx
from ....slicing.access import Access
from ....slicing.halves import Halves, WeightGradResiduals, pick
from ....slicing.pieces import add
from ....slicing.program import Program, backward, forward, read
from .packing import Packing
from .stages import Stage, is_linear


class Spread(Access, Protocol):
    """How parameters are fetched and gradients given, and which of the leaves are spread over `pipe`: those whose `dim`
    is a number (`parallel/data/access.py`).
    """

    leaves: Sequence[Leaf]


@dataclass(frozen=True)
class StageRun:
    """A stage's operations, traced.

    Attributes:
      forward: `forward(leaves, inputs, incoming)`: outgoing, results, what is stashed.
      backwards: of "B", "I" and "W" those that the schedule has, as `fun(leaves, inputs, stashed, given)`, where
        `given` are the cotangents of the linear outgoing, or for W what I left. They return cotangents of the linear
        incoming (W none), gradients of the leaves as they are given (None for frozen ones; I none), and what is left
        for W. Nothing in an evaluation.
      stash, left: where what is stashed lies, and what I leaves.
    """

    forward: Callable[..., tuple[list[Any], list[Any], list[Any]]]
    backwards: Mapping[str, Callable[..., tuple[list[Any], list[Any], list[Any]]]]
    stash: Packing
    left: Packing


@dataclass(frozen=True)
class _Backward:
    """A stage's backward, whole and in halves, to be traced: functions of leaves, tape and cotangents."""

    stage: Stage
    program: Program
    access: Access
    seeds: Mapping[int, jax.Array]
    halves: list[Halves] = field(default_factory=list)  # as the first half made it

    def whole(self, mine: Sequence[Any], tape: Any, given: Sequence[Any]) -> Any:
        cts, piece = self._seeded(given), self.stage.piece
        leaves = _whole(mine, piece.unit.leaves, len(self.program.leaves))
        grads = backward([piece], self.access, leaves, tape, cts, [None] * len(leaves))
        return self._incoming(cts), [grads[i] for i in piece.unit.leaves], []

    def inputs(self, mine: Sequence[Any], tape: Any, given: Sequence[Any]) -> Any:
        cts, piece = self._seeded(given), self.stage.piece
        unit, ((inputs, saved),) = piece.unit, tape
        if saved is None:  # nothing has a derivative here
            return self._incoming(cts), [], []
        active = pick(unit.active, piece.outputs)
        made = [cts.pop(v) if v in cts else jnp.zeros(v.aval.shape, v.aval.dtype) for v in active]
        halves = unit.halves(inputs, saved[0], made)
        self.halves.append(halves)
        found, left = halves.inputs(
            self._fetched(halves.fetched[0], mine), pick(unit.held, inputs), saved[0].values, made
        )
        for v, ct in zip(pick(unit.linear, piece.inputs), found, strict=True):
            cts[v] = add(cts.get(v), ct)
        return self._incoming(cts), [], left.values

    def weights(self, mine: Sequence[Any], tape: Any, left: Sequence[Any]) -> Any:
        unit, ((inputs, saved),) = self.stage.piece.unit, tape
        if saved is None:
            return [], [None] * len(mine), []
        halves = self.halves[-1]
        values, held = pick(halves.saved, saved[0].values), pick(unit.held, inputs)
        cts = halves.weights(
            self._fetched(halves.fetched[1], mine), held, values, WeightGradResiduals(list(left), halves)
        )
        pairs = zip(unit.leaves, cts, strict=True)
        return [], [None if ct is None else self.access.give(i, ct, False) for i, ct in pairs], []

    def _fetched(self, which: Sequence[bool], mine: Sequence[Any]) -> list[jax.Array]:
        leaves = pick(which, self.stage.piece.unit.leaves)
        return [self.access.fetch(i, x, False) for i, x in zip(leaves, pick(which, mine), strict=True)]

    def _seeded(self, given: Sequence[Any]) -> dict[Any, Any]:
        """Cotangents of what the stage hands on, and of its results, by variable."""
        cts = dict(zip([v for v in self.stage.outgoing if is_linear(self.program, v)], given, strict=True))
        for i in self.stage.results:
            if i in self.seeds and not jx.is_literal(v := self.program.outputs[i]):
                cts[v] = add(cts.get(v), self.seeds[i])
        return cts

    def _incoming(self, cts: Mapping[Any, Any]) -> list[jax.Array]:
        wanted = [v for v in self.stage.incoming if is_linear(self.program, v)]
        return [cts[v] if v in cts else jnp.zeros(v.aval.shape, v.aval.dtype) for v in wanted]


@dataclass(frozen=True)
class _Part:
    """A part of a backward, traced: its arguments are leaves, the tape, and what is given."""

    flat: jx.Flat
    leaves: Sequence[Any]
    tape: Sequence[Any]
    given: Sequence[Any]
    shape: tuple[list[Any], list[Any], list[Any]]

    @classmethod
    def of(cls, fun: Callable[..., Any], leaves: Sequence[Any], tape: Any, given: Sequence[Any]) -> "_Part":
        flat, shape = jx.trace(fun, list(leaves), tape, list(given))
        n, m = len(leaves), len(jax.tree.leaves(tape))
        return cls(flat, flat.invars[:n], flat.invars[n : n + m], flat.invars[n + m :], shape)

    def leaving(self, which: Sequence[bool]) -> "_Part":
        """This part with only the marked residuals left for the other half."""
        cts, grads, left = self.shape
        made = len(self.flat.outvars) - len(left)
        outs = (*self.flat.outvars[:made], *pick(which, self.flat.outvars[made:]))
        return replace(self, flat=replace(self.flat, outvars=outs), shape=(cts, grads, pick(which, left)))

    def reads(self, arguments: Sequence[Any]) -> list[bool]:
        """Which of some arguments it reads."""
        found = {*jx.free(jx.live(self.flat.eqns, self.flat.outvars), self.flat.outvars)}
        return [v in found for v in arguments]

    def function(self) -> Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], Any]:
        """Of the leaves, what it reads of the tape, and what is given."""
        flat, tape = self.flat, pick(self.reads(self.tape), self.tape)
        before = [*flat.constvars, *self.leaves, *tape, *self.given]
        fun, tree = jx.run(jx.live(flat.eqns, flat.outvars), before, flat.outvars), jax.tree.structure(self.shape)
        return lambda *args: jax.tree.unflatten(tree, fun(*flat.consts, *(x for some in args for x in some)))


def _parts(back: _Backward, kinds: str, leaves: Sequence[Any], tape: Any, given: Sequence[Any]) -> dict[str, _Part]:
    """The parts of a backward that a schedule has."""
    if "I" not in kinds:
        return {"B": _Part.of(back.whole, leaves, tape, given)}
    inputs = _Part.of(back.inputs, leaves, tape, given)
    weights = _Part.of(back.weights, leaves, tape, inputs.shape[2])
    read = weights.reads(weights.given)  # a frozen leaf's gradient reads nothing
    return {"I": inputs.leaving(read), "W": replace(weights, given=pick(read, weights.given))}


def run(
    stage: Stage,
    program: Program,
    access: Access,
    leaves: Sequence[Any],
    inputs: Sequence[Any],
    fixed: Sequence[bool],
    seeds: Mapping[int, jax.Array] | None,
    kinds: str,
) -> StageRun:
    """Trace a stage's operations, of these `kinds`, with abstract `leaves` (of its unit) and `inputs` of the program;
    `fixed` says which of these a backward finds as they were. `seeds` are cotangents of the program's outputs by
    position, None for an evaluation.
    """
    piece, grad = stage.piece, seeds is not None
    incoming = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in stage.incoming]

    def ahead(mine: Sequence[Any], inputs: Sequence[Any], incoming: Sequence[Any]) -> Any:
        env = program.environment(inputs)
        env.update(zip(stage.incoming, incoming, strict=True))
        tape = forward([piece], access, _whole(mine, piece.unit.leaves, len(program.leaves)), env, grad)
        found = [read(env, v) for v in stage.outgoing], [read(env, program.outputs[i]) for i in stage.results]
        return *found, tape if grad else None

    flat, (made, found, tape) = jx.trace(ahead, list(leaves), list(inputs), incoming)
    before = len(made) + len(found)
    taped = flat.outvars[before:]
    parts: dict[str, _Part] = {}
    if seeds is not None:
        given = [x for x, v in zip(made, stage.outgoing, strict=True) if is_linear(program, v)]
        parts = _parts(_Backward(stage, program, access, seeds), kinds, leaves, tape, given)

    again = {v: at for at, (v, on) in enumerate(zip(flat.invars[len(leaves) :], fixed, strict=False)) if on}
    consts = dict(zip(flat.constvars, flat.consts, strict=True))
    reads = {kind: pick(part.reads(part.tape), taped) for kind, part in parts.items()}
    stashed = {v: None for some in reads.values() for v in some if not jx.is_literal(v)}
    kept = [v for v in stashed if v not in again and v not in consts]
    outs = [*flat.outvars[:before], *kept]
    ahead_fun = jx.run(jx.live(flat.eqns, outs), [*flat.constvars, *flat.invars], outs)

    def run_ahead(mine: Sequence[Any], inputs: Sequence[Any], incoming: Sequence[Any]) -> Any:
        outs = ahead_fun(*flat.consts, *mine, *inputs, *incoming)
        return outs[: len(made)], outs[len(made) : before], outs[before:]

    def run_back(kind: str) -> Callable[..., Any]:
        fun = parts[kind].function()

        def run(mine: Sequence[Any], inputs: Sequence[Any], stashed: Sequence[Any], given: Sequence[Any]) -> Any:
            known = dict(zip(kept, stashed, strict=True)) | consts | {v: inputs[at] for v, at in again.items()}
            return fun(mine, [read(known, v) for v in reads[kind]], given)

        return run

    left = Packing.of(parts["I"].shape[2] if "I" in parts else ())
    return StageRun(run_ahead, {kind: run_back(kind) for kind in parts}, Packing.of(v.aval for v in kept), left)


def _whole(mine: Sequence[Any], which: Sequence[int], leaves: int) -> list[Any]:
    """All leaves of a program; a stage has some."""
    out: list[Any] = [None] * leaves
    for i, x in zip(which, mine, strict=True):
        out[i] = x
    return out
