"""What comes before the stack that is cut runs once for a microbatch: layers on one rank, anything else on each."""

from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cells import check_collectives
from jax import lax

import jaxpar as jp

# WIDE: hidden features of the first layers. The others are cut: they have more weights.
DIM, WIDE, FIRST, LAYERS = 6, 11, 2, 8


def init(key: jax.Array) -> Any:
    draw = lambda n, *shape: jax.random.normal(jax.random.fold_in(key, n), shape) / 3
    first = {"up": draw(0, FIRST, DIM, WIDE), "down": draw(1, FIRST, WIDE, DIM)}
    return {"first": first, "layers": draw(2, LAYERS, DIM, DIM), "head": draw(3, DIM, 1)}


def loss(params: Any, batch: Any, key: jax.Array) -> jp.Mean:
    first = lambda x, w: (x + jnp.tanh(x @ w["up"]) @ w["down"], None)
    x = lax.scan(first, batch["x"], params["first"])[0]
    x = lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, params["layers"])[0]
    return jp.Mean(jnp.sum(batch["weight"] * (x @ params["head"])[:, 0] ** 2), jnp.sum(batch["weight"]))


MODEL = jp.Model(init=init, loss=loss)


def batch(rows: int = 12) -> Any:
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(rows, DIM)).astype("float32"),
        "weight": rng.uniform(size=rows).astype("float32"),
    }


def products(jaxpr: Any, times: int = 1) -> int:
    """Return how often a program multiplies by the first layers' weights, or by their outputs."""
    total = 0
    for eqn in jaxpr.eqns:
        sizes = {n for v in eqn.invars for n in getattr(v.aval, "shape", ())}
        total += times * (eqn.primitive.name == "dot_general" and WIDE in sizes)
        nested_times = times * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)
        total += sum(
            products(getattr(inner, "jaxpr", inner), nested_times) for inner in jec.jaxprs_in_params(eqn.params)
        )
    return total


@pytest.mark.parametrize(
    ("strategy", "devices"),
    [
        ("pipe=2,microbatches=3", 2),  # the second rank has one microbatch less
        ("pipe=2,microbatches=3,schedule=zb-v,chunks=2", 2),
        *(
            pytest.param(*cell, marks=pytest.mark.battery)
            for cell in (
                ("pipe=2,microbatches=4,schedule=1f1b-overlap", 2),
                ("pipe=4,fsdp=2,zero=3,microbatches=2", 8),
                ("pipe=4,fsdp=2,zero=3,microbatches=6,schedule=zb-h2", 8),
                ("pipe=2,fsdp=2,zero=2,microbatches=3,schedule=1f1b-halves", 4),
            )
        ),
    ],
)
def test_they_train_as_on_one_device_and_run_once_a_microbatch(strategy: str, devices: int) -> None:
    mesh = jax.devices()[:devices]
    report = jp.verify(MODEL, strategy, batch(), mesh=mesh)
    assert report.ok, report
    step = jp.make_train_step(MODEL, optax.sgd(0.1), strategy, mesh=mesh)
    traced = step.trace(batch())
    check_collectives(step, batch())
    per_rank = -(-step.strategy.microbatches // step.strategy.pipe)
    # For each microbatch of a rank, not for each tick: two products forwards, two for residuals, four backwards.
    assert products(getattr(traced, "jaxpr", traced)) == 8 * FIRST * per_rank


def embedded_loss(params: Any, batch: Any, key: jax.Array) -> jp.Mean:
    x = jnp.tanh(batch["x"] @ params["first"]["up"][0])[:, :DIM]
    x = lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, params["layers"])[0]
    return jp.Mean(jnp.sum(batch["weight"] * (x @ params["head"])[:, 0] ** 2), jnp.sum(batch["weight"]))


@pytest.mark.parametrize(
    ("strategy", "devices"),
    [
        ("pipe=2,microbatches=3", 2),
        ("pipe=2,microbatches=4,chunks=2,schedule=1f1b-overlap", 2),
        pytest.param("pipe=4,fsdp=2,zero=3,microbatches=6", 8, marks=pytest.mark.battery),
        pytest.param("pipe=2,microbatches=4,schedule=gpipe", 2, marks=pytest.mark.battery),
    ],
)
def test_an_embedding_runs_once_for_a_microbatch(strategy: str, devices: int) -> None:
    """Each rank computed it in every tick, and added the gradient of the whole embedding: 5% of a step of a 340B."""
    model, mesh = jp.Model(init=init, loss=embedded_loss), jax.devices()[:devices]
    report = jp.verify(model, strategy, batch(), mesh=mesh)
    assert report.ok, report
    step = jp.make_train_step(model, optax.sgd(0.1), strategy, mesh=mesh)
    traced = step.trace(batch())
    check_collectives(step, batch())
    # Forwards, again for the backward, and the gradient.
    assert products(getattr(traced, "jaxpr", traced)) == 3 * step.strategy.microbatches
    state = step.init(jax.random.key(0))
    evaluated = step.evaluate(state, batch())["loss"]
    np.testing.assert_allclose(evaluated, step(state, batch())[1]["loss"], rtol=1e-5)


def test_embedded_rows_take_no_more_memory_than_the_embedding() -> None:
    """Otherwise memory would grow with the microbatches, and each tick embeds one."""
    rows = 2 * batch()["x"].nbytes  # of the results for 24 rows: 576 bytes, and the weights have 528
    assert rows > init(jax.random.key(0))["first"]["up"].nbytes
    model, mesh, strategy = jp.Model(init=init, loss=embedded_loss), jax.devices()[:2], "pipe=2,microbatches=3"
    assert jp.verify(model, strategy, batch(24), mesh=mesh).ok
    traced = jp.make_train_step(model, optax.sgd(0.1), strategy, mesh=mesh).trace(batch(24))
    assert products(getattr(traced, "jaxpr", traced)) > 3 * 3


@pytest.mark.battery
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v,chunks=2"])
def test_evaluation(schedule: str) -> None:
    step = jp.make_train_step(
        MODEL, optax.sgd(0.1), f"pipe=2,microbatches=3,schedule={schedule}", mesh=jax.devices()[:2]
    )
    state = step.init(jax.random.key(0))
    evaluated = step.evaluate(state, batch())["loss"]
    np.testing.assert_allclose(evaluated, step(state, batch())[1]["loss"], rtol=1e-5)
