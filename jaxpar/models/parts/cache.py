"""A key/value cache: the keys and values of past positions, so that a generated token costs one position's compute.

    key, value [L, B, S, K, h]

    positions    0   1   2  ...  t-1 |  t   t+1  ...  t+T-1 |  ...  S-1
                 cached              |  written now          |  masked

A query at position p attends to the cached positions 0 to p. `run_with_cache` runs all layers on T new positions and
returns the cache with their keys and values written at `start`. A model that generates with a cache has two methods:

    empty(rows, positions) -> cache
    extend(tokens [B, T], cache, start) -> logits [B, T, V], cache        `cache`: from `empty` or an earlier `extend`

Dims: B rows, T new positions, S positions that the cache has room for, L layers, H heads, K key/value heads,
h head_dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ...parallel.context.attention.fused import attention
from .stack import run_with

# (query [B, T, H, h], key and value [B, T, K, h]) -> [B, T, H, h]
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["key", "value"], meta_fields=[])
@dataclass(frozen=True)
class Cache:
    """The keys and values of all layers, [L, B, S, K, h]; positions not yet computed are masked."""

    key: jax.Array
    value: jax.Array

    @classmethod
    def create(cls, layers: int, rows: int, positions: int, heads: int, head_dim: int, dtype: Any) -> Cache:
        """Return a cache of zeros with S = `positions` and K = `heads` key/value heads: 2 L B S K h elements."""
        zeros = jnp.zeros((layers, rows, positions, heads, head_dim), dtype)
        # One array twice: arrays never change, and `extend` returns new ones.
        return cls(zeros, zeros)

    @property
    def positions(self) -> int:
        """The number of positions that the cache has room for, S."""
        return self.key.shape[2]


def run_with_cache(
    layers: Any, x: jax.Array, cache: Cache, start: jax.Array, *extras: jax.Array
) -> tuple[jax.Array, Cache]:
    """Run a stack of layers on new positions, with the cached keys and values as their past.

    Args:
      layers: the stacked layers; each is called as `layer(x, *extras, attend)`.
      x: activations of the new positions, [B, T, D].
      cache: keys and values of the positions before `start`.
      start: the first new position, an int32 scalar.
      extras: further arguments of every layer, such as rotary angles.

    Returns:
      The last layer's output, [B, T, D], and the cache with the keys and values of the new positions.
    """
    # Causal mask [T, S]: a query sees its own position and those before. It also hides the zeros of unused positions.
    is_visible = jnp.arange(cache.positions) <= start + jnp.arange(x.shape[1])[:, None]

    def step(layer: Any, x: jax.Array, layer_cache: Cache) -> tuple[jax.Array, Cache]:
        # The layer calls `attend` once; this list carries the extended cache out of that call.
        extended_caches = []

        # The layer passes only the new positions; attention reads the whole cache.
        def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            key, value = (
                jax.lax.dynamic_update_slice_in_dim(cached, update.astype(cached.dtype), start, axis=1)
                for cached, update in ((layer_cache.key, key), (layer_cache.value, value))
            )
            extended_caches.append(Cache(key, value))
            return attention(query, key, value, causal=False, mask=is_visible[None, None], implementation="xla")

        return layer(x, *extras, attend), extended_caches.pop()

    # The cache's leading dim is the layers', so that each layer gets its slice and returns it.
    return run_with(layers, x, cache, step)
