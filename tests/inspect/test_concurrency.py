"""concurrent="auto": what it chooses, by which closed form, and what the compiled programs say of it."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from zoo import ZOO

import jaxpar as jp
from jaxpar.hardware import target
from jaxpar.inspect import concurrency
from jaxpar.inspect.check import check
from jaxpar.inspect.predict import Prediction, predict
from jaxpar.models import named

LAYERS, DIM = 4, 4096
SHAPES = {"up": (LAYERS, DIM, 4 * DIM), "down": (LAYERS, 4 * DIM, DIM)}
ROWS = {"x": jax.ShapeDtypeStruct((64, 256, DIM), np.float32)}
STRATEGY = "tensor=8,microbatches=4,precision=bf16"


def loss(params: Any, batch: Any, key: Any) -> jax.Array:
    layer = lambda h, w: (h + jnp.tanh(h @ w["up"]) @ w["down"], None)
    return jnp.mean(lax.scan(layer, batch["x"].astype(params["up"].dtype), params)[0] ** 2)


def init(key: jax.Array) -> dict[str, jax.Array]:
    return {name: 0.01 * jax.random.normal(key, shape) for name, shape in SHAPES.items()}


def loss_of_one_layer(params: Any, batch: Any, key: Any) -> jax.Array:
    x = batch["x"].astype(params["up"].dtype)
    return jnp.mean((x + jnp.tanh(x @ params["up"][0]) @ params["down"][0]) ** 2)


def step_of(strategy: str, devices: Any = None, loss: Any = loss) -> Any:
    rules = {"up": -1, "down": -2} if "tensor" in strategy else None
    return jp.make_train_step(jp.Model(init=init, loss=loss), optax.sgd(0.1), strategy, mesh=devices, rules=rules)


@functools.cache
def step_on_gpus(strategy: str) -> Any:
    return step_of(strategy, target("8xH100").devices)


@functools.cache
def prediction(strategy: str) -> Prediction:
    step = step_on_gpus(strategy)
    return predict(step.compile(ROWS), step, ROWS, target("8xH100").hardware)


@pytest.mark.parametrize(
    ("text", "concurrent"),
    [
        ("tensor=2,microbatches=2", "auto"),
        ("fsdp=2,context=4,microbatches=-1", "auto"),
        ("expert=-1,microbatches=2,concurrent=2", 2),
        ("tensor=2,microbatches=2,concurrent=1", 1),
        ("tensor=2", 1),
        ("fsdp=8,microbatches=2", 1),
        ("tensor=2,pipe=2,microbatches=2", 1),
        ("tensor=2,microbatches=2,remat=auto,budget=1GB", 1),
        ("dp,microbatches=2", 1),
    ],
)
def test_where_there_is_a_choice(text: str, concurrent: Any) -> None:
    strategy = jp.Strategy.parse(text)
    assert strategy.concurrent == concurrent
    assert jp.Strategy.parse(str(strategy)) == strategy
    assert ("concurrent" in str(strategy)) == ("concurrent" in text)


def test_a_choice_that_the_mesh_takes_away() -> None:
    """Without a pipeline, microbatches=-1 is 1."""
    assert step_of("tensor=2,data=-1,microbatches=-1").strategy.concurrent == 1


@pytest.mark.parametrize("strategy", ["tensor=2,data=4", "tensor=2,fsdp=4,zero=1,remat=layer", "context=2,fsdp=4"])
def test_programs_for_cpus_stay_the_same(strategy: str) -> None:
    model = named("llama-tiny")
    rows = model.example(32, 64)
    automatic, alone = (
        jp.make_train_step(model.model, optax.sgd(0.1), f"{strategy},microbatches=2{text}")
        for text in ("", ",concurrent=1")
    )
    # The two steps are made at two columns of this file.
    lines = lambda step: [line for line in step.compile(rows).as_text().splitlines() if "column=" not in line]
    assert lines(automatic) == lines(alone)
    assert automatic.strategy.concurrent == "auto"
    settled = automatic.settled(rows)
    assert (settled.strategy.concurrent, settled.concurrency_remark, settled.settled(rows)) == (1, "", settled)
    assert check(automatic, rows).ok
    assert automatic.explain(rows).strategy == str(alone.strategy)


def test_losses_that_pass_variables() -> None:
    """Concurrent microbatches refuse them, so that nothing may be chosen for them."""
    for name, passes in (("resnet", True), ("function", False)):
        entry = ZOO[name]()
        step = jp.make_train_step(entry.model, optax.sgd(0.1), "data=4,fsdp=2,microbatches=2")
        assert concurrency._passes_variables(step.traced(entry.batch)) == passes


@pytest.mark.cuda_compiler
@pytest.mark.xdist_group("gpu concurrency")
def test_as_many_as_hide_the_collectives() -> None:
    step = step_on_gpus(STRATEGY).settled(ROWS)
    assert step.strategy.concurrent == 4
    alone, chosen = prediction(f"{STRATEGY},concurrent=1"), prediction(STRATEGY)
    # The closed form of one microbatch at a time, against the compiled program. It ignores that XLA overlaps
    # the all-reduce of a backward with the product of the weight's gradient.
    seconds = concurrency._Seconds.of(*_alone())
    assert 0.7 * alone.compute < seconds.kernels < 1.2 * alone.compute
    assert 0.35 * seconds.exposed(1) < alone.exposed < 1.2 * seconds.exposed(1)
    # What it is for: less waiting, for the memory of more microbatches.
    assert alone.exposed > 0.1 * alone.seconds
    assert chosen.exposed < 0.9 * alone.exposed
    assert chosen.seconds < 0.95 * alone.seconds
    assert alone.memory is not None
    assert chosen.memory is not None
    assert alone.memory < chosen.memory < 0.69 * 80e9
    assert chosen.memory == prediction(f"{STRATEGY},concurrent=4").memory
    explanation = step_on_gpus(STRATEGY).explain(ROWS)
    assert explanation.strategy == str(step.strategy)
    assert any(remark.startswith("concurrent=4: by closed forms, a step has ") for remark in explanation.remarks)
    proof = check(step_on_gpus(STRATEGY), ROWS, overlap=True)
    assert proof.ok, proof
    assert "concurrent=4" in proof.strategy


@pytest.mark.cuda_compiler
@pytest.mark.xdist_group("gpu concurrency")
def test_no_more_than_pay_or_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = lambda strategy: step_of(strategy, target("8xH100").devices).settled(ROWS)
    assert choose(STRATEGY.replace("microbatches=4", "microbatches=2")).strategy.concurrent == 2
    # Microbatches take turns in layers alone.
    flat = step_of(STRATEGY, target("8xH100").devices, loss_of_one_layer).settled(ROWS)
    assert flat.strategy.concurrent == 1
    assert "no stack of layers" in flat.concurrency_remark
    # Fast links: nothing to hide.
    step, _, hardware = _alone()
    fast = dataclasses.replace(hardware, link_bandwidth=1e14, link_latency=0.0, collective_latency=0.0)
    monkeypatch.setattr(concurrency, "_hardware", lambda step: fast)
    step = choose(STRATEGY)
    assert step.strategy.concurrent == 1
    assert "with 1 at a time" in step.concurrency_remark
    # A device that four microbatches do not fit, and two by the compiled program.
    two = prediction(f"{STRATEGY},concurrent=2").memory
    assert two is not None
    small = dataclasses.replace(hardware, memory_bytes=int(1.01 * two / (0.92 * 0.75)))
    monkeypatch.setattr(concurrency, "_hardware", lambda step: small)
    step = choose(STRATEGY)
    assert step.strategy.concurrent == 2
    assert "; 4 at a time need " in step.concurrency_remark

    def no_room(compiled: Any) -> Any:
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 90000000000 bytes."
        )

    monkeypatch.setattr(concurrency, "program_memory", no_room)
    step = choose(STRATEGY)
    assert step.strategy.concurrent == 1
    assert "; 2 at a time find no room" in step.concurrency_remark


def _alone() -> tuple[Any, Any, Any]:
    """Return a step with one microbatch at a time, its traced loss, and the hardware."""
    step = step_on_gpus(f"{STRATEGY},concurrent=1")
    return step, step.traced(ROWS), target("8xH100").hardware
