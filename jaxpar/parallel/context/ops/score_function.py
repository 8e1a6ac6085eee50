"""Attention whose scores a program transforms before their softmax, a block of queries and keys at a time.

Between the product of queries and keys and the softmax, a program may add a bias by distance, cap scores, or mask them
in any way; it may also transform the weights linearly, as dropout does. It is a function f of the scores, of the
positions of queries and keys, of heads, and of operands such as slopes, ids and tables. A rank replays its equations
(`score_program.py`) on the block at hand, so that no [T, T] array ever exists.

Forward, with the state (acc, m, l), the largest score m and the sum l of exp(score - m), a block of keys adds

    S = f(Q K^T),   m' = max(m, max S),   P = exp(S - m')
    acc' = exp(m - m') acc + w(P) V,      l' = exp(m - m') l + sum P,         O = acc / l at the end

where w is the function of the weights. Backward, from the final m and l:

    P = exp(S - m) / l,   D = rowsum(dO * O),   dS = P * (w^T(dO V^T) - D),   dV = w(P)^T dO
    dQ, dK and the gradients of operands: the derivative of f(Q K^T), applied to dS

(Milakov & Gimelshein 2018, Online normalizer calculation for softmax, arXiv:1805.02867; Dao et al. 2022,
arXiv:2205.14135.) m and l are separate, unlike the L = m + log(l) of `blocks.py`. If a large negative number hides all
keys of a query, log(l) is lost in m + log(l), and the softmax must be the mean over these keys.

Dims: b rows, t query positions, s key positions, H heads, k key heads, g query heads of each, h head_dim.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..attention.flash import AttentionOptions
from .blocks import Rectangle, accumulation_dtype, join_chunks, scan_queries
from .score_program import HEADS, SINK, ScoreProgram, Value


@dataclass(frozen=True)
class ScoreFunction:
    """The programs of one attention, from the products of queries and keys to the weights of values.

    Attributes:
      scores: from the products to the scores of the softmax.
      weights: from the softmax to the weights of values, and linear in it, as dropout is; None for the softmax itself.
      sink: whether the softmax has a term that belongs to no key; its operand `SINK` is then the last.
      by_heads: whether some heads can be computed without the others. The numbers of heads that the programs read
        (`HEADS`) are then the first operands.
    """

    scores: ScoreProgram
    weights: ScoreProgram | None = None
    sink: bool = False
    by_heads: bool = True

    @property
    def operands(self) -> tuple[Value, ...]:
        """All operands: numbers of heads, operands of the score program and of the weight program, the sink."""
        weight_operands = () if self.weights is None else self.weights.operands
        numbers = [HEADS[side] for side in self.counted_heads]
        return (*numbers, *self.scores.operands, *weight_operands, *[SINK] * self.sink)

    @property
    def counted_heads(self) -> list[str]:
        """The sides among "k" and "g" whose numbers the programs read; a rank must then know which heads it has."""
        sides = self.scores.counted_sides | (self.weights.counted_sides if self.weights else set())
        return [side for side in HEADS if side in sides]

    def dims(self, side: str) -> list[int | None]:
        """Return the dim of each operand that runs along a side, or None."""
        operand_sides = [[x and x.side for x in labels] for _, labels in self.operands]
        return [sides.index(side) if side in sides else None for sides in operand_sides]

    def heads(self) -> tuple[tuple[int | None, ...], int | None]:
        """Return the dims of heads of the inputs (queries, keys, values, operands) and of the result.

        `local_kernel` splits them over tensor ranks. All are None if heads must stay together.
        """
        return ((2, 2, 2, *self.dims("k")), 2) if self.by_heads else ((None,) * (3 + len(self.operands)), None)


@dataclass(frozen=True)
class ScoreBlock:
    """A score function on one rectangle of queries and keys.

    Attributes:
      function: the score function.
      positions: the positions of the rectangle's queries ("t") and keys ("s") in the sequence.
      operands: all operands, with the heads of this rank and the keys of all ranks.
      first_key: which of all keys is the rectangle's first.
      is_real_key: bool, which of the rectangle's keys exist in the user's sequence; None means all.
    """

    function: ScoreFunction
    positions: Mapping[str, jax.Array]
    operands: tuple[jax.Array, ...]
    first_key: jax.Array | int
    is_real_key: jax.Array | None = None

    @property
    def sink(self) -> jax.Array | None:
        """The score [b, H, t] of the softmax's term that belongs to no key, or None."""
        if not self.function.sink:
            return None
        b, k, g, t = self.operands[-1].shape
        return self.operands[-1].reshape(b, k * g, t)

    def _slice_operands(
        self, rectangle: Rectangle, first: jax.Array | int, shape: Sequence[int], floats: Sequence[jax.Array]
    ) -> tuple[dict[str, jax.Array], list[jax.Array]]:
        """Return the positions and the operands of scores of this shape, [b, k, g, n, s].

        The n queries are those from `first` on, counted from the rectangle's first. `floats` are the operands that are
        floats, which are separate arguments so that they can be differentiated.
        """
        # Operands along queries have all queries of this rank, and those along keys the keys of all ranks.
        remaining = iter(floats)
        operands = [next(remaining) if _is_float(x) else x for x in self.operands]
        first_query = rectangle.first_query + first
        for side, start, size in (("t", first_query, shape[3]), ("s", self.first_key, rectangle.num_keys)):
            dims = self.function.dims(side)
            operands = [x if d is None else slice_chunk(x, start, size, d) for x, d in zip(operands, dims, strict=True)]
        counted_heads = self.function.counted_heads
        positions = {"t": slice_chunk(self.positions["t"], first, shape[3], 0), "s": self.positions["s"]}
        # Heads are numbered from 0, unless a program counts them: then the first operands have this rank's numbers.
        positions |= zip("kg", map(jnp.arange, shape[1:3]), strict=True)
        positions |= zip(counted_heads, operands, strict=False)
        return positions, operands[len(counted_heads) :]

    def scores(
        self, rectangle: Rectangle, first: jax.Array | int, q: jax.Array, k: jax.Array, *floats: jax.Array
    ) -> jax.Array:
        """Return the scores [b, k, g, n, s] of n queries [b, n, H, h] from `first` on; see `_slice_operands`."""
        wide = accumulation_dtype(q)
        products = jnp.einsum("btkgh,bskh->bkgts", _by_key_head(q, k).astype(wide), k.astype(wide))
        positions, operands = self._slice_operands(rectangle, first, products.shape, floats)
        scores = self.function.scores(products, positions, operands[: len(self.function.scores.operands)])
        # Surplus keys repeat the last one (`Rounds.lengths`), and must have no weight.
        return scores if self.is_real_key is None else jnp.where(self.is_real_key, scores, -jnp.inf)

    def weights(
        self, rectangle: Rectangle, first: jax.Array | int, weights: jax.Array, *floats: jax.Array
    ) -> jax.Array:
        """Return the weights of values, from a softmax or, since the program is linear, from a multiple of it."""
        if (program := self.function.weights) is None:
            return weights
        positions, operands = self._slice_operands(rectangle, first, weights.shape, floats)
        num_score_operands = len(self.function.scores.operands)
        return program(weights, positions, operands[num_score_operands : num_score_operands + len(program.operands)])


