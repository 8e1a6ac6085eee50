"""The one interpreter: on arrays, on properties, in another order, and with variables of another program as values."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.program import jaxpr as jx
from jaxpar.program.environment import through


def test_a_property_is_followed_from_inputs_and_constants() -> None:
    table = jnp.arange(3.0)
    closed = jax.make_jaxpr(lambda x, y: (jnp.sin(x) + table, 2.0 * y, table))(table, 1.0)
    names = through(closed, ["x", "y"], lambda eqn, ins: ["".join(sorted({*ins}))] * len(eqn.outvars), "")
    assert names == ["x", "y", ""]


def test_a_hook_sees_each_equation_and_literals_have_their_dtype() -> None:
    flat, _ = jx.trace(lambda x: jnp.sin(x) * 2.0 + 1, jnp.ones(3, jnp.bfloat16))
    seen = []

    def results(eqn: Any, operands: list[Any]) -> list[Any]:
        seen.append((eqn.primitive.name, [x.dtype.name for x in operands]))
        return jx.bind(eqn, operands)

    (out,) = jx.evaluate(flat, [jnp.zeros(3, jnp.bfloat16)], results)
    assert out.tolist() == [1, 1, 1]
    assert seen == [("sin", ["bfloat16"]), ("mul", ["bfloat16"] * 2), ("add", ["bfloat16"] * 2)]


def test_arrays_that_a_flat_program_closes_over_are_values_too() -> None:
    table = jnp.arange(3.0)
    flat, _ = jx.trace(lambda x: x + table, jnp.ones(3))
    assert jx.evaluate(flat, [jnp.ones(3)], jx.bind)[0].tolist() == [1, 2, 3]


def test_equations_run_in_any_order_in_which_operands_are_there() -> None:
    flat, _ = jx.trace(lambda x: (jnp.sin(x), 2 * x), 1.0)
    env = jx.Environment.of(flat, [jnp.float32(0)])
    for eqn in reversed(flat.eqns):
        env.compute(eqn)
    assert env.read(flat.outvars) == [0, 0]


def test_an_equation_stands_where_it_stood_in_the_program_of_the_user() -> None:
    def fun(x: jax.Array) -> jax.Array:
        with jax.named_scope("block"):
            return jnp.sin(x)

    flat, _ = jx.trace(fun, 1.0)
    again, _ = jx.trace(lambda x: jx.evaluate(flat, [x], jx.bind), 1.0)
    (before,), (after,) = flat.eqns, again.eqns
    assert str(after.source_info.name_stack) == "block"
    assert jx.where(after) == jx.where(before) != ""


def test_variables_get_other_names_and_literals_stay() -> None:
    flat, _ = jx.trace(lambda x, y: x * y + 1.0, 1.0, 2.0)
    product, total = flat.eqns
    x, y = flat.invars
    names = jx.Environment({x: y}, jx.itself)
    assert names.read(product.invars) == [y, y]
    assert names.read(total.invars) == list(total.invars)
