"""Attention of this rank's queries to the gathered keys and values of all ranks.

This is Llama 3's context parallelism (Grattafiori et al. 2024, arXiv:2407.21783, section 3.3.2):

    k, v [b, s/c, hkv, d]  --all-gather-->      K, V [b, s, hkv, d]   --attend-->  out [b, t/c, hq, d]
    dk, dv of this rank    <--reduce-scatter--  dK, dV of all keys    <--------    cotangent of out

Causal attention and attention within segments take the gathered keys rank by rank (`by_blocks`), with the rectangles of
`rounds.py`. Any other attention is one kernel over all keys: without either, with a mask, or with separate ids of keys.

Dims: b rows, t query positions, s key positions, c ranks, hq heads, hkv key/value heads, d head_dim.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ....collectives.nccl import all_gather, reduce_scatter
from ....collectives.ranks import Axes, count
from ..attention.flash import AttentionOptions
from ..attention.fused import attention_kernel, check_inputs
from .blocks import accumulation_dtype
from .order import Ring, check_order, from_zigzag, positions
from .rounds import Rounds


def gather_attention(
    ring: Ring, options: AttentionOptions, q: jax.Array, k: jax.Array, v: jax.Array, *ids_and_masks: jax.Array
) -> jax.Array:
    """Compute `jp.attention` of a sequence that is split over ranks, inside `shard_map`, from gathered keys.

    Sends, with e bytes an element: forward an all-gather of (c-1)/c 2 b s hkv d e; backward the reduce-scatter of its
    gradient, in float32. Holds all keys and values of a layer, 2 b s hkv d e.

    Args:
      ring: the ranks, and the positions that they hold, of queries and keys alike: see `positions`.
      options: the static options of the call. `implementation` is not used.
      q: float [b, t/c, hq, d], this rank's queries.
      k: same dtype, [b, s/c, hkv, d], this rank's keys; hkv divides hq (grouped-query attention).
      v: as `k`.
      ids_and_masks: what `options` say, in this order: the segments of queries, int [b, t/c]; those of keys, int
        [b, s/c], if they differ; and a mask, bool [b or 1, hq or 1, t/c or 1, s or 1]. Its rows are this rank's
        queries, in the order in which it holds them. Its columns are all keys, in the user's order.

    Returns:
      [b, t/c, hq, d], in the dtype of q; zeros for a query that sees no key. The softmax is float32.

    Raises:
      ValueError: shapes, dtypes or options do not fit.
    """
    ids, masks = ids_and_masks[: options.segments], ids_and_masks[options.segments :]
    axis, causal, window = ring.axis, options.causal, options.window
    check_inputs(options, q, k, v, *ids)
    check_order(ring.order, q, k)
    if (causal or ids) and q.shape[1] == k.shape[1] and len(ids) < 2 and not masks:
        # Ids of all ranks, [c, b, t/c]. Block by block, keys before a window (in plain order) and after a query (in
        # zigzag order) are not computed.
        all_ids = [all_gather(x[None], axis) for x in ids]
        return by_blocks(Rounds.of(ring, options, q, k), q, k, v, *all_ids)
    # Any other attention is one kernel over all keys, in the user's order.
    in_user_order = lambda x, dim: from_zigzag(x, count(axis), dim) if ring.order == "zigzag" else x
    keys, values = in_user_order(gather_kv(jnp.stack([k, v]), axis), 2)
    if ids:
        ids = ids[0], in_user_order(all_gather(ids[-1], axis, 1), 1)
    if causal:
        i, j = positions(q.shape[1], axis, ring.order)[:, None], jnp.arange(keys.shape[1])
        is_seen = (j <= i) if window is None else (j <= i) & (j > i - window)
        masks = (masks[0] & is_seen,) if masks else (is_seen[None, None],)
    # Causality is in the mask: the kernel's own would count this rank's queries from position 0.
    options = AttentionOptions(False, None, options.scale, None, len(ids), bool(masks))
    return attention_kernel(options, q, keys, values, *ids, *masks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def gather_kv(kv: jax.Array, axis: Axes) -> jax.Array:
    """All-gather keys and values [2, b, s/c, hkv, d] of all ranks along dim 2, in the order of the ranks.

    The backward reduce-scatters their gradients in float32, so that the sum over ranks does not round.
    """
    return all_gather(kv, axis, 2)


def _gather_kv_backward(axis: Axes, _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    return (reduce_scatter(cotangent.astype(jnp.float32), axis, 2).astype(cotangent.dtype),)


gather_kv.defvjp(lambda kv, axis: (gather_kv(kv, axis), None), _gather_kv_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def by_blocks(rounds: Rounds, q: jax.Array, k: jax.Array, v: jax.Array, *operands: jax.Array) -> jax.Array:
    """Attend to gathered keys and values, the block of one rank at a time.

    Only a rank's own block needs a causal mask. In zigzag order hidden rectangles are skipped; in plain order they are
    computed and dropped. Arguments and result are those of `ring.by_rounds`.
    """
    return _forward(rounds, q, k, v, *operands)[0]


def _forward(rounds: Rounds, q: jax.Array, k: jax.Array, v: jax.Array, *operands: jax.Array) -> tuple[jax.Array, Any]:
    """Return the result, and the residuals of the backward: the gathered keys and values are not gathered again."""
    kv = all_gather(jnp.stack([k, v])[None], rounds.ring.axis)  # [c, 2, b, s/c, hkv, d]
    # Round 0 is outside the loop: its step is a Python int, which selects the causal rectangle of a rank's own keys.
    block = lambda step: (rounds.rectangles(step, operands), q, kv[rounds.key_rank(step)])
    attend_round = lambda step, state: rounds.block_ops.attend(*block(step), state)
    state = lax.fori_loop(1, rounds.hops + 1, attend_round, attend_round(0, None))
    output, stats = rounds.block_ops.finish(q, *state)
    return output, (q, kv, operands, output, stats)


def _backward(rounds: Rounds, residuals: Any, cotangent: jax.Array) -> tuple[jax.Array | None, ...]:
    """Return the cotangents of `by_blocks`. Gradients of all keys add up here, and go home in one reduce-scatter."""
    q, kv, operands, output, stats = residuals
    final = (output, stats, cotangent)

    def backward_round(step: jax.Array | int, sums: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
        key_rank = rounds.key_rank(step)
        query_sums, block_dkv = rounds.block_ops.backward(
            rounds.rectangles(step, operands), q, kv[key_rank], final, sums[0]
        )
        return query_sums, lax.dynamic_update_index_in_dim(sums[1], block_dkv, key_rank, 0)

    # dkv [c, 2, b, s/c, hkv, d] stays zero for the blocks that no round visits, with a window.
    dkv = jnp.zeros(kv.shape, accumulation_dtype(q))
    first_sums = backward_round(0, (rounds.block_ops.initial_gradients(q, rounds, operands, final), dkv))
    sums, dkv = lax.fori_loop(1, rounds.hops + 1, backward_round, first_sums)
    return rounds.cotangents(q, sums, reduce_scatter(dkv, rounds.ring.axis)[0], operands)


by_blocks.defvjp(_forward, _backward)
