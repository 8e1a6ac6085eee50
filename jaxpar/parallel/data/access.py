"""How a program reads parameters and returns gradients: a strategy's rule, applied to the leaves of a layout.

    stored shard  --cast-->  compute dtype    --Rule.fetch-->  padded leaf       --unpad-->        value for the program
    cotangent     --pad-->   padded gradient  --Rule.give-->   accumulated grad  --Rule.finish-->  grad for the update

`RuleAccess` serves programs that run on all ranks of a pipeline alike. `SpreadAccess` serves the stages of a cut
program: each stage runs on its own devices.
"""

from collections import Counter
from collections.abc import Collection

import jax
import jax.numpy as jnp

from ... import collectives
from ...layout.layout import Layout
from ...layout.leaves import Staged
from ...program.buffers import on_device
from ...program.savings import saving
from ...slicing.access import Gradient
from ...slicing.program import Program
from ...strategy import Strategy
from ...strategy.axes import summed_over
from . import Rule, Use
from .eight_bits import of_leaf


class RuleAccess:
    """A rule applied to the units of a layout (`Storage.units`), with casts, padding and the layers of stages.

    The local value of a leaf that the stages of a pipeline own has this rank's layers, chunk by chunk, on dim 0.

    Args:
      layout, rule: the layout, and the strategy's rule.
      program: gives the number of uses of each unit, and the stacks that it slices.
      strategy: gives the number of microbatches, and whether to prefetch.
      in_fp8: the paths of the leaves whose products are in FP8.
    """

    def __init__(self, layout: Layout, rule: Rule, program: Program, strategy: Strategy, in_fp8: Collection[str] = ()):
        self.leaves, self.policy = [leaf.local for leaf in layout.storage.units], layout.policy
        self.split = [leaf.split for leaf in layout.storage.units]
        self.whole_at_rest = "params" not in rule.sharded
        self.rules = [of_leaf(rule, leaf, in_fp8) for leaf in self.leaves]
        self.pipe = layout.mesh.shape["pipe"]
        self.layer_dims = {s.leaf: s.dim for stack in program.stacks for s in stack.slices}
        # The gradient of a use is the whole one if a stack alone reads the leaf, each layer once, and runs once a step.
        runs_once = strategy.turns == 1 and self.pipe == 1
        self.last = [runs_once and program.is_read_once(i) for i in range(len(program.uses))]
        # Nothing is added to a gradient if one piece reads the leaf, whole or as one slice.
        slices = Counter(s.leaf for stack in program.stacks for s in stack.slices)
        self.has_one_use = [runs_once and len(uses) == 1 and slices[i] <= 1 for i, uses in enumerate(program.uses)]
        # Two pieces read the leaf whole, as those of a tied embedding do.
        self.has_two_uses = [runs_once and uses == (False, False) for uses in program.uses]
        self.sizes = layout.mesh.shape
        self.prefetch = strategy.prefetches(layout.mesh)

    def _use(self, index: int, sliced: bool) -> Use:
        """Return the `Use` that describes to the unit's rule a read of the whole leaf, or of one layer if `sliced`."""
        leaf = self.leaves[index]
        is_sharded = leaf.dim is not None and self.rules[index].sharded
        shard_axes = leaf.shard if is_sharded else ()
        # With hpZ a leaf is sharded over `data` too, but the step has gathered over that axis before any use.
        shard, hpz_axes = tuple(a for a in shard_axes if a != "data"), tuple(a for a in shard_axes if a == "data")
        if sliced:
            dim = leaf.inner(True, self.layer_dims[index])
        else:
            # The local value of a stage's leaf has all its layers on dim 0.
            dim = leaf.inner(False) if leaf.layers is None else leaf.inner(True) + 1
        summed = summed_over(self.split[index])
        replica_axes = tuple(a for a in summed if a not in shard_axes)
        # A gradient to which nothing is added is exact in the dtype in which it was computed. In float32 it would take
        # twice the memory and traffic until the update, which casts it (`finish`) as it reads it.
        is_sum = not (self.has_one_use[index] or self._adds_late(index)) or any(self.sizes[a] > 1 for a in summed)
        dtype = self.policy.reduced(leaf.dtype) if is_sum else self.policy.computed(leaf.dtype)
        return Use(dim, shard, replica_axes, self.last[index], dtype, hpz_axes)

    def _adds_late(self, index: int) -> bool:
        """Return whether the gradients of a leaf's two uses are added in `finish`, where the update reads them.

        In the compute dtype, the two take no more memory than a sum in the reduce dtype, which would be written as soon
        as the second is known, and read again.
        """
        if not self.has_two_uses[index] or any(self.sizes[a] > 1 for a in summed_over(self.split[index])):
            return False
        dtype = self.leaves[index].dtype
        return 2 * self.policy.computed(dtype).itemsize <= self.policy.reduced(dtype).itemsize

    def sends(self, index: int) -> tuple[bool, bool]:
        """Return how a loop over layers overlaps a leaf's communication with compute.

        Returns:
          Whether it gathers a layer's parameters one layer ahead, and whether it reduces their gradient a layer later.
        """
        leaf, rule = self.leaves[index], self.rules[index]
        gathers_params = leaf.dim is not None and "params" in rule.sharded
        reduces_grads = leaf.trainable and (rule.at_once or self.last[index])
        return self.prefetch and gathers_params, self.prefetch and reduces_grads

    def fetch(self, index: int, value: jax.Array, sliced: bool) -> jax.Array:
        """Return the whole leaf, or the whole layer if `sliced`, in the compute dtype."""
        leaf, use = self.leaves[index], self._use(index, sliced)
        # The cast comes before the gather, so that low precision halves the traffic.
        value = self.rules[index].fetch(on_device(value).astype(self.policy.computed(leaf.dtype)), use)
        # Leaves that are stored whole have no padding.
        value = value if self.whole_at_rest else leaf.unpad(value, use.dim)
        return self._gather_stages(leaf.form, value) if isinstance(leaf.form, Staged) and not sliced else value

    def give(self, index: int, cotangent: jax.Array, sliced: bool) -> Gradient | None:
        """Return what one use adds to the accumulated gradient of a leaf; None for a frozen leaf."""
        leaf, use = self.leaves[index], self._use(index, sliced)
        if not leaf.trainable:
            return None
        if isinstance(leaf.form, Staged) and not sliced:
            cotangent = self._scatter_stages(leaf.form, cotangent)
        gradient = self.rules[index].give(leaf.pad(cotangent, use.dim), use)
        return (gradient,) if self._adds_late(index) else gradient

    def _gather_stages(self, form: Staged, value: jax.Array) -> jax.Array:
        """All-gather the layers of all stages over `pipe`, for a use of the leaf outside its stack.

        Returns:
          [layers, ...], in the order of the model.
        """
        # [chunks, layers of this rank, ...]: in each chunk, the layers of all ranks follow one another.
        value = value.reshape(form.chunks, -1, *value.shape[1:])
        return form.in_order(collectives.all_gather(value, ["pipe"], 1).reshape(*form.held, *value.shape[2:]))

    def _scatter_stages(self, form: Staged, cotangent: jax.Array) -> jax.Array:
        """Reduce-scatter the gradient of all layers to the stages of each rank; transpose of `_gather_stages`."""
        staged = form.in_stages(cotangent)
        # A single chunk has no dim of chunks yet.
        staged = staged if form.chunks > 1 else staged[None]
        shard = collectives.reduce_scatter(staged, ["pipe"], 1)
        return shard.reshape(-1, *shard.shape[2:])

    def finish(self, index: int, gradient: Gradient) -> jax.Array:
        """Return the gradient that the update receives, from the accumulated one."""
        parts = gradient if isinstance(gradient, tuple) else (gradient,)
        use, dtype = self._use(index, False), self.policy.reduced(self.leaves[index].dtype)
        first_part, *other_parts = (self.rules[index].finish(part, use) for part in parts)
        # If parts were cast and added as they come, each part and sum would be written and read in the reduce dtype.
        wide_bytes, narrow_bytes = (first_part.size * d.itemsize for d in (dtype, first_part.dtype))
        with saving("gradients", 2 * len(parts) * (wide_bytes - narrow_bytes) + 2 * len(other_parts) * wide_bytes):
            total = first_part.astype(dtype)
        return sum((part.astype(dtype) for part in other_parts), total)


