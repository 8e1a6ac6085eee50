r"""Ring attention: keys and values move from rank to rank, and each block is computed while the next one is under way.

(Liu et al. 2023, arXiv:2310.01889.) On rank i of c:

    step 0        attend to the rank's own keys; causal
    step r        attend to the keys of rank i - r, which came by r hops, while the keys of step r + 1 arrive
    backward      the same hops; the gradient of each block of keys follows its keys, and goes home at the end

The rectangles that a step computes under causality, for the two chunks of queries (rows) on rank 1 of 4, which holds
chunks 1 and 6 in zigzag order:

    keys of rank       1           0           3           2
    zigzag            1 6         0 7         3 4         2 5
                 1    \ .         x .         . .         . .
                 6    x \         x .         x x         x x

Two of the four squares are visible, in every step and on every rank. In plain order all or none of a step is visible,
and every rank computes as many blocks as the last rank needs: of c blocks, (c + 1) / 2 on average are useful.

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
from ..attention.flash import AttentionOptions
from ..attention.fused import check_inputs
from .order import Ring, check_order
from .rounds import Rounds


def ring_attention(
    ring: Ring, options: AttentionOptions, q: jax.Array, k: jax.Array, v: jax.Array, *ids: jax.Array
) -> jax.Array:
    """Compute `jp.attention` of a sequence that is split over a ring of ranks, inside `shard_map`.

    Sends, with e bytes an element, permutes of keys and values: forward 2 (c-1) b (s/c) hkv d e, backward the same and
    for their gradients, in float32, 2 c b (s/c) hkv d 4. With a window in plain order there are `ring_hops` hops
    instead of c - 1.

    Holds two blocks of keys and values, b (s/c) hkv d each, and backward two of their gradients. The residuals are q,
    k, v, the result, and float32 [b, hq, t/c]. Segments, and a window past a rank's own block, cost cuDNN a bias
    [b or 1, 1, t/c, s/c] (in zigzag order for half the positions) in the dtype of q.

    Args:
      ring: the ranks. Zigzag order balances causal work, but a window saves hops in plain order only.
      options, q, k, v: as for `gather_attention`.
      ids: the segments of this rank's queries and keys, as for `gather_attention`; the ids of all ranks are gathered.

    Returns:
      [b, t/c, hq, d], as from `gather_attention`.

    Raises:
      ValueError: shapes, dtypes or options do not fit.
    """
    check_inputs(options, q, k, v, *ids)
    check_order(ring.order, q, k)
    return by_rounds(Rounds.of(ring, options, q, k), q, k, v, *gather_ids(ring.axis, *ids))


def gather_ids(axis: Axes, *ids: jax.Array) -> list[jax.Array]:
    """All-gather each [b, t/c] to [ranks, b, t/c].

    One all-gather moves all of them, since ids are few bytes, and each collective has its latency.
    """
    ends = [*itertools.accumulate(x.shape[1] for x in ids)]
    return jnp.split(all_gather(jnp.concatenate(ids, 1)[None], axis), ends[:-1], 2) if ids else []


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def by_rounds(rounds: Rounds, q: jax.Array, k: jax.Array, v: jax.Array, *operands: jax.Array) -> jax.Array:
    """Attend to the keys and values of all ranks on a ring, one hop a round.

    Args:
      rounds: the hops, and the rectangles of each round.
      q: [b, t/c, hq, d], this rank's queries.
      k: [b, s/c, hkv, d], this rank's keys.
      v: as `k`.
      operands: the segments of all ranks on the ring, int [ranks, b, t/c], and those of keys, [ranks, b, s/c], if they
        differ; or the operands of the function of scores.

    Returns:
      [b, t/c, hq, d], in the dtype of q.
    """
    return _forward(rounds, q, k, v, *operands)[0]


def _forward(rounds: Rounds, q: jax.Array, k: jax.Array, v: jax.Array, *operands: jax.Array) -> tuple[jax.Array, Any]:
    """Return the result, and the residuals of the backward: this rank's own keys and values alone, not those passed."""
    kv, state = jnp.stack([k, v]), None
    if rounds.hops:
        # In each round the permute is issued before the compute that it overlaps with.
        next_kv = rounds.ring.shift(kv)
        state = rounds.block_ops.attend(rounds.rectangles(0, operands), q, kv, None)

        def attend_round(carry: Any, step: jax.Array) -> tuple[Any, None]:
            kv, state = carry
            next_kv = rounds.ring.shift(kv)
            return (next_kv, rounds.block_ops.attend(rounds.rectangles(step, operands), q, kv, state)), None

        (kv, state), _ = lax.scan(attend_round, (next_kv, state), jnp.arange(1, rounds.hops))
    # The last round is outside the loop, since it passes nothing on.
    output, stats = rounds.block_ops.finish(
        q, *rounds.block_ops.attend(rounds.rectangles(rounds.hops, operands), q, kv, state)
    )
    return output, (q, k, v, operands, output, stats)


