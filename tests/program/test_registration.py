"""A primitive of the user's own: its rule is proved when it is registered, and strategies follow values through it."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.interpreters import ad, batching, mlir

import jaxpar as jp
from jaxpar.program import register
from jaxpar.program.factors import Factor, aligned

DRAW = np.random.default_rng(0)
X, W = (DRAW.normal(size=shape).astype(np.float32) for shape in ((4, 6), (6, 2)))


def primitive(name: str, fun: Any) -> jec.Primitive:
    """A primitive as a user makes one, with the derivative and the batching of the function that it computes."""
    made = jec.Primitive(name)
    made.def_impl(fun)
    made.def_abstract_eval(lambda *avals: jax.core.ShapedArray(jax.eval_shape(fun, *avals).shape, avals[0].dtype))
    mlir.register_lowering(made, mlir.lower_fun(fun, multiple_results=False))
    whole = lambda tangents: tuple(map(ad.instantiate_zeros, tangents))
    ad.primitive_jvps[made] = lambda primals, tangents: jax.jvp(fun, primals, whole(tangents))
    batching.primitive_batchers[made] = lambda args, dims: (jax.vmap(fun, dims)(*args), 0)
    return made


def init(key: jax.Array) -> Mapping[str, Any]:
    up, down = (0.1 * jax.random.normal(key, shape) for shape in ((8, 16), (16, 8)))
    return {"embed": jax.random.normal(key, (32, 8)), "up": {"kernel": up}, "down": {"kernel": down}}


def test_a_model_trains_under_tensor_by_a_registered_rule() -> None:
    """Its products are column-parallel and then row-parallel, as those of JAX: no operand is gathered."""
    squares_p = primitive("squares", lambda x, w: x @ (w * w))

    def loss(params: Any, batch: Any, key: jax.Array | None) -> jp.Mean:
        x = params["embed"][batch["tokens"]]
        h = jnp.tanh(squares_p.bind(x, params["up"]["kernel"]))
        y = squares_p.bind(h, params["down"]["kernel"])
        return jp.Mean((y**2).sum(), batch["tokens"].size)

    model, batch = jp.Model(init=init, loss=loss), {"tokens": jnp.arange(64).reshape(8, 8) % 32}
    gathered = lambda: jp.make_train_step(model, optax.sgd(0.1), "data=4,tensor=2").traced(batch).notes.gathered
    with pytest.warns(UserWarning, match="squares may mix rows: jaxpar has no rule for it"):
        assert any("squares" in place for place in gathered())
    register(squares_p, "...k,kj->...j", (squares_p.bind, X, W))
    assert not gathered()
    assert jp.verify(model, "data=4,tensor=2", batch, steps=1).ok


REFUTED = {
    "a dim that is mixed": ("ik->ik", lambda x: jnp.cumsum(x, 1), "result 0 has other elements"),
    "a dim of another operand": ("ik,kj->jk", lambda x, w: x @ w, "result 0 has another shape|raises"),
    "a sum that is none": ("ik->i", lambda x: jnp.exp(x).sum(1) ** 2, "joined by sum.*has other elements"),
    "a sum of a term too often": ("ik,kj,j->ij", lambda x, w, b: x @ w + b, "joined by sum.*has other elements"),
}


@pytest.mark.parametrize("case", REFUTED)
def test_a_wrong_rule_is_refuted(case: str) -> None:
    rule, fun, why = REFUTED[case]
    own_p = primitive(f"own_{case}".replace(" ", "_"), fun)
    operands = (X, W, W[0])[: rule.count(",") + 1]
    with pytest.raises(ValueError, match=rf"the rule '{rule}' of the primitive own_.*{why}.*write _ for a dim"):
        register(own_p, rule, (own_p.bind, *operands))


def test_advice_of_a_refusal_is_a_rule_that_is_proved() -> None:
    sums_p = primitive("own_cumsum", lambda x: jnp.cumsum(x, 1))
    with pytest.raises(ValueError, match="write _"):
        register(sums_p, "ik->ik", (sums_p.bind, X))
    register(sums_p, "i_->i_", (sums_p.bind, X))


def test_what_cannot_be_proved_is_refused() -> None:
    twice_p = primitive("own_twice", lambda x: 2 * x)
    with pytest.raises(ValueError, match=r"0 examples, and none uses own_twice; .*; give a tuple"):
        register(twice_p, "...->...")
    with pytest.raises(ValueError, match=r"no example has parts there; .*; give an example with such sizes"):
        register(twice_p, "ij->ij", (twice_p.bind, np.ones((4, 5), np.float32)))
    with pytest.raises(ValueError, match=r"says 'i' where an equation has arrays of shapes .*; write \.\.\. for"):
        register(twice_p, "i->i", (twice_p.bind, X))
    with pytest.raises(ValueError, match=r"reduced='mean'; .*; use one of sum"):
        register(twice_p, lambda eqn: [Factor((0,), (None,), "mean")], (twice_p.bind, X))
    with pytest.raises(ValueError, match=r"exp has a rule in jaxpar already; .*; give yours another name"):
        register(jax.lax.exp_p, "...->...", (jnp.exp, X))
    register(twice_p, aligned, (twice_p.bind, X), cheap=True)
    register(
        twice_p, "...->...", (twice_p.bind, np.ones((4, 5), np.float32)), (twice_p.bind, np.ones((5, 6), np.float32))
    )


def test_sizes_in_parameters_follow_a_function() -> None:
    """Letters cannot say that a parameter names a size: a rule that does is refuted, and a function is proved."""
    ones_p = jec.Primitive("own_padded")
    fun = lambda x, n: jnp.pad(x, ((0, n - x.shape[0]), (0, 0)))[:n]
    ones_p.def_impl(fun)
    ones_p.def_abstract_eval(lambda x, n: jax.core.ShapedArray((n, *x.shape[1:]), x.dtype))
    mlir.register_lowering(ones_p, mlir.lower_fun(fun, multiple_results=False))
    example = (lambda x: ones_p.bind(x, n=4), X)
    with pytest.raises(ValueError, match="another shape"):
        register(ones_p, "ij->ij", example)
    rule = lambda eqn: [
        Factor((0,), (0,), params=lambda local: {"n": local(eqn.outvars[0].aval.shape, 0)[0]}),
        Factor((1,), (1,)),
    ]
    register(ones_p, rule, example)
