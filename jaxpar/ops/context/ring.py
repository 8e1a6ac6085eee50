"""Ring attention: keys and values move from rank to rank, and each block is computed while the next one is under way
(Liu et al. 2023, arXiv:2310.01889).

    step 0        own keys; causal
    step r        keys of rank i - r, which came by r hops, while those of step r + 1 come
    backward      the same hops, and behind each block of keys its gradient, which goes home at the end

What a step computes under causality, of two chunks of queries (rows) on rank 1 of 4, whose chunks are 1 and 6:

    keys of rank       1           0           3           2
    zigzag            1 6         0 7         3 4         2 5
                 1    \\ .         x .         . .         . .
                 6    x \\         x .         x x         x x

Two of the four squares in every step and on every rank. In plain order a step is all or nothing, and ranks wait for
the one that has all: c + 1 of 2c squares are computed in vain.

Dims: b rows, t positions, c ranks, hq heads, hkv key/value heads, d head_dim.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ...collectives.nccl import all_gather, shift
from ...collectives.ranks import Axes, count, index
from ..flash import AttentionOptions
from .blocks import Part, attend, finish, pull
from .given import check
from .order import Order, positions


def ring_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    axis: Axes,
    causal: bool,
    window: int | None = None,
    segment_ids: jax.Array | None = None,
    scale: float | None = None,
    order: Order = "plain",
) -> jax.Array:
    """`jp.attention` where the sequence is split over `axis`, inside `shard_map`: keys and values go round the ranks.

    Sends, with e bytes an element, permutes of keys and values: forward 2 (c-1) b (t/c) hkv d e, backward the same and
    for their gradients, in float32, 2 c b (t/c) hkv d 4. A window in plain order needs `ring_hops` in place of c - 1.
    Holds two blocks of keys and values, b (t/c) hkv d each, and backward two of their gradients; kept for the backward
    are q, k, v, the result, and float32 [b, hq, t/c]. Segments, and a window past a rank's own block, cost cuDNN a
    bias [b or 1, 1, t/c, t/c] (zigzag: of half the positions) in the dtype of q.

    Args:
      q: float [b, t/c, hq, d], this rank's queries.
      k: same dtype, [b, t/c, hkv, d], this rank's keys; hkv divides hq (grouped-query attention).
      v: as `k`.
      axis: the mesh axis of c ranks.
      causal: position i sees keys 0 to i.
      window: position i sees keys i - window + 1 to i only; needs `causal`. Hops are saved in plain order alone.
      segment_ids: int [b, t/c]; a query sees keys of its own id only. All ranks' ids are gathered.
      scale: a number; 1 / sqrt(d) if None.
      order: which positions ranks hold: see `positions`. Causal work is balanced in zigzag order.

    Returns:
      [b, t/c, hq, d], in the dtype of q; zeros for a query that sees no key. The softmax is float32.

    Raises:
      ValueError: shapes, dtypes or options do not fit; keys of another length, for which there is `gather_attention`.
    """
    check(
        q,
        k,
        v,
        causal=causal,
        window=window,
        segment_ids=segment_ids,
        kv_segment_ids=None,
        scale=scale,
        order=order,
    )
    if q.shape[1] != k.shape[1]:
        raise ValueError(
            f"ring_attention of {q.shape[1]} queries and {k.shape[1]} keys a rank; use gather_attention for keys of "
            "another length"
        )
    c, t = count(axis), q.shape[1]
    window = None if window is None or window >= c * t else window
    hops = ring_hops(t, c, window) if order == "plain" else c - 1
    rounds = Rounds(axis, c, t, hops, causal, window, None if scale is None else float(scale), order)
    ids = () if segment_ids is None else (all_gather(segment_ids[None], axis),)  # [c, b, t/c]
    return _ring(rounds, q, k, v, *ids)


def ring_hops(block: int, ranks: int, window: int | None = None) -> int:
    """How often keys are passed on in plain order: until the window of a rank's first query is behind.

    >>> ring_hops(4096, 8), ring_hops(4096, 8, window=4097), ring_hops(4096, 8, window=4098)
    (7, 1, 2)
    """
    return ranks - 1 if window is None else min(ranks - 1, -(-(window - 1) // block))


@dataclass(frozen=True)
class Rounds:
    """What is static in a call: the hops, and which part of each block counts."""

    axis: Axes
    ranks: int
    length: int  # positions of a block
    hops: int
    causal: bool
    window: int | None
    scale: float | None
    order: Order

    def parts(self, step: jax.Array | int, ids: tuple[jax.Array, ...]) -> list[Part]:
        """What this rank's queries see of the keys that came by `step` hops; 0, a Python int, for its own."""
        own, t, half = isinstance(step, int) and step == 0, self.length, self.length // 2
        if own or not self.causal:
            return [self._part(step, ids, 0, 0, t, self.causal)]
        earlier = index(self.axis) >= step  # keys of an earlier rank
        if self.order == "plain":
            return [self._part(step, ids, 0, 0, t, False, earlier)]
        # The second chunk sees every first one; then the first the first, or the second the second.
        either = jnp.where(earlier, 0, half)
        return [self._part(step, ids, half, 0, half, False), self._part(step, ids, either, either, half, False)]

    def _part(
        self,
        step: jax.Array | int,
        ids: tuple[jax.Array, ...],
        query: jax.Array | int,
        key: jax.Array | int,
        size: int,
        causal: bool,
        there: jax.Array | None = None,
    ) -> Part:
        in_kernel = self.window if causal and self.order == "plain" else None
        rank = index(self.axis)
        whose = (rank - step) % self.ranks
        part = Part(
            query, key, size, size, AttentionOptions(causal, in_kernel, self.scale, None, 0, False), None, there
        )
        seen = None
        if self.window is not None and in_kernel is None:
            of = lambda rank: positions(self.length, self.axis, self.order, rank)
            seen = (part.of_queries(of(rank), 0)[:, None] - part.of_keys(of(whose), 0) < self.window)[None]
        if ids:
            queries, keys = (ids[0][i] for i in (rank, whose))
            alike = part.of_queries(queries)[:, :, None] == part.of_keys(keys)[:, None]
            seen = alike if seen is None else alike & seen
        if seen is None:
            return part
        options = AttentionOptions(causal, in_kernel, self.scale, None, 0, True)
        return Part(query, key, size, size, options, seen[:, None], there)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(rounds: Rounds, q: jax.Array, k: jax.Array, v: jax.Array, *ids: jax.Array) -> jax.Array:
    return _forward(rounds, q, k, v, *ids)[0]


