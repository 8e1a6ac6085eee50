"""The battery of tensor and sequence parallelism: models whose heads, features and words divide by 8, and cells."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cells import OneDevice, check
from flax import linen as nn
from flax import nnx
from zoo import MLP, cross_entropy, random_tokens

import jaxpar as jp
from jaxpar.models import llama

VOCAB, LENGTH, DIM, LAYERS = 40, 8, 32, 3
SGD = optax.sgd(0.02, momentum=0.9)
STEPS = 3
Built = tuple[jp.Model, dict[str, int] | None]  # and the rules that it needs, if it has names of its own


def _config(**choices: Any) -> llama.Config:
    return llama.Config(vocab=VOCAB, dim=64, layers=5, heads=16, kv_heads=8, ffn=24, **choices)


def scanned() -> Built:
    """`nnx.scan`, grouped queries, a tied embedding, a loss that is a `jp.Mean`."""
    return jp.from_nnx(lambda rngs: llama.Llama(_config(tied=True), rngs=rngs), llama.loss), None


class Block(nnx.Module):
    """Attention and feed-forward of Flax, with biases, and an activation with a rule of differentiation."""

    def __init__(self, heads: int, rngs: nnx.Rngs) -> None:
        self.attention = nnx.MultiHeadAttention(num_heads=heads, in_features=DIM, decode=False, rngs=rngs)
        self.fc1, self.fc2 = nnx.Linear(DIM, 40, rngs=rngs), nnx.Linear(40, DIM, rngs=rngs)
        self.norm1, self.norm2 = nnx.LayerNorm(DIM, rngs=rngs), nnx.LayerNorm(DIM, rngs=rngs)

    def __call__(self, x_BTD: jax.Array, mask: jax.Array) -> jax.Array:
        x_BTD = x_BTD + self.attention(self.norm1(x_BTD), mask=mask)
        return x_BTD + self.fc2(jax.nn.relu(self.fc1(self.norm2(x_BTD))))


class Loop(nnx.Module):
    """Layers in a Python loop, an untied head with a bias, and learned positions."""

    def __init__(self, rngs: nnx.Rngs, heads: int = 8, layers: int = LAYERS, positions: int = LENGTH) -> None:
        self.embed, self.position = nnx.Embed(VOCAB, DIM, rngs=rngs), nnx.Embed(positions, DIM, rngs=rngs)
        self.layers = nnx.List([Block(heads, rngs) for _ in range(layers)])
        self.norm, self.head = nnx.LayerNorm(DIM, rngs=rngs), nnx.Linear(DIM, VOCAB, rngs=rngs)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        x_BTD = self.embed(tokens_BT) + self.position(jnp.arange(tokens_BT.shape[1]))
        for layer in self.layers:
            x_BTD = layer(x_BTD, nnx.make_causal_mask(tokens_BT))
        return self.head(self.norm(x_BTD))


def loop() -> Built:
    return jp.from_nnx(Loop, lambda module, batch: _loss(module(batch["tokens"][:, :-1]), batch)), None


class LinenLayer(nn.Module):
    @nn.compact
    def __call__(self, x_BTD: jax.Array, mask: jax.Array) -> tuple[jax.Array, None]:
        x_BTD = x_BTD + nn.MultiHeadDotProductAttention(num_heads=8)(nn.LayerNorm()(x_BTD), mask=mask)
        hidden = nn.gelu(nn.Dense(40, name="wide")(nn.LayerNorm()(x_BTD)))
        hidden = nn.Dropout(0.2, deterministic=False)(hidden)  # of split features
        return x_BTD + nn.Dense(DIM, name="narrow")(hidden), None


class Linen(nn.Module):
    """`nn.scan` of rematted layers, tied: the embedding's own `attend`."""

    @nn.compact
    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        embed = nn.Embed(VOCAB, DIM)
        axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True, "dropout": True}}
        stack = nn.scan(nn.remat(LinenLayer, prevent_cse=False), in_axes=nn.broadcast, length=LAYERS, **axes)
        x_BTD, _ = stack(name="layers")(embed(tokens_BT), nn.make_causal_mask(tokens_BT))
        return embed.attend(nn.LayerNorm()(x_BTD))


def linen() -> Built:
    loss = lambda apply, batch: _loss(apply(batch["tokens"][:, :-1]), batch)
    model = jp.from_linen(Linen(), loss, example={"tokens": random_tokens(VOCAB, LENGTH + 1)})
    return model, {"wide/kernel": -1, "narrow/kernel": -2}


