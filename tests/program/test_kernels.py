"""Kernels that tensor parallelism calls on parts: found in a trace by name, and only where they are themselves."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpar as jp
from jaxpar.program import jaxpr as jx
from jaxpar.program import kernels

X = np.arange(6.0, dtype=np.float32).reshape(2, 3)


def scaled(x: jax.Array, table: jax.Array, by: float = 2) -> tuple[jax.Array, jax.Array]:
    """[a, b], [a] -> [a, b], [b]."""
    return by * jnp.sin(x) * table[:, None], x.sum(0)


def wrapped(**options: Any) -> Callable[..., Any]:
    return jp.local_kernel(functools.partial(scaled, **options), in_dims=(1, None), out_dims=(1, 0))


def found(fun: Callable[..., Any], *args: Any) -> list[tuple[str, kernels.LocalKernel]]:
    eqns = jax.make_jaxpr(fun)(*args).eqns
    return [(e.params["name"], kernel) for e in eqns if (kernel := kernels.of(e))]


def test_runs_and_is_differentiated_as_the_function() -> None:
    kernel = wrapped()
    loss = lambda f: lambda x: f(x, X[:, 0])[0].sum()
    np.testing.assert_array_equal(kernel(X, X[:, 0])[0], scaled(X, X[:, 0])[0])
    np.testing.assert_allclose(jax.grad(loss(kernel))(X), jax.grad(loss(scaled))(X), rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(kernel, (0, None))(X[None], X[:, 0])[1][0], X.sum(0))


def test_parts_make_the_whole() -> None:
    ((_, kernel),) = found(wrapped(by=3), X, X[:, 0])
    assert (kernel.in_dims, kernel.out_dims) == ((1, None), (1, 0))
    outs = zip(*(kernel.fun(X[:, i : i + 1], X[:, 0]) for i in range(3)), strict=True)
    for parts, whole, dim in zip(outs, scaled(X, X[:, 0], 3), kernel.out_dims, strict=True):
        np.testing.assert_allclose(np.concatenate(parts, dim), whole, rtol=1e-6)


def test_equal_functions_and_options_are_one_kernel() -> None:
    name = lambda kernel: found(kernel, X, X[:, 0])[0][0]
    assert name(wrapped(by=3)) == name(wrapped(by=3))
    assert "scaled" in name(wrapped(by=3))
    others = wrapped(by=3.0), wrapped(by=4), wrapped(), jp.local_kernel(scaled, (1, None), (1, None))
    assert len({name(kernel) for kernel in (wrapped(by=3), *others)}) == 5


def test_an_option_that_has_no_hash_is_traced_once() -> None:
    traced = []

    def fun(x: jax.Array, names: list[str]) -> jax.Array:
        traced.append(names)
        return x

    kernel = jp.local_kernel(functools.partial(fun, names=["a"]), (0,), 0)
    for _ in range(3):
        kernel(X)
    assert len(traced) == 1
    assert found(kernel, X)


def test_what_a_transformation_made_is_no_kernel() -> None:
    """A derivative can have the kernel's name, numbers and shapes, and is another function."""
    kernel = jp.local_kernel(lambda x, y: x * y, (1, 1), 1)
    both = jax.make_jaxpr(jax.grad(lambda x: kernel(x, X).sum()))(X).eqns
    again = [e for e in both if e.params.get("name", "").startswith("jaxpar_kernel")]
    assert [(len(e.invars), len(e.outvars)) for e in again][-1] == (2, 1)
    assert not any(map(kernels.of, again))
    assert not found(lambda x: jax.jvp(kernel, (x, x), (x, x)), X)
    assert not found(jax.vmap(kernel), X[None], X[None])
    assert not found(jax.jit(jnp.sin), X)
    assert found(jax.vmap(lambda _: kernel(X, X)), X)  # what is not mapped stays itself


def test_unused_results_are_left_out() -> None:
    flat, _ = jx.trace(lambda x, table: wrapped()(x, table)[0], X, X[:, 0])
    (eqn,) = jx.live(flat.eqns, flat.outvars)
    assert len(eqn.outvars) == 1
    kernel = kernels.of(eqn)
    assert kernel is not None
    assert kernel.out_dims == (1,)
    np.testing.assert_allclose(kernel.fun(X, X[:, 0])[0], scaled(X, X[:, 0])[0], rtol=1e-6)


@pytest.mark.parametrize(
    ("call", "parts"),
    [
        (
            lambda: jp.local_kernel(scaled, (-1, None), 0),
            ("scaled: in_dims=(-1, None)", "-1", "from 0, or None"),
        ),
        (lambda: jp.local_kernel(scaled, (1, None), ("x",)), ("out_dims=('x',)", "from 0, or None")),
        (lambda: wrapped()(X), ("got 1 arrays", "in_dims=(1, None) is for 2; give each its dim")),
        (lambda: wrapped()(X, X[:, 0], by=3), ("the keyword 'by'", "functools.partial")),
        (lambda: wrapped()(X, [1.0, 2.0]), ("argument 1 of kernel scaled is a list", "give an array")),
        (
            lambda: wrapped()(X[0], X[:, 0]),
            ("argument 0 of kernel scaled", "shape [3] and no dim 1", "0 to 0"),
        ),
        (lambda: jp.local_kernel(scaled, (1, None), 1)(X, X[:, 0]), ("a tuple of 2", "out_dims=1", "one dim for each")),
        (lambda: jp.local_kernel(scaled, (1, None), (1, 1))(X, X[:, 0]), ("result 1", "shape [3] and no dim 1")),
        (lambda: jp.local_kernel(jnp.sin, (1,), (1,))(X), ("out_dims=(1,)", "one dim for each")),
    ],
)
def test_errors_say_what_to_do(call: Callable[[], Any], parts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="(?s)" + ".*".join(map(re.escape, parts))):
        call()


def test_a_kernel_may_not_close_over_what_is_traced() -> None:
    with pytest.raises(ValueError, match=r"uses 1 traced arrays that are not its arguments; pass them"):
        found(lambda x, y: jp.local_kernel(lambda a: a * y, (1,), 1)(x), X, X)
    assert found(lambda x: jp.local_kernel(lambda a: a * jnp.asarray(X), (1,), 1)(x), X)
