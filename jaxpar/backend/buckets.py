"""Paths in buckets: `universal_pathlib` on s3fs and gcsfs, with a time limit for every call.

A `Place` is a path on disk or in a bucket; the functions here work on both. A bucket has objects but no folders. Its
objects cannot be appended to, renamed or locked, and an object appears only when it is complete. s3fs and gcsfs find
credentials and endpoint themselves: AWS_PROFILE, AWS_ENDPOINT_URL, gcloud's login.

A call on a bucket runs in a daemon thread, whose answer the caller awaits for `ANSWER_SECONDS`. After that, all calls
on this bucket fail at once for as long again, because a run that ends sends several more.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import queue
import re
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
    Place = Path  # for annotations only: universal_pathlib is part of the extra "buckets" and may not be installed

PACKAGES = {"s3": "s3fs", "gs": "gcsfs"}  # scheme -> the library for it
ANSWER_SECONDS = 40  # the time limit of a call, and the time in which a silent bucket gets no further calls
_CHUNK_BYTES = 1 << 26  # bytes of one request
# Errors that are answers: the bucket refuses the call.
_REFUSALS = FileNotFoundError, PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError
_silent_buckets: dict[str, tuple[float, str]] = {}  # bucket -> when a call failed without an answer, and its error


def bucket(address: str) -> UPath:
    """Return the path of an address such as "s3://bucket/runs/mine". Its methods are those of `pathlib.Path`.

    They raise OSError with the address: FileNotFoundError, PermissionError, or ConnectionError without an answer.
    """
    import fsspec.config
    from upath import UPath

    scheme, _, key = address.partition("://")
    # Other processes write to the bucket, so listings are not cached. Orbax's own paths read this configuration too.
    fsspec.config.conf.setdefault(scheme.lower(), {}).setdefault("use_listings_cache", False)
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it logs the traceback of each error that it raises
    return with_time_limits(UPath(f"{scheme.lower()}:/{PurePosixPath('/', key)}"))


def with_time_limits(path: UPath) -> UPath:
    """Return a path of universal_pathlib, such as a user gives, with a time limit for each of its calls."""
    if path.protocol not in PACKAGES or isinstance(path.fs, _TimedFileSystem):
        return path
    path = type(path)(path)
    path._fs_cached = _TimedFileSystem(path.fs, path.protocol)  # type: ignore[assignment]  # its children share it
    return path


class _TimedFileSystem:
    """A file system of fsspec whose calls raise ConnectionError with the address if they get no answer in time.

    The libraries themselves retry for minutes, and wait forever for a server that has stopped receiving.
    """

    def __init__(self, file_system: Any, scheme: str):
        self._file_system, self._scheme = file_system, scheme

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._file_system, name)
        return functools.partial(self._timed_call, value) if callable(value) else value

    def mkdir(self, path: str, **_: Any) -> None:
        """Check that the bucket exists. A bucket has no folders, and s3fs and gcsfs would create a missing bucket.

        Raises:
          FileNotFoundError: the bucket does not exist.
        """
        name = path.partition("/")[0]
        address = f"{self._scheme}://{name}"
        # Listing objects needs no right to ask for the bucket itself.
        if self._scheme == "s3":
            list_one = lambda: self._file_system.call_s3("list_objects_v2", Bucket=name, MaxKeys=1)
        else:
            list_one = lambda: self._file_system.call("GET", "b/{}/o", name, maxResults=1, json_out=True)
        try:
            _await_answer(list_one, address)
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, "the bucket does not exist", address) from None
        except PermissionError:  # reading and writing objects may be allowed
            pass

    def _timed_call(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # The first argument that looks like a path is the address in errors.
        path = next((x for x in args if isinstance(x, str) and "/" in x), str(next(iter(args), "")))
        return _await_answer(lambda: call(*args, **kwargs), f"{self._scheme}://{path.partition('://')[2] or path}")


def answered(place: Place, call: Callable[[], Any], seconds: float | None = None) -> Any:
    """Return the result of a call on a place. In a bucket it has a time limit: `seconds`, or else `ANSWER_SECONDS`.

    Raises:
      ConnectionError: the bucket has not answered in time.
    """
    return _await_answer(call, str(place), seconds) if is_bucket(place) else call()


def _await_answer(call: Callable[[], Any], address: str, seconds: float | None = None) -> Any:
    """Run a call in a thread and return its result, or raise OSError with the address.

    Raises:
      ConnectionError: there was no answer in time, or an error that is none of the bucket's refusals.
      OSError: the bucket refuses the call, as FileNotFoundError or PermissionError.
    """
    bucket_address, seconds = "/".join(address.split("/")[:3]), seconds or ANSWER_SECONDS
    failure_time, text = _silent_buckets.get(bucket_address, (-ANSWER_SECONDS, ""))
    if time.monotonic() < failure_time + ANSWER_SECONDS:
        raise ConnectionError(errno.EIO, text, address)

    # 1. Run the call. The thread is a daemon, so a call that never returns does not keep the process alive.
    # A late answer goes into a queue that nobody reads any more, so that it blocks no thread.
    answers: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

    def run_call() -> None:
        try:
            answers.put((call(), None))
        except Exception as error:  # s3fs, gcsfs and TensorStore have no common class of errors
            answers.put((None, error))

    threading.Thread(target=run_call, name="jaxpar-bucket", daemon=True).start()
    try:
        result, error = answers.get(timeout=seconds)
    except queue.Empty:
        result, error = None, TimeoutError(f"no answer in {seconds} s")
    if error is None:
        return result

    # 2. Translate the error: a refusal keeps its class, anything else is a lost connection.
    text = getattr(error, "strerror", None) or reason(error)
    code = error.errno if isinstance(error, OSError) else None
    is_denied = isinstance(error, PermissionError)
    # TensorStore gives its own class, the status of the server's answer or both, and not always the server's words.
    status = re.search(r"\[http_response_code='(401|403)'\]", str(error))
    if status or text.startswith("PERMISSION_DENIED"):
        is_denied, answer = True, f" (HTTP {status[1]})" if status else ""
        text = f"the bucket refuses access{answer}; check the credentials and their rights: {text}"
    if is_denied or isinstance(error, _REFUSALS) or code == errno.EINVAL:
        code = code or (errno.EACCES if is_denied else errno.ENOENT)
        # The text of a refusal may be the key alone; then describe the code.
        raise OSError(code, text if " " in text else os.strerror(code), address) from error
    _silent_buckets[bucket_address] = time.monotonic(), (text := f"{type(error).__name__}: {text}")
    raise ConnectionError(errno.EIO, text, address) from error


def is_bucket(place: Any) -> TypeIs[UPath]:
    """Tell whether a place is in a bucket, not on this machine's file systems."""
    return not isinstance(place, PurePath) and hasattr(place, "storage_options")


