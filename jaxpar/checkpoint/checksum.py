"""A checksum of an array that can be taken box by box, in any order, on any number of hosts.

It is the sum of element x odd factor of its place, modulo 2^64, where the factor of the place (i, j, ...) is the
product of an odd number for i in the first dim, one for j in the second, ... (a multilinear hash: Lemire & Kaser 2014,
arXiv:1202.4961). The sum over an array is the sum over any boxes that it is cut into, so that it does not depend on the
layout. A change of one element always changes it, since an odd factor has an inverse; of any other damage about one in
2^32 does not at worst. It is no defence against someone who forges a checkpoint.

>>> x = np.arange(12, dtype=np.float32).reshape(3, 4)
>>> checksum(x) == (checksum(x[:, :1]) + checksum(x[:2, 1:], (0, 1)) + checksum(x[2:, 1:], (2, 1))) % 2**64
True
>>> f"{checksum(x):016x}"
'f927f4ea65a00000'
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

_AT_ONCE = 1 << 18  # elements widened to 64 bits at a time, which fit a core's cache


def checksum(x: np.ndarray, start: Sequence[int] | None = None) -> int:
    """The checksum, 0 <= sum < 2^64, of a box of an array.

    Args:
      x: the box, of any dtype; its bytes count, not its values.
      start: where in the array it begins, one number a dim; at its beginning if None.
    """
    start = [0] * x.ndim if start is None else start
    words = _words(x)
    start = [*start, *[0] * (words.ndim - len(start))]
    factors = [_factors(dim, at, at + n) for dim, (at, n) in enumerate(zip(start, words.shape, strict=True))]
    with np.errstate(over="ignore"):
        return int(_sum(words, factors))


def _words(x: np.ndarray) -> np.ndarray:
    """The bits of an array as unsigned numbers of up to 32 bits; of wider elements, several along a last dim.

    The highest bits of two numbers of 64 would cancel each other: 2^63 times an odd factor is 2^63.
    """
    size = x.dtype.itemsize
    if size in (1, 2, 4):
        return x.view(f"u{size}")
    width = next(n for n in (4, 2, 1) if size % n == 0)
    return np.ascontiguousarray(x)[..., None].view(f"u{width}")


def _sum(words: np.ndarray, factors: list[np.ndarray]) -> Any:
    if not words.size:
        return np.uint64(0)
    if not words.ndim:
        return np.uint64(words)
    if words.ndim == 1:
        total = np.uint64(0)
        for at in range(0, len(words), _AT_ONCE):
            total += words[at : at + _AT_ONCE].astype(np.uint64) @ factors[0][at : at + _AT_ONCE]
        return total
    if words.size > _AT_ONCE:
        rows = max(1, _AT_ONCE * len(words) // words.size)
        pieces = [slice(at, at + rows) for at in range(0, len(words), rows)]
        if rows > 1:
            return np.add.reduce([_sum(words[piece], [factors[0][piece], *factors[1:]]) for piece in pieces])
        return np.add.reduce([_sum(words[i], factors[1:]) * factors[0][i] for i in range(len(words))])
    wide = words.astype(np.uint64)
    for factor in reversed(factors):
        wide = wide @ factor
    return np.uint64(wide)


def _factors(dim: int, start: int, stop: int) -> np.ndarray:
    """Odd numbers for the places [start, stop) of a dim: splitmix64 (Steele, Lea & Flood 2014), its last bit set."""
    with np.errstate(over="ignore"):
        x = np.arange(start, stop, dtype=np.uint64) + np.uint64(1) + (np.uint64(dim) << np.uint64(48))
        x = x * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return (x ^ (x >> np.uint64(31))) | np.uint64(1)
