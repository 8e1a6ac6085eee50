"""Arrays in files: Orbax's layout of a tree, and TensorStore, which reads and writes boxes of its arrays.

Every array is a zarr3 array whose chunks carry a CRC-32C. On disk and in gs:// the arrays of a tree lie in one OCDBT
database; each process writes a part of it, and Orbax merges the parts. In s3:// every chunk is an object of its own,
since Orbax cannot name a database there.
"""

from __future__ import annotations

import asyncio
import errno
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath

from ..buckets import ANSWER_SECONDS, Place, is_bucket
from ..layout.boxes import Box
from ..text import reason

_CHUNK = 1 << 23  # bytes of a chunk, the least that a box is read from
_IN_FLIGHT = 1 << 27  # bytes that are being written at a time, beside those that wait in the host's memory


class Damaged(ValueError):
    """A part of a checkpoint that is missing, incomplete, or not what was written."""


@dataclass
class SavedArray:
    """One of the model's arrays, as this host saves it.

    Attributes:
      shape, dtype: of the whole array.
      chunk: a shape whose grid no host's boxes cut through, so that no chunk has two writers.
      boxes: the parts that this host writes, as (box, values), or functions that make the values.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    chunk: tuple[int, ...]
    boxes: list[tuple[Box, np.ndarray | Callable[[], np.ndarray]]]

    @property
    def nbytes(self) -> int:
        """The bytes that this host writes."""
        return sum(math.prod(stop - start for start, stop in box) for box, _ in self.boxes) * self.dtype.itemsize


class _Handler(ocp.type_handlers.NumpyHandler):
    """How Orbax writes a `SavedArray`: as it writes a NumPy array, so that anybody reads it as one."""

    async def serialize(self, values: Sequence[Any], infos: Sequence[Any], args: Any = None) -> list[Any]:
        """Write the boxes of some arrays and return when all are written; the values are dropped one by one."""
        pending, size, context = [], 0, _context()
        for array, info in zip(values, infos, strict=True):
            if not array.boxes:
                continue
            store = await ts.open(_write_spec(array, info), create=True, open=True, context=context)
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
    if str(info.parent_dir).startswith("s3://"):
        spec["kvstore"] = kvstore(info.parent_dir / info.name)
    return ts.Spec(spec)


def handler(place: Place) -> ocp.PyTreeCheckpointHandler:
    """Return Orbax's handler of trees of `SavedArray`, for a folder of that kind."""
    registry = ocp.type_handlers.create_type_handler_registry(
        (SavedArray, _Handler()), (jax.Array, ocp.type_handlers.ArrayHandler(array_metadata_store=None))
    )
    return ocp.PyTreeCheckpointHandler(
        use_ocdbt=not str(place).startswith("s3://"),
        use_zarr3=True,
        use_compression=False,
        type_handler_registry=registry,
    )


def orbax_path(place: Place) -> epath.Path:
    """Return a place as Orbax's kind of path."""
    return epath.Path(str(place))


def _context() -> ts.Context:
    """Return TensorStore's limits: caches of chunks that several boxes share, and few tries of a bucket that is silent.

    Caches know files by their path, so that each save and each checkpoint that is read has its own.
    """
    few = {"max_retries": 3}
    cached = {name: {"total_bytes_limit": 1 << 28} for name in ("cache_pool", "cache_pool#ocdbt")}
    return ts.Context({**cached, "s3_request_retries": few, "gcs_request_retries": few})


def kvstore(place: Any) -> dict[str, Any]:
    """Return TensorStore's description of a folder, on disk or in a bucket."""
    scheme, found, rest = str(place).partition("://")
    if not found:
        return {"driver": "file", "path": f"{place}/"}
    bucket, _, key = rest.partition("/")
    if scheme == "gs":
        return {"driver": "gcs", "bucket": bucket, "path": f"{key}/"}
    address = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    spec = {"driver": "s3", "bucket": bucket, "path": f"{key}/"}
    # TensorStore takes an endpoint from its spec alone, and asks AWS for the region of a bucket without one.
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    spec |= {"endpoint": address, "aws_region": region} if address else {}
    # Otherwise it looks for files of credentials first, and prints each that is not there.
    return spec | ({"aws_credentials": {"type": "environment"}} if os.environ.get("AWS_ACCESS_KEY_ID") else {})


@dataclass(frozen=True)
class TreeFiles:
    """The folder of a tree that Orbax has written, by jaxpar or by anybody.

    Attributes:
      place: the folder.
      is_database: whether its arrays lie in an OCDBT database.
      driver: "zarr3", or "zarr" for version 2.
      has_zeros: whether chunks of zeros are written too, so that a missing chunk is damage.
    """

    place: Place
    is_database: bool
    driver: str = "zarr3"
    has_zeros: bool = True
    context: ts.Context = field(default_factory=_context, compare=False)

    def open(self, keys: Sequence[str]) -> Any:
        """Begin to open an array by its key path; returns a future of a TensorStore."""
        name = ".".join(keys)
        database = {
            "driver": "ocdbt",
            "base": kvstore(self.place),
            "path": f"{name}/",
            "cache_pool": "cache_pool#ocdbt",
        }
        spec = {
            "driver": self.driver,
            "kvstore": database if self.is_database else kvstore(self.place / name),
            "recheck_cached_metadata": False,
            "recheck_cached_data": False,
            "fill_missing_data_reads": not self.has_zeros,
        }
        return ts.open(ts.Spec(spec), open=True, read=True, context=self.context)


def fetched(future: Any, name: str, place: Place) -> Any:
    """Wait for TensorStore. Raise Damaged with the name of the array where its data are not what was written, and
    OSError where a bucket refuses or does not answer.
    """
    try:
        return future.result(timeout=20 * ANSWER_SECONDS)
    except Exception as error:  # TensorStore's errors are of several classes; the text begins with the kind
        text = reason(error)
        is_silent = isinstance(error, TimeoutError) or text.startswith(("UNAVAILABLE", "DEADLINE_EXCEEDED"))
        if is_bucket(place) and is_silent:
            raise ConnectionError(errno.EIO, text, str(place)) from error
        if "PERMISSION_DENIED" in text or isinstance(error, PermissionError):
            raise PermissionError(errno.EACCES, text, str(place)) from error
        raise Damaged(f"{name} is not what was written: {text}") from error
