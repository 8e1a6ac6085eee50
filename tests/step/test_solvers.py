"""Solvers of other packages inside a loss, as under plain `jit`: lineax, optimistix, diffrax, on primitives of Equinox.

None of them is a dependency: `make test` installs them, and without them these tests are skipped.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar as jp

lx, optx = pytest.importorskip("lineax"), pytest.importorskip("optimistix")
dfx = pytest.importorskip("diffrax")

DIM = 4


def lu(w: jax.Array, x: jax.Array) -> jax.Array:
    return lx.linear_solve(lx.MatrixLinearOperator(w), x).value


def conjugate_gradients(w: jax.Array, x: jax.Array) -> jax.Array:
    """The operator is a function instead of a matrix."""
    input_shape = jax.ShapeDtypeStruct((DIM,), jnp.float32)
    operator = lx.FunctionLinearOperator(lambda v: w.T @ (w @ v), input_shape, lx.positive_semidefinite_tag)
    return lx.linear_solve(operator, x, lx.CG(1e-6, 1e-6)).value


def equilibrium(w: jax.Array, x: jax.Array) -> jax.Array:
    """A fixed point, differentiated implicitly, through weights and rows that are closed over."""
    solver = optx.FixedPointIteration(1e-6, 1e-6)
    return optx.fixed_point(lambda z, _: jnp.tanh(0.1 * w @ z + x), solver, jnp.zeros(DIM), max_steps=64).value


def least_squares(w: jax.Array, x: jax.Array) -> jax.Array:
    solver = optx.LevenbergMarquardt(1e-6, 1e-6)
    return optx.least_squares(lambda z, a: a[0] @ z - jnp.sin(a[1]), solver, jnp.zeros(DIM), args=(w, x)).value


def adaptive(w: jax.Array, x: jax.Array) -> jax.Array:
    """An ODE whose steps a PID controller chooses for each row, differentiated through its loop with checkpoints."""
    term = dfx.ODETerm(lambda t, y, a: jnp.tanh(w @ y))
    pid = dfx.PIDController(1e-4, 1e-4)
    solution = dfx.diffeqsolve(term, dfx.Tsit5(), 0.0, 1.0, 0.25, x, stepsize_controller=pid, max_steps=64).ys
    assert solution is not None
    return solution[-1]


def backwards(w: jax.Array, x: jax.Array) -> jax.Array:
    """An ODE whose gradient is a second ODE, solved backwards in time."""
    term, adjoint = dfx.ODETerm(lambda t, y, a: jnp.tanh(a @ y)), dfx.BacksolveAdjoint()
    solution = dfx.diffeqsolve(term, dfx.Tsit5(), 0.0, 1.0, 0.25, x, w, adjoint=adjoint).ys
    assert solution is not None
    return solution[-1]


# Warned of: a loop over all rows ends with the last one, and a derivative that the analysis cannot read.
@pytest.mark.filterwarnings("ignore:the loss may couple rows")
@pytest.mark.parametrize(
    ("solve", "strategy"),
    [
        (conjugate_gradients, "ddp"),
        (equilibrium, "zero2,microbatches=2"),
        (lu, "fsdp=2"),
        (lu, "pipe=2,stages=cut,microbatches=2"),
        pytest.param(least_squares, "fsdp", marks=pytest.mark.slow),
        pytest.param(adaptive, "fsdp", marks=pytest.mark.slow),
        pytest.param(backwards, "ddp", marks=pytest.mark.slow),
    ],
    ids=lambda value: value.__name__ if callable(value) else value.replace(",", "-"),
)
def test_a_solver_in_a_loss(solve: Callable[..., jax.Array], strategy: str) -> None:
    """Solvers raised "pytree does not match out_structure" and the like, or were refused as if they coupled rows.

    In the backward of diffrax, the cotangents of times are 0 before and after each step of its loop. The analysis of
    rows did not see that.
    """
    random = np.random.default_rng(0)
    params = {name: 2 * np.eye(DIM, dtype="f") + 0.1 * random.normal(size=(DIM, DIM)).astype("f") for name in "ab"}
    batch = {name: random.normal(size=(8, DIM)).astype("f") for name in "xy"}

    def loss(p: Any, b: Any, key: Any = None) -> jax.Array:
        solutions = jax.vmap(lambda x: solve(p["a"], jnp.tanh(x @ p["b"])))(b["x"])
        return jnp.mean((solutions - b["y"]) ** 2)

    model = jp.Model(init=lambda key: jax.tree.map(jnp.asarray, params), loss=loss)
    step = jp.make_train_step(model, optax.sgd(0.1), strategy, mesh=jax.devices()[:2])
    loss_and_grads = step.value_and_grad(step.init(jax.random.key(0)), batch)
    expected = jax.jit(jax.value_and_grad(loss))(params, batch)
    for a, b in zip(jax.tree.leaves(loss_and_grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
