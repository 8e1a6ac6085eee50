"""Collectives over mesh axes, for use inside `shard_map`. Axes of size 1 cost nothing and leave no trace.

Sizes are per device; n is the number of devices that an operation spans (the product of its axes).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from .schedule import zeros_after

_IN_PIECES = 1 << 26  # elements: 256 MB in float32
_PIECES = 16


def spanned(axes: Sequence[str]) -> tuple[str, ...]:
    """Those of some mesh axes that have more than one device."""
    return tuple(a for a in axes if lax.axis_size(a) > 1)


def all_reduce(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """The sum over devices, on each of them; `x` [...] of one shape everywhere. A ring sends 2(n-1)/n of its bytes."""
    axes = spanned(axes)
    return lax.psum(x, axes) if axes else x


def all_gather(x: jax.Array, axes: Sequence[str], dim: int = 0) -> jax.Array:
    """Shards [.., d, ..] -> whole [.., n d, ..] along `dim`, on each device. A ring sends (n-1)/n of the whole's
    bytes.
    """
    axes = spanned(axes)
    return lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x


def reduce_scatter(x: jax.Array, axes: Sequence[str], dim: int = 0) -> jax.Array:
    """Whole [.., n d, ..] -> this device's shard [.., d, ..] of the sum along `dim`. A ring sends (n-1)/n of the
    whole's bytes.
    """
    axes = spanned(axes)
    return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True) if axes else x


def reduce_scatter_as(x: jax.Array, axes: Sequence[str], dim: int, dtype: jnp.dtype) -> jax.Array:
    """`reduce_scatter` in a wider dtype; a large `x` in pieces, so that the whole of it never exists in that dtype.

    The pieces are equal parts of every shard, as many of 16 as divide it: the same bytes in more, smaller collectives.
    """
    axes = spanned(axes)
    pieces = scatter_pieces(x.shape, x.dtype, dim, math.prod(lax.axis_size(a) for a in axes), dtype)
    if pieces == 1:
        return reduce_scatter(x.astype(dtype), axes, dim)
    n = math.prod(lax.axis_size(a) for a in axes)
    part = x.shape[dim] // n // pieces
    split = x.reshape(*x.shape[:dim], n, pieces, part, *x.shape[dim + 1 :])
    shard = (*x.shape[:dim], pieces, part, *x.shape[dim + 1 :])

    def scatter(i: jax.Array, shards: jax.Array) -> jax.Array:
        piece = lax.dynamic_index_in_dim(split, i, axis=dim + 1, keepdims=False).astype(dtype)
        piece = lax.squeeze(reduce_scatter(piece, axes, dim), [dim])
        return lax.dynamic_update_index_in_dim(shards, piece, i, axis=dim)

    shards = lax.fori_loop(0, pieces, scatter, zeros_after(x, shard, dtype))
    return shards.reshape(*x.shape[:dim], pieces * part, *x.shape[dim + 1 :])


def scatter_pieces(shape: Sequence[int], dtype: jnp.dtype, dim: int, n: int, wider: jnp.dtype) -> int:
    """The number of pieces in which `reduce_scatter_as` scatters an array over n devices."""
    if n == 1 or jnp.dtype(dtype) == jnp.dtype(wider) or math.prod(shape) < _IN_PIECES:
        return 1
    return max(p for p in range(1, _PIECES + 1) if shape[dim] // n % p == 0)


def index(axes: Sequence[str]) -> jax.Array | int:
    """This device's position along some axes, first axis outermost: int32 scalar."""
    axes = spanned(axes)
    return lax.axis_index(axes) if axes else 0
