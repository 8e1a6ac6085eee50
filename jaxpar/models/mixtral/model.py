"""A decoder whose feed-forward is a mixture of experts: Mixtral (Jiang et al. 2024, arXiv:2401.04088), Qwen3's mixtures
(Yang et al. 2025, arXiv:2505.09388), in plain Flax NNX. All else is `llama`'s.

Dims: B rows, T positions, D dim, H heads, K kv_heads, h head_dim, E experts, k chosen, F ffn, V vocab, L layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ...model.model import Mean
from ...parallel.context.attention.fused import attention
from ...parallel.expert.ops.experts import Routing, experts
from .. import llama
from ..parts import text
from ..parts.cache import Attend
from ..parts.config import MixtureSizes, check_sizes
from ..parts.stack import run_with


@dataclass(frozen=True)
class Config(MixtureSizes):
    """Sizes of a `Mixtral`. Raises ValueError where they do not fit each other."""

    vocab: int = 256
    dim: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 32
    ffn: int = 192  # hidden features of one expert
    experts: int = 8
    chosen: int = 2  # experts of a token
    context: int = 1024
    rope_theta: float = 1_000_000.0
    norm_eps: float = 1e-5
    tied: bool = False
    qk_norm: bool = False  # RMSNorm of every head's query and key, as Qwen3 has it
    normalize: bool = True  # the weights of a token's experts sum to 1
    capacity: float = 0.0  # slots of an expert in each row, in units of the mean load; 0: no token is dropped
    balance: float = 0.02  # weight of the balance loss, of each row
    z: float = 0.0  # weight of the router's z-loss

    rope_factor = 1.0  # as `llama` has it, and no size
    dropout = 0.0
    lora = 0

    def __post_init__(self) -> None:
        check_sizes(self)
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary embedding needs pairs: {self.head_dim + 1}, say")
        if self.heads % self.kv_heads:
            divisors = [k for k in range(1, self.heads + 1) if self.heads % k == 0]
            raise ValueError(f"kv_heads={self.kv_heads} does not divide heads={self.heads}; use one of {divisors}")
        if self.chosen > self.experts:
            raise ValueError(f"chosen={self.chosen} of experts={self.experts}; use 1 to {self.experts}")
        if min(self.capacity, self.balance, self.z) < 0:
            raise ValueError(
                f"capacity={self.capacity}, balance={self.balance}, z={self.z}: use numbers from 0, which is off"
            )

    def _parameters(self, experts: int) -> int:
        norms = 2 * self.dim + (2 * self.head_dim if self.qk_norm else 0)
        layer = self._attention + self.dim * self.experts + 3 * experts * self.dim * self.ffn + norms
        return self.layers * layer + self.dim + (1 if self.tied else 2) * self.vocab * self.dim

    @property
    def _attention(self) -> int:
        return self.dim * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    def flops(self, rows: int, length: int) -> float:
        """Operations forward and backward: 6 per position and weight of a matmul that it meets, and 12 L H h T per
        position for attention (as `llama` counts it). Empty slots of experts' buffers are not counted.
        """
        layer = self._attention + self.dim * self.experts + 3 * self.chosen * self.dim * self.ffn
        weights = self.layers * layer + self.vocab * self.dim
        return float(rows * length * (6 * weights + 12 * self.layers * self.heads * self.head_dim * length))


# The numbers of their `config.json`: https://huggingface.co/mistralai/Mixtral-8x7B-v0.1 and Qwen/Qwen3-30B-A3B.
SIZES = {
    "mixtral-tiny": Config(vocab=256, dim=128, layers=4, heads=4, kv_heads=2, head_dim=32, ffn=192),
    "mixtral-8x7b": Config(
        vocab=32000, dim=4096, layers=32, heads=32, kv_heads=8, head_dim=128, ffn=14336, context=32768
    ),
    "qwen3-30b-a3b": Config(
        vocab=151936,
        dim=2048,
        layers=48,
        heads=32,
        kv_heads=4,
        head_dim=128,
        ffn=768,
        experts=128,
        chosen=8,
        context=40960,
        norm_eps=1e-6,
        qk_norm=True,
        balance=0.001,
    ),
}

_SHOWN = 16  # experts whose load is a metric of its own

# Whole heads, parts of every expert's `ffn`, and of `vocab`. The router is whole on each rank.
RULES = {
    "(query|key|value|head)/kernel": -1,
    "out/kernel": -2,
    "experts/(gate|up)": -1,
    "experts/down": -2,
    "embedding": -2,
}


class Attention(llama.Attention):
    """Llama's, with Qwen3's norms of queries and keys where the config asks for them."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs=rngs)  # type: ignore[arg-type]  # it has the sizes that are read
        self.query_norm = llama.RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.key_norm = llama.RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def heads(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Query [B, T, H, h], key and value [B, T, K, h], before rotation."""
        query, key, value = super().heads(x_BTD)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        return query, key, value


class Experts(nnx.Module):
    """The weights of E SwiGLU feed-forwards: [E, D, F] and [E, F, D]."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        def draw(fan_in: int, fan_out: int, branches: int = 1) -> nnx.Param:
            init = nnx.initializers.normal((fan_in * branches) ** -0.5)
            return nnx.Param(init(rngs.params(), (config.experts, fan_in, fan_out)))

        self.gate, self.up = draw(config.dim, config.ffn), draw(config.dim, config.ffn)
        self.down = draw(config.ffn, config.dim, branches=2 * config.layers)


class Mixture(nnx.Module):
    """A router and its experts."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.router = llama.linear(config.dim, config.experts, rngs)
        self.experts = Experts(config, rngs=rngs)

    def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, Routing]:
        """[B, T, D] -> [B, T, D], and what became of its tokens."""
        weights = {name: getattr(self.experts, name)[...] for name in ("gate", "up", "down")}
        k, normalize, capacity = self.config.chosen, self.config.normalize, self.config.capacity or None
        return experts(x_BTD, self.router(x_BTD), weights, k=k, normalize=normalize, capacity=capacity)


class Layer(nnx.Module):
    """Attention and a mixture, each normed before and added to the residual stream."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.attention_norm = llama.RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config, rngs=rngs)
        self.ffn_norm = llama.RMSNorm(config.dim, config.norm_eps)
        self.ffn = Mixture(config, rngs=rngs)

    def __call__(self, x_BTD: jax.Array, angles: jax.Array, attend: Attend = attention) -> jax.Array:
        """[B, T, D] and angles [T, h/2] -> [B, T, D]."""
        return self.routed(x_BTD, angles, attend)[0]

    def routed(self, x_BTD: jax.Array, angles: jax.Array, attend: Attend = attention) -> tuple[jax.Array, Routing]:
        """The same, and what became of its tokens."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), angles, attend)
        out, routing = self.ffn(self.ffn_norm(x_BTD))
        return x_BTD + out, routing


class Mixtral(llama.Llama):
    """Llama's decoder with mixtures in place of its feed-forwards."""

    layer = Layer
    config: Config  # type: ignore[assignment]

    def routed(self, tokens_BT: jax.Array) -> tuple[jax.Array, Routing]:
        """Tokens int32 [B, T] -> logits [B, T, V], and of every layer what became of its tokens, [L, B, ...]."""
        angles = self._angles(tokens_BT.shape[1])
        step = lambda layer, x, _: layer.routed(x, angles)
        x_BTD, routing = run_with(self.layers, self.embedding[...][tokens_BT], None, step)
        return self._logits(x_BTD), routing


def loss(module: Mixtral, batch: dict[str, jax.Array]) -> tuple[Any, dict[str, Any]]:
    """`text.loss`, and the balance loss and z-loss of the routers, summed over layers, with the weights of the config.

    A row with a mask has as much weight in them as it has predictions that count. Metrics: `nats` (without them),
    `balance` (mean over layers; 1 where all experts are used alike), `dropped`, the share of dropped choices, and of up
    to 16 experts `load_0`, `load_1`, ..., in units of the mean load (mean over layers).
    """
    config = module.config
    added = lambda routing: (routing, (config.balance * routing.balance + config.z * routing.z).sum(axis=0))
    return routed_loss(module.routed, batch, added)


def routed_loss(
    routed: Callable[[jax.Array], tuple[jax.Array, Any]],
    batch: dict[str, jax.Array],
    added: Callable[[Any], tuple[Routing, jax.Array]],
) -> tuple[Any, dict[str, Any]]:
    """The loss and metrics of `loss` for a model of mixtures.

    Args:
      routed: tokens [B, T] -> logits [B, T, V], and of every layer what became of its tokens.
      added: the latter -> its `Routing`, leaves [L, B, ...], and what each row adds to the loss, [B].
    """
    tokens, mask = text.given(batch)
    logits, layers = routed(tokens[:, :-1])
    nats: Any = text.loss_of(logits, tokens, mask)
    routing, each_row = added(layers)
    each = {"balance": routing.balance.mean(axis=0), "dropped": routing.dropped.mean(axis=0)}
    if (experts := routing.load.shape[-1]) <= _SHOWN:
        load = experts * routing.load.mean(axis=0)
        each |= {f"load_{e}": load[:, e] for e in range(experts)}
    if mask is None:
        return nats + each_row.mean(), {"nats": nats, **{name: x.mean() for name, x in each.items()}}
    rows = mask.sum(axis=1)
    metrics = {name: Mean(jnp.sum(x * rows), nats.count) for name, x in each.items()}
    return Mean(nats.total + jnp.sum(each_row * rows), nats.count), {"nats": nats, **metrics}
