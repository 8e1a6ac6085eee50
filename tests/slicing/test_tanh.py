"""A tanh of 16 bits, such as a GELU's, which a backward computes again, is written by one exponential."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.program import jaxpr as jx
from jaxpar.slicing.tanh import by_exponentials


def gelu_and_gradient(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return GELU and its derivative, from one tanh."""
    y, pull = jax.vjp(lambda x: jax.nn.gelu(x, approximate=True), x)
    return y, pull(jnp.ones_like(x))[0]


def rewritten(fun: Callable[..., Any], x: jax.Array) -> tuple[list[str], list[np.ndarray], list[np.ndarray]]:
    """Return the primitives of the new equations, their results, and those of the old equations."""
    flat, _ = jx.trace(fun, x)
    eqns = by_exponentials(flat.eqns)
    results = (jx.run(e, flat.invars, flat.outvars)(x) for e in (eqns, flat.eqns))
    new, old = ([np.asarray(y, np.float64) for y in ys] for ys in results)
    return [eqn.primitive.name for eqn in eqns], new, old


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_of_all_values(dtype: Any) -> None:
    """Of the 65,536 numbers of 16 bits, at most 10 give the neighbour in this dtype; infinities and NaN stay."""
    numbers = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    # CPUs may round numbers to 0 that are smaller than this.
    x = jnp.asarray(numbers[~(np.abs(np.float32(numbers)) < jnp.finfo(dtype).tiny)])
    names, (new,), (old,) = rewritten(lambda x: (jnp.tanh(x),), x)
    assert "exp" in names
    assert "tanh" not in names
    np.testing.assert_allclose(new, old, rtol=float(jnp.finfo(dtype).eps))
    assert (new != old).sum() - np.isnan(new).sum() <= 10


def test_of_a_gelu() -> None:
    """All but a few of 10,000 values and derivatives are equal to the bit."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=10_000) * 2, jnp.bfloat16)
    names, new, old = rewritten(gelu_and_gradient, x)
    assert "tanh" not in names
    for a, b in zip(new, old, strict=True):
        assert (a == b).mean() > 0.999
        np.testing.assert_allclose(a, b, atol=2**-8, rtol=2**-7)


def test_of_float32() -> None:
    """A tanh of float32 stays: it has no rounding that hides the difference."""
    names, _, _ = rewritten(lambda x: (1 + jnp.tanh(x),), jnp.full(3, 0.001, jnp.float32))
    assert "exp" not in names


def test_of_an_operand_of_a_matmul() -> None:
    """XLA stores such a tanh in any case. By an exponential, its input would be read once more."""
    x = jnp.ones((3, 3), jnp.bfloat16)
    names, _, _ = rewritten(lambda x: (jnp.tanh(x) @ x, 1 - jnp.tanh(x)), x)
    assert names.count("exp") == 1
