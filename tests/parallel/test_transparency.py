"""Transparency: every strategy trains every model as one device does.

A cell is one model under one strategy. It checks, with one compiled step: the gradients and three steps of SGD with
momentum (the momentum after the first step is the gradient), the bytes that a device stores, and the collectives, by
kind, axes, dtype, count and bytes. A new strategy or model joins with one line.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cells import OPTIMIZERS, OneDevice, check_collectives, initial, logical
from rendezvous import unordered
from zoo import ZOO, Entry

import jaxpar as jp
from jaxpar.inspect.ledger import Ledger
from jaxpar.parity.parity import TOLERANCE, Reference, differences

STRATEGIES = ("single", "dp", "ddp", "zero1", "zero2", "zero3", "hsdp")
MICROBATCHES = (1, 2)
REMATS = ("none", "layer", "dots")
SGD = optax.sgd(0.05, momentum=0.9)
STEPS = 3
BY_NAME = ("gpt2_dropout", "mixture", "resnet_bottleneck", "mlp_stack", "decoder_linen")
OTHERS = ("equinox_stack", "equinox_resnet", "haiku_stack")  # where they are installed


@functools.cache
def entry(name: str) -> Entry:
    return ZOO[name]()


def product() -> Iterator[tuple[str, str, int, str]]:
    for name, strategy, m, remat in itertools.product(ZOO, STRATEGIES, MICROBATCHES, REMATS):
        if remat == "none" or kind(name)[0]:
            yield name, strategy, m, remat


def kind(name: str) -> tuple[int, bool]:
    """Return how many stacks of layers a model has, and whether it has BatchNorm, without building it."""
    has_norm = "resnet" in name
    return 0 if has_norm or name == "mlp" else 2 if name == "encoder_decoder" else 1, has_norm


def covering() -> list[tuple[str, str, int, str]]:
    """Every kind of model under ddp, zero3, one of the two between them, and dp; one under `single`.

    Models that resemble one before them (gpt with a mask) meet zero3 and one more strategy. Those that come by name
    meet one strategy each. With them every pair of strategy or model, microbatches and remat.
    """
    meetings, seen = [], set()
    for i, name in enumerate(ZOO):
        between = ("zero1", "zero2")[i // 2 % 2]
        if name in BY_NAME + OTHERS:
            strategies = [STRATEGIES[3 + i % 4]]
        elif kind(name) in seen:
            strategies = ["zero3", ("ddp", "hsdp", "dp", between)[i % 4]]
        else:
            strategies = ["zero3", "dp", *["single"] * (i == 0), "ddp", between]
            seen.add(kind(name))
        meetings += [(name, strategy) for strategy in strategies]
    cells, met = [], set()
    for name, strategy in meetings:
        remats = REMATS if kind(name)[0] else REMATS[:1]
        choices = [(name, strategy, m, remat) for m, remat in itertools.product(MICROBATCHES[::-1], remats[::-1])]
        first = len(cells) % len(choices)
        cells.append(max(choices[first:] + choices[:first], key=lambda cell: len(pairs(cell) - met)))
        met |= pairs(cells[-1])
    return cells


def pairs(cell: tuple[str, str, int, str]) -> set[Any]:
    """Those of which the covering array has all: a model meets neither every strategy nor every remat."""
    return {(i, cell[i], j, cell[j]) for i, j in itertools.combinations(range(4), 2) if (i, j) not in ((0, 1), (0, 3))}


CHOSEN = covering()


def cells() -> list[Any]:
    out = []
    for cell in product():
        marks = [pytest.mark.xdist_group(cell[0])]  # the cells of a model share its reference
        if cell not in CHOSEN:
            marks.append(pytest.mark.battery)
        out.append(pytest.param(*cell, marks=marks, id="-".join(map(str, cell))))
    return out


def test_covering_array_covers() -> None:
    wanted = [cell for cell in product() if cell[0] not in BY_NAME + OTHERS and cell[1] != "single"]
    assert set().union(*map(pairs, CHOSEN)) >= set().union(*map(pairs, wanted))
    # A kind of model meets every kind of strategy: the server, none sharded, ZeRO-1 or 2, ZeRO-3.
    kinds = {"single": "ddp", "zero1": "zero2", "hsdp": "zero3"}
    found = {(*kind(name), kinds.get(strategy, strategy)) for name, strategy, *_ in CHOSEN}
    assert len(found) == 4 * 4
    assert {name for name, *_ in CHOSEN} == {*ZOO}
    assert len(CHOSEN) <= 32 + len(OTHERS)


@functools.cache
def first(name: str) -> Any:
    return by_blocks(name).first if "dropout" in name else initial(entry(name).model)


@functools.cache
def by_blocks(name: str) -> OneDevice:
    return OneDevice(entry(name).model)


@functools.cache
def reference(name: str, replicas: int, microbatches: int) -> tuple[Any, Any]:
    """Gradients and parameters of one device."""
    if "dropout" in name:  # compiled once for all numbers of blocks
        return by_blocks(name).train(SGD, entry(name).batch, replicas * microbatches, STEPS)
    one = Reference(entry(name).model, jp.Strategy(single=True, microbatches=microbatches), replicas)
    key = jax.random.key(0)
    return one.value_and_grad(key, entry(name).batch)[1], one.train(SGD, key, entry(name).batch, STEPS)


def blocks(name: str, replicas: int, microbatches: int) -> tuple[int, int]:
    """What of replicas and microbatches the mathematics of a model depends on."""
    if "dropout" in name:
        return replicas, microbatches
    if "resnet" in name:
        return (replicas if microbatches > 1 else 1), microbatches
    return 1, 1


@pytest.mark.parametrize(("name", "strategy", "microbatches", "remat"), cells())
def test_cell(name: str, strategy: str, microbatches: int, remat: str) -> None:
    model, batch = entry(name).model, entry(name).batch
    assert entry(name).stacks == kind(name)[0]
    prefetch = int(strategy != "dp" and (microbatches > 1 or remat == "dots"))
    chosen = jp.Strategy.parse(strategy)
    chosen = dataclasses.replace(chosen, microbatches=microbatches, remat=remat, prefetch=prefetch)
    step = jp.make_train_step(model, SGD, chosen)
    state = step.init(jax.random.key(0), params=first(name))
    check_layout(step, state)

    compiled = step if chosen.server else step.compile(batch)
    if compiled is not step:
        assert unordered(compiled.as_text()) == []
    state, _ = compiled(state, batch)
    momentum = model.unwrap(logical(step, state.optimizer[0].trace))
    for _ in range(STEPS - 1):
        state, _ = compiled(state, batch)
    grads, params = reference(name, *blocks(name, step.replicas, microbatches))
    found = differences("gradient", momentum, grads) + differences(
        "parameter", model.unwrap(logical(step, state.params)), params
    )
    worst = max(found, key=lambda d: d.error)
    assert worst.error <= TOLERANCE["f32"], worst

    check_ledger(step, batch, None if chosen.server else compiled)


def local_bytes(tree: Any) -> int:
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def check_layout(step: Any, state: Any) -> None:
    """Bytes of the arrays on a device = the layout's = the papers' closed form, leaf by leaf."""
    fsdp, strategy = step.mesh.shape["fsdp"], step.strategy
    params = jax.eval_shape(step.model_def.create, jax.random.key(0))[0]
    stages = {"optimizer": 1, "grads": 2, "params": 3}  # the ZeRO stage from which each is sharded
    stages["grads"] = 1  # ZeRO-1 scatters what it has accumulated
    closed = dict.fromkeys(stages, 0)
    for x in jax.tree.leaves(params):
        whole = x.size * 4
        divides = [d for d in x.shape if d % fsdp == 0]
        shardable = fsdp > 1 and (divides or x.size >= 16_384)
        for kind, stage in stages.items():
            shard = whole / fsdp if divides else whole / max(x.shape) * math.ceil(max(x.shape) / fsdp)
            closed[kind] += shard if shardable and strategy.zero >= stage else whole
    actual = {"params": local_bytes(state.params), "optimizer": local_bytes(state.optimizer)}
    assert actual["params"] == step.layout.bytes["params"]
    assert actual["optimizer"] == step.layout.bytes["optimizer"]
    for kind, size in step.layout.bytes.items():
        assert size == pytest.approx(closed[kind], rel=1e-6 if kind != "optimizer" else 1e-3), (kind, step.layout)


def check_ledger(step: Any, batch: Any, compiled: Any) -> None:
    """The jaxpr has exactly the closed form's collectives; the compiled program its bytes, and scalars besides."""
    closed = check_collectives(step, batch)
    if compiled is None:
        return
    found, wanted = (x.by("kind", "axes") for x in (Ledger.from_hlo(compiled.as_text(), step.mesh), closed))
    for key in {*found, *wanted}:
        # The CPU compiler drops the barriers that keep the gathers of one leaf apart; test_gpu.py has a compiler that
        # does not.
        merged = key[0] == "all-gather" and step.strategy.zero == 3
        # It also merges equal gradients: of two biases whose sum is all that a ResNet's block reads of them.
        low = 0.49 / step.strategy.microbatches if merged else 0.98
        assert low * wanted.get(key, 0) <= found.get(key, 0) <= wanted.get(key, 0) + 64, (key, found, wanted)


