"""What finds no slot in an expert's buffer, where nothing may be dropped: block by block, each of one expert.

How many blocks there are is known when the program runs; those that are not needed are skipped. What they cost is what
they hold, wherever the tokens go: at worst, all of them to one expert, they are all there is. Nothing of a block is
kept for the backward pass, which computes it again.

Dims: N tokens, k choices of a token, E experts, C slots of an expert, b tokens of a block, D features.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ....model.permutations import route
from .rounds import rounds, where_needed
from .tables import Order, order, rows_of, wide

_numbers = itertools.count()
Expert = Callable[[Any, jax.Array], jax.Array]


def block_size(slots: int) -> int:
    """A quarter of a buffer, as last blocks are half empty; 128 rows or more: a GPU's matmul of less is no faster."""
    return min(slots, max(128, -(-slots // 4)))


def most_blocks(tokens: int, k: int, experts: int, slots: int, size: int) -> int:
    """The most blocks that there can be: m experts have more than C choices, each at most N, all together N k."""
    each, rest = -(-(tokens - slots) // size), lambda m: tokens * k - slots * m
    return max((min(m * each, rest(m) // size + m) for m in range(1, experts + 1) if rest(m) > 0), default=0)


def overflow(
    expert: Expert,
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    leaves: Any,
    slots: int,
    size: int | None = None,
) -> tuple[jax.Array, Any]:
    """What experts make of the choices beyond their first C, by position, weighted and added up; and their leaves.

    Who computes the first C reads the leaves that are returned: their cotangents come back here, and blocks are added
    to them in place. Otherwise there would be two gradients of all experts, one of them mostly zero.

    Args:
      expert: (one expert's leaves, [b, D]) -> [b, D'].
      x: [N, D].
      ids, weights: int32 and float [N, k].
      leaves: a tree of [E, ...].
      slots: C.
      size: b; `block_size(slots)` if None.

    Returns [N, D'] in the dtype of the weights, and `leaves`.
    """
    flat, tree = jax.tree.flatten(leaves)
    out, *flat = _overflow(expert, tree, slots, size or block_size(slots))(x, ids, weights, *flat)
    return out, jax.tree.unflatten(tree, flat)


@functools.lru_cache(maxsize=256)
def _overflow(expert: Expert, tree: Any, slots: int, size: int) -> Callable[..., Any]:
    def blocks(by: Order, n: int, k: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """For each block its expert, where it starts in the sorted choices, and how many of them are its own."""
        beyond = jnp.maximum(by.load - slots, 0)
        count = (beyond + size - 1) // size
        ends = jnp.cumsum(count)
        j = jnp.arange(most_blocks(n, k, by.load.size, slots, size), dtype=jnp.int32)
        e = jnp.minimum((j[:, None] >= ends).sum(axis=1, dtype=jnp.int32), by.load.size - 1)
        done = (j - (ends - count)[e]) * size
        return e, by.start[e] + slots + done, jnp.where(j < ends[-1], jnp.clip(beyond[e] - done, 0, size), 0)

    def choices(by: Order, start: jax.Array, mine: jax.Array) -> jax.Array:
        """The choices of a block; N k beyond its own."""
        rank = jnp.arange(size, dtype=jnp.int32)
        at = jnp.minimum(start + rank, by.sorted.size - 1)
        return jnp.where(rank < mine, by.sorted[at], by.sorted.size)

    def of(e: jax.Array, leaves: Any) -> Any:
        return [jax.lax.dynamic_index_in_dim(leaf, e, keepdims=False) for leaf in leaves]

    def applied(weights: jax.Array, rows: jax.Array, leaves: Any) -> jax.Array:
        return weights[:, None] * expert(jax.tree.unflatten(tree, leaves), rows).astype(weights.dtype)

    def run(x: jax.Array, ids: jax.Array, weights: jax.Array, *leaves: jax.Array) -> tuple[jax.Array, ...]:
        by, k = order(ids, None, leaves[0].shape[0]), ids.shape[1]

        def step(total: jax.Array, block: Any) -> tuple[jax.Array, None]:
            e, start, mine = block

            def compute(total: jax.Array) -> jax.Array:
                at = choices(by, start, mine)
                out = applied(rows_of(weights.reshape(-1), at), rows_of(x, at // k), of(e, leaves))
                return total.at[at // k].add(out, mode="drop")

            return where_needed(mine > 0, compute, total), None

        one = lambda x, leaves: applied(weights[:1, 0], x[:1], of(by.load[0], leaves))
        width = jax.eval_shape(one, x, leaves).shape[-1]
        start = jnp.zeros((x.shape[0], width), weights.dtype)
        return jax.lax.scan(step, start, blocks(by, *ids.shape))[0], *leaves

    def backward(saved: Any, cotangents: Any) -> Any:
        (x, ids, weights, leaves), (given, *of_first) = saved, cotangents
        by, k = order(ids, None, leaves[0].shape[0]), ids.shape[1]

        def step(carry: Any, block: Any) -> tuple[Any, None]:
            e, start, mine = block

            def compute(carry: Any) -> Any:
                of_x, of_weights, of_expert, of_leaves, last = carry
                at = choices(by, start, mine)
                _, pull = jax.vjp(applied, rows_of(weights.reshape(-1), at), rows_of(x, at // k), of(e, leaves))
                to_weights, to_x, to_expert = pull(rows_of(given, at // k))
                # Blocks of one expert follow each other: their sum is kept in float32, and written once more with each.
                of_expert = [
                    jnp.where(e == last, sum_, first.astype(sum_.dtype)) + new.astype(sum_.dtype)
                    for sum_, first, new in zip(of_expert, of(e, of_leaves), to_expert, strict=True)
                ]
                of_leaves = [
                    jax.lax.dynamic_update_index_in_dim(leaf, sum_.astype(leaf.dtype), e, 0)
                    for leaf, sum_ in zip(of_leaves, of_expert, strict=True)
                ]
                return (
                    of_x.at[at // k].add(to_x.astype(of_x.dtype), mode="drop"),
                    of_weights.at[at].set(to_weights, mode="drop"),
                    of_expert,
                    of_leaves,
                    e,
                )

            return where_needed(mine > 0, compute, carry), None

        start = (
            jnp.zeros(x.shape, wide(x.dtype)),
            jnp.zeros(weights.size, weights.dtype),
            [jnp.zeros(leaf.shape[1:], wide(leaf.dtype)) for leaf in leaves],
            of_first,
            jnp.int32(-1),
        )
        (of_x, of_weights, _, of_leaves, _), _ = jax.lax.scan(step, start, blocks(by, *ids.shape))
        return of_x.astype(x.dtype), None, of_weights.reshape(weights.shape), *of_leaves

    def forward(x: jax.Array, ids: jax.Array, weights: jax.Array, *leaves: jax.Array) -> Any:
        return run(x, ids, weights, *leaves), (x, ids, weights, leaves)

    def part(ranks: int) -> Callable[..., Any]:
        """Of each rank's tokens what its own slots do not hold."""
        return _overflow(expert, tree, slots // ranks, block_size(slots // ranks))

    def spread(ranks: int) -> Callable[..., Any]:
        """On one of so many ranks, which share the experts: each block is of the tokens of all."""
        return rounds(_overflow(expert, tree, 0, block_size(slots * ranks)), slots, ranks)

    # What the route says of ranks holds for this one function.
    name = f"overflow_{next(_numbers)}"
    return route(name, ("rows", "whole"), run, forward, backward, part=part, spread=spread)
