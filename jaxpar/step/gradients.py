"""The loss and its gradients on one device's rows: what runs inside `shard_map`.

Every replica differentiates its local loss with respect to local values, one microbatch after another or as a pipeline,
and leaves all reductions over replicas to its strategy's rule.
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
from .pipeline import Piped
from .tracing import Loss, Sums, Tracing

Metrics = dict[str, jax.Array]


def metrics_of(sums: Sums) -> Metrics:
    """The means that sums over all rows stand for."""
    return {name: mean.total / mean.count for name, mean in sums.items()}


def measures(grads: Any, sums: Sums) -> dict[str, jax.Array]:
    """The loss, as "loss" [1], and by "gradient" and its path of each leaf's gradient [2] the norm, and the sum along a
    fixed direction: with other values, a norm may still be the same.
    """

    def two(g: jax.Array) -> jax.Array:
        # Of one number for each element, so that nothing is moved or made for a leaf that is sharded.
        angle = sum(lax.broadcasted_iota(jnp.float32, g.shape, d) * math.sqrt(d + 2) for d in range(g.ndim))
        along = (jnp.real(g) + jnp.imag(g)) * jnp.cos(0.5 + angle)
        return jnp.stack([jnp.sqrt(jnp.square(jnp.abs(g)).sum()), along.sum()])

    leaves = jax.tree_util.tree_leaves_with_path(grads)
    return {"loss": metrics_of(sums)["loss"][None], **{f"gradient {name_of(path)}": two(g) for path, g in leaves}}


def block_key(key: jax.Array, step: jax.Array | int, block: jax.Array | int) -> jax.Array:
    """The key of one block of rows in one step: the same however the blocks are spread over devices."""
    return jax.random.fold_in(jax.random.fold_in(key, step), block)


def added(tree: Any) -> Any:
    """Sums over the first dim: of microbatches, or of replicas."""
    return jax.tree.map(lambda x: x.sum(0), tree)


def first(tree: Any) -> Any:
    """What stands first on the first dim."""
    return jax.tree.map(lambda x: x[0], tree)


def accumulate(loss: Loss, variables: Any, blocks: Any, seed: jax.Array) -> tuple[list[Any], Any, Sums]:
    """Gradients as accumulated, new variables, and sums, of one turn [turns, ...] after another: rows and keys."""

    def micro(carry: Any, block: Any) -> tuple[Any, Sums]:
        (variables, grads, flights), (rows, key) = carry, block
        flights = dict(flights)
        sums, variables, tape = loss.forward(variables, rows, key, flights=flights)
        return (variables, loss.backward(tape, seed, grads, flights), flights), sums

    flights = loss.traced.program.in_flight(loss.access, loss.stored)
    carry, one = (variables, [None] * len(loss.stored), flights), first(blocks)
    if jax.tree.leaves(blocks)[0].shape[0] == 1:
        (variables, grads, flights), sums = micro(carry, one)
    else:
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(micro, carry, one)[0][1])
        (variables, grads, flights), sums = lax.scan(micro, (variables, zeros, flights), blocks)
        sums = added(sums)
    return loss.traced.program.landed(loss.access, flights, grads), variables, sums


@dataclass(frozen=True)
class Local:
    """The loss of one device's rows under one strategy, as a function of local values.

    `ids` has the number of ids that a leaf of the batch may hold, by its path: the share beyond joins the metrics.
    """

    tracing: Tracing
    ids: Mapping[str, int] = field(default_factory=dict)

    def bound(self, stored: Sequence[Any], variables: Any, batch: Any, key: jax.Array | None) -> tuple[Loss, Any]:
        """The loss on what this device stores, and its rows as microbatches [m, r, ...]."""
        layout, strategy = self.tracing.layout, self.tracing.strategy
        rows = microbatches(batch, strategy.microbatches)
        traced, rule = self.tracing(variables, first(rows), key), rule_of(strategy)
        cut = layout.storage.cut
        low = traced.notes.in_fp8
        access = SpreadAccess(layout, rule, low) if cut else RuleAccess(layout, rule, traced.program, strategy, low)
        stored = secondary(layout, stored) if strategy.hpz else stored
        return Loss(traced, access, layout.storage.unit_values(stored)), rows

    def keys(self, key: jax.Array, step: jax.Array, alike: bool = False) -> jax.Array:
        """The keys of this device's microbatches [m]; where blocks are to be `alike`, all have that of block 0."""
        m = self.tracing.strategy.microbatches
        before = 0 if alike else collectives.index(tuple(self.tracing.axes)) * m
        numbers = jnp.zeros(m, jnp.int32) if alike else jnp.arange(m)
        return jax.vmap(lambda number: block_key(key, step, before + number))(numbers)

    def deal(self, batch: Any, order: jax.Array) -> Any:
        """This device's rows where those of the batch are dealt in another `order` [rows]: an all-gather a leaf."""
        axes = tuple(self.tracing.axes)
        each = order.shape[0] // math.prod(self.tracing.axes.values())
        mine = lax.dynamic_slice_in_dim(order, collectives.index(axes) * each, each)
        return dealt(batch, mine, lambda x: collectives.all_gather(x, axes))

    def evaluate(self, stored: Sequence[Any], variables: Any, batch: Any) -> Sums:
        """The sums of each metric over all rows, without dropout and without updates."""
        loss, rows = self.bound(stored, variables, batch, None)
        if self.tracing.schedule is not None:
            return self._piped(Piped(self.tracing, loss, variables, rows, None), None)[2]
        blocks = self._blocks(rows, None)
        sums = lax.map(lambda block: loss.forward(variables, *block, grad=False)[0], blocks)
        return self.total(added(sums), rows)

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
        """Gradients times `scale`, new variables, and each metric's sums over all rows; `alike` as for `keys`."""
        loss, rows = self.bound(stored, variables, batch, key)
        keys = self.keys(key, step, alike)
        blocks = self._blocks(rows, keys)
        seed = scale / self._count(loss, variables, blocks)
        if self.tracing.schedule is not None:
            grads, variables, sums = self._piped(Piped(self.tracing, loss, variables, rows, keys), seed)
        else:
            grads, variables, sums = accumulate(loss, variables, blocks, seed)
            sums = self.total(sums, rows)
        return self.finished(loss, grads), variables, sums

    def finished(self, loss: Loss, grads: Sequence[jax.Array | None]) -> list[jax.Array | None]:
        """Gradients as the update gets them: zeros if the loss does not depend on a leaf, None if it is frozen."""
        layout, access = self.tracing.layout, loss.access
        members = {i: at for family in layout.storage.families for i, at in family}

        def finish(i: int, shape: tuple[int, ...]) -> jax.Array:
            grad, dtype = grads[i], layout.policy.reduced(access.leaves[i].dtype)
            return jnp.zeros(shape, dtype) if grad is None else access.finish(i, grad).reshape(shape)

        finished: list[jax.Array | None] = [None] * len(layout.leaves)
        for i, leaf in enumerate(layout.leaves):
            if leaf.trainable:
                spec, stored = layout.spec(leaf, "grads"), layout.stored(leaf, "grads")
                shape = layout.sharding(spec).shard_shape(stored)
                parts = [finish(i, shape)] if grads[i] is not None else []
                if any(grads[j] is not None for j in members.get(i, ())):  # layers that no scan reads
                    parts.append(jnp.stack([finish(j, shape[1:]) for j in members[i]]))
                finished[i] = sum(parts[1:], parts[0]) if parts else finish(i, shape)
        return finished

    def _piped(self, piped: Piped, seed: jax.Array | None) -> tuple[list[Any], Any, Sums]:
        """Accumulated gradients, new variables, and the sums of each metric over all rows."""
        grads, sums, variables = piped.run(seed)
        sums = jax.tree.unflatten(jax.tree.structure(piped.loss.traced.outputs[0]), sums)
        return grads, variables, self.total(sums, piped.rows)

    def _blocks(self, rows: Any, keys: jax.Array | None) -> tuple[Any, Any]:
        """Rows and keys of one turn after another: of a microbatch, or of each of those that are concurrent."""
        groups = self.tracing.strategy.concurrent
        apart = lambda x: tuple(x[i::groups] for i in range(groups)) if groups > 1 else x
        return jax.tree.map(apart, (rows, keys))

    def _count(self, loss: Loss, variables: Any, blocks: Any) -> jax.Array:
        """The loss's count over all rows, known before any backward runs."""
        axes, count = self.tracing.summed, loss.traced.program.only(loss.traced.count)
        if not loss.traced.counts:
            turns = jax.tree.leaves(blocks)[0].shape[0]
            return count(jax.tree.leaves((variables, first(blocks)))) * (math.prod(axes.values()) * turns)
        counts = lax.map(lambda block: count(jax.tree.leaves((variables, block))), blocks)
        return collectives.all_reduce(counts.sum(), tuple(axes))

    def total(self, sums: Sums, rows: Any) -> Sums:
        """The sums over all replicas, in one all-reduce; with a server, this replica's, which it will add."""
        sums = sums | shares_outside(rows, self.ids)  # pipe ranks add the same rows to total and count
        if self.tracing.strategy.server:
            return sums
        leaves, tree = jax.tree.flatten(sums)
        axes = ("pipe",) * (self.tracing.schedule is not None) + tuple(self.tracing.summed)
        return jax.tree.unflatten(tree, list(collectives.all_reduce(jnp.stack(leaves), axes)))
