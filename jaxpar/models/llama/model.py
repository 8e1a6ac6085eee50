"""A decoder-only transformer in the manner of Llama (Touvron et al. 2023, arXiv:2302.13971), in plain Flax NNX.

It has no annotation and no collective: meshes and strategies are applied to it from outside. The layers are one
`nnx.scan` over parameters stacked on dim 0. No dtype is set: matmuls run in the dtype of the parameters (cast them to
bfloat16 and the model computes in bfloat16), while norms, rotary embedding, attention's softmax and the loss are
float32.

    x = embedding[tokens]
    x = x + attention(norm(x))      for every layer
    x = x + ffn(norm(x))
    logits = norm(x) @ head

Dims: B rows, T positions, D dim, H heads, K kv_heads, h head_dim = D / H, F ffn, V vocab, L layers.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ...backend.text import few
from ...parallel.context.attention.fused import attention
from ..parts.cache import Attend, Cache, run_with_cache
from ..parts.config import check_kv_heads, check_sizes
from ..parts.stack import run, stack
from ..parts.text import Sizes, positions_and_attention
from ..parts.text import chunked_loss as chunked_loss
from ..parts.text import loss as loss
from .lora import PROJECTIONS, LoRALinear


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of a `Llama`. Raises ValueError if they do not fit each other."""

    vocab: int = 256
    dim: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 4  # fewer than heads: grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245)
    ffn: int = 384
    context: int = 1024  # positions that it was trained for; longer inputs are computed too
    rope_theta: float = 10_000.0
    rope_factor: float = 1.0  # Llama 3.1 stretches long wavelengths by this factor; see `rope_table`
    norm_eps: float = 1e-6
    tied: bool = False  # the embedding is also the output head
    dropout: float = 0.0  # rate on each residual branch, drawn from the `dropout` stream
    lora: int = 0  # rank of the adapter of every projection in a layer (`lora.py`); 0 for no adapters
    lora_alpha: float = 16.0  # adapters are scaled by lora_alpha / lora
    lora_targets: str = "+".join(PROJECTIONS)  # the projections with an adapter, such as query+value

    def __post_init__(self) -> None:
        check_sizes(self)
        if self.dim % (2 * self.heads):
            raise ValueError(
                f"dim={self.dim} does not split into heads={self.heads} of an even size, which rotary embedding needs; "
                f"try dim={2 * self.heads * max(1, round(self.dim / (2 * self.heads)))}"
            )
        if unknown := sorted(self.adapted_projections - {*PROJECTIONS}):
            raise ValueError(
                f"lora_targets={self.lora_targets!r} names {few(unknown)}; join some of these by +: "
                f"{', '.join(PROJECTIONS)}"
            )
        check_kv_heads(self.heads, self.kv_heads)

    @property
    def head_dim(self) -> int:
        """The number of features of one head."""
        return self.dim // self.heads

    @property
    def parameters(self) -> int:
        """The exact number of parameters."""
        attention = self.dim * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        layer = attention + 3 * self.dim * self.ffn + 2 * self.dim
        # A tied embedding is the head as well, and counts once.
        base = self.layers * layer + self.dim + (1 if self.tied else 2) * self.vocab * self.dim
        return base + self._adapters

    @property
    def adapted_projections(self) -> frozenset[str]:
        """The names in `lora_targets`."""
        return frozenset(self.lora_targets.split("+"))

    @property
    def _adapters(self) -> int:
        """The number of parameters in adapters: rank x (in + out) for each projection that has one."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        # One side of every projection is D. This is the width of the other side, which for `out` is its input.
        outputs = {"query": queries, "key": keys, "value": keys, "out": queries}
        widths = [self.dim + outputs.get(name, self.ffn) for name in self.adapted_projections]
        return self.layers * self.lora * sum(widths)

    def flops(self, rows: int, length: int) -> float:
        """Return the operations of a step, forward and backward (Chowdhery et al. 2022, arXiv:2204.02311, appendix B).

        A position costs 6 operations per matmul weight, and 12 L D T for attention, which multiplies masked positions
        too. With adapters, a frozen weight costs 4, since it needs no weight gradient, and an adapter's weight 6.
        """
        attention = self.dim * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        weights = self.layers * (attention + 3 * self.dim * self.ffn) + self.vocab * self.dim
        matmul_flops = 4 * weights + 6 * self._adapters if self.lora else 6 * weights
        return float(rows * length * (matmul_flops + 12 * self.layers * self.dim * length))


_galore = partial(Config, vocab=32000)  # sizes on which optimizer papers compare: Zhao et al. 2024, arXiv:2403.03507
_llama2 = partial(Config, vocab=32000, context=4096, norm_eps=1e-5)  # Touvron et al. 2023, arXiv:2307.09288
# Grattafiori et al. 2024, arXiv:2407.21783, table 3; for Llama 3.2 its model cards. 405B was released with Llama 3.1.
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

# The dim of each kernel that `tensor` splits (Shoeybi et al. 2019, arXiv:1909.08053, section 3): heads, `ffn`, `vocab`.
# The matrix of an adapter that has the kernel's split dim is split with it.
RULES = {
    "(query|key|value|gate|up|head)/kernel": -1, "(out|down)/kernel": -2, "embedding": -2,
    "(query|key|value|gate|up)/lora_b": -1, "(out|down)/lora_a": -2,
}  # fmt: skip


def linear(fan_in: int, fan_out: int, rngs: nnx.Rngs, *, branches: int = 1) -> nnx.Linear:
    """Build a projection without bias, with initial gain 1 / sqrt(branches).

    `branches` counts the outputs that add up in the residual stream: its variance then does not grow with depth.
    """
    init = nnx.initializers.normal((fan_in * branches) ** -0.5)
    return nnx.Linear(fan_in, fan_out, use_bias=False, kernel_init=init, rngs=rngs)


def _projection(
    config: Config, name: str, fan_in: int, fan_out: int, rngs: nnx.Rngs, *, branches: int = 1
) -> nnx.Linear:
    """Build a projection of a layer as `linear` does, with an adapter if the config has one for this name."""
    if not config.lora or name not in config.adapted_projections:
        return linear(fan_in, fan_out, rngs, branches=branches)
    init = nnx.initializers.normal((fan_in * branches) ** -0.5)
    return LoRALinear(fan_in, fan_out, config.lora, config.lora_alpha / config.lora, kernel_init=init, rngs=rngs)


class RMSNorm(nnx.Module):
    """Root-mean-square norm (Zhang & Sennrich 2019, arXiv:1910.07467), in float32, returned in the input's dtype."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        self.scale, self.eps = nnx.Param(jnp.ones(dim)), eps

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """[B, T, D] -> [B, T, D], same dtype."""
        x_float32 = x_BTD.astype(jnp.float32)  # a mean of squares in bfloat16 would keep 8 bits
        normed = x_float32 * jax.lax.rsqrt(jnp.mean(jnp.square(x_float32), axis=-1, keepdims=True) + self.eps)
        return (normed * self.scale[...].astype(jnp.float32)).astype(x_BTD.dtype)


