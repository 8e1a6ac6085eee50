"""Rotary embedding of longer texts than a model was first trained on (YaRN: Peng et al. 2023, arXiv:2309.00071)."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jaxpar.models.llama.model import rope

FIRST = 4096  # positions of the first training of DeepSeek-V3, and below it how often a feature turns in them
FAST, SLOW = 32, 1


def angles(length: int, rope_dim: int, theta: float, factor: float) -> jax.Array:
    """Angles float32 [T, r/2], in radians: frequencies that turn `FAST` times or more in the first training stay, those
    that turn less than `SLOW` times are divided by `factor`, and between them features are interpolated (section 3.2).
    """
    feature = jnp.arange(rope_dim // 2, dtype=jnp.float32)
    frequency = theta ** (-2 * feature / rope_dim)
    if factor != 1:
        at = lambda turns: rope_dim * math.log(FIRST / (turns * 2 * math.pi)) / (2 * math.log(theta))
        low, high = max(math.floor(at(FAST)), 0), min(math.ceil(at(SLOW)), rope_dim - 1)
        divided = jnp.clip((feature - low) / max(high - low, 1e-3), 0, 1)
        frequency *= 1 - divided + divided / factor
    return jnp.arange(length, dtype=jnp.float32)[:, None] * frequency


def softmax_scale(query_dim: int, factor: float) -> float:
    """Of a query times a key: 1 / sqrt(query_dim), and YaRN's temperature (section 3.4, as DeepSeek-V3 applies it)."""
    return (0.1 * math.log(max(factor, 1)) + 1) ** 2 / math.sqrt(query_dim)


def rotated(x_BTHr: jax.Array, angles: jax.Array) -> jax.Array:
    """Rotates the pair (2 i, 2 i + 1) by `angles` [T, r/2], and puts it on (i, i + r/2): queries and keys alike, so
    that their products are those of pairs that stay.
    """
    pairs = x_BTHr.reshape(*x_BTHr.shape[:-1], -1, 2)
    return rope(pairs.swapaxes(-1, -2).reshape(x_BTHr.shape), angles)
