"""A decoder whose feed-forward is a mixture of experts, in plain Flax NNX; everything else is `llama`'s.

It covers Mixtral (Jiang et al. 2024, arXiv:2401.04088) and Qwen3's mixtures (Yang et al. 2025, arXiv:2505.09388).

    ffn(x) = sum over the k experts e with the largest router(x)_e:  weight_e * expert_e(x)

A `Layer` has two forms: calling it returns activations, and `routed` returns the `Routing` of its tokens too, from
which the loss takes the routers' balance loss and z-loss.

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
from ..parts.config import MixtureSizes, check_kv_heads, check_sizes
from ..parts.stack import run_with


@dataclass(frozen=True)
class Config(MixtureSizes):
    """Sizes of a `Mixtral`. Raises ValueError if they do not fit each other."""

    vocab: int = 256
    dim: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 32
    ffn: int = 192  # hidden features of one expert
    experts: int = 8
    chosen: int = 2  # experts that a token is sent to
    context: int = 1024
    rope_theta: float = 1_000_000.0
    norm_eps: float = 1e-5
    tied: bool = False
    qk_norm: bool = False  # RMSNorm of every head's query and key, as in Qwen3
    normalize: bool = True  # the weights of a token's experts sum to 1
    capacity: float = 0.0  # slots of an expert in each row, in units of the mean load; 0 drops no token
    balance: float = 0.02  # weight of the balance loss, which is computed for each row
    z: float = 0.0  # weight of the router's z-loss

    # Attributes that `llama` reads from its config. They are constants here: without annotations they are no fields.
    rope_factor = 1.0
    dropout = 0.0
    lora = 0

    def __post_init__(self) -> None:
        check_sizes(self)
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary embedding needs pairs: {self.head_dim + 1}, say")
        check_kv_heads(self.heads, self.kv_heads)
        if self.chosen > self.experts:
            raise ValueError(f"chosen={self.chosen} of experts={self.experts}; use 1 to {self.experts}")
        if min(self.capacity, self.balance, self.z) < 0:
            raise ValueError(
                f"capacity={self.capacity}, balance={self.balance}, z={self.z}: use numbers from 0, which is off"
            )

    def _parameters(self, experts: int) -> int:
        # The router counts for all experts, since it scores them all for every token.
        norms = 2 * self.dim + (2 * self.head_dim if self.qk_norm else 0)
        layer = self._attention + self.dim * self.experts + 3 * experts * self.dim * self.ffn + norms
        return self.layers * layer + self.dim + (1 if self.tied else 2) * self.vocab * self.dim

    @property
    def _attention(self) -> int:
        """The number of parameters in one layer's attention."""
        return self.dim * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    def flops(self, rows: int, length: int) -> float:
        """Return the operations of a step, forward and backward.

        A position costs 6 operations per matmul weight that it uses, and 12 L H h T for attention, counted as in
        `llama`. Empty slots of the experts' buffers are not counted.
        """
        # A token runs through the experts that it chose, and the router scores it against all.
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

_MAX_LOAD_METRICS = 16  # with more experts than this, their loads are not reported

# The dim of each kernel that `tensor` splits: heads, every expert's `ffn`, `vocab`. Each rank stores the whole router.
RULES = {
    "(query|key|value|head)/kernel": -1,
    "out/kernel": -2,
    "experts/(gate|up)": -1,
    "experts/down": -2,
    "embedding": -2,
}


class Attention(llama.Attention):
    """Llama's attention, with Qwen3's norms of queries and keys if `config.qk_norm`."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs=rngs)  # type: ignore[arg-type]  # this Config has the sizes that are read
        self.query_norm = llama.RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.key_norm = llama.RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def heads(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the query [B, T, H, h] and the key and value [B, T, K, h], before rotation."""
        query, key, value = super().heads(x_BTD)
        # Over the features of each head, before rotation.
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        return query, key, value


class Experts(nnx.Module):
    """The weights of E SwiGLU feed-forwards: `gate` and `up` [E, D, F], `down` [E, F, D]."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        # As `llama.linear`, for all experts at once.
        def initialize(fan_in: int, fan_out: int, branches: int = 1) -> nnx.Param:
            init = nnx.initializers.normal((fan_in * branches) ** -0.5)
            return nnx.Param(init(rngs.params(), (config.experts, fan_in, fan_out)))

        self.gate, self.up = initialize(config.dim, config.ffn), initialize(config.dim, config.ffn)
        self.down = initialize(config.ffn, config.dim, branches=2 * config.layers)


class Mixture(nnx.Module):
    """A feed-forward of a router and its experts."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.router = llama.linear(config.dim, config.experts, rngs)
        self.experts = Experts(config, rngs=rngs)

    def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, Routing]:
        """[B, T, D] -> [B, T, D], and how its tokens were routed."""
        # `experts` takes arrays, not NNX variables.
        weights = {name: getattr(self.experts, name)[...] for name in ("gate", "up", "down")}
        k, normalize, capacity = self.config.chosen, self.config.normalize, self.config.capacity or None
        return experts(x_BTD, self.router(x_BTD), weights, k=k, normalize=normalize, capacity=capacity)


