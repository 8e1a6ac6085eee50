"""Layers that wait: a forward and both halves of a backward each take so long, on however few cores."""

import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxpar as jp

DIM = 4


class Waiting(NamedTuple):
    """What an experiment reads of a model by name."""

    model: jp.Model
    parameters: int

    def example(self, rows: int, _: int) -> dict[str, np.ndarray]:
        """Rows [rows, DIM]."""
        return {"x": np.random.default_rng(0).standard_normal((rows, DIM)).astype(np.float32)}


def model(layers: int, seconds: float) -> Waiting:
    """Layers [DIM, DIM] in a scan, each of which waits so long in F, in I and in W."""

    def wait(x: jax.Array) -> jax.Array:
        def host(value: Any) -> np.ndarray:
            time.sleep(seconds)
            return np.asarray(value)

        return jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential")

    @jax.custom_vjp
    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(wait(x) @ w)

    def forward(x: jax.Array, w: jax.Array) -> tuple[jax.Array, Any]:
        y = layer(x, w)
        return y, (x, w, y)

    def backward(left: Any, ct: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, w, y = left
        ct = ct * (1 - y * y)
        return wait(ct @ w.T), wait(x.T @ ct)

    layer.defvjp(forward, backward)

    def init(key: jax.Array) -> dict[str, jax.Array]:
        return {"layers": jax.random.normal(key, (layers, DIM, DIM)) * DIM**-0.5}

    def loss(params: Any, batch: Any, _: Any) -> jax.Array:
        x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), batch["x"], params["layers"])
        return jnp.mean(jnp.square(x))

    return Waiting(jp.Model(init=init, loss=loss, rows="independent"), layers * DIM * DIM)
