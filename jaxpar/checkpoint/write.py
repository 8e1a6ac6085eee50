"""Writing a checkpoint with Orbax: a temporary folder (`temporary`), trees of arrays (`save_items`), and their
description (`finish`).

Every array is a zarr3 array whose chunks carry a CRC-32C. On disk and in gs:// the arrays of a tree are in one OCDBT
database. Each process writes a part of it, and Orbax merges the parts. In s3:// every chunk is a separate object.

Importing Orbax takes a second. So other modules import this file only when they save for the first time.
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

_CHUNK_BYTES = 1 << 23  # bytes of a chunk, the smallest unit that can be read
_MAX_BYTES_IN_FLIGHT = 1 << 27  # bytes that are written at a time, in addition to those that wait in memory
_MIN_BYTES_PER_SECOND = 1e6  # a bucket that writes more slowly counts as silent


def temporary(folder: Place) -> atomicity.TemporaryPathBase:
    """Return Orbax's temporary path for a checkpoint: it creates the path, and at the end renames it to `folder`."""
    # A bucket cannot rename: a last file marks a complete checkpoint there.
    kind = atomicity.CommitFileTemporaryPath if is_bucket(folder) else atomicity.AtomicRenameTemporaryPath
    return kind.from_final(_orbax_path(folder))


def save_items(folder: Place, items: Mapping[str, Any]) -> None:
    """Write this process's part of trees of `SavedArray`, the items of a checkpoint by name."""
    for item, tree in items.items():
        # A shared file system may not show yet the folder that another process has made.
        (folder / item).mkdir(exist_ok=True)
        boxes = [(array, box) for array in jax.tree.leaves(tree) for box, _ in array.boxes]
        num_bytes = sum(array.dtype.itemsize * math.prod(stop - start for start, stop in box) for array, box in boxes)
        save = functools.partial(_handler(folder).save, _orbax_path(folder / item), args=ocp.args.PyTreeSave(tree))
        answered(folder, save, ANSWER_SECONDS + num_bytes / _MIN_BYTES_PER_SECOND)


def finish(folder: Place, items: Mapping[str, Any], about: About) -> None:
    """Merge the parts of all processes, and write the description. Process 0 calls this once all have written."""
    for item in () if is_s3(folder) else items:
        _handler(folder).finalize(_orbax_path(folder / item))
    # The description comes last: it has the checksums of all other files.
    about = dataclasses.replace(about, files=files_of(folder))
    (folder / "about").mkdir(exist_ok=True)
    ocp.JsonCheckpointHandler().save(_orbax_path(folder / "about"), args=ocp.args.JsonSave(about.json()))


def _handler(folder: Place) -> ocp.PyTreeCheckpointHandler:
    """Return Orbax's handler of trees, which writes `SavedArray` leaves by `_SavedArrayHandler`."""
    registry = ocp.type_handlers.create_type_handler_registry(
        (SavedArray, _SavedArrayHandler()), (jax.Array, ocp.type_handlers.ArrayHandler(array_metadata_store=None))
    )
    return ocp.PyTreeCheckpointHandler(
        use_ocdbt=not is_s3(folder), use_zarr3=True, use_compression=False, type_handler_registry=registry
    )


class _SavedArrayHandler(ocp.type_handlers.NumpyHandler):
    """Writes a `SavedArray` in the format of a NumPy array, which every program with Orbax can read."""

    async def serialize(self, values: Sequence[Any], infos: Sequence[Any], args: Any = None) -> list[Any]:
        """Write the boxes of some arrays, and return once all are written. Removes each box from its array."""
        pending, num_bytes, limits = [], 0, context()
        for array, info in zip(values, infos, strict=True):
            if not array.boxes:
                continue
            # Every process asks to create the array: the first one does, and the others open it.
            store = await ts.open(_write_spec(array, info), create=True, open=True, context=limits)
            while array.boxes:
                box, values_or_function = array.boxes.pop()
                x = np.asarray(values_or_function() if callable(values_or_function) else values_or_function)
                index = tuple(slice(*bounds) for bounds in box)
                # TensorStore may refer to these values without a copy: nobody writes into the buffers before the save
                # has ended.
                pending.append(store[index].write(x, can_reference_source_data_indefinitely=True))
                num_bytes += x.nbytes
                if num_bytes > _MAX_BYTES_IN_FLIGHT:
                    await _wait_for_writes(pending)
                    pending, num_bytes = [], 0
                del x, values_or_function  # free the memory before the next box is made
        await _wait_for_writes(pending)
        return []


async def _wait_for_writes(pending: Sequence[Any]) -> None:
    """Wait for all writes, even if one fails, and raise the first error.

    A write that ended after this function has returned would find no event loop.
    """
    results = await asyncio.gather(*pending, return_exceptions=True)
    if errors := [result for result in results if isinstance(result, BaseException)]:
        raise errors[0]


def _write_spec(array: SavedArray, info: Any) -> ts.Spec:
    """Return TensorStore's description of an array to write: Orbax's own, with checksums and our S3 settings."""
    spec = ocp.type_handlers.get_json_tspec_write(
        info,
        use_ocdbt=info.is_ocdbt_checkpoint,
        global_shape=array.shape,
        local_shape=array.chunk,
        dtype=array.dtype,
        process_index=jax.process_index() if info.is_ocdbt_checkpoint else None,
        arg=ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES),
    )
    codecs = spec["metadata"]["codecs"]
    # In a sharded array the inner codecs belong to the chunks; the outer ones to whole shards.
    chunk_codecs = codecs[0]["configuration"]["codecs"] if codecs[0]["name"] == "sharding_indexed" else codecs
    chunk_codecs.append({"name": "crc32c"})
    if is_s3(info.parent_dir):
        spec["kvstore"] = kvstore(info.parent_dir / info.name)
    return ts.Spec(spec)


def _orbax_path(folder: Place) -> epath.Path:
    return epath.Path(str(folder))
