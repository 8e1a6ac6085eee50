"""The step that benchmarks compare with: `jax.jit` of a loss, its gradients and an optimizer, without jaxpar."""

from collections.abc import Callable
from typing import Any

import jax
import optax

import jaxpar as jp


def loss(model: jp.Model, params: Any, variables: Any, batch: Any) -> tuple[jax.Array, Any]:
    """The mean over rows, without dropout; and new variables."""
    means, new = model.call(params, variables, batch, None)
    return means["loss"].total / means["loss"].count, new


def create(model: jp.Model, optimizer: Any) -> Callable[[jax.Array], Any]:
    """From a key the first state, `(params, variables, moments)`. To be jitted."""

    def first(key: jax.Array) -> Any:
        params, variables = model.create(key)
        return params, variables, optimizer.init(params)

    return first


def train(model: jp.Model, optimizer: Any) -> Callable[[Any, Any], tuple[Any, dict[str, jax.Array]]]:
    """`(state, batch) -> (state, metrics)`. To be jitted, the state donated."""

    def step(state: Any, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
        params, variables, moments = state
        of_params = jax.value_and_grad(lambda params: loss(model, params, variables, batch), has_aux=True)
        (value, new), grads = of_params(params)
        changes, moments = optimizer.update(grads, moments, params)
        metrics = {"loss": value, "grad_norm": optax.tree.norm(grads)}
        return (optax.apply_updates(params, changes), new, moments), metrics

    return step
