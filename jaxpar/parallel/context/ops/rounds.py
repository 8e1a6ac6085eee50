"""Rounds of attention over split keys: which rectangle of another rank's keys this rank's queries see in each round.

In round r, rank i attends to the keys of rank i - r. Of a causal mask, that block holds

    round 0                  the causal triangle of the rank's own keys
    plain order, later r     all keys if rank i - r is earlier, else none
    zigzag order, later r    two of the four squares of its two chunks: see the picture in `ring.py`

The ring (`ring.py`) passes keys on between rounds. `gather.py` has the keys of all ranks from the start, and takes the
same rounds.

Dims: b rows, t query positions, s key positions, c ranks.
"""

from dataclasses import dataclass, replace
from typing import Any, Self

import jax
import jax.numpy as jnp

from ..attention.flash import AttentionOptions
from . import blocks, score_function
from .blocks import Rectangle
from .order import Ring, positions_of_rank


def ring_hops(block: int, ranks: int, window: int | None = None) -> int:
    """Return the number of hops in plain order: keys are passed on until they lie before every window of a block.

    A ring of `ranks` ranks has `block` positions on each.

    >>> ring_hops(4096, 8), ring_hops(4096, 8, window=4097), ring_hops(4096, 8, window=4098)
    (7, 1, 2)
    """
    return ranks - 1 if window is None else min(ranks - 1, -(-(window - 1) // block))


@dataclass(frozen=True)
class Rounds:
    """The static description of one attention over split keys: its hops, and the visible rectangles of each round.

    Attributes:
      ring: the ranks. A rank of a round is a place on this ring.
      options: the options of the call. Of its `window`, None says that no window hides a key. With a `function`,
        `causal` only tells that rectangles whose keys are all later than all queries can be skipped.
      num_queries, num_keys: the queries and the keys of a rank.
      hops: the number of rounds after round 0.
      lengths: the numbers of queries and keys of the user, if ranks hold more. The surplus repeats the last position.
    """

    ring: Ring
    options: AttentionOptions
    num_queries: int
    num_keys: int
    hops: int
    lengths: tuple[int, int] | None = None

    @classmethod
    def of(
        cls, ring: Ring, options: AttentionOptions, q: jax.Array, k: jax.Array, lengths: tuple[int, int] | None = None
    ) -> Self:
        """Return the rounds of one call, for queries [b, t/c, ..] and keys [b, s/c, ..] of each of the c ranks."""
        c, (t, s) = ring.size, (x.shape[1] for x in (q, k))
        # A window as long as the sequence hides no key.
        window = None if options.window is None or options.window >= c * t else options.window
        # In zigzag order the chunk before a rank's second chunk is on the next rank, whose keys come by the last hop.
        hops = ring_hops(t, c, window) if ring.order == "plain" else c - 1
        lengths = None if lengths == (c * t, c * s) else lengths
        return cls(ring, replace(options, window=window), t, s, hops, lengths)

    @property
    def block_ops(self) -> Any:
        """The module with `attend`, `finish`, `initial_gradients` and `backward` for blocks of this attention."""
        return blocks if self.options.function is None else score_function

    def key_rank(self, step: jax.Array | int) -> jax.Array | int:
        """Return the rank on the ring whose keys round `step` attends to."""
        return (self.ring.place - step) % self.ring.size

    def rectangles(self, step: jax.Array | int, operands: tuple[jax.Array, ...]) -> list[Rectangle]:
        """Return the rectangles of round `step` that this rank's queries may see.

        Args:
          step: the number of hops that the keys have taken; the Python int 0 for a rank's own keys.
          operands: int [ranks, b, t/c] segments of queries and, if they differ, [ranks, b, s/c] of keys; or the
            operands of the function of scores, with the keys of all ranks one after the other.
        """
        ring, call = self.ring, self.options
        rank, key_rank = ring.place, self.key_rank(step)
        rank_positions = lambda n, rank: positions_of_rank(n, ring.size, ring.order, rank)

        def make_rectangle(
            first_query: Any, first_key: Any, size: tuple[int, int], causal: bool, is_visible: Any = None
        ) -> Rectangle:
            # A kernel's window assumes consecutive positions that start alike: a rank's own block in plain order.
            kernel_window = call.window if causal and ring.order == "plain" else None
            options = AttentionOptions(causal, kernel_window, call.scale, None, 0, False)
            rectangle = Rectangle(first_query, first_key, *size, options, None, is_visible)
            # Positions in the whole sequence, of this rank's queries and of the visiting keys.
            positions = {
                "t": rectangle.slice_queries(rank_positions(self.num_queries, rank), 0),
                "s": rectangle.slice_keys(rank_positions(self.num_keys, key_rank), 0),
            }
            if call.function is not None:
                # Surplus queries and keys have the position of the last real one, so that tables by position need no
                # more entries.
                is_real_key = None
                if self.lengths is not None:
                    is_real_key = positions["s"] < self.lengths[1]
                    sides = zip(positions.items(), self.lengths, strict=True)
                    positions = {side: jnp.minimum(x, n - 1) for (side, x), n in sides}
                first = key_rank * self.num_keys + first_key
                block = score_function.ScoreBlock(call.function, positions, operands, first, is_real_key)
                return replace(rectangle, score_block=block)
            # Otherwise the mask has what the kernel cannot be told: a window off the diagonal, and segments.
            mask = None
            if call.window is not None and kernel_window is None:
                mask = (positions["t"][:, None] - positions["s"] < call.window)[None]
            if operands:
                query_ids, key_ids = operands[0][rank], operands[-1][key_rank]
                same_segment = rectangle.slice_queries(query_ids)[:, :, None] == rectangle.slice_keys(key_ids)[:, None]
                mask = same_segment if mask is None else same_segment & mask
            if mask is None:
                return rectangle
            return replace(rectangle, options=replace(options, masked=True), mask=mask[:, None])

        # A traced step is never 0: the first round is outside the loops of callers.
        is_own, block_size = isinstance(step, int) and step == 0, (self.num_queries, self.num_keys)
        if is_own or not call.causal:
            return [make_rectangle(0, 0, block_size, call.causal)]
        is_earlier = jnp.asarray(ring.place >= step)  # the keys are of an earlier rank, not wrapped around the ring
        if ring.order == "plain":
            return [make_rectangle(0, 0, block_size, False, is_earlier)]
        half = self.num_queries // 2
        # In zigzag order the second chunk of queries sees every rank's first chunk of keys. Then the first chunk sees
        # the first if the keys are of an earlier rank; otherwise the second sees the second.
        first_seen = jnp.where(is_earlier, 0, half)
        squares = ((half, 0), (first_seen, first_seen))
        return [make_rectangle(*corner, (half, half), False) for corner in squares]

    def cotangents(self, q: jax.Array, sums: tuple[jax.Array, ...], dkv: Any, operands: tuple[jax.Array, ...]) -> Any:
        """Return the result of a backward: the cotangents of queries, keys, values and `operands` (None for integers).

        `sums` are the gradients of queries, and of `operands` that are floats. The cotangents have the dtype of `q`.
        """
        dq, *operand_gradients = sums
        remaining = iter(operand_gradients)
        operand_cotangents = (
            next(remaining).astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else None for x in operands
        )
        return (*(x.astype(q.dtype) for x in (dq, *dkv)), *operand_cotangents)
