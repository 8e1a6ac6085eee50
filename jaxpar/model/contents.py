"""Read the values of arrays on the host: checksums, and whether ids are within their limits.

Arrays may be files that are mapped into memory and larger than it, so that every reader takes them chunk by chunk.
Ids are checked twice: `check_ids` on the host, before a step, and `shares_outside` in the step itself.
"""

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

_CHUNK = 1 << 24  # elements of a mapped array that are in memory at a time


def check_mapped(x: Any) -> None:
    """Raise ValueError if an array's file has become shorter since it was mapped into memory.

    Reading past its end would raise the signal SIGBUS, which ends the process without a message.
    """
    name = getattr(x, "filename", None)
    # A view has no file name. Follow the bases down to the map.
    while isinstance(x, np.ndarray):
        x = x.base
        name = name or getattr(x, "filename", None)
    if isinstance(x, mmap.mmap) and x.size() < len(x):
        raise ValueError(
            f"{name or 'a file'} had {len(x):,} bytes when it was opened and has {x.size():,} now; write it again, "
            "under another name until it is complete, and continue with resume"
        )


def chunks(x: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield an array in chunks of at most `_CHUNK` elements: (index of the first element, elements in order)."""
    flat = x.reshape(-1)
    for start in range(0, flat.size, _CHUNK):
        # Before every chunk, since another process may write the file while this one reads it.
        check_mapped(flat)
        yield start, flat[start : start + _CHUNK]


def add_array(digest: Any, x: np.ndarray) -> None:
    """Add the dtype, shape and values of an array to a digest of hashlib."""
    # `dtype.str` has the byte order. For a dtype that NumPy does not know, such as bfloat16, it would only be "V2".
    digest.update(f"{x.dtype.str if x.dtype.kind != 'V' else x.dtype}{x.shape}".encode())
    for _, chunk in chunks(x):
        # `reshape(-1)` of a strided array may be strided too, and only contiguous elements have a view as bytes.
        digest.update(np.ascontiguousarray(chunk).view(np.uint8).data)


def outside(x: np.ndarray, limit: int) -> tuple[int, tuple[int, ...]] | None:
    """Return the first element that is not in 0 to `limit` - 1, and its indices; None if all are."""
    for start, chunk in chunks(x):
        if chunk.min() < 0 or chunk.max() >= limit:
            first = int(np.argmax((chunk < 0) | (chunk >= limit)))
            # `start` counts elements of the flat array.
            indices = np.unravel_index(start + first, x.shape)
            return int(chunk[first]), tuple(int(i) for i in indices)
    return None


def check_ids(batch: Any, limits: Mapping[str, int]) -> Any:
    """Return the batch, if its ids lie within limits: `jp.check_ids(batch, {"tokens": 32_000, "label": 10})`.

    A step does not notice a token beyond the vocabulary: its loss is NaN or meaningless. This function checks a batch
    on the host before the step gets it; a million ids take a few milliseconds. The step checks too with
    `make_train_step(..., ids={"tokens": 32_000})`. If arrays are spread over several hosts, each host checks its part.

    Args:
      batch: a pytree of arrays.
      limits: leaf -> the number of ids, which run from 0 to one less. A leaf is named by its path, "inputs/ids".

    Returns:
      The batch itself.

    Raises:
      ValueError: an id is outside its limit (naming leaf, value, row and limit), or a leaf is missing or has no
        integers.
    """
    for name, limit, x in _limited_leaves(batch, limits):
        for start, part in parts(x):
            if (first_outside := outside(part, limit)) is not None:
                value, indices = first_outside
                place = row_of(indices, start)
                raise ValueError(
                    f"batch leaf {name} holds {value} at {place}, but limits allow 0 to {limit - 1}; use the tokenizer "
                    "or the labels that the model was made for"
                )
    return batch


OUTSIDE = "outside/"  # prefix of the metrics for the share of ids that are outside their limits


def shares_outside(rows: Any, limits: Mapping[str, int]) -> dict[str, Mean]:
    """Return each limited leaf's share of ids outside its limit, by metric name (`outside/tokens`). Runs under `jit`.

    Raises:
      ValueError: while it is traced, for a missing leaf or one without integers, as in `check_ids`.
    """

    def share(x: Any, limit: int) -> Mean:
        # A limit beyond the dtype's largest value would overflow in the comparison.
        last_id = min(limit - 1, int(jnp.iinfo(x.dtype).max))
        return Mean(((x < 0) | (x > last_id)).sum(dtype=jnp.float32), jnp.float32(x.size))

    return {OUTSIDE + name: share(x, limit) for name, limit, x in _limited_leaves(rows, limits)}


def _limited_leaves(batch: Any, limits: Mapping[str, int]) -> Iterator[tuple[str, int, Any]]:
    """Yield (path, limit, array) for the leaves that `limits` names; raise ValueError for one without integers."""
    leaves = {name_of(path): x for path, x in jax.tree_util.tree_leaves_with_path(batch)}
    for name, limit in limits.items():
        if name not in leaves:
            present = ", ".join(leaves) or "no leaf"
            raise ValueError(f"limits name {name!r}, and the batch has {present}{did_you_mean(name, list(leaves))}")
        # A `jax.Array` stays one: it may be traced, or lie on several hosts.
        x = leaves[name] if isinstance(leaves[name], jax.Array) else np.asarray(leaves[name])
        if x.dtype.kind not in "iu":
            raise ValueError(f"batch leaf {name} is {x.dtype}{list(x.shape)}, and ids are integers; name another leaf")
        yield name, limit, x


def row_of(indices: Sequence[int], begin: int = 0) -> str:
    """Return the place of an element in words; `begin` is the first row of this part of the batch."""
    row, *rest = indices
    return f"row {row + begin}, {rest}" if rest else f"row {row + begin}"


def parts(x: Any) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the parts of an array that are on this host, each with the index of its first row."""
    if not isinstance(x, jax.Array) or x.is_fully_addressable:
        yield 0, np.asarray(x)
        return
    # Rows that several devices hold are yielded several times, which is harmless: readers look for wrong values.
    for shard in x.addressable_shards:
        yield shard.index[0].indices(x.shape[0])[0] if x.ndim else 0, np.asarray(shard.data)
