"""DeepSeek-V3 (DeepSeek-AI 2024, arXiv:2412.19437) in plain Flax NNX: attention with latent keys and values, first
dense layers, then mixtures with shared experts. Its head for several tokens at once (section 2.2) is left out: it is
of training, and the model without it is the one that writes.

Dims: B rows, T positions, D dim, H heads, n head_dim, r rope_dim, q = n + r, v value_dim, E experts, F expert_ffn,
V vocab, L mixtures.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxpar.model.paths import name_of
from jaxpar.models import llama, mixtral
from jaxpar.models.parts.stack import run, run_with, stack
from jaxpar.parallel.context.attention.fused import attention
from jaxpar.parallel.expert.ops.experts import Routing, experts

from . import yarn
from .config import Config

# Whole heads, parts of `ffn` (of every expert too) and of `vocab`. Latents and the router are whole on each rank.
RULES = {
    "(query|key_value|gate|up|head)/kernel": -1,
    "(out|down)/kernel": -2,
    "experts/(gate|up)": -1,
    "experts/down": -2,
    "embedding": -2,
}


class Attention(nnx.Module):
    """Causal attention whose keys and values are made of `rank` features of a position (section 2.1.1). What is rotated
    is apart, and of keys the same for all heads.
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.config, heads = config, config.heads
        self.query_latent = llama.linear(config.dim, config.query_rank, rngs)
        self.query_norm = llama.RMSNorm(config.query_rank)
        self.query = llama.linear(config.query_rank, heads * config.query_dim, rngs)
        self.latent = llama.linear(config.dim, config.rank + config.rope_dim, rngs)
        self.latent_norm = llama.RMSNorm(config.rank)
        self.key_value = llama.linear(config.rank, heads * (config.head_dim + config.value_dim), rngs)
        self.out = llama.linear(heads * config.value_dim, config.dim, rngs, branches=2 * config.layers)

    def __call__(self, x_BTD: jax.Array, angles: jax.Array) -> jax.Array:
        """[B, T, D] and angles [T, r/2] -> [B, T, D]."""
        config, (b, t, _) = self.config, x_BTD.shape
        heads = lambda x, features: x.reshape(b, t, -1, features)
        query = heads(self.query(self.query_norm(self.query_latent(x_BTD))), config.query_dim)
        latent, key_rope = jnp.split(self.latent(x_BTD), [config.rank], axis=-1)
        key_value = heads(self.key_value(self.latent_norm(latent)), config.head_dim + config.value_dim)

        query, query_rope = jnp.split(query, [config.head_dim], axis=-1)
        key, value = jnp.split(key_value, [config.head_dim], axis=-1)
        key_rope = yarn.rotated(key_rope[:, :, None], angles)
        key_rope = jnp.broadcast_to(key_rope, (*key.shape[:3], config.rope_dim))
        query = jnp.concatenate([query, yarn.rotated(query_rope, angles)], axis=-1)
        key = jnp.concatenate([key, key_rope], axis=-1)

        # Kernels of attention take values as wide as keys.
        value = jnp.pad(value, [(0, 0)] * 3 + [(0, config.query_dim - config.value_dim)])
        mixed = attention(query, key, value, scale=yarn.softmax_scale(config.query_dim, config.rope_factor))
        return self.out(mixed[..., : config.value_dim].reshape(b, t, -1))


