"""Logits that are found in traced losses and made in chunks of tokens give the same numbers as whole logits."""

import functools
import re
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
def with_z(logits: jax.Array, one_hot: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return a loss with its own derivative, one-hot targets and a z-loss, as T5X and MaxText have it."""
    return _with_z(logits, one_hot)[0]


def _with_z(logits: jax.Array, one_hot: jax.Array) -> Any:
    log_z = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    z = 1e-2 * jnp.square(log_z[..., 0])
    return (-jnp.sum(one_hot * (logits - log_z), axis=-1) + z, z), (logits, one_hot, log_z)


def _pull_z(residuals: Any, cotangents: Any) -> Any:
    logits, one_hot, log_z = residuals
    p = jnp.exp(logits - log_z)
    logits_grad = (
        cotangents[0][..., None] * (p * (1 + 2e-2 * log_z) - one_hot) + cotangents[1][..., None] * p * 2e-2 * log_z
    )
    return logits_grad, jnp.zeros_like(one_hot)


with_z.defvjp(_with_z, _pull_z)


def by_optax(x: Any, p: Any, ids: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(x @ p["head"], ids)


def by_lookup(x: Any, p: Any, ids: Any) -> Any:
    """Use a tied head in bfloat16, with a bias, a scale and a soft cap."""
    logits = jnp.einsum("btd,vd->btv", x.astype(jnp.bfloat16), p["tied"].astype(jnp.bfloat16))
    logits = 3 * jnp.tanh((logits + p["bias"].astype(jnp.bfloat16)).astype(jnp.float32) / 3) * 1.5
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), ids[..., None], -1)[..., 0]


def by_one_hot(x: Any, p: Any, ids: Any) -> Any:
    logits = jax.lax.dot_general(p["head"], x, (((0,), (2,)), ((), ()))).transpose(1, 2, 0)
    return -(jax.nn.one_hot(ids, V) * jax.nn.log_softmax(logits)).sum(-1)


def by_logsumexp(x: Any, p: Any, ids: Any) -> Any:
    """Use a z-loss, a smoothed label and an argmax."""
    logits = x @ p["head"] + p["bias"]
    z = jax.nn.logsumexp(logits, axis=-1)
    is_right = logits.argmax(-1) == ids
    return z - jnp.einsum("btv,btv->bt", logits, jax.nn.one_hot(ids, V)) + 0.1 * z**2 - 0.1 * logits.mean(-1) + is_right


def by_place(x: Any, p: Any, ids: Any) -> Any:
    """Merge the tokens of all rows into one dim."""
    logits = (x @ p["head"]).reshape(-1, V)
    return -jax.nn.log_softmax(logits)[jnp.arange(B * T), ids.reshape(-1)].reshape(B, T)


def by_shift(x: Any, p: Any, ids: Any) -> Any:
    """Cut the last position off the logits."""
    nats = optax.softmax_cross_entropy_with_integer_labels((x @ p["head"])[:, :-1], ids[:, 1:])
    return jnp.pad(nats, ((0, 0), (1, 0)))


def by_rule(x: Any, p: Any, ids: Any) -> Any:
    nats, z = with_z(x @ p["head"], jax.nn.one_hot(ids, V))
    return nats + 0.5 * z


def by_row(x: Any, p: Any, ids: Any) -> Any:
    return jax.vmap(lambda x, ids: optax.softmax_cross_entropy_with_integer_labels(x @ p["head"], ids))(x, ids)


TOKEN_LOSSES = (by_optax, by_lookup, by_one_hot, by_logsumexp, by_place, by_shift, by_rule, by_row)


def arrays() -> tuple[Any, ...]:
    draw = np.random.default_rng(0)
    params = {"head": draw.normal(size=(D, V)), "tied": draw.normal(size=(V, D)), "bias": draw.normal(size=V)}
    x, ids = draw.normal(size=(B, T, D)), draw.integers(V, size=(B, T))
    params = {name: jnp.asarray(value, jnp.float32) for name, value in params.items()}
    return params, jnp.asarray(x, jnp.float32), jnp.asarray(ids), draw.normal(size=(B, T)).astype(np.float32)


def in_chunks(loss: Callable[..., Any], *args: Any, chunk: int | str = CHUNK) -> tuple[Any, dict[str, Logits], Any]:
    """Return a loss with its logits in chunks, as a function of the same leaves; the logits; and its program."""
    flat, out = jx.trace(loss, *args)
    program, logits = chunked(flat, len(jax.tree.leaves(args[0])), chunk, {})
    compute = lambda *values: jx.run(program.eqns, program.invars, program.outvars)(*jax.tree.leaves(values))
    assert not program.constvars
    return lambda *values: jax.tree.unflatten(jax.tree.structure(out), compute(*values)), logits, program


def largest(eqns: Any) -> int:
    """Return the number of elements of the largest value in a program."""
    inner = (largest(jx.opened(j)[0].eqns) for eqn in eqns for j in jec.jaxprs_in_params(eqn.params))
    return max([*inner, *(int(np.prod(v.aval.shape)) for eqn in eqns for v in eqn.outvars)], default=0)


@pytest.mark.slow
def test_numbers_are_those_of_the_whole() -> None:
    """Write a weighted loss in eight ways, and sum over all tokens: no value has the size of the logits."""
    params, x, ids, weights = arrays()

    def loss(params: Any, x: Any, ids: Any, weights: Any) -> Any:
        losses = [(token_loss(x * (1 + i), params, ids) * weights).sum() for i, token_loss in enumerate(TOKEN_LOSSES)]
        smooth = jnp.sum(jax.nn.log_softmax(x @ params["head"]) * weights[..., None])
        return sum(losses) + 0.1 * smooth, losses

    chunked_loss, logits, program = in_chunks(loss, params, x, ids, weights)
    assert len(logits) == len(TOKEN_LOSSES) + 1
    assert all(entry == Logits(B * T, V, 5) for entry in logits.values()), logits
    assert largest(program.eqns) < B * T * V
    grad = lambda f: jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True))(params, x, ids, weights)
    for grad_in_chunks, whole_grad in zip(
        jax.tree.leaves(grad(chunked_loss)), jax.tree.leaves(grad(loss)), strict=True
    ):
        # By chunks, gradients of the bfloat16 head and bias add up in float32, and are rounded once.
        tolerance = 1e-2 if grad_in_chunks.shape[:1] == (V,) else 2e-5
        assert np.abs(grad_in_chunks - whole_grad).max() < tolerance * max(1, np.abs(whole_grad).max())


def test_gradient_of_a_bfloat16_head_adds_up_in_float32() -> None:
    """1,024 chunks of equal gradients: in bfloat16 a sum stops growing at 256 times its summand."""
    head, x = jnp.zeros((1, 2), jnp.bfloat16), jnp.ones((1, 1024, 1), jnp.bfloat16)
    loss = lambda head, x, ids: optax.softmax_cross_entropy_with_integer_labels(x @ head, ids).sum()
    ids = jnp.zeros((1, 1024), jnp.int32)
    chunked_loss, _, _ = in_chunks(loss, head, x, ids, chunk=1)
    np.testing.assert_array_equal(np.asarray(jax.jit(jax.grad(chunked_loss))(head, x, ids), np.float32), [[-512, 512]])


def one_hot(ids: Any) -> jax.Array:
    return jax.nn.one_hot(ids, V)


def sorted_tokens(x: Any, p: Any, ids: Any) -> Any:
    nats = jax.nn.log_softmax(jnp.sort(x @ p["head"], axis=1))
    return -jnp.take_along_axis(nats, ids[..., None], -1)[..., 0]


def best_of_many(x: Any, p: Any, ids: Any) -> Any:
    """Use nine numbers of each token."""
    logits = x @ p["head"]
    return jax.nn.logsumexp(logits, axis=-1) - jnp.square(jax.lax.top_k(logits, 9)[0] + ids[..., None]).mean()


@pytest.mark.parametrize(
    ("token_loss", "reason"),
    [
        (sorted_tokens, "sort at .*sorted_tokens"),
        (lambda x, p, ids: optax.softmax_cross_entropy(x @ p["head"], jnp.cumsum(one_hot(ids), 1)), "no one-hot"),
        (best_of_many, "reads more than 8 numbers per token"),
        (jax.checkpoint(by_optax), "within jax.checkpoint"),
        (lambda x, p, ids: jax.lax.map(lambda row: by_optax(row[0], p, row[1]), (x, ids)), "within a loop"),
        (
            lambda x, p, ids: jax.lax.cond(ids.sum() > 0, lambda: by_optax(x, p, ids), lambda: jnp.zeros(ids.shape)),
            "within a branch",
        ),
        (lambda x, p, ids: x @ p["head"], None),
    ],
)
def test_what_is_left_whole(token_loss: Any, reason: str | None) -> None:
    params, x, ids, _ = arrays()
    _, logits, program = in_chunks(lambda p, x, ids: token_loss(x, p, ids).sum(axis=(0, 1)), params, x, ids)
    assert largest(program.eqns) >= (1 if reason == "within a loop" else B) * T * V
    assert [entry.chunks for entry in logits.values()] == ([1] if reason else [])
    assert reason is None or re.search(reason, next(iter(logits.values())).why)


@pytest.mark.parametrize(("tokens", "chunk", "chunks"), [(8192, "auto", 1), (16384, "auto", 8), (16384, "whole", 1)])
def test_only_where_it_pays(tokens: int, chunk: str, chunks: int) -> None:
    """Float32 logits of 128,256 words take 3.9 GiB for 8,192 tokens, and 7.8 GiB for 16,384 tokens."""
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    args = {"head": shape((4096, 128_256))}, shape((1, tokens, 4096)), jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    _, logits, program = in_chunks(lambda p, x, ids: by_optax(x, p, ids).mean(), *args, chunk=chunk)
    assert [entry.chunks for entry in logits.values()] == [chunks] * (chunks > 1)
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
    """Models with tied heads, dropout before the head or merged rows train in chunks as on one device."""
    # These models have no layers to recompute or to deal out, and their attention has no ring.
    if name in ("encoder_decoder", "flattened"):
        text = text.replace(",remat=layer", "").replace("=ring", "=gather").replace("zb-h1", "1f1b")
        text += ",stages=cut" * ("pipe" in text and "cut" not in text)
    cells.check_cell(name, text)
