"""Compute the choices that overflow the buffers of experts on other ranks, if none may be dropped: in rounds.

    this rank's tokens          all-to-all    a rank's experts        all-to-all    this rank's tokens
    next S choices for rank 0   --------->    blocks (`overflow.py`)  --------->    add the weighted results
    next S choices for rank 1   [e, S, D]                             [e, S, D']
    ...

All ranks of the axis must run the same number of rounds, or an all-to-all would wait forever. It is the number that the
busiest rank needs, which is known only when the program runs; with a balanced load it is 0. Nothing of a round is saved
for the backward, which runs it again.

Dims: N tokens of this rank, k choices of a token, E experts, e ranks, C slots of an expert, which are filled already, D
features. S = C E / e is the number of choices for one rank in a round.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ....model.permutations import route
from ....program import trip_counts
from .dispatch import combine
from .gather import AXIS
from .tables import Order, accumulation_dtype, inverse, order, rows_of, sum_over_choices


@functools.partial(jax.custom_vjp)
def _tokens_of(x: jax.Array, slot: jax.Array, choice: jax.Array) -> jax.Array:
    """Return the tokens [N, D] of the choices in slots: [e, S, D], zeros in empty slots."""
    return rows_of(x, choice // slot.shape[1])


_tokens_of.defvjp(
    lambda x, slot, choice: (_tokens_of(x, slot, choice), slot),
    lambda slot, cotangent: (sum_over_choices(cotangent, slot), None, None),
)


def most_rounds(tokens: int, k: int, experts: int, ranks: int, slots: int) -> int:
    """Return the largest possible number of rounds.

    It is reached if all choices of a rank's tokens go to one rank's experts: at most min(k, E/e) choices of each token.
    At least C of all these choices have slots.
    """
    local_experts = experts // ranks
    return -(-(tokens * min(k, local_experts) - slots) // (slots * local_experts))


@functools.lru_cache(maxsize=256)
def rounds(overflow: Callable[..., Any], slots: int, ranks: int) -> Callable[..., Any]:
    """Return a function that computes the choices beyond the first C of each rank, in rounds.

    Communicates over `expert`: int32 []; in each round 2 [e, S, D] and int32 [e, S]; in each round of a backward
    4 [e, S, D] (half of them with D' features).

    Args:
      overflow: (x, ids, weights, *leaves) -> (out, *leaves), block by block, for one rank's experts.
      slots: C.
      ranks: e.

    Returns:
      A function of x [N, D], ids int32 [N, k], weights float [N, k] and one rank's leaves [E / e, ...]. It returns the
      weighted sum of the results, [N, D'] in the dtype of the weights, and those leaves, as `overflow` returns them.
    """
    program = OverflowRounds(overflow, slots, ranks)
    return route("rounds", ("rows", "whole"), program.run, program.forward, program.backward)


@dataclass(frozen=True)
class OverflowRounds:
    """The program of `rounds`, whose arguments its attributes are: a loop over the rounds that are needed."""

    overflow: Callable[..., Any]
    slots: int
    ranks: int

    def tables(self, by_expert: Order, ids: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the tables of round `number`, from the sorted choices and the expert of each, `ids` int32 [N, k].

        Returns:
          slot int32 [N, k], the slot of each choice, e S for none; choice int32 [e, S], the choice in each slot, N k
          for none; and for each slot the index of its expert on the receiving rank, int32 [e, S], E / e for none.
        """
        # The choices that overflow to one rank are indexed expert after expert. A round takes the next S of them, and
        # `ends` tells the expert of each.
        local_experts, choices = by_expert.load.size // self.ranks, ids.size
        size = self.slots * local_experts
        num_overflowing = self._num_overflowing(by_expert)
        ends = jnp.cumsum(num_overflowing, axis=1)
        index = number * size + jnp.arange(size, dtype=jnp.int32)  # among all choices that overflow to one rank
        local_expert = (index[None, :, None] >= ends[:, None, :]).sum(axis=-1, dtype=jnp.int32)  # [e, S]
        is_filled = index < ends[:, -1:]
        e = jnp.minimum(local_expert, local_experts - 1)
        expert = e + local_experts * jnp.arange(self.ranks, dtype=jnp.int32)[:, None]
        first_index = jnp.take_along_axis(ends - num_overflowing, e, axis=1)
        positions = jnp.clip(by_expert.start[expert] + self.slots + index - first_index, 0, choices - 1)
        choice = jnp.where(is_filled, by_expert.sorted[positions], choices)
        return inverse(choice, choices).reshape(ids.shape), choice, jnp.where(is_filled, e, local_experts)

    def _num_overflowing(self, by_expert: Order) -> jax.Array:
        """Return the number of choices that overflow each expert, int32 [e, E / e]."""
        return jnp.maximum(by_expert.load - self.slots, 0).reshape(self.ranks, -1)

    def count(self, by_expert: Order) -> jax.Array:
        """Return the number of rounds that the busiest rank needs."""
        num_overflowing = self._num_overflowing(by_expert)
        busiest_load = num_overflowing.sum(axis=1).max()
        # A rank that ran fewer rounds would leave the others waiting in an all-to-all.
        return lax.pmax(-(-busiest_load // (self.slots * num_overflowing.shape[1])), AXIS)

    def loop(self, step: Callable[[jax.Array, Any], Any], carry: Any, by_expert: Order, ids: jax.Array) -> Any:
        """Run `step` for each round that the busiest rank needs, on all ranks."""
        tokens, k = ids.shape
        most = most_rounds(tokens, k, by_expert.load.size, self.ranks, self.slots)
        return loop_over_overflow(self.count(by_expert), most, step, carry)

    def run_one(
        self, by_expert: Order, ids: jax.Array, number: jax.Array, x: jax.Array, weights: jax.Array, leaves: Any
    ) -> Any:
        """Run one round: send choices, compute them, send the results back, add them up. Also return the leaves."""
        slot, choice, local_ids = self.tables(by_expert, ids, number)
        rows, local_ids = _all_to_all(_tokens_of(x, slot, choice)), _all_to_all(local_ids)
        # The weights are applied by `combine`, on the rank of the tokens.
        unit_weights = jnp.ones((rows.shape[0] * rows.shape[1], 1), weights.dtype)
        flat_rows, flat_ids = rows.reshape(-1, rows.shape[-1]), local_ids.reshape(-1, 1)
        results, *leaves = self.overflow(flat_rows, flat_ids, unit_weights, *leaves)
        results = _all_to_all(results.astype(x.dtype).reshape(*rows.shape[:2], -1))
        return combine(slot, results, weights, choice), leaves

    def run(self, x: jax.Array, ids: jax.Array, weights: jax.Array, *leaves: jax.Array) -> tuple[jax.Array, ...]:
        """Run the rounds that are needed."""
        by_expert = order(ids, None, leaves[0].shape[0] * self.ranks)
        step = lambda number, total: total + self.run_one(by_expert, ids, number, x, weights, leaves)[0]
        width = jax.eval_shape(self.overflow, x, ids, weights, *leaves)[0].shape[-1]
        zeros = jnp.zeros((x.shape[0], width), weights.dtype)
        return self.loop(step, zeros, by_expert, ids), *leaves

    def forward(self, x: jax.Array, ids: jax.Array, weights: jax.Array, *leaves: jax.Array) -> Any:
        """Return the results of `run`, and the inputs as residuals."""
        return self.run(x, ids, weights, *leaves), (x, ids, weights, leaves)

    def backward(self, saved: Any, cotangents: Any) -> Any:
        """Return the cotangents of the inputs of `run`: the same loop runs each round again, and its derivative."""
        (x, ids, weights, leaves), (cotangent, *leaf_cotangents) = saved, cotangents
        by_expert = order(ids, None, leaves[0].shape[0] * self.ranks)

        def step(number: jax.Array, carry: Any) -> Any:
            grad_x, grad_weights, grad_leaves = carry
            one_round = lambda x, weights, leaves: self.run_one(by_expert, ids, number, x, weights, leaves)
            # The leaves pass through a round: their cotangents come out with the round's gradient added.
            _, pull = jax.vjp(one_round, x, weights, list(leaves))
            round_grad_x, round_grad_weights, grad_leaves = pull((cotangent, grad_leaves))
            return grad_x + round_grad_x.astype(grad_x.dtype), grad_weights + round_grad_weights, grad_leaves

        start = jnp.zeros(x.shape, accumulation_dtype(x.dtype)), jnp.zeros_like(weights), list(leaf_cotangents)
        grad_x, grad_weights, grad_leaves = self.loop(step, start, by_expert, ids)
        return grad_x.astype(x.dtype), None, grad_weights, *grad_leaves


def _all_to_all(x: jax.Array) -> jax.Array:
    """Send row r of [e, ...] to rank r."""
    return lax.all_to_all(x, AXIS, 0, 0, tiled=True)


def loop_over_overflow(count: jax.Array, most: int, step: Callable[[jax.Array, Any], Any], carry: Any) -> Any:
    """Return the carry after `step(number, carry)` for number = 0 .. count - 1, int32 [].

    The scope's name tells readers of compiled programs that there are at most `most` iterations, and rarely any.
    """
    # A scan over all possible iterations with a conditional in it would copy the carry twice in each of them: XLA's
    # conditional does not write in place. The carry has the gradients of all experts.
    with jax.named_scope(trip_counts.overflow_name(most)):
        return lax.fori_loop(0, count, step, carry)
