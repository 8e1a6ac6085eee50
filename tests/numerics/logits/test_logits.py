"""Logits of cross-entropies, found in traced losses and made a chunk of tokens at a time: numbers of the whole."""

import functools
from collections.abc import Callable
from typing import Any

import context_cells as cells
import jax
import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tensor_cells import SHARED_BATCH

import jaxpar as jp
from jaxpar.numerics.logits.logits import Logits, chunked
from jaxpar.program import jaxpr as jx

pytestmark = SHARED_BATCH

B, T, D, V = 3, 10, 8, 32
CHUNK = 6  # tokens: 2 positions of 3 rows


@jax.custom_vjp
def with_z(logits: jax.Array, right: jax.Array) -> tuple[jax.Array, jax.Array]:
    """As T5X and MaxText have it: a derivative of its own, one-hot targets, and a z-loss."""
    return _with_z(logits, right)[0]


def _with_z(logits: jax.Array, right: jax.Array) -> Any:
    log_z = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    z = 1e-2 * jnp.square(log_z[..., 0])
    return (-jnp.sum(right * (logits - log_z), axis=-1) + z, z), (logits, right, log_z)


def _pull_z(kept: Any, given: Any) -> Any:
    logits, right, log_z = kept
    p = jnp.exp(logits - log_z)
    by = given[0][..., None] * (p * (1 + 2e-2 * log_z) - right) + given[1][..., None] * p * 2e-2 * log_z
    return by, jnp.zeros_like(right)


with_z.defvjp(_with_z, _pull_z)


def by_optax(x: Any, p: Any, ids: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(x @ p["head"], ids)


def by_lookup(x: Any, p: Any, ids: Any) -> Any:
    """Tied, in bfloat16, with a bias, a scale and a soft cap."""
    logits = jnp.einsum("btd,vd->btv", x.astype(jnp.bfloat16), p["tied"].astype(jnp.bfloat16))
    logits = 3 * jnp.tanh((logits + p["bias"].astype(jnp.bfloat16)).astype(jnp.float32) / 3) * 1.5
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), ids[..., None], -1)[..., 0]


def by_one_hot(x: Any, p: Any, ids: Any) -> Any:
    logits = jax.lax.dot_general(p["head"], x, (((0,), (2,)), ((), ()))).transpose(1, 2, 0)
    return -(jax.nn.one_hot(ids, V) * jax.nn.log_softmax(logits)).sum(-1)


def by_logsumexp(x: Any, p: Any, ids: Any) -> Any:
    """A z-loss, a smoothed label, and the largest of all."""
    logits = x @ p["head"] + p["bias"]
    z = jax.nn.logsumexp(logits, axis=-1)
    right = logits.argmax(-1) == ids
    return z - jnp.einsum("btv,btv->bt", logits, jax.nn.one_hot(ids, V)) + 0.1 * z**2 - 0.1 * logits.mean(-1) + right


def by_place(x: Any, p: Any, ids: Any) -> Any:
    """Tokens of all rows in one dim."""
    logits = (x @ p["head"]).reshape(-1, V)
    return -jax.nn.log_softmax(logits)[jnp.arange(B * T), ids.reshape(-1)].reshape(B, T)


def by_shift(x: Any, p: Any, ids: Any) -> Any:
    """All positions go in, and the last one's logits are left out."""
    nats = optax.softmax_cross_entropy_with_integer_labels((x @ p["head"])[:, :-1], ids[:, 1:])
    return jnp.pad(nats, ((0, 0), (1, 0)))


def by_rule(x: Any, p: Any, ids: Any) -> Any:
    nats, z = with_z(x @ p["head"], jax.nn.one_hot(ids, V))
    return nats + 0.5 * z


def by_row(x: Any, p: Any, ids: Any) -> Any:
    return jax.vmap(lambda x, ids: optax.softmax_cross_entropy_with_integer_labels(x @ p["head"], ids))(x, ids)


WORDED = (by_optax, by_lookup, by_one_hot, by_logsumexp, by_place, by_shift, by_rule, by_row)


