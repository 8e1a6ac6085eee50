"""A GELU's tanh, which a backward computes again, is written by one exponential where small errors do not count."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.program import jaxpr as jx
from jaxpar.slicing.tanh import by_exponentials


def gelu_and_gradient(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return GELU and its derivative, from one tanh."""
    y, pull = jax.vjp(lambda x: jax.nn.gelu(x, approximate=True), x)
    return y, pull(jnp.ones_like(x))[0]


def rewritten(fun: Callable[..., Any], x: jax.Array) -> tuple[list[str], list[np.ndarray], list[np.ndarray]]:
    """Return the primitives of the new equations, their results, and those of the old equations."""
    flat, _ = jx.trace(fun, x)
    eqns = by_exponentials(flat.eqns, flat.outvars)
    results = (jx.run(e, flat.invars, flat.outvars)(x) for e in (eqns, flat.eqns))
    new, old = ([np.asarray(y, np.float64) for y in ys] for ys in results)
    return [eqn.primitive.name for eqn in eqns], new, old


def test_the_values_are_those_of_tanh() -> None:
    """All but a few of 10,000 are equal to the bit. The others have their neighbour in bfloat16, or in 1 - tanh."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=10_000) * 2, jnp.bfloat16)
    names, new, old = rewritten(gelu_and_gradient, x)
    assert "exp" in names
    assert "tanh" not in names
    for a, b in zip(new, old, strict=True):
        assert (a == b).mean() > 0.999
        np.testing.assert_allclose(a, b, atol=2**-8, rtol=2**-7)


def test_of_extreme_values() -> None:
    """Large values do not overflow, and NaN stays."""
    extremes = [0.0, -0.0, 1e-30, 1e-4, 8.0, -8.0, 100.0, -100.0, 1e4, -1e4, np.inf, -np.inf, np.nan]
    names, new, old = rewritten(lambda x: (1 + jnp.tanh(x), 1 - jnp.tanh(x)), jnp.asarray(extremes, jnp.bfloat16))
    assert names.count("exp") == 2
    np.testing.assert_array_equal(new, old)


def test_what_stays() -> None:
    """A tanh whose small values count, and one of float32, which has no rounding that hides the difference."""
    narrow, wide = jnp.full(3, 0.001, jnp.bfloat16), jnp.full(3, 0.001, jnp.float32)
    unchanged: list[tuple[Callable[..., Any], jax.Array]] = [
        (lambda x: (jnp.tanh(x),), narrow),
        (lambda x: (3 * jnp.tanh(x),), narrow),
        (lambda x: (x * jnp.tanh(x),), narrow),
        (lambda x: (1e-3 + jnp.tanh(x),), narrow),
        (lambda x: (lambda t: (1 + t, t))(jnp.tanh(x)), narrow),
        (lambda x: (lambda t: (1 + t * t,))(jnp.tanh(x)), narrow),
        (lambda x: (1 + jnp.tanh(x),), wide),
    ]
    for fun, x in unchanged:
        names, _, _ = rewritten(fun, x)
        assert "exp" not in names
