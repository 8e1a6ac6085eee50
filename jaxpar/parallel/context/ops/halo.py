"""What is next to a rank's positions: the last of the chunk before, the first of the chunk after.

Dims: c ranks, k positions that are asked for on either side.
"""

import jax
import jax.numpy as jnp

from ....collectives.nccl import all_gather
from ....collectives.ranks import Axes, count, index
from .order import Order, order_of


def from_chunks(x: jax.Array, axis: Axes, order: Order) -> list[jax.Array]:
    """Of every chunk of a sequence, in the user's order: [p, ...] of this rank's p chunks, in the order in which it has
    them -> c p arrays [...]. Sends (c - 1) times the bytes of x; its gradient is sent as often, by a reduce-scatter.
    """
    every = all_gather(x, axis)
    held = order_of(count(axis), order)
    return [every[held.index(chunk)] for chunk in range(len(held))]


def with_neighbours(
    x: jax.Array, before: int, after: int, axis: Axes, order: Order = "plain", dim: int = 1
) -> list[jax.Array]:
    """Each chunk of this rank with positions of its neighbours: [.., p m, ..] -> p arrays [.., before + m + after, ..].

    Before the first chunk and after the last is what is at the other end of the sequence.

    Ranks send each other the ends of their chunks in one all-gather, and in the backward their gradients in one
    reduce-scatter: with k = before + after, p chunks a rank (2 in zigzag order, else 1), r elements a position and e
    bytes each, (c - 1) p k r e. That is more than neighbours would send each other, but k is a few positions; and in
    XLA's collective-permute all devices must meet, which those of some pipelines do not.

    Args:
      x: this rank's positions along `dim`, inside `shard_map`.
      before: how many of the chunk before, at most m.
      after: how many of the chunk after, at most m.
      axis: the mesh axis of c ranks.
      order: which chunks ranks have: see `positions`.
      dim: the dim of the positions.
    """
    held = jnp.asarray(order_of(count(axis), order), jnp.int32).reshape(count(axis), -1)
    chunks = jnp.split(x, held.shape[1], dim)
    if not before + after:
        return chunks
    length = chunks[0].shape[dim]
    cut = lambda chunk, first, n: jax.lax.slice_in_dim(chunk, first, first + n, axis=dim)
    ends = [jnp.concatenate([cut(y, length - before, before), cut(y, 0, after)], dim) for y in chunks]
    every = jnp.stack(from_chunks(jnp.stack(ends), axis, order))
    found = []
    for slot, chunk in enumerate(chunks):
        at = held[index(axis), slot]
        left = cut(every[(at - 1) % held.size], 0, before)
        right = cut(every[(at + 1) % held.size], before, after)
        found.append(jnp.concatenate([left, chunk, right], dim))
    return found


def halo_bytes(elements: int, before: int, after: int, c: int, e: int, order: Order = "plain") -> tuple[int, int]:
    """(forward, backward) of `with_neighbours`, where a position has so many elements: what each rank sends.

    >>> halo_bytes(2 * 4096, before=3, after=0, c=8, e=2)
    (344064, 344064)
    """
    sent = (c - 1) * (2 if order == "zigzag" else 1) * (before + after) * elements * e
    return sent, sent
