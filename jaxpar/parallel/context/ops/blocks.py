"""Attention of a block of queries to a block of keys, merged with the result over other blocks of keys.

Let L be the logarithm of the softmax's denominator over some keys. The results over two sets of keys merge into

    L = log(exp(L1) + exp(L2)),   O = exp(L1 - L) O1 + exp(L2 - L) O2

Backward, the gradients of one block depend on the other blocks only through the final output O and L:

    P = exp(scale Q K^T - L),   D = rowsum(dO * O),    dS = P * (dO V^T - D)
    dQ = scale dS K,            dK = scale dS^T Q,     dV = P^T dO

(Dao et al. 2022, FlashAttention, arXiv:2205.14135, sections 3.1 and B.4; Liu et al. 2023, Ring Attention,
arXiv:2310.01889). The forward and the backward of the kernels are therefore called separately. JAX's derivative of
cuDNN's attention takes no cotangent of L, and returns L to its callers in bfloat16 (jax 0.10 to 0.12).

`score_function.py` has the same four functions (`attend`, `finish`, `initial_gradients`, `backward`) for scores that a
program transforms; `Rounds.block_ops` chooses.

Dims: B rows, T query positions, S key positions, H heads, K key/value heads, h head_dim.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..attention.flash import (
    HIDDEN,
    UNMASKED,
    AttentionOptions,
    cudnn_backward,
    cudnn_forward,
    refusal,
    visible_keys,
    vmap_as_rows,
)

QUERY_CHUNK = 1024  # the number of queries whose scores the plain kernel holds at once


@dataclass(frozen=True)
class Rectangle:
    """A rectangle of queries and keys within a block of queries and a block of keys.

    Attributes:
      first_query: the position of its first query in the block, an int or traced.
      first_key: the position of its first key in the block.
      num_queries: the number of queries.
      num_keys: the number of keys.
      options: the options of the kernel: causality, window, scale.
      mask: bool [B or 1, 1, queries, keys], True where a query sees a key, or None.
      is_visible: traced bool, False if no query sees any key of the rectangle; None means True.
      score_block: the `ScoreBlock` of a function of scores (`score_function.py`), which replaces options and mask.
    """

    first_query: jax.Array | int
    first_key: jax.Array | int
    num_queries: int
    num_keys: int
    options: AttentionOptions = UNMASKED
    mask: jax.Array | None = None
    is_visible: jax.Array | None = None
    score_block: Any = None

    def slice_queries(self, x: jax.Array, dim: int = 1) -> jax.Array:
        """Slice this rectangle's queries out of an array with all queries of the block along `dim`."""
        return lax.dynamic_slice_in_dim(x, self.first_query, self.num_queries, dim)

    def slice_keys(self, x: jax.Array, dim: int = 1) -> jax.Array:
        """Slice this rectangle's keys out of an array with all keys of the block along `dim`."""
        return lax.dynamic_slice_in_dim(x, self.first_key, self.num_keys, dim)

    @property
    def masks(self) -> tuple[jax.Array, ...]:
        """The mask as a tuple of one array, or an empty tuple."""
        return () if self.mask is None else (self.mask,)


def attend(
    rectangles: list[Rectangle], q: jax.Array, kv: jax.Array, state: tuple[jax.Array, ...] | None
) -> tuple[jax.Array, ...]:
    """Attend to some rectangles of a block of keys, and return the state of earlier blocks with their result merged in.

    Args:
      rectangles: the visible rectangles of this block.
      q: [B, T, H, h], this rank's queries.
      kv: [2, B, S, K, h], the keys and values of the block.
      state: O float32 [B, T, H, h] and L float32 [B, H, T]; None for the first block.
    """
    if state is None:
        b, t, heads, h = q.shape
        wide = accumulation_dtype(q)
        # HIDDEN, not -inf: the difference of two infinities would be NaN where no block has a visible key.
        state = jnp.zeros((b, t, heads, h), wide), jnp.full((b, heads, t), HIDDEN, wide)
    output, lse = state
    for rectangle in rectangles:
        k, v = rectangle.slice_keys(kv, 2)
        queries = rectangle.slice_queries(q)
        block_output, block_lse = _rectangle_forward(rectangle.options, queries, k, v, *rectangle.masks)
        if rectangle.is_visible is not None:
            block_lse = jnp.where(rectangle.is_visible, block_lse, HIDDEN)
        old_lse = rectangle.slice_queries(lse, 2)
        merged_lse = jnp.logaddexp(old_lse, block_lse)
        # exp(L1 - L), from [B, H, T] to [B, T, H, 1]
        share = lambda part_lse, merged_lse=merged_lse: jnp.swapaxes(jnp.exp(part_lse - merged_lse), 1, 2)[..., None]
        merged = rectangle.slice_queries(output) * share(old_lse) + block_output * share(block_lse)
        output = lax.dynamic_update_slice_in_dim(output, merged, rectangle.first_query, 1)
        lse = lax.dynamic_update_slice_in_dim(lse, merged_lse, rectangle.first_query, 2)
    return output, lse


