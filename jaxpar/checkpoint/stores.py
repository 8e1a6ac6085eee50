"""Reading arrays with TensorStore from a tree that Orbax has written, for jaxpar or for another program.

`Tree` opens the arrays of one folder. `OpenedArray` reads boxes of one array, and turns TensorStore's errors into
`DamagedError`, which names the array, or into an OSError.
"""

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
from .about import TREE, About, DamagedError
from .arrays import Keys, flatten, name_of

_NNX_VALUE = "value"  # last key in the path of a Flax NNX variable, which the model's own paths omit


class Tree:
    """The folder of a tree that Orbax has written. Raises DamagedError if it is not such a folder."""

    def __init__(self, folder: Place):
        self.folder, self._context = folder, context()
        try:
            metadata = json.loads((folder / TREE).read_bytes())
            self._driver = "zarr3" if metadata.get("use_zarr3") else "zarr"
            self._has_zeros = bool(metadata.get("store_array_data_equal_to_fill_value"))
        except (FileNotFoundError, ValueError, AttributeError) as error:
            raise DamagedError(folder, f"{TREE} is not what Orbax writes ({error})") from error
        self._database = None
        if (folder / "manifest.ocdbt").is_file():
            self._database = {"driver": "ocdbt", "base": kvstore(folder), "cache_pool": "cache_pool#ocdbt"}

    def open(self, keys: Keys) -> ts.Future:
        """Begin to open the array with a key path, and return a future of its TensorStore."""
        name = ".".join(keys)
        spec = {
            "driver": self._driver,
            # Without a database, each array is a folder with an object for each chunk.
            "kvstore": {**self._database, "path": f"{name}/"} if self._database else kvstore(self.folder / name),
            # The files of a complete checkpoint do not change: do not ask for newer ones at each read.
            "recheck_cached_metadata": False,
            "recheck_cached_data": False,
            # Orbax may leave out chunks of zeros. If it has written them too, a missing chunk is damage.
            "fill_missing_data_reads": not self._has_zeros,
        }
        return ts.open(ts.Spec(spec), open=True, read=True, context=self._context)

    def about(self) -> About:
        """Describe a tree of another program. Its parameters are the arrays below `params`, or else all."""
        import orbax.checkpoint as ocp
        from etils import epath

        if is_s3(self.folder):
            raise ValueError(
                f"{self.folder} was written by another program, whose checkpoints are read from a disk or gs://; copy "
                "it there"
            )
        try:
            tree = ocp.PyTreeCheckpointHandler().metadata(epath.Path(str(self.folder))).tree
        except Exception as error:  # Orbax lets errors of all its parts through
            raise DamagedError(self.folder, f"Orbax cannot read it: {type(error).__name__}: {reason(error)}") from error
        # 1. The arrays of numbers, by their path in the model.
        arrays, orbax_keys = {}, {}
        for keys, leaf in flatten(tree):
            shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)  # None for texts
            if (
                shape is not None
                and dtype is not None
                and any(jnp.issubdtype(dtype, kind) for kind in (jnp.number, np.bool_))
            ):
                path = keys[:-1] if len(keys) > 1 and keys[-1] == _NNX_VALUE else keys
                orbax_keys[path], arrays[path] = keys, (tuple(shape), np.dtype(dtype))
        # 2. The root of the parameters: the highest `params`, if there is one such.
        roots = {path[: path.index("params") + 1] for path in arrays if "params" in path[:-1]}
        highest = [root for root in roots if len(root) == min(map(len, roots))]
        root = highest[0] if len(highest) == 1 else ()
        while root and all(path[len(root)] == "params" for path in arrays if path[: len(root)] == root):
            root = (*root, "params")  # a state of Linen has params/params
        is_param = lambda path: path[: len(root)] == root
        # 3. The names that jaxpar gives them.
        names = {p: name_of(("params", *p[len(root) :]) if is_param(p) else ("other", *p)) for p in arrays}
        return About(
            step=int(self.folder.name) if self.folder.name.isdecimal() else 0,
            hosts=1,
            strategy="another program",
            arrays={names[path]: array for path, array in arrays.items()},
            paths={names[path]: keys for path, keys in orbax_keys.items()},
        )


