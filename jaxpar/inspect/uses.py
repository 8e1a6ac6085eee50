"""How one step uses each leaf, counted in the step's sliced loss. The rules' closed forms are functions of these uses.

One use of a stacked leaf [L, ...] is L fetches of one layer.

A pipeline of p ranks and v chunks (`parallel/pipeline/schedules.py`) runs L / (p v) layers in a tick with a forward,
and again in a tick with a backward. Idle ranks run them too. The prologue runs before the first tick and the epilogue
in a tick, once for each microbatch. A leaf that no stage owns is fetched once, and its gradient is reduced once.

The count is made in two steps. `_MarkingAccess` puts a marker equation into the jaxpr at every fetch and every
gradient, and `_count_parts` adds up these markers, each times the trips of the loops around it.
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
from ..step.gradients import run_microbatches
from ..step.pipeline import Piped
from ..step.tracing import Loss, Traced
from ..strategy.axes import summed_over
from .ledger import Collective, Ledger
from .step_view import StepView as Step


@dataclass(frozen=True)
class UseCounts:
    """How often one step fetches a leaf and returns its gradient, each as (of the whole leaf, layer by layer)."""

    fetches: tuple[int, int] = (0, 0)
    gradients: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class StepUses:
    """The uses of all parameters in one step of one rank's program.

    Attributes:
      use_counts: one for each unit of the layout (`Storage.units`).
      model_collectives: the collectives that the model itself calls.
      num_metrics: the number of metrics, the loss included.
      has_count: whether the loss counts rows or tokens; then a count is summed before the backward.
      is_single_turn: whether each use runs once: one turn, no pipeline.
      unstaged: indices of a pipeline's leaves that no stage owns. Their gradients are reduced after accumulation.
      with_gradient: indices of the leaves that get a gradient on some rank. Empty where all ranks run one program.
    """

    use_counts: list[UseCounts]
    model_collectives: list[Collective]
    num_metrics: int
    has_count: bool
    is_single_turn: bool
    unstaged: frozenset[int] = frozenset()
    with_gradient: frozenset[int] = frozenset()


def count(step: Step, traced: Traced) -> list[StepUses]:
    """Count the uses of parameters in one training step.

    Returns:
      One entry; where each rank of a pipeline has its own program, one entry for each rank.
    """
    return _count_ticks(step, traced) if traced.schedule else [_count_turns(step, traced)]


def leaf_uses(step: Step, traced: Traced, step_uses: StepUses) -> Iterator[Uses]:
    """Yield the uses of each unit of the layout, as the closed forms take them."""
    program = traced.program
    layer_dims = {leaf_slice.leaf: leaf_slice.dim for stack in program.stacks for leaf_slice in stack.slices}
    for i in range(len(step_uses.use_counts)):
        is_only_use = step_uses.is_single_turn and program.is_read_once(i)
        yield _uses_of_leaf(step, step_uses, i, is_only_use, layer_dims.get(i, 0))


def _uses_of_leaf(step: Step, step_uses: StepUses, index: int, is_only_use: bool, layer_dim: int) -> Uses:
    """Return the uses of one unit.

    Args:
      index: the unit's position in `Storage.units`.
      is_only_use: whether the step uses the unit, or each layer of it, once.
      layer_dim: the dim along which the unit is cut into layers.
    """
    unit, shape, policy = step.layout.storage.units[index], step.mesh.shape, step.policy
    leaf, use_counts = unit.local, step_uses.use_counts[index]
    compute, reduce = policy.computed(leaf.dtype), policy.reduced(leaf.dtype)

    # 1. Sizes. A rank stores its stage's part of a leaf.
    num_stages = shape["pipe"] if leaf.of_a_stage else 1
    stored_elements = math.prod(leaf.stored)
    rank_elements = stored_elements // num_stages
    layer_elements = stored_elements // max(1, _num_layers(leaf, layer_dim))
    # A program that is cut into stages spreads a leaf over `pipe`; the stage that uses it gets the parts of all ranks.
    fetched_elements = stored_elements if leaf.spread else rank_elements
    num_whole, num_sliced = use_counts.fetches
    fetches = _nonzero(Times(num_whole, fetched_elements), Times(num_sliced, layer_elements))

    # 2. Gradients, of the whole leaf and of its layers.
    gradients: tuple[Times, ...] = ()
    if leaf.trainable:
        num_shards = math.prod(shape[axis] for axis in leaf.shard if axis != "data")
        num_whole, num_sliced = use_counts.gradients
        # The gradient of an unstaged leaf is reduced once it is accumulated, and so in the dtype of reduction.
        whole_dtype = reduce if index in step_uses.unstaged else compute
        whole_pieces = _num_reduce_scatters(leaf, None, num_shards, whole_dtype, reduce) if num_whole else 1
        layer_pieces = _num_reduce_scatters(leaf, layer_dim, num_shards, compute, reduce) if num_sliced else 1
        gradients = (
            Times(num_whole, fetched_elements, whole_pieces),
            Times(num_sliced, layer_elements, layer_pieces),
        )
    # A rank that does not use the leaf still takes part in the sum over ranks.
    nonzero_gradients = _nonzero(*gradients) or (gradients[:1] if index in step_uses.with_gradient else ())

    shard_axes = leaf.shard if leaf.dim is not None else ()
    return Uses(
        elements=rank_elements,
        fetched=fetches,
        given=nonzero_gradients,
        updated=_publications(step, index, num_stages),
        last=is_only_use,
        shard=tuple(axis for axis in shard_axes if shape[axis] > 1 and axis != "data"),
        rest=tuple(axis for axis in summed_over(unit.split) if shape[axis] > 1 and axis not in shard_axes),
        sizes=dict(shape),
        compute=compute,
        reduce=reduce,
        stored=compute if step.layout.copied else policy.stored(leaf.dtype, leaf.trainable),
        second=("data",) if "data" in shard_axes and shape["data"] > 1 else (),
    )


def _publications(step: Step, index: int, num_stages: int) -> tuple[Times, ...]:
    """Return the all-gathers of one unit's parameters after the update, on a rank of one of `num_stages` stages."""
    # Units behind the leaves are layers of rolled leaves, which are gathered with their leaf.
    leaf = step.layout.storage.units[index].local
    is_sharded_leaf = leaf.dim is not None and index < len(step.layout.leaves)
    if not is_sharded_leaf or not (leaf.trainable or step.strategy.hpz):
        return ()
    num_layers = _num_layers(leaf) // num_stages if step.layout.leaves[index].by_layer else 1
    return (Times(num_layers, math.prod(leaf.stored) // num_stages // num_layers),)


def _nonzero(*entries: Times) -> tuple[Times, ...]:
    """Return the entries that run at least once."""
    return tuple(entry for entry in entries if entry.count)


# The marker is an identity that is never compiled. Its parameters `what`, `index` and `sliced` tell what it marks.
_MARKER = jec.Primitive("jaxpar_mark")
_MARKER.def_abstract_eval(lambda x, **_: x)


class _MarkingAccess(WholeAccess):
    """An `Access` that moves nothing: it records a marker equation at every fetch and every gradient, to be counted."""

    def __init__(self, step: Step, program: Program):
        super().__init__(record=_MARKER.bind)
        self.leaves, self.ranks = [leaf.local for leaf in step.layout.storage.units], step.mesh.shape["pipe"]
        if not step.layout.storage.cut:
            self.sends = RuleAccess(step.layout, step.rule, program, step.strategy).sends

    def fetch(self, index: int, value: jax.Array, sliced: bool) -> jax.Array:
        """Mark a fetch; return an array of the shape that the loss expects."""
        value = self.record(value, what="fetches", index=index, sliced=sliced)
        leaf = self.leaves[index]
        if leaf.spread and leaf.dim is not None:  # [ranks, *leaf]
            return value[0]
        has_use_shape = sliced or leaf.layers is None
        return value if has_use_shape else jnp.broadcast_to(value[:1], leaf.logical)

    def give(self, index: int, cotangent: jax.Array, sliced: bool) -> jax.Array | None:
        """Mark a gradient; return an array of the shape that is accumulated."""
        leaf = self.leaves[index]
        if not leaf.trainable:
            return None
        cotangent = self.record(cotangent, what="gradients", index=index, sliced=sliced)
        # Accumulators have the shape that the leaf is stored in.
        if leaf.spread and leaf.dim is not None:
            return jnp.stack([cotangent] * self.ranks)
        return cotangent if sliced or leaf.layers is None else cotangent[: _num_layers(leaf)]


def _markers(jaxpr: Any) -> Iterator[tuple[str, int, bool, int]]:
    """Yield every marker of a program as (kind, leaf's index, whether it is sliced, number of runs)."""
    for eqn, num_runs in visit(opened(jaxpr)[0].eqns):
        if eqn.primitive is _MARKER:
            yield eqn.params["what"], eqn.params["index"], eqn.params["sliced"], num_runs


def _count_turns(step: Step, traced: Traced) -> StepUses:
    """Count a step without a pipeline: one turn after another, each of one microbatch or of concurrent ones."""
    return uses_of_turns(step, traced, program_of_turns(step, traced))


def uses_of_turns(step: Step, traced: Traced, program: Any) -> StepUses:
    """Return the uses in the program of all turns."""
    use_counts, model_collectives = _count_parts(step, [(1, program)])
    return StepUses(use_counts, model_collectives, len(traced.outputs[0]), traced.counts, step.strategy.turns == 1)


def program_of_turns(step: Step, traced: Traced) -> Any:
    """Return the program of all forwards and backwards of a step without a pipeline, which moves no parameters."""
    num_turns = step.strategy.turns

    def gradients_of_turns(leaves: list[Any], variables: Any, rows: Any, key: Any) -> Any:
        # Only shapes matter: every turn gets the same rows and key.
        blocks = jax.tree.map(lambda x: jnp.stack([x] * num_turns), (rows, key))
        return run_microbatches(
            Loss(traced, _MarkingAccess(step, traced.program), leaves), variables, blocks, jnp.float32(1)
        )

    # Turns are a loop in the jaxpr; its trip count is part of `_markers`.
    flat, _ = trace(gradients_of_turns, traced.leaves, *traced.inputs, axes=traced.traced_axes)
    return _without_dead_code(flat, range(len(flat.outvars)))


def _count_ticks(step: Step, traced: Traced) -> list[StepUses]:
    """Count a step with a pipeline from its ticks: forwards, backwards, and what an epilogue adds to a forward.

    Every part is traced once and counted as often as the schedule runs it.
    """
    assert traced.schedule is not None
    parts, part_ranks, unstaged_uses = _trace_parts(step, traced)

    def count_program(parts: list[tuple[int, Any]], with_gradient: frozenset[int] = frozenset()) -> StepUses:
        """Add up the uses in the parts of one rank, or of all ranks if they share one program.

        `unstaged_uses` replaces the counts of unstaged leaves.
        """
        use_counts, model_collectives = _count_parts(step, parts)
        use_counts = [unstaged_uses.get(leaf_index, use_count) for leaf_index, use_count in enumerate(use_counts)]
        return StepUses(
            use_counts,
            model_collectives,
            len(traced.outputs[0]),
            traced.counts,
            False,
            frozenset(unstaged_uses),
            with_gradient,
        )

    all_parts = count_program(parts)
    if not part_ranks:
        return [all_parts]
    # A leaf with a gradient on some rank is summed over ranks, also on a rank that does not use it.
    with_gradient = frozenset(i for i, use_counts in enumerate(all_parts.use_counts) if use_counts.gradients[0])
    parts_of_rank = lambda rank: [
        part for part, part_rank in zip(parts, part_ranks, strict=True) if part_rank in (None, rank)
    ]
    return [count_program(parts_of_rank(rank), with_gradient) for rank in range(traced.schedule.ranks)]


def _trace_parts(step: Step, traced: Traced) -> tuple[list[tuple[int, Any]], list[int | None], dict[int, UseCounts]]:
    """Trace every part of a pipeline once: each kind of tick, that is a forward, a backward, a forward with epilogue.

    Returns:
      The number of runs and the program of each part; the rank that runs each part, None for all, or no list where
      ranks share one program; and the uses of the leaves that no stage owns.
    """
    assert traced.schedule is not None
    num_microbatches = traced.schedule.microbatches
    axes = {str(axis): axis_size for axis, axis_size in step.mesh.shape.items() if axis_size > 1}
    # These three are filled while `run_parts` is traced.
    part_runs: list[int] = []
    part_ranks: list[int | None] = []
    unstaged_uses: dict[int, UseCounts] = {}

    def run_parts(leaves: list[Any], variables: Any, rows: Any, key: Any) -> Any:
        """Run each part of the pipeline once."""
        # Only shapes matter: every microbatch gets the same rows and key.
        repeated_keys, repeated_rows = jax.tree.map(lambda x: jnp.stack([x] * num_microbatches), (key, rows))
        loss = Loss(traced, _MarkingAccess(step, traced.program), leaves)
        pipeline = Piped(step.tracing, loss, variables, repeated_rows, repeated_keys).pipeline(jnp.float32(1))
        if isinstance(pipeline, FlatPipeline):
            part_runs[:], part_ranks[:], part_outputs = zip(*pipeline.separated(), strict=True)
            return part_outputs  # every leaf belongs to a stage
        part_runs[:], part_outputs = zip(*pipeline.separated(), strict=True)
        carries = [part_outputs[0][0]] if isinstance(pipeline, Slots) else part_outputs
        with_gradient = {
            leaf_index for carry in carries for leaf_index, grad in enumerate(carry.grads) if grad is not None
        }
        # The pipeline fetches unstaged leaves before its first tick and reduces their gradients after its last one.
        for leaf_index in pipeline.access.which:
            unstaged_uses[leaf_index] = UseCounts((1, 0), (int(leaf_index in with_gradient), 0))
        return part_outputs

    flat, part_outputs = trace(run_parts, traced.leaves, traced.variables, traced.rows, traced.key, axes=axes)
    output_positions = jax.tree.unflatten(jax.tree.structure(part_outputs), list(range(len(flat.outvars))))
    # Cut the traced program into one for each part, which computes this part's outputs alone.
    parts = [
        (num_runs, _without_dead_code(flat, jax.tree.leaves(tick)))
        for num_runs, tick in zip(part_runs, output_positions, strict=True)
    ]
    return parts, part_ranks, unstaged_uses


def _without_dead_code(flat: Flat, output_positions: Sequence[int]) -> Any:
    """Return a program that computes only the outputs at these positions, without dead code."""
    outvars = [flat.outvars[i] for i in output_positions]
    return build(live(flat.eqns, outvars), [*flat.constvars, *flat.invars], outvars)


def _count_parts(step: Step, parts: list[tuple[int, Any]]) -> tuple[list[UseCounts], list[Collective]]:
    """Add up the uses of each leaf and the model's own collectives over programs.

    Args:
      parts: (number of runs, program) of each.

    Returns:
      The use counts of each unit, and the collectives, each with the counts and bytes of all its runs.
    """
    counts = [{"fetches": [0, 0], "gradients": [0, 0]} for _ in step.layout.storage.units]
    model_collectives = []
    for part_runs, jaxpr in parts:
        for kind, index, sliced, num_runs in _markers(jaxpr):
            # `sliced` is the position in a count: 0 for whole leaves, 1 for single layers.
            counts[index][kind][sliced] += part_runs * num_runs
        for collective in Ledger.from_jaxpr(jaxpr, step.mesh):
            assert collective.count is not None
            model_collectives.append(
                dataclasses.replace(collective, count=collective.count * part_runs, bytes=collective.bytes * part_runs)
            )
    use_counts = [
        UseCounts((fetches[0], fetches[1]), (gradients[0], gradients[1]))
        for fetches, gradients in ((unit["fetches"], unit["gradients"]) for unit in counts)
    ]
    return use_counts, [collective for collective in Ledger(model_collectives) if collective.count]


def _num_layers(leaf: Leaf, dim: int = 0) -> int:
    """Return the number of layers of a stack whose layers lie on `dim`, the padding of stages included."""
    return math.prod(leaf.shape[: leaf.stage + 1]) if dim == 0 else leaf.shape[dim]


def _num_reduce_scatters(leaf: Leaf, dim: int | None, num_shards: int, dtype: Any, reduce_dtype: Any) -> int:
    """Return the number of reduce-scatters for one gradient: several if it is very large.

    Args:
      dim: the dim of its layers, for the gradient of one layer; None for the gradient of the whole leaf.
      dtype: the dtype in which the gradient is computed.
      reduce_dtype: the dtype in which it is reduced.
    """
    if dim is None:
        return scatter_pieces(leaf.stored, dtype, leaf.inner(False), num_shards, reduce_dtype)
    shape = (*leaf.stored[:dim], *leaf.stored[dim + 1 :]) if dim else leaf.stored[leaf.stage + 1 :]
    return scatter_pieces(shape, dtype, leaf.inner(True, dim), num_shards, reduce_dtype)
