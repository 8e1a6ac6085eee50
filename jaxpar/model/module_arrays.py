"""The arrays of users' modules: nested dicts of those that JAX sees, and the values of those that it does not see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from .paths import keys_of


class ArrayTree:
    """Translates a pytree of arrays to nested dicts by path and back: checkpoints and steps know no modules.

    Attributes:
      tree: the structure of the pytree.
      dicts: the structure of the nested dicts.
      order: for each leaf of the dicts its position in the pytree; dicts may sort their keys in another order.
    """

    def __init__(self, tree: Any):
        self.tree = jax.tree.structure(tree)
        # Leaves as their own numbers: jax sorts the keys of dicts, so that `order` is not 0, 1, 2, ...
        numbered = self.pure(jax.tree.unflatten(self.tree, list(range(self.tree.num_leaves))))
        self.order, self.dicts = jax.tree.leaves(numbered), jax.tree.structure(numbered)

    def pure(self, tree: Any) -> dict[Any, Any]:
        """Return the nested dicts of a pytree."""
        return unflatten_dict({keys_of(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)})

    def filled(self, pure: Any) -> Any:
        """Return the pytree with the arrays of nested dicts."""
        leaves: list[Any] = [None] * self.tree.num_leaves
        for i, leaf in zip(self.order, jax.tree.leaves(pure), strict=True):
            leaves[i] = leaf
        return jax.tree.unflatten(self.tree, leaves)


def hidden_values(compute: Callable[[jax.Array], list[jax.Array]]) -> tuple[list[jax.Array], list[bool]]:
    """Return the values of arrays that a constructor hides from JAX, and whether each is random.

    Args:
      compute: `compute(key)` calls the constructor, and returns these arrays.
    """
    # Two keys tell whether an array is random.
    first, second = map(jax.jit(compute), jax.random.split(jax.random.key(0)))
    # NaN equals NaN here: a constant table may hold it.
    is_equal = lambda a, b: np.array_equal(a, b, equal_nan=jnp.issubdtype(a.dtype, jnp.inexact))
    return first, [not is_equal(a, b) for a, b in zip(first, second, strict=True)]
