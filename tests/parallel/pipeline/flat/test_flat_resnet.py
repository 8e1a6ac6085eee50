"""ResNet-50 with BatchNorm, cut into stages, differs from one device by rounding alone.

Its 53 norms over few rows magnify rounding. In float32, gradients differ by 1e-3, also under plain fsdp=2, and if
images change by one unit in the last place. In float64, one device differs from itself by 6e-10 if the rows of each
block are reversed.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cells import logical
from flax import nnx

import jaxpar as jp
from jaxpar.models import resnet

ROWS, SIZE, BLOCKS = 16, 32, 2
CONFIG = resnet.Config(blocks=(3, 4, 6, 3), bottleneck=True, width=8, classes=10, size=SIZE)


def build(rngs: nnx.Rngs) -> nnx.Module:
    module = resnet.ResNet(CONFIG, rngs=rngs)
    to_float64 = lambda x: x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x
    nnx.update(module, jax.tree.map(to_float64, nnx.state(module)))
    return module


def loss(module: Any, batch: Any) -> jp.Mean:
    losses = optax.softmax_cross_entropy_with_integer_labels(module(batch["image"]), batch["label"])
    return jp.Mean((losses * batch["weight"]).sum(), batch["weight"].sum())


def trained(strategy: str, devices: int, batch: Any) -> list[np.ndarray]:
    """Return gradients (the momentum after a first step), and parameters and running statistics after a second step."""
    model, optimizer = jp.from_nnx(build, loss), optax.sgd(0.1, momentum=0.9)
    step = jp.make_train_step(model, optimizer, f"{strategy},microbatches={BLOCKS}", mesh=jax.devices()[:devices])
    state, _ = step(step.init(jax.random.key(0)), batch)
    momentum = logical(step, state.optimizer[0].trace)
    state, _ = step(state, batch)
    return list(map(np.asarray, jax.tree.leaves(jax.device_get((momentum, step.params(state), state.variables)))))


@pytest.mark.battery
@pytest.mark.parametrize(
    ("strategy", "devices"), [("fsdp=2", 2), ("pipe=4", 4), ("pipe=2,fsdp=2,tensor=2", 8), ("pipe=2,schedule=zb-h1", 2)]
)
def test_training_differs_by_rounding_alone(strategy: str, devices: int) -> None:
    with jax.enable_x64(True):
        draw = np.random.default_rng(0)
        batch = {"image": draw.normal(size=(ROWS, SIZE, SIZE, 3)), "label": draw.integers(10, size=ROWS)}
        batch["weight"] = draw.integers(1, 9, ROWS) / 4
        replicas = 2 if "fsdp" in strategy else 1
        order = np.arange(ROWS).reshape(replicas, BLOCKS, -1).swapaxes(0, 1).reshape(-1)  # block k of all replicas
        expected = trained("single", 1, jax.tree.map(lambda x: x[order], batch))
        pipelined = trained(strategy, devices, batch)
    assert {x.dtype for x in pipelined} == {np.dtype(np.float64)}
    for ours, theirs in zip(pipelined, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-9 * np.abs(theirs).max())
