"""Places in buckets: paths of `universal_pathlib` on s3fs and gcsfs, each of whose calls ends within a time.

A bucket has objects and no folders. Nothing in it can be appended to, renamed or locked; an object appears once all of
it is there. Credentials and endpoint are those that s3fs and gcsfs find: AWS_PROFILE, AWS_ENDPOINT_URL, gcloud's login.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from .text import reason

if TYPE_CHECKING:
    from typing_extensions import TypeIs
    from upath import UPath

    Place: TypeAlias = Path | UPath
else:
    Place = Path  # nobody looks at it when the program runs; universal_pathlib comes with the extra "buckets"

PACKAGES = {"s3": "s3fs", "gs": "gcsfs"}
ANSWER_SECONDS = 40  # a bucket that has not answered by then is not asked again for as long
_PIECE = 1 << 26  # bytes that are asked for at once
_REFUSALS = FileNotFoundError, PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError
_silent: dict[str, tuple[float, str]] = {}  # buckets that did not answer: when, and the error


def bucket(address: str) -> UPath:
    """Return the path of an address such as "s3://bucket/runs/mine". Its methods are those of `pathlib.Path`.

    They raise OSError with the address: FileNotFoundError, PermissionError, or ConnectionError without an answer.
    """
    import fsspec.config
    from upath import UPath

    scheme, _, key = address.partition("://")
    # Orbax's own paths read this configuration too. Other processes write to the bucket, so no list of it is kept.
    fsspec.config.conf.setdefault(scheme.lower(), {}).setdefault("use_listings_cache", False)
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it prints the traceback of what it raises
    path = UPath(f"{scheme.lower()}:/{PurePosixPath('/', key)}")
    path._fs_cached = _Answering(path.fs, scheme.lower())  # type: ignore[assignment]  # paths made of it share it
    return path


class _Answering:
    """A file system of fsspec. A call that has no answer within a time raises ConnectionError with the address.

    The libraries themselves try again for minutes, and wait without end for a server that takes no more bytes.
    """

    def __init__(self, system: Any, scheme: str):
        self._system, self._scheme = system, scheme

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._system, name)
        return functools.partial(self._ask, value) if callable(value) else value

    def _ask(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        path = next((x for x in args if isinstance(x, str) and "/" in x), str(next(iter(args), "")))
        return _answer(lambda: call(*args, **kwargs), f"{self._scheme}://{path.partition('://')[2] or path}")


def answered(place: Place, call: Callable[[], Any], seconds: float | None = None) -> Any:
    """Return what a call on a place returns. In a bucket, raise ConnectionError where it takes longer than `seconds`,
    `ANSWER_SECONDS` if None.
    """
    return _answer(call, str(place), seconds) if is_bucket(place) else call()


def _answer(call: Callable[[], Any], address: str, seconds: float | None = None) -> Any:
    name, seconds = "/".join(address.split("/")[:3]), seconds or ANSWER_SECONDS
    when, text = _silent.get(name, (-ANSWER_SECONDS, ""))
    if time.monotonic() < when + ANSWER_SECONDS:  # a run that ends for it asks several times on its way out
        raise ConnectionError(errno.EIO, text, address)
    answers: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put((call(), None))
        except Exception as error:  # the three libraries' errors have no class in common
            answers.put((None, error))

    threading.Thread(target=ask, name="jaxpar-bucket", daemon=True).start()
    try:
        result, error = answers.get(timeout=seconds)
    except queue.Empty:
        result, error = None, TimeoutError(f"no answer in {seconds} s")
    if error is None:
        return result
    text = getattr(error, "strerror", None) or reason(error)
    code = error.errno if isinstance(error, OSError) else None
    is_denied = isinstance(error, PermissionError) or text.startswith("PERMISSION_DENIED")  # TensorStore's word
    if is_denied or isinstance(error, _REFUSALS) or code == errno.EINVAL:  # their text may be no more than the key
        code = code or (errno.EACCES if is_denied else errno.ENOENT)
        raise OSError(code, text if " " in text else os.strerror(code), address) from error
    _silent[name] = time.monotonic(), (text := f"{type(error).__name__}: {text}")
    raise ConnectionError(errno.EIO, text, address) from error


def is_bucket(place: Any) -> TypeIs[UPath]:
    """Return whether a place is in a bucket, and not on this machine's file systems."""
    return not isinstance(place, PurePath) and hasattr(place, "storage_options")


def pieces(place: UPath) -> Iterator[np.ndarray]:
    """Yield the bytes of an object, uint8 [n], 64 MiB at a time."""
    size = place.stat().st_size
    for begin in range(0, size, _PIECE):
        data: Any = place.fs.cat_file(place.path, start=begin, end=min(begin + _PIECE, size))
        if len(data) != min(_PIECE, size - begin):
            raise OSError(errno.EIO, f"it had {size} bytes, and is another object now", str(place))
        yield np.frombuffer(data, np.uint8)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[Callable[[Any], object]]:
    """Yield a function that writes bytes to a file. At the end of the block all of them are on disk."""
    with path.open("wb") as file:
        yield file.write
        file.flush()
        os.fsync(file.fileno())


def remove(place: Place) -> None:
    """Remove a file, a link, or a folder with everything in it."""
    if is_bucket(place):
        place.fs.rm(place.path, recursive=True)
    elif place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink()


def below(folder: Place) -> dict[PurePath, Place]:
    """Return everything in a folder, at any depth, by its path relative to the folder; of a bucket, the objects."""
    if not is_bucket(folder):
        return {path.relative_to(folder): path for path in folder.rglob("*")}
    root = PurePosixPath(folder.path)
    # A folder that a console has made is an object of no bytes whose name ends with a slash.
    keys = [key for key in folder.fs.find(folder.path) if key[-1] != "/"]
    return {key: folder / str(key) for key in (PurePosixPath(key).relative_to(root) for key in keys)}


def rename(place: Place, target: Place) -> None:
    """Give a folder another name: at once on disk; in a bucket object by object, so that a kill leaves both."""
    if is_bucket(place) and is_bucket(target):
        for name in below(place):
            place.fs.cp_file((place / str(name)).path, (target / str(name)).path)
        remove(place)
    else:
        place.rename(target)  # type: ignore[arg-type]  # both are on disk
