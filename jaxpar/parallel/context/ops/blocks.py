"""Attention of a block of queries to a block of keys, as it is merged with other blocks of keys.

With L the logarithm of the softmax's denominator over some keys, the result over two sets of keys is

    L = log(exp(L1) + exp(L2)),    out = exp(L1 - L) out1 + exp(L2 - L) out2

and the gradients of one block need of the other blocks the final `out` and L alone (Dao et al. 2022, FlashAttention,
arXiv:2205.14135, sections 3.1 and B.4; Liu et al. 2023, Ring Attention, arXiv:2310.01889). So forward and backward of
the kernels are called for themselves: JAX's derivative of cuDNN's attention takes no cotangent of L, and returns L to
its callers in bfloat16 (jax 0.10 to 0.12).

Dims: B rows, T query positions, S key positions, H heads, K key/value heads, h head_dim.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..attention.flash import HIDDEN, AttentionOptions, cudnn_backward, cudnn_forward, in_rows, refusal, visible

PLAIN = AttentionOptions(False, None, None, None, 0, False)
QUERIES = 1024  # whose scores the plain kernel holds at once


@dataclass(frozen=True)
class Rectangle:
    """A rectangle of queries and keys within two blocks.

    Attributes:
      query: its first query, an int or traced.
      key: its first key.
      queries: how many.
      keys: how many.
      options: what the kernel is to know: causality, window, scale.
      mask: bool [B or 1, 1, queries, keys], True where a query sees a key, or None.
      there: traced bool, False if it does not count at all; None: it does.
      replay: what a function of scores needs (`score_function.py`), in place of options and mask.
    """

    query: jax.Array | int
    key: jax.Array | int
    queries: int
    keys: int
    options: AttentionOptions = PLAIN
    mask: jax.Array | None = None
    there: jax.Array | None = None
    replay: Any = None

    def of_queries(self, x: jax.Array, dim: int = 1) -> jax.Array:
        """This rectangle's queries of an array of all."""
        return lax.dynamic_slice_in_dim(x, self.query, self.queries, dim)

    def of_keys(self, x: jax.Array, dim: int = 1) -> jax.Array:
        """This rectangle's keys of an array of all."""
        return lax.dynamic_slice_in_dim(x, self.key, self.keys, dim)

    @property
    def masks(self) -> tuple[jax.Array, ...]:
        """The mask, if there is one."""
        return () if self.mask is None else (self.mask,)


def attend(
    parts: list[Rectangle], q: jax.Array, kv: jax.Array, so_far: tuple[jax.Array, ...] | None
) -> tuple[jax.Array, ...]:
    """Some parts merged with what is so far: out float32 [B, T, H, h] and L float32 [B, H, T]."""
    if so_far is None:
        b, t, heads, h = q.shape
        wide = dtype_of_sums(q)
        so_far = jnp.zeros((b, t, heads, h), wide), jnp.full((b, heads, t), HIDDEN, wide)
    out, total = so_far
    for rectangle in parts:
        k, v = rectangle.of_keys(kv, 2)
        own, here = _forward(rectangle.options, rectangle.of_queries(q), k, v, *rectangle.masks)
        if rectangle.there is not None:
            here = jnp.where(rectangle.there, here, HIDDEN)
        before = rectangle.of_queries(total, 2)
        after = jnp.logaddexp(before, here)
        share = lambda of, after=after: jnp.swapaxes(jnp.exp(of - after), 1, 2)[..., None]
        merged = rectangle.of_queries(out) * share(before) + own * share(here)
        out = lax.dynamic_update_slice_in_dim(out, merged, rectangle.query, 1)
        total = lax.dynamic_update_slice_in_dim(total, after, rectangle.query, 2)
    return out, total


def pull(
    parts: list[Rectangle], q: jax.Array, kv: jax.Array, final: tuple[jax.Array, ...], sums: tuple[jax.Array]
) -> tuple[tuple[jax.Array], jax.Array]:
    """The gradients of some parts: of queries, added to `sums` float32 [B, T, H, h]; of keys and values
    [2, B, S, K, h].

    `final` are the result over all keys, its L, and the result's cotangent.
    """
    (out, total, given), (dq,) = final, sums
    dkv = jnp.zeros(kv.shape, dq.dtype)
    for rectangle in parts:
        k, v = rectangle.of_keys(kv, 2)
        mine = (
            rectangle.of_queries(out),
            rectangle.of_queries(total, 2),
            rectangle.of_queries(given),
            rectangle.of_queries(q),
        )
        found = _backward(rectangle.options, *mine, k, v, *rectangle.masks)
        if rectangle.there is not None:  # what is not there may be infinite
            found = [jnp.where(rectangle.there, x, 0) for x in found]
        dq = lax.dynamic_update_slice_in_dim(dq, rectangle.of_queries(dq) + found[0], rectangle.query, 1)
        dkv = lax.dynamic_update_slice_in_dim(dkv, rectangle.of_keys(dkv, 2) + jnp.stack(found[1:]), rectangle.key, 2)
    return (dq,), dkv


def nothing(q: jax.Array, *_: Any) -> tuple[jax.Array]:
    """What the gradients of queries are added to."""
    return (jnp.zeros(q.shape, dtype_of_sums(q)),)