@dataclass(frozen=True)
class OpenedArray:
    """An array of a checkpoint that TensorStore is opening.

    Its methods raise DamagedError with the array's name if the data are not what was written, and OSError if a bucket
    refuses access or does not answer.

    Attributes:
      name, folder: of the array, and of the checkpoint.
      shape, dtype: as the checkpoint's description states them.
      future: the TensorStore that is being opened.
    """

    name: str
    folder: Place
    shape: tuple[int, ...]
    dtype: np.dtype
    future: ts.Future

    def check(self) -> Any:
        """Return the TensorStore once it is open. Raises DamagedError unless its shape and dtype are as described."""
        store = self._result(self.future)
        if store.shape != self.shape or store.dtype.numpy_dtype != self.dtype:
            difference = f"{store.dtype.name}{list(store.shape)}, not {self.dtype.name}{list(self.shape)}"
            raise DamagedError(self.folder, f"{self.name} is {difference}")
        return store

    def begin(self, box: Box, into: np.ndarray) -> Callable[[], object]:
        """Begin to read a box of the array, and return a function that waits until it is read.

        Args:
          box: (start, stop) along each dim.
          into: the memory to read into; values are cast to its dtype.
        """
        source = self.check()[tuple(slice(*bounds) for bounds in box)]
        if source.dtype.numpy_dtype != into.dtype:
            source = ts.cast(source, into.dtype)
        # Move the box to the origin, where `into` begins. A scalar has no dim to move along.
        written = ts.array(into).write(source.translate_to[(0,) * source.rank] if source.rank else source)
        return lambda: self._result(written)

    def read(self, box: Box, dtype: np.dtype) -> np.ndarray:
        """Return a box, cast to a dtype."""
        self.check()  # before memory is allocated for a shape that may be wrong
        into = np.empty([stop - start for start, stop in box], dtype)
        self.begin(box, into)()
        return into

    def _result(self, future: Any) -> Any:
        """Wait for a future of TensorStore, and translate its errors."""
        try:
            return future.result(timeout=20 * ANSWER_SECONDS)
        except Exception as error:  # TensorStore raises several classes; the text begins with the kind of error
            text = reason(error)
            is_silent = isinstance(error, TimeoutError) or text.startswith(("UNAVAILABLE", "DEADLINE_EXCEEDED"))
            if is_bucket(self.folder) and is_silent:
                raise ConnectionError(errno.EIO, text, str(self.folder)) from error
            if "PERMISSION_DENIED" in text or isinstance(error, PermissionError):
                raise PermissionError(errno.EACCES, text, str(self.folder)) from error
            raise DamagedError(self.folder, f"{self.name} is not what was written: {text}") from error


def context() -> ts.Context:
    """Return a context of TensorStore: few retries for a silent bucket, and caches of chunks and of database nodes.

    Caches know files by their path only, so each save and each checkpoint that is read gets a context for itself. The
    cache of chunks serves boxes that are read one after the other. Boxes that are read together do not need it to share
    chunks.
    """
    retries = {"max_retries": 3}
    chunk_cache, node_cache = {"total_bytes_limit": 1 << 26}, {"total_bytes_limit": 1 << 28}
    caches = {"cache_pool": chunk_cache, "cache_pool#ocdbt": node_cache}
    return ts.Context({**caches, "s3_request_retries": retries, "gcs_request_retries": retries})


def kvstore(folder: Any) -> dict[str, Any]:
    """Return TensorStore's description of a folder, on disk or in a bucket."""
    scheme, separator, address = str(folder).partition("://")
    if not separator:
        return {"driver": "file", "path": f"{folder}/"}
    bucket, _, key = address.partition("/")
    if scheme == "gs":
        return {"driver": "gcs", "bucket": bucket, "path": f"{key}/"}
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    spec = {"driver": "s3", "bucket": bucket, "path": f"{key}/"}
    # TensorStore takes an endpoint only from its spec. Without a region it would ask AWS for the region of the bucket.
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    spec |= {"endpoint": endpoint, "aws_region": region} if endpoint else {}
    # Without this it looks for files of credentials first, and prints each one that is missing.
    return spec | ({"aws_credentials": {"type": "environment"}} if os.environ.get("AWS_ACCESS_KEY_ID") else {})


def is_s3(folder: Any) -> bool:
    """Return whether a folder is in an S3 bucket, where Orbax cannot name an OCDBT database."""
    return str(folder).startswith("s3://")
