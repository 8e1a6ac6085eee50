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
    """An operator that is a function."""
    of = jax.ShapeDtypeStruct((DIM,), jnp.float32)
    operator = lx.FunctionLinearOperator(lambda v: w.T @ (w @ v), of, lx.positive_semidefinite_tag)
    return lx.linear_solve(operator, x, lx.CG(1e-6, 1e-6)).value


def equilibrium(w: jax.Array, x: jax.Array) -> jax.Array:
    """Differentiated implicitly, through weights and rows that are closed over."""
    solver = optx.FixedPointIteration(1e-6, 1e-6)
    return optx.fixed_point(lambda z, _: jnp.tanh(0.1 * w @ z + x), solver, jnp.zeros(DIM), max_steps=64).value


def root(w: jax.Array, x: jax.Array) -> jax.Array:
    """Newton's, with what it needs handed as `args`, not closed over."""
    solver = optx.Newton(1e-6, 1e-6)
    found = optx.root_find(lambda z, a: z - jnp.tanh(0.1 * a[0] @ z + a[1]), solver, jnp.zeros(DIM), args=(w, x))
    return found.value


def least_squares(w: jax.Array, x: jax.Array) -> jax.Array:
    solver = optx.LevenbergMarquardt(1e-6, 1e-6)
    return optx.least_squares(lambda z, a: a[0] @ z - jnp.sin(a[1]), solver, jnp.zeros(DIM), args=(w, x)).value


def adaptive(w: jax.Array, x: jax.Array) -> jax.Array:
    """An ODE whose steps a PID controller chooses, each row its own."""
    term = dfx.ODETerm(lambda t, y, a: jnp.tanh(a @ y))
    pid = dfx.PIDController(1e-4, 1e-4)
    found = dfx.diffeqsolve(term, dfx.Tsit5(), 0.0, 1.0, 0.25, x, w, stepsize_controller=pid, max_steps=64).ys
    assert found is not None
    return found[-1]


def backwards(w: jax.Array, x: jax.Array) -> jax.Array:
    """Differentiated by an ODE of its own, solved backwards."""
    term, adjoint = dfx.ODETerm(lambda t, y, a: jnp.tanh(a @ y)), dfx.BacksolveAdjoint()
    found = dfx.diffeqsolve(term, dfx.Tsit5(), 0.0, 1.0, 0.25, x, w, adjoint=adjoint).ys
    assert found is not None
    return found[-1]


def flow(w: jax.Array, x: jax.Array) -> jax.Array:
    """An ODE of fixed steps, differentiated through its loop with checkpoints."""
    term = dfx.ODETerm(lambda t, y, a: jnp.tanh(w @ y))
    found = dfx.diffeqsolve(term, dfx.Tsit5(), 0.0, 1.0, 0.25, x).ys
    assert found is not None
    return found[-1]


# A loop of all rows ends with the last, which is said; and so is a derivative that cannot be read.
@pytest.mark.filterwarnings("ignore:the loss may couple rows")
@pytest.mark.parametrize(
    ("solve", "strategy"),
    [
        (flow, "fsdp"),
        (conjugate_gradients, "ddp"),
        (equilibrium, "zero2,microbatches=2"),
        (lu, "fsdp=2"),
        (lu, "pipe=2,stages=cut,microbatches=2"),
        pytest.param(root, "fsdp", marks=pytest.mark.slow),
        pytest.param(least_squares, "fsdp", marks=pytest.mark.slow),
        pytest.param(adaptive, "fsdp", marks=pytest.mark.slow),
        pytest.param(backwards, "ddp", marks=pytest.mark.slow),
    ],
    ids=lambda value: value.__name__ if callable(value) else value.replace(",", "-"),
)
def test_a_solver_in_a_loss(solve: Callable[..., jax.Array], strategy: str) -> None:
    """They were "pytree does not match out_structure", and the like, and refused as if they coupled rows: of diffrax's
    backward the cotangents of times, which are 0 before and after each step of its loop, were taken for anything.
    """
    random = np.random.default_rng(0)
    params = {name: 2 * np.eye(DIM, dtype="f") + 0.1 * random.normal(size=(DIM, DIM)).astype("f") for name in "ab"}
    batch = {name: random.normal(size=(8, DIM)).astype("f") for name in "xy"}

    def loss(p: Any, b: Any, key: Any = None) -> jax.Array:
        found = jax.vmap(lambda x: solve(p["a"], jnp.tanh(x @ p["b"])))(b["x"])
        return jnp.mean((found - b["y"]) ** 2)

    model = jp.Model(init=lambda key: jax.tree.map(jnp.asarray, params), loss=loss)
    step = jp.make_train_step(model, optax.sgd(0.1), strategy, mesh=jax.devices()[:2])
    found = step.value_and_grad(step.init(jax.random.key(0)), batch)
    wanted = jax.jit(jax.value_and_grad(loss))(params, batch)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
