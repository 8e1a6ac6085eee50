"""Values without a derivative stay without one where a loss is cut: a loop of unknown length may follow."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar as jp

RANDOM = np.random.default_rng(0)
BATCH = {"x": RANDOM.normal(size=(16, 4)).astype(np.float32)}
LOOP, STOP = jax.lax.while_loop, jax.lax.stop_gradient
DRAW: dict[str, tuple[int, ...]] = {"w": (4, 4), "v": (4, 4), "first": (4, 8), "layers": (4, 8, 8)}
PARAMS = {name: RANDOM.normal(size=shape).astype(np.float32) for name, shape in DRAW.items()}


def equilibrium(p: Any, b: Any) -> jax.Array:
    """A fixed point under stopped weights, and one step from there (Jacobian-free backpropagation)."""
    w = STOP(p["w"]) * 0.2

    def fixed(x: jax.Array) -> jax.Array:
        step = lambda c: (c[0] + 1, jnp.tanh(c[1] @ w + x), c[1])
        return LOOP(lambda c: (c[0] < 50) & (jnp.abs(c[1] - c[2]).max() > 1e-4), step, (0, x, x + 1))[1]

    return jnp.mean(jnp.tanh(jax.vmap(fixed)(b["x"]) @ p["w"] * 0.2 + b["x"]) ** 2)


def weights(p: Any, b: Any) -> jax.Array:
    """A loop over stopped weights that reads rows."""
    scaled = LOOP(lambda v: jnp.abs(b["x"] @ v).max() > 1.0, lambda v: v * 0.7, STOP(p["w"]))
    return jnp.mean(jnp.tanh(b["x"] @ (p["w"] + scaled)))


def _norms(x: jax.Array) -> jax.Array:
    return jax.vmap(lambda r: LOOP(lambda r: jnp.abs(r).max() > 0.5, lambda r: r * 0.7, r))(x)


def layers(p: Any, b: Any) -> jax.Array:
    """Stopped before layers that are scanned, a loop in each."""
    x = b["x"] @ p["first"]
    stopped = STOP(x)
    return jnp.mean(jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w) * _norms(stopped), None), x, p["layers"])[0] ** 2)


def stages(p: Any, b: Any) -> jax.Array:
    """Signs in one stage, a loop in the next."""
    x = jnp.tanh(b["x"] @ p["w"])
    signs = jnp.sign(x) * 2
    return jnp.mean(jnp.tanh(jnp.tanh(x @ p["v"]) @ p["w"]) @ p["v"] * _norms(signs))


@pytest.mark.filterwarnings("ignore:the loss may couple rows")  # a block's loop may end by its own rows
@pytest.mark.parametrize(
    ("loss", "strategy"),
    [
        (equilibrium, "fsdp=2"),
        (weights, "data=2,zero=2,microbatches=2"),
        (layers, "pipe=2,microbatches=2,schedule=zb-h1"),
        (stages, "pipe=2,stages=cut,microbatches=2"),
    ],
    ids=lambda value: value.__name__ if callable(value) else value.replace(",", "-"),
)
def test_loops_on_stopped_values_run_as_on_one_device(loss: Callable[..., jax.Array], strategy: str) -> None:
    """`stop_gradient(w)` was computed with the weights and differentiated by all weights: JAX's "Reverse-mode
    differentiation does not work for lax.while_loop".
    """
    _agrees(loss, strategy)


def _agrees(loss: Callable[..., jax.Array], strategy: str) -> None:
    blocks = 4 if "zero" in strategy else 2 if "fsdp" in strategy else 1
    rows = {"x": BATCH["x"][: 16 // blocks]}
    batch = {"x": np.tile(rows["x"], (blocks, 1))}
    model = jp.Model(init=lambda key: jax.tree.map(jnp.asarray, PARAMS), loss=lambda p, b, key: loss(p, b))
    step = jp.make_train_step(model, optax.sgd(0.1), strategy, mesh=jax.devices()[:2])
    actual = step.value_and_grad(step.init(jax.random.key(0)), batch)
    expected = jax.jit(jax.value_and_grad(loss))(PARAMS, rows)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


def test_layers_whose_weights_have_no_gradient_take_a_split_backward() -> None:
    """The half that gives gradients of weights has no residuals then: it raised StopIteration."""
    scan = lambda p, x: jax.lax.scan(lambda h, w: (h @ jnp.sign(w), None), x, p["layers"])[0]
    loss = lambda p, b: jnp.mean(scan(p, b["x"] @ p["first"]) ** 2)
    _agrees(loss, "pipe=2,microbatches=2,schedule=zb-h1")


def test_layers_that_keep_complex_numbers() -> None:
    """Complex numbers are saved and recomputed like others; `jax.checkpoint` would round its saved values."""

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        turned = jax.lax.complex(x[:, ::2], x[:, 1::2]) @ (w[:4, :4] + 1j * w[4:, :4])
        return jnp.concatenate([turned.real, jnp.abs(turned)], -1) @ w, None

    loss = lambda p, b: jnp.mean(jax.lax.scan(layer, b["x"] @ p["first"], p["layers"] / 4)[0] ** 2)
    _agrees(loss, "fsdp=2,remat=dots")
