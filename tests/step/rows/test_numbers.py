"""NumPy computes the values that follow from sizes alone: JAX compiled a program for each equation and shape."""

from typing import Any

import equations
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar as jp
from jaxpar.program import jaxpr as jx
from jaxpar.step.rows.numbers import BY_NUMPY
from jaxpar.step.rows.values import UNKNOWN_POWER, Value


@pytest.mark.parametrize("name", sorted(BY_NUMPY))
def test_numpy_computes_the_same_numbers(name: str) -> None:
    for eqn, values in equations.equations(name, 6):
        expected = np.asarray(jx.bind(eqn, values)[0])
        result = np.asarray(BY_NUMPY[name](eqn, *map(np.asarray, values))).astype(expected.dtype)
        np.testing.assert_array_equal(result, expected)


def test_values_of_unknown_power_are_equal() -> None:
    """On Python 3.13 each differed from itself, since its power is NaN, and the fixpoint of a loop was not found."""
    value = Value("coupled", power=UNKNOWN_POWER)
    assert value == Value("coupled", power=UNKNOWN_POWER - 1)
    assert hash(value) == hash(Value("coupled", power=UNKNOWN_POWER - 1))
    assert value != Value("coupled", power=1)
    assert value != Value("rows", power=UNKNOWN_POWER)


def test_constants_of_an_associative_scan_are_not_compiled_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row check of memorax's mLSTM took 20 times as long as a trace.

    Its flags are slices of one constant in every level of its scan.
    """
    bound_names: list[str] = []
    bind = jx.bind

    def counted(eqn: Any, values: Any, **changes: Any) -> Any:
        bound_names.append(eqn.primitive.name)
        return bind(eqn, values, **changes)

    def loss(params: Any, batch: Any, key: Any) -> jax.Array:
        flags = jnp.arange(32) % 5 == 0

        def combine(a: Any, b: Any) -> Any:
            return jnp.where(b[1][:, None], b[0], a[0] + b[0]), a[1] | b[1]

        scan = lambda x: jax.lax.associative_scan(combine, (x * params, flags))[0]
        return jnp.square(jax.vmap(scan)(batch)).mean()

    step = jp.make_train_step(jp.Model(lambda key: jnp.ones(4), loss), optax.sgd(0.1), "ddp")
    monkeypatch.setattr(jx, "bind", counted)
    step.traced(np.ones((16, 32, 4), np.float32))
    assert len(bound_names) < 10, bound_names
