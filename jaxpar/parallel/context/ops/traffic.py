"""Bytes that one attention sends over a context axis, per device: closed forms, as the ledger counts `sent`.

Dims: b rows, s positions of queries and keys, c ranks, hq heads, hkv key/value heads, d head_dim, e bytes an element.
Each function returns (forward, backward). Gradients of keys and values travel in float32. Ids of packed documents
come on top, once forward: an all-gather of (c-1)/c 4 b s.
"""

import math

WIDE = 4  # bytes of float32


def gather_bytes(b: int, s: int, hkv: int, d: int, c: int, e: int) -> tuple[int, int]:
    """One all-gather of keys and values, one reduce-scatter of their gradients."""
    whole = 2 * b * s * hkv * d * (c - 1) // c
    return whole * e, whole * WIDE


def ulysses_bytes(b: int, s: int, hq: int, hkv: int, d: int, c: int, e: int) -> tuple[int, int]:
    """Three all-to-alls: queries, keys with values, the result; backward the same."""
    sent = (2 * hq + 2 * math.lcm(hkv, c)) * b * s * d * e * (c - 1) // c**2
    return sent, sent


def usp_bytes(
    b: int, s: int, hq: int, hkv: int, d: int, c: int, u: int, e: int, t: int | None = None, hops: int | None = None
) -> tuple[int, int]:
    """The all-to-alls of groups of u ranks, which u of both kinds of heads divides, and the ring of c / u groups, of so
    many `hops`; of t queries to s keys.
    """
    exchanged = (2 * hq * (t or s) + 2 * hkv * s) * b * d * e * (u - 1) // (u * c)
    forward, backward = ring_bytes(b, s, hkv // u, d, c // u, e, hops)
    return exchanged + forward, exchanged + backward


def ring_bytes(b: int, s: int, hkv: int, d: int, c: int, e: int, hops: int | None = None) -> tuple[int, int]:
    """`hops` permutes of keys and values (c - 1; `ring_hops` with a window), twice, and of gradients, one more."""
    hops = c - 1 if hops is None else hops
    block = 2 * b * (s // c) * hkv * d
    return hops * block * e, hops * block * e + (hops + 1) * block * WIDE * (hops > 0)
