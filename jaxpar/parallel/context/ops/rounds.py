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

from ....collectives.nccl import shift
from ....collectives.ranks import Axes, count, index
from ..attention.flash import AttentionOptions
from . import blocks, score_function
from .blocks import Rectangle
from .order import Order, positions_of_rank
from .score_function import ScoreFunction


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
      axis: the mesh axis over which the sequence is split.
      ranks: the number of ranks on a ring.
      num_queries, num_keys: the queries and the keys of a rank.
      hops: the number of rounds after round 0.
      causal: whether a query sees no later keys. With a `function` it only tells that rectangles whose keys are all
        later than all queries can be skipped.
      window: query i sees keys i - window + 1 to i only; None for all.
      scale: the factor of scores.
      order: the chunks that a rank holds.
      stride: the distance along the axis between neighbours on a ring; above 1 if that many ranks share the heads of
        a block.
      function: what the program does to scores before their softmax, or None.
      lengths: the numbers of queries and keys of the user, if ranks hold more. The surplus repeats the last position.
    """

    axis: Axes
    ranks: int
    num_queries: int
    num_keys: int
    hops: int
    causal: bool
    window: int | None
    scale: float | None
    order: Order
    stride: int = 1
    function: ScoreFunction | None = None
    lengths: tuple[int, int] | None = None

    @classmethod
    def of(
        cls,
        q: jax.Array,
        k: jax.Array,
        axis: Axes,
        causal: bool,
        window: int | None,
        scale: float | None,
        order: Order,
        stride: int = 1,
        function: ScoreFunction | None = None,
        lengths: tuple[int, int] | None = None,
    ) -> Self:
        """Return the rounds of one call, for queries [b, t/c, ..] and keys [b, s/c, ..] of each of the c ranks."""
        c, (t, s) = count(axis) // stride, (x.shape[1] for x in (q, k))
        window = None if window is None or window >= c * t else window
        # In zigzag order the chunk before a rank's second chunk is on the next rank, whose keys come by the last hop.
        hops = ring_hops(t, c, window) if order == "plain" else c - 1
        scale = None if scale is None else float(scale)
        lengths = None if lengths == (c * t, c * s) else lengths
        return cls(axis, c, t, s, hops, causal, window, scale, order, stride, function, lengths)

    @property
    def block_ops(self) -> Any:
        """The module with `attend`, `finish`, `initial_gradients` and `backward` for blocks of this attention."""
        return blocks if self.function is None else score_function

    @property
    def rank(self) -> jax.Array | int:
        """This device's rank on its ring."""
        return index(self.axis) // self.stride

    def shift(self, x: jax.Array, hops: int = 1) -> jax.Array:
        """Pass a value on along the ring: return the value of the rank `hops` places before this one."""
        return shift(x, self.axis, hops * self.stride)

    def key_rank(self, step: jax.Array | int) -> jax.Array | int:
        """Return the rank on the ring whose keys round `step` attends to."""
        return (self.rank - step) % self.ranks

    def rectangles(self, step: jax.Array | int, ids: tuple[jax.Array, ...]) -> list[Rectangle]:
        """Return the rectangles of round `step` that this rank's queries may see.

        Args:
          step: the number of hops that the keys have taken; the Python int 0 for a rank's own keys.
          ids: int [ranks, b, t/c] segments of queries and, if they differ, [ranks, b, s/c] of keys; or the operands
            of the function of scores, with the keys of all ranks one after the other.
        """
        rank, key_rank = self.rank, self.key_rank(step)
        rank_positions = lambda n, rank: positions_of_rank(n, self.ranks, self.order, rank)

        def make_rectangle(
            first_query: Any, first_key: Any, size: tuple[int, int], causal: bool, is_visible: Any = None
        ) -> Rectangle:
            # A kernel's window assumes consecutive positions that start alike: a rank's own block in plain order.
            kernel_window = self.window if causal and self.order == "plain" else None
            options = AttentionOptions(causal, kernel_window, self.scale, None, 0, False)
            rectangle = Rectangle(first_query, first_key, *size, options, None, is_visible)
            # Positions in the whole sequence, of this rank's queries and of the visiting keys.
            positions = {
                "t": rectangle.slice_queries(rank_positions(self.num_queries, rank), 0),
                "s": rectangle.slice_keys(rank_positions(self.num_keys, key_rank), 0),
            }
            if self.function is not None:
                # Surplus positions are those of the last real one, so that tables by position need no more entries.
                is_real_key = None
                if self.lengths is not None:
                    is_real_key = positions["s"] < self.lengths[1]
                    sides = zip(positions.items(), self.lengths, strict=True)
                    positions = {side: jnp.minimum(x, n - 1) for (side, x), n in sides}
                first = key_rank * self.num_keys + first_key
                block = score_function.ScoreBlock(self.function, positions, ids, first, is_real_key)
                return replace(rectangle, score_block=block)
            # Otherwise the mask has what the kernel cannot be told: a window off the diagonal, and segments.
            mask = None
            if self.window is not None and kernel_window is None:
                mask = (positions["t"][:, None] - positions["s"] < self.window)[None]
            if ids:
                query_ids, key_ids = ids[0][rank], ids[-1][key_rank]
                same_segment = rectangle.slice_queries(query_ids)[:, :, None] == rectangle.slice_keys(key_ids)[:, None]
                mask = same_segment if mask is None else same_segment & mask
            if mask is None:
                return rectangle
            return replace(rectangle, options=replace(options, masked=True), mask=mask[:, None])

        # A traced step is never 0: the first round is outside the loops of callers.
        is_own, block_size = isinstance(step, int) and step == 0, (self.num_queries, self.num_keys)
        if is_own or not self.causal:
            return [make_rectangle(0, 0, block_size, self.causal)]
        is_earlier = jnp.asarray(self.rank >= step)  # the keys are of an earlier rank, not wrapped around the ring
        if self.order == "plain":
            return [make_rectangle(0, 0, block_size, False, is_earlier)]
        half = self.num_queries // 2
        # In zigzag order the second chunk of queries sees every rank's first chunk of keys. Then the first chunk sees
        # the first if the keys are of an earlier rank; otherwise the second sees the second.
        first_seen = jnp.where(is_earlier, 0, half)
        squares = ((half, 0), (first_seen, first_seen))
        return [make_rectangle(*corner, (half, half), False) for corner in squares]

    def cotangents(self, q: jax.Array, sums: tuple[jax.Array, ...], dkv: Any, ids: tuple[jax.Array, ...]) -> Any:
        """Return the result of a backward: the cotangents of queries, keys, values and `ids` (None for integers).

        `sums` are the gradients of queries, and of `ids` that are floats. The cotangents have the dtype of `q`.
        """
        dq, *operand_gradients = sums
        remaining = iter(operand_gradients)
        id_cotangents = (next(remaining).astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else None for x in ids)
        return (*(x.astype(q.dtype) for x in (dq, *dkv)), *id_cotangents)
