"""A dropless mixture: every token gets the results of all experts that it chose.

The first C choices of each expert are computed at once, in buffers [E, C, D]. The choices beyond them overflow, and are
computed block by block, as many blocks as there are (`overflow.py`). With a balanced load there are none.

Dims: N tokens, k choices of a token, E experts, C slots of an expert, D features.
"""

import math
from typing import Any

import jax

from .dispatch import combine, dispatch
from .overflow import Expert, overflow

FIRST = 1.25  # C in units of an expert's mean load; see docs/experts.md
_SLOTS = 8  # unless an expert has a slot for every token, C is a multiple of this: ranks of `context` divide it


def slots_of(tokens: int, k: int, experts: int) -> int:
    """Return C, the slots of an expert before choices overflow."""
    return min(tokens, -(-math.ceil(FIRST * tokens * k / experts) // _SLOTS) * _SLOTS)


def dropless(x: jax.Array, ids: jax.Array, weights: jax.Array, leaves: Any, expert: Expert) -> jax.Array:
    """Return the weighted sum of the results of each token's experts.

    Args:
      x: [N, D].
      ids: int32 [N, k], 0 to E - 1, or E for a choice of no expert.
      weights: float [N, k].
      leaves: a tree of [E, ...].
      expert: (one expert's leaves, [n, D]) -> [n, D'], each token independently.

    Returns:
      [N, D'] in the dtype of the weights.
    """
    tokens, k = ids.shape
    num_experts = jax.tree.leaves(leaves)[0].shape[0]
    slots = slots_of(tokens, k, num_experts)
    rows, slot, choice = dispatch(num_experts, slots, 1, False, "", False)(x, ids, weights)
    overflowed = None
    # An expert with a slot for every token cannot overflow.
    if slots < tokens:
        # `vmap` below must read the leaves that `overflow` returns: their gradient is accumulated in place.
        overflowed, leaves = overflow(expert, x, ids, weights, leaves, slots)
    y = combine(slot, jax.vmap(expert)(leaves, rows), weights, choice)
    return y if overflowed is None else y + overflowed