@functools.cache
def padded() -> tuple[jp.Model, Any]:
    """A tied embedding [131, 126] and a stack [3, 126, 130], of which no dim divides by 8 and which are padded."""

    def init(key: jax.Array) -> dict[str, jax.Array]:
        a, b, c = jax.random.split(key, 3)
        up, down = jax.random.normal(b, (3, 126, 130)), jax.random.normal(c, (3, 130, 126))
        return {
            "embed": jax.random.normal(a, (131, 126)),
            "up": up * 0.1,
            "down": down * 0.1,
            "scale": jnp.ones((3, 126)),
        }

    def loss(params: dict[str, jax.Array], tokens: jax.Array, key: jax.Array | None) -> jax.Array:
        def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
            return x + jnp.tanh(x * w["scale"] @ w["up"]) @ w["down"], None

        stacks = {name: params[name] for name in ("up", "down", "scale")}
        x, _ = jax.lax.scan(layer, params["embed"][tokens[:, :-1]], stacks)
        logits = x @ params["embed"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return jp.Model(init=init, loss=loss), np.random.default_rng(0).integers(131, size=(16, 6)).astype(np.int32)


@functools.cache
def one_device() -> Reference:
    return Reference(padded()[0], jp.Strategy(single=True), 1)


@functools.cache
def tuned(optimizer: str) -> Any:
    return one_device().train(OPTIMIZERS[optimizer](), jax.random.key(0), padded()[1], STEPS)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the optimizer multiplies")
@pytest.mark.xdist_group("optimizers")
@pytest.mark.parametrize(
    ("optimizer", "strategy"),
    # ZeRO-2 updates as ZeRO-1 does. Those that look at shapes and at rows meet both; clipping has Adam in it.
    [*itertools.product(("adafactor", "muon"), ("zero1", "zero3")), ("lamb", "zero3"), ("clip-adamw", "zero1")],
)
def test_optimizer(optimizer: str, strategy: str) -> None:
    """Optimizers that look at norms, shapes and rows of leaves see logical leaves, padded ones included."""
    model, batch = padded()
    step = jp.make_train_step(model, OPTIMIZERS[optimizer](), strategy)
    assert sum(leaf.note.startswith("padded") for leaf in step.layout.leaves) == 3
    state = step.init(jax.random.key(0))
    start = jax.tree.map(np.asarray, step.params(state))
    for _ in range(STEPS):
        state, _ = step(state, batch)
    # What the optimizer did, not what was there before: an error must not hide behind large parameters.
    trees = (step.params(state), tuned(optimizer))
    moved = [jax.tree.map(lambda a, b: np.asarray(a) - b, tree, start) for tree in trees]
    for ours, theirs in zip(*map(jax.tree.leaves, moved), strict=True):
        # In the norm: where a gradient is nearly zero, Adam divides rounding by rounding, and single elements differ.
        assert np.linalg.norm(ours - theirs) <= 1e-3 * np.linalg.norm(theirs)


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [
        # Each strategy with one of the two; with the other in the battery.
        pytest.param(strategy, precision, marks=[pytest.mark.battery] * ((i + j) % 2))
        for i, strategy in enumerate(("ddp", "zero2", "zero3", "hsdp"))
        for j, precision in enumerate(("bf16", "f16"))
    ],
)
def test_low_precision(strategy: str, precision: str) -> None:
    report = jp.verify(entry("function").model, f"{strategy},precision={precision}", entry("function").batch, steps=1)
    assert report.ok, report


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2,microbatches=2", "zero3"])
def test_gradients_reduced_in_the_compute_dtype(strategy: str) -> None:
    model, batch = entry("function").model, entry("function").batch
    report = jp.verify(model, f"{strategy},precision=bf16,reduce=compute", batch, steps=1)
    assert report.ok, report
    step = jp.make_train_step(model, SGD, f"{strategy},precision=bf16,reduce=compute")
    written = Ledger.from_jaxpr(step.trace(batch), step.mesh).by("kind", "dtype")
    assert not any(kind == "reduce-scatter" and dtype == "float32" for kind, dtype in written)
