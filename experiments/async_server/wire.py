"""Messages as bytes: a few fields and arrays, framed and checked. Nothing that is read is ever executed.

    magic, 8 bytes | crc32 of what follows the lengths, uint32 | length of the header, uint32 | header, JSON | arrays

All integers are little-endian. The header is {"fields": {...}, "arrays": [[dtype, shape], ...]}, and the arrays follow
in C order without gaps.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

_MAGIC = b"jaxpar1\0"
_HEAD = struct.Struct("<II")
_AHEAD = len(_MAGIC) + _HEAD.size
# Arrays of numbers, and no others: an object array would be pickled.
_DTYPES = {
    name: np.dtype(getattr(jnp, name))
    for name in (
        *("bool_", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("bfloat16", "float16", "float32", "float64", "complex64", "complex128"),
    )
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

Fields = dict[str, Any]


def encode(fields: Mapping[str, Any], arrays: Sequence[np.ndarray] = ()) -> bytes:
    """A message of fields (JSON) and arrays (numbers of any shape).

    Raises ValueError for an array that holds anything but numbers.

    >>> decode(encode({"clock": 3}, [np.arange(2)]))
    ({'clock': 3}, [array([0, 1])])
    """
    about = []
    for x in arrays:
        if x.dtype not in _NAMES:
            raise ValueError(f"an array of {x.dtype} cannot be sent; send numbers, such as float32")
        about.append([_NAMES[x.dtype], list(x.shape)])
    header = json.dumps({"fields": dict(fields), "arrays": about}).encode()
    body = b"".join([header, *(np.ascontiguousarray(x).tobytes() for x in arrays)])
    return _MAGIC + _HEAD.pack(zlib.crc32(body), len(header)) + body


def decode(message: bytes) -> tuple[Fields, list[np.ndarray]]:
    """The fields and arrays of a message; the arrays are views of it and cannot be written to.

    Raises ValueError where it is no message of `encode`, or is damaged.
    """
    if len(message) < _AHEAD or not message.startswith(_MAGIC):
        raise ValueError(f"{len(message)} bytes are no message of jaxpar's asynchronous server: they begin otherwise")
    checksum, length = _HEAD.unpack_from(message, len(_MAGIC))
    body = memoryview(message)[_AHEAD:]
    if zlib.crc32(body) != checksum:
        raise ValueError(f"a message of {len(message)} bytes is damaged: its checksum does not agree; send it again")
    try:
        header = json.loads(bytes(body[:length]))
        fields, about = dict(header["fields"]), [(_DTYPES[name], tuple(shape)) for name, shape in header["arrays"]]
        sizes = [dtype.itemsize * math.prod(_sizes(shape)) for dtype, shape in about]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"a message has a header that cannot be read ({type(error).__name__}: {error})") from error
    if length + sum(sizes) != len(body):
        raise ValueError(f"a message announces {length + sum(sizes)} bytes and holds {len(body)}")
    arrays, at = [], length
    for (dtype, shape), size in zip(about, sizes, strict=True):
        arrays.append(np.frombuffer(body[at : at + size], dtype).reshape(shape))
        at += size
    return fields, arrays


def _sizes(shape: tuple[Any, ...]) -> tuple[int, ...]:
    if not all(isinstance(n, int) and n >= 0 for n in shape):
        raise ValueError(f"shape {shape}")
    return shape
