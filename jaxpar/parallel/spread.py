"""How the stages of a cut program (`parallel/flat/`) reach parameters that are spread over `pipe`: a strategy's rule,
within the group of devices that share a stage.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..axes import summed_over
from ..layout.layout import Layout
from . import DDP, Rule, Use


class SpreadAccess:
    """A rule applied to the leaves of a layout that are spread over `pipe`.

    In a stage, a leaf is [pipe, ...], every rank's part of it; one that is not spread is whole on every rank.
    """

    def __init__(self, layout: Layout, rule: Rule):
        self.leaves, self.policy = [leaf.local for leaf in layout.storage.leaves], layout.policy
        self.split, self.ranks = [leaf.split for leaf in layout.storage.leaves], layout.mesh.shape["pipe"]
        self.rules = [DDP if rule.sharded and leaf.dim is None else rule for leaf in self.leaves]

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
