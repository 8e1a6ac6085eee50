"""Attention by heads: an all-to-all gives each rank whole sequences of some heads (Jacobs et al. 2023, DeepSpeed
Ulysses, arXiv:2309.14509); and where heads are few, longer parts of sequences, which then go round a ring (Fang and
Zhao 2024, A Unified Sequence Parallelism Approach for Long Context Generative AI, arXiv:2405.07719).

Dims: b rows, t query positions, s key positions, c ranks, u of them in a group, hq heads, hkv key/value heads, d
head_dim.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from ....collectives.nccl import all_to_all
from ....collectives.ranks import Axes, count, spanned
from ..attention.fused import attention, check_inputs
from .order import Order, check_order, from_zigzag, to_zigzag
from .ring import by_rounds, ids_of_all
from .rounds import Rounds


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
      k, v, axis, causal, window, scale, order: as of `gather_attention`.
      segment_ids, kv_segment_ids: likewise; all ranks' ids are gathered.

    Returns:
      As `gather_attention`.

    Raises:
      ValueError: shapes, dtypes or options do not fit; or c does not divide hq.
    """
    check_inputs(q, k, v, causal, window, segment_ids, kv_segment_ids, scale)
    check_order(order, q, k)
    c, heads = count(axis), q.shape[2]
    if heads % c:
        raise ValueError(
            f"{c} ranks do not divide {heads} query heads; use ring_attention or gather_attention, or fewer ranks"
        )
    restored = lambda x: from_zigzag(x, c) if order == "zigzag" else x
    whole = lambda x: restored(jnp.swapaxes(x, 0, 1).reshape(x.shape[1], -1))
    ids = dict(
        zip(("segment_ids", "kv_segment_ids"), map(whole, ids_of_all(axis, segment_ids, kv_segment_ids)), strict=False)
    )
    among = functools.partial(attention, **ids)
    among = functools.partial(among, causal=causal, window=window, scale=scale)
    return exchanged(among, q, k, v, axis=axis, group=c, order=order)


def usp_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    axis: Axes,
    group: int,
    causal: bool,
    window: int | None = None,
    segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    scale: float | None = None,
    order: Order = "plain",
) -> jax.Array:
    """`jp.attention` where the sequence is split over `axis`, inside `shard_map`: `group` ranks next to each other
    exchange positions for heads, and keys and values go round the c / group groups.

    ```
    6 ranks, groups of 2, 2 heads, plain order       exchanged: all positions of the group, of one head
    rank       0   1 | 2   3 | 4   5                  0    1  |  2    3  |  4    5
    positions  a   b | c   d | e   f                  ab   ab |  cd   cd |  ef   ef      rings 0 -> 2 -> 4, 1 -> 3 -> 5
    ```

    Sends, with e bytes an element: all-to-alls in groups of u, (u-1)/u (2 hq t + 2 hkv s) b d e / c in all, backward
    the same; and what `ring_attention` of c/u ranks sends, s/c positions of hkv heads a hop: 2 (c/u - 1) b (s/c) hkv d
    e forward. Holds what the ring holds.

    Args:
      q, k, v, axis, causal, window, segment_ids, kv_segment_ids, scale: as of `ring_attention`.
      group: u, how many ranks share heads; it divides c, hq and hkv.
      order: likewise. In zigzag order a group has the two chunks that a rank of a ring of c / u has, in parts.

    Returns:
      As `gather_attention`.

    Raises:
      ValueError: shapes, dtypes or options do not fit; or `group` does not divide ranks and heads.
    """
    check_inputs(q, k, v, causal, window, segment_ids, kv_segment_ids, scale)
    check_order(order, q, k)
    c, heads, groups = count(axis), q.shape[2], k.shape[2]
    if group < 1 or any(n % group for n in (c, heads, groups)):
        raise ValueError(
            f"groups of {group} of {c} ranks for {heads} query and {groups} key heads; use a divisor of ranks and "
            "heads, or ring_attention"
        )

    def by_groups(ids: jax.Array) -> jax.Array:
        every = ids.reshape(c // group, group, *ids.shape[1:])
        every = jnp.moveaxis(every, 1, 2).reshape(c // group, ids.shape[1], -1)
        return jax.vmap(lambda x: from_zigzag(x, group))(every) if order == "zigzag" else every

    ids = map(by_groups, ids_of_all(axis, segment_ids, kv_segment_ids))

    def among(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return by_rounds(Rounds.of(q, k, axis, causal, window, scale, order, group), q, k, v, *ids)

    return exchanged(among, q, k, v, axis=axis, group=group, order=order)


def exchanged(
    among: Callable[..., jax.Array], q: jax.Array, k: jax.Array, v: jax.Array, *, axis: Axes, group: int, order: Order
) -> jax.Array:
    """`among` of the positions of `group` ranks next to each other and some of the heads, in place of a rank's own
    positions and all heads, and back. Key heads are repeated until the group divides them.
    """
    # In zigzag order a group's first chunks follow each other, and so do its second ones, from its last rank to its
    # first.
    kv = jnp.repeat(jnp.concatenate([k, v], -1), group // math.gcd(group, k.shape[2]), axis=2)
    q, kv = (_among(x, axis, group, 2, 1) for x in (q, kv))
    q, kv = (from_zigzag(x, group) for x in (q, kv)) if order == "zigzag" else (q, kv)
    out = among(q, *jnp.split(kv, 2, axis=-1))
    return _among(to_zigzag(out, group) if order == "zigzag" else out, axis, group, 1, 2)


def _among(x: jax.Array, axis: Axes, group: int, dim: int, into: int) -> jax.Array:
    """An all-to-all among `group` ranks that are next to each other."""
    if group == count(axis):
        return all_to_all(x, axis, dim, into=into)
    ranks = [[*range(first, first + group)] for first in range(0, count(axis), group)]
    return lax.all_to_all(x, spanned(axis), dim, into, axis_index_groups=ranks, tiled=True) if group > 1 else x
