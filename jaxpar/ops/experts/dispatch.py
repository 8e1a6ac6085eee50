"""Tokens to buffers of their experts, and back. Each is a lookup, forwards and backwards.

A choice is a token's n-th expert. Choices are sorted by expert, so that those of one expert lie together; the first C
of each get a slot in its buffer. Two tables say it all: the slot of each choice, and the choice in each slot. Their
lookups are each other's transposes, so that no direction adds up at computed places (which GPUs do in any order).

Dims: N tokens, k choices of a token, E experts, C slots of an expert, D features.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..routes import route


class Order(NamedTuple):
    """Choices by expert: `sorted` int32 [N k], the choices of expert 0, then of expert 1, ...; `start` and `load` int32
    [E], where those of each expert start, and how many they are.
    """

    sorted: jax.Array
    start: jax.Array
    load: jax.Array


def order(ids: jax.Array, weights: jax.Array | None, experts: int) -> Order:
    """The choices [N, k] by expert; of one expert by falling weight, or, without weights, by position."""
    flat = ids.reshape(-1)
    at = jnp.arange(flat.size, dtype=jnp.int32)
    keys = (flat, at) if weights is None else (flat, -weights.reshape(-1), at)
    found = jax.lax.sort(keys, num_keys=len(keys))[-1]
    load = (flat[:, None] == jnp.arange(experts)).sum(axis=0, dtype=jnp.int32)
    return Order(found, jnp.cumsum(load) - load, load)


def tables(by: Order, slots: int) -> tuple[jax.Array, jax.Array]:
    """The slot of each choice, int32 [N k] in 0 to E C, E C where it has none; the choice in each slot, int32 [E, C] in
    0 to N k, N k where there is none.
    """
    choices, experts = by.sorted.size, by.load.size
    rank = jnp.arange(slots, dtype=jnp.int32)
    at = jnp.minimum(by.start[:, None] + rank, choices - 1)
    choice = jnp.where(rank < by.load[:, None], by.sorted[at], choices)
    slot = jnp.full(choices + 1, experts * slots, jnp.int32)
    slot = slot.at[choice.reshape(-1)].set(jnp.arange(experts * slots, dtype=jnp.int32))
    return slot[:choices], choice


def _places(
    ids: jax.Array, weights: jax.Array, experts: int, slots: int, groups: int, by_weight: bool
) -> tuple[jax.Array, jax.Array]:
    """The tables for tokens in groups of their own, each with C / groups slots of every expert, as
    slot [N, k] and choice [E, C].
    """
    n, k = ids.shape
    each, per = slots // groups, n // groups

    def group(ids: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        return tables(order(ids, weights if by_weight else None, experts), each)

    slot, choice = jax.vmap(group)(ids.reshape(groups, per, k), weights.reshape(groups, per, k))
    g = jnp.arange(groups, dtype=jnp.int32)
    slot = jnp.where(
        slot < experts * each, slot // each * slots + g[:, None] * each + slot % each, experts * slots
    ).reshape(n, k)
    choice = jnp.where(choice < per * k, choice + g[:, None, None] * per * k, n * k)
    return slot, choice.swapaxes(0, 1).reshape(experts, slots)


def rows_of(x: jax.Array, at: jax.Array) -> jax.Array:
    """x[at], zeros where `at` is beyond the last."""
    return x.at[at].get(mode="fill", fill_value=0)


def summed(x: jax.Array, slot: jax.Array) -> jax.Array:
    """The sum over a token's choices of what is in their slots: x [.., D], slot [N, k] -> [N, D]."""
    flat = x.reshape(-1, x.shape[-1])
    total = _added(rows_of(flat, slot[:, j]).astype(wide(flat.dtype)) for j in range(slot.shape[1]))
    return total.astype(flat.dtype)


def _added(parts: Iterable[jax.Array]) -> jax.Array:
    return functools.reduce(operator.add, parts)


def wide(dtype: Any) -> Any:
    """What sums of this dtype are made in: float32 or wider."""
    return jnp.promote_types(dtype, jnp.float32)


