"""The files of a checkpoint: one of arrays and one table for each host that wrote, and `about.json`.

A file of arrays is a safetensors file (https://github.com/huggingface/safetensors#format): any reader of that format
opens it. Its header is not needed here, where the table says which box of which array begins at which byte, with the
checksum of the box. Tables and `about.json` hold a CRC-32 of their content. So every byte is covered: that of an array
by the checksum of its box, that of a header by a CRC in the table.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes  # comes with jax; NumPy then knows bfloat16 and the like by name
import numpy as np

from ..buckets import Place, Ranges, writing
from ..files import SAFETENSORS
from .boxes import Box, common, slices
from .checksum import checksum

ABOUT = "about.json"
_MOST = 1 << 62  # of a number in a table: more is no size
_PIECE = 1 << 24  # bytes that are written at a time


class Damaged(ValueError):
    """A file of a checkpoint that is missing, incomplete, or not what was written."""


@dataclass(frozen=True)
class StoredBox:
    """A box of an array, as a file holds it: contiguous, the last dim fastest, little-endian.

    Attributes:
      name: whose.
      box: which part of it.
      offset: its first byte in the file.
      sum: its checksum.
    """

    name: str
    box: Box
    offset: int
    sum: int


def names_of(host: int) -> tuple[str, str]:
    """The files that a host writes: of arrays, and their table."""
    return f"arrays-{host:05}.safetensors", f"arrays-{host:05}.json"


def write_arrays(folder: Place, host: int, boxes: Iterable[tuple[str, Box, Any]]) -> None:
    """Writes what one host holds: arrays, or what NumPy makes arrays of, which is then one at a time. Each is forgotten
    once it is written.
    """
    # The widest first: then all are where their width divides.
    waiting = sorted(boxes, key=lambda box: -box[2].dtype.itemsize)
    offset, header, offsets = 0, {}, []
    for name, box, x in waiting:
        kind = SAFETENSORS.get(x.dtype.name)  # what it has no word for is written as bytes, with a last dim
        label = name if all(a == 0 for a, _ in box) and name not in header else f"{name}{[list(dim) for dim in box]}"
        shape = [*x.shape] if kind else [*x.shape, x.dtype.itemsize]
        header[label] = {"dtype": kind or "U8", "shape": shape, "data_offsets": [offset, offset + x.nbytes]}
        offsets.append(offset)
        offset += x.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    begin = 8 + len(text)
    file, table = names_of(host)
    rows: list[dict[str, Any]] = []
    with writing(folder / file, begin + offset) as out:
        out(len(text).to_bytes(8, "little") + text)
        waiting.reverse()
        for at in offsets:
            name, box, x = waiting.pop()
            x = np.ascontiguousarray(x).reshape(x.shape)  # which makes one dim of none
            rows.append({"name": name, "box": box, "offset": begin + at, "sum": f"{_write(out, box, x):016x}"})
            del x
    entry = {"file": file, "bytes": begin + offset, "header": zlib.crc32(len(text).to_bytes(8, "little") + text)}
    write_json(folder / table, {**entry, "boxes": rows})


def _write(out: Callable[[Any], object], box: Box, x: np.ndarray) -> int:
    flat = x.reshape(-1).view(np.uint8)
    for at in range(0, flat.size, _PIECE):
        out(flat[at : at + _PIECE].data)
    return checksum(x, [start for start, _ in box])


def write_json(path: Place, content: Any) -> None:
    """Writes JSON with the CRC-32 of its content."""
    text = _canonical(content)
    with writing(path) as out:
        out(f'{{"crc32": {zlib.crc32(text.encode())}, "content": {text}}}\n'.encode())


def read_json(path: Place) -> Any:
    """The content of such a file. Raises Damaged where it is not what was written."""
    try:
        found = json.loads(path.read_bytes())
        content, crc = found["content"], found["crc32"]
        if len(found) == 2 and crc == zlib.crc32(_canonical(content).encode()) and type(crc) is int:
            return content
        why = "its checksum is another"
    except ConnectionError:  # a bucket that does not answer is not damaged
        raise
    except OSError as error:
        raise Damaged(f"{path.name} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:  # whatever JSON says of what is no JSON
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
    raise Damaged(f"{path.name} is damaged ({why})")


def _canonical(content: Any) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


class Arrays:
    """What one host wrote, mapped into memory, or in a bucket: nothing is read before it is asked for.

    Raises Damaged where table and file do not agree with each other, or with the shapes and dtypes of `arrays`.
    """

    def __init__(self, folder: Place, host: int, arrays: Mapping[str, tuple[tuple[int, ...], np.dtype]]):
        file, table = names_of(host)
        content = mapping(read_json(folder / table), table)
        total = number(content.get("bytes"), f"{table}: bytes")
        self.file, self.blocks = file, [_block(row, table, arrays) for row in sequence(content.get("boxes"), table)]
        for block in self.blocks:
            if block.offset + _bytes(block, arrays) > total:
                raise Damaged(f"{table}: {block.name} ends behind the {total} bytes of {file}")
        try:
            path = folder / file
            if (there := path.stat().st_size) != total:
                raise Damaged(f"{file} has {there} bytes, and was written with {total}")
            mapped = lambda path: np.memmap(path, np.uint8, "r") if total else np.empty(0, np.uint8)
            self._bytes = mapped(path) if isinstance(path, Path) else Ranges(path)
        except ConnectionError:
            raise
        except OSError as error:
            raise Damaged(f"{file} cannot be read: {error.strerror}") from error
        begin = min((block.offset for block in self.blocks), default=total)
        if zlib.crc32(self._bytes[:begin].tobytes()) != content.get("header"):
            raise Damaged(f"the header of {file} is damaged")
        self._arrays = arrays

    def pieces(self, block: StoredBox, box: Box | None = None) -> Iterator[tuple[Box, np.ndarray]]:
        """What a block holds of a box (of all, if None), as boxes and their arrays, 16 MiB of rows at a time; on disk
        they are views of the file.
        """
        _, dtype = self._arrays[block.name]
        if (wanted := block.box if box is None else common(box, block.box)) is None:
            return
        shape = [stop - start for start, stop in block.box]
        row = math.prod(shape[1:]) * dtype.itemsize
        (first, last), (origin, _) = (wanted[0], block.box[0]) if shape else ((0, 1), (0, 1))
        rows = max(1, _PIECE // max(row, 1))
        for at in range(first, last, rows):
            end = min(at + rows, last)
            begin = block.offset + (at - origin) * row
            flat = self._bytes[begin : begin + (end - at) * row]
            array = flat.view(dtype).reshape([end - at, *shape[1:]] if shape else [])
            lead = ((at, end),) * bool(shape)
            part = (*lead, *wanted[1:])
            yield part, array[(*slices(part, (*lead, *block.box[1:])), ...)]


def _block(row: Any, table: str, arrays: Mapping[str, tuple[tuple[int, ...], np.dtype]]) -> StoredBox:
    row = mapping(row, table)
    name = row.get("name")
    if not isinstance(name, str) or name not in arrays:
        raise Damaged(f"{table}: {str(name)[:100]!r} is not an array of {ABOUT}")
    pairs = [[number(n, f"{table}: {name}") for n in sequence(dim, table)] for dim in sequence(row.get("box"), table)]
    shape = arrays[name][0]
    if len(pairs) != len(shape) or not all(
        len(pair) == 2 and pair[0] <= pair[1] <= n for pair, n in zip(pairs, shape, strict=True)
    ):
        raise Damaged(f"{table}: {str(pairs)[:100]} is no box of {name} {list(shape)}")
    try:
        total = int(row["sum"], 16)
    except (KeyError, TypeError, ValueError) as error:
        raise Damaged(f"{table}: {name} has no checksum") from error
    box = tuple((start, stop) for start, stop in pairs)
    return StoredBox(name, box, number(row.get("offset"), f"{table}: offset of {name}"), total)


def _bytes(block: StoredBox, arrays: Mapping[str, tuple[tuple[int, ...], np.dtype]]) -> int:
    return math.prod(stop - start for start, stop in block.box) * arrays[block.name][1].itemsize


# -- what a crafted or damaged file might hold instead -----------------------------------------------------------------


def number(value: Any, what: str) -> int:
    """A size or a count. Raises Damaged for anything else."""
    if type(value) is not int or not 0 <= value < _MOST:
        raise Damaged(f"{what} is {str(value)[:50]!r}, needs a whole number from 0")
    return value


def mapping(value: Any, what: str) -> dict[str, Any]:
    """A JSON object. Raises Damaged for anything else."""
    if not isinstance(value, dict):
        raise Damaged(f"{what} has a {type(value).__name__} where an object is needed")
    return value


def sequence(value: Any, what: str) -> list[Any]:
    """A JSON array. Raises Damaged for anything else."""
    if not isinstance(value, list):
        raise Damaged(f"{what} has a {type(value).__name__} where a list is needed")
    return value


def dtype_of(name: Any, what: str) -> np.dtype:
    """A dtype of numbers by its name. Raises Damaged for anything else."""
    try:
        found = np.dtype(getattr(ml_dtypes, name) if hasattr(ml_dtypes, name) else name)
        if found.name == name and found.itemsize and not found.hasobject:
            return found
    except (TypeError, ValueError, AttributeError):  # whatever NumPy says of what is no dtype
        pass
    raise Damaged(f"{what} has the dtype {str(name)[:50]!r}, which is none of numbers")
