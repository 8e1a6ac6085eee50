"""A decoder-only transformer in the manner of Llama (Touvron et al. 2023, arXiv:2302.13971), in plain Flax NNX.

It knows nothing of meshes or strategies: no annotation, no collective. The layers are one `nnx.scan` over parameters
stacked on dim 0. No dtype is set: matmuls run in the dtype of the parameters (cast them to bfloat16 and the model
computes in bfloat16), while norms, rotary embedding, attention's softmax and the loss are float32.

Dims: B rows, T positions, D dim, H heads, K kv_heads, h head_dim = D / H, F ffn, V vocab, L layers.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from ...parallel.context.attention.fused import attention
from ..parts.cache import Attend, Cache, extended
from ..parts.config import check_sizes
from ..parts.stack import run, stack
from ..parts.text import Sizes
from ..parts.text import chunked_loss as chunked_loss
from ..parts.text import loss as loss
from .lora import LoRALinear


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of a `Llama`. Raises ValueError where they do not fit each other."""

    vocab: int = 256
    dim: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 4  # fewer than heads: grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245)
    ffn: int = 384
    context: int = 1024  # positions it is meant for; more are computed all the same
    rope_theta: float = 10_000.0
    rope_factor: float = 1.0  # by which Llama 3.1 stretches long wavelengths; see `rope_table`
    norm_eps: float = 1e-6
    tied: bool = False  # the embedding is also the output head
    dropout: float = 0.0  # of each residual branch, drawn from the `dropout` stream
    lora: int = 0  # the rank of an adapter beside every projection of a layer; 0 for none: see `lora.py`
    lora_alpha: float = 16.0  # the adapters count lora_alpha / lora times

    def __post_init__(self) -> None:
        check_sizes(self)
        if self.dim % (2 * self.heads):
            raise ValueError(
                f"dim={self.dim} does not split into heads={self.heads} of an even size, which rotary embedding needs; "
                f"try dim={2 * self.heads * max(1, round(self.dim / (2 * self.heads)))}"
            )
        if self.heads % self.kv_heads:
            divisors = [k for k in range(1, self.heads + 1) if self.heads % k == 0]
            raise ValueError(f"kv_heads={self.kv_heads} does not divide heads={self.heads}; use one of {divisors}")

    @property
    def head_dim(self) -> int:
        """Features of one head."""
        return self.dim // self.heads

    @property
    def parameters(self) -> int:
        """The exact number of parameters."""
        attention = self.dim * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        layer = attention + 3 * self.dim * self.ffn + 2 * self.dim
        every = self.layers * layer + self.dim + (1 if self.tied else 2) * self.vocab * self.dim
        return every + self._adapters

    @property
    def _adapters(self) -> int:
        """The parameters of all adapters: rank x (in + out) for each projection."""
        attention = 4 * self.dim + self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * self.lora * (attention + 3 * (self.dim + self.ffn))

    def flops(self, rows: int, length: int) -> float:
        """Operations forward and backward: 6 per position and weight of a matmul, and 12 L D T per position for
        attention, which multiplies what the causal mask then hides (Chowdhery et al. 2022, arXiv:2204.02311, B). With
        adapters, 4 per weight, which has no gradient, and 6 per weight of an adapter.
        """
        attention = self.dim * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        weights = self.layers * (attention + 3 * self.dim * self.ffn) + self.vocab * self.dim
        of_weights = 4 * weights + 6 * self._adapters if self.lora else 6 * weights
        return float(rows * length * (of_weights + 12 * self.layers * self.dim * length))


_galore = partial(Config, vocab=32000)  # on which papers on optimizers compare: Zhao et al. 2024, arXiv:2403.03507
_llama2 = partial(Config, vocab=32000, context=4096, norm_eps=1e-5)  # Touvron et al. 2023, arXiv:2307.09288
# Grattafiori et al. 2024, arXiv:2407.21783, table 3; of Llama 3.2 the model cards. 405B came with Llama 3.1.
_llama3 = partial(Config, vocab=128256, kv_heads=8, context=8192, rope_theta=500_000.0, norm_eps=1e-5)
_llama31 = partial(_llama3, context=131072, rope_factor=8.0)
_llama32 = partial(_llama31, rope_factor=32.0, tied=True)

