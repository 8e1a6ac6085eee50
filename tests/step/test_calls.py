"""Calls of a step: with arrays of an earlier state, under transformations, within a mesh, with various optimizers."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar as jp

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
KEY = jax.random.key(0)


def loss(params: Any, batch: Any, key: jax.Array | None) -> jax.Array:
    return jnp.square(batch["x"] @ params["w"]).mean()


def build(strategy: str, optimizer: Any = None) -> Any:
    model = jp.Model(init=lambda key: {"w": jax.random.normal(key, (4, 8))}, loss=loss)
    return jp.make_train_step(model, optimizer or optax.sgd(0.1), strategy)


def raises(call: Callable[[], Any], *parts: str) -> None:
    with pytest.raises(ValueError, match="(?s)" + ".*".join(map(re.escape, parts))):
        call()


def test_arrays_of_a_donated_state() -> None:
    """jax 0.10 ends the process by a segmentation fault if jit receives a sharded array that was donated."""
    step = build("zero3")
    state = step.init(KEY)
    donated_params = state.params
    step.params(state)  # only the first call of a program checked its arrays
    next_state, _ = step(state, {"x": X})
    raises(lambda: step.params(state), "donated", "state, metrics = step(state, batch)")
    mixed = dataclasses.replace(next_state, params=donated_params)
    raises(lambda: step(mixed, {"x": X}), "has params/w of an earlier state", "jax.tree.map(jnp.copy, state.params)")


def test_first_states_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second `init` was traced and compiled again."""
    step, traces = build("zero3"), []
    create = step._create
    monkeypatch.setattr(step, "_create", lambda *args: traces.append(args) or create(*args))
    first_params = step.params(step.init(KEY))
    step.init(KEY, params=first_params)
    num_traces = len(traces)
    assert num_traces
    other_params = step.params(step.init(jax.random.key(1)))
    np.testing.assert_array_equal(step.params(step.init(KEY, params=other_params))["w"], other_params["w"])
    assert not np.array_equal(first_params["w"], other_params["w"])
    assert len(traces) == num_traces


def test_steps_under_transformations() -> None:
    """A gradient through a step found the state donated; the server's four programs cannot be traced as one."""
    step, server = build("single"), build("dp")
    state = step.init(KEY)
    norm = lambda x: step(state, {"x": x})[1]["grad_norm"]
    np.testing.assert_array_equal(jax.grad(norm)(X), jax.grad(norm)(X))
    raises(lambda: jax.jit(server)(server.init(KEY), {"x": X}), "server=True", "jit", "ddp")


def test_within_another_mesh() -> None:
    step = build("zero3")
    state = step.init(KEY)
    with jax.set_mesh(jax.make_mesh((8,), ("mine",))):
        raises(lambda: step(state, {"x": X}), "fsdp=8", "mine=8", "outside", "jax.set_mesh(step.mesh)")
    with jax.set_mesh(step.mesh):
        step(state, {"x": X})


@pytest.mark.slow
def test_what_optimizers_ask_for() -> None:
    """SAM takes extra arguments, but failed when it was given the loss; L-BFGS needs the loss as a function."""
    sam = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05))
    step = build("zero3", sam)
    state = step.init(KEY)
    params, (_, grads) = jax.device_get((step.params(state), step.value_and_grad(state, {"x": X})))
    updates, _ = sam.update(grads, sam.init(params), params)
    trained = step.params(step(state, {"x": X})[0])
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), trained, optax.apply_updates(params, updates)
    )
    raises(lambda: build("zero3", optax.lbfgs()).trace({"x": X}), "value_fn", "line search", "step.value_and_grad")
