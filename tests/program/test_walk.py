"""Programs inside equations: visited, and followed by one fixpoint."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxpar.program.environment import through
from jaxpar.program.walk import fold, propagate, settled, visit


def follow(closed: Any, ins: list[bool], decides: bool | None = None) -> list[bool]:
    """Which results depend on marked inputs."""
    either = lambda a, b: a or b
    of = lambda eqn, ins: propagate(eqn, ins, follow, either) or [any(ins)] * len(eqn.outvars)
    return through(closed, ins, of, False)


def shifting(x: jax.Array, y: jax.Array) -> Any:
    """Three carries: `x` comes to the last one after two iterations, and to `y`'s never."""
    body = lambda c, _: ((c[0], c[0], c[1], jnp.sin(c[3])), c[3])
    return lax.scan(body, (x, y, y, y), None, length=5)


LOOPS: dict[str, tuple[Callable[..., Any], list[bool]]] = {
    "a carry reaches another after two steps": (shifting, [True, True, True, False, False]),
    "a loop's condition": (
        lambda x, y: lax.while_loop(lambda c: c[0] < x, lambda c: (c[0] + 1, c[1] * 2), (y, y)), [True, True]
    ),
    "a loop that reads it nowhere": (
        lambda x, y: (x, lax.while_loop(lambda c: c < 3, lambda c: c + 1, y)), [True, False]
    ),
    "a branch's number": (lambda x, y: lax.cond(x > 0, jnp.sin, jnp.cos, y), [True]),
    "one branch": (lambda x, y: lax.cond(y > 0, lambda x, y: (x, y), lambda x, y: (y, y), x, y), [True, False]),
    "a remat": (lambda x, y: jax.checkpoint(lambda x, y: (jnp.sin(y), x * y))(x, y), [False, True]),
    "a derivative of its own": (lambda x, y: (jax.nn.relu(x), jax.nn.relu(y)), [True, False]),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOPS)
def test_what_depends_on_the_first_argument(name: str) -> None:
    fun, expected = LOOPS[name]
    assert follow(jax.make_jaxpr(fun)(1.0, 2.0), [True, False]) == expected


def test_a_visit_says_how_often_each_equation_runs() -> None:
    def fun(x: jax.Array) -> jax.Array:
        inner = lambda x, _: (jnp.sin(x), None)
        outer = lambda x, _: (lax.scan(inner, jnp.cos(x), None, length=4)[0], None)
        return jnp.tanh(lax.scan(outer, x, None, length=3)[0])

    eqns = jax.make_jaxpr(fun)(1.0).eqns
    assert {eqn.primitive.name: n for eqn, n in visit(eqns)} == {"scan": 3, "cos": 3, "sin": 12, "tanh": 1}
    closed = visit(eqns, into=lambda eqn: False)
    assert [eqn.primitive.name for eqn, _ in closed] == ["scan", "tanh"]


def test_a_fold_is_told_what_became_of_each_equations_programs() -> None:
    def fun(x: jax.Array) -> jax.Array:
        branch = lambda x: lax.cond(x > 0, lambda x: jnp.sin(jnp.cos(x)), jnp.tanh, x)
        return lax.scan(lambda x, _: (branch(x), None), x, None, length=3)[0] + 1

    def most(eqns: Any, held: list[list[int]]) -> int:
        """As many equations as run in the longer branch."""
        times = [eqn.params.get("length", 1) for eqn in eqns]
        return sum(n * max(inner, default=1) for n, inner in zip(times, held, strict=True))

    conversions = 2  # of the predicate, in each iteration
    assert fold(jax.make_jaxpr(fun)(1.0).eqns, most) == 3 * (2 + conversions) + 1


def test_a_carry_settles_where_another_step_changes_nothing() -> None:
    step = lambda carry: [carry[1], carry[2], carry[2]]
    assert settled([0, 0, 5], step, max) == [5, 5, 5]
