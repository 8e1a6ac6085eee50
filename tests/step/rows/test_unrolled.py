"""A Python loop over rows becomes one computation, with the same numbers, and one program for any number of rows."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.program import jaxpr as jx
from jaxpar.step.rows.unrolled import loops_over_rows


def stacked(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.stack([jax.nn.relu(x[i] @ w) * jnp.tanh(x[i] @ w) for i in range(len(x))], axis=1)


def one_after_another(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.concatenate([jnp.tanh(x[i : i + 1] @ w) * (i + 1.0) for i in range(len(x))])


def added(w: jax.Array, x: jax.Array) -> jax.Array:
    total, bias = jnp.sum(w), w.mean(0)
    for row in x:
        total = jnp.square(row @ w + bias).sum() + total
    return total + sum((row @ w).sum() for row in x)


def of_two_lists(w: jax.Array, x: jax.Array) -> jax.Array:
    y = jnp.cumsum(x, 0)
    return jnp.array([jnp.vdot(a @ w, b @ w) for a, b in zip(x, y, strict=True)])


def own_constants(w: jax.Array, x: jax.Array) -> jax.Array:
    """Each row has its own constants and scans, whose programs are traced anew."""
    step = lambda state, at: (0.5 * state + at, None)
    return jnp.stack([jax.lax.scan(step, jnp.zeros(5), row * jnp.ones((4, 1)))[0] @ w * jnp.arange(3.0) for row in x])


def next_row(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.stack([jnp.tanh(x[i] @ w) - x[i - 1] @ w for i in range(len(x))])


def average(w: jax.Array, x: jax.Array) -> jax.Array:
    state, states = jnp.zeros(w.shape[1]), []
    for row in x:
        state = 0.9 * state + row @ w
        states.append(state)
    return jnp.stack(states)


def each_with_each(w: jax.Array, x: jax.Array) -> jax.Array:
    """Combine each row with each row: the array has as many columns as rows."""
    y = jnp.tanh(x @ x.T)
    return jnp.stack([jnp.stack([y[i][j] + y[0, j] for j in range(len(x))]) * w.sum() for i in range(len(x))])


def all_but_first(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.stack([jnp.tanh(x[i] @ w) for i in range(len(x) - 1, 0, -1)]) + (x[0] @ w if len(x) > 5 else 0)


@pytest.mark.parametrize(
    ("loss", "alike"),
    [
        *((loss, True) for loss in (stacked, one_after_another, added, of_two_lists, own_constants)),
        *((loss, False) for loss in (next_row, average, each_with_each, all_but_first)),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_it_computes_the_same(loss: Any, alike: bool) -> None:
    """Losses in which rows meet compute the same too, but their programs differ with the number of rows."""
    w, programs = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32), []
    for num_rows in (4, 8):
        x = np.random.default_rng(1).normal(size=(num_rows, 5)).astype(np.float32)
        flat, _ = jx.trace(loss, w, x)
        rolled = loops_over_rows(flat, num_rows, {})
        compute = jx.run(rolled.eqns, [*rolled.constvars, *rolled.invars], rolled.outvars)
        np.testing.assert_allclose(compute(*rolled.consts, w, x)[0], loss(w, x), rtol=2e-5, atol=2e-5)
        programs.append([eqn.primitive.name for eqn in rolled.eqns])
    assert (programs[0] == programs[1]) is alike
