"""The program of an expert rank, equation by equation: each against the function on all experts.

A case is a function of the tokens of each expert [experts, tokens, 6], which its leaf [experts, 6, 6] has multiplied,
or of that leaf alone. It must give the same value and gradients, gather no experts, and send tokens
once there and back.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec

from jaxpar.parallel.expert import RULES, exchange_tokens
from jaxpar.parallel.expert.dims import AXIS
from jaxpar.program import jaxpr as jx

RANKS, EXPERTS, TOKENS, DIM = 2, 4, 3, 6


def _times(x: jax.Array, step: Callable[[Any], Any] = lambda x: jnp.tanh(x) * 0.9) -> jax.Array:
    """A loop that a count ends."""
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, step(c[1])), (0, lax.stop_gradient(x)))[1]


def _until(x: jax.Array) -> jax.Array:
    """A loop that a rank's rows end."""
    return lax.while_loop(lambda v: jnp.abs(v).max() > 0.2, lambda v: v * 0.7, lax.stop_gradient(x))


def _definite(x: jax.Array) -> jax.Array:
    return x @ x.swapaxes(-1, -2) / 6 + 2 * jnp.eye(x.shape[-2])


def _solved(x: jax.Array) -> jax.Array:
    m = _definite(x[..., None])
    return jnp.linalg.solve(m, x[..., None])[..., 0] + jnp.linalg.cholesky(m).sum(-1) + jnp.linalg.eigh(m)[0]


def _scaled(w: jax.Array) -> jax.Array:
    """Divided by its largest singular value, as a loop finds it, until all experts have it."""
    once = lambda v: (
        (u := jnp.einsum("edf,ed->ef", w, jnp.einsum("edf,ef->ed", w, v))) / jnp.linalg.norm(u, axis=1, keepdims=True)
    )
    more = lambda c: (c[0] < 4) & (jnp.abs(c[1] - c[2]).max() > 1e-6)
    v = jnp.ones(w.shape[:2])
    _, v, _ = lax.while_loop(more, lambda c: (c[0] + 1, once(c[1]), c[1]), (0, once(v), v))
    return w / jnp.linalg.norm(jnp.einsum("edf,ef->ed", w, v), axis=1)[:, None, None]


OF_TOKENS: dict[str, Callable[[Any], Any]] = {
    "loop": lambda h: _times(h) * h,
    "matrices": _solved,
    "transforms": lambda h: jnp.abs(jnp.fft.fft(h)) * h,
    "best of several": lambda h: lax.approx_max_k(h, 2)[0].sum(-1, keepdims=True) * h,
    "bits": lambda h: jnp.where(lax.bitcast_convert_type(h, jnp.int32) > 0, h, 0) * lax.clz((h * 99).astype(jnp.int32)),
    "special functions": lambda h: jax.scipy.special.polygamma(1, 1 + h**2),
    "loop that rows end": lambda h: _until(h) * h,
}
OF_LEAVES: dict[str, Callable[[Any], Any]] = {
    "loop of leaves": lambda w: _times(w, lambda v: jnp.tanh(v) @ v.swapaxes(1, 2) / 6) * w,
    "matrices of leaves": lambda w: jnp.linalg.inv(_definite(w)) + jnp.linalg.svd(w, compute_uv=False)[..., None],
    "norms of leaves": lambda w: w / jnp.sqrt((w**2).sum((1, 2), keepdims=True)) + w.max(1, keepdims=True),
    "singular values": lambda w: _scaled(lax.stop_gradient(w)) + w,
}


def _total(name: str) -> Callable[..., Any]:
    def total(leaf: jax.Array, x: jax.Array) -> jax.Array:
        leaf = OF_LEAVES.get(name, lambda w: w)(leaf)
        h = jnp.einsum("ecd,edf->ecf", jnp.cos(x * (1 + jnp.arange(EXPERTS))[:, None, None]), leaf)
        return jnp.sin(OF_TOKENS.get(name, lambda h: h)(h)).sum(0).sum()

    return total


@pytest.mark.parametrize("name", [*OF_TOKENS, *OF_LEAVES])
def test_rule(name: str) -> None:
    """For while loops, transforms, or a matrix for each token, tokens were once sent back and experts gathered."""
    random = np.random.default_rng(0)
    leaf, x = (random.normal(size=shape).astype("f") for shape in ((EXPERTS, DIM, DIM), (RANKS * TOKENS, DIM)))
    local_x = x[:TOKENS]
    fun, localiser = exchange_tokens(jx.trace(_total(name), leaf, local_x)[0], [0], RANKS, RULES)
    flat, _ = jx.trace(fun, leaf[: EXPERTS // RANKS], local_x, axes={AXIS: RANKS})
    sent = str(jx.build(flat.eqns, [*flat.constvars, *flat.invars], flat.outvars)).count("all_to_all[")
    if name == "singular values":  # the largest difference of all, in each step
        assert {place.partition(" ")[0] for place in localiser.gathered} == {"reduce_max"}
    else:
        assert not localiser.gathered
    assert sent == (4 if name == "loop that rows end" else 2)

    mesh = Mesh(np.array(jax.devices()[:RANKS]), (AXIS,), axis_types=(AxisType.Auto,))
    grads = jax.value_and_grad(lambda *values: fun(*values)[0], argnums=(0, 1))

    def ranks(*values: jax.Array) -> Any:
        value, grad = grads(*values)
        return lax.psum(value, AXIS), grad

    split = PartitionSpec(AXIS)
    specs = {"in_specs": split, "out_specs": (PartitionSpec(), split)}
    actual = jax.jit(jax.shard_map(ranks, mesh=mesh, check_vma=False, **specs))(leaf, x)
    blocks = lambda leaf, x: sum(_total(name)(leaf, rows) for rows in jnp.split(x, RANKS))
    expected = jax.jit(jax.value_and_grad(blocks, argnums=(0, 1)))(leaf, x)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
        np.testing.assert_allclose(b, a, rtol=2e-5, atol=2e-5 * max(1.0, float(np.abs(a).max())))
