"""Ring attention, to come in the next commit."""

from __future__ import annotations

import jax

from ...collectives.ranks import Axes
from .order import Order


def ring_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    axis: Axes,
    causal: bool,
    window: int | None = None,
    segment_ids: jax.Array | None = None,
    scale: float | None = None,
    order: Order = "plain",
) -> jax.Array:
    """`gather_attention`, but that keys and values move round the ring of ranks. No mask, no bias; t = s."""
    raise NotImplementedError
