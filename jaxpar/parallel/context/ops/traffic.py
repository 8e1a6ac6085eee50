"""Bytes that one attention sends over a context axis, per device: closed forms, as the ledger counts `sent`.

They follow from the papers and are never derived from the code, so that a test can compare the two.

Each function takes the shapes of all queries, [b, t, hq, d], and of all keys, [b, s, hkv, d]; the number c of ranks;
and e, the bytes of an element. It returns (forward, backward). Gradients of keys and values travel in float32. Segment
ids of packed documents add one all-gather in the forward, of (c-1)/c 4 b s.
"""

import math

WIDE = 4  # bytes of float32

Shape = tuple[int, ...]


def gather_bytes(keys: Shape, c: int, e: int) -> tuple[int, int]:
    """Return the traffic of `gather_attention`: all-gather keys and values; reduce-scatter their gradients."""
    elements = 2 * math.prod(keys) * (c - 1) // c
    return elements * e, elements * WIDE


def ulysses_bytes(queries: Shape, keys: Shape, c: int, e: int) -> tuple[int, int]:
    """Return the traffic of `ulysses_attention`: all-to-alls of queries, of keys with values, and of the result.

    The backward sends the same.
    """
    (b, t, hq, d), (_, s, hkv, _) = queries, keys
    # Key heads are repeated until c divides them.
    sent = (2 * hq * t + 2 * math.lcm(hkv, c) * s) * b * d * e * (c - 1) // c**2
    return sent, sent


def usp_bytes(queries: Shape, keys: Shape, c: int, u: int, e: int, hops: int | None = None) -> tuple[int, int]:
    """Return the traffic of `usp_attention`: all-to-alls in groups of u ranks, and a ring of the c / u groups.

    u divides hq and hkv. There are `hops` hops, c / u - 1 if None.
    """
    (b, t, hq, d), (_, s, hkv, _) = queries, keys
    # An all-to-all among u ranks keeps 1/u of a rank's 1/c of the positions.
    exchange_bytes = (2 * hq * t + 2 * hkv * s) * b * d * e * (u - 1) // (u * c)
    forward, backward = ring_bytes((b, s, hkv // u, d), c // u, e, hops)
    return exchange_bytes + forward, exchange_bytes + backward


def ring_bytes(keys: Shape, c: int, e: int, hops: int | None = None) -> tuple[int, int]:
    """Return the traffic of `ring_attention`: permutes of keys and values, and backward of their gradients too.

    The gradients take one hop more, which brings them home. `hops` is c - 1 if None; with a window, pass `ring_hops`.
    """
    hops, (b, s, hkv, d) = c - 1 if hops is None else hops, keys
    # Without hops nothing travels, gradients included.
    block = 2 * b * (s // c) * hkv * d
    return hops * block * e, hops * block * e + (hops + 1) * block * WIDE * (hops > 0)
