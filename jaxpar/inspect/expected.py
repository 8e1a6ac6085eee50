"""The collectives that a strategy should cost: what its rule promises, summed over leaves and their uses.

Each rule says beside its functions what it sends for one leaf (`parallel/`: `Promise.sends`), from its paper; `uses.py`
counts how often one step fetches a leaf and gives its gradients. What all rules have in common is here: the sums of
losses, stages, and the model's own collectives.

Each tick of a pipeline with a forward sends one message of the activations to the next rank, each with a backward one
of their cotangents to the one before; ranks that share the epilogue reduce-scatter the last rank's activations and
all-gather the cotangents, m times. Leaves outside the stages are reduced, and with ZeRO sharded, over `pipe` too; a
stage's own leaf that is used outside the stack as well is all-gathered for that. Of ranks that run programs of their
own, parts of a cut program, it is the one's that sends most.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp

from ..layout.leaves import Leaf
from ..parallel.data import Sent, rule_of
from ..parallel.data.eight_bits import of_leaf
from ..parallel.pipeline.flat.stages import used as used_by
from ..step.tracing import Traced
from .ledger import Collective, Ledger
from .step_view import StepView as Step
from .uses import Counted, Runs, count, uses


def expected(step: Step, batch: Any) -> Ledger:
    """The ledger that the strategy's closed form gives for one training step on a batch of these shapes.

    It stands for the jaxpr: `Ledger.from_jaxpr(step.trace(batch), step.mesh)` equals it in kinds, axes, dtypes,
    counts and bytes. The model's own collectives (BatchNorm, `jp.all_rows`) are included as the model writes them.
    Compiled programs have the same bytes, and besides them scalar all-reduces of the optimizer's norms.
    """
    traced, rule = step.traced(batch), rule_of(step.strategy)
    sizes, every = step.mesh.shape, count(step, traced)
    counted = every[0]
    found = max((_of_uses(step, traced, each) for each in every), key=lambda sent: sum(one.bytes for one in sent))
    if step.layout.storage.cut:
        found += _exchanged(step, traced)
    if step.update.owners is not None:
        found += [_entry(one, sizes) for one in step.update.owners.sends]
    rows = tuple(traced.summed)
    axes = ("pipe", *rows) if traced.schedule else rows
    if axes and rule.promise.sums:
        found.append(
            _entry(Sent("all-reduce", axes, jnp.float32, 1, 2 * (counted.metrics + len(step.local.ids))), sizes)
        )
        if counted.counts and rows:
            found.append(_entry(Sent("all-reduce", rows, jnp.float32, 1, 1), sizes))
    return Ledger(found)


def _of_uses(step: Step, traced: Traced, counted: Counted) -> list[Collective]:
    """What uses of the leaves send, and the model itself."""
    rule, found = rule_of(step.strategy), list(counted.own)
    units, sizes = step.layout.storage.units, step.mesh.shape
    for leaf, runs, used in zip(units, counted.runs, uses(step, traced, counted), strict=True):
        found += _between_stages(step, leaf, runs)
        sent = of_leaf(rule, leaf, traced.notes.in_fp8).promise.sends(used)
        found += [_entry(one, sizes) for one in sent if one.axes and one.count]
    return found


def _exchanged(step: Step, traced: Traced) -> Iterator[Collective]:
    """What the stages of a cut program send once a step: an all-to-all of weights, and one of gradients back, as large
    as p times what the largest stage has of one rank.
    """
    layout, schedule = step.layout, traced.schedule
    assert schedule is not None
    ranks, rule = schedule.ranks, rule_of(step.strategy)
    for sharded, dtype, only in (
        ("params" in rule.sharded, step.policy.computed, False),
        (rule.at_once, step.policy.reduced, True),
    ):
        most: dict[str, int] = {}
        for some in used_by(traced.program, schedule):
            sent: dict[str, int] = {}
            for leaf in (layout.leaves[i].local for i in some if layout.leaves[i].dim is not None):
                if leaf.trainable or not only:
                    shards = math.prod(step.mesh.shape[axis] for axis in leaf.shard) if sharded else 1
                    name = jnp.dtype(dtype(leaf.dtype)).name
                    sent[name] = sent.get(name, 0) + math.prod(leaf.stored) // (ranks * shards)
            most |= {name: max(n, most.get(name, 0)) for name, n in sent.items()}
        for name, elements in most.items():
            yield _entry(Sent("all-to-all", ("pipe",), name, 1, ranks * elements), step.mesh.shape)


def _entry(one: Sent, sizes: Mapping[str, int]) -> Collective:
    ranks = math.prod(sizes[axis] for axis in one.axes)
    return Collective(one.kind, one.axes, jnp.dtype(one.dtype).name, one.count, one.bytes, ranks=ranks)


def _between_stages(step: Step, leaf: Leaf, runs: Runs) -> Iterator[Collective]:
    """What a use outside the stack sends of a leaf whose layers are spread over `pipe`: all of them."""
    if leaf.layers is None:
        return
    (fetched, _), (given, _) = runs.fetched, runs.given
    compute, reduce = step.policy.computed(leaf.dtype), step.policy.reduced(leaf.dtype)
    elements = math.prod(leaf.local.shape)
    if fetched:
        yield _entry(Sent("all-gather", ("pipe",), compute, fetched, fetched * elements), step.mesh.shape)
    if given and leaf.trainable:
        yield _entry(Sent("reduce-scatter", ("pipe",), reduce, given, given * elements), step.mesh.shape)
