"""The blocks of rows over which a step sums, as one device sees them.

With n replicas and m microbatches of b rows, block (r, i) is microbatch i of replica r's rows:

    batch [n m b, ...]  ->  [n, m, b, ...]        block (r, i) has the number r m + i, and the random key of that number
"""

from collections.abc import Callable
from typing import Any

import jax

from ..model.batches import map_rows
from ..model.model import is_replicated


def block_key(key: jax.Array, step: jax.Array | int, block: jax.Array | int) -> jax.Array:
    """Return the random key of one block of rows in one step; it does not depend on which device has the block."""
    # First by step, then by block: no two pairs share a key, as their sum would let them.
    return jax.random.fold_in(jax.random.fold_in(key, step), block)


def blocks_of_microbatch(batch: Any, replicas: int, microbatches: int, index: int) -> Any:
    """Return the blocks of microbatch `index` of all replicas, [replicas, b, ...]; `Replicated` leaves are whole."""
    return map_rows(batch, lambda x: x.reshape(replicas, microbatches, -1, *x.shape[1:])[:, index])


def call_on_blocks(fun: Callable[[Any, Any], Any], blocks: Any, keys: Any) -> Any:
    """Return `fun(rows, key)` for the blocks of all replicas together, each result [replicas, ...].

    The replicas are a batched axis named "rows", over which the loss's own sums run.
    """
    axes = jax.tree.map(lambda x: None if is_replicated(x) else 0, blocks, is_leaf=is_replicated)
    return jax.vmap(fun, in_axes=(axes, 0), axis_name="rows")(blocks, keys)
