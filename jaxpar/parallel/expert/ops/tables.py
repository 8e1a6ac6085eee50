"""Tables that map the choices of tokens to slots in the buffers of experts, and back.

A choice is one of the k experts of a token. Choices are numbered n k + j, and sorted by expert, so that the choices of
one expert are contiguous. The first C of each expert get a slot in its buffer. Two tables describe this:

    slot    int32 [N, k]   the slot of each choice, in 0 to E C - 1; E C if it has none
    choice  int32 [E, C]   the choice in each slot, in 0 to N k - 1; N k if the slot is empty

With both tables tokens are never scattered: each direction is a lookup by one table, and its transpose a lookup by the
other. The values E C and N k are beyond the last row, so that a lookup returns zeros there.

Dims: N tokens, k choices of a token, E experts, C slots of an expert, D features.
"""

import functools
import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Order(NamedTuple):
    """The choices sorted by expert.

    Attributes:
      sorted: int32 [N k], the choices of expert 0, then of expert 1, ...
      start: int32 [E], the position in `sorted` at which the choices of each expert start.
      load: int32 [E], the number of choices of each expert.
    """

    sorted: jax.Array
    start: jax.Array
    load: jax.Array


def order(ids: jax.Array, weights: jax.Array | None, experts: int) -> Order:
    """Sort choices by expert.

    Args:
      ids: the expert of each choice, int32 [N, k]; E for a choice of no expert, which is sorted last.
      weights: float [N, k]: the choices of one expert come by falling weight. If None, they come by position.
      experts: E.
    """
    flat = ids.reshape(-1)
    position = jnp.arange(flat.size, dtype=jnp.int32)
    # The position is the last key: no two choices are equal, and the order is the same on every device.
    keys = (flat, position) if weights is None else (flat, -weights.reshape(-1), position)
    sorted_choices = jax.lax.sort(keys, num_keys=len(keys))[-1]
    load = (flat[:, None] == jnp.arange(experts)).sum(axis=0, dtype=jnp.int32)
    return Order(sorted_choices, jnp.cumsum(load) - load, load)


def tables(by_expert: Order, slots: int) -> tuple[jax.Array, jax.Array]:
    """Return the tables `slot`, int32 [N k], and `choice`, int32 [E, C], of `slots` = C slots for each expert."""
    choices = by_expert.sorted.size
    rank = jnp.arange(slots, dtype=jnp.int32)
    # Slots beyond an expert's load read some other choice, and the next line marks them empty.
    index = jnp.minimum(by_expert.start[:, None] + rank, choices - 1)
    choice = jnp.where(rank < by_expert.load[:, None], by_expert.sorted[index], choices)
    return inverse(choice, choices), choice


def inverse(choice: jax.Array, choices: int) -> jax.Array:
    """Return the slot of each of `choices` choices from the choice in each slot; `choice.size` if it has no slot."""
    # Empty slots write to one more element, which is cut off.
    slot = jnp.full(choices + 1, choice.size, jnp.int32)
    return slot.at[choice.reshape(-1)].set(jnp.arange(choice.size, dtype=jnp.int32))[:choices]


def grouped_tables(
    ids: jax.Array, weights: jax.Array, experts: int, slots: int, groups: int, by_weight: bool
) -> tuple[jax.Array, jax.Array]:
    """Return the tables `slot` [N, k] and `choice` [E, C] for tokens in groups that share no slots.

    Args:
      ids, weights: int32 and float [N, k].
      experts: E.
      slots: C; each of the `groups` equal parts of the tokens has C / groups slots of every expert.
      groups: the number of groups.
      by_weight: whether choices get slots by falling weight, or by position.
    """
    n, k = ids.shape
    slots_per_group, tokens_per_group = slots // groups, n // groups

    def group(ids: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        return tables(order(ids, weights if by_weight else None, experts), slots_per_group)

    slot, choice = jax.vmap(group)(
        ids.reshape(groups, tokens_per_group, k), weights.reshape(groups, tokens_per_group, k)
    )
    g = jnp.arange(groups, dtype=jnp.int32)
    # Convert numbers within a group to numbers among all: an expert's slots of group g follow its slots of group g - 1.
    slot = jnp.where(
        slot < experts * slots_per_group,
        slot // slots_per_group * slots + g[:, None] * slots_per_group + slot % slots_per_group,
        experts * slots,
    ).reshape(n, k)
    choice = jnp.where(choice < tokens_per_group * k, choice + g[:, None, None] * tokens_per_group * k, n * k)
    return slot, choice.swapaxes(0, 1).reshape(experts, slots)


def rows_of(x: jax.Array, index: jax.Array) -> jax.Array:
    """Return x[index], with zeros where `index` is beyond the last row."""
    return x.at[index].get(mode="fill", fill_value=0)


def sum_over_choices(x: jax.Array, slot: jax.Array) -> jax.Array:
    """Return the sum over a token's choices of the values in their slots: x [.., D], slot [N, k] -> [N, D]."""
    flat = x.reshape(-1, x.shape[-1])
    total = add_all(rows_of(flat, slot[:, j]).astype(accumulation_dtype(flat.dtype)) for j in range(slot.shape[1]))
    return total.astype(flat.dtype)


def add_all(parts: Iterable[jax.Array]) -> jax.Array:
    """Return the sum of arrays, added in order."""
    return functools.reduce(operator.add, parts)


def accumulation_dtype(dtype: Any) -> Any:
    """Return the dtype in which sums over `dtype` are computed: float32 or wider."""
    return jnp.promote_types(dtype, jnp.float32)
