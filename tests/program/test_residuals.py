"""A backward computes again what follows element by element: SwiGLU kept six arrays of its width, and a norm three."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxpar as jp
from jaxpar.inspect.memory import forward
from jaxpar.models import named
from jaxpar.program import jaxpr as jx
from jaxpar.program.residuals import residuals_to_save, row_scales
from jaxpar.slicing import units

ROWS, LENGTH = 2, 8


def again(fun: Any, *args: Any, known: int = 0) -> tuple[list[Any], Any]:
    """What is kept of a function whose results are all residuals, with the values that come back from it.

    The first `known` arguments are there in the backward, no other is.
    """
    flat, _ = jx.trace(fun, *args)
    have = flat.invars[:known]
    saved, eqns = residuals_to_save(flat.eqns, flat.outvars, have, ())
    values = jx.run(flat.eqns, flat.invars, saved)(*args)
    return saved, jx.run(eqns, [*have, *saved], flat.outvars)(*args[:known], *values)


def test_of_a_gated_layer() -> None:
    """Of its products each is kept, and no more; what comes back is the same to the bit."""
    rng = np.random.default_rng(0)
    x, w, v = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in [(4, 3), (3, 6), (3, 6)])

    def residuals(x: jax.Array, w: jax.Array, v: jax.Array) -> list[jax.Array]:
        gate, up = x @ w, x @ v
        s = lax.logistic(gate)
        return [gate, s, 1 - s, gate * s, up, gate * s * up]

    saved, values = again(residuals, x, w, v)
    assert [v.aval.shape for v in saved] == [(4, 6)] * 2
    for new, old in zip(values, residuals(x, w, v), strict=True):
        np.testing.assert_array_equal(new, old)


def test_less_in_place_of_more() -> None:
    """Of bfloat16 widened to float32, itself, and the mean; of what is there, nothing; sums and noise stay."""
    x = jnp.arange(12, dtype=jnp.bfloat16).reshape(3, 4)

    def norm(x: jax.Array) -> list[jax.Array]:
        wide = (x @ jnp.eye(4, dtype=x.dtype)).astype(jnp.float32)
        return [2 * wide, wide - wide.mean(-1, keepdims=True)]

    saved, _ = again(norm, x)
    assert sorted((v.aval.dtype.name, v.aval.size) for v in saved) == [("bfloat16", 12), ("float32", 3)]
    assert again(lambda x: [jnp.sin(x), x > 3], x, known=1)[0] == []
    noise = lambda x: [jax.random.bits(jax.random.key(0), x.shape) > 7, jnp.cumsum(x)]
    assert len(again(noise, x, known=1)[0]) == 2


def test_sums_that_scale_rows() -> None:
    """The sum of squares in an RMS norm is computed again. A mean that is subtracted is saved, and so is a softmax's.

    The backward would read all elements once more for these.
    """
    normalised = {
        "rms": (lambda x: x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6), 1),
        "rms, in two steps": (lambda x: x * jnp.broadcast_to(lax.rsqrt((x * x).sum(-1, keepdims=True)), x.shape), 1),
        "layer": (lambda x: x - x.mean(-1, keepdims=True), 0),
        "layer, in two steps": (lambda x: x - jnp.broadcast_to(x.mean(-1)[:, None], x.shape), 0),
        "softmax": (jax.nn.softmax, 0),
        "columns": (lambda x: x * lax.rsqrt((x * x).mean(0, keepdims=True) + 1e-6), 0),
        "whole": (lambda x: x * lax.rsqrt((x * x).mean() + 1e-6), 0),
        "read again": (lambda x: (lambda r: x * r + r)(lax.rsqrt((x * x).sum(-1, keepdims=True))), 0),
    }
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4)), jnp.float32)
    for name, (norm, count) in normalised.items():
        flat, _ = jx.trace(norm, x)
        assert len(row_scales(flat.eqns)) == count, name


def test_a_long_chain_of_functions_of_a_sum() -> None:
    """Each function that reads its operand twice doubled the time, and 300 functions were a RecursionError."""

    def scaled(x: jax.Array) -> jax.Array:
        s = (x * x).sum(-1)
        for _ in range(300):
            s = s * (1.5 - 0.5 * s * s)
        return x * s[:, None]

    flat, _ = jx.trace(scaled, jnp.ones((4, 8)))
    assert len(row_scales(flat.eqns)) == 1


def test_random_numbers_are_not_drawn_again() -> None:
    """A draw from literals would give other numbers in the backward."""
    draw = lambda: lax.rng_uniform(jnp.float32(0), jnp.float32(1), ())
    flat, _ = jx.trace(lambda w: jax.vjp(lambda w: (w * draw()) ** 2, w), jnp.ones(()))
    saved, again = residuals_to_save(flat.eqns, flat.outvars[1:], [], [])
    assert saved
    assert all(eqn.primitive.name != "rng_uniform" for eqn in again)


def test_scalars_of_literals_are_not_saved() -> None:
    """JAX's derivative of tanh reads a 1 that is an equation's result. Each layer saved its own."""

    def derivative(x: jax.Array) -> list[jax.Array]:
        return [jax.vjp(jnp.tanh, x)[1](jnp.ones_like(x))[0]]

    x = jnp.linspace(-2, 2, 5, dtype=jnp.float32)
    saved, values = again(derivative, x, known=1)
    assert saved == []
    np.testing.assert_array_equal(values[0], derivative(x)[0])


def test_no_layer_of_a_step_saves_a_scalar(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a step, JAX wraps the 1 of the derivative of a sigmoid in `reshard`, which each layer saved."""
    saved_scalars: list[Any] = []

    def recorded(*args: Any) -> Any:
        saved, again = residuals_to_save(*args)
        saved_scalars.extend(v for v in saved if v.aval.ndim == 0)
        return saved, again

    monkeypatch.setattr(units, "residuals_to_save", recorded)
    llama = named("llama-tiny", layers=2)
    step = jp.make_train_step(llama.model, optax.sgd(0.1), "single,precision=bf16", mesh=jax.devices()[:1])
    step.trace(llama.example(2, 16))
    assert saved_scalars == []


