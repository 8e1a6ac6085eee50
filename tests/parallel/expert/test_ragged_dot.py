"""Grouped matmuls are found with what stands between them, and are the same function as a mixture of `jp.experts`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.parallel.expert import RULES
from jaxpar.parallel.expert.ragged_dot import ExpertRun, runs
from jaxpar.program import jaxpr as jx

EXPERTS, DIM, FFN, TOKENS = 4, 6, 10, 40


def mixture(w: Any, x: jax.Array, sizes: jax.Array) -> jax.Array:
    """With all that may stand between two products."""
    of = jnp.repeat(jnp.arange(EXPERTS), sizes, total_repeat_length=TOKENS)
    gate = jax.lax.ragged_dot(x, w["gate"], sizes) + w["bias"][of]
    hidden = jax.nn.relu(jax.lax.ragged_dot(x, w["up"], sizes)) * jax.nn.silu(gate) * w["scale"]
    hidden = jnp.where(hidden > 0.1, hidden, 0.0)
    return jax.lax.ragged_dot(hidden, w["down"], sizes)


def drawn() -> tuple[Any, jax.Array]:
    random = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(random.normal(size=shape), jnp.float32)
    wide = {name: draw(EXPERTS, DIM, FFN) for name in ("gate", "up")}
    w = {**wide, "down": draw(EXPERTS, FFN, DIM), "bias": draw(EXPERTS, FFN), "scale": draw(FFN)}
    return w, draw(TOKENS, DIM)


def runs_of(fun: Any) -> tuple[jx.Flat, list[ExpertRun]]:
    flat, _ = jx.trace(fun, *drawn(), jnp.zeros(EXPERTS, jnp.int32))
    return flat, list(runs(flat, RULES))


def exchanged(w: Any, x: jax.Array, sizes: jax.Array) -> jax.Array:
    """The mixture with its run as the mixture that expert ranks compute."""
    flat, (run,) = runs_of(mixture)
    inside = {id(eqn) for eqn in run.eqns}
    values = jax.tree.leaves((w, x, sizes))
    env = dict(zip([*flat.constvars, *flat.invars], [*flat.consts, *values], strict=True))
    read = lambda v: v.val if jx.is_literal(v) else env[v]
    for eqn in flat.eqns:
        if eqn is run.eqns[-1]:
            env[run.out] = run.compute_as_mixture(*map(read, (run.sizes, *run.rows, *run.leaves, *run.rest)))
        elif id(eqn) not in inside:
            env.update(zip(eqn.outvars, jx.bind(eqn, list(map(read, eqn.invars))), strict=True))
    return read(flat.outvars[0])


def test_a_run_is_the_same_function_with_the_same_gradients() -> None:
    w, x = drawn()
    cotangent = jax.random.normal(jax.random.key(0), (TOKENS, DIM))

    @jax.jit
    def differentiate_both(w: Any, x: jax.Array, sizes: jax.Array) -> Any:
        def differentiate(fun: Any) -> Any:
            y, pull = jax.vjp(lambda w, x: fun(w, x, sizes), w, x)
            return y, pull(cotangent)

        return differentiate(mixture), differentiate(exchanged)

    # Even, none for one, all for one, and rows beyond the last group.
    for sizes in ([10, 10, 10, 10], [14, 0, 25, 1], [0, 0, 40, 0], [3, 4, 5, 6]):
        expected, actual = differentiate_both(w, x, jnp.array(sizes, jnp.int32))
        for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * float(jnp.abs(a).max()), err_msg=str(sizes))


def test_a_run_reaches_from_the_first_product_to_the_last() -> None:
    _, (run,) = runs_of(mixture)
    assert [len(vars_) for vars_ in (run.rows, run.leaves)] == [2, 3]
    assert run.out.aval.shape == (TOKENS, DIM)
    tokens, experts = run.bytes()
    assert tokens == EXPERTS * 16 * (DIM + FFN + DIM) * 4  # 16 slots are 1.25 times 40 of 4, a multiple of 8
    assert experts == 3 * EXPERTS * DIM * FFN * 4


@jax.custom_vjp
def centred(x: jax.Array) -> jax.Array:
    """The identity, whose derivative takes the mean of all rows."""
    return x


centred.defvjp(lambda x: (x, None), lambda _, cotangent: (cotangent - cotangent.mean(axis=0),))


def twice(w: Any, x: jax.Array, sizes: jax.Array, between: Any = lambda hidden: hidden, flip: int = 1) -> jax.Array:
    return jax.lax.ragged_dot(between(jax.lax.ragged_dot(x, w["up"], sizes)), w["down"], sizes[::flip])


def read_elsewhere(w: Any, x: jax.Array, sizes: jax.Array, reads: Any) -> jax.Array:
    hidden = jax.lax.ragged_dot(x, w["up"], sizes)
    return jax.lax.ragged_dot(hidden, w["down"], sizes) * reads(hidden)


ENDS = {
    "read elsewhere": functools.partial(read_elsewhere, reads=jnp.sum),
    "read elsewhere in another order": functools.partial(read_elsewhere, reads=lambda hidden: hidden[::-1][0, 0]),
    "mixes rows": functools.partial(twice, between=functools.partial(jnp.cumsum, axis=0)),
    "its derivative mixes rows": functools.partial(twice, between=centred),
    "groups of other sizes": functools.partial(twice, flip=-1),
}


@pytest.mark.parametrize("end", ENDS)
def test_what_ends_a_run(end: str) -> None:
    assert [len(run.eqns) for run in runs_of(twice)[1]] == [2]
    assert [len(run.eqns) for run in runs_of(ENDS[end])[1]] == [1, 1]
