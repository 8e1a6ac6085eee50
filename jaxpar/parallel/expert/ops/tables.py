"""Where each token's choices lie in the buffers of experts.

A choice is a token's n-th expert. Choices are sorted by expert, so that those of one expert lie together; the first C
of each get a slot in its buffer. Two tables say it all: the slot of each choice, and the choice in each slot.

Dims: N tokens, k choices of a token, E experts, C slots of an expert, D features.
"""

import functools
import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


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


def places(
    ids: jax.Array, weights: jax.Array, experts: int, slots: int, groups: int, by_weight: bool
) -> tuple[jax.Array, jax.Array]:
    """For tokens in groups with C / groups slots of every expert each: slot [N, k] and choice [E, C]."""
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
    total = added(rows_of(flat, slot[:, j]).astype(wide(flat.dtype)) for j in range(slot.shape[1]))
    return total.astype(flat.dtype)


def added(parts: Iterable[jax.Array]) -> jax.Array:
    """Their sum, in order."""
    return functools.reduce(operator.add, parts)


def wide(dtype: Any) -> Any:
    """What sums of this dtype are made in: float32 or wider."""
    return jnp.promote_types(dtype, jnp.float32)
