"""Tokens to the ranks of their experts, and back, where a token has as many experts as there are ranks: all tokens go
to all ranks, each of which looks up those of its experts. What comes back to a token is one sum from each rank.

Of k choices a token sends itself to e ranks once, and not k times; so fewer bytes, 2 (e - 1) T D in place of
2 E C D (e - 1)/e, where e T < E C. Buffers and what is in them are those of the exchange (`dispatch.py`): a rank has
the slots of all ranks for its experts, [E/e, e C, D].

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
from .tables import added, places, rows_of, summed, wide

AXIS = "expert"


def fewer(tokens: int, buffers: tuple[int, ...], ranks: int) -> bool:
    """Whether T tokens of each rank are fewer to gather than buffers [E, C, D] to exchange."""
    return buffers[0] % ranks == 0 and ranks * tokens < buffers[0] * buffers[1]


def _all(x: jax.Array) -> jax.Array:
    """[T, ..] of each rank: [e, T, ..]."""
    return lax.all_gather(x, AXIS)


def _own(table: jax.Array) -> jax.Array:
    """A table [E, C, ..] of each rank, as [E/e, e, C, ..] of this rank's experts."""
    ranks = lax.axis_size(AXIS)
    per = table.shape[0] // ranks
    return lax.all_to_all(table.reshape(ranks, per, *table.shape[1:]), AXIS, 0, 1, tiled=False)


def _theirs(table: jax.Array) -> jax.Array:
    """The reverse: [E/e, e, C] as [E, C]."""
    back = lax.all_to_all(table, AXIS, 1, 0, tiled=False)
    return back.reshape(-1, *back.shape[2:])


def _sums(parts: jax.Array) -> jax.Array:
    """[e, T, D], a part from every rank -> [T, D], their sum in float32 or wider, unlike a reduce-scatter's."""
    return lax.all_to_all(parts, AXIS, 0, 0, tiled=True).astype(wide(parts.dtype)).sum(axis=0)


def _slots(slot: jax.Array, experts: int, slots: int, ranks: int) -> jax.Array:
    """Slots [e, T, k], 0 to E C, of all ranks as this rank's buffers number them; beyond these where elsewhere."""
    per, each = experts // ranks, slots * ranks
    mine = slot // slots - lax.axis_index(AXIS) * per
    rank = jnp.arange(ranks, dtype=slot.dtype)[:, None, None]
    here = (slot < experts * slots) & (mine >= 0) & (mine < per)
    return jnp.where(here, mine * each + rank * slots + slot % slots, per * each)


def _tokens(choice: jax.Array, tokens: int, k: int) -> jax.Array:
    """Tokens of all ranks, 0 to e T, in this rank's slots [E/e, e C]; e T where there is none."""
    own = _own(choice)  # [E/e, e, C]
    ranks = own.shape[1]
    first = tokens * jnp.arange(ranks, dtype=choice.dtype)[:, None]
    at = jnp.where(own < tokens * k, own // k + first, ranks * tokens)
    return at.reshape(own.shape[0], -1)


@functools.lru_cache(maxsize=256)
def dispatch(experts: int, slots: int, groups: int, by_weight: bool, ranks: int) -> Callable[..., Any]:
    """A function of x [T, D], ids int32 and weights float [T, k]: as `dispatch.dispatch`, but the buffers of this
    rank's experts, [E/e, e C, D]. Communicates over `expert`: x gathered, and int32 [E, C]; backwards as many bytes,
    and int32 [T, k].
    """

    def run(x: jax.Array, ids: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        slot, choice = places(ids, weights, experts, slots, groups, by_weight)
        rows = rows_of(_all(x).reshape(-1, x.shape[-1]), _tokens(choice, *ids.shape))
        return rows, slot, choice

    def forward(*given: jax.Array) -> tuple[Any, Any]:
        out = run(*given)
        return out, out[1]

    def backward(slot: jax.Array, given: tuple[jax.Array, Any, Any]) -> tuple[Any, Any, Any]:
        at = _slots(_all(slot), experts, slots, ranks)
        parts = summed(given[0], at.reshape(-1, slot.shape[1]))
        return _sums(parts.reshape(ranks, -1, parts.shape[-1])).astype(parts.dtype), None, None

    return route("gathered_dispatch", ("routed", "rows", "routed"), run, forward, backward)


@functools.lru_cache(maxsize=256)
def combine(ranks: int) -> Callable[..., Any]:
    """A function of slot [T, k], out [E/e, e C, D], weights [T, k] and choice [E, C]: as `dispatch.combine`, from the
    buffers of this rank's experts. Communicates over `expert`: a sum [T, D] of each rank for each, in the dtype of
    `out`, int32 and float [T, k]; backwards as many bytes, and 3 times [E, C].
    """

    def run(slot: jax.Array, out: jax.Array, weights: jax.Array, choice: jax.Array) -> jax.Array:
        experts, slots = choice.shape
        at, every = _slots(_all(slot), experts, slots, ranks), _all(weights)
        flat, k = out.reshape(-1, out.shape[-1]), slot.shape[1]
        parts = added(every[..., j, None] * rows_of(flat, at[..., j]).astype(weights.dtype) for j in range(k))
        return _sums(parts.astype(out.dtype)).astype(weights.dtype)

    def backward(saved: tuple[jax.Array, ...], given: jax.Array) -> tuple[Any, Any, Any, Any]:
        slot, out, weights, choice = saved
        (tokens, k), (experts, slots) = slot.shape, choice.shape
        every = _all(given.astype(out.dtype)).reshape(-1, given.shape[-1]).astype(given.dtype)
        theirs = rows_of(every, _tokens(choice, tokens, k))  # [E/e, e C, D]
        of_slots = _own(rows_of(weights.reshape(-1), choice)).reshape(theirs.shape[:2])
        to_slots = (theirs * out.astype(given.dtype)).sum(axis=-1)
        back = _theirs(to_slots.reshape(experts // ranks, ranks, slots))
        of_weights = rows_of(back.reshape(-1), slot)
        return None, (of_slots[..., None] * theirs).astype(out.dtype), of_weights, None

    return route("gathered_combine", ("rows",), run, lambda *given: (run(*given), given), backward)