def initial_state(q: jax.Array, block: ScoreBlock) -> tuple[jax.Array, ...]:
    """Return the state before the first block: acc [b, t, H, h], m and l [b, H, t], in float32."""
    b, t, heads, _ = q.shape
    row_max, acc = jnp.full((b, heads, t), -jnp.inf, accumulation_dtype(q)), jnp.zeros(q.shape, accumulation_dtype(q))
    # A sink is a key whose value is zero: m is its score, and l is exp(0).
    return (acc, row_max, jnp.zeros_like(row_max)) if block.sink is None else (acc, block.sink, jnp.ones_like(row_max))


def attend(
    rectangles: list[Rectangle], q: jax.Array, kv: jax.Array, state: tuple[jax.Array, ...] | None
) -> tuple[jax.Array, ...]:
    """Attend to some rectangles of a block of keys, as `blocks.attend` does, with the state of `initial_state`."""
    state = state or initial_state(q, rectangles[0].score_block)
    for rectangle in rectangles:
        k, v = rectangle.slice_keys(kv, 2)
        query_state = [rectangle.slice_queries(x, d) for x, d in zip(state, _QUERY_DIMS, strict=True)]
        merged = _merge_rectangle(rectangle, rectangle.slice_queries(q), k, v, query_state)
        if rectangle.is_visible is not None:
            # An invisible block leaves the state as it was. Its scores may be anything, NaN included.
            merged = [jnp.where(rectangle.is_visible, x, y) for x, y in zip(merged, query_state, strict=True)]
        state = tuple(
            lax.dynamic_update_slice_in_dim(x, update, rectangle.first_query, d)
            for x, update, d in zip(state, merged, _QUERY_DIMS, strict=True)
        )
    return state