def test_of_a_step() -> None:
    """A Llama layer keeps the inputs of its norms, query and attention's result, key and value, and two products."""
    found = named("llama-tiny", layers=2)
    batch = found.example(ROWS, LENGTH)
    config: Any = found.config
    single = jp.make_train_step(found.model, optax.sgd(0.1), "single")
    more = jp.make_train_step(named("llama-tiny", layers=3).model, optax.sgd(0.1), "single")
    layer = forward(more, batch).saved - forward(single, batch).saved
    widths = 4 * config.dim + 2 * config.kv_heads * config.head_dim + 2 * config.ffn
    # Of the norms nothing else: their scales are computed again.
    assert layer == pytest.approx(4 * ROWS * LENGTH * widths, rel=1e-3)


@pytest.mark.cuda_compiler
def test_of_a_layer_with_biases() -> None:
    """A LayerNorm's bias is fetched to compute its result again. The result was saved beside the norm's input.

    Attention saves statistics only where JAX finds cuDNN.
    """
    gpt = {layers: named("gpt-tiny", layers=layers) for layers in (2, 3)}
    batch = gpt[2].example(ROWS, LENGTH)
    steps = {n: jp.make_train_step(gpt[n].model, optax.sgd(0.1), "single,precision=bf16") for n in gpt}
    layer = forward(steps[3], batch).saved - forward(steps[2], batch).saved
    # The inputs of two norms; query, key, value and attention's result; the feed-forward's product, 4 times as wide.
    widths = 10 * gpt[2].config.dim
    numbers = 6 + gpt[2].config.heads  # of two norms and of attention, for every position, in float32
    assert layer == pytest.approx(ROWS * LENGTH * (2 * widths + 4 * numbers), rel=1e-3)
