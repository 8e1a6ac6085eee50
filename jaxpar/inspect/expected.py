"""The collectives that a strategy should cost: the papers' closed forms, summed over leaves and their uses.

For a leaf of S stored elements, f uses forwards, b backwards (a bias, say, is not read there) and g gradients in one
microbatch, m microbatches, n devices on `fsdp` (Rajbhandari et al. 2020, section 7; `parallel/` has each strategy):

    ddp      all-reduce g S once                                                   over data and fsdp
    zero1    reduce-scatter S once, all-gather S once
    zero2    reduce-scatter m g S, all-gather S once
    zero3    all-gather m (f + b) S, reduce-scatter m g S
    with data replicas, an all-reduce of S/n once; leaves that are not sharded, as in ddp

A stack counts its layers: one use of a leaf [L, ...] is L collectives of S/L elements.

A pipeline of p ranks and v chunks (`parallel/pipeline/schedules.py`) runs a chunk of L / (p v) layers forwards in m v +
p - 1 ticks and backwards in as many, idle ranks included, with the prologue beside it, and the epilogue in m ticks.
Each such tick sends one message of the activations to the next rank, or of their cotangents to the one before; ranks
that share the epilogue reduce-scatter the last rank's activations and all-gather the cotangents, m times. Leaves
outside the stages are reduced, and with ZeRO sharded, over `pipe` too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp

from ..collectives import scatter_pieces
from ..jaxprs.jaxpr import build, live, opened, trace
from ..layout.leaves import Leaf
from ..layout.precision import Policy
from ..model.model import Replicated
from ..parallel.pipeline.schedules import Phase
from ..step.core import Step
from ..step.piped import Piped
from ..step.tracing import Loss, Traced
from ..strategy import ROWS
from .ledger import Collective, Ledger


@dataclass(frozen=True)
class Uses:
    """How one step uses a leaf: executions of fetches and of gradients, [whole, layer by layer]."""

    fetched: tuple[int, int] = (0, 0)
    given: tuple[int, int] = (0, 0)


def expected(step: Step, batch: Any) -> Ledger:
    """The ledger that the strategy's closed form gives for one training step on a batch of these shapes.

    It stands for the jaxpr: `Ledger.from_jaxpr(step.trace(batch), step.mesh)` equals it in kinds, axes, dtypes,
    counts and bytes. The model's own collectives (BatchNorm, `jp.all_rows`) are included as the model writes them.
    Compiled programs have the same bytes, and besides them scalar all-reduces of the optimizer's norms.
    """
    traced = step.traced(batch)
    program = traced.program
    run = _piped(step, traced) if traced.schedule else _run(step, traced)
    found = list(run.own)
    dims = {s.leaf: s.dim for stack in program.stacks for s in stack.slices}
    for i, (leaf, use) in enumerate(zip(step.layout.kept.units, run.uses, strict=True)):
        found += _leaf(step, leaf, use, run.last and program.uses[i] in ((True,), (False,)), dims.get(i, 0))
    for leaf in step.layout.leaves:
        found += _published(step, leaf)
    rows = tuple(traced.axes)
    axes = ("pipe", *rows) if traced.schedule else rows
    if axes and not step.strategy.server:
        found.append(Collective("all-reduce", axes, "float32", 1, 4 * 2 * run.metrics))
        if run.counts and rows:
            found.append(Collective("all-reduce", rows, "float32", 1, 4))
    return Ledger(found)


def exchanges(step: Step, batch: Any) -> dict[str, int]:
    """Bytes through the links of a central server in one training step, by what is sent; {} without a server.

    Of n devices, n - 1 get their rows, all weights and variables, and one float32 for the gradient of their loss; they
    return a sum and a count for each metric, and their gradients.
    """
    if not step.strategy.server:
        return {}
    state, n = step.abstract_state(), step.replicas
    marked = jax.tree.leaves(batch, is_leaf=lambda x: isinstance(x, Replicated))
    per_device = [jax.eval_shape(lambda x: x, x) for x in marked]
    rows = sum(_bytes(x) if isinstance(x, Replicated) else _bytes(x) // n for x in per_device)
    sent = (state.step, state.params, state.variables, state.scale, state.key)
    reduced = sum(step.policy.reduced(f.dtype).itemsize * math.prod(f.shape) for f in step.layout.leaves if f.trainable)
    return {
        "rows of the batch": (n - 1) * rows,
        "weights": (n - 1) * _bytes(sent),
        "losses": (n - 1) * 4 * 2 * len(step.traced(batch).outputs[0]),
        "gradients of the losses": (n - 1) * 4,
        "gradients": (n - 1) * reduced,
    }


def _bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _entry(kind: str, axes: tuple[str, ...], dtype: Any, count: int, elements: int) -> Collective:
    return Collective(kind, axes, jnp.dtype(dtype).name, count, elements * jnp.dtype(dtype).itemsize)


def _leaf(step: Step, leaf: Leaf, use: Uses, last: bool, dim: int) -> Iterator[Collective]:
    """What is sent for one leaf, whose layers are on dim `dim`. With `last`, its use is the only one, and reduces at
    once.
    """
    strategy, shape = step.strategy, step.mesh.shape
    mine = leaf.layers is not None  # of a stage
    n = math.prod(shape[a] for a in leaf.shard)
    ranks, layers = (shape["pipe"] if mine else 1), _layers(leaf, dim)
    leaf = leaf.local
    stored = math.prod(leaf.stored)
    sharded = shape["fsdp"] > 1 and leaf.dim is not None
    compute, reduce = step.policy.computed(leaf.dtype), step.policy.reduced(leaf.dtype)
    used_by = [a for a in (ROWS if mine else ("pipe", *ROWS)) if shape[a] > 1]
    rest = tuple(a for a in used_by if not (sharded and a in leaf.shard))
    shard = tuple(a for a in leaf.shard if shape[a] > 1)
    if strategy.server:
        return
    if mine and use.fetched[0]:  # all of it outside the stack
        whole = stored // n if sharded and strategy.zero < 3 else stored
        yield _entry("all-gather", ("pipe",), compute, use.fetched[0], use.fetched[0] * whole)
    if mine and use.given[0] and leaf.trainable:
        yield _entry("reduce-scatter", ("pipe",), reduce, use.given[0], use.given[0] * stored)
    if sharded and strategy.zero == 3:
        (whole, sliced), part = use.fetched, stored // ranks
        yield _entry("all-gather", shard, compute, whole + sliced, whole * part + sliced * stored // layers)
    whole, sliced = use.given
    if not leaf.trainable or not whole + sliced:
        return
    at_use = last and (whole == 0 or use.given == (1, 0)) and (whole == 0) == (use.fetched[0] == 0)
    all_reduces, reduced = (
        (whole + sliced, whole * stored + sliced * stored // layers) if at_use else (1, stored // ranks)
    )
    if not sharded:
        if rest:
            yield _entry("all-reduce", rest, reduce, all_reduces, reduced)
        return
    every = strategy.zero > 1 or at_use
    pieces = whole * _pieces(leaf, None, n, compute, reduce) + sliced * _pieces(leaf, dim, n, compute, reduce)
    elements = whole * (stored // ranks) + sliced * stored // layers if every else stored // ranks
    yield _entry("reduce-scatter", shard, reduce, pieces if every else 1, elements)
    if rest:
        yield _entry("all-reduce", rest, reduce, all_reduces, reduced // n)


def _published(step: Step, leaf: Leaf) -> Iterator[Collective]:
    """What ZeRO-1 and 2 gather of an updated leaf."""
    shape, mine = step.mesh.shape, leaf.layers is not None
    if step.strategy.server or shape["fsdp"] == 1 or leaf.dim is None or not leaf.trainable or step.strategy.zero == 3:
        return
    dtype = step.policy.computed(leaf.dtype) if step.layout.copied else Policy.master(leaf.dtype)
    ranks = shape["pipe"] if mine else 1
    shard = tuple(a for a in leaf.shard if shape[a] > 1)
    count = _layers(leaf.local) // ranks if leaf.by_layer else 1
    yield _entry("all-gather", shard, dtype, count, math.prod(leaf.local.stored) // ranks)


def _layers(leaf: Leaf, dim: int = 0) -> int:
    """The layers of a leaf that is a stack along a dim, padding of the stages included."""
    return math.prod(leaf.shape[: leaf.stage + 1]) if dim == 0 else leaf.shape[dim]


def _pieces(leaf: Leaf, dim: int | None, n: int, dtype: Any, wider: Any) -> int:
    """The number of reduce-scatters of one gradient, of a layer on `dim` or of the whole: several pieces of a very
    large one.
    """
    if dim is None:
        return scatter_pieces(leaf.stored, dtype, leaf.inner(False), n, wider)
    shape = (*leaf.stored[:dim], *leaf.stored[dim + 1 :]) if dim else leaf.stored[leaf.stage + 1 :]
    return scatter_pieces(shape, dtype, leaf.inner(True, dim), n, wider)


# An `Access` that moves nothing: its operations only stand in the jaxpr, where they are counted.
_MARK = jec.Primitive("jaxpar_mark")
_MARK.def_abstract_eval(lambda x, **_: x)


class _Marker:
    def __init__(self, leaves: tuple[Leaf, ...]):
        self.leaves = [leaf.local for leaf in leaves]

    def fetch(self, index: int, value: jax.Array, sliced: bool) -> jax.Array:
        value = _MARK.bind(value, what="fetched", index=index, sliced=sliced)
        leaf = self.leaves[index]
        whole = sliced or leaf.layers is None
        return value if whole else jnp.broadcast_to(value[:1], leaf.logical)

    def give(self, index: int, cotangent: jax.Array, sliced: bool) -> jax.Array | None:
        leaf = self.leaves[index]
        if not leaf.trainable:
            return None
        cotangent = _MARK.bind(cotangent, what="given", index=index, sliced=sliced)
        return cotangent if sliced or leaf.layers is None else cotangent[: _layers(leaf)]


def _marks(jaxpr: Any, times: int = 1) -> Iterator[tuple[str, int, bool, int]]:
    """Every mark in a program: what, leaf, sliced, and how often it runs."""
    for eqn in opened(jaxpr)[0].eqns:
        if eqn.primitive is _MARK:
            yield eqn.params["what"], eqn.params["index"], eqn.params["sliced"], times
        for inner in jec.jaxprs_in_params(eqn.params):
            yield from _marks(inner, times * eqn.params["length"] if eqn.primitive.name == "scan" else times)


@dataclass(frozen=True)
class _Run:
    """What one step does with parameters: uses of each leaf, the model's own collectives, the number of metrics,
    whether the loss counts rows or tokens (then a count is summed before the backward), and whether a leaf's only
    gradient is the last.
    """

    uses: list[Uses]
    own: list[Collective]
    metrics: int
    counts: bool
    last: bool


def _run(step: Step, traced: Traced) -> _Run:
    """One microbatch after another."""

    def run(leaves: list[Any], *inputs: Any) -> Any:
        loss = Loss(traced, _Marker(step.layout.kept.units), leaves)
        *outs, tape = loss.forward(*inputs)
        return outs, loss.backward(tape, jnp.float32(1), [None] * len(leaves))

    m = step.strategy.microbatches
    inputs = (traced.variables, traced.rows, traced.key)
    uses, own = _counted(step, [(m, _live(run, traced.leaves, *inputs, axes=traced.traced_axes))])
    return _Run(uses, own, len(traced.outputs[0]), traced.counts, m == 1)


def _piped(step: Step, traced: Traced) -> _Run:
    """Ticks of a pipeline: forwards, backwards, and what an epilogue adds to a forward."""
    schedule = traced.schedule
    assert schedule is not None
    m = schedule.microbatches
    axes = {str(a): n for a, n in step.mesh.shape.items() if n > 1}

    def tick(forward: bool, backward: bool, epilogue: bool) -> Any:
        def run(leaves: list[Any], variables: Any, rows: Any, key: Any) -> Any:
            keys, many = jax.tree.map(lambda x: jnp.stack([x] * m), (key, rows))
            loss = Loss(traced, _Marker(step.layout.kept.units), leaves)
            pipeline = Piped(step.tracing, loss, variables, many, keys).pipeline(jnp.float32(1))
            return pipeline.once(Phase(0, 1, forward, backward, epilogue))

        return _live(run, traced.leaves, traced.variables, traced.rows, traced.key, axes=axes)

    alone = [
        (schedule.messages("F"), tick(True, False, False)),
        (schedule.messages("B"), tick(False, True, False)),
    ]
    uses, own = _counted(step, [*alone, (m, tick(True, True, True)), (-m, tick(True, True, False))])
    return _Run(uses, own, len(traced.outputs[0]), traced.counts, False)


def _live(run: Any, *args: Any, axes: dict[str, int]) -> Any:
    """A program without what nobody reads."""
    flat, _ = trace(run, *args, axes=axes)
    return build(live(flat.eqns, flat.outvars), [*flat.constvars, *flat.invars], flat.outvars)


def _counted(step: Step, parts: list[tuple[int, Any]]) -> tuple[list[Uses], list[Collective]]:
    """Uses of each leaf, and the collectives that stand in programs, each of which runs so many times."""
    found = [{"fetched": [0, 0], "given": [0, 0]} for _ in step.layout.kept.units]
    own = []
    for times, jaxpr in parts:
        for what, index, sliced, runs in _marks(jaxpr):
            found[index][what][sliced] += times * runs
        for one in Ledger.from_jaxpr(jaxpr, step.mesh):
            assert one.count is not None
            own.append(dataclasses.replace(one, count=one.count * times, bytes=one.bytes * times))
    uses = [Uses((f[0], f[1]), (g[0], g[1])) for f, g in ((u["fetched"], u["given"]) for u in found)]
    return uses, [one for one in Ledger(own) if one.count]