def _forward(rounds: Rounds, q: jax.Array, k: jax.Array, v: jax.Array, *ids: jax.Array) -> tuple[jax.Array, Any]:
    kv, so_far = jnp.stack([k, v]), None
    if rounds.hops:
        ahead = shift(kv, rounds.axis, 1)
        so_far = attend(rounds.parts(0, ids), q, kv, None)

        def turn(carry: Any, step: jax.Array) -> tuple[Any, None]:
            kv, so_far = carry
            ahead = shift(kv, rounds.axis, 1)
            return (ahead, attend(rounds.parts(step, ids), q, kv, so_far)), None

        (kv, so_far), _ = lax.scan(turn, (ahead, so_far), jnp.arange(1, rounds.hops))
    out, total = finish(q, *attend(rounds.parts(rounds.hops, ids), q, kv, so_far))
    return out, (q, k, v, ids, out, total)


def _backward(rounds: Rounds, kept: Any, given: jax.Array) -> tuple[jax.Array | None, ...]:
    q, k, v, ids, out, total = kept
    kv, final, dq = jnp.stack([k, v]), (out, total, given), jnp.zeros(q.shape, total.dtype)
    if not rounds.hops:
        dq, dkv = pull(rounds.parts(0, ids), q, kv, final, dq)
    else:
        ahead = shift(kv, rounds.axis, 1)
        dq, dkv = pull(rounds.parts(0, ids), q, kv, final, dq)

        def turn(carry: Any, step: jax.Array) -> tuple[Any, None]:
            kv, dq, dkv = carry
            ahead = shift(kv, rounds.axis, 1)
            # The gradients of these keys that other ranks have found come while this rank's are computed.
            arriving = shift(dkv, rounds.axis, 1)
            dq, own = pull(rounds.parts(step, ids), q, kv, final, dq)
            return (ahead, dq, arriving + own), None

        (kv, dq, dkv), _ = lax.scan(turn, (ahead, dq, dkv), jnp.arange(1, rounds.hops))
        arriving = shift(dkv, rounds.axis, 1)
        dq, own = pull(rounds.parts(rounds.hops, ids), q, kv, final, dq)
        dkv = shift(arriving + own, rounds.axis, -rounds.hops)
    return (*(x.astype(q.dtype) for x in (dq, *dkv)), *(None for _ in ids))


_ring.defvjp(_forward, _backward)