def pieces(place: UPath) -> Iterator[np.ndarray]:
    """Yield the bytes of an object, uint8 [n], 64 MiB at a time."""
    size = place.stat().st_size
    # A request for each chunk, so that each has the time limit for itself.
    for begin in range(0, size, _CHUNK_BYTES):
        data: Any = place.fs.cat_file(place.path, start=begin, end=min(begin + _CHUNK_BYTES, size))
        if len(data) != min(_CHUNK_BYTES, size - begin):  # a new object has replaced it meanwhile
            raise OSError(errno.EIO, f"it had {size} bytes, and is another object now", str(place))
        yield np.frombuffer(data, np.uint8)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[Callable[[Any], object]]:
    """Yield a function that writes bytes to a file; at the end of the block all bytes are on disk."""
    with path.open("wb") as file:
        yield file.write
        # Callers rename the file afterwards. Without this, a crash could leave the new name with an empty file.
        file.flush()
        os.fsync(file.fileno())


def remove(place: Place) -> None:
    """Remove a file, a link, or a folder with everything in it."""
    if is_bucket(place):
        place.fs.rm(place.path, recursive=True)
    # `rmtree` refuses a link, and `unlink` removes the link and not its target.
    elif place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink()


def below(folder: Place) -> dict[PurePath, Place]:
    """Return everything in a folder, at any depth, by its path relative to the folder; in a bucket, all objects."""
    if not is_bucket(folder):
        return {path.relative_to(folder): path for path in folder.rglob("*")}
    root = PurePosixPath(folder.path)
    # A web console creates folders as empty objects whose names end with a slash: leave them out.
    keys = [key for key in folder.fs.find(folder.path) if key[-1] != "/"]
    return {key: folder / str(key) for key in (PurePosixPath(key).relative_to(root) for key in keys)}


def rename(place: Place, target: Place) -> None:
    """Rename a folder: atomically on disk; in a bucket object by object, so that a killed process leaves both names."""
    if is_bucket(place) and is_bucket(target):
        for name in below(place):
            place.fs.cp_file((place / str(name)).path, (target / str(name)).path)
        remove(place)
    else:
        place.rename(target)  # type: ignore[arg-type]  # both are on disk
