"""Pipelines of models without one stack of layers: exact, what ranks hold, what is refused, how even stages are."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cells import OneDevice, check
from flax import linen as nn
from zoo import random_tokens

import jaxpar as jp

SGD = optax.sgd(0.05, momentum=0.9)
ROWS = 16


def made(model: jp.Model, text: str, devices: int, optimizer: Any = SGD) -> Any:
    return jp.make_train_step(model, optimizer, text, mesh=jax.devices()[:devices])


def weighted(losses: jax.Array, batch: Any) -> jp.Mean:
    """Under random weights of the rows, so that no two replicas or microbatches count alike."""
    losses = losses.reshape(losses.shape[0], -1).mean(1)
    return jp.Mean((losses * batch["w"]).sum(), batch["w"].sum())


def weights() -> np.ndarray:
    return np.random.default_rng(3).uniform(0.1, 2, ROWS).astype(np.float32)


# -- models ------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Of a U-Net: GroupNorm, two convolutions, what the time step adds."""

    features: int

    @nn.compact
    def __call__(self, x_BHWC: jax.Array, t_BT: jax.Array) -> jax.Array:
        y = nn.Conv(self.features, (3, 3))(nn.silu(nn.GroupNorm(2)(x_BHWC)))
        y = nn.Conv(self.features, (3, 3))(nn.silu(y + nn.Dense(self.features)(t_BT)[:, None, None]))
        return y + (x_BHWC if x_BHWC.shape[-1] == self.features else nn.Conv(self.features, (1, 1))(x_BHWC))


class UNet(nn.Module):
    """Skips cross the whole model, and what the time step makes is read by every block."""

    @nn.compact
    def __call__(self, x: jax.Array, t: jax.Array) -> jax.Array:
        t = nn.Dense(16)(nn.silu(nn.Dense(16)(jnp.stack([jnp.sin(t * k) for k in range(1, 5)], -1))))
        x, skips = nn.Conv(4, (3, 3))(x), []
        for features in (4, 8):
            skips.append(x := Block(features)(x, t))
            x = nn.avg_pool(x, (2, 2), (2, 2))
        x = Block(12)(x, t)
        for features in (8, 4):
            b, h, w, c = x.shape
            x = jax.image.resize(x, (b, 2 * h, 2 * w, c), "nearest")
            x = Block(features)(jnp.concatenate([x, skips.pop()], -1), t)
        return nn.Conv(2, (3, 3))(x)


def unet() -> tuple[jp.Model, Any]:
    draw = np.random.default_rng(0)
    batch = {"x": draw.normal(size=(ROWS, 8, 8, 2)), "t": draw.uniform(size=ROWS)}
    batch = {name: x.astype(np.float32) for name, x in batch.items()} | {"w": weights()}

    def loss(apply: Any, batch: Any) -> jp.Mean:
        noise = jnp.cos(3 * batch["x"])
        return weighted((apply(batch["x"] + noise, batch["t"]) - noise) ** 2, batch)

    return jp.from_linen(UNet(), loss, batch), batch


class Layer(nn.Module):
    heads: int = 2

    @nn.compact
    def __call__(self, x_BTD: jax.Array, memory_BSD: jax.Array | None = None) -> jax.Array:
        dim, causal = x_BTD.shape[-1], None if memory_BSD is None else nn.make_causal_mask(x_BTD[..., 0])
        x_BTD = x_BTD + nn.MultiHeadDotProductAttention(self.heads)(nn.LayerNorm()(x_BTD), mask=causal)
        if memory_BSD is not None:
            x_BTD = x_BTD + nn.MultiHeadDotProductAttention(self.heads)(nn.LayerNorm()(x_BTD), memory_BSD)
        return x_BTD + nn.Dense(dim)(nn.relu(nn.Dense(3 * dim)(nn.LayerNorm()(x_BTD))))


class EncoderDecoder(nn.Module):
    """T5's shape: two stacks, and one embedding that both read and that is the head."""

    @nn.compact
    def __call__(self, source_BS: jax.Array, target_BT: jax.Array) -> jax.Array:
        embed = nn.Embed(30, 16)
        memory, x = embed(source_BS), embed(target_BT)
        for _ in range(2):
            memory = Layer()(memory)
        for _ in range(2):
            x = Layer()(x, memory)
        return embed.attend(nn.LayerNorm()(x))


