"""How Orbax writes a checkpoint: a temporary folder, trees of arrays in it, and their description.

Every array is a zarr3 array whose chunks carry a CRC-32C. On disk and in gs:// the arrays of a tree lie in one OCDBT
database; each process writes a part of it, and Orbax merges the parts. In s3:// every chunk is an object of its own.
To import Orbax takes a second, and so this file is imported by the first save.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath
from orbax.checkpoint.path import atomicity

from ..backend.buckets import ANSWER_SECONDS, Place, answered, is_bucket
from .about import About, files_of
from .arrays import SavedArray
from .stores import context, is_s3, kvstore

_CHUNK = 1 << 23  # bytes of a chunk, the least that a box is read from
_IN_FLIGHT = 1 << 27  # bytes that are being written at a time, beside those that wait in the host's memory
_SLOWEST = 1e6  # bytes per second that a bucket takes at least


def temporary(folder: Place) -> atomicity.TemporaryPathBase:
    """Return Orbax's unfinished checkpoint, which it makes, and gives the name of `folder` when it is complete."""
    kind = atomicity.CommitFileTemporaryPath if is_bucket(folder) else atomicity.AtomicRenameTemporaryPath
    return kind.from_final(_orbax_path(folder))


def save_items(folder: Place, items: Mapping[str, Any]) -> None:
    """Write this process's part of trees of `SavedArray`, the items of a checkpoint by name."""
    for item, tree in items.items():
        (folder / item).mkdir(exist_ok=True)  # also where a file system does not show at once what process 0 has made
        boxes = [(array, box) for array in jax.tree.leaves(tree) for box, _ in array.boxes]
        size = sum(array.dtype.itemsize * math.prod(stop - start for start, stop in box) for array, box in boxes)
        save = functools.partial(_handler(folder).save, _orbax_path(folder / item), args=ocp.args.PyTreeSave(tree))
        answered(folder, save, ANSWER_SECONDS + size / _SLOWEST)


def finish(folder: Place, items: Mapping[str, Any], about: About) -> None:
    """On process 0, once all have written: merge the processes' parts, and write the description of the checkpoint."""
    for item in () if is_s3(folder) else items:
        _handler(folder).finalize(_orbax_path(folder / item))
    about = dataclasses.replace(about, files=files_of(folder))
    (folder / "about").mkdir(exist_ok=True)
    ocp.JsonCheckpointHandler().save(_orbax_path(folder / "about"), args=ocp.args.JsonSave(about.json()))


def _handler(folder: Place) -> ocp.PyTreeCheckpointHandler:
    registry = ocp.type_handlers.create_type_handler_registry(
        (SavedArray, _Handler()), (jax.Array, ocp.type_handlers.ArrayHandler(array_metadata_store=None))
    )
    return ocp.PyTreeCheckpointHandler(
        use_ocdbt=not is_s3(folder), use_zarr3=True, use_compression=False, type_handler_registry=registry
    )


class _Handler(ocp.type_handlers.NumpyHandler):
    """How Orbax writes a `SavedArray`: as it writes a NumPy array, so that anybody reads it as one."""

    async def serialize(self, values: Sequence[Any], infos: Sequence[Any], args: Any = None) -> list[Any]:
        """Write the boxes of some arrays and return when all are written; the values are dropped one by one."""
        pending, size, limits = [], 0, context()
        for array, info in zip(values, infos, strict=True):
            if not array.boxes:
                continue
            store = await ts.open(_write_spec(array, info), create=True, open=True, context=limits)
            while array.boxes:
                box, x = array.boxes.pop()
                x = np.asarray(x() if callable(x) else x)
                index = tuple(slice(*bounds) for bounds in box)
                pending.append(store[index].write(x, can_reference_source_data_indefinitely=True))
                size += x.nbytes
                if size > _IN_FLIGHT:
                    await _all(pending)
                    pending, size = [], 0
                del x
        await _all(pending)
        return []


async def _all(pending: Sequence[Any]) -> None:
    """Wait for all that is being written, also where some of it fails: what ends later would find no event loop."""
    results = await asyncio.gather(*pending, return_exceptions=True)
    if errors := [result for result in results if isinstance(result, BaseException)]:
        raise errors[0]


def _write_spec(array: SavedArray, info: Any) -> ts.Spec:
    spec = ocp.type_handlers.get_json_tspec_write(
        info,
        use_ocdbt=info.is_ocdbt_checkpoint,
        global_shape=array.shape,
        local_shape=array.chunk,
        dtype=array.dtype,
        process_index=jax.process_index() if info.is_ocdbt_checkpoint else None,
        arg=ocp.SaveArgs(chunk_byte_size=_CHUNK),
    )
    codecs = spec["metadata"]["codecs"]
    inner = codecs[0]["configuration"]["codecs"] if codecs[0]["name"] == "sharding_indexed" else codecs
    inner.append({"name": "crc32c"})
    if is_s3(info.parent_dir):
        spec["kvstore"] = kvstore(info.parent_dir / info.name)
    return ts.Spec(spec)


def _orbax_path(folder: Place) -> epath.Path:
    return epath.Path(str(folder))