def backward(
    rectangles: list[Rectangle], q: jax.Array, kv: jax.Array, final: tuple[jax.Array, ...], sums: tuple[jax.Array]
) -> tuple[tuple[jax.Array], jax.Array]:
    """Compute the gradients of some rectangles.

    Args:
      rectangles, q, kv: as for `attend`.
      final: the result over all keys, its L, and the cotangent of the result.
      sums: the gradient of queries so far, float32 [B, T, H, h].

    Returns:
      `sums` with the gradient of queries added, and the gradient of this block's keys and values [2, B, S, K, h].
    """
    (output, lse, cotangent), (dq,) = final, sums
    dkv = jnp.zeros(kv.shape, dq.dtype)
    for rectangle in rectangles:
        k, v = rectangle.slice_keys(kv, 2)
        query_arrays = (
            rectangle.slice_queries(output),
            rectangle.slice_queries(lse, 2),
            rectangle.slice_queries(cotangent),
            rectangle.slice_queries(q),
        )
        gradients = _rectangle_backward(rectangle.options, *query_arrays, k, v, *rectangle.masks)
        if rectangle.is_visible is not None:  # `where`, not a product: gradients of hidden keys may be infinite
            gradients = [jnp.where(rectangle.is_visible, x, 0) for x in gradients]
        dq = lax.dynamic_update_slice_in_dim(dq, rectangle.slice_queries(dq) + gradients[0], rectangle.first_query, 1)
        dkv = lax.dynamic_update_slice_in_dim(
            dkv, rectangle.slice_keys(dkv, 2) + jnp.stack(gradients[1:]), rectangle.first_key, 2
        )
    return (dq,), dkv


def initial_gradients(q: jax.Array, *_: Any) -> tuple[jax.Array]:
    """Return zeros, to which `backward` adds the gradients of queries."""
    return (jnp.zeros(q.shape, accumulation_dtype(q)),)