class SpreadAccess:
    """A rule applied to leaves that are spread over `pipe`, for the stages of a cut program (`pipeline/flat/`).

    Collectives run among the devices that share a stage. Inside a stage, a leaf has shape [pipe, ...], with the part of
    every rank of the pipeline. A leaf that is not spread is whole on every rank.
    """

    def __init__(self, layout: Layout, rule: Rule, in_fp8: Collection[str] = ()):
        self.leaves, self.policy = [leaf.local for leaf in layout.storage.leaves], layout.policy
        self.split, self.ranks = [leaf.split for leaf in layout.storage.leaves], layout.mesh.shape["pipe"]
        self.rules = [of_leaf(rule, leaf, in_fp8) for leaf in self.leaves]

    def _use(self, index: int, num_leading_dims: int) -> Use:
        """Return the `Use` of an array that has `num_leading_dims` dims in front of the leaf's own."""
        leaf = self.leaves[index]
        shard = leaf.shard if leaf.dim is not None and self.rules[index].sharded else ()
        replica_axes = tuple(a for a in summed_over(self.split[index]) if a not in shard)
        return Use((leaf.dim or 0) + num_leading_dims, shard, replica_axes, False, self.policy.reduced(leaf.dtype))

    def fetch(self, index: int, value: jax.Array, sliced: bool) -> jax.Array:
        """Return the whole leaf, from this device's shard [pipe, ...]."""
        leaf = self.leaves[index]
        if leaf.dim is None:
            return value
        # The parts of the ranks are consecutive along the sharded dim: [..., pipe, dim / pipe, ...].
        parts = jnp.moveaxis(self.rules[index].fetch(value, self._use(index, 1)), 0, leaf.dim)
        return leaf.unpad(parts.reshape(leaf.stored))

    def give(self, index: int, cotangent: jax.Array, sliced: bool) -> jax.Array | None:
        """Return what one use adds to the accumulated gradient [pipe, ...]; None for a frozen leaf."""
        leaf = self.leaves[index]
        if not leaf.trainable:
            return None
        if leaf.dim is None:
            return self.rules[index].give(cotangent, self._use(index, 0))
        shape, dim = leaf.stored, leaf.dim
        parts = leaf.pad(cotangent).reshape(*shape[:dim], self.ranks, shape[dim] // self.ranks, *shape[dim + 1 :])
        return self.rules[index].give(jnp.moveaxis(parts, dim, 0), self._use(index, 1))

    def finish(self, index: int, gradient: jax.Array) -> jax.Array:
        """Return the gradient that the update receives for this rank's part of the leaf."""
        return self.rules[index].finish(gradient, self._use(index, 0))
