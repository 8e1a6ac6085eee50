"""The closed form of a step's collectives: what the strategy's rule promises, summed over the leaves and their uses.

Each rule states, next to its functions, the collectives that it sends for one leaf (`Promise.sends`), after its paper.
`uses.py` counts how often one step fetches a leaf and returns its gradients. This file adds what all rules have in
common: the sums of losses and metrics, the messages between stages, and the model's own collectives.

- In every tick with a forward, a pipeline sends one message with the activations to the next rank. In every tick with
  a backward, it sends one with their cotangents to the previous rank.
- Ranks that share the epilogue reduce-scatter the last rank's activations and all-gather the cotangents, once for each
  microbatch.
- Leaves outside the stages are reduced over `pipe` too, and ZeRO shards them over it. A stage's leaf that is also
  used outside the stack is all-gathered for that use.
- Where the ranks run different programs (stages that are parts of a cut program), the rank that sends most counts.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp

from ..layout.leaves import Leaf
from ..parallel.data import Sent, Uses, rule_of
from ..parallel.data.eight_bits import of_leaf
from ..parallel.pipeline.flat.stages import used as leaves_of_stages
from ..step.tracing import Traced
from .ledger import Collective, Ledger
from .step_view import StepView as Step
from .uses import StepUses, UseCounts, count, leaf_uses


def expected(step: Step, batch: Any) -> Ledger:
    """Return the ledger that the strategy's closed form gives for one training step.

    `Ledger.from_jaxpr(step.trace(batch), step.mesh)` equals it in kinds, axes, dtypes, counts and bytes. The ledger
    includes the model's own collectives (BatchNorm, `jp.all_rows`) as the model writes them. A compiled program has
    the same bytes, plus scalar all-reduces for the optimizer's norms.

    Args:
      batch: arrays or `jax.ShapeDtypeStruct`; only their shapes matter.
    """
    step = step.settled(batch)
    traced, rule = step.traced(batch), rule_of(step.strategy)
    sizes, uses_by_rank = step.mesh.shape, count(step, traced)
    first_rank_uses = uses_by_rank[0]
    # Ranks may run different programs; the rank that sends most gives the ledger.
    sent = max(
        (_sent_for_leaves(step, traced, step_uses) for step_uses in uses_by_rank),
        key=lambda rank_sent: sum(collective.bytes for collective in rank_sent),
    )
    # Exchanges once a step: between the stages of a cut program, and between the owners of matrices.
    if step.layout.storage.cut:
        sent += _stage_exchanges(step, traced)
    if step.update.owners is not None:
        sent += [_collective(collective, sizes) for collective in step.update.owners.sends]
    row_axes = tuple(traced.summed)
    sum_axes = ("pipe", *row_axes) if traced.schedule else row_axes
    # The loss and every metric are sent as a sum and a count; the share of ids outside each limit (`local.ids`) is a
    # metric too. The backward divides by the loss's count, so that this count is also sent ahead of it.
    if sum_axes and rule.promise.sums:
        elements = 2 * (first_rank_uses.num_metrics + len(step.local.ids))
        sent.append(_collective(Sent("all-reduce", sum_axes, jnp.float32, 1, elements), sizes))
        if first_rank_uses.has_count and row_axes:
            sent.append(_collective(Sent("all-reduce", row_axes, jnp.float32, 1, 1), sizes))
    return Ledger(sent)


def _sent_for_leaves(step: Step, traced: Traced, step_uses: StepUses) -> list[Collective]:
    """Return the collectives that the uses of leaves cost, and the model's own."""
    sent = list(step_uses.model_collectives)
    units = step.layout.storage.units
    for leaf, use_counts, uses_of_leaf in zip(
        units, step_uses.use_counts, leaf_uses(step, traced, step_uses), strict=True
    ):
        sent += [*_sent_between_stages(step, leaf, use_counts), *sent_for_leaf(step, traced, leaf, uses_of_leaf)]
    return sent


def sent_for_leaf(step: Step, traced: Traced, leaf: Leaf, uses_of_leaf: Uses) -> Iterator[Collective]:
    """Yield the collectives that the rule promises for a leaf with these uses."""
    # A leaf may travel in 8 bits, and then has another promise.
    for sent in of_leaf(rule_of(step.strategy), leaf, traced.notes.in_fp8).promise.sends(uses_of_leaf):
        if sent.axes and sent.count:
            yield _collective(sent, step.mesh.shape)


def _stage_exchanges(step: Step, traced: Traced) -> Iterator[Collective]:
    """Yield what the stages of a cut program exchange once a step.

    It is an all-to-all of the weights, and one of the gradients back. An all-to-all has equal parts, so that smaller
    stages are padded: each is as large as one rank's share of the largest stage, times the number of ranks.
    """
    layout, schedule = step.layout, traced.schedule
    assert schedule is not None
    ranks, rule = schedule.ranks, rule_of(step.strategy)
    # Once for the weights, and once for the gradients.
    for is_sharded, dtype_of, trainable_only in (
        ("params" in rule.sharded, step.policy.computed, False),
        (rule.at_once, step.policy.reduced, True),
    ):
        largest_stage: dict[str, int] = {}  # dtype -> elements
        for stage_leaves in leaves_of_stages(traced.program, schedule):
            stage_elements: dict[str, int] = {}
            for leaf in (layout.leaves[i].local for i in stage_leaves if layout.leaves[i].dim is not None):
                if leaf.trainable or not trainable_only:
                    shards = math.prod(step.mesh.shape[axis] for axis in leaf.shard) if is_sharded else 1
                    name = jnp.dtype(dtype_of(leaf.dtype)).name
                    stage_elements[name] = stage_elements.get(name, 0) + math.prod(leaf.stored) // (ranks * shards)
            largest_stage |= {
                name: max(num_elements, largest_stage.get(name, 0)) for name, num_elements in stage_elements.items()
            }
        for name, elements in largest_stage.items():
            yield _collective(Sent("all-to-all", ("pipe",), name, 1, ranks * elements), step.mesh.shape)


def _collective(sent: Sent, sizes: Mapping[str, int]) -> Collective:
    """Return the ledger's entry for collectives that a rule promises; `sizes` has the size of each mesh axis."""
    num_ranks = math.prod(sizes[axis] for axis in sent.axes)
    return Collective(sent.kind, sent.axes, jnp.dtype(sent.dtype).name, sent.count, sent.bytes, ranks=num_ranks)


def _sent_between_stages(step: Step, leaf: Leaf, use_counts: UseCounts) -> Iterator[Collective]:
    """Yield what uses outside the stack send of a leaf whose layers are spread over `pipe`: all of its layers."""
    if leaf.layers is None:
        return
    (num_fetches, _), (num_gradients, _) = use_counts.fetches, use_counts.gradients
    elements = math.prod(leaf.local.shape)
    over_pipe = lambda kind, dtype, count: _collective(
        Sent(kind, ("pipe",), dtype, count, count * elements), step.mesh.shape
    )
    if num_fetches:
        yield over_pipe("all-gather", step.policy.computed(leaf.dtype), num_fetches)
    if num_gradients and leaf.trainable:
        yield over_pipe("reduce-scatter", step.policy.reduced(leaf.dtype), num_gradients)
