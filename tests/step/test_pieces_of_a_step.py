"""Gradients without an update, and a user's own parameters in a state, outside and inside a caller's `jit`."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from zoo import ZOO

import jaxpar as jp

ENTRY = ZOO["function"]()
SGD = optax.sgd(0.1, momentum=0.9)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero2,precision=bf16", "pipe=2,fsdp=4,microbatches=2", "dp"])
def test_other_parameters_in_a_state(strategy: str) -> None:
    """They are stored as `init` stores them, with the copy in the compute dtype; nothing else in the state changes."""
    step = jp.make_train_step(ENTRY.model, SGD, strategy)
    state, _ = step(step.init(jax.random.key(0)), ENTRY.batch)
    doubled = jax.tree.map(lambda x: 2 * x, step.params(state))
    doubled_state = step.with_params(state, doubled)
    jax.tree.map(np.testing.assert_array_equal, step.params(doubled_state), doubled)
    expected_state = step.init(jax.random.key(1), params=doubled)
    for a, b in zip(
        jax.tree.leaves((doubled_state.params, doubled_state.copy)),
        jax.tree.leaves((expected_state.params, expected_state.copy)),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)
        assert a.sharding == b.sharding
    assert doubled_state.optimizer is state.optimizer
    state, _ = step(doubled_state, ENTRY.batch)  # it is a state like any other
    assert int(state.step) == 2


@pytest.mark.slow
def test_gradients_alone_in_a_callers_jit() -> None:
    """Three steps of a caller's own update, under one `jit`, equal those of a step with the optimizer."""
    step, full_step = (jp.make_train_step(ENTRY.model, tx, "fsdp") for tx in (None, SGD))
    state, expected_state = step.init(jax.random.key(0)), full_step.init(jax.random.key(0))
    assert not jax.tree.leaves(state.optimizer)

    @jax.jit
    def train(state: Any, moments: Any) -> Any:
        _, grads = step.value_and_grad(state, ENTRY.batch)
        params = step.params(state)
        changes, moments = SGD.update(grads, moments, params)
        state = step.with_params(state, optax.apply_updates(params, changes))
        return dataclasses.replace(state, step=state.step + 1), moments

    moments = SGD.init(step.params(state))
    for _ in range(3):
        state, moments = train(state, moments)
        expected_state, _ = full_step(expected_state, ENTRY.batch)
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(expected_state.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


@pytest.mark.slow
def test_a_step_without_an_optimizer_says_so() -> None:
    step = jp.make_train_step(ENTRY.model, None, "fsdp")
    state = step.init(jax.random.key(0))
    with pytest.raises(ValueError, match=r"optimizer=None.*step\.value_and_grad\(state, batch\)"):
        step(state, ENTRY.batch)
    assert jnp.isfinite(step.evaluate(state, ENTRY.batch)["loss"])
