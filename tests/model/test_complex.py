"""Complex parameters, as of diagonal state-space models: sharded, gathered, reduced and updated like any other."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar as jp
from jaxpar.parity.parity import differences

LAYERS, DIM, STATE = 2, 8, 12
BATCH = {"x": np.random.default_rng(0).normal(size=(8, 5, DIM)).astype(np.float32)}


def normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return 0.3 * jax.random.normal(key, shape, jnp.complex64)


def init(key: jax.Array) -> dict[str, Any]:
    keys = jax.random.split(key, 6)
    layers = {
        "decay": normal(keys[0], (LAYERS, STATE)),
        "into": normal(keys[1], (LAYERS, DIM, STATE)),
        "out": normal(keys[2], (LAYERS, STATE, DIM)),
        "mix": 0.3 * jax.random.normal(keys[3], (LAYERS, DIM, DIM)),
    }
    return {"layers": layers, "position": normal(keys[4], (5, DIM)), "head": jnp.ones((DIM, 4)) / 4}


def loss(params: Any, batch: Any, key: jax.Array | None) -> jax.Array:
    """Linear recurrent units (Orvieto et al. 2023, section 3), scanned."""

    def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        decay = jnp.exp(-jnp.exp(p["decay"].real) + 1j * p["decay"].imag)
        inputs = x.astype(jnp.complex64) @ p["into"]

        def update(h: jax.Array, u: jax.Array) -> tuple[jax.Array, jax.Array]:
            return (h := decay * h + u), h

        _, h = jax.lax.scan(update, jnp.zeros_like(inputs[:, 0]), inputs.swapaxes(0, 1))
        return x + jnp.tanh((h.swapaxes(0, 1) @ p["out"]).real) @ p["mix"], None

    x, _ = jax.lax.scan(layer, batch["x"] + jnp.abs(params["position"]), params["layers"])
    return jnp.mean((x @ params["head"]) ** 2)


MODEL = jp.Model(init, loss, rules={"head": 1})


@pytest.mark.parametrize("strategy", ["fsdp", "zero2,microbatches=2", "pipe=2,microbatches=2", "tensor=2"])
def test_complex_parameters(strategy: str) -> None:
    """They were refused, though XLA reduces, gathers and scatters complex numbers."""
    report = jp.verify(MODEL, strategy, BATCH, steps=1, mesh=jax.devices()[:2], optimizer=optax.adam(1e-2))
    assert report.ok, report
    step = jp.make_train_step(MODEL, optax.sgd(0.1), strategy, mesh=jax.devices()[:2])
    into = next(leaf for leaf in step.layout.leaves if leaf.path == "layers/into")
    assert into.dtype == jnp.complex64
    assert (step.layout.spec(into, "params") == jax.sharding.PartitionSpec()) == (strategy[:2] in ("ze", "te"))


def test_verify_compares_imaginary_parts() -> None:
    (difference,) = differences("gradient", [np.complex64([1 + 1j, 2])], [np.complex64([1 + 2j, 2])])
    assert difference.error == pytest.approx(0.5)
