"""The loss and its gradients on one device's rows: the part of a step that runs inside `shard_map`.

With R replicas and m microbatches per replica, the loss of the batch is total/count, where both are sums over all
R m blocks of rows. Its gradient is a sum over blocks too:

    grad = sum_blocks  d total_block / d params  *  seed,      seed = scale / sum_blocks count_block

where `scale` is 1, but for the loss scale of float16.

`Local.gradients` computes it in this order:

    count     the sum of all counts, before any backward runs (`_count`)
    backward  every block with the cotangent `seed`, one microbatch after another (`run_microbatches`) or as a pipeline;
              the strategy's rule (`parallel/data/`) fetches parameters and reduces gradients within it
    finish    the reductions that the rule left until the end (`finish_grads`)

So no mean of means is ever taken, and the result does not depend on how the rows are spread over devices.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .. import collectives
from ..model.batches import dealt, microbatches
from ..model.contents import shares_outside
from ..model.paths import name_of
from ..parallel.data import rule_of
from ..parallel.data.access import RuleAccess, SpreadAccess
from ..parallel.data.fsdp import secondary
from .blocks import block_key
from .pipeline import Piped
from .tracing import Loss, Sums, Tracing

Metrics = dict[str, jax.Array]


def metrics_of(sums: Sums) -> Metrics:
    """Return each metric, total / count, from its sums over all rows."""
    return {name: mean.total / mean.count for name, mean in sums.items()}


def gradient_figures(grads: Any, sums: Sums) -> dict[str, jax.Array]:
    """Return a few numbers by which the loss and gradients of two batches can be compared (`inspect/check/dealing.py`).

    Returns:
      "loss": the loss, [1].
      "gradient <path>", for each leaf: [2], the norm of its gradient, and its projection on a fixed direction. Two
        gradients of equal norm seldom have equal projections.
    """

    def norm_and_projection(grad: jax.Array) -> jax.Array:
        # The direction is computed from an element's position, so that a sharded leaf is neither moved nor copied.
        angle = sum(lax.broadcasted_iota(jnp.float32, grad.shape, d) * math.sqrt(d + 2) for d in range(grad.ndim))
        terms = (jnp.real(grad) + jnp.imag(grad)) * jnp.cos(0.5 + angle)
        return jnp.stack([jnp.sqrt(jnp.square(jnp.abs(grad)).sum()), terms.sum()])

    leaves = jax.tree_util.tree_leaves_with_path(grads)
    return {
        "loss": metrics_of(sums)["loss"][None],
        **{f"gradient {name_of(path)}": norm_and_projection(grad) for path, grad in leaves},
    }


def sum_leading_dim(tree: Any) -> Any:
    """Sum every array over dim 0, which numbers microbatches or replicas."""
    return jax.tree.map(lambda x: x.sum(0), tree)


def take_first(tree: Any) -> Any:
    """Return index 0 of dim 0 of every array."""
    return jax.tree.map(lambda x: x[0], tree)


def run_microbatches(loss: Loss, variables: Any, blocks: Any, seed: jax.Array) -> tuple[list[Any], Any, Sums]:
    """Run the forward and backward of one microbatch after another, and carry the gradients, to which each adds.

    Args:
      loss: the loss on this device's parameters.
      variables: the model's variables before the first microbatch.
      blocks: (rows, keys) of all turns, [turns, ...]. A turn is a microbatch, or several that run concurrently.
      seed: the cotangent of each microbatch's total.

    Returns:
      The accumulated gradients, not yet finished by the rule; the variables after the last turn; and the sums of each
      metric over this device's rows.
    """

    def micro(carry: Any, block: Any) -> tuple[Any, Sums]:
        (variables, grads, flights), (rows, key) = carry, block
        # `forward` and `backward` update this dict in place.
        flights = dict(flights)
        sums, variables, tape = loss.forward(variables, rows, key, flights=flights)
        return (variables, loss.backward(tape, seed, grads, flights), flights), sums

    flights = loss.traced.program.in_flight(loss.access, loss.stored)
    carry, first_block = (variables, [None] * len(loss.stored), flights), take_first(blocks)
    if jax.tree.leaves(blocks)[0].shape[0] == 1:
        # A single turn needs neither a loop nor zeros to add its gradients to.
        (variables, grads, flights), sums = micro(carry, first_block)
    else:
        # A leaf that the loss does not read has no gradient, and stays None in the carry.
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(micro, carry, first_block)[0][1])
        (variables, grads, flights), sums = lax.scan(micro, (variables, zeros, flights), blocks)
        sums = sum_leading_dim(sums)
    # With prefetch, the last gradients of a stack are still to be reduced.
    return loss.traced.program.with_pending_gradients(loss.access, flights, grads), variables, sums


@dataclass(frozen=True)
class Local:
    """The loss of one device's rows under one strategy, as a function of local values.

    Attributes:
      ids: for leaves of the batch that hold ids, by path, the number of ids. The share of ids that are not below it
        joins the metrics.
    """

    tracing: Tracing
    ids: Mapping[str, int] = field(default_factory=dict)

    def bound(self, stored: Sequence[Any], variables: Any, batch: Any, key: jax.Array | None) -> tuple[Loss, Any]:
        """Return the loss on the parameters that this device stores, and its rows as microbatches [m, r, ...]."""
        layout, strategy = self.tracing.layout, self.tracing.strategy
        rows = microbatches(batch, strategy.microbatches)
        traced, rule = self.tracing(variables, take_first(rows), key), rule_of(strategy)
        in_fp8 = traced.notes.in_fp8
        # The stages of a cut program run on different devices, which share each leaf in another way.
        if layout.storage.cut:
            access = SpreadAccess(layout, rule, in_fp8)
        else:
            access = RuleAccess(layout, rule, traced.program, strategy, in_fp8)
        # hpZ gathers over `data` once per step, here; every use then gathers over `fsdp` alone.
        stored = secondary(layout, stored) if strategy.hpz else stored
        return Loss(traced, access, layout.storage.unit_values(stored)), rows

    def keys(self, key: jax.Array, step: jax.Array, alike: bool = False) -> jax.Array:
        """Return the keys of this device's microbatches, [m]; if `alike`, each has the key of block 0."""
        num_microbatches = self.tracing.strategy.microbatches
        # Blocks are numbered over replicas first: replica r has the blocks r m, ..., r m + m - 1.
        first_block = 0 if alike else collectives.index(tuple(self.tracing.axes)) * num_microbatches
        offsets = jnp.zeros(num_microbatches, jnp.int32) if alike else jnp.arange(num_microbatches)
        return jax.vmap(lambda offset: block_key(key, step, first_block + offset))(offsets)

    def deal_rows(self, batch: Any, order: jax.Array) -> Any:
        """Return this device's rows if the rows of the global batch are dealt in another order.

        Communicates one all-gather per leaf.

        Args:
          batch: this device's rows in the usual order.
          order: int32 [rows], numbers of rows of the global batch; the first rows / replicas go to replica 0.
        """
        axes = tuple(self.tracing.axes)
        rows_per_replica = order.shape[0] // math.prod(self.tracing.axes.values())
        local_order = lax.dynamic_slice_in_dim(order, collectives.index(axes) * rows_per_replica, rows_per_replica)
        return dealt(batch, local_order, lambda x: collectives.all_gather(x, axes))

    def evaluate(self, stored: Sequence[Any], variables: Any, batch: Any) -> Sums:
        """Return the sums of each metric over all rows, without dropout and without updates."""
        loss, rows = self.bound(stored, variables, batch, None)
        if self.tracing.schedule is not None:
            return self._run_pipeline(Piped(self.tracing, loss, variables, rows, None), None)[2]
        blocks = self._turns(rows, None)
        sums = lax.map(lambda block: loss.forward(variables, *block, grad=False)[0], blocks)
        return self.reduce_sums(sum_leading_dim(sums), rows)

    def gradients(
        self,
        stored: Sequence[Any],
        variables: Any,
        batch: Any,
        key: jax.Array,
        step: jax.Array,
        scale: jax.Array,
        alike: bool = False,
    ) -> tuple[list[jax.Array | None], Any, Sums]:
        """Return the gradients of the scaled loss over all rows, as this device stores them.

        Args:
          stored: the stored value of each leaf on this device.
          variables: the model's variables, the same on all devices.
          batch: this device's rows [rows, ...].
          key: the key of the run.
          step: the number of the step.
          scale: the loss scale, float32.
          alike: give every block the key of block 0.

        Returns:
          The gradient of each leaf, reduced, None for a frozen leaf; the new variables; and the sums of each metric
          over all rows.
        """
        # 1. The count of all rows, which the cotangent of every microbatch needs.
        loss, rows = self.bound(stored, variables, batch, key)
        keys = self.keys(key, step, alike)
        blocks = self._turns(rows, keys)
        seed = scale / self._count(loss, variables, blocks)
        # 2. Forwards and backwards, accumulated over the microbatches.
        if self.tracing.schedule is not None:
            grads, variables, sums = self._run_pipeline(Piped(self.tracing, loss, variables, rows, keys), seed)
        else:
            grads, variables, sums = run_microbatches(loss, variables, blocks, seed)
            sums = self.reduce_sums(sums, rows)
        # 3. The reductions that happen once per step.
        return self.finish_grads(loss, grads), variables, sums

    def finish_grads(self, loss: Loss, grads: Sequence[jax.Array | None]) -> list[jax.Array | None]:
        """Finish the accumulated gradients by the rule.

        Args:
          loss: the loss that they are gradients of.
          grads: the accumulated gradient of each unit (`Storage.units`), None where the loss does not depend on it.

        Returns:
          The gradient of each stored leaf as the update receives it: zeros where the loss does not depend on the leaf,
          None if it is frozen.
        """
        layout, access = self.tracing.layout, loss.access
        layer_units = {i: layers for family in layout.storage.families for i, layers in family}

        def finish(i: int, shape: tuple[int, ...]) -> jax.Array:
            grad, dtype = grads[i], layout.policy.reduced(access.leaves[i].dtype)
            return jnp.zeros(shape, dtype) if grad is None else access.finish(i, grad).reshape(shape)

        finished: list[jax.Array | None] = [None] * len(layout.leaves)
        for i, leaf in enumerate(layout.leaves):
            if leaf.trainable:
                spec, stored = layout.spec(leaf, "grads"), layout.stored(leaf, "grads")
                shape = layout.sharding(spec).shard_shape(stored)
                # Layers of a Python loop are stored as a stack. The program reads the stack in a scan, or layers one by
                # one, or both: then the leaf has a gradient from each.
                parts = [finish(i, shape)] if grads[i] is not None else []
                if any(grads[j] is not None for j in layer_units.get(i, ())):
                    parts.append(jnp.stack([finish(j, shape[1:]) for j in layer_units[i]]))
                finished[i] = sum(parts[1:], parts[0]) if parts else finish(i, shape)
        return finished

    def _run_pipeline(self, piped: Piped, seed: jax.Array | None) -> tuple[list[Any], Any, Sums]:
        """Return accumulated gradients, new variables, and the sums of each metric over all rows."""
        grads, sums, variables = piped.run(seed)
        sums = jax.tree.unflatten(jax.tree.structure(piped.loss.traced.outputs[0]), sums)
        return grads, variables, self.reduce_sums(sums, piped.rows)

    def _turns(self, rows: Any, keys: jax.Array | None) -> tuple[Any, Any]:
        """Group microbatches into turns: (rows, keys), each [turns, ...]; with g concurrent ones, a tuple of g each."""
        groups = self.tracing.strategy.concurrent
        # Turn t runs the microbatches t g, ..., t g + g - 1.
        split = lambda x: tuple(x[i::groups] for i in range(groups)) if groups > 1 else x
        return jax.tree.map(split, (rows, keys))

    def _count(self, loss: Loss, variables: Any, blocks: Any) -> jax.Array:
        """Return the loss's count over all rows, by which the seed of every backward is divided.

        Communicates an all-reduce of one number, if the count depends on the batch.
        """
        axes, count = self.tracing.summed, loss.traced.program.only(loss.traced.count)
        if not loss.traced.counts:
            # The count is a constant: one turn gives it.
            num_turns = jax.tree.leaves(blocks)[0].shape[0]
            return count(jax.tree.leaves((variables, take_first(blocks)))) * (math.prod(axes.values()) * num_turns)
        counts = lax.map(lambda block: count(jax.tree.leaves((variables, block))), blocks)
        return collectives.all_reduce(counts.sum(), tuple(axes))

    def reduce_sums(self, sums: Sums, rows: Any) -> Sums:
        """Add up the sums of each metric over all replicas, in one all-reduce of all numbers.

        Under a server (`dp`), the sums stay those of this replica: the server adds them.
        """
        # Every rank of a pipeline counts the ids of the same rows, in total and in count, so that the share is right.
        sums = sums | shares_outside(rows, self.ids)
        if self.tracing.strategy.server:
            return sums
        leaves, tree = jax.tree.flatten(sums)
        axes = ("pipe",) * (self.tracing.schedule is not None) + tuple(self.tracing.summed)
        return jax.tree.unflatten(tree, list(collectives.all_reduce(jnp.stack(leaves), axes)))
