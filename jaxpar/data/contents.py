"""What data are, wherever they lie: checksums of their values, and limits that these keep to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from ..model.paths import name_of
from ..text import did_you_mean

_CHUNK = 1 << 24  # elements that are in memory at once, of an array that is not


def chunks(x: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """An array piece by piece: (index of the piece's first element, elements in their order)."""
    flat = x.reshape(-1)
    for begin in range(0, flat.size, _CHUNK):
        yield begin, flat[begin : begin + _CHUNK]


def add_array(digest: Any, x: np.ndarray) -> None:
    """Adds dtype, shape and values of an array to a digest of hashlib."""
    digest.update(f"{x.dtype.str if x.dtype.kind != 'V' else x.dtype}{x.shape}".encode())
    for _, piece in chunks(x):
        digest.update(np.ascontiguousarray(piece).view(np.uint8).data)


def outside(x: np.ndarray, limit: int) -> tuple[int, tuple[int, ...]] | None:
    """The first element that is not from 0 to `limit` - 1, and its indices; None without any."""
    for begin, piece in chunks(x):
        if piece.min() < 0 or piece.max() >= limit:
            first = int(np.argmax((piece < 0) | (piece >= limit)))
            place = np.unravel_index(begin + first, x.shape)
            return int(piece[first]), tuple(int(i) for i in place)
    return None


def check_ids(batch: Any, limits: Mapping[str, int]) -> Any:
    """The batch itself, if its ids lie within limits: `jp.check_ids(batch, {"tokens": 32_000, "label": 10})`.

    A step cannot say that a token is beyond the vocabulary: its loss is NaN, or a value without meaning. This looks at
    a batch on the host before it is given to the step; a million ids take a few milliseconds.

    Args:
      batch: a pytree of arrays.
      limits: leaf -> how many ids there are, of which the last is one less. A leaf is named by its path, "inputs/ids".

    Raises ValueError naming the leaf, the value, its row and the limit; and where a leaf is missing or has no integers.
    """
    leaves = {name_of(path): x for path, x in jax.tree_util.tree_leaves_with_path(batch)}
    for name, limit in limits.items():
        if name not in leaves:
            has = ", ".join(leaves) or "no leaf"
            raise ValueError(f"limits name {name!r}, and the batch has {has}{did_you_mean(name, list(leaves))}")
        x = np.asarray(leaves[name])
        if x.dtype.kind not in "iu":
            raise ValueError(f"batch leaf {name} is {x.dtype}{list(x.shape)}, and ids are integers; name another leaf")
        if (wrong := outside(x, limit)) is not None:
            value, (row, *rest) = wrong
            at = f"row {row}, {rest}" if rest else f"row {row}"
            raise ValueError(
                f"batch leaf {name} holds {value} at {at}, but limits allow 0 to {limit - 1}; use the tokenizer or the "
                "labels that the model was made for"
            )
    return batch