SIZES = {
    "llama-tiny": Config(vocab=256, dim=128, layers=4, heads=4, kv_heads=2, ffn=384),
    "llama-60m": _galore(dim=512, layers=8, heads=8, kv_heads=8, ffn=1376),
    "llama-130m": _galore(dim=768, layers=12, heads=12, kv_heads=12, ffn=2048),
    "llama-350m": _galore(dim=1024, layers=24, heads=16, kv_heads=16, ffn=2736),
    "llama-1b": _galore(dim=2048, layers=24, heads=32, kv_heads=32, ffn=5461),
    "llama2-7b": _llama2(dim=4096, layers=32, heads=32, kv_heads=32, ffn=11008),
    "llama2-13b": _llama2(dim=5120, layers=40, heads=40, kv_heads=40, ffn=13824),
    "llama2-70b": _llama2(dim=8192, layers=80, heads=64, kv_heads=8, ffn=28672),
    "llama3-8b": _llama3(dim=4096, layers=32, heads=32, ffn=14336),
    "llama3-70b": _llama3(dim=8192, layers=80, heads=64, ffn=28672),
    "llama3-405b": _llama31(dim=16384, layers=126, heads=128, ffn=53248),
    "llama3.2-1b": _llama32(dim=2048, layers=16, heads=32, ffn=8192),
    "llama3.2-3b": _llama32(dim=3072, layers=28, heads=24, ffn=8192),
}

# What `tensor` splits (Shoeybi et al. 2019, arXiv:1909.08053, section 3): whole heads, parts of `ffn` and of `vocab`.
RULES = {
    "(query|key|value|gate|up|head)/kernel": -1, "(out|down)/kernel": -2, "embedding": -2,
    "(query|key|value|gate|up)/lora_b": -1, "(out|down)/lora_a": -2,
}  # fmt: skip


def linear(fan_in: int, fan_out: int, rngs: nnx.Rngs, *, branches: int = 1) -> nnx.Linear:
    """A bias-free projection with unit gain, or 1 / sqrt(branches) where `branches` outputs add up in the residual."""
    init = nnx.initializers.normal((fan_in * branches) ** -0.5)
    return nnx.Linear(fan_in, fan_out, use_bias=False, kernel_init=init, rngs=rngs)


def _projection(config: Config, fan_in: int, fan_out: int, rngs: nnx.Rngs, *, branches: int = 1) -> nnx.Linear:
    """One of a layer, which has an adapter where the model has any."""
    if not config.lora:
        return linear(fan_in, fan_out, rngs, branches=branches)
    init = nnx.initializers.normal((fan_in * branches) ** -0.5)
    return LoRALinear(fan_in, fan_out, config.lora, config.lora_alpha / config.lora, kernel_init=init, rngs=rngs)


class RMSNorm(nnx.Module):
    """Root-mean-square norm (Zhang & Sennrich 2019, arXiv:1910.07467), in float32, returned in the input's dtype."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        self.scale, self.eps = nnx.Param(jnp.ones(dim)), eps

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """[B, T, D] -> [B, T, D], same dtype."""
        wide = x_BTD.astype(jnp.float32)
        unit = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        return (unit * self.scale[...].astype(jnp.float32)).astype(x_BTD.dtype)


def rope_table(length: int, head_dim: int, theta: float, factor: float = 1.0) -> jax.Array:
    """Angles float32 [T, h/2] of rotary embedding (Su et al. 2021, arXiv:2104.09864, section 3.2.2), in radians.

    Llama 3.1 divides by `factor` the frequencies that turn less than once in the 8,192 positions of its first training,
    leaves those that turn 4 times or more, and interpolates between them (`apply_scaling` of its reference code).
    """
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if factor != 1:
        kept = jnp.clip((8192 * frequency / (2 * jnp.pi) - 1) / (4 - 1), 0, 1)
        frequency *= kept + (1 - kept) / factor
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
        self.query = _projection(config, config.dim, config.heads * config.head_dim, rngs)
        self.key = _projection(config, config.dim, config.kv_heads * config.head_dim, rngs)
        self.value = _projection(config, config.dim, config.kv_heads * config.head_dim, rngs)
        self.out = _projection(config, config.heads * config.head_dim, config.dim, rngs, branches=2 * config.layers)

    def __call__(self, x_BTD: jax.Array, angles: jax.Array, attend: Attend = attention) -> jax.Array:
        """[B, T, D] and angles [T, h/2] -> [B, T, D]."""
        query, key, value = self.heads(x_BTD)
        mixed = attend(rope(query, angles), rope(key, angles), value)
        return self.out(mixed.reshape(*x_BTD.shape[:2], -1))

    def heads(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Query [B, T, H, h], key and value [B, T, K, h], before rotation."""
        query, key, value = (
            project(x_BTD).reshape(*x_BTD.shape[:2], -1, self.head_dim)
            for project in (self.query, self.key, self.value)
        )
        return query, key, value


