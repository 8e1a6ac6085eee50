"""Keys and values of positions that are done, so that each token of a text costs its own positions alone.

Dims: L layers, B rows, T positions of now, S positions that there is room for, H heads, K key/value heads, h head_dim.
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
    """Keys and values of all layers, [L, B, S, K, h]; of positions that are not done, whatever was there."""

    key: jax.Array
    value: jax.Array

    @classmethod
    def create(cls, layers: int, rows: int, positions: int, heads: int, head_dim: int, dtype: Any) -> Cache:
        """Room for so many positions: 2 L B S K h elements."""
        zeros = jnp.zeros((layers, rows, positions, heads, head_dim), dtype)
        return cls(zeros, zeros)

    @property
    def positions(self) -> int:
        """S."""
        return self.key.shape[2]


def extended(layers: Any, x: jax.Array, cache: Cache, at: jax.Array, *given: jax.Array) -> tuple[jax.Array, Cache]:
    """The stack's layers on x [B, T, D] at positions `at` and on: what they return, and the cache with these positions.

    Each is called as `layer(x, *given, attend)`. A query sees the keys of its own position and of those before.
    """
    seen = jnp.arange(cache.positions) <= at + jnp.arange(x.shape[1])[:, None]  # [T, S]

    def step(layer: Any, x: jax.Array, own: Cache) -> tuple[jax.Array, Cache]:
        new = []

        def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            key, value = (
                jax.lax.dynamic_update_slice_in_dim(old, x.astype(old.dtype), at, axis=1)
                for old, x in ((own.key, key), (own.value, value))
            )
            new.append(Cache(key, value))
            return attention(query, key, value, causal=False, mask=seen[None, None], implementation="xla")

        return layer(x, *given, attend), new.pop()

    return run_with(layers, x, cache, step)
