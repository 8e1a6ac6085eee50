"""A decoder-only transformer in the manner of GPT-2 (Radford et al. 2019), in plain Flax NNX.

Learned positions, LayerNorm with biases before each branch, biases everywhere, GELU by its tanh formula, and an
embedding that is also the output head. The layers are one `nnx.scan` over parameters stacked on dim 0. No dtype is set:
matmuls run in the dtype of the parameters, while norms, attention's softmax and the loss are float32.

    x = embedding[tokens] + position
    x = x + attention(norm(x))                 for every layer
    x = x + down(gelu(up(norm(x))))
    logits = norm(x) @ embedding.T

Dims: B rows, T positions, D dim, H heads, h head_dim = D / H, V vocab, L layers.
"""

from dataclasses import dataclass

import jax
from flax import nnx

from ..parallel.context.attention.fused import attention
from .parts.cache import Attend, Cache, run_with_cache
from .parts.config import check_sizes
from .parts.stack import run, stack
from .parts.text import Sizes, positions_and_attention
from .parts.text import loss as loss


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of a `GPT`. Raises ValueError if they do not fit each other."""

    vocab: int = 50257
    context: int = 1024  # positions that have embeddings
    dim: int = 768
    layers: int = 12
    heads: int = 12
    dropout: float = 0.0  # of the embedding and of each residual branch, from the `dropout` stream (0.1 as published)

    def __post_init__(self) -> None:
        check_sizes(self)
        if self.dim % self.heads:
            # Round to the nearest multiple of heads, at least one feature a head.
            nearest_dim = self.heads * max(1, round(self.dim / self.heads))
            raise ValueError(f"dim={self.dim} does not split into heads={self.heads}; try dim={nearest_dim}")

    @property
    def head_dim(self) -> int:
        """The number of features of one head."""
        return self.dim // self.heads

    @property
    def parameters(self) -> int:
        """The exact number of parameters."""
        layer = 12 * self.dim**2 + 13 * self.dim  # attention 4 + 4, feed-forward 8 + 5, two norms 2 + 2
        return self.layers * layer + (2 + self.vocab + self.context) * self.dim

    def flops(self, rows: int, length: int) -> float:
        """Return the operations forward and backward, counted as in `llama.Config.flops`."""
        # The embedding counts once, as the output head: looking up tokens and positions multiplies nothing.
        weights = self.layers * 12 * self.dim**2 + self.vocab * self.dim
        return float(rows * length * (6 * weights + 12 * self.layers * self.dim * length))


SIZES = {
    "gpt-tiny": Config(vocab=256, context=256, dim=128, layers=4, heads=4),
    "gpt2": Config(),
    "gpt2-medium": Config(dim=1024, layers=24, heads=16),
    "gpt2-large": Config(dim=1280, layers=36, heads=20),
    "gpt2-xl": Config(dim=1600, layers=48, heads=25),
}

# The dim of each kernel that `tensor` splits (Shoeybi et al. 2019, arXiv:1909.08053, section 3): heads, features of the
# feed-forward, and the vocabulary. Biases follow their kernels; position embeddings are replicated.
RULES = {"(query|key|value|up)/kernel": -1, "(out|down)/kernel": -2, "embedding": -2}


def _linear(fan_in: int, fan_out: int, rngs: nnx.Rngs, *, branches: int = 1) -> nnx.Linear:
    """Build a projection with GPT-2's initial values: normal(0.02), divided by sqrt(branches).

    `branches` counts the outputs that add up in the residual stream: its variance then does not grow with depth.
    """
    return nnx.Linear(fan_in, fan_out, kernel_init=nnx.initializers.normal(0.02 * branches**-0.5), rngs=rngs)


def _norm(dim: int, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """Build a LayerNorm with GPT-2's epsilon."""
    return nnx.LayerNorm(dim, epsilon=1e-5, rngs=rngs)


