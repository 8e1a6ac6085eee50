"""How a program reaches parameters: a strategy's rule applied to the leaves of a layout."""

from collections.abc import Collection

import jax
import jax.numpy as jnp

from ... import collectives
from ...layout.layout import Layout
from ...layout.leaves import Staged
from ...program.buffers import on_device
from ...slicing.program import Program
from ...strategy import Strategy
from ...strategy.axes import summed_over
from . import Rule, Use
from .eight_bits import of_leaf


class RuleAccess:
    """A rule applied to the leaves of a layout: casts, padding, and what follows from how a program uses a leaf.

    Of a stage's own leaf, a value is this rank's layers, chunk by chunk, on dim 0.
    """

    def __init__(self, layout: Layout, rule: Rule, program: Program, strategy: Strategy, in_fp8: Collection[str] = ()):
        self.leaves, self.policy = [leaf.local for leaf in layout.storage.units], layout.policy
        self.split = [leaf.split for leaf in layout.storage.units]
        self.whole_at_rest = "params" not in rule.sharded
        self.rules = [of_leaf(rule, leaf, in_fp8) for leaf in self.leaves]
        self.pipe = layout.mesh.shape["pipe"]
        self.layer_dims = {s.leaf: s.dim for stack in program.stacks for s in stack.slices}
        once = strategy.turns == 1 and self.pipe == 1
        self.last = [once and uses == (True,) for uses in program.uses]
        self.prefetch = strategy.prefetches(layout.mesh)

    def _use(self, index: int, sliced: bool) -> Use:
        leaf = self.leaves[index]
        used_by = summed_over(self.split[index])
        sharded = leaf.dim is not None and self.rules[index].sharded
        at_rest = leaf.shard if sharded else ()
        shard, second = tuple(a for a in at_rest if a != "data"), tuple(a for a in at_rest if a == "data")
        if sliced:
            dim = leaf.inner(True, self.layer_dims[index])
        else:
            dim = leaf.inner(False) if leaf.layers is None else leaf.inner(True) + 1
        rest = tuple(a for a in used_by if a not in at_rest)
        return Use(dim, shard, rest, self.last[index], self.policy.reduced(leaf.dtype), second)

    def sends(self, index: int) -> tuple[bool, bool]:
        """Whether a loop over layers gathers a leaf's layers ahead, and reduces their gradients behind."""
        leaf, rule = self.leaves[index], self.rules[index]
        gathered = leaf.dim is not None and "params" in rule.sharded
        reduced = leaf.trainable and (rule.at_once or self.last[index])
        return self.prefetch and gathered, self.prefetch and reduced

    def fetch(self, index: int, value: jax.Array, sliced: bool) -> jax.Array:
        """The whole leaf, or layer of it, in the compute dtype: cast before it is gathered."""
        leaf, use = self.leaves[index], self._use(index, sliced)
        value = self.rules[index].fetch(on_device(value).astype(self.policy.computed(leaf.dtype)), use)
        value = value if self.whole_at_rest else leaf.unpad(value, use.dim)
        return self._every_stage(leaf.form, value) if isinstance(leaf.form, Staged) and not sliced else value

    def give(self, index: int, cotangent: jax.Array, sliced: bool) -> jax.Array | None:
        """What is accumulated of one use's gradient; None for a frozen leaf."""
        leaf, use = self.leaves[index], self._use(index, sliced)
        if not leaf.trainable:
            return None
        if isinstance(leaf.form, Staged) and not sliced:
            cotangent = self._own_stages(leaf.form, cotangent)
        return self.rules[index].give(leaf.pad(cotangent, use.dim), use)

    def _every_stage(self, form: Staged, value: jax.Array) -> jax.Array:
        """All layers of a leaf that stages own, for a use outside the stack."""
        value = value.reshape(form.chunks, -1, *value.shape[1:])
        return form.in_order(collectives.all_gather(value, ["pipe"], 1).reshape(*form.held, *value.shape[2:]))

    def _own_stages(self, form: Staged, cotangent: jax.Array) -> jax.Array:
        """The reverse of `_every_stage`, summed over the ranks."""
        staged = form.in_stages(cotangent)
        staged = staged if form.chunks > 1 else staged[None]
        shard = collectives.reduce_scatter(staged, ["pipe"], 1)
        return shard.reshape(-1, *shard.shape[2:])

    def finish(self, index: int, gradient: jax.Array) -> jax.Array:
        """The gradient that the update gets."""
        return self.rules[index].finish(gradient, self._use(index, False))


class SpreadAccess:
    """A rule applied to the leaves of a layout that are spread over `pipe`, for the stages of a cut program (`flat/`):
    within the group of devices that share a stage.

    In a stage, a leaf is [pipe, ...], every rank's part of it; one that is not spread is whole on every rank.
    """

    def __init__(self, layout: Layout, rule: Rule, in_fp8: Collection[str] = ()):
        self.leaves, self.policy = [leaf.local for leaf in layout.storage.leaves], layout.policy
        self.split, self.ranks = [leaf.split for leaf in layout.storage.leaves], layout.mesh.shape["pipe"]
        self.rules = [of_leaf(rule, leaf, in_fp8) for leaf in self.leaves]

    def _use(self, index: int, lead: int) -> Use:
        leaf = self.leaves[index]
        shard = leaf.shard if leaf.dim is not None and self.rules[index].sharded else ()
        rest = tuple(a for a in summed_over(self.split[index]) if a not in shard)
        return Use((leaf.dim or 0) + lead, shard, rest, False, self.policy.reduced(leaf.dtype))

    def fetch(self, index: int, value: jax.Array, sliced: bool) -> jax.Array:
        """The whole leaf."""
        leaf = self.leaves[index]
        if leaf.dim is None:
            return value
        parts = jnp.moveaxis(self.rules[index].fetch(value, self._use(index, 1)), 0, leaf.dim)
        return leaf.unpad(parts.reshape(leaf.stored))

    def give(self, index: int, cotangent: jax.Array, sliced: bool) -> jax.Array | None:
        """What is accumulated of one use's gradient [pipe, ...]; None for a frozen leaf."""
        leaf = self.leaves[index]
        if not leaf.trainable:
            return None
        if leaf.dim is None:
            return self.rules[index].give(cotangent, self._use(index, 0))
        shape, d = leaf.stored, leaf.dim
        parts = leaf.pad(cotangent).reshape(*shape[:d], self.ranks, shape[d] // self.ranks, *shape[d + 1 :])
        return self.rules[index].give(jnp.moveaxis(parts, d, 0), self._use(index, 1))

    def finish(self, index: int, gradient: jax.Array) -> jax.Array:
        """The gradient of this rank's part that the update gets."""
        return self.rules[index].finish(gradient, self._use(index, 0))