def dispatch(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    experts: int,
    slots: int,
    groups: int,
    by_weight: bool,
    couples: str,
    drops: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tokens in the buffers of their experts.

    Args:
      x: [N, D].
      ids: int32 [N, k].
      weights: float [N, k]: which choices get a slot, with `by_weight`; no gradient comes from that.
      slots: C, a multiple of `groups`, which are equal parts of the tokens with slots of their own.
      couples: what of it depends on other rows, if anything does.
      drops: whether what finds no slot is dropped, so that it matters which tokens share them.

    Returns [E, C, D], zeros in empty slots; the slot of each choice, int32 [N, k]; the choice in each slot, int32
    [E, C].
    """
    return _dispatch(experts, slots, groups, by_weight, couples, drops)(x, ids, weights)


@functools.cache
def _dispatch(experts: int, slots: int, groups: int, by_weight: bool, couples: str, drops: bool) -> Callable[..., Any]:
    def run(x: jax.Array, ids: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        slot, choice = _places(ids, weights, experts, slots, groups, by_weight)
        return rows_of(x, choice // ids.shape[1]), slot, choice

    def forward(*given: jax.Array) -> tuple[Any, Any]:
        out = run(*given)
        return out, out[1]

    def backward(slot: jax.Array, given: tuple[jax.Array, Any, Any]) -> tuple[Any, Any, Any]:
        return summed(given[0], slot), None, None

    def part(ranks: int) -> Callable[..., Any]:
        """Each rank's tokens in slots of its own."""

        def local(*given: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            rows, slot, choice = _dispatch(experts, slots // ranks, 1, False, "", False)(*given)
            return rows, _renumbered(slot, experts, slots // ranks, slots), choice

        return local

    if drops:
        name = "dispatch_of_rows" if couples else "dispatch_and_drop"
        return route(name, ("routed", "rows", "routed"), run, forward, backward, couples)
    name = f"dispatch_{experts}_{slots}_{groups}_{by_weight}"
    return route(name, ("routed", "rows", "routed"), run, forward, backward, part=part)


def _renumbered(slot: jax.Array, experts: int, slots: int, others: int) -> jax.Array:
    """Slots where each expert has `slots` as they are called where it has `others`."""
    return jnp.where(slot < experts * slots, slot // slots * others + slot % slots, experts * others)


def _combine(slot: jax.Array, out: jax.Array, weights: jax.Array, choice: jax.Array) -> jax.Array:
    flat = out.reshape(-1, out.shape[-1])
    return _added(weights[:, j, None] * rows_of(flat, slot[:, j]).astype(weights.dtype) for j in range(slot.shape[1]))


def _combine_backward(saved: tuple[jax.Array, ...], given: jax.Array) -> tuple[Any, Any, Any, Any]:
    slot, out, weights, choice = saved
    flat, k = out.reshape(-1, out.shape[-1]), slot.shape[1]
    of_weights = [(given * rows_of(flat, slot[:, j]).astype(given.dtype)).sum(axis=-1) for j in range(k)]
    of_out = rows_of(weights.reshape(-1), choice)[..., None] * rows_of(given, choice // k)
    return None, of_out.astype(out.dtype), jnp.stack(of_weights, axis=-1), None


def _combine_part(ranks: int) -> Callable[..., Any]:
    def local(slot: jax.Array, out: jax.Array, weights: jax.Array, choice: jax.Array) -> jax.Array:
        experts, slots, _ = out.shape
        return _combined(_renumbered(slot, experts, slots * ranks, slots), out, weights, choice)

    return local


_combined = route(
    "combine", ("rows",), _combine, lambda *given: (_combine(*given), given), _combine_backward, part=_combine_part
)


def combine(out: jax.Array, weights: jax.Array, slot: jax.Array, choice: jax.Array) -> jax.Array:
    """The weighted sum of what the experts of each token made of it; nothing from choices without a slot.

    Args:
      out: [E, C, D].
      weights: float32 [N, k].
      slot, choice: of `dispatch`.

    Returns [N, D] in the dtype of the weights.
    """
    return _combined(slot, out, weights, choice)
