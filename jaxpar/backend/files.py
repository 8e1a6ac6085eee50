"""Files that others have written: what is read is a plain file of a sensible size, in the folder where it belongs."""

import json
import os
import re
import stat
from pathlib import Path
from typing import Any, TypeVar

from .buckets import PACKAGES, Place, bucket, is_bucket
from .packages import needed

At = TypeVar("At", bound=Any)
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_KINDS = {
    stat.S_IFIFO: "a FIFO, which waits for somebody to write",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}
SAFETENSORS = {  # dtypes of numbers, in the words of that format (https://github.com/huggingface/safetensors#format)
    "bool": "BOOL", "int8": "I8", "uint8": "U8", "int16": "I16", "uint16": "U16", "int32": "I32", "uint32": "U32",
    "int64": "I64", "uint64": "U64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
MOST = 1 << 28  # bytes of a text that is read as a whole; the index of a model of 671B parameters has 9 MB


def local(path: os.PathLike[str] | str, name: str) -> Path:
    """A path on this machine's file systems. Raises ValueError for an address, such as gs://bucket/run, which has lost
    a slash as a `Path`.
    """
    if given := _address(path):
        raise ValueError(
            f"{name}={given!r} is an address, needs a path on this machine's file systems; mount the bucket (gcsfuse, "
            "mount-s3, rclone mount) and name its folder, or copy the files to a disk"
        )
    return Path(path)


def place(path: os.PathLike[str] | str | Place, name: str) -> Place:
    """A path on this machine's file systems, or that of an address in s3:// or gs://; nothing is asked of a bucket.

    Raises ValueError for other addresses, and where the library for buckets of its kind is not installed.
    """
    if is_bucket(path):
        return path
    if not (given := _address(path)):
        return Path(path)
    scheme, _, key = given.partition("://")
    if scheme.lower() not in PACKAGES or not key.strip("/"):
        raise ValueError(
            f"{name}={given!r} is an address, needs s3://BUCKET/..., gs://BUCKET/... or a path on this machine's file "
            "systems; mount what it names, or copy the files to a disk"
        )
    for package in (PACKAGES[scheme.lower()], "upath"):
        needed(package, f"{name}={given!r} needs")
    return bucket(given)


def _address(path: os.PathLike[str] | str) -> str:
    address = os.fspath(path)
    if not _ADDRESS.match(address):
        return ""
    return address if "://" in address else address.replace(":/", "://", 1)


def plain(path: At) -> At:
    """The path, of a regular file or a link to one. Raises ValueError for what is no file, OSError where nothing is.

    A FIFO would be waited for without end, a device such as /dev/zero read without end.
    """
    if kind := _KINDS.get(stat.S_IFMT(path.stat().st_mode)):
        raise ValueError(f"{path} is {kind}; needs a file: copy its content into one, or remove it")
    return path


def text_of(path: Place, most: int = MOST) -> str:
    """The text of a plain file. Raises ValueError where it is none, is no UTF-8, or has more than `most` bytes."""
    if (size := plain(path).stat().st_size) > most:
        raise ValueError(f"{path} has {size:,} bytes, needs at most {most:,}; see that it is the file that is meant")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text: {error}; see that it is the file that is meant") from error


def json_of(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds. Raises ValueError where it holds none."""
    try:
        found = json.loads(text_of(path))
    except (json.JSONDecodeError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ValueError(f"{path} cannot be read as JSON: {why}; mend the file, or fetch it once more") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}, needs an object {{...}}; fetch the file once more")
    return found


def member(folder: Path, name: Any, says: Path | None = None) -> Path:
    """The plain file of that name in a folder. Raises ValueError where the name, or a link, leads out of it.

    A folder of Hugging Face's cache, models--NAME/snapshots/REVISION, holds links to models--NAME/blobs: they are
    followed. `says` is the file that gives the name, for the error.
    """
    given = f"{says}: " if says else ""
    if not isinstance(name, str) or not name or "\0" in name:
        raise ValueError(f"{given}{name!r} is no name of a file; needs one in {folder}: fetch the model once more")
    path = folder / name
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"{given}{name!r} leads out of {folder}; needs a file in it: fetch the model from where you "
                         "trust it")  # fmt: skip
    root = folder.resolve()
    home = root.parent.parent if root.parent.name == "snapshots" else root
    if not (real := path.resolve()).is_relative_to(home):
        raise ValueError(f"{given}{path} is a link to {real}, outside of {folder}; copy that file into the folder")
    if not path.exists():
        by = f", which {says.name} names" if says else ""
        raise ValueError(f"{folder} lacks {name}{by}; download the model once more")
    return plain(path)


def sync(path: Place, deep: bool = True) -> None:
    """Have the operating system write a folder, and with `deep` all files below it, to the disk."""
    for root, _, files in os.walk(path) if isinstance(path, Path) else ():
        for name in (*(files if deep else ()), "."):
            descriptor = os.open(Path(root, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        if not deep:
            return