def rope_table(positions: int | jax.Array, head_dim: int, theta: float, factor: float = 1.0) -> jax.Array:
    """Return the angles of rotary embedding in radians, float32 [T, h/2] (Su et al. 2021, arXiv:2104.09864, 3.2.2).

        angle[t, i] = t * theta ** (-2 i / h)

    `positions` is T, for positions 0 to T - 1; or an array of positions, int [B, T], for angles [B, T, h/2].

    With a `factor`, frequencies are scaled as in Llama 3.1 (`apply_scaling` of its reference code), by their turns in
    the 8,192 positions of its first training. Frequencies of less than one turn are divided by `factor`, those of four
    turns or more are unchanged, and those between are interpolated.
    """
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if factor != 1:
        turns = 8192 * frequencies / (2 * jnp.pi)
        unscaled_weight = jnp.clip((turns - 1) / (4 - 1), 0, 1)
        frequencies *= unscaled_weight + (1 - unscaled_weight) / factor
    position = jnp.asarray(positions, jnp.float32) if jnp.ndim(positions) else jnp.arange(positions, dtype=jnp.float32)
    return position[..., None] * frequencies


def rope(x_BTHh: jax.Array, angles: jax.Array) -> jax.Array:
    """Rotate the pair (i, i + h/2) of every head by `angles`; the result has the shape and dtype of x.

    `angles` are [T, h/2], or [B, T, h/2] for rows with positions of their own.
    """
    # [..., T, 1, h/2]: one angle for all heads.
    cos, sin = jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]
    a, b = jnp.split(x_BTHh.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTHh.dtype)


class Attention(nnx.Module):
    """Causal grouped-query attention with rotary embedding."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.head_dim = config.head_dim
        self.query = _projection(config, "query", config.dim, config.heads * config.head_dim, rngs)
        self.key = _projection(config, "key", config.dim, config.kv_heads * config.head_dim, rngs)
        self.value = _projection(config, "value", config.dim, config.kv_heads * config.head_dim, rngs)
        # Each layer has two branches, attention and feed-forward, that add to the residual stream.
        self.out = _projection(
            config, "out", config.heads * config.head_dim, config.dim, rngs, branches=2 * config.layers
        )

    def __call__(self, x_BTD: jax.Array, angles: jax.Array, attend: Attend = attention) -> jax.Array:
        """[B, T, D] and angles [T, h/2] or [B, T, h/2] -> [B, T, D]."""
        query, key, value = self.heads(x_BTD)
        mixed = attend(rope(query, angles), rope(key, angles), value)
        return self.out(mixed.reshape(*x_BTD.shape[:2], -1))

    def heads(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the query [B, T, H, h] and the key and value [B, T, K, h], before rotation."""
        # The number of heads follows from the kernel: keys and values may have fewer than queries.
        query, key, value = (
            project(x_BTD).reshape(*x_BTD.shape[:2], -1, self.head_dim)
            for project in (self.query, self.key, self.value)
        )
        return query, key, value


