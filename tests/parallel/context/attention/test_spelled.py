"""Attention that a loss spells out, in the spellings of many models, is replaced by `jp.attention`.

The mathematics is the same, and no array has the scores of all positions. Attention that cannot be replaced is named
with its line.
"""

import functools
import math
import re
import sys
from collections.abc import Callable
from typing import Any

import context_cells as cells
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cells import OneDevice, check
from flax import nnx
from jax import lax
from jax.extend.random import threefry_2x32
from tensor_cells import SHARED_BATCH

import jaxpar as jp
from jaxpar.parallel.context import AttentionMode, calls, choose
from jaxpar.parallel.context.attention import spelled
from jaxpar.parallel.context.ops import score_program
from jaxpar.program import jaxpr as jx
from jaxpar.program.walk import visit

pytestmark = SHARED_BATCH

B, T, H, K, D = 2, 14, 4, 2, 8  # rows, positions, heads, key heads, features of a head
HIDDEN_SCORE = -1e9
soft = functools.partial(jax.nn.softmax, axis=-1)
Spelling = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def scores(q: jax.Array, k: jax.Array) -> jax.Array:
    return jnp.einsum("bthd,bshd->bhts", q, k) * D**-0.5


def weighed(weights: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.einsum("bhts,bshd->bthd", weights, v)


def triangle() -> jax.Array:
    return jnp.tril(jnp.ones((T, T), bool))


def where_minus_inf(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    s = jnp.einsum("bthd,bshd->bhts", q, k) / jnp.sqrt(D)
    return weighed(soft(jnp.where(triangle(), s, -jnp.inf)), v)


def added_by_a_mask_of_ones(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return weighed(soft(scores(q, k) + (1 - jnp.tril(jnp.ones((T, T)))) * HIDDEN_SCORE), v)


def added_upper_triangle(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    s = jnp.einsum("bthd,bshd->bhts", q * D**-0.5, k)
    return weighed(soft(s + jnp.triu(jnp.full((T, T), -jnp.inf), 1)), v)


def heads_first_and_own_softmax(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    s, i = q @ k.swapaxes(-1, -2) / np.sqrt(D), jnp.arange(T)
    s = jnp.where(i[:, None] < i[None, :], jnp.finfo(s.dtype).min, s)
    p = jnp.exp(s - s.max(-1, keepdims=True))
    return (p / p.sum(-1, keepdims=True) @ v).transpose(0, 2, 1, 3)


def rows_and_heads_in_one_dim(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    q, k, v = (x.transpose(0, 2, 1, 3).reshape(B * H, T, D) for x in (q, k, v))
    s = jnp.where(jnp.tril(jnp.ones((T, T))) == 0, HIDDEN_SCORE, lax.batch_matmul(q, k.swapaxes(1, 2)) * D**-0.5)
    return lax.batch_matmul(soft(s), v).reshape(B, H, T, D).transpose(0, 2, 1, 3)


def window(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    i, j = jnp.ogrid[:T, :T]
    return weighed(soft(jnp.where((j <= i) & (i - j < 5), scores(q, k), HIDDEN_SCORE)), v)


def window_by_what_it_hides(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    i, j = jnp.ogrid[:T, :T]
    return weighed(soft(jnp.where((j > i) | (i - j >= 3), HIDDEN_SCORE, scores(q, k))), v)


def grouped_by_reshape(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    k, v, i = k[:, :, :K], v[:, :, :K], jnp.arange(T)
    s = jnp.einsum("btkgd,bskd->bkgts", q.reshape(B, T, K, H // K, D), k) * D**-0.5
    p = soft(jnp.where((i[:, None] >= i)[None, None, None], s, -1e30))
    return jnp.einsum("bkgts,bskd->btkgd", p, v).reshape(B, T, H, D)


def grouped_by_repeat(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    k, v = (jnp.repeat(x[:, :, :K], H // K, 2) for x in (k, v))
    return where_minus_inf(q, k, v)


def one_key_head(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    s = jnp.einsum("bthd,bsd->bhts", q, k[:, :, 0]) * D**-0.5
    return jnp.einsum("bhts,bsd->bthd", soft(jnp.where(triangle(), s, HIDDEN_SCORE)), v[:, :, 0])


def jax_causal(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def jax_window(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=(3, 0))


def jax_bias_that_is_a_mask(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, bias=jnp.where(triangle(), 0.0, -1e10)[None, None])


def flax_with_a_mask(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return nnx.dot_product_attention(q, k, v, mask=nnx.make_causal_mask(jnp.ones((B, T))))


def keys_on_the_left(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    s, i = jnp.einsum("bshd,bthd->bhst", k, q) * D**-0.5, jnp.arange(T)
    p = jax.nn.softmax(jnp.where(i[:, None] <= i, s, HIDDEN_SCORE), axis=-2)
    return jnp.einsum("bhst,bshd->bthd", p, v)


def mapped(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    attend = lambda q, k, v: soft(jnp.where(triangle(), q @ k.T * D**-0.5, HIDDEN_SCORE)) @ v
    return jax.vmap(jax.vmap(attend, 1, 1))(q, k, v)


def mapped_with_a_row_of_one(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    attend = lambda q, k, v: jax.nn.dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
    return jax.vmap(attend)(q, k[:, :, :K], v[:, :, :K])


def mask_of_numpy(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return weighed(soft(jnp.where(np.tril(np.ones((T, T), bool)), scores(q, k), HIDDEN_SCORE)), v)


def slice_of_a_longer_mask(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """The way transformers writes GPT-2."""
    m = lax.dynamic_slice(jnp.tril(jnp.ones((1, 1, 32, 32), bool)), (0, 0, 0, 0), (1, 1, T, T))
    s = scores(q, k)
    bias = lax.select(jnp.broadcast_to(m, s.shape) > 0, jnp.full(s.shape, 0.0), jnp.full(s.shape, -1e4))
    return weighed(soft(s + bias), v)


def segments(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    ids = jnp.cumsum(q[:, :, 0, 0] > 0.5, axis=1)  # integers that are no function of positions
    is_seen = (ids[:, None, :, None] == ids[:, None, None, :]) & triangle()
    return weighed(soft(jnp.where(is_seen, scores(q, k), HIDDEN_SCORE)), v)


def a_mask_of_heads_that_nobody_gave(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """The way transformers writes BERT. Regression: this product was mistaken for the one with values."""
    weights = jnp.einsum("...hqk,h->...hqk", soft(scores(q, k)), jnp.ones((2, H))[1])
    return weighed(weights, v)


def all_keys(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return weighed(soft(scores(q, k)), v)


def by_logsumexp(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    s = jnp.where(triangle(), scores(q, k), HIDDEN_SCORE)
    return weighed(jnp.exp(s - jax.nn.logsumexp(s, -1, keepdims=True)), v)


def by_log_softmax(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return weighed(jnp.exp(jax.nn.log_softmax(jnp.where(triangle(), scores(q, k), HIDDEN_SCORE))), v)


def in_float32(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Scores in float32, in a model whose other values are in bfloat16."""
    q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
    s = jnp.where(triangle(), scores(q, k).astype(jnp.float32), HIDDEN_SCORE)
    return weighed(soft(s).astype(jnp.bfloat16), v).astype(jnp.float32)


def ids_from_outside_of_a_loop(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Ids are compared once for all layers, which are rematerialised."""
    ids = jnp.cumsum(q[:, :, 0, 0] > 0.5, axis=1)
    mask = (ids[:, None, :, None] == ids[:, None, None, :]) & triangle()
    layer = jax.checkpoint(lambda x, _: (x + weighed(soft(jnp.where(mask, scores(x, k), HIDDEN_SCORE)), v), None))
    return lax.scan(layer, q, length=2)[0]


def of_fewer_keys(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Cross-attention of a decoder to an encoder."""
    return all_keys(q, k[:, : 2 * T // 3], v[:, : 2 * T // 3])


CAUSAL = (
    by_logsumexp, by_log_softmax, where_minus_inf, added_by_a_mask_of_ones, added_upper_triangle, grouped_by_repeat,
    heads_first_and_own_softmax, rows_and_heads_in_one_dim, grouped_by_reshape, one_key_head, jax_causal, mapped,
    jax_bias_that_is_a_mask, flax_with_a_mask, keys_on_the_left, mapped_with_a_row_of_one,
    mask_of_numpy, slice_of_a_longer_mask,
)  # fmt: skip
DESCRIPTIONS: dict[Spelling, str] = {
    **dict.fromkeys(CAUSAL, "causal"),
    window: "causal, window=5",
    window_by_what_it_hides: "causal, window=3",
    jax_window: "causal, window=4",
    segments: "causal, segments",
    ids_from_outside_of_a_loop: "causal, segments",
    **dict.fromkeys((a_mask_of_heads_that_nobody_gave, all_keys, of_fewer_keys), "all keys"),
}


def arrays() -> list[jax.Array]:
    random = np.random.default_rng(0)
    return [jnp.asarray(random.normal(size=(B, T, H, D)), jnp.float32) for _ in range(4)]


def named(fun: Any) -> str:
    return fun.__name__


def replaced(fun: Spelling, **options: bool) -> Spelling:
    """Return a spelling's program with its attention replaced."""
    flat = spelled(jx.trace(fun, *arrays()[:3])[0], {}, **options).flat
    return lambda *x: jx.run(flat.eqns, (*flat.constvars, *flat.invars), flat.outvars)(*flat.consts, *x)[0]


def output_and_grads(fun: Spelling, scale: Any = 1.0) -> Any:
    *inputs, cotangent = arrays()
    output, pull = jax.vjp(lambda *x: fun(*(scale * y for y in x)), *inputs)
    return output, *pull(cotangent)


@pytest.fixture(scope="module")
def results() -> dict[str, tuple[Any, Any]]:
    """Return the values and gradients of every spelling, as written and as replaced; one program compiles once."""
    return jax.jit(
        lambda: {fun.__name__: (output_and_grads(fun), output_and_grads(replaced(fun))) for fun in DESCRIPTIONS}
    )()


@pytest.mark.slow
@pytest.mark.xdist_group("spelled")
@pytest.mark.parametrize("fun", DESCRIPTIONS, ids=named)
def test_it_is_taken(fun: Spelling, results: dict[str, tuple[Any, Any]]) -> None:
    result = spelled(jx.trace(fun, *arrays()[:3])[0], {})
    assert list(result.taken.values()) == [DESCRIPTIONS[fun]]
    assert not result.not_taken
    assert len(list(calls(result.flat.eqns))) == 1
    remaining_eqns = [eqn for eqn, _ in visit(result.flat.eqns, lambda eqn: eqn.primitive.name not in ("jit", "pjit"))]
    assert "exp" not in {eqn.primitive.name for eqn in remaining_eqns}
    for expected, actual in zip(*results[fun.__name__], strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-6 * float(jnp.abs(expected).max()))


@pytest.mark.slow
def test_scores_in_float32_of_a_model_in_bfloat16_are_taken() -> None:
    assert [*spelled(jx.trace(in_float32, *arrays()[:3])[0], {}).taken.values()] == ["causal"]
    gradients = []
    for text, ranks in (("context=4,attention=ring", 4), ("single", 1)):
        step = jp.make_train_step(model_of(in_float32), cells.SGD, f"{text},precision=bf16", jax.devices()[:ranks])
        _, grads = step.value_and_grad(step.init(jax.random.key(0)), cells.batch_of(B))
        gradients.append(jax.device_get(grads))
    for name, expected in gradients[1].items():
        np.testing.assert_allclose(gradients[0][name], expected, rtol=0, atol=0.03 * float(jnp.abs(expected).max()))


def alibi(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    i, j = jnp.ogrid[:T, :T]
    return weighed(soft(jnp.where(j <= i, scores(q, k) - (i - j) * 0.1, HIDDEN_SCORE)), v)


def soft_cap(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return weighed(soft(jnp.where(triangle(), jnp.tanh(scores(q, k)) * 5, HIDDEN_SCORE)), v)


def both_sides(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    i, j = jnp.ogrid[:T, :T]
    return weighed(soft(jnp.where((i - j < 4) & (j - i < 4), scores(q, k), HIDDEN_SCORE)), v)


def padding(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """A query whose keys are all hidden gets their mean here, and zeros from `jp.attention`."""
    return weighed(soft(jnp.where((k[:, :, 0, 0] > 0)[:, None, None], scores(q, k), HIDDEN_SCORE)), v)


def hidden_a_little(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return weighed(soft(jnp.where(triangle(), scores(q, k), -5.0)), v)


def hidden_less_by_a_scale(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return weighed(soft(jnp.where(triangle(), scores(q, k), -2e4) * 0.1), v)


def future(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Hides what it should show; the last query sees no key."""
    return weighed(soft(jnp.where(triangle(), HIDDEN_SCORE, scores(q, k))), v)


def dropped(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    keep = jax.random.bernoulli(jax.random.key(0), 0.9, (B, H, T, T))
    return weighed(jnp.where(keep, soft(scores(q, k)) / 0.9, 0), v)


def of_queries(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return weighed(jax.nn.softmax(scores(q, k), axis=-2), v)


def two_kinds_of_ids(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    query_ids, key_ids = (jnp.cumsum(x[:, :, 0, 0] > 0.5, axis=1) for x in (q, k))
    return weighed(
        soft(jnp.where(query_ids[:, None, :, None] == key_ids[:, None, None, :], scores(q, k), HIDDEN_SCORE)), v
    )


def wrapping(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Unsigned differences wrap, so that a later key is far away: this mask is a causal window of 4 in disguise."""
    i, j = jnp.arange(T, dtype="uint32")[:, None], jnp.arange(T, dtype="uint32")
    return weighed(soft(jnp.where(i - j < 4, scores(q, k), HIDDEN_SCORE)), v)


def rounding(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """bfloat16 has no 257: from there on a query would see the next key."""
    positions = jnp.arange(T).astype(jnp.bfloat16)
    return weighed(soft(jnp.where(positions[:, None] >= positions, scores(q, k), HIDDEN_SCORE)), v)


def of_fewer_keys_by_distance_and_padded(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """T5's table by distance, and the padding of a source."""
    k, v, is_seen = (x[:, : 2 * T // 3] for x in (k, v, k[:, :, 0, 0] > -1))
    distance = jnp.arange(k.shape[1]) - jnp.arange(T)[:, None]
    bias = q[0, 0, :, :4][:, jnp.clip(distance, -1, 2) + 1]
    return weighed(soft(scores(q, k) + bias + jnp.where(is_seen, 0, HIDDEN_SCORE)[:, None, None]), v)


def of_fewer_keys_and_causal(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    k, v = (x[:, : 2 * T // 3] for x in (k, v))
    return weighed(soft(jnp.where(triangle()[:, : k.shape[1]], scores(q, k), HIDDEN_SCORE)), v)


def with_a_sink(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """A share of the softmax that no key gets, as in gpt-oss."""
    sink = jnp.broadcast_to(q[:, :1, :, 0, None].transpose(0, 2, 1, 3), (B, H, T, 1))
    s = jnp.where(triangle(), scores(q, k), HIDDEN_SCORE)
    return weighed(soft(jnp.concatenate([s, sink], -1))[..., :-1], v)


def where_of_softmax(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """No weight where a query sees no key."""
    is_seen = triangle() & (jnp.arange(T) > 2)
    return weighed(jax.nn.softmax(scores(q, k), where=is_seen), v)


def dropped_by_flax(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Dropout with one mask for all rows and heads."""
    options = {"dropout_rate": 0.3, "dropout_rng": jax.random.key(1), "deterministic": False}
    return nnx.dot_product_attention(q, k, v, mask=nnx.make_causal_mask(jnp.ones((B, T))), **options)


def t5_scaled_at_the_end(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """A table by distance, which has a gradient, and a mask that is added."""
    positions = jnp.arange(T)
    bias = q[0, 0, :, :4][:, jnp.clip(positions - positions[:, None], -1, 2) + 1]
    return weighed(soft((scores(q, k) + bias + jnp.where(triangle(), 0, -1e9)) * 0.5), v)


def alibi_by_heads(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    positions, slopes = jnp.arange(T), 0.1 * jnp.arange(1.0, H + 1)[:, None, None]
    return weighed(soft(jnp.where(triangle(), scores(q, k) - slopes * (positions[:, None] - positions), -jnp.inf)), v)


def biased_by_scores(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    s = scores(q, k)
    return weighed(soft(s + jnp.tanh(s)), v)


def biased_by_rows(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return weighed(soft(scores(q, k) + k[:, :, 0, 0][:, None, None]), v)


BIASED = {t5_scaled_at_the_end: "with a bias", alibi_by_heads: "causal, with a bias", alibi: "with a bias"}


@pytest.mark.parametrize("fun", BIASED, ids=named)
def test_a_bias_of_all_rows_is_the_kernels(fun: Spelling) -> None:
    result = spelled(jx.trace(fun, *arrays()[:3])[0], {}, biases=True)
    assert [*result.taken.values()] == [BIASED[fun]]
    # Under vmap each entry has a different bias.
    mapped_rows = lambda fun: jax.vmap(functools.partial(output_and_grads, fun))(jnp.array([1.0, 0.5]))
    both = jax.jit(lambda: (mapped_rows(fun), mapped_rows(replaced(fun, biases=True))))()
    for expected, actual in zip(*both, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=3e-6 * float(jnp.abs(expected).max()))


def linear(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return weighed(jnp.where(triangle(), scores(q, k), 0), v)


@pytest.mark.parametrize("fun", [biased_by_scores, biased_by_rows, padding, hidden_a_little, future, linear], ids=named)
def test_what_is_no_bias_of_all_rows_stays_as_it_is(fun: Spelling) -> None:
    flat = jx.trace(fun, *arrays()[:3])[0]
    assert not any(spelled(flat, {}, biases=biases).taken for biases in (False, True))


def squared_weights(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    weights = soft(scores(q, k))
    return weighed(weights * weights, v)


def others_for_weights(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return weighed(jnp.where(jnp.eye(T, dtype=bool), 1, soft(scores(q, k))), v)


def one_more_in_the_sum(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    exponentials = jnp.exp(scores(q, k))
    return weighed(exponentials / (1 + exponentials.sum(-1, keepdims=True)), v)


def divided_at_the_end(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    exponentials = jnp.exp(scores(q, k))
    return weighed(exponentials, v) / exponentials.sum(-1).swapaxes(1, 2)[..., None]


def shaw(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """A vector for each distance (Shaw et al. 2018), whose products with queries are added."""
    positions = jnp.arange(T)
    vectors = q[0, :5, 0][jnp.clip(positions - positions[:, None], -2, 2) + 2]
    return weighed(soft(scores(q, k) + jnp.einsum("bthd,tsd->bhts", q, vectors)), v)


def transformer_xl(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Products of queries with vectors of all distances, moved row by row to their own (Dai et al. 2019)."""
    position_scores = jnp.einsum("bthd,shd->bhts", q, jnp.sin(k[0]))
    position_scores = jnp.pad(position_scores, ((0, 0), (0, 0), (0, 0), (1, 0))).reshape(B, H, T + 1, T)[:, :, 1:]
    return weighed(soft(jnp.where(triangle(), scores(q, k) + position_scores, HIDDEN_SCORE)), v)


def unseen(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """As bart-base-jax: a query of padding sees no key, and NaN of its softmax becomes 0. The loss was NaN."""
    is_real = k[:, :, 0, 0] > 0
    is_seen = (is_real[:, :, None] & is_real[:, None])[:, None]
    return weighed(jnp.where(is_seen, soft(jnp.where(is_seen, scores(q, k), -jnp.inf)), 0), v)


def alibi_of_grouped_queries(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """ALiBi with a slope for each key head and each of its query heads."""
    slopes, positions = 0.1 * jnp.arange(1.0, H + 1).reshape(K, H // K, 1, 1), jnp.arange(T)
    s = jnp.einsum("btkgd,bskd->bkgts", q.reshape(B, T, K, H // K, D), k[:, :, :K])
    p = soft(s - slopes * jnp.abs(positions[:, None] - positions))
    return jnp.einsum("bkgts,bskd->btkgd", p, v[:, :, :K]).reshape(B, T, H, D)


REPLAYED, UNKNOWN = "by a function of scores and positions", "by an exponential of scores in no known form of a softmax"
# Why a spelling is no `jp.attention`, and how it is described where its function of scores is replayed, if it is.
REASONS: dict[Spelling, tuple[str, str]] = {
    of_fewer_keys_and_causal: ("hides keys by position or id, with 14 queries and 9 keys", REPLAYED),
    of_fewer_keys_by_distance_and_padded: ("computes gather of positions", f"{REPLAYED} that reads "),
    alibi_of_grouped_queries: ("computes reshape of positions or ids", f"{REPLAYED} that reads "),
    alibi: ("adds a bias to scores", f"{REPLAYED} that reads "),
    soft_cap: ("computes tanh of scores", f"causal, {REPLAYED}"),
    both_sides: ("lets query i see keys from i - 3 to i - -3", f"{REPLAYED} that reads "),
    padding: ("neither a function of positions nor ids", f"{REPLAYED} that reads bool[2,1,1,14]"),
    hidden_a_little: ("hides keys by -5, which is above -10000", REPLAYED),
    hidden_less_by_a_scale: ("hides keys by -2000, which is above -10000", REPLAYED),
    future: ("lets query i see keys from i - -1 to i - -inf", REPLAYED),
    wrapping: ("computes sub of values that are no positions", f"{REPLAYED} that reads uint32"),
    rounding: ("counts positions in bfloat16", f"{REPLAYED} that reads bfloat16"),
    dropped: ("computes div of weights, as dropout does", REPLAYED),
    dropped_by_flax: ("computes mul of weights, as dropout does", f"causal, {REPLAYED}"),
    two_kinds_of_ids: ("or of different ids", f"{REPLAYED} that reads int32"),
    with_a_sink: ("has a softmax of more than its keys", f"causal, {REPLAYED}"),
    where_of_softmax: ("computes select_n of weights", f"causal, {REPLAYED}"),
    unseen: ("neither a function of positions nor ids", f"{REPLAYED} that reads bool"),
    of_queries: ("weighs values that do not go with the keys", ""),
    shaw: (r"test_spelled.py:\d+:\d+ \(shaw\)", ""),
    transformer_xl: ("computes reshape (of|along)", ""),
    one_more_in_the_sum: (f"weighs values {UNKNOWN}", ""),
    divided_at_the_end: (f"weighs values {UNKNOWN}", ""),
    squared_weights: ("computes mul of weights, which is not linear", ""),
    others_for_weights: ("replaces some weights by other numbers than 0", ""),
}


@pytest.mark.parametrize("fun", REASONS, ids=named)
def test_it_stays_as_it_is_and_says_why_but_is_replayed_where_a_sequence_is_split(fun: Spelling) -> None:
    flat, (why, replayed) = jx.trace(fun, *arrays()[:3])[0], REASONS[fun]
    result = spelled(flat, {})
    assert result.flat is flat
    assert not result.taken
    ((line, reason),) = result.not_taken.items()
    assert re.search(why, reason)
    assert "test_spelled.py" in line
    split = spelled(flat, {}, replay=True)
    if replayed:  # by the test of every spelling on four ranks
        (description,) = split.taken.values()
        assert description.startswith(replayed)
    else:
        assert not split.taken
        assert re.search(why, *split.not_taken.values())


def test_a_block_draws_the_bits_of_its_own_elements() -> None:
    """An element's bits depend on its flat index, which has 64 bits in arrays too large for a test to draw whole."""
    key, small, large = jax.random.key(3), (3, 5, 7), (7, 131_072, 131_072)
    all_positions = [jnp.arange(n) for n in small]
    np.testing.assert_array_equal(score_program._random_bits(key, small, all_positions), jax.random.bits(key, small))
    positions = [np.array([0, 6]), np.array([0, 77_777]), np.array([1, 131_071])]
    indices = np.ravel_multi_index(np.ix_(*positions), large).astype(np.uint64)
    counts = [jnp.asarray(x.astype(np.uint32)) for x in (indices >> np.uint64(32), indices & np.uint64(2**32 - 1))]
    high, low = threefry_2x32(jax.random.key_data(key), jnp.stack(counts))
    np.testing.assert_array_equal(
        score_program._random_bits(key, large, [jnp.asarray(x) for x in positions]), high ^ low
    )


def test_two_layers_of_a_loop_are_one_function_of_scores() -> None:
    """Otherwise the layers of a Python loop would not be alike, and not become a scan."""
    twice = lambda q, k, v: alibi(alibi(q, k, v), k, v)
    flat = spelled(jx.trace(twice, *arrays()[:3])[0], {}, replay=True).flat
    first, second = (call.options for call in calls(flat.eqns))
    assert first.function is second.function


@functools.cache
def model_of(*spellings: Spelling) -> jp.Model:
    """Return a model whose layers attend by these spellings, to the first `T` positions of a batch."""

    def init(key: jax.Array) -> dict[str, jax.Array]:
        draw = lambda i, *shape: jax.random.normal(jax.random.fold_in(key, i), shape) * shape[0] ** -0.5
        names = ("query", "key", "value", "out")
        head = {"table": draw(7, cells.VOCAB, H * D), "head": draw(8, H * D, cells.VOCAB)}
        return head | {name: draw(i, H * D, H * D) for i, name in enumerate(names)}

    def loss(params: Any, batch: Any, key: jax.Array | None) -> jp.Mean:
        x = params["table"][batch["tokens"][:, :T]]
        for fun in spellings:
            q, k, v = ((x @ params[name]).reshape(B, T, H, D) for name in ("query", "key", "value"))
            x = x + fun(q, k, v).reshape(x.shape) @ params["out"]
        return cells.weighed(x @ params["head"], batch["tokens"][:, 1 : T + 1], batch["mask"][:, :T])

    return jp.Model(init=init, loss=loss)


@functools.cache
def on_one_device(*spellings: Spelling) -> tuple[Any, Any, Any]:
    """Return the first parameters, the first gradients and the trained parameters of a model of these spellings."""
    reference = OneDevice(model_of(*spellings))
    return reference.first, *reference.train(cells.SGD, cells.batch_of(B), 1, cells.STEPS)


SPLIT = tuple(fun for fun, (_, replayed) in REASONS.items() if replayed)
# What differs in the mask alone is one equation once it is replaced: of those, all but these are in the battery.
UNLIKE = (
    rows_and_heads_in_one_dim, heads_first_and_own_softmax, grouped_by_reshape, one_key_head, keys_on_the_left, mapped,
    mapped_with_a_row_of_one, slice_of_a_longer_mask, ids_from_outside_of_a_loop, of_fewer_keys, segments,
)  # fmt: skip
WAYS = ("ring", "ulysses", "usp", "gather")
# Ranks cannot share their heads: rows and heads are one dim, or there is one key head.
REFUSED = {rows_and_heads_in_one_dim: ("ulysses", "usp"), one_key_head: ("usp",)}


def groups() -> list[Any]:
    """Return some spellings and a way for each cell: several spellings compile at once, those of the battery alone."""
    chosen = (*UNLIKE, *SPLIT)
    every = [((fun,), way) for fun in (*DESCRIPTIONS, *SPLIT) for way in WAYS]
    return [
        *((chosen[i::8], WAYS[i % 4]) for i in range(8)),
        *(pytest.param(*cell, marks=pytest.mark.battery) for cell in every),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spellings", "way"), groups(), ids=lambda x: x if isinstance(x, str) else "+".join(map(named, x))
)
def test_every_spelling_by_every_way_at_an_odd_length(
    spellings: tuple[Spelling, ...], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """13 positions on four ranks, or eight by usp: gradients and trained parameters are right, or an error says what
    to use.

    The compiled program of a ring has no scores of all positions, and no array of all keys.
    """
    monkeypatch.setattr(sys.modules[__name__], "T", 13)
    batch, model = cells.batch_of(B), model_of(*spellings)
    ranks = 8 if way == "usp" else 4  # of four ranks with four heads, usp's only group has all
    step = jp.make_train_step(model, cells.SGD, f"context={ranks},attention={way}", jax.devices()[:ranks])
    if any(way in REFUSED.get(fun, ()) for fun in spellings):
        with pytest.raises(ValueError, match="use attention='ring'"):
            step.trace(batch)
        return
    first, *trained = on_one_device(*spellings)
    check(step, model, first, batch, cells.STEPS, *trained)
    assert step.traced(batch).notes.attention_mode.name == way
    if way == "ring":
        arrays = re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", step.compile(batch).as_text())
        for shape in {tuple(map(int, dims.split(","))) for dims in arrays}:
            positions = sum(shape.count(n) for n in (T, 16))
            assert positions == 0 or (positions == 1 and math.prod(shape) < B * T * H * D)


LINE = r"test_spelled.py:\d+:\d+ \(weighed\)"
SCORES = r"float32\[\d,4,14,14\], [\d.]+ kB"


@pytest.mark.parametrize(
    ("fun", "text", "says"),
    [
        (
            where_minus_inf,
            "context=4,attention=ring",
            rf"{LINE}: the scores of the model's own attention \(causal\), {SCORES}, are not stored",
        ),
        (where_minus_inf, "context=4,attention=gather", rf"\(causal\), {SCORES}, are stored whole"),
        (
            where_minus_inf,
            "tensor=4,sequence=false",
            rf"\(causal\), {SCORES} over all ranks of tensor, are stored whole",
        ),
        # Under `auto` its keys were gathered, and no remark told why.
        (
            divided_at_the_end,
            "context=4",
            f"{LINE}: the model's own attention is not computed in blocks, since it weighs values {UNKNOWN}",
        ),
    ],
)
def test_attention_is_explained_with_its_line_and_mask(fun: Spelling, text: str, says: str) -> None:
    step = jp.make_train_step(model_of(fun), cells.SGD, text, jax.devices()[:4])
    explanation = " ".join(str(step.explain(cells.batch_of(B))).split())
    assert re.search(says, explanation)
    assert ("attention by ring in zigzag order, since it was asked for" in explanation) == ("ring" in text)


def test_no_rank_of_a_ring_holds_scores_of_all_positions_nor_all_keys() -> None:
    step = jp.make_train_step(cells.built("encoder_decoder"), cells.SGD, "context=4,attention=ring", jax.devices()[:4])
    shapes = {v.aval.shape for eqn, _ in visit(step.trace(cells.batch_of(4)).jaxpr.eqns) for v in eqn.outvars}
    heads = cells.HEADS, cells.DIM // cells.HEADS
    assert (4, cells.LENGTH // 4, *heads) in shapes  # a rank's own queries
    assert not [shape for shape in shapes if shape.count(cells.LENGTH) > 1]
    all_keys_shapes = [(n, *heads) for n in (cells.LENGTH, 2 * cells.LENGTH)]  # the source's too
    assert not [shape for shape in shapes if shape[-3:] in all_keys_shapes and math.prod(shape[:-3]) >= 4]


def test_a_table_of_distances_is_read_for_a_ranks_queries_where_keys_are_gathered() -> None:
    """Regression: every rank computed the bias of all queries and keys, and cut it."""
    step = jp.make_train_step(cells.built("t5"), cells.SGD, "context=4,attention=gather", jax.devices()[:4])
    shapes = {v.aval.shape for eqn, _ in visit(step.trace(cells.batch_of(4)).jaxpr.eqns) for v in eqn.outvars}
    assert (4, cells.LENGTH // 4, cells.HEADS, cells.DIM // cells.HEADS) in shapes
    assert not [shape for shape in shapes if shape.count(cells.LENGTH) > 1]


@pytest.mark.parametrize(
    ("name", "text", "message", "advised"),
    [
        ("decays", "context=4,attention=ulysses", r"by a softmax of scores, .*; use causal=.*'gather'", "context=4"),
        ("bert", "fsdp=4,kernels=fused", r"by a kernel, .*context_cells.py:\d+.*; leave kernels out", "fsdp=4"),
    ],
)
def test_what_is_not_taken_is_refused_with_its_line(name: str, text: str, message: str, advised: str) -> None:
    make_step = lambda text: jp.make_train_step(cells.built(name), cells.SGD, text, jax.devices()[:4])
    with pytest.raises(ValueError, match=message):
        make_step(text).trace(cells.batch_of(4))
    make_step(advised).trace(cells.batch_of(4))


def beside_other_heads(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    s = scores(q, k)
    return weighed(soft(s - s.mean(1, keepdims=True)), v)


def test_the_mode_goes_by_what_a_function_of_scores_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    def mode_of(fun: Spelling, attention: str, ranks: int = 4) -> AttentionMode:
        flat = spelled(jx.trace(fun, *arrays()[:3])[0], {}, replay=True).flat
        return choose(attention, flat.eqns, ranks, 1)

    chosen = lambda *args: mode_of(*args).name
    monkeypatch.setattr(sys.modules[__name__], "T", 24)
    assert chosen(alibi, "auto") == "ulysses"
    assert chosen(soft_cap, "auto") == "ring"
    assert re.search("it skips hidden keys in the causal function of scores at", mode_of(soft_cap, "auto").why)
    assert chosen(beside_other_heads, "auto") == chosen(beside_other_heads, "ring") == "ring"
    for attention in ("ulysses", "usp"):
        with pytest.raises(ValueError, match=r"test_spelled.py:\d+.* mixes heads, .*; use attention='ring'"):
            chosen(beside_other_heads, attention, 2)
    monkeypatch.setattr(sys.modules[__name__], "H", 12)
    monkeypatch.setattr(sys.modules[__name__], "K", 6)
    assert {chosen(alibi_of_grouped_queries, "ulysses", ranks) for ranks in (3, 12)} == {"ulysses"}
    message = "6 key heads must divide context=4, or be divided by it; use attention='ring'"
    with pytest.raises(ValueError, match=message):
        chosen(alibi_of_grouped_queries, "ulysses", 4)
