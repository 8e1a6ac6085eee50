"""Tokens to buffers of their experts, and back. Each is a lookup, forwards and backwards.

The lookups of one table are the transposes of the other's (`tables.py`), so that no direction adds up at computed
places (which GPUs do in any order).

Dims: N tokens, k choices of a token, E experts, C slots of an expert, D features.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ....model.permutations import route
from . import gather
from .tables import added, places, rows_of, summed


@functools.cache
def dispatch(
    experts: int, slots: int, groups: int, by_weight: bool, couples: str, drops: bool, /
) -> Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array, jax.Array]]:
    """A function that puts tokens into the buffers of their experts.

    Args:
      slots: C, a multiple of `groups`, which are equal parts of the tokens with slots of their own.
      by_weight: whether choices get slots by their weight (no gradient comes of that) or by position.
      couples: what of it depends on other rows, if anything does.
      drops: whether what finds no slot is dropped, so that it matters which tokens share them.

    Of x [N, D], ids int32 [N, k] and weights float [N, k] it makes [E, C, D], zeros in empty slots; the slot of each
    choice, int32 [N, k]; the choice in each slot, int32 [E, C].
    """

    def run(x: jax.Array, ids: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        slot, choice = places(ids, weights, experts, slots, groups, by_weight)
        return rows_of(x, choice // ids.shape[1]), slot, choice

    def forward(*given: jax.Array) -> tuple[Any, Any]:
        out = run(*given)
        return out, out[1]

    def backward(slot: jax.Array, given: tuple[jax.Array, Any, Any]) -> tuple[Any, Any, Any]:
        return summed(given[0], slot), None, None

    def from_all(ranks: int) -> Callable[..., Any]:
        return gather.dispatch(experts, slots, groups, by_weight, ranks)

    def part(ranks: int) -> Callable[..., Any]:
        """Each rank's tokens in slots of its own."""

        def local(*given: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            rows, slot, choice = dispatch(experts, slots // ranks, 1, False, "", False)(*given)
            return rows, _renumbered(slot, experts, slots // ranks, slots), choice

        return local

    name = f"dispatch_{experts}_{slots}_{groups}_{by_weight}_{bool(couples)}_{drops}"
    parted = None if drops else part
    return route(name, ("routed", "rows", "routed"), run, forward, backward, couples, part=parted, gather=from_all)


def _renumbered(slot: jax.Array, experts: int, slots: int, others: int) -> jax.Array:
    """Slots where each expert has `slots` as they are called where it has `others`."""
    return jnp.where(slot < experts * slots, slot // slots * others + slot % slots, experts * others)


def _combine(slot: jax.Array, out: jax.Array, weights: jax.Array, choice: jax.Array) -> jax.Array:
    """The weighted sum of what the experts of each token made of it; nothing from choices without a slot.

    Args:
      slot, choice: of `dispatch`.
      out: [E, C, D].
      weights: float32 [N, k].

    Returns [N, D] in the dtype of the weights.
    """
    flat = out.reshape(-1, out.shape[-1])
    return added(weights[:, j, None] * rows_of(flat, slot[:, j]).astype(weights.dtype) for j in range(slot.shape[1]))


def _combine_backward(saved: tuple[jax.Array, ...], given: jax.Array) -> tuple[Any, Any, Any, Any]:
    slot, out, weights, choice = saved
    flat, k = out.reshape(-1, out.shape[-1]), slot.shape[1]
    of_weights = [(given * rows_of(flat, slot[:, j]).astype(given.dtype)).sum(axis=-1) for j in range(k)]
    of_out = rows_of(weights.reshape(-1), choice)[..., None] * rows_of(given, choice // k)
    return None, of_out.astype(out.dtype), jnp.stack(of_weights, axis=-1), None


def _combine_part(ranks: int) -> Callable[..., Any]:
    def local(slot: jax.Array, out: jax.Array, weights: jax.Array, choice: jax.Array) -> jax.Array:
        experts, slots, _ = out.shape
        return combine(_renumbered(slot, experts, slots * ranks, slots), out, weights, choice)

    return local


combine = route(
    "combine",
    ("rows",),
    _combine,
    lambda *given: (_combine(*given), given),
    _combine_backward,
    part=_combine_part,
    gather=gather.combine,
)
