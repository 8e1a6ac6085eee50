"""The collectives that a strategy should cost: the papers' closed forms, summed over leaves and their uses.

For a leaf of S stored elements, f uses forwards, b backwards (a bias, say, is not read there) and g gradients in one
microbatch, m microbatches, n devices on `fsdp` (Rajbhandari et al. 2020, section 7; `parallel/` has each strategy):

    ddp      all-reduce g S once                                                   over data and fsdp
    zero1    reduce-scatter S once, all-gather S once
    zero2    reduce-scatter m g S, all-gather S once
    zero3    all-gather m (f + b) S, reduce-scatter m g S
    with data replicas, an all-reduce of S/n once; leaves that are not sharded, as in ddp

A stack counts its layers: one use of a leaf [L, ...] is L collectives of S/L elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp

from ..collectives import scatter_pieces
from ..jaxpr import opened
from ..layout import Leaf
from ..model import Replicated
from ..precision import Policy
from ..step import Step
from .ledger import Collective, Ledger


@dataclass(frozen=True)
class Uses:
    """How one microbatch uses a leaf: executions of fetches forwards and backwards, and of gradients, whole or by
    layer.
    """

    forward: tuple[bool, ...]  # one entry a use: whether it is sliced
    backward: tuple[bool, ...]
    gradient: tuple[bool, ...]


def expected(step: Step, batch: Any) -> Ledger:
    """The ledger that the strategy's closed form gives for one training step on a batch of these shapes.

    It stands for the jaxpr: `Ledger.from_jaxpr(step.trace(batch), step.mesh)` equals it in kinds, axes, dtypes,
    counts and bytes. The model's own collectives (BatchNorm, `jp.all_rows`) are included as the model writes them.
    Compiled programs have the same bytes, and besides them scalar all-reduces of the optimizer's norms.
    """
    uses, own, metrics, counts = _uses(step, batch)
    m = step.strategy.microbatches
    found = [Collective(one.kind, one.axes, one.dtype, (one.count or 0) * m, one.bytes * m) for one in own]
    for leaf, use in zip(step.layout.leaves, uses, strict=True):
        found += _leaf(step, leaf, use)
    axes = tuple(step.local.axes)
    if axes and not step.strategy.server:
        found.append(Collective("all-reduce", axes, "float32", 1, 4 * 2 * metrics))
        if counts:
            found.append(Collective("all-reduce", axes, "float32", 1, 4))
    return Ledger(found)


def _leaf(step: Step, leaf: Leaf, use: Uses) -> Iterator[Collective]:
    strategy, shape = step.strategy, step.mesh.shape
    n, data, m = shape["fsdp"], shape["data"], strategy.microbatches
    layers = leaf.shape[0] if leaf.shape else 1
    stored, logical = math.prod(leaf.stored), math.prod(leaf.shape)
    sharded = n > 1 and leaf.dim is not None
    compute, reduce = step.policy.computed(leaf.dtype), step.policy.reduced(leaf.dtype)
    at_use = m == 1 and use.forward == (True,)
    rows = tuple(step.local.axes)

    def entry(kind: str, axes: tuple[str, ...], dtype: Any, count: int, elements: int) -> Collective:
        return Collective(kind, axes, jnp.dtype(dtype).name, count, elements * jnp.dtype(dtype).itemsize)

    def executions(uses: tuple[bool, ...]) -> int:
        return sum(layers if sliced else 1 for sliced in uses)

    if strategy.server:
        return
    if sharded and strategy.zero == 3:
        fetched = use.forward + use.backward
        yield entry("all-gather", ("fsdp",), compute, m * executions(fetched), m * len(fetched) * stored)
    if leaf.trainable and use.gradient:
        if not sharded:
            if rows:
                yield entry("all-reduce", rows, reduce, executions(use.gradient) if at_use else 1, logical)
        else:
            every = strategy.zero > 1 or at_use
            count = m * sum(_scatters(leaf, sliced, n, compute, reduce) for sliced in use.gradient) if every else 1
            yield entry("reduce-scatter", ("fsdp",), reduce, count, (m * len(use.gradient) if every else 1) * stored)
            if data > 1:
                yield entry("all-reduce", ("data",), reduce, executions(use.gradient) if at_use else 1, stored // n)
    if sharded and leaf.trainable and strategy.zero < 3:
        dtype = compute if step.layout.copied else Policy.master(leaf.dtype)
        yield entry("all-gather", ("fsdp",), dtype, 1 if leaf.dim == 0 else layers, stored)


def _scatters(leaf: Leaf, sliced: bool, n: int, dtype: Any, wider: Any) -> int:
    """The number of reduce-scatters of one gradient: one a layer, and several pieces of a very large one."""
    shape, dim = (leaf.stored[1:], (leaf.dim or 0) - 1) if sliced else (leaf.stored, leaf.dim or 0)
    return (leaf.shape[0] if sliced else 1) * scatter_pieces(shape, dtype, dim, n, wider)


# An `Access` that moves nothing: its operations only stand in the jaxpr, where they are counted.
_MARK = jec.Primitive("jaxpar_mark")
_MARK.def_abstract_eval(lambda x, **_: x)


class _Marker:
    def __init__(self) -> None:
        self.phase = "forward"

    def fetch(self, index: int, value: jax.Array, sliced: bool) -> jax.Array:
        return _MARK.bind(value, what=self.phase, index=index, sliced=sliced)

    def give(self, index: int, cotangent: jax.Array, sliced: bool) -> jax.Array:
        return _MARK.bind(cotangent, what="gradient", index=index, sliced=sliced)


def _marks(jaxpr: Any, times: int = 1) -> Iterator[tuple[str, int, bool, int]]:
    """Every mark in a program: what, leaf, sliced, and how often it runs."""
    for eqn in opened(jaxpr)[0].eqns:
        if eqn.primitive is _MARK:
            yield eqn.params["what"], eqn.params["index"], eqn.params["sliced"], times
        for inner in jec.jaxprs_in_params(eqn.params):
            yield from _marks(inner, times * eqn.params["length"] if eqn.primitive.name == "scan" else times)


def _abstract(step: Step, batch: Any) -> tuple[Any, Any, Any]:
    """Abstract variables, rows of one microbatch of one replica, and key."""
    blocks = step.local.replicas * step.strategy.microbatches

    def leaf(x: Any) -> Any:
        if isinstance(x, Replicated):
            return jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype), x)
        return jax.ShapeDtypeStruct((x.shape[0] // blocks, *x.shape[1:]), x.dtype)

    state = step.abstract_state()
    rows = jax.tree.map(leaf, jax.eval_shape(lambda x: x, batch), is_leaf=lambda x: isinstance(x, Replicated))
    plain = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (state.variables, state.key))
    return plain[0], rows, plain[1]


def _uses(step: Step, batch: Any) -> tuple[list[Uses], Ledger, int, bool]:
    """How the sliced loss uses each leaf, and the model's own collectives, in one microbatch.

    Also the number of metrics, and whether the loss counts rows or tokens, so that a count is summed before the
    backward.
    """
    variables, rows, key = _abstract(step, batch)
    program, out = step.local.program(variables, rows, key)
    loss = jax.tree.unflatten(jax.tree.structure(out), list(range(len(jax.tree.leaves(out)))))[0]["loss"]
    marker = _Marker()

    def run(leaves: list[Any], values: list[Any]) -> Any:
        marker.phase = "forward"
        outs, tape = program.forward(marker, leaves, values, grad=True)
        marker.phase = "backward"
        return outs, program.backward(marker, leaves, tape, {loss.total: jnp.float32(1)}, [None] * len(leaves))

    leaves = [jax.ShapeDtypeStruct(leaf.shape, step.policy.computed(leaf.dtype)) for leaf in step.layout.leaves]
    jaxpr = jax.make_jaxpr(run, axis_env=list(step.local.axes.items()))(leaves, jax.tree.leaves((variables, rows, key)))
    found: list[dict[str, tuple[bool, ...]]] = [{} for _ in leaves]
    for what, index, sliced, times in _marks(jaxpr):
        uses = times // step.layout.leaves[index].shape[0] if sliced else times
        found[index][what] = found[index].get(what, ()) + (sliced,) * uses
    uses_of = [Uses(f.get("forward", ()), f.get("backward", ()), f.get("gradient", ())) for f in found]
    return uses_of, Ledger.from_jaxpr(jaxpr, step.mesh), len(out[0]), program.depends(program.inputs, loss.count)
