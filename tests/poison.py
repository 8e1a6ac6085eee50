"""What a buffer holds that nobody has written, at its worst."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax


def poison(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Stand in for `lax.empty`: NaN, the largest integer, true, or keys that nobody drew."""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        data = jax.eval_shape(lambda: jax.random.key_data(jnp.zeros(shape, dtype)))
        return jax.random.wrap_key_data(jnp.full(data.shape, 2**32 - 1, data.dtype), impl=str(dtype._impl.name))
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.full(shape, jnp.nan, dtype)
    return jnp.full(shape, True if jnp.issubdtype(dtype, jnp.bool) else jnp.iinfo(dtype).max, dtype)


def poison_empty(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Fill the buffers of `lax.empty` with poison; return a list that gets their shapes."""
    shapes: list[tuple[int, ...]] = []
    monkeypatch.setattr(lax, "empty", lambda shape, dtype: shapes.append(shape) or poison(shape, dtype))
    return shapes
