"""The order of positions: which chunks of a sequence each rank holds.

    plain     rank i of c holds chunk i of c
    zigzag    rank i of c holds chunks i and 2c - 1 - i of 2c, so that causal attention is the same work on every rank
              (Llama 3: Grattafiori et al. 2024, arXiv:2407.21783, section 3.3.2)

Four ranks:   plain  01|23|45|67    zigzag  07|16|25|34
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from ....collectives.nccl import shift
from ....collectives.ranks import Axes, count, index

Order = Literal["plain", "zigzag"]
ORDERS = ("plain", "zigzag")


@dataclass(frozen=True)
class Ring:
    """The ranks over which a sequence is split, as a ring of groups of neighbouring ranks that share heads.

    Attributes:
      axis: the mesh axis of c ranks.
      order: the chunks of the sequence that each rank holds.
      group: u, the number of ranks in a group; u divides c. A group is one place on the ring.
    """

    axis: Axes
    order: Order = "plain"
    group: int = 1

    @property
    def size(self) -> int:
        """The number of places, c / u; inside `shard_map`."""
        return count(self.axis) // self.group

    @property
    def place(self) -> jax.Array | int:
        """This device's place on the ring."""
        return index(self.axis) // self.group

    def shift(self, x: jax.Array, hops: int = 1) -> jax.Array:
        """Pass a value on along the ring: return the value of the rank `hops` places before this one."""
        return shift(x, self.axis, hops * self.group)


def order_of(ranks: int, order: Order) -> tuple[int, ...]:
    """Return the chunks of a sequence in the order in which ranks hold them: c chunks if plain, 2c if zigzag.

    >>> order_of(3, "zigzag")
    (0, 5, 1, 4, 2, 3)
    """
    if order not in ORDERS:
        raise ValueError(f"order={order!r}; use one of {ORDERS}")
    if order == "plain":
        return (*range(ranks),)
    return tuple(chunk for i in range(ranks) for chunk in (i, 2 * ranks - 1 - i))


def check_order(order: str, q: jax.Array, k: jax.Array) -> None:
    """Raise ValueError if the order is unknown, or a rank cannot hold its queries [b, t/c, ..] and keys in it."""
    if order not in ORDERS:
        raise ValueError(f"order={order!r}; use one of {ORDERS}")
    if order == "zigzag" and (q.shape[1] % 2 or k.shape[1] % 2):
        raise ValueError(
            f"order='zigzag' for blocks of {q.shape[1]} queries and {k.shape[1]} keys: a rank holds two chunks; "
            "give an even number, or use order='plain'"
        )


def to_zigzag(x: jax.Array, ranks: int, dim: int = 1) -> jax.Array:
    """Reorder a whole array along `dim` from the user's order of positions to the order in which ranks hold them.

    Raises:
      ValueError: twice the number of ranks does not divide the dim.

    >>> to_zigzag(jnp.arange(8), ranks=2, dim=0)
    Array([0, 1, 6, 7, 2, 3, 4, 5], dtype=int32)
    """
    return _permute_chunks(x, order_of(ranks, "zigzag"), dim)


def from_zigzag(x: jax.Array, ranks: int, dim: int = 1) -> jax.Array:
    """Reorder a whole array back to the user's order: the inverse of `to_zigzag`, with the same arguments."""
    chunk_order = order_of(ranks, "zigzag")
    return _permute_chunks(x, [chunk_order.index(i) for i in range(2 * ranks)], dim)


def positions(length: int, axis: Axes, order: Order = "plain") -> jax.Array:
    """Return the positions that this rank holds, in the order in which it holds them: int32 [t/c].

    Args:
      length: t/c, the number of positions that it holds.
      axis: the mesh axis over which the sequence is split; inside `shard_map`.
      order: "plain" or "zigzag".
    """
    return positions_of_rank(length, count(axis), order, index(axis))


def positions_of_rank(length: int, ranks: int, order: Order, rank: jax.Array | int) -> jax.Array:
    """Return the positions that a given one of `ranks` ranks holds: int32 [length]."""
    chunk_order = order_of(ranks, order)
    chunks_per_rank = len(chunk_order) // ranks
    size = _chunk_size(length, chunks_per_rank, "this rank's positions")
    rank_chunks = jnp.asarray(chunk_order, jnp.int32).reshape(ranks, chunks_per_rank)[rank]
    return (rank_chunks[:, None] * size + jnp.arange(size, dtype=jnp.int32)).reshape(length)


def _permute_chunks(x: jax.Array, order: tuple[int, ...] | list[int], dim: int) -> jax.Array:
    """Cut an array into `len(order)` chunks along `dim`, and concatenate them in this order."""
    size = _chunk_size(x.shape[dim], len(order), f"dim {dim} of {list(x.shape)}")
    # Static slices: whole chunks move, and no array of indices is needed.
    return jnp.concatenate([jax.lax.slice_in_dim(x, i * size, (i + 1) * size, axis=dim) for i in order], dim)


def _chunk_size(length: int, num_chunks: int, subject: str) -> int:
    """Return the length of a chunk; raise ValueError, which names `subject`, if the chunks do not divide it."""
    if length % num_chunks:
        raise ValueError(
            f"{subject}: {length} positions do not divide into {num_chunks} chunks; use "
            f"{length + -length % num_chunks}, or the plain order"
        )
    return length // num_chunks