def encoder_decoder() -> tuple[jp.Model, Any]:
    batch = {"source": random_tokens(30, 7), "target": random_tokens(30, 6, seed=1), "w": weights()}

    def loss(apply: Any, batch: Any) -> jp.Mean:
        logits = apply(batch["source"], batch["target"][:, :-1])
        return weighted(optax.softmax_cross_entropy_with_integer_labels(logits, batch["target"][:, 1:]), batch)

    return jp.from_linen(EncoderDecoder(), loss, batch), batch


def irregular() -> tuple[jp.Model, Any]:
    """13 blocks, no two alike: widths, functions, a gather, a scan, a convolution, dropout, a constant."""
    widths = [12, 20, 8, 36, 16, 24, 10, 28, 14, 18, 40, 22, 6, 9]
    functions = [jnp.tanh, jax.nn.relu, jnp.sin, jax.nn.gelu, jax.nn.softplus]

    def init(key: jax.Array) -> Any:
        draw = lambda i, *shape: shape[0] ** -0.5 * jax.random.normal(jax.random.fold_in(key, i), shape)
        sizes = enumerate(itertools.pairwise(widths))
        return {f"block{i}": {"w": draw(i, a, b), "b": jnp.zeros(b)} for i, (a, b) in sizes}

    def loss(params: Any, batch: Any, key: jax.Array | None) -> jp.Mean:
        x = batch["x"]
        for i in range(13):
            p = params[f"block{i}"]
            x = functions[i % 5](x @ p["w"] + p["b"])
            if i == 3:
                x = x[:, jnp.argsort(jnp.arange(16) * 7 % 16)]
            if i == 5:
                x, _ = jax.lax.scan(lambda x, k: (x + 0.1 * jnp.cos(k * x), None), x, jnp.arange(3.0))
            if i == 8 and key is not None:
                x = x * jax.random.bernoulli(key, 0.8, x.shape) / 0.8
            if i == 10:
                x = x + jnp.asarray(np.linspace(0, 1, 22, dtype=np.float32)) * jnp.sign(batch["x"][:, :1])
        return weighted((x - batch["y"]) ** 2, batch)

    draw = np.random.default_rng(0)
    batch = {"x": draw.normal(size=(ROWS, 12)).astype(np.float32), "y": draw.normal(size=(ROWS, 9)).astype(np.float32)}
    return jp.Model(init=init, loss=loss), batch | {"w": weights()}


MODELS: dict[str, Callable[[], tuple[jp.Model, Any]]] = {
    "unet": unet,
    "encoder_decoder": encoder_decoder,
    "irregular": irregular,
}


@functools.cache
def of(name: str) -> tuple[jp.Model, Any]:
    return MODELS[name]()


@functools.cache
def one_device(name: str) -> OneDevice:
    return OneDevice(of(name)[0])


# -- exact -------------------------------------------------------------------------------------------------------------

CELLS = [
    ("irregular", "pipe=4,microbatches=4", 4),
    ("irregular", "pipe=2,fsdp=2,microbatches=2", 4),
    ("encoder_decoder", "pipe=2,data=2,microbatches=2,stages=cut", 4),
]
BATTERY = [
    ("irregular", "pipe=2,microbatches=3,data=1,chunks=1,schedule=gpipe", 2),
    ("irregular", "pipe=2,chunks=2,microbatches=2,fsdp=2,zero=1", 4),
    ("irregular", "pipe=4,data=2,microbatches=8", 8),
    ("unet", "pipe=4,microbatches=4", 4),
    ("unet", "pipe=2,fsdp=2,data=2,microbatches=2", 8),
    ("unet", "pipe=2,fsdp=2,zero=2,schedule=gpipe,microbatches=4", 4),
    ("encoder_decoder", "pipe=4,fsdp=2,zero=3,microbatches=4,stages=cut", 8),
    ("encoder_decoder", "pipe=2,fsdp=2,zero=2,microbatches=1,stages=cut", 4),
]


@pytest.mark.parametrize(
    ("name", "strategy", "devices"), [*CELLS, *(pytest.param(*cell, marks=pytest.mark.battery) for cell in BATTERY)]
)
def test_exact(name: str, strategy: str, devices: int) -> None:
    """Gradients, three steps of SGD with momentum, bytes at rest, the order of collectives, and the closed form."""
    (model, batch), one = of(name), one_device(name)
    step = made(model, strategy, devices)
    assert step.layout.kept.cut
    blocks = step.replicas * step.strategy.microbatches
    rows = ROWS // blocks * blocks
    batch = jax.tree.map(lambda x: x[:rows], batch)
    grads, params = one.train(SGD, batch, blocks, 3)
    check(step, model, one.first, batch, 3, grads, params)