def finish(q: jax.Array, out: jax.Array, total: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The result in the dtype of q, and L as backward needs it. Zeros, and no gradient, where no key was seen."""
    blind = total < HIDDEN / 2
    out = jnp.where(jnp.swapaxes(blind, 1, 2)[..., None], 0, out)
    return out.astype(q.dtype), jnp.where(blind, 0, total)


def _forward(options: AttentionOptions, q: jax.Array, k: jax.Array, v: jax.Array, *mask: jax.Array) -> tuple:
    plain = functools.partial(_plain_forward, options)
    if _refused(q, k):
        return plain(q, k, v, *mask)

    def cudnn(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        out, total = cudnn_forward(options, *arrays)
        return out.astype(jnp.float32), total

    return in_rows(cudnn, plain)(q, k, v, *mask)


def _backward(options: AttentionOptions, *arrays: jax.Array) -> list[jax.Array]:
    """Of out, L, cotangent, q, k, v and a mask."""
    plain = functools.partial(_plain_backward, options)
    if _refused(*arrays[3:5]):
        return list(plain(*arrays))
    cudnn = lambda *arrays: tuple(x.astype(jnp.float32) for x in cudnn_backward(options, *arrays))
    return list(in_rows(cudnn, plain)(*arrays))


def _refused(q: jax.Array, k: jax.Array) -> bool:
    """Whether cuDNN computes this nowhere: its dtype or head_dim, or odd lengths, for which it has no backward."""
    return bool(q.shape[1] % 2 or k.shape[1] % 2 or refusal(q.shape, k.shape, q.dtype.name))


def _plain_forward(options: AttentionOptions, q: jax.Array, k: jax.Array, v: jax.Array, *mask: jax.Array) -> tuple:
    def some(first: jax.Array | int, n: int) -> tuple[jax.Array, jax.Array]:
        scores, _ = _scores(options, q, k, mask, first, n)
        total = jax.nn.logsumexp(scores, -1)
        weights = jnp.exp(scores - total[..., None])
        out = jnp.einsum("bkgts,bskh->btkgh", weights, v.astype(dtype_of_sums(q)))
        return out.reshape(q.shape[0], n, *q.shape[2:]), total.reshape(q.shape[0], q.shape[2], n)

    outs, totals = by_queries(q.shape[1], lambda _, first, n: (None, some(first, n)), None)[1]
    return joined(outs, 1), joined(totals, 2)


def _plain_backward(options: AttentionOptions, *arrays: jax.Array) -> tuple:
    out, total, given, q, k, v, *mask = arrays
    wide, groups = dtype_of_sums(q), (q.shape[0], -1, k.shape[2], q.shape[2] // k.shape[2], q.shape[3])

    def some(sums: tuple, first: jax.Array | int, n: int) -> tuple:
        cut = lambda x, dim=1: lax.dynamic_slice_in_dim(x, first, n, dim)
        scores, queries = _scores(options, q, k, (*mask,), first, n)
        weights = jnp.exp(scores - cut(total, 2).reshape(*scores.shape[:-1], 1))
        d_out, result = (cut(x).astype(wide).reshape(groups) for x in (given, out))
        along = jnp.einsum("btkgh,btkgh->bkgt", d_out, result)[..., None]
        d_scores = weights * (jnp.einsum("btkgh,bskh->bkgts", d_out, v.astype(wide)) - along) * _scale(options, q)
        dq = jnp.einsum("bkgts,bskh->btkgh", d_scores, k.astype(wide)).reshape(q.shape[0], n, *q.shape[2:])
        dk = sums[0] + jnp.einsum("bkgts,btkgh->bskh", d_scores, queries)
        dv = sums[1] + jnp.einsum("bkgts,btkgh->bskh", weights, d_out)
        return (dk, dv), dq

    sums, dqs = by_queries(q.shape[1], some, (jnp.zeros(k.shape, wide), jnp.zeros(v.shape, wide)))
    return joined(dqs, 1), *sums


def _scores(
    options: AttentionOptions, q: jax.Array, k: jax.Array, mask: tuple[jax.Array, ...], first: jax.Array | int, n: int
) -> tuple[jax.Array, jax.Array]:
    """Of n queries from the first on: scores [B, K, H / K, n, S], and the queries by key head, in float32."""
    (b, t, heads, h), (s, groups) = q.shape, k.shape[1:3]
    cut = lambda x, dim: lax.dynamic_slice_in_dim(x, first, n, dim)
    queries = cut(q, 1).astype(dtype_of_sums(q)).reshape(b, n, groups, heads // groups, h)
    scores = jnp.einsum("btkgh,bskh->bkgts", queries, k.astype(dtype_of_sums(q))) * _scale(options, q)
    if not (options.causal or mask):
        return scores, queries
    seen = visible(options, t, s, *mask)
    seen = jnp.tril(seen) if options.causal else seen
    return jnp.where(cut(seen, 2)[:, :, None], scores, HIDDEN), queries


def by_queries(t: int, some: Callable, carry: tuple | None) -> tuple:
    """A function of queries, so many at a time that their scores are held: its last carry, its results stacked."""
    size = QUERIES if t > QUERIES and t % QUERIES == 0 else t
    return lax.scan(lambda carry, first: some(carry, first, size), carry, jnp.arange(0, t, size))


def joined(x: jax.Array, dim: int) -> jax.Array:
    """Results of some queries each, [n, ...], one after the other along their dim."""
    x = jnp.moveaxis(x, 0, dim)
    return x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])


def _scale(options: AttentionOptions, q: jax.Array) -> float:
    return q.shape[-1] ** -0.5 if options.scale is None else options.scale


def dtype_of_sums(x: jax.Array) -> jnp.dtype:
    """The dtype in which sums of such numbers are kept."""
    return jnp.promote_types(x.dtype, jnp.float32)