def _backward(rounds: Rounds, residuals: Any, cotangent: jax.Array) -> tuple[jax.Array | None, ...]:
    """Return the cotangents of `by_rounds`.

    Keys take the same hops as in the forward. The gradient of a block is one hop behind its keys: a rank receives it
    from the rank before it, and adds its own part.
    """
    q, k, v, operands, output, stats = residuals
    kv, final = jnp.stack([k, v]), (output, stats, cotangent)
    sums = rounds.block_ops.initial_gradients(q, rounds, operands, final)
    if not rounds.hops:
        sums, dkv = rounds.block_ops.backward(rounds.rectangles(0, operands), q, kv, final, sums)
    else:
        # 1. Own keys. Their gradient stays until the next round's permute.
        next_kv = rounds.ring.shift(kv)
        sums, dkv = rounds.block_ops.backward(rounds.rectangles(0, operands), q, kv, final, sums)

        # 2. Keys of other ranks.
        def backward_round(carry: Any, step: jax.Array) -> tuple[Any, None]:
            kv, sums, dkv = carry
            # The part that earlier ranks added to these keys' gradient arrives while this rank computes its own part.
            next_kv, arriving_dkv = _shift_together(rounds, kv, dkv)
            sums, block_dkv = rounds.block_ops.backward(rounds.rectangles(step, operands), q, kv, final, sums)
            return (next_kv, sums, arriving_dkv + block_dkv), None

        (kv, sums, dkv), _ = lax.scan(backward_round, (next_kv, sums, dkv), jnp.arange(1, rounds.hops))
        # 3. The last keys are passed on no more; their gradient is, and then takes all hops back to its rank.
        arriving_dkv = rounds.ring.shift(dkv)
        sums, block_dkv = rounds.block_ops.backward(rounds.rectangles(rounds.hops, operands), q, kv, final, sums)
        dkv = rounds.ring.shift(arriving_dkv + block_dkv, -rounds.hops)
    return rounds.cotangents(q, sums, dkv, operands)


def _shift_together(rounds: Rounds, kv: jax.Array, dkv: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Pass keys and gradients on by one rank, in one permute.

    XLA's GPU scheduler overlapped only one of two separate permutes with compute.
    """
    if kv.dtype == dkv.dtype:
        shifted = rounds.ring.shift(jnp.stack([kv, dkv]))
        return shifted[0], shifted[1]
    # Send bit patterns as integers: on CPUs XLA moves bfloat16 as float32, which need not keep bits that are a NaN.
    bits = jnp.dtype(f"uint{8 * kv.dtype.itemsize}")
    kv_bits, dkv_bits = (lax.bitcast_convert_type(x, bits) for x in (kv, dkv))
    # A float32 gradient has a last dim of 2 halves here: [..., 1 + 2].
    shifted = rounds.ring.shift(jnp.concatenate([kv_bits[..., None], dkv_bits], -1))
    return lax.bitcast_convert_type(shifted[..., 0], kv.dtype), lax.bitcast_convert_type(shifted[..., 1:], dkv.dtype)


by_rounds.defvjp(_forward, _backward)
