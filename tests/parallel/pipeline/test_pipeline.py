"""Pipelines train every model as one device does, under every schedule, alone and with the data strategies.

A cell compiles one step and checks gradients (the momentum after the first step is the gradient), three steps of SGD
with momentum, and the collectives: kind, axes, count and bytes. The cells of `make test` are a covering array: every
pair of choices is in one of them (`pairs`).
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cells import OneDevice, check, covering, pairs_of
from flax import linen as nn
from flax import nnx
from zoo import LinenLayer, cross_entropy, random_tokens

import jaxpar as jp
from jaxpar.models import llama

VOCAB, LENGTH = 31, 7
DEEP = 32  # layers: 8 ranks with 4 chunks
LAYERS, BLOCKS = 9, 5  # of scanned models and of loops; no number of stages here divides them
SGD = optax.sgd(0.02, momentum=0.9)
STEPS = 3


class Loop(nnx.Module):
    """Layers in a Python loop, as most code has them; the embedding is also the head."""

    def __init__(self, config: llama.Config, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(config.vocab, config.dim, rngs=rngs)
        self.layers = nnx.List([llama.Layer(config, rngs=rngs) for _ in range(config.layers)])
        self.norm = llama.RMSNorm(config.dim)
        self.head_dim = config.head_dim

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        x_BTD, angles = self.embed(tokens_BT), llama.rope_table(tokens_BT.shape[1], self.head_dim, 1e4)
        for layer in self.layers:
            x_BTD = layer(x_BTD, angles)
        return self.embed.attend(self.norm(x_BTD))


class LinenLoop(nn.Module):
    @nn.compact
    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        x_BTD, mask = nn.Embed(VOCAB, 12)(tokens_BT), nn.make_causal_mask(tokens_BT)
        for _ in range(BLOCKS):
            x_BTD, _ = LinenLayer()(x_BTD, mask)
        return nn.Dense(VOCAB)(nn.LayerNorm()(x_BTD))


def _config(**choices: Any) -> llama.Config:
    sizes = {"vocab": VOCAB, "dim": 12, "layers": LAYERS, "heads": 3, "kv_heads": 1, "ffn": 20}
    return llama.Config(**{**sizes, **choices})


def scanned() -> jp.Model:
    """Return a model with `nnx.scan`, a tied embedding, dropout, and a `jp.Mean` as loss."""
    return jp.from_nnx(lambda rngs: llama.Llama(_config(tied=True, dropout=0.2), rngs=rngs), llama.loss)


def loop() -> jp.Model:
    """Return an NNX loop with a tied embedding and dropout: every layer has a stream of random numbers of its own."""
    return jp.from_nnx(lambda rngs: Loop(_config(layers=BLOCKS, dropout=0.2), rngs), llama.loss)


def linen_loop() -> jp.Model:
    def loss(apply: Any, batch: dict[str, jax.Array]) -> jax.Array:
        return cross_entropy(apply(batch["tokens"][:, :-1]), batch["tokens"][:, 1:])

    return jp.from_linen(LinenLoop(), loss, example={"tokens": random_tokens(VOCAB, LENGTH)})


def experts() -> jp.Model:
    """Return a model of functions: an untied head, and a balance loss of every layer, which the scan collects."""
    dim, count = 12, 3

    def init(key: jax.Array) -> dict[str, Any]:
        draw = lambda i, *shape: jax.random.normal(jax.random.fold_in(key, i), shape) * shape[-2] ** -0.5
        stack = {"gate": draw(0, LAYERS, dim, count), "up": draw(1, LAYERS, count, dim, dim)}
        return {"embed": draw(2, VOCAB, dim), "layers": stack, "head": draw(3, dim, VOCAB)}

    def loss(params: dict[str, Any], batch: dict[str, jax.Array], key: jax.Array | None) -> tuple[jax.Array, Any]:
        def layer(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
            gates = jax.nn.softmax(x @ w["gate"])
            balance = count * jnp.sum(jnp.square(gates.mean(axis=(1,))), axis=-1).mean()
            return x + jnp.einsum("bte,btd,edf->btf", gates, jnp.tanh(x), w["up"]), balance

        x, balance = jax.lax.scan(layer, params["embed"][batch["tokens"][:, :-1]], params["layers"])
        value = cross_entropy(x @ params["head"], batch["tokens"][:, 1:])
        return value + 0.1 * balance.sum(), {"balance": balance.mean()}

    return jp.Model(init=init, loss=loss)


def deep(layers: int = DEEP) -> jp.Model:
    """Return a deep model whose heads, features and vocabulary two ranks of `tensor` can share."""
    config = llama.Config(vocab=VOCAB + 1, dim=16, layers=layers, heads=4, kv_heads=2, ffn=24)
    return jp.from_nnx(lambda rngs: llama.Llama(config, rngs=rngs), llama.loss)


MODELS: dict[str, Callable[[], jp.Model]] = {f.__name__: f for f in (scanned, loop, linen_loop, experts)}
BUILDERS = {**MODELS, "deep": deep}  # `deep` for every schedule, in `schedule_cells.py`


class Cell(NamedTuple):
    model: str
    pipe: int
    schedule: str
    chunks: int
    microbatches: str  # in terms of p
    beside: str
    remat: str


COUNTS = {"p": lambda p: p, "p+1": lambda p: p + 1, "2p": lambda p: 2 * p, "4p": lambda p: 4 * p}
BESIDE = ("", "data=2", "fsdp=2,zero=1", "fsdp=2,zero=2", "fsdp=2,zero=3", "data=2,fsdp=2,zero=3")


def product() -> Iterator[Cell]:
    schedules = (("1f1b", 1), ("1f1b", 2), ("gpipe", 1), ("gpipe", 2))
    for model, pipe, (schedule, chunks), count, beside, remat in itertools.product(
        MODELS, (2, 4, 8), schedules, COUNTS, BESIDE, ("none", "layer")
    ):
        devices = pipe * (1 if not beside else 4 if beside.startswith("data=2,") else 2)
        layers = BLOCKS if "loop" in model else LAYERS
        if devices <= 8 and pipe * chunks <= layers and (chunks == 1 or COUNTS[count](pipe) % pipe == 0):
            yield Cell(model, pipe, schedule, chunks, count, beside, remat)


def pairs(cell: Cell) -> set[Any]:
    """Return the pairs of choices that a cell covers.

    The scanned models count as one choice, and loops, which become scans, as another; chunks and remat meet each model.
    """
    kinds = pairs_of(("loop" in cell.model, *cell[1:]))
    return kinds | {(cell.model, "chunks", cell.chunks), (cell.model, "remat", cell.remat)}


# `make test` leaves out 2 p microbatches, which lie between p and 4 p; ZeRO-1, which optimizers meet in
# `test_stages.py`; and all three axes, which the cells on 16 devices of `parallel/tensor/test_tensor.py` have.
LEFT_OUT = ("2p", "fsdp=2,zero=1", "data=2,fsdp=2,zero=3")
CHOSEN = covering((cell for cell in product() if not {*LEFT_OUT} & {*cell}), pairs)


def cells() -> Iterator[Any]:
    for cell in product():
        marks = [pytest.mark.xdist_group(f"pipeline {cell.model}")]  # the cells of a model share references
        marks += [] if cell in CHOSEN else [pytest.mark.battery]
        yield pytest.param(cell, marks=marks, id="-".join(map(str, cell)).replace(",", "-"))


def test_covering_array_is_small() -> None:
    assert len(CHOSEN) <= 14


@functools.cache
def model_of(name: str) -> jp.Model:
    return BUILDERS[name]()


@functools.cache
def one_device(name: str) -> OneDevice:
    return OneDevice(model_of(name))


@functools.cache
def reference(name: str, blocks: int) -> tuple[Any, Any]:
    """Return gradients and parameters of one device."""
    return one_device(name).train(SGD, batch_of(blocks), blocks, STEPS)


def batch_of(rows: int) -> dict[str, np.ndarray]:
    tokens = random_tokens(VOCAB, LENGTH, rows=rows)
    lengths = 1 + np.arange(rows) * 5 % (LENGTH - 1)
    return {"tokens": tokens, "mask": (np.arange(LENGTH - 1) < lengths[:, None]).astype(np.float32)}


@pytest.mark.parametrize("cell", list(cells()))
def test_cell(cell: Cell) -> None:
    model, m = model_of(cell.model), COUNTS[cell.microbatches](cell.pipe)
    text = f"pipe={cell.pipe},schedule={cell.schedule},chunks={cell.chunks},microbatches={m},remat={cell.remat}"
    strategy = jp.Strategy.parse(f"{text},{cell.beside}".rstrip(","))
    devices = jax.devices()[: strategy.pipe * strategy.data * strategy.fsdp]  # type: ignore[operator]
    step = jp.make_train_step(model, SGD, strategy, mesh=devices)
    batch = batch_of(step.replicas * m)
    check(step, model, one_device(cell.model).first, batch, STEPS, *reference(cell.model, step.replicas * m))
