"""What finds no slot in an expert's buffer, where experts are split over ranks and nothing may be dropped: in rounds.

In a round each rank sends at most S choices to each rank, those of its experts that come next, by an all-to-all of
[e, S, D]; who gets them computes them block by block (`overflow.py`), and sends the results back. All ranks of the axis
run as many rounds as the one that needs most, which is known when the program runs: with balanced experts none. Nothing
of a round is kept for the backward pass, which runs it again.

Dims: N tokens of this rank, k choices of a token, E experts, e ranks, C slots of an expert that are filled already, S
choices that go to one rank in a round, D features.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ....model.permutations import route
from ....program import trip_counts
from .dispatch import combine
from .gather import AXIS
from .tables import Order, order, rows_of, summed, wide


@functools.partial(jax.custom_vjp)
def _taken(x: jax.Array, slot: jax.Array, choice: jax.Array) -> jax.Array:
    """The tokens [N, D] of the choices in slots [e, S]: [e, S, D], zeros in empty ones."""
    return rows_of(x, choice // slot.shape[1])


_taken.defvjp(
    lambda x, slot, choice: (_taken(x, slot, choice), slot),
    lambda slot, given: (summed(given, slot), None, None),
)


def most_rounds(tokens: int, k: int, experts: int, ranks: int, slots: int) -> int:
    """The most rounds of S = C E / e choices that there can be: all choices of a rank's tokens go to one rank's
    experts, where at least one has filled its slots.
    """
    per = experts // ranks
    return -(-(tokens * min(k, per) - slots) // (slots * per))


@functools.lru_cache(maxsize=256)
def rounds(overflow: Callable[..., Any], slots: int, ranks: int) -> Callable[..., Any]:
    """A function of x [N, D], ids int32 [N, k], weights float [N, k] and one rank's leaves [E / e, ...]: what experts
    make of the choices beyond their first C of each rank, weighted and added up, [N, D'] in the dtype of the weights;
    and those leaves, as `overflow` returns them. Communicates over `expert`: int32 [], and in each round 2 [e, S, D]
    and int32 [e, S]; in a backward 4 [e, S, D] (half of them of D').

    Args:
      overflow: (x, ids, weights, *leaves) -> (out, *leaves), block by block, of one rank's experts.
      slots: C.
      ranks: e.
    """

    def places(by: Order, ids: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Of a round the slot of each choice, int32 [N, k], e S for none; the choice in each slot, int32 [e, S], N k
        for none; and which of its rank's experts it is for, E / e for none.
        """
        per, choices = by.load.size // ranks, ids.size
        size = slots * per
        beyond = jnp.maximum(by.load - slots, 0).reshape(ranks, per)
        ends = jnp.cumsum(beyond, axis=1)
        at = number * size + jnp.arange(size, dtype=jnp.int32)  # of those that go to one rank
        mine = (at[None, :, None] >= ends[:, None, :]).sum(axis=-1, dtype=jnp.int32)  # [e, S]
        there = at < ends[:, -1:]
        e = jnp.minimum(mine, per - 1)
        every = e + per * jnp.arange(ranks, dtype=jnp.int32)[:, None]
        begins = jnp.take_along_axis(ends - beyond, e, axis=1)
        sorted_at = jnp.clip(by.start[every] + slots + at - begins, 0, choices - 1)
        choice = jnp.where(there, by.sorted[sorted_at], choices)
        slot = jnp.full(choices + 1, ranks * size, jnp.int32)
        slot = slot.at[choice.reshape(-1)].set(jnp.arange(ranks * size, dtype=jnp.int32))
        return slot[:choices].reshape(ids.shape), choice, jnp.where(there, e, per)

    def needed(by: Order) -> jax.Array:
        """The rounds that the rank that needs most needs."""
        per = by.load.size // ranks
        most = jnp.maximum(by.load - slots, 0).reshape(ranks, per).sum(axis=1).max()
        return lax.pmax(-(-most // (slots * per)), AXIS)

    def exchanged(x: jax.Array) -> jax.Array:
        return lax.all_to_all(x, AXIS, 0, 0, tiled=True)

    def one(by: Order, ids: jax.Array, number: jax.Array, x: jax.Array, weights: jax.Array, leaves: Any) -> Any:
        slot, choice, of = places(by, ids, number)
        rows, of = exchanged(_taken(x, slot, choice)), exchanged(of)
        ones = jnp.ones((rows.shape[0] * rows.shape[1], 1), weights.dtype)
        out, *leaves = overflow(rows.reshape(-1, rows.shape[-1]), of.reshape(-1, 1), ones, *leaves)
        out = exchanged(out.astype(x.dtype).reshape(*rows.shape[:2], -1))
        return combine(slot, out, weights, choice), leaves

    def numbers(x: jax.Array, ids: jax.Array, experts: int) -> jax.Array:
        return jnp.arange(most_rounds(x.shape[0], ids.shape[1], experts, ranks, slots), dtype=jnp.int32)

    def run(x: jax.Array, ids: jax.Array, weights: jax.Array, *leaves: jax.Array) -> tuple[jax.Array, ...]:
        experts = leaves[0].shape[0] * ranks
        by = order(ids, None, experts)
        count = needed(by)

        def step(total: jax.Array, number: jax.Array) -> tuple[jax.Array, None]:
            compute = lambda total: total + one(by, ids, number, x, weights, leaves)[0]
            return where_needed(number < count, compute, total), None

        width = jax.eval_shape(overflow, x, ids, weights, *leaves)[0].shape[-1]
        start = jnp.zeros((x.shape[0], width), weights.dtype)
        return lax.scan(step, start, numbers(x, ids, experts))[0], *leaves

    def backward(saved: Any, cotangents: Any) -> Any:
        (x, ids, weights, leaves), (given, *of_first) = saved, cotangents
        experts = leaves[0].shape[0] * ranks
        by = order(ids, None, experts)
        count = needed(by)

        def step(carry: Any, number: jax.Array) -> tuple[Any, None]:
            def compute(carry: Any) -> Any:
                of_x, of_weights, of_leaves = carry
                again = lambda x, weights, leaves: one(by, ids, number, x, weights, leaves)
                _, pull = jax.vjp(again, x, weights, list(leaves))
                to_x, to_weights, of_leaves = pull((given, of_leaves))
                return of_x + to_x.astype(of_x.dtype), of_weights + to_weights, of_leaves

            return where_needed(number < count, compute, carry), None

        start = jnp.zeros(x.shape, wide(x.dtype)), jnp.zeros_like(weights), list(of_first)
        (of_x, of_weights, of_leaves), _ = lax.scan(step, start, numbers(x, ids, experts))
        return of_x.astype(x.dtype), None, of_weights, *of_leaves

    def forward(x: jax.Array, ids: jax.Array, weights: jax.Array, *leaves: jax.Array) -> Any:
        return run(x, ids, weights, *leaves), (x, ids, weights, leaves)

    return route("rounds", ("rows", "whole"), run, forward, backward)


def where_needed(needed: jax.Array, compute: Callable[[Any], Any], carry: Any) -> Any:
    """`compute(carry)` where `needed`, bool [], else `carry`; named for readers of programs as overflow of experts."""
    with jax.named_scope(trip_counts.OVERFLOW):
        return jax.lax.cond(needed, compute, lambda carry: carry, carry)