def function() -> Built:
    """Functions: experts over their own dim, whose balance loss is collected by the scan, and an untied head."""
    experts = 8

    def init(key: jax.Array) -> dict[str, Any]:
        draw = lambda i, *shape: jax.random.normal(jax.random.fold_in(key, i), shape) * shape[-2] ** -0.5
        stack = {"gate": draw(0, LAYERS, DIM, experts), "up": draw(1, LAYERS, experts, DIM, 6)}
        stack["down"] = draw(4, LAYERS, experts, 6, DIM)
        return {"table": draw(2, VOCAB, DIM), "layers": stack, "logits": draw(3, DIM, VOCAB)}

    def loss(params: dict[str, Any], batch: dict[str, jax.Array], key: jax.Array | None) -> tuple[jax.Array, Any]:
        def layer(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
            gates = jax.nn.softmax(x @ w["gate"])
            balance = experts * jnp.sum(jnp.square(gates.mean(axis=1)), axis=-1).mean()
            hidden = jnp.tanh(jnp.einsum("btd,edf->btef", x, w["up"])) * gates[..., None]
            return x + jnp.einsum("btef,efd->btd", hidden, w["down"]), balance

        x, balance = jax.lax.scan(layer, params["table"][batch["tokens"][:, :-1]], params["layers"])
        value = cross_entropy(x @ params["logits"], batch["tokens"][:, 1:])
        return value + 0.1 * balance.sum(), {"balance": balance.mean()}

    return jp.Model(init=init, loss=loss), {"up": -3, "down": -3, "table": 0, "logits": 1}


def mlp() -> Built:
    """No transformer: matmuls of rows and features."""

    def loss(module: MLP, batch: dict[str, jax.Array]) -> jax.Array:
        out = module(batch["tokens"].astype(jnp.float32) / VOCAB)
        return optax.l2_loss(out, jnp.sin(batch["tokens"][:, :5].astype(jnp.float32))).sum(axis=-1).mean()

    rules = {"layers/0/kernel": -1, "layers/1/kernel": -2, "layers/2/kernel": -1, "layers/3/kernel": -2}
    return jp.from_nnx(lambda rngs: MLP(LENGTH + 1, 24, 15, 16, 5, rngs=rngs), loss), rules


MODELS: dict[str, Callable[[], Built]] = {f.__name__: f for f in (scanned, loop, linen, function, mlp)}


def _loss(logits: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
    return cross_entropy(logits, batch["tokens"][:, 1:])


class Cell(NamedTuple):
    model: str
    tensor: int
    beside: str
    sequence: bool
    remat: str


BESIDE = ("", "data=2,fsdp=2,zero=1", "fsdp=2,microbatches=2,prefetch=1", "pipe=2,microbatches=3")
# On 16 devices: all four axes, every ZeRO stage, schedules and chunks.
FOUR = tuple(
    Cell(model, tensor, beside, sequence, remat)
    for model, tensor, beside, sequence, remat in (
        ("scanned", 2, "pipe=2,data=2,fsdp=2,zero=3,microbatches=2", True, "layer"),
        ("loop", 2, "pipe=2,data=2,fsdp=2,zero=1,microbatches=2,schedule=gpipe", True, "none"),
        ("linen", 2, "pipe=2,data=2,fsdp=2,zero=2,microbatches=3", False, "none"),
        ("function", 2, "pipe=2,data=2,fsdp=2,zero=3,microbatches=2", True, "dots"),
        ("scanned", 2, "pipe=2,chunks=2,fsdp=2,zero=1,microbatches=4", False, "dots"),
        ("loop", 4, "pipe=2,fsdp=2,zero=3,microbatches=2", True, "layer"),
        ("linen", 8, "pipe=2,microbatches=2", True, "layer"),
        ("scanned", 4, "data=2,fsdp=2,zero=2,microbatches=2", True, "none"),
    )
)


def product() -> Iterator[Cell]:
    for model, tensor, beside, sequence, remat in itertools.product(
        MODELS, (2, 4, 8), BESIDE, (False, True), ("none", "layer", "dots")
    ):
        devices = tensor * (4 if beside.startswith("data=2,fsdp") else 2 if beside else 1)
        flat = model == "mlp"  # nothing to scan, nothing of three dims
        if devices <= 8 and not (flat and (sequence or remat != "none" or "pipe" in beside)):
            yield Cell(model, tensor, beside, sequence, remat)


@functools.cache
def built(name: str) -> Built:
    return MODELS[name]()


@functools.cache
def one_device(name: str) -> OneDevice:
    return OneDevice(built(name)[0])


@functools.cache
def reference(name: str, blocks: int, rows: int) -> tuple[Any, Any]:
    """Gradients and parameters of one device; blocks of rows have keys of their own."""
    return one_device(name).train(SGD, batch_of(rows), blocks, STEPS)


# One batch for all models, of whose leaves most read some: a module of tests has this as its `pytestmark`.
SHARED_BATCH = pytest.mark.filterwarnings("ignore:the loss does not read batch")


def batch_of(rows: int) -> dict[str, np.ndarray]:
    lengths = 1 + np.arange(rows) * 5 % LENGTH
    mask = (np.arange(LENGTH) < lengths[:, None]).astype(np.float32)
    return {"tokens": random_tokens(VOCAB, LENGTH + 1, rows=rows), "mask": mask}


def check_cell(cell: Cell) -> None:
    """One compiled step against one device."""
    model, rules = built(cell.model)
    text = f"tensor={cell.tensor},sequence={cell.sequence},remat={cell.remat},{cell.beside}".rstrip(",")
    strategy = jp.Strategy.parse(text)
    count = strategy.tensor * strategy.pipe * strategy.data * strategy.fsdp  # type: ignore[operator]
    step = jp.make_train_step(model, SGD, strategy, mesh=jax.devices()[:count], rules=rules)
    blocks = step.replicas * strategy.microbatches
    rows = (4 if step.replicas == 1 else 3) * blocks  # two stages share the logits of 4 rows, not those of 3
    blocks = blocks if cell.model == "linen" else rows  # it has dropout; to the others rows are all the same
    check(step, model, one_device(cell.model).first, batch_of(rows), STEPS, *reference(cell.model, blocks, rows))