class SwiGLU(nnx.Module):
    """Gated feed-forward (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.gate = _projection(config, "gate", config.dim, config.ffn, rngs)
        self.up = _projection(config, "up", config.dim, config.ffn, rngs)
        self.down = _projection(config, "down", config.ffn, config.dim, rngs, branches=2 * config.layers)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """[B, T, D] -> [B, T, D]."""
        return self.down(jax.nn.silu(self.gate(x_BTD)) * self.up(x_BTD))


class Layer(nnx.Module):
    """Attention and feed-forward; each reads the normed residual stream and is added to it."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config, rngs=rngs)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn = SwiGLU(config, rngs=rngs)
        # Without dropout the module gets no random stream, so that the model has no state except its weights.
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs if config.dropout else None)

    def __call__(self, x_BTD: jax.Array, angles: jax.Array, attend: Attend = attention) -> jax.Array:
        """[B, T, D] and angles [T, h/2] or [B, T, h/2] -> [B, T, D]."""
        x_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD), angles, attend))
        return x_BTD + self.dropout(self.ffn(self.ffn_norm(x_BTD)))


class Llama(nnx.Module):
    """The decoder: embedding, `config.layers` layers, norm, and a head that may be the embedding."""

    layer = Layer  # subclasses use other layers

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.config = config
        # Not nnx.Embed: it fixes its dtype when it is built, and bfloat16 parameters would still compute in float32.
        init = nnx.initializers.normal(config.dim**-0.5)
        self.embedding = nnx.Param(init(rngs.params(), (config.vocab, config.dim)))
        self.layers = stack(lambda rngs: self.layer(config, rngs=rngs), config.layers, rngs)
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head = None if config.tied else linear(config.dim, config.vocab, rngs)

    def __call__(self, tokens_BT: jax.Array, segments_BT: jax.Array | None = None) -> jax.Array:
        """Tokens int32 [B, T] -> logits [B, T, V] in the dtype of the parameters.

        `segments_BT`, int [B, T], is the document of each token, for rows with several documents; see `loss`.
        """
        return self._logits(self._last_layer(tokens_BT, segments_BT))

    def hidden(self, tokens_BT: jax.Array, segments_BT: jax.Array | None = None) -> jax.Array:
        """Tokens int32 [B, T] -> the normed output of the last layer [B, T, D], which the head reads."""
        return self.norm(self._last_layer(tokens_BT, segments_BT))

    def to_logits(self) -> jax.Array:
        """Return the matrix [D, V] that maps `hidden` to logits: the head's kernel, or the embedding if it is tied."""
        return self.embedding[...].T if self.head is None else self.head.kernel[...]

    def extend(self, tokens_BT: jax.Array, cache: Cache, start: jax.Array) -> tuple[jax.Array, Cache]:
        """Tokens [B, T] from position `start` on -> logits [B, T, V] and the cache; see `parts/cache.py`."""
        # `start` may be a tracer: compute the angles of all S positions, then slice those of the T new ones.
        angles = jax.lax.dynamic_slice_in_dim(self._angles(cache.positions), start, tokens_BT.shape[1])
        x_BTD, cache = run_with_cache(self.layers, self.embedding[...][tokens_BT], cache, start, angles)
        return self._logits(x_BTD), cache

    def empty(self, rows: int, positions: int) -> Cache:
        """Return an empty cache with room for `positions` positions."""
        config, dtype = self.config, self.layers.attention.key.kernel.dtype
        return Cache.create(config.layers, rows, positions, config.kv_heads, config.head_dim, dtype)

    def _last_layer(self, tokens_BT: jax.Array, segments_BT: jax.Array | None) -> jax.Array:
        """Return the output of the last layer, [B, T, D]."""
        return run(self.layers, self.embedding[...][tokens_BT], *self._layer_arguments(tokens_BT, segments_BT))

    def _layer_arguments(self, tokens_BT: jax.Array, segments_BT: jax.Array | None) -> tuple[Any, ...]:
        """Return the arguments of a layer after x: angles [T, h/2]; with segments, angles [B, T, h/2] and `attend`."""
        if segments_BT is None:
            return (self._angles(tokens_BT.shape[1]),)
        positions_BT, attend = positions_and_attention(segments_BT)
        return self._angles(positions_BT), attend

    def _angles(self, positions: int | jax.Array) -> jax.Array:
        """Return the rotary angles [T, h/2] of positions 0 to `positions` - 1, or [B, T, h/2] of positions [B, T]."""
        return rope_table(positions, self.config.head_dim, self.config.rope_theta, self.config.rope_factor)

    def _logits(self, x_BTD: jax.Array) -> jax.Array:
        """Return the logits [B, T, V]: the final norm, then the head or the embedding."""
        x_BTD = self.norm(x_BTD)
        return x_BTD @ self.embedding[...].T if self.head is None else self.head(x_BTD)
