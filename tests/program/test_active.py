"""What has a derivative is what JAX differentiates: of a while loop it refuses the reverse where its start has one."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from jaxpar.program import jaxpr as jx

LOOP, STOP = jax.lax.while_loop, jax.lax.stop_gradient


def _halved(x: jax.Array) -> jax.Array:
    return LOOP(lambda x: x.sum() > 1, lambda x: x / 2, x)


MADE: dict[str, Callable[[jax.Array], jax.Array]] = {
    "products": lambda w: jnp.sin(w) @ w,
    "stopped": lambda w: STOP(w) * 2,
    "signs": jnp.sign,
    "steps": lambda w: jnp.floor(w) + jnp.ceil(w) + jnp.round(w),
    "bits": lambda w: jax.lax.bitcast_convert_type(w, jnp.uint32).astype(jnp.float32),
    "places": lambda w: w.argmax(1).astype(jnp.float32),
    "of places alone": lambda w: jax.lax.top_k(w, 2)[1] * 0.5,
    "of values and places": lambda w: jax.lax.top_k(w, 2)[0] * 0.5,
    "looked up": lambda w: jnp.arange(3.0)[w.argmax(1)],
    "condition alone": lambda w: LOOP(lambda x: (x < w).any(), lambda x: x + 1, jnp.zeros((3, 3))),
    "body": lambda w: jax.lax.scan(lambda c, _: (c + w, None), jnp.zeros((3, 3)), None, 2)[0],
    "beside a count": lambda w: jax.lax.scan(lambda c, x: ((c[0] + 1, x.sum()), x), (0, 0.0), w)[0][0] * jnp.ones(3),
    "branches": lambda w: jax.lax.cond(w.sum() > 0, STOP, jnp.zeros_like, w),
    "one of the branches": lambda w: jax.lax.cond(w.sum() > 0, STOP, jnp.sin, w),
    "call": lambda w: jax.jit(lambda w: (w, STOP(w)))(w)[1],
    "recomputed": lambda w: jax.checkpoint(lambda w: STOP(jnp.sin(w)))(w),
}


@pytest.mark.parametrize("name", MADE)
def test_active_is_what_jax_differentiates(name: str) -> None:
    w = jnp.eye(3) / 2
    flat, _ = jx.trace(MADE[name], w)
    try:
        jax.eval_shape(jax.grad(lambda w: _halved(MADE[name](w)).sum()), w)
        differentiated = False
    except ValueError as error:
        assert "Reverse-mode differentiation does not work" in str(error)  # noqa: PT017
        differentiated = True
    (out,) = flat.outvars
    assert (out in jx.active(flat.eqns, flat.invars)) == differentiated
