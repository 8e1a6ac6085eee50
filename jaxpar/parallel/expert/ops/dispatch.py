"""Dispatch tokens to the buffers of their experts, and combine the results.

    rows[e, c] = x[choice[e, c] // k]                          dispatch, [N, D] -> [E, C, D]
    y[n]       = sum over j of weights[n, j] out[slot[n, j]]   combine,  [E, C, D] -> [N, D]

Both are lookups, forwards and backwards: a lookup by one table is the transpose of a lookup by the other
(`tables.py`). Hence no direction scatters with addition, which GPUs do in an undefined order.

Dims: N tokens, k choices of a token, E experts, C slots of an expert, D features.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ....model.permutations import route
from . import gather
from .tables import add_all, grouped_tables, rows_of, sum_over_choices


@functools.cache
def dispatch(
    experts: int, slots: int, groups: int, by_weight: bool, couples: str, drops: bool, /
) -> Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array, jax.Array]]:
    """Return a function that copies tokens into the buffers of their experts.

    The function takes x [N, D], ids int32 [N, k] and weights float [N, k]. It returns the buffers [E, C, D], with zeros
    in empty slots, and the tables `slot`, int32 [N, k], and `choice`, int32 [E, C].

    Args:
      experts: E.
      slots: C, a multiple of `groups`.
      groups: the number of equal parts of the tokens that have their own slots.
      by_weight: whether choices get slots by falling weight (without a gradient), or by position.
      couples: how the result for a row depends on other rows; empty if it does not.
      drops: whether a choice without a slot is dropped. In this case it matters which tokens share slots.
    """

    def dispatch_tokens(x: jax.Array, ids: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        # Choice n k + j is of token n. Empty slots have choice N k: row N is beyond the last, and reads as zeros.
        slot, choice = grouped_tables(ids, weights, experts, slots, groups, by_weight)
        return rows_of(x, choice // ids.shape[1]), slot, choice

    def forward(*arrays: jax.Array) -> tuple[Any, Any]:
        result = dispatch_tokens(*arrays)
        return result, result[1]

    def backward(slot: jax.Array, cotangents: tuple[jax.Array, Any, Any]) -> tuple[Any, Any, Any]:
        # A token was copied to the slots of its k choices: add up their cotangents.
        return sum_over_choices(cotangents[0], slot), None, None

    def gather_all(ranks: int) -> Callable[..., Any]:
        return gather.dispatch(experts, slots, groups, by_weight, ranks)

    def part(ranks: int) -> Callable[..., Any]:
        """Return the function for one rank's tokens, in slots that no other rank uses."""

        def local(*arrays: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            # By position and without drops: nothing is lost, whichever choices get these slots.
            rows, slot, choice = dispatch(experts, slots // ranks, 1, False, "", False)(*arrays)
            return rows, _renumber(slot, experts, slots // ranks, slots), choice

        return local

    name = f"dispatch_{experts}_{slots}_{groups}_{by_weight}_{bool(couples)}_{drops}"
    # With drops, ranks that split a row's tokens would drop others than one device does.
    part_or_none = None if drops else part
    return route(
        name,
        ("routed", "rows", "routed"),
        dispatch_tokens,
        forward,
        backward,
        couples,
        part=part_or_none,
        gather=gather_all,
    )


def _renumber(slot: jax.Array, experts: int, slots: int, new_slots: int) -> jax.Array:
    """Return slot numbers as they are if each expert has `new_slots` slots instead of `slots`."""
    return jnp.where(slot < experts * slots, slot // slots * new_slots + slot % slots, experts * new_slots)


def _combine(slot: jax.Array, out: jax.Array, weights: jax.Array, choice: jax.Array) -> jax.Array:
    """Return the weighted sum of the results of each token's experts. A choice without a slot adds nothing.

    Args:
      slot, choice: the tables of `dispatch`.
      out: the results of the experts, [E, C, D].
      weights: float32 [N, k].

    Returns:
      [N, D] in the dtype of the weights.
    """
    # One lookup of [N, D] for each j: a single lookup of [N, k, D] would need k times the memory.
    flat = out.reshape(-1, out.shape[-1])
    return add_all(weights[:, j, None] * rows_of(flat, slot[:, j]).astype(weights.dtype) for j in range(slot.shape[1]))


def _combine_backward(saved: tuple[jax.Array, ...], cotangent: jax.Array) -> tuple[Any, Any, Any, Any]:
    """Return the cotangents of the inputs of `_combine`, by lookups in the other table."""
    slot, out, weights, choice = saved
    flat, k = out.reshape(-1, out.shape[-1]), slot.shape[1]
    # The gradient of a weight is the inner product of its expert's result with the cotangent of its token.
    grad_weights = [(cotangent * rows_of(flat, slot[:, j]).astype(cotangent.dtype)).sum(axis=-1) for j in range(k)]
    grad_out = rows_of(weights.reshape(-1), choice)[..., None] * rows_of(cotangent, choice // k)
    return None, grad_out.astype(out.dtype), jnp.stack(grad_weights, axis=-1), None


def _combine_part(ranks: int) -> Callable[..., Any]:
    """Return `combine` for one rank's tokens, whose slots are numbered as for all ranks."""

    def local(slot: jax.Array, out: jax.Array, weights: jax.Array, choice: jax.Array) -> jax.Array:
        experts, slots, _ = out.shape
        return combine(_renumber(slot, experts, slots * ranks, slots), out, weights, choice)

    return local


combine = route(
    "combine",
    ("rows",),
    _combine,
    lambda *arrays: (_combine(*arrays), arrays),
    _combine_backward,
    part=_combine_part,
    gather=gather.combine,
)