def arrays() -> tuple[Any, ...]:
    draw = np.random.default_rng(0)
    params = {"head": draw.normal(size=(D, V)), "tied": draw.normal(size=(V, D)), "bias": draw.normal(size=V)}
    x, ids = draw.normal(size=(B, T, D)), draw.integers(V, size=(B, T))
    params = {name: jnp.asarray(value, jnp.float32) for name, value in params.items()}
    return params, jnp.asarray(x, jnp.float32), jnp.asarray(ids), draw.normal(size=(B, T)).astype(np.float32)


def parted(loss: Callable[..., Any], *given: Any, chunk: int | str = CHUNK) -> tuple[Any, dict[str, Logits], Any]:
    """A loss with its logits in chunks, as a function of the same leaves; what was found; its program."""
    flat, out = jx.trace(loss, *given)
    new, found = chunked(flat, len(jax.tree.leaves(given[0])), chunk, {})
    run = lambda *values: jx.run(new.eqns, new.invars, new.outvars)(*jax.tree.leaves(values))
    assert not new.constvars
    return lambda *values: jax.tree.unflatten(jax.tree.structure(out), run(*values)), found, new


def largest(eqns: Any) -> int:
    """Elements of the largest value in a program."""
    inner = (largest(jx.opened(j)[0].eqns) for eqn in eqns for j in jec.jaxprs_in_params(eqn.params))
    return max([*inner, *(int(np.prod(v.aval.shape)) for eqn in eqns for v in eqn.outvars)], default=0)


@pytest.mark.slow
def test_numbers_are_those_of_the_whole() -> None:
    """Eight ways to write it, each token weighed by itself, with sums over all tokens; and no value of logits' size."""
    params, x, ids, weights = arrays()

    def loss(params: Any, x: Any, ids: Any, weights: Any) -> Any:
        each = [(worded(x * (1 + i), params, ids) * weights).sum() for i, worded in enumerate(WORDED)]
        smooth = jnp.sum(jax.nn.log_softmax(x @ params["head"]) * weights[..., None])
        return sum(each) + 0.1 * smooth, each

    run, found, program = parted(loss, params, x, ids, weights)
    assert len(found) == len(WORDED) + 1
    assert all(one == Logits(B * T, V, 5) for one in found.values()), found
    assert largest(program.eqns) < B * T * V
    grad = lambda f: jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True))(params, x, ids, weights)
    for ours, whole in zip(jax.tree.leaves(grad(run)), jax.tree.leaves(grad(loss)), strict=True):
        # By chunks, gradients of the bfloat16 head and bias add up in float32, and are rounded once.
        tolerance = 1e-2 if ours.shape[:1] == (V,) else 2e-5
        assert np.abs(ours - whole).max() < tolerance * max(1, np.abs(whole).max())


def test_gradient_of_a_bfloat16_head_adds_up_in_float32() -> None:
    """1,024 chunks of equal gradients: in bfloat16 a sum stops growing at 256 times its summand."""
    head, x = jnp.zeros((1, 2), jnp.bfloat16), jnp.ones((1, 1024, 1), jnp.bfloat16)
    loss = lambda head, x, ids: optax.softmax_cross_entropy_with_integer_labels(x @ head, ids).sum()
    ids = jnp.zeros((1, 1024), jnp.int32)
    run, _, _ = parted(loss, head, x, ids, chunk=1)
    np.testing.assert_array_equal(np.asarray(jax.jit(jax.grad(run))(head, x, ids), np.float32), [[-512, 512]])


def sorted_tokens(x: Any, p: Any, ids: Any) -> Any:
    nats = jax.nn.log_softmax(jnp.sort(x @ p["head"], axis=1))
    return -jnp.take_along_axis(nats, ids[..., None], -1)[..., 0]


def of_soft_labels(x: Any, p: Any, ids: Any) -> Any:
    return optax.softmax_cross_entropy(x @ p["head"], jnp.cumsum(jax.nn.one_hot(ids, V), 1))


def returned(x: Any, p: Any, ids: Any) -> Any:
    return x @ p["head"]


