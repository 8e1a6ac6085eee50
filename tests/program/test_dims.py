"""Where the dims of arrays go: which are batch dims, and which a program mixes."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from jaxpar.program import jaxpr as jx
from jaxpar.program.dims import Follower, source

X = jax.ShapeDtypeStruct((3, 2, 4, 6), jnp.float32)


def newton_schulz(x: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, 5, lambda i, x: 2 * x - x @ x.T @ x, x / jnp.linalg.norm(x))


@pytest.mark.parametrize(
    ("fun", "mixed"),
    [
        (lambda x: 2 * x + x**2, set()),
        (lambda x: jax.vmap(newton_schulz)(x.reshape(6, 4, 6)).reshape(x.shape), {2, 3}),
        (lambda x: jax.vmap(jax.vmap(newton_schulz))(x), {2, 3}),
        (lambda x: jnp.einsum("labm,labn->lmn", x, x), {1, 2, 3}),
        (lambda x: jnp.linalg.qr(x)[0], {2, 3}),
        (lambda x: jax.lax.scan(lambda c, y: (c, y @ y.mT), 0.0, x)[1], {2, 3}),
        (lambda x: jax.lax.scan(lambda c, y: (c + y, c), x[0] * 0, x)[1], {0}),
        (lambda x: jnp.cumsum(x, 1), {1}),
        (lambda x: jax.lax.cond(x.sum() > 0, lambda x: x, lambda x: x[:, ::-1], x), {0, 1, 2, 3}),
    ],
)
def test_mixed(fun: Callable[[jax.Array], jax.Array], mixed: set[int]) -> None:
    flat, _ = jx.trace(fun, X)
    follower = Follower()
    follower.follow(flat.eqns, {flat.invars[0]: source(0, X.shape)})
    assert mixed == {dim for _, dim in follower.mixed}
