"""Arrays in files that TensorStore reads: of a tree that Orbax has written, for jaxpar or for anybody."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
import tensorstore as ts

from ..backend.buckets import ANSWER_SECONDS, Place, is_bucket
from ..backend.text import reason
from ..layout.boxes import Box
from .about import TREE, About, Damaged
from .arrays import Keys, flatten, name_of

_ATTRIBUTE = "value"  # of a variable of Flax NNX, the last key of its path


class Tree:
    """The folder of a tree that Orbax has written. Raises Damaged where it is none."""

    def __init__(self, folder: Place):
        self.folder, self._context = folder, context()
        try:
            metadata = json.loads((folder / TREE).read_bytes())
            self._driver = "zarr3" if metadata.get("use_zarr3") else "zarr"
            self._has_zeros = bool(metadata.get("store_array_data_equal_to_fill_value"))
        except (FileNotFoundError, ValueError, AttributeError) as error:
            raise Damaged(folder, f"{TREE} is not what Orbax writes ({error})") from error
        self._database = None
        if (folder / "manifest.ocdbt").is_file():
            self._database = {"driver": "ocdbt", "base": kvstore(folder), "cache_pool": "cache_pool#ocdbt"}

    def open(self, keys: Keys) -> ts.Future:
        """Begin to open an array by its key path; returns a future of a TensorStore."""
        name = ".".join(keys)
        spec = {
            "driver": self._driver,
            "kvstore": {**self._database, "path": f"{name}/"} if self._database else kvstore(self.folder / name),
            "recheck_cached_metadata": False,
            "recheck_cached_data": False,
            "fill_missing_data_reads": not self._has_zeros,  # where zeros are written too, a missing chunk is damage
        }
        return ts.open(ts.Spec(spec), open=True, read=True, context=self._context)

    def about(self) -> About:
        """Describe a tree of another program: the arrays below its `params`, or all of them, are the parameters."""
        import orbax.checkpoint as ocp
        from etils import epath

        if is_s3(self.folder):
            where = "another program, whose checkpoints are read from disk or gs://; copy it"
            raise ValueError(f"{self.folder} was written by {where}")
        try:
            tree = ocp.PyTreeCheckpointHandler().metadata(epath.Path(str(self.folder))).tree
        except Exception as error:  # Orbax raises what its parts raise
            raise Damaged(self.folder, f"Orbax cannot read it: {type(error).__name__}: {reason(error)}") from error
        arrays, keys_of = {}, {}
        for keys, leaf in flatten(tree):
            shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)  # a text has none
            if (
                shape is not None
                and dtype is not None
                and any(jnp.issubdtype(dtype, kind) for kind in (jnp.number, np.bool_))
            ):
                path = keys[:-1] if len(keys) > 1 and keys[-1] == _ATTRIBUTE else keys
                keys_of[path], arrays[path] = keys, (tuple(shape), np.dtype(dtype))
        roots = {path[: path.index("params") + 1] for path in arrays if "params" in path[:-1]}
        highest = [root for root in roots if len(root) == min(map(len, roots))]
        root = highest[0] if len(highest) == 1 else ()
        while root and all(path[len(root)] == "params" for path in arrays if path[: len(root)] == root):
            root = (*root, "params")  # of Linen's variables in a state
        is_param = lambda path: path[: len(root)] == root
        names = {p: name_of(("params", *p[len(root) :]) if is_param(p) else ("other", *p)) for p in arrays}
        return About(
            step=int(self.folder.name) if self.folder.name.isdecimal() else 0,
            hosts=1,
            strategy="another program",
            arrays={names[path]: array for path, array in arrays.items()},
            paths={names[path]: keys for path, keys in keys_of.items()},
        )


@dataclass(frozen=True)
class OpenedArray:
    """An array of a checkpoint that TensorStore is opening.

    Its methods raise Damaged, with its name, where its data are not what was written, and OSError where a bucket
    refuses or does not answer.
    """

    name: str
    folder: Place
    shape: tuple[int, ...]
    dtype: np.dtype
    future: ts.Future

    def check(self) -> Any:
        """Return the TensorStore once it is open, with the shape and the dtype of the description."""
        store = self._result(self.future)
        if store.shape != self.shape or store.dtype.numpy_dtype != self.dtype:
            here = f"{store.dtype.name}{list(store.shape)}, not {self.dtype.name}{list(self.shape)}"
            raise Damaged(self.folder, f"{self.name} is {here}")
        return store

    def begin(self, box: Box, into: np.ndarray) -> Callable[[], object]:
        """Begin to read a box into memory, cast to its dtype; return a function that waits for the end."""
        source = self.check()[tuple(slice(*bounds) for bounds in box)]
        if source.dtype.numpy_dtype != into.dtype:
            source = ts.cast(source, into.dtype)
        written = ts.array(into).write(source.translate_to[(0,) * source.rank] if source.rank else source)
        return lambda: self._result(written)

    def read(self, box: Box, dtype: np.dtype) -> np.ndarray:
        """Return a box, cast to a dtype."""
        self.check()  # before room is made for a shape that is not true
        into = np.empty([stop - start for start, stop in box], dtype)
        self.begin(box, into)()
        return into

    def _result(self, future: Any) -> Any:
        try:
            return future.result(timeout=20 * ANSWER_SECONDS)
        except Exception as error:  # TensorStore's errors are of several classes; the text begins with the kind
            text = reason(error)
            is_silent = isinstance(error, TimeoutError) or text.startswith(("UNAVAILABLE", "DEADLINE_EXCEEDED"))
            if is_bucket(self.folder) and is_silent:
                raise ConnectionError(errno.EIO, text, str(self.folder)) from error
            if "PERMISSION_DENIED" in text or isinstance(error, PermissionError):
                raise PermissionError(errno.EACCES, text, str(self.folder)) from error
            raise Damaged(self.folder, f"{self.name} is not what was written: {text}") from error


def context() -> ts.Context:
    """Return TensorStore's limits: few tries of a silent bucket, and caches of chunks and of a database's nodes.

    Caches know files by their path, so that each save and each checkpoint that is read has its own. The cache of chunks
    serves boxes that are read one after the other; boxes that are read at the same time share chunks without it.
    """
    few, chunks, nodes = {"max_retries": 3}, {"total_bytes_limit": 1 << 26}, {"total_bytes_limit": 1 << 28}
    caches = {"cache_pool": chunks, "cache_pool#ocdbt": nodes}
    return ts.Context({**caches, "s3_request_retries": few, "gcs_request_retries": few})


def kvstore(folder: Any) -> dict[str, Any]:
    """Return TensorStore's description of a folder, on disk or in a bucket."""
    scheme, found, rest = str(folder).partition("://")
    if not found:
        return {"driver": "file", "path": f"{folder}/"}
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


def is_s3(folder: Any) -> bool:
    """Return whether a folder is in a bucket of S3, where Orbax cannot name a database."""
    return str(folder).startswith("s3://")
