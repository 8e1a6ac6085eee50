"""Parameters of unusual kinds: no dims, no elements, integers, None, nested containers."""

from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpar as jp


def init(key: jax.Array) -> Any:
    return {
        "temperature": jnp.float32(1.5),
        "no rows": jnp.zeros((0, 4)),
        "no columns": jnp.zeros((3, 0)),
        "none": None,
        "nested": (jnp.ones(1), [jnp.ones((1, 1))]),
        "frozen": flax.core.freeze({"w": jax.random.normal(key, (8, 8))}),
        "quantised": jnp.ones((8, 8), jnp.int8),
    }


def loss(params: Any, batch: jax.Array, key: jax.Array | None) -> jax.Array:
    weight = params["frozen"]["w"] * params["quantised"].astype(jnp.float32) * params["temperature"]
    (one, (other,)), empty = params["nested"], params["no rows"].sum() + params["no columns"].sum()
    return jnp.mean((batch @ weight * one * other[0] - batch) ** 2) + empty


@pytest.mark.parametrize("strategy", ["fsdp", "zero2,microbatches=2"])
def test_parameters_of_unusual_kinds(strategy: str) -> None:
    """A leaf without elements was sharded, and no part of it could be cut: "slice_sizes must be less than or equal to
    operand shape".
    """
    batch = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    assert jp.verify(jp.Model(init, loss), strategy, batch, steps=1, mesh=jax.devices()[:2]).ok
