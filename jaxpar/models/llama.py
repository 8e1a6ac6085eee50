"""A decoder-only transformer in the manner of Llama (Touvron et al. 2023, arXiv:2302.13971), in plain Flax NNX.

It knows nothing of meshes or strategies: no annotation, no collective. The layers are one `nnx.scan` over parameters
stacked on dim 0. No dtype is set: matmuls run in the dtype of the parameters (cast them to bfloat16 and the model
computes in bfloat16), while norms, rotary embedding, attention's softmax and the loss are float32.

Dims: B rows, T positions, D dim, H heads, K kv_heads, h head_dim = D / H, F ffn, V vocab, L layers.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from ..model import Mean


@dataclass(frozen=True)
class Config:
    """Sizes of a `Llama`. Raises ValueError where they do not fit each other."""

    vocab: int = 256
    dim: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 4  # fewer than heads: grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245)
    ffn: int = 384
    rope_theta: float = 10_000.0
    tied: bool = False  # the embedding is also the output head
    dropout: float = 0.0  # of each residual branch, drawn from the `dropout` stream

    def __post_init__(self) -> None:
        if self.dim % (2 * self.heads):
            raise ValueError(
                f"dim={self.dim} does not split into heads={self.heads} of an even size, which rotary embedding needs; "
                f"try dim={2 * self.heads * max(1, round(self.dim / (2 * self.heads)))}"
            )
        if self.heads % self.kv_heads:
            divisors = [k for k in range(1, self.heads + 1) if self.heads % k == 0]
            raise ValueError(f"kv_heads={self.kv_heads} does not divide heads={self.heads}; use one of {divisors}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} must lie in [0, 1); use 0 to switch it off")

    @property
    def head_dim(self) -> int:
        """Features of one head."""
        return self.dim // self.heads

    @property
    def parameters(self) -> int:
        """The exact number of parameters."""
        attention = self.dim * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        layer = attention + 3 * self.dim * self.ffn + 2 * self.dim
        return self.layers * layer + self.dim + (1 if self.tied else 2) * self.vocab * self.dim


SIZES = {"tiny": Config(vocab=256, dim=128, layers=4, heads=4, kv_heads=2, ffn=384)}


def _linear(fan_in: int, fan_out: int, rngs: nnx.Rngs, *, branches: int = 1) -> nnx.Linear:
    """A bias-free projection with unit gain, or 1 / sqrt(branches) where `branches` outputs add up in the residual."""
    init = nnx.initializers.normal((fan_in * branches) ** -0.5)
    return nnx.Linear(fan_in, fan_out, use_bias=False, kernel_init=init, rngs=rngs)


class RMSNorm(nnx.Module):
    """Root-mean-square norm (Zhang & Sennrich 2019, arXiv:1910.07467), in float32, returned in the input's dtype."""

    def __init__(self, dim: int) -> None:
        self.scale = nnx.Param(jnp.ones(dim))

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """[B, T, D] -> [B, T, D], same dtype."""
        wide = x_BTD.astype(jnp.float32)
        unit = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-6)
        return (unit * self.scale[...].astype(jnp.float32)).astype(x_BTD.dtype)


def rope_table(length: int, head_dim: int, theta: float) -> jax.Array:
    """Angles float32 [T, h/2] of rotary embedding (Su et al. 2021, arXiv:2104.09864, section 3.2.2), in radians."""
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    return jnp.arange(length, dtype=jnp.float32)[:, None] * frequency


def rope(x_BTHh: jax.Array, angles: jax.Array) -> jax.Array:
    """Rotates the pair (i, i + h/2) of every head by `angles` [T, h/2]; same shape and dtype."""
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    a, b = jnp.split(x_BTHh.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTHh.dtype)


