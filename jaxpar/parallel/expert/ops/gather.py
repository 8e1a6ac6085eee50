"""Dispatch and combine for expert ranks, where every rank gathers the tokens of all ranks.

If a token chooses about as many experts as there are ranks, most ranks need it. An all-gather then sends it to each
rank once, and not k times in all. Each rank looks up the tokens of its experts, and returns one sum for each token:

    exchange of buffers (`dispatch.py`)   2 E C D (e - 1)/e   elements sent per rank, forwards
    gathering all tokens                  2 T D (e - 1)       fewer if e T < E C

The buffers have the same contents as after an exchange: the slots of all ranks for a rank's experts, [E/e, e C, D].

Dims: T tokens of a rank, k choices of a token, E experts, e ranks, C slots of an expert for the tokens of one rank, D
features.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ....model.permutations import route
from .tables import accumulation_dtype, add_all, grouped_tables, rows_of, sum_over_choices

AXIS = "expert"


def gathering_sends_less(tokens: int, buffers: tuple[int, ...], ranks: int) -> bool:
    """Whether gathering T tokens of each rank sends less than exchanging buffers [E, C, D]."""
    return buffers[0] % ranks == 0 and ranks * tokens < buffers[0] * buffers[1]


def _all_gather(x: jax.Array) -> jax.Array:
    """Gather the [T, ..] of each rank as [e, T, ..]."""
    return lax.all_gather(x, AXIS)


def _to_experts(table: jax.Array) -> jax.Array:
    """Exchange a table [E, C, ..] of each rank: returns [E/e, e, C, ..], all ranks' slots of this rank's experts."""
    # Expert r E/e + i is expert i of rank r.
    ranks = lax.axis_size(AXIS)
    local_experts = table.shape[0] // ranks
    return lax.all_to_all(table.reshape(ranks, local_experts, *table.shape[1:]), AXIS, 0, 1, tiled=False)


def _to_tokens(table: jax.Array) -> jax.Array:
    """Undo `_to_experts`: [E/e, e, C] -> [E, C]."""
    by_rank = lax.all_to_all(table, AXIS, 1, 0, tiled=False)
    return by_rank.reshape(-1, *by_rank.shape[2:])


def _reduce_scatter(parts: jax.Array) -> jax.Array:
    """Reduce-scatter partial sums, one from every rank, to this rank's tokens: [e, T, D] -> [T, D].

    It is an all-to-all and a local sum in float32 or wider; `psum_scatter` would sum in the dtype of the parts.
    """
    return lax.all_to_all(parts, AXIS, 0, 0, tiled=True).astype(accumulation_dtype(parts.dtype)).sum(axis=0)


def _local_slots(slot: jax.Array, experts: int, slots: int, ranks: int) -> jax.Array:
    """Renumber the slots of all ranks for this rank's buffers.

    Args:
      slot: [e, T, k], numbers 0 to E C of each rank's own table.
      experts, slots, ranks: E, C, e.

    Returns:
      [e, T, k], numbers in this rank's buffers [E/e, e C]; E C for slots of other ranks' experts.
    """
    # Slot c of expert i has number i C + c on the rank of its token. Here it has number (i' e + rank) C + c, where i'
    # is the index of the expert among this rank's.
    local_experts, local_slots = experts // ranks, slots * ranks
    local_expert = slot // slots - lax.axis_index(AXIS) * local_experts
    rank = jnp.arange(ranks, dtype=slot.dtype)[:, None, None]
    is_local = (slot < experts * slots) & (local_expert >= 0) & (local_expert < local_experts)
    return jnp.where(is_local, local_expert * local_slots + rank * slots + slot % slots, local_experts * local_slots)


def _tokens_in_slots(choice: jax.Array, tokens: int, k: int) -> jax.Array:
    """Return the token in each slot of this rank's buffers.

    Args:
      choice: the table of this rank's tokens, [E, C].
      tokens, k: T and the choices of a token.

    Returns:
      [E/e, e C], numbers 0 to e T - 1 of the tokens of all ranks; e T for an empty slot.
    """
    # Tokens of rank r are numbered from r T on.
    local_choice = _to_experts(choice)  # [E/e, e, C]
    ranks = local_choice.shape[1]
    first_token = tokens * jnp.arange(ranks, dtype=choice.dtype)[:, None]
    token = jnp.where(local_choice < tokens * k, local_choice // k + first_token, ranks * tokens)
    return token.reshape(local_choice.shape[0], -1)


@functools.lru_cache(maxsize=256)
def dispatch(experts: int, slots: int, groups: int, by_weight: bool, ranks: int) -> Callable[..., Any]:
    """Return `dispatch.dispatch` for one rank, with the buffers of its experts alone, [E/e, e C, D].

    Communicates over `expert`: an all-gather of x, and an all-to-all of int32 [E, C]; in the backward as many bytes,
    and int32 [T, k].

    Args:
      experts, slots, groups, by_weight: as for `dispatch.dispatch`.
      ranks: e.

    Returns:
      A function of this rank's x [T, D], ids int32 [T, k] and weights float [T, k].
    """

    def gather_and_dispatch(x: jax.Array, ids: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        slot, choice = grouped_tables(ids, weights, experts, slots, groups, by_weight)
        rows = rows_of(_all_gather(x).reshape(-1, x.shape[-1]), _tokens_in_slots(choice, *ids.shape))
        return rows, slot, choice

    def forward(*arrays: jax.Array) -> tuple[Any, Any]:
        result = gather_and_dispatch(*arrays)
        return result, result[1]

    def backward(slot: jax.Array, cotangents: tuple[jax.Array, Any, Any]) -> tuple[Any, Any, Any]:
        # Every rank sums the cotangents in its slots for each token of every rank, and sends the sums to their ranks.
        local_slot = _local_slots(_all_gather(slot), experts, slots, ranks)
        parts = sum_over_choices(cotangents[0], local_slot.reshape(-1, slot.shape[1]))
        return _reduce_scatter(parts.reshape(ranks, -1, parts.shape[-1])).astype(parts.dtype), None, None

    return route("gathered_dispatch", ("routed", "rows", "routed"), gather_and_dispatch, forward, backward)


@functools.lru_cache(maxsize=256)
def combine(ranks: int) -> Callable[..., Any]:
    """Return `dispatch.combine` for one of `ranks` = e ranks, from the buffers of its experts alone.

    Communicates over `expert`: an all-to-all of sums [e, T, D] in the dtype of `out`, and all-gathers of int32 and
    float [T, k]; in the backward as many bytes, and 3 times [E, C].

    Returns:
      A function of slot [T, k], out [E/e, e C, D], weights [T, k] and choice [E, C], with result [T, D].
    """

    def combine_and_scatter(slot: jax.Array, out: jax.Array, weights: jax.Array, choice: jax.Array) -> jax.Array:
        experts, slots = choice.shape
        local_slot, all_weights = _local_slots(_all_gather(slot), experts, slots, ranks), _all_gather(weights)
        # Weight and add up the results of this rank's experts before they are sent: [e, T, D] instead of [E/e, e C, D].
        flat, k = out.reshape(-1, out.shape[-1]), slot.shape[1]
        partial_sums = add_all(
            all_weights[..., j, None] * rows_of(flat, local_slot[..., j]).astype(weights.dtype) for j in range(k)
        )
        # Sent in the dtype of the experts' results, and summed in float32.
        return _reduce_scatter(partial_sums.astype(out.dtype)).astype(weights.dtype)

    def backward(saved: tuple[jax.Array, ...], cotangent: jax.Array) -> tuple[Any, Any, Any, Any]:
        slot, out, weights, choice = saved
        (tokens, k), (experts, slots) = slot.shape, choice.shape
        # Sent in the dtype of the experts' results, as in the forward.
        all_cotangents = (
            _all_gather(cotangent.astype(out.dtype)).reshape(-1, cotangent.shape[-1]).astype(cotangent.dtype)
        )
        slot_cotangents = rows_of(all_cotangents, _tokens_in_slots(choice, tokens, k))  # [E/e, e C, D]
        # The rank of the tokens knows the weights, and receives their gradient: one number for each slot, both ways.
        slot_weights = _to_experts(rows_of(weights.reshape(-1), choice)).reshape(slot_cotangents.shape[:2])
        grad_slot_weights = (slot_cotangents * out.astype(cotangent.dtype)).sum(axis=-1)
        grad_own_slots = _to_tokens(grad_slot_weights.reshape(experts // ranks, ranks, slots))
        grad_weights = rows_of(grad_own_slots.reshape(-1), slot)
        return None, (slot_weights[..., None] * slot_cotangents).astype(out.dtype), grad_weights, None

    return route(
        "gathered_combine",
        ("rows",),
        combine_and_scatter,
        lambda *arrays: (combine_and_scatter(*arrays), arrays),
        backward,
    )
