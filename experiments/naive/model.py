"""The tiny decoder-only transformer that every strategy here trains, its optimizer, and its parameters as flat vectors.

B rows, T positions, D residual stream, H heads, K of one head, F feed-forward, V vocabulary, L layers, N devices,
P parameters (in code, `P` is JAX's PartitionSpec). An array named x_BTD has shape [B, T, D]. Layers are stacked, for
`scan`: each of their leaves is [L, ...].
"""

import os
from typing import Any

# Before JAX looks for devices. The collectives of 8 devices wait for each other, so they need a thread each.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("PJRT_NPROC", "32")

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

jax.config.update("jax_platforms", "cpu")

N, B, T, D, H, K, F, V, L = 8, 32, 16, 32, 8, 4, 64, 64, 16
RATE, MOMENTUM = 0.3, 0.9
Tree = Any  # a dict of arrays, or of dicts of arrays

# Parameters before and after the layers, and those of one layer.
OUTER = {"embed": (V, D), "position": (T, D), "norm": (D,), "head": (D, V)}
LAYER = {"query": (D, H, K), "key": (D, H, K), "value": (D, H, K), "out": (H, K, D), "norm_attention": (D,)}
LAYER |= {"up": (D, F), "down": (F, D), "norm_ffn": (D,)}


def init(key: jax.Array) -> Tree:
    keys = iter(jax.random.split(key, len(OUTER | LAYER)))
    draw = lambda name, shape: jnp.ones(shape) if "norm" in name else jax.random.normal(next(keys), shape) / 10
    outer = {name: draw(name, shape) for name, shape in OUTER.items()}
    return {"outer": outer, "layers": {name: draw(name, (L, *shape)) for name, shape in LAYER.items()}}


def norm(x_BTD: jax.Array, scale_D: jax.Array) -> jax.Array:
    return scale_D * x_BTD * jax.lax.rsqrt(jnp.mean(x_BTD**2, axis=-1, keepdims=True) + 1e-6)


def attention(x_BTD: jax.Array, w: Tree) -> jax.Array:
    q, k, v = (jnp.einsum("btd,dhk->bthk", x_BTD, w[name]) for name in ("query", "key", "value"))
    scores_BHTS = jnp.einsum("bthk,bshk->bhts", q, k) / K**0.5
    weights_BHTS = jax.nn.softmax(jnp.where(jnp.tri(T, dtype=bool), scores_BHTS, -1e9))
    return jnp.einsum("bhts,bshk,hkd->btd", weights_BHTS, v, w["out"])


def ffn(x_BTD: jax.Array, w: Tree) -> jax.Array:
    return jax.nn.gelu(x_BTD @ w["up"]) @ w["down"]


def embed(outer: Tree, tokens: jax.Array) -> jax.Array:
    """The residual stream [B, T, D] before the layers, from tokens [B, T + 1]."""
    return outer["embed"][tokens[:, :-1]] + outer["position"]


def layer(x_BTD: jax.Array, w: Tree) -> jax.Array:
    x_BTD = x_BTD + attention(norm(x_BTD, w["norm_attention"]), w)
    return x_BTD + ffn(norm(x_BTD, w["norm_ffn"]), w)


def head_loss(outer: Tree, x_BTD: jax.Array, tokens: jax.Array) -> jax.Array:
    """The mean cross-entropy of the next tokens."""
    log_BTV = jax.nn.log_softmax(norm(x_BTD, outer["norm"]) @ outer["head"])
    return -jnp.take_along_axis(log_BTV, tokens[:, 1:, None], axis=-1).mean()


def stack(x_BTD: jax.Array, w: Tree) -> jax.Array:
    """All layers of a stack, one after the other."""
    return jax.lax.scan(lambda x_BTD, w: (layer(x_BTD, w), None), x_BTD, w)[0]


def loss(params: Tree, tokens: jax.Array) -> jax.Array:
    x_BTD = stack(embed(params["outer"], tokens), params["layers"])
    return head_loss(params["outer"], x_BTD, tokens)


def sgd(params: Tree, momentum: Tree, grads: Tree) -> tuple[Tree, Tree]:
    """SGD with momentum, of whole leaves or of shards: it works element by element."""
    momentum = jax.tree.map(lambda m, g: MOMENTUM * m + g, momentum, grads)
    return jax.tree.map(lambda p, m: p - RATE * m, params, momentum), momentum


def flatten(params: Tree) -> Tree:
    """Flat parameters: one vector for all that is outside the layers, and one a layer, to be moved at once."""
    vector = lambda tree: ravel_pytree(tree)[0]
    return {"outer": vector(params["outer"]), "layers": jax.vmap(vector)(params["layers"])}


def leaves_of(vector: jax.Array, shapes: Tree) -> Tree:
    names = sorted(shapes)  # JAX's order of a dict
    parts = jnp.split(vector, np.cumsum([np.prod(shapes[name]) for name in names])[:-1])
    return {name: part.reshape(shapes[name]) for name, part in zip(names, parts, strict=True)}


outer_of = lambda vector: leaves_of(vector, OUTER)
layer_of = lambda vector: leaves_of(vector, LAYER)