class SwiGLU(nnx.Module):
    """Gated feed-forward (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.gate = _projection(config, config.dim, config.ffn, rngs)
        self.up = _projection(config, config.dim, config.ffn, rngs)
        self.down = _projection(config, config.ffn, config.dim, rngs, branches=2 * config.layers)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """[B, T, D] -> [B, T, D]."""
        return self.down(jax.nn.silu(self.gate(x_BTD)) * self.up(x_BTD))


class Layer(nnx.Module):
    """Attention and feed-forward, each normed before and added to the residual stream."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config, rngs=rngs)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn = SwiGLU(config, rngs=rngs)
        # Without dropout no stream is made, so that the model has no state beside its weights.
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs if config.dropout else None)

    def __call__(self, x_BTD: jax.Array, angles: jax.Array, attend: Attend = attention) -> jax.Array:
        """[B, T, D] and angles [T, h/2] -> [B, T, D]."""
        x_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD), angles, attend))
        return x_BTD + self.dropout(self.ffn(self.ffn_norm(x_BTD)))


class Llama(nnx.Module):
    """The decoder: embedding, `config.layers` layers, norm, and a head that may be the embedding."""

    layer = Layer

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.config = config
        # Not nnx.Embed: it fixes its dtype when it is made, and bfloat16 parameters would still compute in float32.
        scale = nnx.initializers.normal(config.dim**-0.5)
        self.embedding = nnx.Param(scale(rngs.params(), (config.vocab, config.dim)))
        self.layers = stack(lambda rngs: self.layer(config, rngs=rngs), config.layers, rngs)
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head = None if config.tied else linear(config.dim, config.vocab, rngs)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """Tokens int32 [B, T] -> logits [B, T, V] in the dtype of the parameters."""
        return self._logits(run(self.layers, self.embedding[...][tokens_BT], self._angles(tokens_BT.shape[1])))

    def hidden(self, tokens_BT: jax.Array) -> jax.Array:
        """Tokens int32 [B, T] -> [B, T, D]: what the head makes logits of."""
        return self.norm(run(self.layers, self.embedding[...][tokens_BT], self._angles(tokens_BT.shape[1])))

    def to_logits(self) -> jax.Array:
        """The head's weights [D, V]."""
        return self.embedding[...].T if self.head is None else self.head.kernel[...]

    def extend(self, tokens_BT: jax.Array, cache: Cache, at: jax.Array) -> tuple[jax.Array, Cache]:
        """As `__call__` for tokens at positions `at` and on, behind those whose keys and values are in the cache
        (`parts/cache.py`): logits [B, T, V], and the cache with theirs.
        """
        angles = jax.lax.dynamic_slice_in_dim(self._angles(cache.positions), at, tokens_BT.shape[1])
        x_BTD, cache = extended(self.layers, self.embedding[...][tokens_BT], cache, at, angles)
        return self._logits(x_BTD), cache

    def empty(self, rows: int, positions: int) -> Cache:
        """A cache without anything in it."""
        config, dtype = self.config, self.layers.attention.key.kernel.dtype
        return Cache.create(config.layers, rows, positions, config.kv_heads, config.head_dim, dtype)

    def _angles(self, length: int) -> jax.Array:
        return rope_table(length, self.config.head_dim, self.config.rope_theta, self.config.rope_factor)

    def _logits(self, x_BTD: jax.Array) -> jax.Array:
        x_BTD = self.norm(x_BTD)
        return x_BTD @ self.embedding[...].T if self.head is None else self.head(x_BTD)
