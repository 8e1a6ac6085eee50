"""Attention of this rank's queries over the gathered keys and values of all ranks (Llama 3's way: Grattafiori et al.
2024, arXiv:2407.21783, section 3.3.2).

Dims: b rows, t query positions, s key positions, c ranks, hq heads, hkv key/value heads, d head_dim.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ....collectives.nccl import all_gather, reduce_scatter
from ....collectives.ranks import Axes, count
from ..attention.fused import attention, check_inputs
from .blocks import dtype_of_sums
from .order import Order, check_order, from_zigzag, positions
from .rounds import Rounds


def gather_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    axis: Axes,
    causal: bool,
    window: int | None = None,
    mask: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    scale: float | None = None,
    order: Order = "plain",
) -> jax.Array:
    """`jp.attention` where the sequence is split over `axis`, inside `shard_map`: queries stay, keys and values come.

    Sends, with e bytes an element: forward an all-gather of (c-1)/c 2 b s hkv d e; backward the reduce-scatter of its
    gradient, in float32. Holds all keys and values of a layer, 2 b s hkv d e.

    Args:
      q: float [b, t/c, hq, d], this rank's queries.
      k: same dtype, [b, s/c, hkv, d], this rank's keys; hkv divides hq (grouped-query attention).
      v: as `k`.
      axis: the mesh axis of c ranks.
      causal: position i sees keys 0 to i; t = s.
      window: position i sees keys i - window + 1 to i only; needs `causal`.
      mask: bool [b or 1, hq or 1, t/c or 1, s or 1], True where a query may see a key: this rank's queries, in the
        order in which it holds them, and all keys in the user's order, whatever `order` is.
      segment_ids: int [b, t/c]; a query sees keys of its own id only.
      kv_segment_ids: int [b, s/c], of the keys; `segment_ids` if None.
      scale: a number; 1 / sqrt(d) if None.
      order: which positions ranks hold, of queries and keys alike: see `positions`.

    Returns:
      [b, t/c, hq, d], in the dtype of q; zeros for a query that sees no key. The softmax is float32.

    Raises:
      ValueError: shapes, dtypes or options do not fit.
    """
    check_inputs(q, k, v, causal, window, segment_ids, kv_segment_ids, scale)
    check_order(order, q, k)
    if (causal or segment_ids is not None) and q.shape[1] == k.shape[1] and kv_segment_ids is mask is None:
        ids = () if segment_ids is None else (all_gather(segment_ids[None], axis),)  # [c, b, t/c]
        return by_blocks(Rounds.of(q, k, axis, causal, window, scale, order), q, k, v, *ids)
    c = count(axis)
    whole: jax.Array = gathered(jnp.stack([k, v]), axis)
    keys, values = from_zigzag(whole, c, 2) if order == "zigzag" else whole
    if segment_ids is not None:
        ids = all_gather(segment_ids if kv_segment_ids is None else kv_segment_ids, axis, 1)
        kv_segment_ids = from_zigzag(ids, c) if order == "zigzag" else ids
    if causal:
        i, j = positions(q.shape[1], axis, order)[:, None], jnp.arange(keys.shape[1])
        seen = (j <= i) if window is None else (j <= i) & (j > i - window)
        mask = seen[None, None] if mask is None else mask & seen
    among = functools.partial(attention, segment_ids=segment_ids, kv_segment_ids=kv_segment_ids)
    return among(q, keys, values, causal=False, mask=mask, scale=scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def gathered(kv: jax.Array, axis: Axes) -> jax.Array:
    """Keys and values [2, b, s/c, hkv, d] of all ranks, one rank after the other. Their gradients add up in float32."""
    return all_gather(kv, axis, 2)


def _back(axis: Axes, _: None, given: jax.Array) -> tuple[jax.Array]:
    return (reduce_scatter(given.astype(jnp.float32), axis, 2).astype(given.dtype),)


gathered.defvjp(lambda kv, axis: (gathered(kv, axis), None), _back)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def by_blocks(rounds: Rounds, q: jax.Array, k: jax.Array, v: jax.Array, *ids: jax.Array) -> jax.Array:
    """Rank by rank: whole kernels for what is wholly seen, and none for what is hidden; in zigzag order no masks. `ids`
    are as of `by_rounds`.
    """
    return _forward(rounds, q, k, v, *ids)[0]


def _forward(rounds: Rounds, q: jax.Array, k: jax.Array, v: jax.Array, *ids: jax.Array) -> tuple[jax.Array, Any]:
    whole = all_gather(jnp.stack([k, v])[None], rounds.axis)  # [c, 2, b, t/c, hkv, d]
    so_far = rounds.blocks.attend(rounds.parts(0, ids), q, whole[rounds.whose(0)], None)
    turn = lambda step, so_far: rounds.blocks.attend(rounds.parts(step, ids), q, whole[rounds.whose(step)], so_far)
    out, total = rounds.blocks.finish(q, *lax.fori_loop(1, rounds.hops + 1, turn, so_far))
    return out, (q, whole, ids, out, total)


def _backward(rounds: Rounds, kept: Any, given: jax.Array) -> tuple[jax.Array | None, ...]:
    q, whole, ids, out, total = kept

    def turn(step: jax.Array | int, sums: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
        whose = rounds.whose(step)
        mine, own = rounds.blocks.pull(rounds.parts(step, ids), q, whole[whose], (out, total, given), sums[0])
        return mine, lax.dynamic_update_index_in_dim(sums[1], own, whose, 0)

    first = turn(
        0, (rounds.blocks.nothing(q, rounds, ids, (out, total, given)), jnp.zeros(whole.shape, dtype_of_sums(q)))
    )
    sums, dkv = lax.fori_loop(1, rounds.hops + 1, turn, first)
    return rounds.cotangents(q, sums, reduce_scatter(dkv, rounds.axis)[0], ids)


by_blocks.defvjp(_forward, _backward)
