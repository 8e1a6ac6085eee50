"""What data are, wherever they lie: checksums of their values, and limits that these keep to."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..backend.text import did_you_mean
from .model import Mean
from .paths import name_of

_CHUNK = 1 << 24  # elements that are in memory at once, of an array that is not


def check_mapped(x: Any) -> None:
    """Raise ValueError where an array is in a file that has become shorter since it was mapped into memory: to read it
    there is a SIGBUS, which ends the process without a word.
    """
    name = getattr(x, "filename", None)
    while isinstance(x, np.ndarray):
        x = x.base
        name = name or getattr(x, "filename", None)
    if isinstance(x, mmap.mmap) and x.size() < len(x):
        raise ValueError(
            f"{name or 'a file'} had {len(x):,} bytes when it was opened and has {x.size():,} now; write it anew, "
            "under another name until it is whole, and go on with resume"
        )


def chunks(x: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """An array piece by piece: (index of the piece's first element, elements in their order)."""
    flat = x.reshape(-1)
    for begin in range(0, flat.size, _CHUNK):
        check_mapped(flat)
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

    A step does not say by itself that a token is beyond the vocabulary: its loss is NaN, or a value without meaning.
    This looks at a batch on the host before it is given to the step; a million ids take a few milliseconds. The step
    looks too with `make_train_step(..., ids={"tokens": 32_000})`. Of arrays on several hosts, each looks at its part.

    Args:
      batch: a pytree of arrays.
      limits: leaf -> how many ids there are, 0 to one less. A leaf is named by its path, "inputs/ids".

    Raises ValueError naming the leaf, the value, its row and the limit; and where a leaf is missing or has no integers.
    """
    for name, limit, x in _limited(batch, limits):
        for begin, part in parts(x):
            if (wrong := outside(part, limit)) is not None:
                value, place = wrong
                at = row_of(place, begin)
                raise ValueError(
                    f"batch leaf {name} holds {value} at {at}, but limits allow 0 to {limit - 1}; use the tokenizer or "
                    "the labels that the model was made for"
                )
    return batch


OUTSIDE = "outside/"  # of the metrics that say how many ids are outside their limits


def shares_outside(rows: Any, limits: Mapping[str, int]) -> dict[str, Mean]:
    """Under `jit`: of each leaf that `limits` names the share of ids that are not below them, as `outside/tokens`.

    Raises ValueError, while it is traced, as `check_ids` for leaves.
    """

    def share(x: Any, limit: int) -> Mean:
        most = min(limit - 1, int(jnp.iinfo(x.dtype).max))
        return Mean(((x < 0) | (x > most)).sum(dtype=jnp.float32), jnp.float32(x.size))

    return {OUTSIDE + name: share(x, limit) for name, limit, x in _limited(rows, limits)}


def _limited(batch: Any, limits: Mapping[str, int]) -> Iterator[tuple[str, int, Any]]:
    """The leaves that `limits` names, with these."""
    leaves = {name_of(path): x for path, x in jax.tree_util.tree_leaves_with_path(batch)}
    for name, limit in limits.items():
        if name not in leaves:
            has = ", ".join(leaves) or "no leaf"
            raise ValueError(f"limits name {name!r}, and the batch has {has}{did_you_mean(name, list(leaves))}")
        x = leaves[name] if isinstance(leaves[name], jax.Array) else np.asarray(leaves[name])
        if x.dtype.kind not in "iu":
            raise ValueError(f"batch leaf {name} is {x.dtype}{list(x.shape)}, and ids are integers; name another leaf")
        yield name, limit, x


def row_of(place: Sequence[int], begin: int = 0) -> str:
    """The place of an element in words, in a part of a batch that begins at a row."""
    row, *rest = place
    return f"row {row + begin}, {rest}" if rest else f"row {row + begin}"


def parts(x: Any) -> Iterator[tuple[int, np.ndarray]]:
    """What this host has of an array, with the row at which each part begins."""
    if not isinstance(x, jax.Array) or x.is_fully_addressable:
        yield 0, np.asarray(x)
        return
    for shard in x.addressable_shards:
        yield shard.index[0].indices(x.shape[0])[0] if x.ndim else 0, np.asarray(shard.data)
