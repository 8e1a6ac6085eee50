"""Gradients of weights are one product. JAX also transposes them: the copies made a step on CPUs half as slow again."""

from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import jaxpar as jp
from jaxpar.models import named
from jaxpar.program import jaxpr as jx
from jaxpar.slicing.units import oriented


def names(eqns: Any) -> list[str]:
    return [eqn.primitive.name for eqn in eqns]


def test_products() -> None:
    """A product with batch dims, several summed dims and a precision for each operand has the same values."""
    x, w, g = (np.random.default_rng(i).normal(size=s).astype(np.float32) for i, s in
               enumerate([(2, 3, 5, 4), (2, 4, 6), (2, 3, 5, 6)]))  # fmt: skip
    precision = (lax.Precision.HIGH, lax.Precision.DEFAULT)

    def weight(x: jax.Array, w: jax.Array, g: jax.Array) -> Any:
        product = lambda w: jnp.einsum("bijd,bdf->bijf", x, w, precision=precision)
        return jax.vjp(product, w)[1](g)

    flat, _ = jx.trace(weight, x, w, g)
    eqns = jx.live(oriented(flat.eqns, flat.outvars), flat.outvars)
    assert "transpose" in names(flat.eqns)
    assert names(eqns) == ["dot_general"]
    assert len(eqns[0].params["precision"]) == 2
    (new,) = jx.run(eqns, flat.invars, flat.outvars)(x, w, g)
    np.testing.assert_allclose(new, weight(x, w, g)[0], rtol=1e-5, atol=1e-5)


def test_what_stays() -> None:
    """A product stays if it is read twice or is itself a result, and so does a transpose that permutes more dims."""
    a, b = np.ones((3, 4), np.float32), np.ones((4, 5), np.float32)
    unchanged = {
        "read twice": lambda a, b: ((a @ b).T, jnp.sin(a @ b)),
        "result": lambda a, b: (lambda y: (y, y.T))(a @ b),
        "heads": lambda a, b: (jnp.einsum("ijk,kl->ijl", a[None], b).transpose(2, 0, 1),),
    }
    for name, fun in unchanged.items():
        flat, _ = jx.trace(fun, a, b)
        eqns = oriented(flat.eqns, flat.outvars)
        assert len(eqns) == len(flat.eqns)
        values = jx.run(eqns, flat.invars, flat.outvars)(a, b)
        for actual, expected in zip(values, jax.tree.leaves(fun(a, b)), strict=True):
            np.testing.assert_array_equal(actual, expected, err_msg=name)
    flat, _ = jx.trace(unchanged["result"], a, b)
    assert names(oriented(flat.eqns, flat.outvars)) == names(flat.eqns)


def test_of_a_step() -> None:
    """No weight's gradient is transposed in any loop of a step."""
    model = named("llama-tiny", layers=2, dim=16, heads=2, kv_heads=1, ffn=24)
    step = jp.make_train_step(model.model, optax.sgd(0.1), "fsdp")
    transposed_products: list[str] = []

    def walk(jaxpr: Any) -> None:
        eqns = jx.opened(jaxpr)[0].eqns
        defined_by = {v: eqn for eqn in eqns for v in eqn.outvars}
        for eqn in eqns:
            operand = eqn.invars[0] if names([eqn]) == ["transpose"] else None
            product = None if operand is None or jx.is_literal(operand) else defined_by.get(operand)
            if product is not None and product.primitive.name == "dot_general" and eqn.params["permutation"] == (1, 0):
                transposed_products.append(str(eqn))
            for inner in jec.jaxprs_in_params(eqn.params):
                walk(inner)

    walk(step.trace(model.example(8, 8)))
    assert not transposed_products


def test_init_is_traced_once() -> None:
    """Shapes, layout and first state of two steps share one trace. Each took 1.3 s for 24 layers in a Python loop."""
    traced = []

    def init(key: jax.Array) -> dict[str, jax.Array]:
        traced.append(key)
        return {"w": jax.random.normal(key, (4, 4))}

    model = jp.Model(init, lambda params, batch, key: jnp.square(batch @ params["w"]).mean())
    for strategy in ("single", "ddp"):
        jp.make_train_step(model, optax.sgd(0.1), strategy).abstract_state()
    assert len(traced) == 1
    params, _ = model.create(jax.random.key(3))
    np.testing.assert_allclose(params["w"], jax.random.normal(jax.random.key(3), (4, 4)), rtol=1e-6)
    assert len(traced) == 1