class Attention(nnx.Module):
    """Causal multi-head attention."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.head_dim = config.head_dim
        self.query, self.key, self.value = (_linear(config.dim, config.dim, rngs) for _ in range(3))
        # Each layer has two branches, attention and feed-forward, that add to the residual stream.
        self.out = _linear(config.dim, config.dim, rngs, branches=2 * config.layers)

    def __call__(self, x_BTD: jax.Array, attend: Attend = attention) -> jax.Array:
        """[B, T, D] -> [B, T, D]."""
        # [B, T, H, h] each.
        query, key, value = (
            project(x_BTD).reshape(*x_BTD.shape[:2], -1, self.head_dim)
            for project in (self.query, self.key, self.value)
        )
        return self.out(attend(query, key, value).reshape(x_BTD.shape))


class Layer(nnx.Module):
    """Attention and feed-forward; each reads the normed residual stream and is added to it."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.attention_norm = _norm(config.dim, rngs)
        self.attention = Attention(config, rngs=rngs)
        self.ffn_norm = _norm(config.dim, rngs)
        self.up = _linear(config.dim, 4 * config.dim, rngs)
        self.down = _linear(4 * config.dim, config.dim, rngs, branches=2 * config.layers)
        # Without dropout the module gets no random stream, so that the model has no state except its weights.
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs if config.dropout else None)

    def __call__(self, x_BTD: jax.Array, attend: Attend = attention) -> jax.Array:
        """[B, T, D] -> [B, T, D]."""
        x_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD), attend))
        hidden = jax.nn.gelu(self.up(self.ffn_norm(x_BTD)), approximate=True)
        return x_BTD + self.dropout(self.down(hidden))


class GPT(nnx.Module):
    """The decoder: embeddings of tokens and positions, `config.layers` layers, norm, and the embedding as head."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.config = config
        # Not nnx.Embed: it fixes its dtype when it is built, and bfloat16 parameters would still compute in float32.
        self.embedding = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (config.vocab, config.dim)))
        self.position = nnx.Param(nnx.initializers.normal(0.01)(rngs.params(), (config.context, config.dim)))
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs if config.dropout else None)
        self.layers = stack(lambda rngs: Layer(config, rngs=rngs), config.layers, rngs)
        self.norm = _norm(config.dim, rngs)

    def __call__(self, tokens_BT: jax.Array, segments_BT: jax.Array | None = None) -> jax.Array:
        """Tokens int32 [B, T] -> logits [B, T, V] in the dtype of the parameters. Raises ValueError for T > context.

        `segments_BT`, int [B, T], is the document of each token, for rows with several documents; see `loss`.
        """
        length = tokens_BT.shape[1]
        if length > self.config.context:
            raise ValueError(
                f"length={length} is more than the {self.config.context} positions that the model has embeddings for; "
                f"use a length up to {self.config.context}, or named(..., context={length})"
            )
        if segments_BT is None:
            return self._logits(run(self.layers, self._embed(tokens_BT, self.position[:length])))
        positions_BT, attend = positions_and_attention(segments_BT)
        return self._logits(run(self.layers, self._embed(tokens_BT, self.position[...][positions_BT]), attend))

    def extend(self, tokens_BT: jax.Array, cache: Cache, start: jax.Array) -> tuple[jax.Array, Cache]:
        """Tokens [B, T] from position `start` on -> logits [B, T, V] and the cache; see `parts/cache.py`."""
        # `dynamic_slice`, because `start` is a tracer in the loop of `generate`.
        position_TD = jax.lax.dynamic_slice_in_dim(self.position[...], start, tokens_BT.shape[1])
        x_BTD, cache = run_with_cache(self.layers, self._embed(tokens_BT, position_TD), cache, start)
        return self._logits(x_BTD), cache

    def empty(self, rows: int, positions: int) -> Cache:
        """Return an empty cache with room for `positions` positions."""
        config, dtype = self.config, self.layers.attention.key.kernel.dtype
        return Cache.create(config.layers, rows, positions, config.heads, config.head_dim, dtype)

    def _embed(self, tokens_BT: jax.Array, position: jax.Array) -> jax.Array:
        """Add the embeddings of tokens and positions, [B, T, D]; those of positions are [T, D] or [B, T, D]."""
        return self.dropout(self.embedding[...][tokens_BT] + position)

    def _logits(self, x_BTD: jax.Array) -> jax.Array:
        """Return the logits [B, T, V]: the final norm, then the embedding as the output head."""
        return self.norm(x_BTD) @ self.embedding[...].T