def _merge_rectangle(
    rectangle: Rectangle, q: jax.Array, k: jax.Array, v: jax.Array, query_state: Sequence[jax.Array]
) -> list[jax.Array]:
    """Merge the keys of one rectangle with the state of its queries, a chunk of queries at a time."""
    block = rectangle.score_block
    floats = [*filter(_is_float, block.operands)]

    def merge_chunk(_: Any, first: jax.Array, n: int) -> tuple[None, tuple[jax.Array, ...]]:
        acc, row_max, row_sum = (slice_chunk(x, first, n, d) for x, d in zip(query_state, _QUERY_DIMS, strict=True))
        scores = block.scores(rectangle, first, slice_chunk(q, first, n), k, *floats)
        b, key_heads, group_size, *_ = scores.shape
        new_max = jnp.maximum(row_max, scores.max(-1).reshape(row_max.shape))
        weights = jnp.exp(scores - _finite(new_max).reshape(b, key_heads, group_size, n, 1))
        decay = jnp.exp(row_max - _finite(new_max))
        # A softmax over no key is NaN, and the program of the weights may turn that into 0, so that it must see NaN.
        # Once a query has seen a key, the NaN of earlier blocks must not reach its result.
        sees_nothing = (new_max == -jnp.inf).reshape(b, key_heads, group_size, n, 1)
        sees_first_key = (row_max == -jnp.inf) & (new_max > -jnp.inf)
        value_weights = block.weights(rectangle, first, jnp.where(sees_nothing, jnp.nan, weights), *floats)
        block_acc = jnp.einsum("bkgts,bskh->btkgh", value_weights, v.astype(weights.dtype)).reshape(acc.shape)
        acc_decay, sees_first_key = (jnp.swapaxes(x, 1, 2)[..., None] for x in (decay, sees_first_key))
        acc = jnp.where(sees_first_key, 0, acc * acc_decay) + block_acc
        return None, (acc, new_max, row_sum * decay + weights.sum(-1).reshape(row_max.shape))

    chunks = scan_queries(rectangle.num_queries, merge_chunk, None)[1]
    return [join_chunks(x, d) for x, d in zip(chunks, _QUERY_DIMS, strict=True)]


def finish(q: jax.Array, acc: jax.Array, row_max: jax.Array, row_sum: jax.Array) -> tuple[jax.Array, Any]:
    """Return the result in the dtype of q, and m and l for the backward.

    A query that saw no key gets NaN, as from a softmax, or whatever the program makes of NaN.
    """
    row_sum = jnp.where(row_sum == 0, 1, row_sum)  # `acc` is NaN there already, or what the program makes of it
    return (acc / jnp.swapaxes(row_sum, 1, 2)[..., None]).astype(q.dtype), (_finite(row_max), row_sum)