class Mixture(nnx.Module):
    """A router, its experts, those that every token meets, and the bias of the choice (section 2.1.2)."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.router = llama.linear(config.dim, config.experts, rngs)
        self.bias = nnx.Param(jnp.zeros(config.experts))
        sizes: Any = config  # those that are read have the same names
        self.experts = mixtral.Experts(dataclasses.replace(sizes, ffn=config.expert_ffn), rngs=rngs)
        self.shared = llama.SwiGLU(dataclasses.replace(sizes, ffn=config.expert_ffn * config.shared), rngs=rngs)

    def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, Routing, jax.Array]:
        """[B, T, D] -> [B, T, D], what became of its tokens, and [B], which is 0 and has the bias's gradient: by how
        much the load of each expert is above the mean.
        """
        config, bias = self.config, self.bias[...]
        out, routing = experts(
            x_BTD,
            self.router(x_BTD),
            {name: getattr(self.experts, name)[...] for name in ("gate", "up", "down")},
            k=config.chosen,
            scores="sigmoid",
            normalize=config.normalize,
            scale=config.scale,
            bias=bias,
            groups=config.groups,
            group_limit=config.group_limit if config.groups > 1 else None,
            capacity=config.capacity or None,
        )
        above = routing.load - 1 / config.experts
        zero = above @ (bias - jax.lax.stop_gradient(bias)).astype(above.dtype)
        return out + self.shared(x_BTD), routing, zero


class Layer(nnx.Module):
    """Attention and a feed-forward, dense or a mixture, each normed before and added to the residual stream."""

    def __init__(self, config: Config, dense: bool, *, rngs: nnx.Rngs) -> None:
        self.attention_norm = llama.RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config, rngs=rngs)
        self.ffn_norm = llama.RMSNorm(config.dim, config.norm_eps)
        self.ffn = llama.SwiGLU(config, rngs=rngs) if dense else Mixture(config, rngs=rngs)  # type: ignore[arg-type]

    def __call__(self, x_BTD: jax.Array, angles: jax.Array) -> Any:
        """[B, T, D] and angles [T, r/2] -> [B, T, D]; of a mixture also what its `__call__` adds."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), angles)
        out = self.ffn(self.ffn_norm(x_BTD))
        return (x_BTD + out[0], out[1:]) if isinstance(out, tuple) else x_BTD + out


class DeepSeek(nnx.Module):
    """The decoder: embedding, `config.dense` dense layers, the mixtures, norm and head."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.config = config
        scale = nnx.initializers.normal(config.dim**-0.5)
        self.embedding = nnx.Param(scale(rngs.params(), (config.vocab, config.dim)))
        self.dense = stack(lambda rngs: Layer(config, True, rngs=rngs), config.dense, rngs)
        self.layers = stack(lambda rngs: Layer(config, False, rngs=rngs), config.layers - config.dense, rngs)
        self.norm = llama.RMSNorm(config.dim, config.norm_eps)
        self.head = llama.linear(config.dim, config.vocab, rngs)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """Tokens int32 [B, T] -> logits [B, T, V] in the dtype of the parameters."""
        return self.routed(tokens_BT)[0]

    def routed(self, tokens_BT: jax.Array) -> tuple[jax.Array, tuple[Routing, jax.Array]]:
        """The same, and of every mixture what became of its tokens, [L, B, ...], with the zeros of `Mixture`."""
        config = self.config
        angles = yarn.angles(tokens_BT.shape[1], config.rope_dim, config.rope_theta, config.rope_factor)
        x_BTD = run(self.dense, self.embedding[...][tokens_BT], angles)
        x_BTD, found = run_with(self.layers, x_BTD, None, lambda layer, x, _: layer(x, angles))
        return self.head(self.norm(x_BTD)), found


def loss(module: DeepSeek, batch: dict[str, jax.Array]) -> tuple[Any, dict[str, Any]]:
    """`text.loss`, and the balance loss of the routers, summed over layers, with the weight of the config.

    Metrics as of `mixtral.loss`. Of the routers' biases the gradient is that of no loss: how much more of the tokens
    came to an expert than to the mean one. `balanced` takes its sign.
    """

    def added(found: tuple[Routing, jax.Array]) -> tuple[Routing, jax.Array]:
        routing, zeros = found
        return routing, (module.config.balance * routing.balance + zeros).sum(axis=0)

    return mixtral.routed_loss(module.routed, batch, added)


def balanced(tx: optax.GradientTransformation, rate: float = 1e-3) -> optax.GradientTransformation:
    """The optimizer of a `DeepSeek`: `tx` for its weights; for the routers' biases steps of `rate`, down where an
    expert had more than the mean load and up where it had less (Wang et al. 2024, arXiv:2408.15664, algorithm 1; the
    paper's section 4.2 takes 0.001). The load is the mean over all rows of the step, whatever the layout.
    """

    def kinds(params: Any) -> Any:
        kind = lambda path, _: "bias" if name_of(path).endswith("ffn/bias") else "weight"
        return jax.tree_util.tree_map_with_path(kind, params)

    return optax.partition({"weight": tx, "bias": optax.sign_sgd(rate)}, kinds)
