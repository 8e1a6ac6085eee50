"""Token ids in memory-mapped files, and windows of token ids as rows of a data set."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from filelock import FileLock

from ..backend.buckets import Place, is_bucket, pieces, writing
from ..backend.files import place, plain, user_cache
from ..model.contents import check_mapped, outside

if TYPE_CHECKING:
    from upath import UPath

_MAGIC = b"\x93NUMPY"


def token_ids(path: Place | str, vocabulary: int) -> np.ndarray:
    """Return the token ids in a file, memory-mapped.

    The whole file is read once, in chunks, to check its ids.

    Args:
      path: a `.npy` file of integers [n]; or a `.bin` file of ids alone, uint16 for vocabularies up to 65,536, else
        uint32. A file in a bucket, s3:// or gs://, is copied to this machine first (`local_copy`).
      vocabulary: the model's number of tokens.

    Returns:
      Integers [n].

    Raises:
      ValueError: the file does not exist, is a FIFO or a device, has another form, or contains an id that is not below
        `vocabulary`.
    """
    path = place(path, "path")
    if not path.exists():
        raise ValueError(f"there is no file {path}; give one that exists, or none for Python's own source")
    plain(path)
    # 1. Map the file into memory.
    file = local_copy(path) if is_bucket(path) else path
    if path.suffix == ".npy":
        ids = _map_npy(file, path)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ValueError(f"{path} holds {ids.dtype}{list(ids.shape)}; save token ids as integers [n]")
    else:
        # The file has no header: its dtype follows from the vocabulary.
        dtype = np.dtype(np.uint16 if vocabulary <= 1 << 16 else np.uint32)
        if (size := file.stat().st_size) % dtype.itemsize or not size:
            raise ValueError(
                f"{path} has {size} bytes, and ids of a vocabulary of {vocabulary} are {dtype}, which takes a multiple "
                f"of {dtype.itemsize}; write the file anew, or save other types as .npy"
            )
        ids = np.memmap(file, dtype, mode="r")
    # 2. Check all ids. Under jit, JAX does not: an id beyond the vocabulary would silently read another row.
    if (violation := outside(ids, vocabulary)) is not None:
        token, index = violation
        raise ValueError(
            f"{path} holds token {token}, but the vocabulary has {vocabulary}: 0 to {vocabulary - 1}; "
            f"use the model whose tokenizer made them, or a larger vocab= (it is at {index[0]:,} of {ids.size:,})"
        )
    return ids


def _map_npy(file: Path, path: Place) -> np.ndarray:
    """Return the array of a `.npy` file, memory-mapped; `path` is its name in errors."""
    with file.open("rb") as content:
        prefix = content.read(len(_MAGIC))
    if prefix != _MAGIC:  # numpy.load would also open archives of several arrays, and take other files for pickles
        problem = (
            "is a zip archive, as numpy.savez writes for several arrays" if prefix[:2] == b"PK" else "is no NumPy file"
        )
        raise ValueError(f"{path} {problem}; write one array of integers [n] with numpy.save")
    try:
        return np.load(file, mmap_mode="r", allow_pickle=False)
    # An error of the disk is not one of the file's form.
    except OSError:
        raise
    except Exception as error:  # for a damaged header, NumPy raises its parsers' errors: TokenError, OverflowError, ...
        raise ValueError(
            f"{path} cannot be read as NumPy's array file ({error}); write integers [n] with numpy.save"
        ) from error


def local_copy(path: UPath) -> Path:
    """Return this machine's copy of a file in a bucket; copy it if there is none. Windows are read from all over it.

    Copies are in `$XDG_CACHE_HOME/jaxpar/data` (else `~/.cache/jaxpar/data`). All runs and processes share a copy until
    the file in the bucket changes; then a new copy replaces it. The last copy is never removed.

    Raises:
      OSError: the disk is full, or the bucket does not answer.
    """
    # A folder for each address: the copies in it are older versions of one file.
    folder = user_cache("data", hashlib.sha256(str(path).encode()).hexdigest()[:16])
    folder.mkdir(parents=True, exist_ok=True)
    # `ukey` changes with the file's contents, so the name of an outdated copy differs.
    copy = folder / f"{path.fs.ukey(path.path)[:16]}{path.suffix}"
    # Processes of this machine wait here while one of them copies, and then find the copy.
    with FileLock(folder / ".lock"):
        if not copy.exists():
            for outdated in folder.glob(f"*{path.suffix}*"):
                outdated.unlink()
            # Copy under another name and rename at the end, so that an interrupted copy is never taken for the file.
            with writing(partial_copy := copy.with_name(f"{copy.name}.part")) as write:
                for chunk in pieces(path):
                    write(chunk.data)
            partial_copy.rename(copy)
    return copy


class Windows(Sequence[dict[str, np.ndarray]]):
    """Consecutive windows of token ids as a data set for `Rows`; each row is {"tokens": int32 [T+1]}.

    Neighbouring windows share one token, so that an epoch predicts every token except the first once. The tokens at the
    end that do not fill a window are left out.

    Args:
      ids: integers [n], for example memory-mapped: `jaxpar.data.token_ids(path, vocabulary)`.
      length: T, the number of predictions in a window.

    Raises:
      ValueError: `ids` is not one-dimensional, or has no window of this length.
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
        """Return the window with this index, which may be negative."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"there is no window {index}; the data set has {len(self)}, from 0")
        # Reading beyond the end of a file that was cut off would end the process by SIGBUS.
        check_mapped(self.ids)
        begin = index % len(self) * self.length
        return {"tokens": self.ids[begin : begin + self.length + 1].astype(np.int32)}
