"""How one step uses its leaves, counted in its sliced loss: what the closed forms of rules are functions of.

One use of a stacked leaf [L, ...] is L fetches of a layer.

A pipeline of p ranks and v chunks (`parallel/pipeline/schedules.py`) runs a chunk of L / (p v) layers in every tick of
its schedule that has a forward, and again in every one that has a backward, idle ranks included, with the prologue
beside it, and the epilogue in m ticks. What no stage owns it fetches once, and gives once.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp

from ..collectives import scatter_pieces
from ..layout.leaves import Leaf
from ..parallel.data import Times, Uses
from ..parallel.data.access import RuleAccess
from ..parallel.pipeline.flat.engine import FlatPipeline
from ..parallel.pipeline.slots import Slots
from ..program.jaxpr import Flat, build, live, opened, trace
from ..program.walk import visit
from ..slicing.access import WholeAccess
from ..slicing.program import Program
from ..step.gradients import accumulate
from ..step.pipeline import Piped
from ..step.tracing import Loss, Traced
from ..strategy.axes import summed_over
from .ledger import Collective, Ledger
from .step_view import StepView as Step


@dataclass(frozen=True)
class Runs:
    """How often one step fetches a leaf and gives its gradient, [whole, layer by layer]."""

    fetched: tuple[int, int] = (0, 0)
    given: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Counted:
    """What one step does with parameters.

    Attributes:
      runs: of each unit of the layout (`Storage.units`).
      own: the model's own collectives.
      metrics: their number, the loss among them.
      counts: whether the loss counts rows or tokens; then a count is summed before the backward.
      once: whether each use is run once: one turn, no pipeline.
      outside: leaves of a pipeline that no stage owns: their gradients are given as accumulated.
      given: leaves that some rank gives a gradient of, where each rank has a program of its own.
    """

    runs: list[Runs]
    own: list[Collective]
    metrics: int
    counts: bool
    once: bool
    outside: frozenset[int] = frozenset()
    given: frozenset[int] = frozenset()


def count(step: Step, traced: Traced) -> list[Counted]:
    """What one training step does with parameters: of one rank after another, where each has a program of its own."""
    return _piped(step, traced) if traced.schedule else [_plain(step, traced)]


def uses(step: Step, traced: Traced, counted: Counted) -> Iterator[Uses]:
    """Each unit and its uses, in numbers."""
    program = traced.program
    dims = {s.leaf: s.dim for stack in program.stacks for s in stack.slices}
    for i, runs in enumerate(counted.runs):
        last = counted.once and program.uses[i] == (True,)
        yield _uses(step, i, runs, last, dims.get(i, 0), i in counted.outside, i in counted.given)


def _uses(step: Step, index: int, runs: Runs, last: bool, dim: int, outside: bool, elsewhere: bool) -> Uses:
    """A unit and its uses, in numbers; its layers are on dim `dim`."""
    unit, shape, policy = step.layout.storage.units[index], step.mesh.shape, step.policy
    leaf = unit.local
    of_a_stage = leaf.of_a_stage
    ranks = shape["pipe"] if of_a_stage else 1
    compute, reduce = policy.computed(leaf.dtype), policy.reduced(leaf.dtype)
    stored = math.prod(leaf.stored)
    elements, layer = stored // ranks, stored // max(1, _layers(leaf, dim))
    all_parts = stored if leaf.spread else elements  # a stage has every rank's part of it
    given, updated = (), ()
    if leaf.trainable:
        n = math.prod(shape[a] for a in leaf.shard if a != "data")
        whole, sliced = runs.given
        made = reduce if outside else compute
        given = (Times(whole, all_parts, _pieces(leaf, None, n, made, reduce) if whole else 1),)
        given += (Times(sliced, layer, _pieces(leaf, dim, n, compute, reduce) if sliced else 1),)
    own = leaf.dim is not None and index < len(step.layout.leaves)  # not the layers of a kept stack
    if own and (leaf.trainable or step.strategy.hpz):
        parts = _layers(leaf) // ranks if step.layout.leaves[index].by_layer else 1
        updated = (Times(parts, elements // parts),)
    shard = leaf.shard if leaf.dim is not None else ()
    return Uses(
        elements=elements,
        fetched=_some(Times(runs.fetched[0], all_parts), Times(runs.fetched[1], layer)),
        given=_some(*given) or (given[:1] if elsewhere else ()),  # of no use here, and still summed with others'
        updated=updated,
        last=last,
        shard=tuple(a for a in shard if shape[a] > 1 and a != "data"),
        rest=tuple(a for a in summed_over(unit.split) if shape[a] > 1 and a not in shard),
        sizes=dict(shape),
        compute=compute,
        reduce=reduce,
        stored=compute if step.layout.copied else policy.stored(leaf.dtype, leaf.trainable),
        second=("data",) if "data" in shard and shape["data"] > 1 else (),
    )


def _some(*times: Times) -> tuple[Times, ...]:
    return tuple(each for each in times if each.count)


# Marks move nothing: they only stand in the jaxpr, where they are counted.
_MARK = jec.Primitive("jaxpar_mark")
_MARK.def_abstract_eval(lambda x, **_: x)


class _Marker(WholeAccess):
    """Marks each use, on values of the shapes that the step stores."""

    def __init__(self, step: Step, program: Program):
        super().__init__(record=_MARK.bind)
        self.leaves, self.ranks = [leaf.local for leaf in step.layout.storage.units], step.mesh.shape["pipe"]
        if not step.layout.storage.cut:
            self.sends = RuleAccess(step.layout, step.rule, program, step.strategy).sends

    def fetch(self, index: int, value: jax.Array, sliced: bool) -> jax.Array:
        value = self.record(value, what="fetched", index=index, sliced=sliced)
        leaf = self.leaves[index]
        if leaf.spread and leaf.dim is not None:  # one of each rank's
            return value[0]
        whole = sliced or leaf.layers is None
        return value if whole else jnp.broadcast_to(value[:1], leaf.logical)

    def give(self, index: int, cotangent: jax.Array, sliced: bool) -> jax.Array | None:
        leaf = self.leaves[index]
        if not leaf.trainable:
            return None
        cotangent = self.record(cotangent, what="given", index=index, sliced=sliced)
        if leaf.spread and leaf.dim is not None:
            return jnp.stack([cotangent] * self.ranks)
        return cotangent if sliced or leaf.layers is None else cotangent[: _layers(leaf)]


def _marks(jaxpr: Any, times: int = 1) -> Iterator[tuple[str, int, bool, int]]:
    """Every mark in a program: what, leaf, sliced, and how often it runs."""
    for eqn, runs in visit(opened(jaxpr)[0].eqns, times=times):
        if eqn.primitive is _MARK:
            yield eqn.params["what"], eqn.params["index"], eqn.params["sliced"], runs


def _plain(step: Step, traced: Traced) -> Counted:
    """One turn after another, of a microbatch or of concurrent ones."""
    turns = step.strategy.turns

    def run(leaves: list[Any], variables: Any, rows: Any, key: Any) -> Any:
        blocks = jax.tree.map(lambda x: jnp.stack([x] * turns), (rows, key))
        return accumulate(Loss(traced, _Marker(step, traced.program), leaves), variables, blocks, jnp.float32(1))

    flat, _ = trace(run, traced.leaves, *traced.inputs, axes=traced.traced_axes)
    runs, own = _counted(step, [(1, _live(flat, range(len(flat.outvars))))])
    return Counted(runs, own, len(traced.outputs[0]), traced.counts, turns == 1)


def _piped(step: Step, traced: Traced) -> list[Counted]:
    """Ticks of a pipeline: forwards, backwards, and what an epilogue adds to a forward."""
    schedule = traced.schedule
    assert schedule is not None
    m = schedule.microbatches
    axes = {str(a): n for a, n in step.mesh.shape.items() if n > 1}

    times: list[int] = []
    ranks: list[int | None] = []  # of stages that are parts of a program: whose each part is, None for all ranks
    once: dict[int, Runs] = {}

    def ticks(leaves: list[Any], variables: Any, rows: Any, key: Any) -> Any:
        """What the pipeline runs, each part once."""
        keys, many = jax.tree.map(lambda x: jnp.stack([x] * m), (key, rows))
        loss = Loss(traced, _Marker(step, traced.program), leaves)
        pipeline = Piped(step.tracing, loss, variables, many, keys).pipeline(jnp.float32(1))
        if isinstance(pipeline, FlatPipeline):
            times[:], ranks[:], found = zip(*pipeline.separated(), strict=True)
            return found  # every leaf is some stage's
        times[:], found = zip(*pipeline.separated(), strict=True)
        each = [found[0][0]] if isinstance(pipeline, Slots) else found
        given = {i for carry in each for i, grad in enumerate(carry.grads) if grad is not None}
        once.update({i: Runs((1, 0), (int(i in given), 0)) for i in pipeline.access.which})
        return found

    flat, outs = trace(ticks, traced.leaves, traced.variables, traced.rows, traced.key, axes=axes)
    numbers = jax.tree.unflatten(jax.tree.structure(outs), list(range(len(flat.outvars))))
    parts = [(n, _live(flat, jax.tree.leaves(tick))) for n, tick in zip(times, numbers, strict=True)]

    def counted(parts: list[tuple[int, Any]], given: frozenset[int] = frozenset()) -> Counted:
        runs, own = _counted(step, parts)
        runs = [once.get(i, each) for i, each in enumerate(runs)]
        return Counted(runs, own, len(traced.outputs[0]), traced.counts, False, frozenset(once), given)

    whole = counted(parts)
    if not ranks:
        return [whole]
    given = frozenset(i for i, runs in enumerate(whole.runs) if runs.given[0])
    of = lambda rank: [part for part, home in zip(parts, ranks, strict=True) if home in (None, rank)]
    return [counted(of(rank), given) for rank in range(schedule.ranks)]


def _live(flat: Flat, outs: Sequence[int]) -> Any:
    """A program without what nobody reads, if these results alone are read."""
    outvars = [flat.outvars[i] for i in outs]
    return build(live(flat.eqns, outvars), [*flat.constvars, *flat.invars], outvars)


def _counted(step: Step, parts: list[tuple[int, Any]]) -> tuple[list[Runs], list[Collective]]:
    """Uses of each leaf, and the collectives that stand in programs, each of which runs so many times."""
    found = [{"fetched": [0, 0], "given": [0, 0]} for _ in step.layout.storage.units]
    own = []
    for times, jaxpr in parts:
        for what, index, sliced, runs in _marks(jaxpr):
            found[index][what][sliced] += times * runs
        for one in Ledger.from_jaxpr(jaxpr, step.mesh):
            assert one.count is not None
            own.append(dataclasses.replace(one, count=one.count * times, bytes=one.bytes * times))
    runs = [Runs((f[0], f[1]), (g[0], g[1])) for f, g in ((u["fetched"], u["given"]) for u in found)]
    return runs, [one for one in Ledger(own) if one.count]


def _layers(leaf: Leaf, dim: int = 0) -> int:
    """The layers of a leaf that is a stack along a dim, padding of the stages included."""
    return math.prod(leaf.shape[: leaf.stage + 1]) if dim == 0 else leaf.shape[dim]


def _pieces(leaf: Leaf, dim: int | None, n: int, dtype: Any, wider: Any) -> int:
    """How many reduce-scatters a gradient takes, of a layer on `dim` or of the whole: several if very large."""
    if dim is None:
        return scatter_pieces(leaf.stored, dtype, leaf.inner(False), n, wider)
    shape = (*leaf.stored[:dim], *leaf.stored[dim + 1 :]) if dim else leaf.stored[leaf.stage + 1 :]
    return scatter_pieces(shape, dtype, leaf.inner(True, dim), n, wider)
