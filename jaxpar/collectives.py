"""Collectives over mesh axes, for use inside `shard_map`. Axes of size 1 cost nothing and leave no trace.

Sizes are per device; n is the number of devices that an operation spans (the product of its axes).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import lax


def spanned(axes: Sequence[str]) -> tuple[str, ...]:
    """Those of some mesh axes that have more than one device."""
    return tuple(a for a in axes if lax.axis_size(a) > 1)


def all_reduce(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """The sum over devices, on each of them; `x` [...] of one shape everywhere. A ring sends 2(n-1)/n of its bytes."""
    axes = spanned(axes)
    return lax.psum(x, axes) if axes else x


def all_gather(x: jax.Array, axes: Sequence[str], dim: int = 0) -> jax.Array:
    """Shards [.., d, ..] -> whole [.., n d, ..] along `dim`, on each device. A ring sends (n-1)/n of the whole's bytes."""
    axes = spanned(axes)
    return lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x


def reduce_scatter(x: jax.Array, axes: Sequence[str], dim: int = 0) -> jax.Array:
    """Whole [.., n d, ..] -> this device's shard [.., d, ..] of the sum along `dim`. A ring sends (n-1)/n of the whole's bytes."""
    axes = spanned(axes)
    return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True) if axes else x


def index(axes: Sequence[str]) -> jax.Array | int:
    """This device's position along some axes, first axis outermost: int32 scalar."""
    axes = spanned(axes)
    return lax.axis_index(axes) if axes else 0
