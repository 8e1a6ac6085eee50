"""Haiku's transformed functions by the recipe of docs/equinox-haiku.md: under every axis, and their state.

`tests/zoo.py` has a stack of Haiku in the battery of the data strategies.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cells import OneDevice, check
from zoo import random_tokens

import jaxpar as jp

pytest.importorskip("equinox", reason="Equinox is not installed: pip install equinox")
hk = pytest.importorskip("haiku", reason="Haiku is not installed: pip install dm-haiku")

import others  # noqa: E402

SGD = optax.sgd(0.02, momentum=0.9)
STEPS = 2
BATCH = {"tokens": random_tokens(others.VOCAB, others.LENGTH + 1)}


@functools.cache
def one_device(dropout: float, stacked: bool) -> OneDevice:
    return OneDevice(others.haiku_decoder(dropout, stacked))


@pytest.mark.parametrize(
    ("dropout", "stacked", "strategy"),
    [
        (0.2, True, "pipe=2,fsdp=2,microbatches=2"),
        (0.0, False, "tensor=2,fsdp=2"),
        pytest.param(0.2, True, "context=2,data=2", marks=pytest.mark.battery),
        pytest.param(0.0, False, "pipe=2,data=2,microbatches=2", marks=pytest.mark.battery),
    ],
)
@pytest.mark.xdist_group("haiku")
@pytest.mark.slow
def test_parity(dropout: float, stacked: bool, strategy: str) -> None:
    parsed, reference = jp.Strategy.parse(strategy), one_device(dropout, stacked)
    step = jp.make_train_step(reference.model, SGD, parsed, mesh=jax.devices()[:4])
    blocks = step.replicas * parsed.microbatches
    check(step, reference.model, reference.first, BATCH, STEPS, *reference.train(SGD, BATCH, blocks, STEPS))


@pytest.mark.slow
def test_the_function_comes_back() -> None:
    step = jp.make_train_step(others.haiku_decoder(0.2), SGD, "fsdp")
    state, _ = step(step.init(jax.random.key(0)), BATCH)
    logits = step.model(state)(None, BATCH["tokens"][:, :-1], False)
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, BATCH["tokens"][:, 1:])
    np.testing.assert_allclose(step.evaluate(state, BATCH)["loss"], nats.mean(), rtol=1e-5)


def test_state_is_kept() -> None:
    """The state of `hk.transform_with_state` is kept: a count of calls, one for each step."""

    def run(x: jax.Array) -> jax.Array:
        count = hk.get_state("count", (), init=jnp.zeros)
        hk.set_state("count", count + 1)
        return hk.Linear(3)(x)

    net, x = hk.transform_with_state(run), np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)

    def loss(params: Any, state: Any, batch: Any, key: jax.Array | None) -> Any:
        out, state = net.apply(params, state, key, batch)
        return jnp.square(out).mean(), state

    step = jp.make_train_step(jp.Model(lambda key: net.init(key, x[:1]), loss, stateful=True), SGD, "fsdp")
    state = step.init(jax.random.key(0))
    old_count = float(jax.tree.leaves(state.variables)[0])
    state, _ = step(state, x)
    assert float(jax.tree.leaves(state.variables)[0]) == old_count + 1


def test_an_error_names_its_layer() -> None:
    class Squared(hk.Module):
        def __call__(self, x: jax.Array) -> jax.Array:
            return x @ x

    def run(x: jax.Array) -> jax.Array:
        return hk.Sequential([hk.Linear(4), Squared(name="squared")])(x)

    net, x = hk.transform(run), np.ones((4, 4), np.float32)
    model = jp.Model(lambda key: net.init(key, x), lambda params, batch, key: net.apply(params, key, batch).mean())
    with pytest.raises(TypeError) as raised:
        jp.make_train_step(model, None, "single", mesh=jax.devices()[:1]).trace(np.ones((2, 4), np.float32))
    assert any(note.endswith("in squared (Squared)") for note in raised.value.__notes__)
