"""Each token through all the experts that it chose: none is dropped.

Dims: N tokens, k choices of a token, E experts, C slots of an expert, D features.
"""

import math
from typing import Any

import jax

from .dispatch import combine, dispatch
from .overflow import Expert, overflow

FIRST = 1.25  # of an expert's mean load: what a dropless mixture computes at once; see docs/experts.md
_SLOTS = 8  # they are a multiple of it, so that ranks of `context` divide them


def slots_of(tokens: int, k: int, experts: int) -> int:
    """C: the slots of an expert, before anything overflows."""
    return min(tokens, -(-math.ceil(FIRST * tokens * k / experts) // _SLOTS) * _SLOTS)


def dropless(x: jax.Array, ids: jax.Array, weights: jax.Array, leaves: Any, expert: Expert) -> jax.Array:
    """The weighted sum of what the experts of each token make of it.

    Args:
      x: [N, D].
      ids: int32 [N, k], 0 to E - 1, or E for a choice of none.
      weights: float [N, k].
      leaves: a tree of [E, ...].
      expert: (one expert's leaves, [n, D]) -> [n, D'], each token for itself.

    Returns [N, D'] in the dtype of the weights.
    """
    tokens, k = ids.shape
    count = jax.tree.leaves(leaves)[0].shape[0]
    slots = slots_of(tokens, k, count)
    rows, slot, choice = dispatch(count, slots, 1, False, "", False)(x, ids, weights)
    beyond = None
    if slots < tokens:
        beyond, leaves = overflow(expert, x, ids, weights, leaves, slots)
    y = combine(slot, jax.vmap(expert)(leaves, rows), weights, choice)
    return y if beyond is None else y + beyond
