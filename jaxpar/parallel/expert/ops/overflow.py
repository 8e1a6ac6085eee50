"""Compute the choices that find no slot in an expert's buffer, if none may be dropped: in blocks of one expert each.

    choices of expert e, sorted:   | first C: in its buffer | block | block | block .. |
                                   by_expert.start[e]

The number of blocks is known only when the program runs: it loops over those that are needed. Nothing of a block is
saved for the backward, which computes it again.

Dims: N tokens, k choices of a token, E experts, C slots of an expert, b tokens of a block, D features.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from ....model.permutations import route
from .rounds import loop_over_overflow, rounds
from .tables import Order, accumulation_dtype, order, rows_of

_numbers = itertools.count()
Expert = Callable[[Any, jax.Array], jax.Array]


def block_size(slots: int) -> int:
    """Return b, a quarter of a buffer: the last block of an expert is half empty on average.

    It is at least 128 rows, or the whole buffer if that is smaller: a GPU's matmul of fewer rows is no faster.
    """
    return min(slots, max(128, -(-slots // 4)))


def most_blocks(tokens: int, k: int, experts: int, slots: int, size: int) -> int:
    """Return the largest possible number of blocks.

    If m experts have more than C choices each, their blocks are full except for the last: at most
    floor((N k - C m) / b) + m. An expert has at most N choices: at most m ceil((N - C) / b).
    """
    per_expert, overflow_of = -(-(tokens - slots) // size), lambda m: tokens * k - slots * m
    return max(
        (min(m * per_expert, overflow_of(m) // size + m) for m in range(1, experts + 1) if overflow_of(m) > 0),
        default=0,
    )


def overflow(
    expert: Expert, x: jax.Array, ids: jax.Array, weights: jax.Array, leaves: Any, slots: int
) -> tuple[jax.Array, Any]:
    """Compute the choices beyond the first C of each expert, by position, and return their weighted sum and the leaves.

    Whoever computes the first C must read the returned leaves. The backward then gets their cotangents here, and adds
    the gradient of each block to them in place. Otherwise there would be two gradients of all experts, one of them
    mostly zero.

    Args:
      expert: (one expert's leaves, [b, D]) -> [b, D'].
      x: [N, D].
      ids, weights: int32 and float [N, k].
      leaves: a tree of [E, ...].
      slots: C.

    Returns:
      [N, D'] in the dtype of the weights, and `leaves`.
    """
    flat, tree = jax.tree.flatten(leaves)
    result, *flat = overflow_route(OverflowBlocks(expert, tree, slots, block_size(slots)))(x, ids, weights, *flat)
    return result, jax.tree.unflatten(tree, flat)


@dataclass(frozen=True)
class OverflowBlocks:
    """The program of `overflow` on flat leaves: a loop over blocks.

    Attributes:
      expert: as for `overflow`.
      tree: the structure of the leaves.
      slots: C.
      size: b.
    """

    expert: Expert
    tree: Any
    slots: int
    size: int

    def loop(self, step: Callable[[Any, Any], Any], carry: Any, by_expert: Order, n: int, k: int) -> Any:
        """Run `step(block, carry)` for each block that is needed.

        A block is its expert, its first position in the sorted choices, and its number of choices, all int32 [].
        """
        # Blocks are numbered expert after expert: block j belongs to the first expert whose blocks end after it.
        slots, size = self.slots, self.size
        num_overflowing = jnp.maximum(by_expert.load - slots, 0)
        num_blocks = (num_overflowing + size - 1) // size
        ends = jnp.cumsum(num_blocks)

        def step_of_number(j: jax.Array, carry: Any) -> Any:
            e = (j >= ends).sum(dtype=jnp.int32)
            offset = (j - (ends - num_blocks)[e]) * size
            block = e, by_expert.start[e] + slots + offset, jnp.minimum(num_overflowing[e] - offset, size)
            return step(block, carry)

        most = most_blocks(n, k, by_expert.load.size, slots, size)
        return loop_over_overflow(ends[-1], most, step_of_number, carry)

    def choices(self, by_expert: Order, start: jax.Array, count: jax.Array) -> jax.Array:
        """Return the choices of a block, [b]; N k beyond its `count`."""
        rank = jnp.arange(self.size, dtype=jnp.int32)
        # Beyond its count a block reads some other choice, which the next line replaces.
        positions = jnp.minimum(start + rank, by_expert.sorted.size - 1)
        return jnp.where(rank < count, by_expert.sorted[positions], by_expert.sorted.size)

    def weighted_expert(self, weights: jax.Array, rows: jax.Array, leaves: Any) -> jax.Array:
        """Compute rows by one expert, weighted: [b, D] -> [b, D']."""
        return weights[:, None] * self.expert(jax.tree.unflatten(self.tree, leaves), rows).astype(weights.dtype)

    def run(self, x: jax.Array, ids: jax.Array, weights: jax.Array, *leaves: jax.Array) -> tuple[jax.Array, ...]:
        """Compute the blocks one after the other, and add the results of each to its tokens."""
        by_expert, k = order(ids, None, leaves[0].shape[0]), ids.shape[1]

        def step(block: Any, total: jax.Array) -> jax.Array:
            e, start, count = block
            choices = self.choices(by_expert, start, count)
            block_weights, rows = rows_of(weights.reshape(-1), choices), rows_of(x, choices // k)
            result = self.weighted_expert(block_weights, rows, _leaves_of(e, leaves))
            # Token N, of the choice N k, is beyond the last one, and is dropped.
            return total.at[choices // k].add(result, mode="drop")

        # D' is known only by tracing the expert on one row.
        one_row = lambda x, leaves: self.weighted_expert(weights[:1, 0], x[:1], _leaves_of(by_expert.load[0], leaves))
        width = jax.eval_shape(one_row, x, leaves).shape[-1]
        zeros = jnp.zeros((x.shape[0], width), weights.dtype)
        return self.loop(step, zeros, by_expert, *ids.shape), *leaves

    def forward(self, x: jax.Array, ids: jax.Array, weights: jax.Array, *leaves: jax.Array) -> Any:
        """Return the results of `run`, and the inputs as residuals."""
        return self.run(x, ids, weights, *leaves), (x, ids, weights, leaves)

    def backward(self, saved: Any, cotangents: Any) -> Any:
        """Return the cotangents of the inputs of `run`: the same loop computes each block again, and its cotangents."""
        (x, ids, weights, leaves), (cotangent, *leaf_cotangents) = saved, cotangents
        by_expert, k = order(ids, None, leaves[0].shape[0]), ids.shape[1]

        def step(block: Any, carry: Any) -> Any:
            e, start, count = block
            grad_x, grad_weights, grad_expert, grad_leaves, previous_expert = carry
            choices = self.choices(by_expert, start, count)
            block_weights, rows = rows_of(weights.reshape(-1), choices), rows_of(x, choices // k)
            _, pull = jax.vjp(self.weighted_expert, block_weights, rows, _leaves_of(e, leaves))
            block_grad_weights, block_grad_x, block_grad_expert = pull(rows_of(cotangent, choices // k))
            # Blocks of one expert follow each other. Their sum stays in float32 in the carry, and every block
            # rounds it anew into the leaf's gradient, so that rounding errors do not add up.
            grad_expert = [
                jnp.where(e == previous_expert, total, leaf_grad.astype(total.dtype)) + block_grad.astype(total.dtype)
                for total, leaf_grad, block_grad in zip(
                    grad_expert, _leaves_of(e, grad_leaves), block_grad_expert, strict=True
                )
            ]
            grad_leaves = [
                jax.lax.dynamic_update_index_in_dim(leaf, total.astype(leaf.dtype), e, 0)
                for leaf, total in zip(grad_leaves, grad_expert, strict=True)
            ]
            grad_x = grad_x.at[choices // k].add(block_grad_x.astype(grad_x.dtype), mode="drop")
            grad_weights = grad_weights.at[choices].set(block_grad_weights, mode="drop")
            return grad_x, grad_weights, grad_expert, grad_leaves, e

        start = (
            jnp.zeros(x.shape, accumulation_dtype(x.dtype)),
            jnp.zeros(weights.size, weights.dtype),
            [jnp.zeros(leaf.shape[1:], accumulation_dtype(leaf.dtype)) for leaf in leaves],
            leaf_cotangents,
            jnp.int32(-1),
        )
        grad_x, grad_weights, _, grad_leaves, _ = self.loop(step, start, by_expert, *ids.shape)
        return grad_x.astype(x.dtype), None, grad_weights.reshape(weights.shape), *grad_leaves

    def part(self, ranks: int) -> Callable[..., Any]:
        """Return the function for one rank's tokens: they overflow its own C / ranks slots."""
        slots = self.slots // ranks
        return overflow_route(replace(self, slots=slots, size=block_size(slots)))

    def spread(self, ranks: int) -> Callable[..., Any]:
        """Return the function for one rank's experts: its blocks have tokens of all ranks, which come in rounds."""
        received = replace(self, slots=0, size=block_size(self.slots * ranks))
        return rounds(overflow_route(received), self.slots, ranks)


@functools.lru_cache(maxsize=256)
def overflow_route(blocks: OverflowBlocks) -> Callable[..., Any]:
    """Return `blocks` as a route; cached, since equal arguments must give the same function."""
    # `part` and `spread` belong to this function alone, so that its route needs a unique name.
    name = f"overflow_{next(_numbers)}"
    outs = "rows", "whole"
    return route(name, outs, blocks.run, blocks.forward, blocks.backward, part=blocks.part, spread=blocks.spread)


def _leaves_of(e: jax.Array, leaves: Any) -> Any:
    """Return the leaves of expert `e`."""
    return [jax.lax.dynamic_index_in_dim(leaf, e, keepdims=False) for leaf in leaves]