class Attention(nnx.Module):
    """Causal grouped-query attention with rotary embedding."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.head_dim = config.head_dim
        self.query = _linear(config.dim, config.heads * config.head_dim, rngs)
        self.key = _linear(config.dim, config.kv_heads * config.head_dim, rngs)
        self.value = _linear(config.dim, config.kv_heads * config.head_dim, rngs)
        self.out = _linear(config.heads * config.head_dim, config.dim, rngs, branches=2 * config.layers)

    def __call__(self, x_BTD: jax.Array, angles: jax.Array) -> jax.Array:
        """[B, T, D] and angles [T, h/2] -> [B, T, D]."""
        query, key, value = (
            project(x_BTD).reshape(*x_BTD.shape[:2], -1, self.head_dim)
            for project in (self.query, self.key, self.value)
        )
        mixed = jax.nn.dot_product_attention(rope(query, angles), rope(key, angles), value, is_causal=True)
        return self.out(mixed.reshape(*x_BTD.shape[:2], -1))


class SwiGLU(nnx.Module):
    """Gated feed-forward (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.gate = _linear(config.dim, config.ffn, rngs)
        self.up = _linear(config.dim, config.ffn, rngs)
        self.down = _linear(config.ffn, config.dim, rngs, branches=2 * config.layers)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """[B, T, D] -> [B, T, D]."""
        return self.down(jax.nn.silu(self.gate(x_BTD)) * self.up(x_BTD))


class Layer(nnx.Module):
    """Attention and feed-forward, each normed before and added to the residual stream."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.attention_norm = RMSNorm(config.dim)
        self.attention = Attention(config, rngs=rngs)
        self.ffn_norm = RMSNorm(config.dim)
        self.ffn = SwiGLU(config, rngs=rngs)
        # Without dropout no stream is made, so that the model has no state beside its weights.
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs if config.dropout else None)

    def __call__(self, x_BTD: jax.Array, angles: jax.Array) -> jax.Array:
        """[B, T, D] and angles [T, h/2] -> [B, T, D]."""
        x_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD), angles))
        return x_BTD + self.dropout(self.ffn(self.ffn_norm(x_BTD)))


class Llama(nnx.Module):
    """The decoder: embedding, `config.layers` layers, norm, and a head that may be the embedding."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=config.layers)
        @nnx.vmap
        def stack(rngs: nnx.Rngs) -> Layer:
            return Layer(config, rngs=rngs)

        self.config = config
        # Not nnx.Embed: it fixes its dtype when it is made, and bfloat16 parameters would still compute in float32.
        scale = nnx.initializers.normal(config.dim**-0.5)
        self.embedding = nnx.Param(scale(rngs.params(), (config.vocab, config.dim)))
        self.layers = stack(rngs)
        self.norm = RMSNorm(config.dim)
        self.head = None if config.tied else _linear(config.dim, config.vocab, rngs)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """Tokens int32 [B, T] -> logits [B, T, V] in the dtype of the parameters."""

        @nnx.scan(in_axes=(0, nnx.Carry, None), out_axes=nnx.Carry)
        def run(layer: Layer, x_BTD: jax.Array, angles: jax.Array) -> jax.Array:
            return layer(x_BTD, angles)

        angles = rope_table(tokens_BT.shape[1], self.config.head_dim, self.config.rope_theta)
        embedding_VD = self.embedding[...]
        x_BTD = self.norm(run(self.layers, embedding_VD[tokens_BT], angles))
        return x_BTD @ embedding_VD.T if self.head is None else self.head(x_BTD)


def loss(module: nnx.Module, batch: dict[str, jax.Array]) -> jax.Array | Mean:
    """Mean next-token cross-entropy in nats, float32.

    `batch` is {"tokens": int32 [B, T+1]} for the mean over all B T predictions, and with "mask" [B, T] a `jp.Mean`
    over the predictions whose mask is 1: `mask[:, t]` weighs the prediction of `tokens[:, t + 1]`.
    """
    tokens = batch["tokens"]
    logits = module(tokens[:, :-1]).astype(jnp.float32)
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    if "mask" not in batch:
        return nats.mean()
    return Mean(jnp.sum(nats * batch["mask"]), jnp.sum(batch["mask"]))
