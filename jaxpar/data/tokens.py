"""Token ids in files, memory-mapped, and windows of them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from filelock import FileLock

from ..backend.buckets import Place, is_bucket, pieces, writing
from ..backend.files import place, plain
from ..model.contents import check_mapped, outside

if TYPE_CHECKING:
    from upath import UPath

_MAGIC = b"\x93NUMPY"


def token_ids(path: Place | str, vocabulary: int) -> np.ndarray:
    """Token ids [n] of a file, memory-mapped: `.npy` with integers, or `.bin` with nothing but ids, uint16 for
    vocabularies up to 65,536, else uint32. That of an address in s3:// or gs:// is copied first: see `kept`.

    Raises ValueError where the file is missing, a FIFO or a device, or not of that form, or holds an id that is not
    below `vocabulary`; for this all of it is read once, a piece at a time.
    """
    path = place(path, "path")
    if not path.exists():
        raise ValueError(f"there is no file {path}; give one that exists, or none for Python's own source")
    plain(path)
    file = kept(path) if is_bucket(path) else path
    if path.suffix == ".npy":
        ids = _mapped(file, path)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ValueError(f"{path} holds {ids.dtype}{list(ids.shape)}; save token ids as integers [n]")
    else:
        dtype = np.dtype(np.uint16 if vocabulary <= 1 << 16 else np.uint32)
        if (size := file.stat().st_size) % dtype.itemsize or not size:
            raise ValueError(
                f"{path} has {size} bytes, for a vocabulary of {vocabulary} it needs {dtype} ids: "
                f"a multiple of {dtype.itemsize}; save other types as .npy"
            )
        ids = np.memmap(file, dtype, mode="r")
    if (wrong := outside(ids, vocabulary)) is not None:
        raise ValueError(
            f"{path} holds token {wrong[0]}, but the vocabulary has {vocabulary}: 0 to {vocabulary - 1}; "
            f"use the model whose tokenizer made them, or a larger vocab= (it is at {wrong[1][0]:,} of {ids.size:,})"
        )
    return ids


def _mapped(file: Path, path: Place) -> np.ndarray:
    """The array of a `.npy` file, memory-mapped; `path` is its name in errors."""
    with file.open("rb") as content:
        begin = content.read(len(_MAGIC))
    if begin != _MAGIC:  # NumPy would open an archive of several arrays, and run code of the rest if it were allowed to
        what = "is a zip archive, as numpy.savez writes of several arrays" if begin[:2] == b"PK" else "is no NumPy file"
        raise ValueError(f"{path} {what}; write one array of integers [n] with numpy.save")
    try:
        return np.load(file, mmap_mode="r", allow_pickle=False)
    except OSError:
        raise
    except Exception as error:  # of a damaged header NumPy raises what its parsers do: TokenError, OverflowError, ...
        raise ValueError(
            f"{path} cannot be read as NumPy's array file ({error}); write integers [n] with numpy.save"
        ) from error


def kept(path: UPath) -> Path:
    """The copy on this machine of a file in a bucket, since windows are read from all over it: in
    `$XDG_CACHE_HOME/jaxpar/data` (else `~/.cache`), made once for all runs and processes, until the file in the bucket
    is another. Nothing removes the last one. Raises OSError where there is no room, or no answer.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxpar" / "data"
    folder = base / hashlib.sha256(str(path).encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    copy = folder / f"{path.fs.ukey(path.path)[:16]}{path.suffix}"
    with FileLock(folder / ".lock"):
        if not copy.exists():
            for old in folder.glob(f"*{path.suffix}*"):
                old.unlink()
            with writing(part := copy.with_name(f"{copy.name}.part")) as write:
                for piece in pieces(path):
                    write(piece.data)
            part.rename(copy)
    return copy


class Windows(Sequence[dict[str, np.ndarray]]):
    """Windows of token ids [n], one after another, as rows of `Rows`: {"tokens": int32 [T+1]}, neighbours sharing one
    token, so that in an epoch every token but the first is predicted once; what fills no window at the end is left out.

    Args:
      ids: integers [n], for example memory-mapped: `jaxpar.data.token_ids(path, vocabulary)`.
      length: T.
    """

    def __init__(self, ids: np.ndarray, length: int):
        if ids.ndim != 1 or not 0 < length < ids.size:
            raise ValueError(
                f"length={length} needs token ids [n] with n above it, got {ids.dtype}{list(ids.shape)}; use a length "
                f"from 1 to {max(1, ids.size - 1)}"
            )
        self.ids, self.length = ids, length

    def __len__(self) -> int:
        return (self.ids.size - 1) // self.length

    def __getitem__(self, index: Any) -> Any:
        """The window `index`."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        check_mapped(self.ids)
        begin = index % len(self) * self.length
        return {"tokens": self.ids[begin : begin + self.length + 1].astype(np.int32)}
