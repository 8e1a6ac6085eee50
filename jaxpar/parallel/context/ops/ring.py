r"""Ring attention: keys and values move from rank to rank, each block being computed while the next is under way
(Liu et al. 2023, arXiv:2310.01889).

    step 0        own keys; causal
    step r        keys of rank i - r, which came by r hops, while those of step r + 1 come
    backward      the same hops, and behind each block of keys its gradient, which goes home at the end

What a step computes under causality, of two chunks of queries (rows) on rank 1 of 4, whose chunks are 1 and 6:

    keys of rank       1           0           3           2
    zigzag            1 6         0 7         3 4         2 5
                 1    \ .         x .         . .         . .
                 6    x \         x .         x x         x x

Two of the four squares in every step and on every rank. In plain order a step is all or nothing, and every rank
computes what the last one needs: of c blocks in all, (c + 1) / 2 on average are of use.

Dims: b rows, t query positions, s key positions, c ranks, hq heads, hkv key/value heads, d head_dim.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ....collectives.nccl import all_gather
from ....collectives.ranks import Axes
from ..attention.fused import check_inputs
from .order import Order, check_order
from .rounds import Rounds


def ring_attention(
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
    """`jp.attention` where the sequence is split over `axis`, inside `shard_map`: keys and values go round the ranks.

    Sends, with e bytes an element, permutes of keys and values: forward 2 (c-1) b (s/c) hkv d e, backward the same and
    for their gradients, in float32, 2 c b (s/c) hkv d 4. A window in plain order needs `ring_hops` in place of c - 1.
    Holds two blocks of keys and values, b (s/c) hkv d each, and backward two of their gradients; kept for the backward
    are q, k, v, the result, and float32 [b, hq, t/c]. Segments, and a window past a rank's own block, cost cuDNN a
    bias [b or 1, 1, t/c, s/c] (zigzag: of half the positions) in the dtype of q.

    Args:
      q, k, v, axis, causal, scale: as of `gather_attention`.
      window: likewise; hops are saved in plain order alone.
      segment_ids, kv_segment_ids: likewise; all ranks' ids are gathered.
      order: likewise; causal work is balanced in zigzag order.

    Returns:
      As `gather_attention`.

    Raises:
      ValueError: shapes, dtypes or options do not fit.
    """
    check_inputs(q, k, v, causal, window, segment_ids, kv_segment_ids, scale)
    check_order(order, q, k)
    ids = ids_of_all(axis, segment_ids, kv_segment_ids)
    return by_rounds(Rounds.of(q, k, axis, causal, window, scale, order), q, k, v, *ids)


def ids_of_all(axis: Axes, *ids: jax.Array | None) -> list[jax.Array]:
    """[ranks, b, t/c] of each that is there [b, t/c]; gathered at once, since two gathers would meet in no order."""
    there = [x for x in ids if x is not None]
    ends = [*itertools.accumulate(x.shape[1] for x in there)]
    return jnp.split(all_gather(jnp.concatenate(there, 1)[None], axis), ends[:-1], 2) if there else []


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def by_rounds(rounds: Rounds, q: jax.Array, k: jax.Array, v: jax.Array, *ids: jax.Array) -> jax.Array:
    """The hops around the rounds. `ids` are those of all ranks on the ring, int [ranks, b, t/c], and those of keys
    that have others, [ranks, b, s/c]; or the operands of the rounds' function of scores.
    """
    return _forward(rounds, q, k, v, *ids)[0]


def _forward(rounds: Rounds, q: jax.Array, k: jax.Array, v: jax.Array, *ids: jax.Array) -> tuple[jax.Array, Any]:
    kv, so_far = jnp.stack([k, v]), None
    if rounds.hops:
        ahead = rounds.passed(kv)
        so_far = rounds.blocks.attend(rounds.parts(0, ids), q, kv, None)

        def turn(carry: Any, step: jax.Array) -> tuple[Any, None]:
            kv, so_far = carry
            ahead = rounds.passed(kv)
            return (ahead, rounds.blocks.attend(rounds.parts(step, ids), q, kv, so_far)), None

        (kv, so_far), _ = lax.scan(turn, (ahead, so_far), jnp.arange(1, rounds.hops))
    out, total = rounds.blocks.finish(q, *rounds.blocks.attend(rounds.parts(rounds.hops, ids), q, kv, so_far))
    return out, (q, k, v, ids, out, total)


def _backward(rounds: Rounds, kept: Any, given: jax.Array) -> tuple[jax.Array | None, ...]:
    q, k, v, ids, out, total = kept
    kv, final = jnp.stack([k, v]), (out, total, given)
    sums = rounds.blocks.nothing(q, rounds, ids, final)
    if not rounds.hops:
        sums, dkv = rounds.blocks.pull(rounds.parts(0, ids), q, kv, final, sums)
    else:
        ahead = rounds.passed(kv)
        sums, dkv = rounds.blocks.pull(rounds.parts(0, ids), q, kv, final, sums)

        def turn(carry: Any, step: jax.Array) -> tuple[Any, None]:
            kv, sums, dkv = carry
            # What other ranks have found of these keys' gradients comes while this rank's part is computed.
            ahead, arriving = _passed_together(rounds, kv, dkv)
            sums, own = rounds.blocks.pull(rounds.parts(step, ids), q, kv, final, sums)
            return (ahead, sums, arriving + own), None

        (kv, sums, dkv), _ = lax.scan(turn, (ahead, sums, dkv), jnp.arange(1, rounds.hops))
        arriving = rounds.passed(dkv)
        sums, own = rounds.blocks.pull(rounds.parts(rounds.hops, ids), q, kv, final, sums)
        dkv = rounds.passed(arriving + own, -rounds.hops)
    return rounds.cotangents(q, sums, dkv, ids)


def _passed_together(rounds: Rounds, kv: jax.Array, dkv: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both one rank on in one permute: XLA's GPU scheduler overlaps one of two, and exposed the other."""
    if kv.dtype == dkv.dtype:
        moved = rounds.passed(jnp.stack([kv, dkv]))
        return moved[0], moved[1]
    # As bits: on CPUs XLA moves bfloat16 as float32, which need not keep what is no number.
    bits = jnp.dtype(f"uint{8 * kv.dtype.itemsize}")
    narrow, wide = (lax.bitcast_convert_type(x, bits) for x in (kv, dkv))
    moved = rounds.passed(jnp.concatenate([narrow[..., None], wide], -1))
    return lax.bitcast_convert_type(moved[..., 0], kv.dtype), lax.bitcast_convert_type(moved[..., 1:], dkv.dtype)


by_rounds.defvjp(_forward, _backward)