def best_of_many(x: Any, p: Any, ids: Any) -> Any:
    """Nine numbers a token."""
    logits = x @ p["head"]
    return jax.nn.logsumexp(logits, axis=-1) - jnp.square(jax.lax.top_k(logits, 9)[0] + ids[..., None]).mean()


def within_a_checkpoint(x: Any, p: Any, ids: Any) -> Any:
    return jax.checkpoint(by_optax)(x, p, ids)


def within_a_loop(x: Any, p: Any, ids: Any) -> Any:
    return jax.lax.map(lambda row: by_optax(row[0], p, row[1]), (x, ids))


def within_a_branch(x: Any, p: Any, ids: Any) -> Any:
    return jax.lax.cond(ids.sum() > 0, lambda: by_optax(x, p, ids), lambda: jnp.zeros(ids.shape))


@pytest.mark.parametrize(
    ("worded", "why"),
    [
        (sorted_tokens, "sort at .*sorted_tokens"),
        (of_soft_labels, "no one-hot"),
        (best_of_many, "reads more than 8 numbers a token"),
        (within_a_checkpoint, "within jax.checkpoint"),
        (within_a_loop, "within a loop"),
        (within_a_branch, "within a branch"),
        (returned, None),
    ],
)
def test_what_is_left_whole(worded: Any, why: str | None) -> None:
    params, x, ids, _ = arrays()
    _, found, program = parted(lambda p, x, ids: worded(x, p, ids).sum(axis=(0, 1)), params, x, ids)
    assert largest(program.eqns) >= (1 if worded is within_a_loop else B) * T * V
    assert [one.chunks for one in found.values()] == ([1] if why else [])
    assert why is None or pytest.raises(AssertionError, match=why, check=None).matches(
        AssertionError(next(iter(found.values())).why)
    )


@pytest.mark.parametrize(("tokens", "chunk", "chunks"), [(8192, "auto", 1), (16384, "auto", 8), (16384, "whole", 1)])
def test_only_where_it_pays(tokens: int, chunk: str, chunks: int) -> None:
    """Logits of 128,256 words in float32: 8,192 tokens' are 3.9 GiB, 16,384 tokens' 7.8 GiB."""
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    given = {"head": shape((4096, 128_256))}, shape((1, tokens, 4096)), jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    _, found, program = parted(lambda p, x, ids: by_optax(x, p, ids).mean(), *given, chunk=chunk)
    assert [one.chunks for one in found.values()] == [chunks] * (chunks > 1)
    assert (largest(program.eqns) < tokens * 128_256) == (chunks > 1)


@pytest.mark.parametrize("wrong", [0, True, "2.5"])
def test_what_is_no_number_of_tokens_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"logits=.* is unknown; use one of auto, whole or a number of tokens"):
        jp.Strategy(logits=wrong)


BESIDE = (
    "context=2,logits=8",
    "context=4,data=2,attention=ring,logits=4",
    "context=2,tensor=2,sequence=true,fsdp=2,logits=8",
    "fsdp=2,data=2,zero=2,microbatches=2,logits=16",
    "fsdp=4,tensor=2,zero=3,remat=layer,logits=8",
    "pipe=2,context=2,data=2,microbatches=4,schedule=zb-h1,attention=gather,logits=8",
    "pipe=2,fsdp=2,microbatches=3,schedule=1f1b,logits=8",
    "pipe=2,data=2,microbatches=2,stages=cut,logits=8",
    "data=1,logits=7",
)


@pytest.mark.battery
@pytest.mark.parametrize("text", BESIDE)
@pytest.mark.parametrize("name", ["llama_gqa", "gpt2", "encoder_decoder", "flattened", "packed", "mixture"])
def test_cell(name: str, text: str) -> None:
    """Tied heads, dropout before the head, merged rows: what trains in chunks trains as on one device."""
    if name in ("encoder_decoder", "flattened"):  # no layers to recompute or to deal out, and attention without a ring
        text = text.replace(",remat=layer", "").replace("=ring", "=gather").replace("zb-h1", "1f1b")
        text += ",stages=cut" * ("pipe" in text and "cut" not in text)
    cells.check_cell(name, text)
