"""Positions of a split sequence in another order: rolled, reversed, of two sequences one after the other.

Which position goes where is known before the program runs. So ranks send each other what they need and no more, in
rounds in each of which a rank sends to one other at most, and gets from one.

Dims: c ranks, n positions of each before, m after.
"""

import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from ....collectives.nccl import send_recv
from ....collectives.ranks import Axes, index

Pair = tuple[int, int]


def rearranged(x: jax.Array, source: np.ndarray, axis: Axes, dim: int) -> jax.Array:
    """This rank's positions after: [.., n, ..] -> [.., m, ..], inside `shard_map`.

    Sends in every round of `rounds_of` as many positions as one of its pairs does at most, and backward the same.

    Args:
      x: this rank's positions along `dim`.
      source: int [c, m], where each rank's positions come from: r n + i is the i-th of rank r; -1: it becomes zeros.
      axis: the mesh axis of c ranks.
      dim: the dim of the positions.
    """
    rank, n = index(axis), x.shape[dim]
    parts, begin, table = [x], n, np.full(source.shape, -1)
    owner = np.where(source < 0, -1, source // n)
    for r in range(len(source)):
        table[r][owner[r] == r] = source[r][owner[r] == r] - r * n
    for pairs in rounds_of(source, n):
        size = max(map(len, pairs.values()))
        slots = np.zeros((len(source), size), np.int32)
        for (sender, receiver), places in pairs.items():
            slots[sender, : len(places)] = places - sender * n
            mine = owner[receiver] == sender
            table[receiver][mine] = begin + np.searchsorted(places, source[receiver][mine])
        parts.append(send_recv(jnp.take(x, jnp.asarray(slots)[rank], axis=dim), axis, [*pairs]))
        begin += size
    at = jnp.asarray(np.where(table < 0, begin, table), jnp.int32)[rank]
    return jnp.take(jnp.concatenate(parts, dim), at, axis=dim, mode="fill", fill_value=0)


def rounds_of(source: np.ndarray, n: int) -> Iterator[dict[Pair, np.ndarray]]:
    """Who sends to whom at once, and which positions: (sender, receiver) -> those of `source`, in order. What is as
    long, and goes as far, goes together where it can.

    >>> rolled = np.roll(np.arange(8), 3).reshape(4, 2)
    >>> [{pair: places.tolist() for pair, places in one.items()} for one in rounds_of(rolled, 2)]
    [{(3, 0): [6], (0, 1): [0], (1, 2): [2], (2, 3): [4]}, {(2, 0): [5], (3, 1): [7], (0, 2): [1], (1, 3): [3]}]
    """
    left: dict[Pair, np.ndarray] = {}
    for receiver, sender in itertools.product(range(len(source)), repeat=2):
        places = np.unique(source[receiver][(source[receiver] >= 0) & (source[receiver] // n == sender)])
        if len(places) and sender != receiver:
            left[sender, receiver] = places
    while left:
        busy, now = set[tuple[str, int]](), dict[Pair, np.ndarray]()
        for pair in sorted(left, key=lambda pair: (-len(left[pair]), (pair[1] - pair[0]) % len(source))):
            ends = {("sends", pair[0]), ("gets", pair[1])}
            if not busy & ends:
                busy |= ends
                now[pair] = left.pop(pair)
        yield now
