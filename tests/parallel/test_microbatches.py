"""Gradients and closed forms of several microbatches, on a model that is small enough for every run of the tests."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cells import check_collectives
from jax import lax

import jaxpar as jp

DIM, ROWS = 8, 16
BATCH = np.random.default_rng(0).normal(size=(ROWS, DIM)).astype(np.float32)
STRATEGIES = ("dp", "ddp", "zero2", "data=2,fsdp=2")


def init(key: jax.Array) -> dict[str, jax.Array]:
    return {"layers": jax.random.normal(key, (2, DIM, DIM)), "bias": jnp.ones(DIM)}


def loss(params: dict[str, jax.Array], rows: jax.Array, key: jax.Array | None) -> jax.Array:
    x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), rows + params["bias"], params["layers"])
    return jnp.square(x - params["bias"]).mean()


@pytest.mark.slow
def test_two_microbatches_on_four_devices_are_one_batch_on_one() -> None:
    """In one test, so that a sample of the cells has every strategy."""
    wanted = jax.grad(loss)(init(jax.random.key(0)), BATCH, None)
    for strategy in STRATEGIES:
        step = jp.make_train_step(
            jp.Model(init=init, loss=loss),
            optax.sgd(0.1, momentum=0.9),
            f"{strategy},microbatches=2",
            jax.devices()[:4],
        )
        state, metrics = step(step.init(jax.random.key(0)), BATCH)
        momentum = step.layout.to_logical(jax.tree.map(np.asarray, state.optimizer[0].trace))
        for name, grad in wanted.items():
            np.testing.assert_allclose(momentum[name], grad, rtol=1e-5, atol=1e-6, err_msg=f"{strategy}: {name}")
        assert float(metrics["loss"]) == pytest.approx(float(loss(init(jax.random.key(0)), BATCH, None)), rel=1e-5)
        check_collectives(step, BATCH)
