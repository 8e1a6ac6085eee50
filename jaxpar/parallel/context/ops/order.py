"""Which positions of a sequence a rank holds.

    plain     rank i of c holds chunk i of c
    zigzag    rank i of c holds chunks i and 2c - 1 - i of 2c, so that causal attention is the same work everywhere
              (Llama 3: Grattafiori et al. 2024, arXiv:2407.21783, section 3.3.2)

Four ranks:   plain  01|23|45|67    zigzag  07|16|25|34
"""

from typing import Literal

import jax
import jax.numpy as jnp

from ....collectives.ranks import Axes, count, index

Order = Literal["plain", "zigzag"]
ORDERS = ("plain", "zigzag")


def order_of(ranks: int, order: Order) -> tuple[int, ...]:
    """The chunks of a sequence as ranks hold them, one rank after the other: c chunks if plain, 2c if zigzag.

    >>> order_of(3, "zigzag")
    (0, 5, 1, 4, 2, 3)
    """
    if order not in ORDERS:
        raise ValueError(f"order={order!r}; use one of {ORDERS}")
    if order == "plain":
        return (*range(ranks),)
    return tuple(chunk for i in range(ranks) for chunk in (i, 2 * ranks - 1 - i))


def check_order(order: str, q: jax.Array, k: jax.Array) -> None:
    """Raise ValueError where a rank cannot hold its queries [b, t/c, ..] and keys in this order, or it is none."""
    if order not in ORDERS:
        raise ValueError(f"order={order!r}; use one of {ORDERS}")
    if order == "zigzag" and (q.shape[1] % 2 or k.shape[1] % 2):
        raise ValueError(
            f"order='zigzag' for blocks of {q.shape[1]} queries and {k.shape[1]} keys: a rank holds two chunks; "
            "give an even number, or use order='plain'"
        )


def to_zigzag(x: jax.Array, ranks: int, dim: int = 1) -> jax.Array:
    """A whole array, from the user's order of positions along `dim` to that in which ranks hold them: same shape.

    Raises:
      ValueError: twice the number of ranks does not divide the dim.

    >>> to_zigzag(jnp.arange(8), ranks=2, dim=0)
    Array([0, 1, 6, 7, 2, 3, 4, 5], dtype=int32)
    """
    return _chunks(x, order_of(ranks, "zigzag"), dim)


def from_zigzag(x: jax.Array, ranks: int, dim: int = 1) -> jax.Array:
    """The reverse of `to_zigzag`."""
    held = order_of(ranks, "zigzag")
    return _chunks(x, [held.index(i) for i in range(2 * ranks)], dim)


def positions(length: int, axis: Axes, order: Order = "plain") -> jax.Array:
    """The positions that this rank holds, in its order: int32 [t/c].

    Args:
      length: t/c, how many it holds.
      axis: the mesh axis over which the sequence is split; inside `shard_map`.
      order: "plain" or "zigzag".
    """
    return positions_of(length, count(axis), order, index(axis))


def positions_of(length: int, ranks: int, order: Order, rank: jax.Array | int) -> jax.Array:
    """Those of one of so many ranks."""
    held = order_of(ranks, order)
    per_rank = len(held) // ranks
    size = _part(length, per_rank, "this rank's positions")
    own = jnp.asarray(held, jnp.int32).reshape(ranks, per_rank)[rank]
    return (own[:, None] * size + jnp.arange(size, dtype=jnp.int32)).reshape(length)


def _chunks(x: jax.Array, order: tuple[int, ...] | list[int], dim: int) -> jax.Array:
    size = _part(x.shape[dim], len(order), f"dim {dim} of {list(x.shape)}")
    return jnp.concatenate([jax.lax.slice_in_dim(x, i * size, (i + 1) * size, axis=dim) for i in order], dim)


def _part(length: int, parts: int, what: str) -> int:
    if length % parts:
        raise ValueError(
            f"{what}: {length} positions do not divide into {parts} chunks; use {length + -length % parts}, or "
            "the plain order"
        )
    return length // parts
