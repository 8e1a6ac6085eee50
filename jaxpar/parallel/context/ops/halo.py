"""Halos: the last positions of the chunk before each of a rank's chunks, and the first positions of the chunk after.

    chunks                        a b c d | e f g h | i j k l
    middle chunk with its halo        c d | e f g h | i              2 positions before, 1 after

Convolutions and shifts of a split sequence need these positions. Ranks gather the ends of all chunks, and each rank
picks the ends of its neighbours.

Dims: c ranks, p chunks of each (2 in zigzag order, else 1), m positions of a chunk, k halo positions of a chunk.
"""

import jax
import jax.numpy as jnp

from ....collectives.nccl import all_gather
from ....collectives.ranks import Axes, count, index
from .order import Order, order_of


def from_chunks(x: jax.Array, axis: Axes, order: Order) -> list[jax.Array]:
    """Gather a value of every chunk of the sequence, in the user's order of chunks.

    Sends (c - 1) times the bytes of x. Its gradient takes the same traffic, in a reduce-scatter.

    Args:
      x: [p, ...], the value for each of this rank's p chunks, in the order in which the rank holds them.
      axis: the mesh axis of c ranks; inside `shard_map`.
      order: the order of the chunks: see `order.py`.

    Returns:
      c p arrays [...], one for each chunk.
    """
    gathered = all_gather(x, axis)
    chunk_order = order_of(count(axis), order)
    return [gathered[chunk_order.index(chunk)] for chunk in range(len(chunk_order))]


def with_neighbours(
    x: jax.Array, num_before: int, num_after: int, axis: Axes, order: Order = "plain", dim: int = 1
) -> list[jax.Array]:
    """Return each chunk of this rank with some positions of the chunks before and after it.

    Positions wrap around: the first chunk has the end of the sequence before it, and the last chunk has the start after
    it. Callers that need padding replace these positions.

    Ranks send each other the ends of their chunks in one all-gather, and the gradients of these ends in one
    reduce-scatter. With k = num_before + num_after, r elements a position and e bytes an element, each sends
    (c - 1) p k r e bytes. Messages between neighbours alone would be smaller, but k is a few positions. XLA's
    collective-permute also needs all devices at once, which some pipelines cannot provide.

    Args:
      x: [.., p m, ..], this rank's positions along `dim`, inside `shard_map`.
      num_before: the number of positions from the chunk before, at most m.
      num_after: the number of positions from the chunk after, at most m.
      axis: the mesh axis of c ranks.
      order: the chunks that each rank holds: see `positions`.
      dim: the dim of the positions.

    Returns:
      p arrays [.., num_before + m + num_after, ..].
    """
    chunk_ids = jnp.asarray(order_of(count(axis), order), jnp.int32).reshape(count(axis), -1)  # [c, p]
    chunks = jnp.split(x, chunk_ids.shape[1], dim)
    if not num_before + num_after:
        return chunks
    length = chunks[0].shape[dim]
    cut = lambda chunk, first, n: jax.lax.slice_in_dim(chunk, first, first + n, axis=dim)
    # The end of each chunk is the halo of the chunk after it, its start the halo of the chunk before: one all-gather.
    ends = [jnp.concatenate([cut(y, length - num_before, num_before), cut(y, 0, num_after)], dim) for y in chunks]
    all_ends = jnp.stack(from_chunks(jnp.stack(ends), axis, order))
    extended_chunks = []
    # Which chunk is in a slot depends on the rank: the ends are picked by a traced index.
    for slot, chunk in enumerate(chunks):
        chunk_id = chunk_ids[index(axis), slot]
        halo_before = cut(all_ends[(chunk_id - 1) % chunk_ids.size], 0, num_before)
        halo_after = cut(all_ends[(chunk_id + 1) % chunk_ids.size], num_before, num_after)
        extended_chunks.append(jnp.concatenate([halo_before, chunk, halo_after], dim))
    return extended_chunks


def halo_bytes(
    elements: int, num_before: int, num_after: int, c: int, e: int, order: Order = "plain"
) -> tuple[int, int]:
    """Return the bytes that each of c ranks sends in `with_neighbours`, as (forward, backward).

    A position has `elements` elements of e bytes; the other arguments are as for `with_neighbours`.

    >>> halo_bytes(2 * 4096, num_before=3, num_after=0, c=8, e=2)
    (344064, 344064)
    """
    sent = (c - 1) * (2 if order == "zigzag" else 1) * (num_before + num_after) * elements * e
    return sent, sent
