"""Attention by heads: an all-to-all gives each rank whole sequences of some heads (Jacobs et al. 2023, DeepSpeed
Ulysses, arXiv:2309.14509).

Dims: b rows, t query positions, s key positions, c ranks, hq heads, hkv key/value heads, d head_dim.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from ...collectives.nccl import all_gather, all_to_all
from ...collectives.ranks import Axes, count
from ..attention import attention
from .given import check_inputs
from .order import Order, from_zigzag, to_zigzag


def ulysses_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    axis: Axes,
    causal: bool,
    window: int | None = None,
    segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    scale: float | None = None,
    order: Order = "plain",
) -> jax.Array:
    """`jp.attention` where the sequence is split over `axis`, inside `shard_map`: heads are split instead.

    Sends, with e bytes an element: all-to-alls of q, of k and v together, and of the result, (c-1)/c (2 hq t + 2 hkv s)
    b d e / c in all, backward the same. Where c does not divide hkv, key heads are repeated until it does: lcm(c, hkv)
    stands for hkv.

    Args:
      q: float [b, t/c, hq, d], this rank's queries; c divides hq.
      k: same dtype, [b, s/c, hkv, d], this rank's keys; hkv divides hq (grouped-query attention).
      v: as `k`.
      axis: the mesh axis of c ranks.
      causal: position i sees keys 0 to i; t = s.
      window: position i sees keys i - window + 1 to i only; needs `causal`.
      segment_ids: int [b, t/c]; a query sees keys of its own id only. All ranks' ids are gathered.
      kv_segment_ids: int [b, s/c], of the keys; `segment_ids` if None.
      scale: a number; 1 / sqrt(d) if None.
      order: which positions ranks hold, of queries and keys alike: see `positions`.

    Returns:
      [b, t/c, hq, d], in the dtype of q; zeros for a query that sees no key.

    Raises:
      ValueError: shapes, dtypes or options do not fit; or c does not divide hq.
    """
    check_inputs(
        q,
        k,
        v,
        causal=causal,
        window=window,
        segment_ids=segment_ids,
        kv_segment_ids=kv_segment_ids,
        scale=scale,
        order=order,
    )
    c, heads, groups = count(axis), q.shape[2], k.shape[2]
    if heads % c:
        raise ValueError(
            f"{c} ranks do not divide {heads} query heads; use ring_attention or gather_attention, or fewer ranks"
        )
    kv = jnp.repeat(jnp.concatenate([k, v], -1), c // math.gcd(c, groups), axis=2)
    zigzag = order == "zigzag"
    restored = lambda x: from_zigzag(x, c) if zigzag else x
    q, kv = (restored(all_to_all(x, axis, 2, into=1)) for x in (q, kv))
    segment_ids, kv_segment_ids = (
        None if x is None else restored(all_gather(x, axis, 1)) for x in (segment_ids, kv_segment_ids)
    )
    keys, values = jnp.split(kv, 2, axis=-1)
    among = functools.partial(attention, segment_ids=segment_ids, kv_segment_ids=kv_segment_ids)
    out = among(q, keys, values, causal=causal, window=window, scale=scale)
    return all_to_all(to_zigzag(out, c) if zigzag else out, axis, 1, into=2)