class Layer(nnx.Module):
    """Attention and a mixture; each reads the normed residual stream and is added to it."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.attention_norm = llama.RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config, rngs=rngs)
        self.ffn_norm = llama.RMSNorm(config.dim, config.norm_eps)
        self.ffn = Mixture(config, rngs=rngs)

    def __call__(self, x_BTD: jax.Array, angles: jax.Array, attend: Attend = attention) -> jax.Array:
        """[B, T, D] and angles [T, h/2] or [B, T, h/2] -> [B, T, D]."""
        return self.routed(x_BTD, angles, attend)[0]

    def routed(self, x_BTD: jax.Array, angles: jax.Array, attend: Attend = attention) -> tuple[jax.Array, Routing]:
        """[B, T, D] and angles [T, h/2] or [B, T, h/2] -> [B, T, D], and how its tokens were routed."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), angles, attend)
        mixed_BTD, routing = self.ffn(self.ffn_norm(x_BTD))
        return x_BTD + mixed_BTD, routing


class Mixtral(llama.Llama):
    """Llama's decoder with mixtures instead of dense feed-forwards."""

    layer = Layer
    config: Config  # type: ignore[assignment]

    def routed(self, tokens_BT: jax.Array, segments_BT: jax.Array | None = None) -> tuple[jax.Array, Routing]:
        """Tokens int32 [B, T] -> logits [B, T, V], and how every layer routed its tokens, leaves [L, B, ...]."""
        arguments = self._layer_arguments(tokens_BT, segments_BT)
        step = lambda layer, x, _: layer.routed(x, *arguments)
        x_BTD, routing = run_with(self.layers, self.embedding[...][tokens_BT], None, step)
        return self._logits(x_BTD), routing


def loss(module: Mixtral, batch: dict[str, jax.Array]) -> tuple[Any, dict[str, Any]]:
    """Return `text.loss` plus the routers' balance loss and z-loss, and metrics.

    The two router losses are weighted by `config.balance` and `config.z`, summed over layers and averaged over rows.
    With a mask or segments, a row weighs as much in this average as the sum of its predictions' weights. Documents of
    one row share its router losses and, with a `capacity`, the slots of its experts.

    Args:
      module: the model.
      batch: as for `text.loss`.

    Returns:
      The loss, and metrics: `nats`, the loss of the text alone; `balance`, averaged over layers, which is 1 if all
      experts are used equally; `dropped`, the fraction of dropped choices. For up to 16 experts also `load_0`,
      `load_1`, ..., in units of the mean load, averaged over layers.
    """
    config = module.config

    def read_routing(routing: Routing) -> tuple[Routing, jax.Array]:
        # [L, B] to [B]: a sum over layers, weighted in the loss.
        return routing, (config.balance * routing.balance + config.z * routing.z).sum(axis=0)

    return routed_loss(module.routed, batch, read_routing)


def routed_loss(
    routed: Callable[..., tuple[jax.Array, Any]],
    batch: dict[str, jax.Array],
    read_routing: Callable[[Any], tuple[Routing, jax.Array]],
) -> tuple[Any, dict[str, Any]]:
    """Return the loss and metrics of `loss` for any model with mixtures.

    Args:
      routed: tokens [B, T] and perhaps segments [B, T] -> logits [B, T, V], and what its layers return about routing.
      batch: as for `text.loss`.
      read_routing: what the layers return -> its `Routing`, leaves [L, B, ...], and what each row adds to the loss [B].
    """
    predictions = text.predictions_of(batch)
    logits, layer_results = routed(*predictions.inputs)
    nats: Any = text.loss_from_logits(logits, predictions)
    routing, row_losses = read_routing(layer_results)
    # Metrics of each row, [B], averaged over layers.
    row_metrics = {"balance": routing.balance.mean(axis=0), "dropped": routing.dropped.mean(axis=0)}
    if (experts := routing.load.shape[-1]) <= _MAX_LOAD_METRICS:
        load = experts * routing.load.mean(axis=0)  # [B, E]
        row_metrics |= {f"load_{e}": load[:, e] for e in range(experts)}
    if predictions.weights is None:
        return nats + row_losses.mean(), {"nats": nats, **{name: x.mean() for name, x in row_metrics.items()}}
    # Weigh rows by their predictions that count, so that all terms have the same count, that of `nats`.
    row_weights = predictions.weights.sum(axis=1)
    metrics = {name: Mean(jnp.sum(x * row_weights), nats.count) for name, x in row_metrics.items()}
    return Mean(nats.total + jnp.sum(row_losses * row_weights), nats.count), {"nats": nats, **metrics}
