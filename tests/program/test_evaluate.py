"""The one interpreter: what a hook sees, and where its equations stand."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.program import jaxpr as jx


def test_a_hook_sees_each_equation_and_literals_have_their_dtype() -> None:
    flat, _ = jx.trace(lambda x: jnp.sin(x) * 2.0 + 1, jnp.ones(3, jnp.bfloat16))
    seen = []

    def results(eqn: Any, operands: list[Any]) -> list[Any]:
        seen.append((eqn.primitive.name, [x.dtype.name for x in operands]))
        return jx.bind(eqn, operands)

    (out,) = jx.evaluate(flat, [jnp.zeros(3, jnp.bfloat16)], results)
    assert out.tolist() == [1, 1, 1]
    assert seen == [("sin", ["bfloat16"]), ("mul", ["bfloat16"] * 2), ("add", ["bfloat16"] * 2)]


def test_an_equation_stands_where_it_stood_in_the_program_of_the_user() -> None:
    def fun(x: jax.Array) -> jax.Array:
        with jax.named_scope("block"):
            return jnp.sin(x)

    flat, _ = jx.trace(fun, 1.0)
    again, _ = jx.trace(lambda x: jx.evaluate(flat, [x], jx.bind), 1.0)
    (before,), (after,) = flat.eqns, again.eqns
    assert str(after.source_info.name_stack) == "block"
    assert jx.where(after) == jx.where(before) != ""