def initial_gradients(q: jax.Array, rounds: Any, operands: Sequence[jax.Array], final: Any) -> tuple[jax.Array, ...]:
    """Return the gradients of queries and of float operands to which `backward` adds: zeros, but for the sink.

    `operands` are the operands of the score function, and `final` is as for `backward`.
    """
    sums = _zeros(q, *operands)
    if not rounds.options.function.sink:
        return sums
    # The sink is in no block. Its value is zero, so that its gradient is -P D.
    output, (row_max, row_sum), cotangent = final
    row_dots = (cotangent.astype(row_max.dtype) * output.astype(row_max.dtype)).sum(-1)
    sink = operands[-1].reshape(row_max.shape)
    return *sums[:-1], (-jnp.exp(sink - row_max) / row_sum * jnp.swapaxes(row_dots, 1, 2)).reshape(operands[-1].shape)


def _zeros(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Return zeros for the gradient of each array of floats, in the dtype of sums."""
    return tuple(jnp.zeros(x.shape, accumulation_dtype(x)) for x in arrays if _is_float(x))


def backward(
    rectangles: list[Rectangle], q: jax.Array, kv: jax.Array, final: tuple[jax.Array, Any, jax.Array], sums: Any
) -> tuple[Any, jax.Array]:
    """Compute the gradients of some rectangles.

    Args:
      rectangles, q, kv: as for `blocks.attend`.
      final: the result over all keys, its (m, l), and the cotangent of the result.
      sums: the gradients of queries and of float operands so far.

    Returns:
      `sums` with the gradients added, and the gradient of this block's keys and values [2, b, s, k, h].
    """
    (output, (row_max, row_sum), cotangent), (dq, *operand_sums) = final, sums
    dkv = jnp.zeros(kv.shape, accumulation_dtype(q))
    for rectangle in rectangles:
        k, v = rectangle.slice_keys(kv, 2)
        arrays_and_dims = ((q, 1), (output, 1), (cotangent, 1), (row_max, 2), (row_sum, 2))
        query_arrays = [rectangle.slice_queries(x, d) for x, d in arrays_and_dims]
        zeros = _zeros(k, v, *rectangle.score_block.operands)
        sums, d_queries = _rectangle_backward(rectangle, query_arrays, k, v, zeros)
        gradients = (d_queries, *sums)
        if rectangle.is_visible is not None:  # `where`, not a product: gradients of hidden keys may be infinite
            gradients = [jnp.where(rectangle.is_visible, x, 0) for x in gradients]
        d_queries, dk, dv, *d_operands = gradients
        dq = lax.dynamic_update_slice_in_dim(dq, rectangle.slice_queries(dq) + d_queries, rectangle.first_query, 1)
        dkv = lax.dynamic_update_slice_in_dim(
            dkv, rectangle.slice_keys(dkv, 2) + jnp.stack([dk, dv]), rectangle.first_key, 2
        )
        operand_sums = [x + y for x, y in zip(operand_sums, d_operands, strict=True)]
    return (dq, *operand_sums), dkv


def _rectangle_backward(
    rectangle: Rectangle, query_arrays: Sequence[jax.Array], k: jax.Array, v: jax.Array, sums: Any
) -> tuple[Any, jax.Array]:
    """Return `sums` with the gradients of keys, values and operands added, and the gradient of the queries.

    `query_arrays` are q, the output, its cotangent, m and l of the rectangle's queries.
    """
    block = rectangle.score_block
    floats = [*filter(_is_float, block.operands)]

    def backward_chunk(sums: Any, first: jax.Array, n: int) -> tuple[Any, jax.Array]:
        q, output, cotangent, row_max, row_sum = (
            slice_chunk(x, first, n, d) for x, d in zip(query_arrays, (1, 1, 1, 2, 2), strict=True)
        )
        arrays = [x.astype(accumulation_dtype(x)) for x in (q, k)]
        # 1. Recompute the weights from m and l.
        scores, scores_vjp = jax.vjp(lambda *x: block.scores(rectangle, first, *x), *arrays, *floats)
        per_score_row = lambda x: x.reshape(*scores.shape[:-1], 1)
        weights = jnp.exp(scores - per_score_row(row_max)) / per_score_row(row_sum)
        d_output, result = (_by_key_head(x, k).astype(scores.dtype) for x in (cotangent, output))
        row_dots = jnp.einsum("btkgh,btkgh->bkgt", d_output, result)[..., None]  # D of the equations
        # 2. Through the program of the weights.
        value_weights, weights_vjp = jax.vjp(lambda *x: block.weights(rectangle, first, *x), weights, *floats)
        d_weights, *d_weight_operands = weights_vjp(jnp.einsum("btkgh,bskh->bkgts", d_output, v.astype(scores.dtype)))
        # 3. Through the softmax and the program of the scores.
        dq, dk, *d_operands = scores_vjp(weights * (d_weights - row_dots))
        dv = jnp.einsum("bkgts,btkgh->bskh", value_weights, d_output)
        d_operands = [x + y for x, y in zip(d_operands, d_weight_operands, strict=True)]
        return tuple(x + y for x, y in zip(sums, (dk, dv, *d_operands), strict=True)), dq

    sums, dq_chunks = scan_queries(rectangle.num_queries, backward_chunk, sums)
    return sums, join_chunks(dq_chunks, 1)


def scored_attention(options: AttentionOptions, q: jax.Array, k: jax.Array, v: jax.Array, *operands: jax.Array) -> Any:
    """Compute softmax(f(q k^T)) v for whole sequences on one device, with all scores at once.

    Args:
      options: with the function of scores.
      q: float [b, t, H, h].
      k: same dtype, [b, s, k, h]; k divides H.
      v: as `k`.
      operands: the function's operands, whole, the numbers of heads first.

    Returns:
      [b, t, H, h] in the dtype of q.
    """
    positions = {side: jnp.arange(x.shape[1], dtype=jnp.int32) for side, x in (("t", q), ("s", k))}
    rectangle = Rectangle(0, 0, q.shape[1], k.shape[1])

    def attend_whole(q: jax.Array, k: jax.Array, v: jax.Array, *operands: jax.Array) -> jax.Array:
        block = ScoreBlock(options.function, positions, operands, 0)
        floats = [*filter(_is_float, operands)]
        scores = block.scores(rectangle, 0, q, k, *floats)
        sinks = [] if block.sink is None else [block.sink.reshape(*scores.shape[:-1], 1)]
        # The sink takes weight from the keys, and has no value.
        weights = jax.nn.softmax(jnp.concatenate([scores, *sinks], -1))[..., : scores.shape[-1]]
        weights = block.weights(rectangle, 0, weights, *floats)
        return jnp.einsum("bkgts,bskh->btkgh", weights, v.astype(weights.dtype)).reshape(q.shape).astype(q.dtype)

    # Scores are recomputed in the backward, so that none are residuals.
    return jax.checkpoint(attend_whole)(q, k, v, *operands)


_QUERY_DIMS = (1, 2, 2)  # the dim of queries in each array of the state: acc, m, l


def slice_chunk(x: jax.Array, first: jax.Array | int, n: int, dim: int = 1) -> jax.Array:
    """Return n entries of an array from `first` on, along a dim."""
    return lax.dynamic_slice_in_dim(x, first, n, dim)


def _by_key_head(q: jax.Array, k: jax.Array) -> jax.Array:
    """Reshape queries [b, t, H, h] to [b, t, k, g, h]."""
    return q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])


def _finite(x: jax.Array) -> jax.Array:
    """Replace infinities and NaN by 0: a maximum of -inf, over no key, is subtracted from scores as 0."""
    return jnp.where(jnp.isfinite(x), x, 0)


def _is_float(x: jax.Array) -> bool:
    """Whether an operand has a gradient."""
    return jnp.issubdtype(x.dtype, jnp.inexact)
