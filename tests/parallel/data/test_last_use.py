"""A gradient is reduced in the backward loop only if it is the whole gradient of its layer (`Use.last`)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar as jp
from jaxpar.inspect.ledger import Ledger

LAYERS, DIM = 6, 128
MATRIX = DIM * DIM * 4  # bytes
BATCH = {"x": np.random.default_rng(0).standard_normal((8, DIM)).astype(np.float32)}

neighbours = lambda w: (w[:-1], w[1:])
pairs = lambda w: (w[::2], w[1::2])


def model(slices: Callable[[jax.Array], Any]) -> jp.Model:
    """Return a model each of whose layers reads two matrices of one stack."""

    def loss(p: Any, batch: Any, key: Any) -> jax.Array:
        y, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w[0]) @ w[1], None), batch["x"], slices(p["w"]))
        return (y**2).mean()

    return jp.Model(init=lambda key: {"w": jax.random.normal(key, (LAYERS, DIM, DIM)) / DIM}, loss=loss)


def step_of(slices: Callable[[jax.Array], Any], strategy: str, devices: int) -> Any:
    return jp.make_train_step(model(slices), optax.sgd(0.1, momentum=0.9), strategy, mesh=jax.devices()[:devices])


@pytest.mark.parametrize(
    ("strategy", "devices", "kind", "share"),
    [("ddp", 2, "all-reduce", 1), ("data=2,fsdp=2", 4, "all-reduce", 2), ("fsdp=2,zero=1", 2, "reduce-scatter", 1)],
)
def test_a_layer_that_a_stack_reads_twice_is_reduced_once(strategy: str, devices: int, kind: str, share: int) -> None:
    """Both gradients of w[i], as w[i] and as w[i + 1], were reduced over the replicas: 10 matrices instead of 6."""
    step = step_of(neighbours, strategy, devices)
    size = MATRIX // share
    sent = [c for c in Ledger.from_jaxpr(step.trace(BATCH), step.mesh) if c.kind == kind and c.bytes >= size]
    # An equation of ddp may reduce the loss as well: a few bytes.
    assert [(c.bytes // size, c.in_loop) for c in sent] == [(LAYERS, False)]


def test_layers_that_a_stack_reads_in_pairs_are_reduced_in_its_loop() -> None:
    step = step_of(pairs, "ddp", 2)
    sent = [c for c in Ledger.from_jaxpr(step.trace(BATCH), step.mesh) if c.bytes >= MATRIX]
    assert [(c.kind, c.bytes, c.in_loop) for c in sent] == [("all-reduce", LAYERS * MATRIX, True)]


@pytest.mark.parametrize(("strategy", "devices"), [("ddp", 2), ("data=2,fsdp=2", 4), ("fsdp=2,zero=1", 2)])
def test_parameters_are_those_of_one_device(strategy: str, devices: int) -> None:
    """The closed form (`check`) and the program must agree on how often the gradient is reduced."""

    def trained(step: Any) -> np.ndarray:
        state = step.init(jax.random.key(0))
        for _ in range(2):
            state, _ = step(state, BATCH)
        return np.asarray(step.params(state)["w"])

    step = step_of(neighbours, strategy, devices)
    step.check(BATCH)
    expected, found = trained(step_of(neighbours, "single", 1)), trained(step)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * np.abs(expected).max())
