"""Models and cells of pipelines: every schedule with all numbers of stages and microbatches, and with every other axis.

A cell compiles one step and checks gradients (the momentum after the first step is the gradient), three steps of SGD
with momentum, and the collectives: kind, axes, count and bytes. `test_pipeline.py` chooses some for `make test`.
`chosen` is for the battery. There a schedule with a number of chunks appears with every p and every m. It appears with
every model, mesh, number of rows and choice of remat at least once, and so does every pair of these choices.
"""

import functools
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from cells import OneDevice, check, covering, pairs_of
from flax import linen as nn
from flax import nnx
from zoo import LinenLayer, cross_entropy, random_tokens

import jaxpar as jp
from jaxpar.inspect.expected import expected
from jaxpar.models import llama
from jaxpar.strategy.schedules import SCHEDULES

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
BUILDERS = {**MODELS, "deep": deep}


@functools.cache
def model_of(name: str) -> jp.Model:
    return BUILDERS[name]()


@functools.cache
def one_device(name: str) -> OneDevice:
    return OneDevice(model_of(name))


def batch_of(rows: int) -> dict[str, np.ndarray]:
    tokens = random_tokens(VOCAB, LENGTH, rows=rows)
    lengths = 1 + np.arange(rows) * 5 % (LENGTH - 1)
    return {"tokens": tokens, "mask": (np.arange(LENGTH - 1) < lengths[:, None]).astype(np.float32)}


# -- cells -------------------------------------------------------------------------------------------------------------

COUNTS: dict[str, Callable[[int], int]] = {
    "1": lambda p: 1,
    "p": lambda p: p,
    "p+1": lambda p: p + 1,
    "2p": lambda p: 2 * p,
    "3p": lambda p: 3 * p,
}
BESIDE = ("", "data=2", "fsdp=2,zero=1", "fsdp=2,zero=2", "fsdp=2,zero=3", "data=2,fsdp=2,zero=3")
LOCKSTEP = ("gpipe", "1f1b", "1f1b-overlap")
TENSOR = ("tensor=2", "tensor=2,sequence=true", "fsdp=2,zero=3,tensor=2,sequence=true")


DEPTH = {name: DEEP if name == "deep" else BLOCKS if "loop" in name else LAYERS for name in BUILDERS}


class Cell(NamedTuple):
    model: str
    pipe: int
    schedule: str
    chunks: int
    microbatches: str  # in terms of p
    rows: str  # of a microbatch; with p rows, each rank computes the head of one
    beside: str
    remat: str

    @property
    def devices(self) -> int:
        """Return the number of devices."""
        return self.pipe * 2 ** self.beside.count("=2") // (2 if "zero=2" in self.beside else 1)


def kinds() -> Iterator[tuple[str, int]]:
    """Yield each schedule with each number of chunks that it may have."""
    for name, recipe in SCHEDULES.items():
        chunks = dict.fromkeys(LOCKSTEP, (1, 2, 4))
        yield from ((name, v) for v in chunks.get(name, (2,) if recipe.placement == "V" else (1,)))


def product() -> Iterator[Cell]:
    """Yield all cells on up to 16 devices."""
    for model, pipe, (name, chunks), count, rows, beside, remat in itertools.product(
        BUILDERS, (2, 4, 8), kinds(), COUNTS, ("1", "p"), (*BESIDE, *TENSOR), ("none", "layer", "twice")
    ):
        cell, m = Cell(model, pipe, name, chunks, count, rows, beside, remat), COUNTS[count](pipe)
        if name == "dualpipe-v" and m < 2 * pipe:
            continue  # it needs a microbatch for each stage
        if name in LOCKSTEP and chunks > 1 and m % pipe:
            continue  # their chunks take microbatches in groups of p
        if name in LOCKSTEP and remat == "twice":
            continue  # their backwards are whole
        if cell.devices <= 16 and pipe * chunks <= DEPTH[model] and ("tensor" not in beside or model == "deep"):
            yield cell


def covered_choices(cell: Cell) -> set[Any]:
    """Return what one cell covers: pairs of choices, and the triple of schedule (with its chunks), p and m."""
    kind = (cell.schedule, cell.chunks)
    choices = (kind, cell.pipe, cell.microbatches, cell.rows, cell.beside, cell.remat, cell.model)
    return {*pairs_of(choices), (kind, cell.pipe, cell.microbatches)}


@functools.cache
def chosen() -> tuple[Cell, ...]:
    """Return the covering array."""
    return tuple(sorted(covering(product(), covered_choices)))


@functools.cache
def reference(name: str, blocks: int, rows: int) -> tuple[Any, Any]:
    """Return gradients and parameters of one device that trains on `blocks` blocks of `rows` rows."""
    return one_device(name).train(SGD, batch_of(blocks * rows), blocks, STEPS)


def check_cell(cell: Cell) -> None:
    """Compare one compiled step with one device, and its messages with the schedule's slots."""
    m = COUNTS[cell.microbatches](cell.pipe)
    text = f"pipe={cell.pipe},schedule={cell.schedule},chunks={cell.chunks},microbatches={m},remat={cell.remat}"
    step = jp.make_train_step(
        model_of(cell.model), SGD, f"{text},{cell.beside}".rstrip(","), mesh=jax.devices()[: cell.devices]
    )
    blocks, rows = step.replicas * m, COUNTS[cell.rows](cell.pipe)
    first = one_device(cell.model).first
    check(step, model_of(cell.model), first, batch_of(blocks * rows), STEPS, *reference(cell.model, blocks, rows))
    (sent,) = (entry for entry in expected(step, batch_of(blocks * rows)) if entry.kind == "collective-permute")
    count, size = messages(cell, step.schedule, rows)
    assert sent.count == count * (2 if cell.model == "experts" else 1)  # its balance losses are messages of their own
    assert sent.bytes == size or cell.model == "experts"


def messages(cell: Cell, schedule: Any, rows: int) -> tuple[int, int]:
    """Return how many activations a rank sends in a step, and their bytes.

    If ranks branch, a slot has one each way. In lockstep, a tick with forwards has one, and a tick with backwards one
    back.
    """
    count = 2 * schedule.ticks if schedule.branches else schedule.messages("F") + schedule.messages("B")
    dim = 16 if cell.model == "deep" else 12
    return count, count * rows * (LENGTH - 1) * dim * 4 // (2 if "sequence=true" in cell.beside else 1)


GROUPS = (*(("deep", pipe) for pipe in (2, 4, 8)), *((name, None) for name in MODELS))


def run(model: str, pipe: int | None) -> None:
    """Check all chosen cells of a model, or its cells with `pipe` stages, on 16 devices; report which fail, and why."""
    cells = [cell for cell in chosen() if cell.model == model and pipe in (None, cell.pipe)]
    failed = []
    for number, cell in enumerate(cells, start=1):
        begin = time.process_time()
        try:
            check_cell(cell)
        except Exception as error:
            failed.append(f"{cell}: {type(error).__name__}: {error}")
        result = failed[-1] if failed and failed[-1].startswith(f"{cell}:") else cell
        spent = time.process_time() - begin
        print(f"{number} of {len(cells)}, {len(failed)} failed, {spent:.0f} s: {result}", flush=True)
    assert not failed, "\n".join(failed)
