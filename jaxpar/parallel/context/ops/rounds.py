"""Which rectangle of the keys of another rank a rank's queries see, round after round.

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
from .order import Order, positions_of
from .score_function import ScoreFunction


def ring_hops(block: int, ranks: int, window: int | None = None) -> int:
    """How often keys are passed on in plain order: until the window of a rank's first query is behind.

    >>> ring_hops(4096, 8), ring_hops(4096, 8, window=4097), ring_hops(4096, 8, window=4098)
    (7, 1, 2)
    """
    return ranks - 1 if window is None else min(ranks - 1, -(-(window - 1) // block))


@dataclass(frozen=True)
class Rounds:
    """What is static in a call: the hops, and which rectangle of each block counts. Neighbours on the ring are `apart`
    ranks of the axis from each other: more than one where that many share the heads of a block. With a
    `function` of scores, `causal` only says which blocks can be left out: those of keys later than all queries. Of
    queries and keys there are `lengths`, where ranks have more: the last one again.
    """

    axis: Axes
    ranks: int
    queries: int  # of a block
    keys: int  # of a block
    hops: int
    causal: bool
    window: int | None
    scale: float | None
    order: Order
    apart: int = 1
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
        apart: int = 1,
        function: ScoreFunction | None = None,
        lengths: tuple[int, int] | None = None,
    ) -> Self:
        """Those of one call, for queries [b, t/c, ..] and keys [b, s/c, ..] of each of the c ranks on a ring."""
        c, (t, s) = count(axis) // apart, (x.shape[1] for x in (q, k))
        window = None if window is None or window >= c * t else window
        hops = ring_hops(t, c, window) if order == "plain" else c - 1
        scale = None if scale is None else float(scale)
        lengths = None if lengths == (c * t, c * s) else lengths
        return cls(axis, c, t, s, hops, causal, window, scale, order, apart, function, lengths)

    @property
    def blocks(self) -> Any:
        """What attends to a block, and pulls its gradients back."""
        return blocks if self.function is None else score_function

    @property
    def rank(self) -> jax.Array | int:
        """This device's place on its ring."""
        return index(self.axis) // self.apart

    def passed(self, x: jax.Array, by: int = 1) -> jax.Array:
        """The value of the rank `by` places before on the ring."""
        return shift(x, self.axis, by * self.apart)

    def whose(self, step: jax.Array | int) -> jax.Array | int:
        """The rank whose keys these are."""
        return (self.rank - step) % self.ranks

    def parts(self, step: jax.Array | int, ids: tuple[jax.Array, ...]) -> list[Rectangle]:
        """What this rank's queries see of the keys that came by `step` hops; 0, a Python int, for its own. In the place
        of ids a function of scores has its operands, with the keys of all ranks one after the other.
        """
        rank, whose = self.rank, self.whose(step)
        places = lambda n, rank: positions_of(n, self.ranks, self.order, rank)

        def part(query: Any, key: Any, size: tuple[int, int], causal: bool, there: Any = None) -> Rectangle:
            in_kernel = self.window if causal and self.order == "plain" else None
            options = AttentionOptions(causal, in_kernel, self.scale, None, 0, False)
            rectangle = Rectangle(query, key, *size, options, None, there)
            at = {
                "t": rectangle.of_queries(places(self.queries, rank), 0),
                "s": rectangle.of_keys(places(self.keys, whose), 0),
            }
            if self.function is not None:
                there = None
                if self.lengths is not None:
                    there = at["s"] < self.lengths[1]
                    at = {side: jnp.minimum(x, n - 1) for (side, x), n in zip(at.items(), self.lengths, strict=True)}
                block = score_function.ScoreBlock(self.function, at, ids, whose * self.keys + key, there)
                return replace(rectangle, replay=block)
            seen = None
            if self.window is not None and in_kernel is None:
                seen = (at["t"][:, None] - at["s"] < self.window)[None]
            if ids:
                queries, keys = ids[0][rank], ids[-1][whose]
                alike = rectangle.of_queries(queries)[:, :, None] == rectangle.of_keys(keys)[:, None]
                seen = alike if seen is None else alike & seen
            if seen is None:
                return rectangle
            return replace(rectangle, options=replace(options, masked=True), mask=seen[:, None])

        own, whole, half = isinstance(step, int) and step == 0, (self.queries, self.keys), self.queries // 2
        if own or not self.causal:
            return [part(0, 0, whole, self.causal)]
        earlier = jnp.asarray(self.rank >= step)  # keys of an earlier rank
        if self.order == "plain":
            return [part(0, 0, whole, False, earlier)]
        # The second chunk sees every first one; then the first the first, or the second the second.
        either = jnp.where(earlier, 0, half)
        return [part(half, 0, (half, half), False), part(either, either, (half, half), False)]

    def cotangents(self, q: jax.Array, sums: tuple[jax.Array, ...], dkv: Any, ids: tuple[jax.Array, ...]) -> Any:
        """What a backward returns: of queries, keys, values, and those of `ids` that are floats."""
        dq, *more = sums
        given = iter(more)
        floats = (next(given).astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else None for x in ids)
        return (*(x.astype(q.dtype) for x in (dq, *dkv)), *floats)
