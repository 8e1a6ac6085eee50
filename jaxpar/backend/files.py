"""Checks of paths and files from users and downloads, before anything is read.

A path may be an address of a bucket (`place`) or must be local (`local`). A file must be a regular file (`plain`) of
moderate size (`text_of`, `json_of`), and a file that another file names must be inside its folder (`member`).
"""

import json
import os
import re
import stat
from pathlib import Path
from typing import Any, TypeVar

from .buckets import PACKAGES, Place, bucket, is_bucket, with_time_limits
from .packages import needed

PathT = TypeVar("PathT", bound=Any)
# The scheme has two characters or more, unlike a drive of Windows (C:/).
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_KINDS = {
    stat.S_IFIFO: "a FIFO, which waits for somebody to write",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}
SAFETENSORS = {  # NumPy dtype -> its name in the format (https://github.com/huggingface/safetensors#format)
    "bool": "BOOL", "int8": "I8", "uint8": "U8", "int16": "I16", "uint16": "U16", "int32": "I32", "uint32": "U32",
    "int64": "I64", "uint64": "U64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
MAX_TEXT_BYTES = 1 << 28  # the largest text that is read; the index of a model of 671B parameters has 9 MB


def local(path: os.PathLike[str] | str, name: str) -> Path:
    """Return a path on this machine's file systems.

    Raises:
      ValueError: the path is an address, such as gs://bucket/run. The error has `name`, the argument with the path.
    """
    if address := _address(path):
        raise ValueError(
            f"{name}={address!r} is an address, and only a path on this machine's file systems will do; mount the "
            "bucket (gcsfuse, mount-s3, rclone mount) and name its folder, or copy the files to a disk"
        )
    return Path(path)


def place(path: os.PathLike[str] | str | Place, name: str) -> Place:
    """Return a path on this machine's file systems, or the path of an address in s3:// or gs://.

    No request is sent to a bucket. `name` is the argument that has the path, for errors.

    Raises:
      ValueError: the address has another scheme, or the library for its buckets is not installed.
    """
    if is_bucket(path):
        return with_time_limits(path)
    if not (address := _address(path)):
        return Path(path)
    scheme, _, key = address.partition("://")
    if scheme.lower() not in PACKAGES or not key.strip("/"):
        raise ValueError(
            f"{name}={address!r} is not an address in a bucket; give s3://BUCKET/..., gs://BUCKET/... or a path on "
            "this machine's file systems (mount what it names, or copy the files to a disk)"
        )
    for package in (PACKAGES[scheme.lower()], "upath"):
        needed(package, f"{name}={address!r} needs")
    return bucket(address)


def _address(path: os.PathLike[str] | str) -> str:
    """Return the address, such as "gs://bucket/run", that a path is; "" if it is none."""
    text = os.fspath(path)
    if not _ADDRESS.match(text):
        return ""
    # `Path("gs://bucket")` is "gs:/bucket": put the lost slash back.
    return text if "://" in text else text.replace(":/", "://", 1)


def user_cache(*names: str) -> Path:
    """Return a folder in the user's folder for caches, which hosts may share by a network disk."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "jaxpar", *names)


def plain(path: PathT) -> PathT:
    """Return the path if it is a regular file or a link to one.

    Reading a FIFO could block forever, and reading a device such as /dev/zero never ends.

    Raises:
      ValueError: it is something else.
      OSError: it does not exist.
    """
    # `stat` follows links, so that a link to a FIFO is refused as well.
    if kind := _KINDS.get(stat.S_IFMT(path.stat().st_mode)):
        raise ValueError(f"{path} is {kind}; give a regular file: copy its content into one, or remove it")
    return path


def text_of(path: Place, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Return the text of a regular file; raise ValueError if it is no UTF-8 or larger than `max_bytes`."""
    if (size := plain(path).stat().st_size) > max_bytes:
        raise ValueError(
            f"{path} has {size:,} bytes, and at most {max_bytes:,} are read; check that it is the right file"
        )
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text: {error}; check that it is the right file") from error


def json_of(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; raise ValueError if it contains none."""
    try:
        content = json.loads(text_of(path))
    except (json.JSONDecodeError, RecursionError) as error:
        problem = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ValueError(f"{path} cannot be read as JSON: {problem}; mend the file, or fetch it once more") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} holds a {type(content).__name__} instead of an object {{...}}; fetch the file once more"
        )
    return content


def member(folder: Path, name: Any, source: Path | None = None) -> Path:
    """Return the regular file of this name in a folder.

    A folder of Hugging Face's cache, models--NAME/snapshots/REVISION, contains links to models--NAME/blobs, which are
    followed.

    Args:
      folder: the folder.
      name: the file's name relative to the folder, which may come from a downloaded index.
      source: the file that contains the name, for errors.

    Raises:
      ValueError: there is no such file, or the name or a link leads out of the folder.
    """
    # A downloaded index may name any file of this machine, directly or by a link.
    prefix = f"{source}: " if source else ""
    if not isinstance(name, str) or not name or "\0" in name:
        raise ValueError(f"{prefix}{name!r} is no name of a file in {folder}; fetch the model once more")
    # 1. The name itself: no absolute path and no "..".
    path = folder / name
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"{prefix}{name!r} leads out of {folder}, and must name a file in it; fetch the model from a "
                         "source that you trust")  # fmt: skip
    # 2. The file behind links, which may be elsewhere in a folder of Hugging Face's cache.
    root = folder.resolve()
    allowed_root = root.parent.parent if root.parent.name == "snapshots" else root
    if not (resolved := path.resolve()).is_relative_to(allowed_root):
        raise ValueError(f"{prefix}{path} is a link to {resolved}, outside of {folder}; copy that file into the folder")
    if not folder.exists():
        raise ValueError(f"there is no folder {folder}; give the folder that has {name}")
    if not path.exists():
        reference = f", which {source.name} names" if source else ""
        raise ValueError(f"{folder} lacks {name}{reference}; download the model once more")
    return plain(path)


def sync(path: Place, deep: bool = True) -> None:
    """Flush a folder, and with `deep` all files below it, from the operating system's cache to the disk."""
    # A bucket shows an object only when it is stored, so that there is nothing to flush.
    for root, _, files in os.walk(path) if isinstance(path, Path) else ():
        # "." is the folder itself: without it, a crash may lose the names of new files.
        for name in (*(files if deep else ()), "."):
            descriptor = os.open(Path(root, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        if not deep:
            return
