"""Positions of a split sequence in another order: rolled, reversed, or of two sequences one after the other.

The destination of every position is known when the program is traced. Ranks therefore send each other only the
positions that they need, in rounds. In one round a rank sends to at most one other rank and receives from at most one,
so that a round is one collective-permute.

    4 ranks of 2 positions, rolled by 3:    0 1 | 2 3 | 4 5 | 6 7   ->   5 6 | 7 0 | 1 2 | 3 4

    round 1    3 -> 0: 6    0 -> 1: 0    1 -> 2: 2    2 -> 3: 4       (sender -> receiver: position)
    round 2    2 -> 0: 5    3 -> 1: 7    0 -> 2: 1    1 -> 3: 3

Dims: c ranks, n positions of each rank before, m positions of each rank after.
"""

import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from ....collectives.nccl import send_recv
from ....collectives.ranks import Axes, index

Pair = tuple[int, int]  # (sender, receiver)


def rearrange_positions(x: jax.Array, source: np.ndarray, axis: Axes, dim: int) -> jax.Array:
    """Send positions between ranks, so that each rank holds the positions that `source` assigns to it.

    In each round of `rounds_of`, every rank sends as many positions as the largest message of the round has. The
    backward sends the same.

    Args:
      x: [.., n, ..], this rank's positions along `dim`, inside `shard_map`.
      source: int [c, m], the origin of each position of each rank after: r n + i is the i-th position of rank r, and
        -1 becomes zeros.
      axis: the mesh axis of c ranks.
      dim: the dim of the positions.

    Returns:
      [.., m, ..], this rank's positions after.
    """
    # `buffers` are this rank's own positions and the received ones of each round. They are concatenated at the end, and
    # `table` [c, m] tells for each rank where in that buffer each of its new positions is.
    rank, n = index(axis), x.shape[dim]
    buffers, offset, table = [x], n, np.full(source.shape, -1)
    owner = np.where(source < 0, -1, source // n)
    # 1. Positions that stay on their rank.
    for r in range(len(source)):
        table[r][owner[r] == r] = source[r][owner[r] == r] - r * n
    # 2. One message per rank and round. All messages of a round have the size of the largest.
    for pairs in rounds_of(source, n):
        size = max(map(len, pairs.values()))
        send_indices = np.zeros((len(source), size), np.int32)
        for (sender, receiver), places in pairs.items():
            send_indices[sender, : len(places)] = places - sender * n
            is_from_sender = owner[receiver] == sender
            # `places` is sorted, so that `searchsorted` finds where each position is in the message.
            table[receiver][is_from_sender] = offset + np.searchsorted(places, source[receiver][is_from_sender])
        buffers.append(send_recv(jnp.take(x, jnp.asarray(send_indices)[rank], axis=dim), axis, [*pairs]))
        offset += size
    # 3. Pick the new positions. An index past the end of the buffer becomes zeros.
    indices = jnp.asarray(np.where(table < 0, offset, table), jnp.int32)[rank]
    return jnp.take(jnp.concatenate(buffers, dim), indices, axis=dim, mode="fill", fill_value=0)


def rounds_of(source: np.ndarray, n: int) -> Iterator[dict[Pair, np.ndarray]]:
    """Yield for each round its messages: (sender, receiver) -> the positions sent, values of `source` in rising order.

    A greedy matching takes the longest messages first, so that messages of one length share a round: a round costs as
    much as its longest message. Among equally long ones, messages over the same distance are taken together.

    Args:
      source: int [c, m], as for `rearrange_positions`.
      n: the number of positions of each rank before.

    >>> rolled = np.roll(np.arange(8), 3).reshape(4, 2)
    >>> [{pair: places.tolist() for pair, places in pairs.items()} for pairs in rounds_of(rolled, 2)]
    [{(3, 0): [6], (0, 1): [0], (1, 2): [2], (2, 3): [4]}, {(2, 0): [5], (3, 1): [7], (0, 2): [1], (1, 3): [3]}]
    """
    messages: dict[Pair, np.ndarray] = {}
    for receiver, sender in itertools.product(range(len(source)), repeat=2):
        places = np.unique(source[receiver][(source[receiver] >= 0) & (source[receiver] // n == sender)])
        if len(places) and sender != receiver:
            messages[sender, receiver] = places
    while messages:
        busy, pairs = set[tuple[str, int]](), dict[Pair, np.ndarray]()
        for pair in sorted(messages, key=lambda pair: (-len(messages[pair]), (pair[1] - pair[0]) % len(source))):
            ends = {("sends", pair[0]), ("gets", pair[1])}
            if not busy & ends:
                busy |= ends
                pairs[pair] = messages.pop(pair)
        yield pairs