def finish(q: jax.Array, output: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the result in the dtype of q, and L for the backward.

    A query that saw no key gets zeros, and passes no gradient on.
    """
    sees_nothing = lse < HIDDEN / 2
    output = jnp.where(jnp.swapaxes(sees_nothing, 1, 2)[..., None], 0, output)
    # With L = 0 the backward's weights exp(HIDDEN - L) are 0; with L = HIDDEN they would be 1.
    return output.astype(q.dtype), jnp.where(sees_nothing, 0, lse)


def _rectangle_forward(options: AttentionOptions, q: jax.Array, k: jax.Array, v: jax.Array, *mask: jax.Array) -> tuple:
    """Return O and L of one rectangle in float32, by cuDNN on GPUs if it can, else by the plain kernel."""
    plain = functools.partial(_plain_forward, options)
    if _is_refused(q, k):
        return plain(q, k, v, *mask)

    def cudnn(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        # Both branches of `vmap_as_rows` must have the same dtypes; results are merged in float32.
        output, lse = cudnn_forward(options, *arrays)
        return output.astype(jnp.float32), lse

    return vmap_as_rows(cudnn, plain)(q, k, v, *mask)


def _rectangle_backward(options: AttentionOptions, *arrays: jax.Array) -> list[jax.Array]:
    """Return the gradients of q, k and v; `arrays` are O, L, cotangent, q, k, v and perhaps a mask."""
    plain = functools.partial(_plain_backward, options)
    if _is_refused(*arrays[3:5]):
        return list(plain(*arrays))
    cudnn = lambda *arrays: tuple(x.astype(jnp.float32) for x in cudnn_backward(options, *arrays))
    return list(vmap_as_rows(cudnn, plain)(*arrays))


def _is_refused(q: jax.Array, k: jax.Array) -> bool:
    """Whether cuDNN has no kernel for this dtype, head_dim or length; its backward refuses odd lengths."""
    return bool(q.shape[1] % 2 or k.shape[1] % 2 or refusal(q.shape, k.shape, q.dtype.name))


def _plain_forward(options: AttentionOptions, q: jax.Array, k: jax.Array, v: jax.Array, *mask: jax.Array) -> tuple:
    """Return O [B, T, H, h] and L [B, H, T] of one rectangle, a chunk of queries at a time."""

    def attend_chunk(first: jax.Array | int, n: int) -> tuple[jax.Array, jax.Array]:
        scores, _ = _scores(options, q, k, mask, first, n)
        lse = jax.nn.logsumexp(scores, -1)
        weights = jnp.exp(scores - lse[..., None])
        output = jnp.einsum("bkgts,bskh->btkgh", weights, v.astype(accumulation_dtype(q)))
        return output.reshape(q.shape[0], n, *q.shape[2:]), lse.reshape(q.shape[0], q.shape[2], n)

    output_chunks, lse_chunks = scan_queries(q.shape[1], lambda _, first, n: (None, attend_chunk(first, n)), None)[1]
    return join_chunks(output_chunks, 1), join_chunks(lse_chunks, 2)


def _plain_backward(options: AttentionOptions, *arrays: jax.Array) -> tuple:
    """Return dQ, dK and dV by the equations above; `arrays` are those of `_rectangle_backward`."""
    output, lse, cotangent, q, k, v, *mask = arrays
    # [B, n, K, H / K, h]: the query heads of each key head.
    wide, by_key_head = accumulation_dtype(q), (q.shape[0], -1, k.shape[2], q.shape[2] // k.shape[2], q.shape[3])

    def backward_chunk(sums: tuple, first: jax.Array | int, n: int) -> tuple:
        chunk = lambda x, dim=1: lax.dynamic_slice_in_dim(x, first, n, dim)
        scores, queries = _scores(options, q, k, (*mask,), first, n)
        weights = jnp.exp(scores - chunk(lse, 2).reshape(*scores.shape[:-1], 1))
        d_output, result = (chunk(x).astype(wide).reshape(by_key_head) for x in (cotangent, output))
        row_sums = jnp.einsum("btkgh,btkgh->bkgt", d_output, result)[..., None]  # D of the equations
        d_scores = weights * (jnp.einsum("btkgh,bskh->bkgts", d_output, v.astype(wide)) - row_sums) * _scale(options, q)
        dq = jnp.einsum("bkgts,bskh->btkgh", d_scores, k.astype(wide)).reshape(q.shape[0], n, *q.shape[2:])
        # The einsums sum over the query heads g that share a key head.
        dk = sums[0] + jnp.einsum("bkgts,btkgh->bskh", d_scores, queries)
        dv = sums[1] + jnp.einsum("bkgts,btkgh->bskh", weights, d_output)
        return (dk, dv), dq

    sums, dq_chunks = scan_queries(q.shape[1], backward_chunk, (jnp.zeros(k.shape, wide), jnp.zeros(v.shape, wide)))
    return join_chunks(dq_chunks, 1), *sums


def _scores(
    options: AttentionOptions, q: jax.Array, k: jax.Array, mask: tuple[jax.Array, ...], first: jax.Array | int, n: int
) -> tuple[jax.Array, jax.Array]:
    """Return the scores of n queries from `first` on, [B, K, H / K, n, S], and the queries by key head, in float32."""
    (b, t, heads, h), (s, groups) = q.shape, k.shape[1:3]
    chunk = lambda x, dim: lax.dynamic_slice_in_dim(x, first, n, dim)
    queries = chunk(q, 1).astype(accumulation_dtype(q)).reshape(b, n, groups, heads // groups, h)
    scores = jnp.einsum("btkgh,bskh->bkgts", queries, k.astype(accumulation_dtype(q))) * _scale(options, q)
    if not (options.causal or mask):
        return scores, queries
    is_seen = visible_keys(options, t, s, *mask)
    is_seen = jnp.tril(is_seen) if options.causal else is_seen
    return jnp.where(chunk(is_seen, 2)[:, :, None], scores, HIDDEN), queries


def scan_queries(t: int, chunk_function: Callable, carry: tuple | None) -> tuple:
    """Scan over chunks of t queries, so that only the scores of one chunk exist at a time.

    `chunk_function` maps (carry, first query, number of queries) to (carry, result).

    Returns:
      The final carry, and the results of all chunks, stacked on dim 0.
    """
    # A number of queries that chunks do not divide is a single chunk.
    size = QUERY_CHUNK if t > QUERY_CHUNK and t % QUERY_CHUNK == 0 else t
    return lax.scan(lambda carry, first: chunk_function(carry, first, size), carry, jnp.arange(0, t, size))


def join_chunks(x: jax.Array, dim: int) -> jax.Array:
    """Concatenate the stacked results of `scan_queries`, [num_chunks, ...], along their dim of queries."""
    x = jnp.moveaxis(x, 0, dim)
    return x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])


def _scale(options: AttentionOptions, q: jax.Array) -> float:
    """Return the factor of the scores."""
    return q.shape[-1] ** -0.5 if options.scale is None else options.scale


def accumulation_dtype(x: jax.Array) -> jnp.dtype:
    """Return the dtype in which softmaxes and sums of such numbers are computed: at least float32."""
    return jnp.promote_types(x.dtype, jnp.float32)
