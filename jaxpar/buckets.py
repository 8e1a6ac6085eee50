"""A place in a bucket, with the methods of `pathlib.Path` that jaxpar calls, by fsspec with s3fs and gcsfs.

Keys have no folders: what is called one here is what some keys have in common up to a slash. It is there while one of
them is, and need not be made. Nothing can be appended to, renamed or locked; an object is there once all of it is.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import functools
import logging
import os
import queue
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

import numpy as np

PACKAGES = {"s3": "s3fs", "gs": "gcsfs"}
_ANSWERS = 40  # seconds within which a bucket answers; it is then not asked again for as long
_LONG = 600  # those of a list of a million keys, or of what the bucket does itself: a copy, parts put together
_PART = 1 << 24  # bytes that are sent or asked for at a time
_PARTS = 10_000  # at most, of one object in S3
_WINDOW = 4  # parts that are asked for at once
_REFUSALS = FileNotFoundError, PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError
_silent: dict[str, tuple[float, str]] = {}  # of buckets that have not answered: when, and what was said


@functools.cache  # fsspec's own cache has one for each thread
def _system(scheme: str) -> Any:
    """The file system of fsspec, without its cache of lists: other processes write there too."""
    import fsspec  # comes with s3fs and gcsfs

    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it prints the traceback of what it raises
    config = {"retries": {"mode": "standard", "max_attempts": 3}, "max_pool_connections": 32}
    return fsspec.filesystem(scheme, use_listings_cache=False, **({"config_kwargs": config} if scheme == "s3" else {}))


@dataclass(frozen=True, repr=False)
class Bucket:
    """A place in a bucket: `Bucket("s3://bucket/runs/mine")`. Its methods do what those of `Path` do.

    Credentials and endpoint are those that the libraries find: AWS_PROFILE, AWS_ENDPOINT_URL, gcloud's login.

    Methods raise OSError with the address, as Path's do: FileNotFoundError for what is not there, PermissionError, and
    ConnectionError where there is no answer.
    """

    url: str
    _size: int | None = field(default=None, compare=False)  # of an object that was listed; -1 of a folder

    def __post_init__(self) -> None:
        scheme, _, key = self.url.partition("://")
        object.__setattr__(self, "url", f"{scheme.lower()}://{PurePosixPath('/', key)}".replace(":///", "://"))

    def __str__(self) -> str:
        return self.url

    __repr__ = __str__

    def __truediv__(self, name: str | PurePosixPath) -> Bucket:
        return Bucket(f"{self.url}/{name}")

    # -- names ---------------------------------------------------------------------------------------------------------

    @property
    def _pure(self) -> PurePosixPath:
        return PurePosixPath(self.url.partition("://")[2])

    @property
    def name(self) -> str:
        """What is behind the last slash."""
        return self._pure.name

    @property
    def suffix(self) -> str:
        """Of the name."""
        return self._pure.suffix

    @property
    def parent(self) -> Bucket:
        """What is before the last slash."""
        return Bucket(f"{self.url.partition('://')[0]}://{self._pure.parent}")

    def with_name(self, name: str) -> Bucket:
        """The place of that name beside this one."""
        return self.parent / name

    def relative_to(self, other: Bucket) -> PurePosixPath:
        """The names below another place."""
        return self._pure.relative_to(other._pure)

    def absolute(self) -> Bucket:
        """This place."""
        return self

    # -- what is there -------------------------------------------------------------------------------------------------

    def stat(self) -> os.stat_result:
        """Size, and whether it is a file or a folder."""
        if self._size is not None:
            return _stat(stat.S_IFDIR if self._size < 0 else stat.S_IFREG, max(self._size, 0))
        info = self._ask(lambda system: system.info(self.url))
        return _stat(stat.S_IFDIR if info["type"] == "directory" else stat.S_IFREG, info["size"] or 0)

    def is_file(self) -> bool:
        """Whether there is an object of this key."""
        return self._is(stat.S_IFREG)

    def is_dir(self) -> bool:
        """Whether there is one below."""
        return self._is(stat.S_IFDIR)

    def exists(self) -> bool:
        """Either."""
        return self._is(stat.S_IFREG, stat.S_IFDIR)

    def _is(self, *kinds: int) -> bool:
        try:
            return stat.S_IFMT(self.stat().st_mode) in kinds
        except FileNotFoundError:
            return False

    def iterdir(self) -> Iterator[Bucket]:
        """What is directly below."""
        yield from self._listed(self._ask(lambda system: system.ls(self.url, detail=True)))

    def rglob(self, pattern: str) -> Iterator[Bucket]:
        """The objects below, at any depth, whose name fits; none where nothing is."""
        yield from (place for place in self._below() if fnmatch.fnmatchcase(place.name, pattern))

    def _below(self, seconds: float | None = None) -> Iterator[Bucket]:
        yield from self._listed(self._ask(lambda system: system.find(self.url, detail=True), seconds).values())

    def _listed(self, found: Any) -> Iterator[Bucket]:
        scheme = self.url.partition("://")[0]
        for info in found:
            # A folder that a console has made is an object of no bytes with its own name.
            if info["name"].rstrip("/") != str(self._pure) and not (info["type"] == "file" and info["name"][-1] == "/"):
                yield Bucket(f"{scheme}://{info['name']}", -1 if info["type"] == "directory" else info["size"])

    def version(self) -> str:
        """Another one once the object is another."""
        return self._ask(lambda system: system.ukey(self.url))

    # -- contents ------------------------------------------------------------------------------------------------------

    def read_bytes(self) -> bytes:
        """All of an object."""
        return Ranges(self)[:].tobytes()

    def read_text(self, encoding: str = "utf-8") -> str:
        """All of an object, as text."""
        return self.read_bytes().decode(encoding)

    def write_bytes(self, data: bytes) -> None:
        """Makes or replaces the object."""
        self._ask(lambda system: system.pipe_file(self.url, data))

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        """Nothing: an object makes its folders."""

    def unlink(self) -> None:
        """Removes the object."""
        self._ask(lambda system: system.rm_file(self.url))

    def rename(self, target: Bucket) -> None:
        """Copies all that is below, within the bucket, and removes it here: a kill leaves both."""
        for place in list(self.rglob("*")):
            copy = f"{target}/{place.relative_to(self)}"
            self._ask(lambda system, place=place, copy=copy: system.cp_file(place.url, copy), _LONG)
        remove(self)

    def _ask(self, call: Callable[[Any], Any], seconds: float | None = None) -> Any:
        """What the file system says, within so many seconds, or `_ANSWERS`.

        The libraries try again for minutes, and wait without end for a server that takes no more bytes.
        """
        seconds = seconds or _ANSWERS
        scheme, _, rest = self.url.partition("://")
        bucket = f"{scheme}://{rest.partition('/')[0]}"
        when, said = _silent.get(bucket, (-_ANSWERS, ""))
        if time.monotonic() < when + _ANSWERS:  # a run that ends for it asks several times on its way out
            raise ConnectionError(errno.EIO, said, self.url)
        answer: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

        def ask() -> None:
            try:
                answer.put((call(_system(scheme)), None))
            except Exception as error:  # of three libraries, with no class in common
                answer.put((None, error))

        threading.Thread(target=ask, name="jaxpar-bucket", daemon=True).start()
        try:
            found, error = answer.get(timeout=seconds)
        except queue.Empty:
            found, error = None, TimeoutError(f"no answer in {seconds} s")
        if error is None:
            return found
        text = " ".join(str(getattr(error, "strerror", None) or error).split())[:300]
        code = error.errno if isinstance(error, OSError) else None
        if isinstance(error, _REFUSALS) or code == errno.EINVAL:  # their text may be no more than the key
            code = code or (errno.EACCES if isinstance(error, PermissionError) else errno.ENOENT)
            raise OSError(code, text if " " in text else os.strerror(code), self.url) from error
        _silent[bucket] = time.monotonic(), (text := f"{type(error).__name__}: {text}")
        raise ConnectionError(errno.EIO, text, self.url) from error


Place = Path | Bucket


class Ranges:
    """The bytes of an object, uint8 [n], read as they are asked for: `ranges[a:b]` is an array of the caller's own.

    A window of 64 MiB is asked for at once, in four parts, and two are kept, for many small arrays that lie together.
    """

    def __init__(self, place: Bucket):
        self.size = place.stat().st_size
        self._place = place
        self._window = functools.lru_cache(2)(self._read)

    def _read(self, begin: int) -> list[bytes]:
        starts = range(begin, min(begin + _WINDOW * _PART, self.size), _PART)
        ends = [min(at + _PART, self.size) for at in starts]
        url = self._place.url
        found = self._place._ask(
            lambda system: system.cat_ranges([url] * len(ends), list(starts), ends, on_error="raise")
        )
        if sum(map(len, found)) != ends[-1] - begin:
            raise OSError(errno.EIO, f"it had {self.size} bytes, and is another object now", url)
        return found

    def __getitem__(self, index: slice) -> np.ndarray:
        start, stop, _ = index.indices(self.size)
        out, span = np.empty(max(0, stop - start), np.uint8), _WINDOW * _PART
        for begin in range(start - start % span, stop, span):
            for at, part in enumerate(self._window(begin)):
                first = begin + at * _PART
                a, b = max(start, first), min(stop, first + len(part))
                if a < b:
                    out[a - start : b - start] = np.frombuffer(part, np.uint8)[a - first : b - first]
        return out


@contextlib.contextmanager
def writing(place: Place, size: int = 0) -> Iterator[Callable[[Any], object]]:
    """A function that writes bytes to a file. At the end of the block all are on disk, also where the power fails, or
    in the bucket, where nothing is before that, and nothing after an error.

    Args:
      size: how many bytes there will be, where they are many.
    """
    if isinstance(place, Path):
        with place.open("wb") as file:
            yield file.write
            file.flush()
            os.fsync(file.fileno())
        return
    block = max(_PART, -(-size // _PARTS))
    out = place._ask(lambda system: system.open(place.url, "wb", block_size=block))
    try:
        yield lambda data: place._ask(lambda _: out.write(data))
        # Of many parts a bucket makes an object in up to some minutes, by what S3 says of CompleteMultipartUpload.
        place._ask(lambda _: out.close(), _LONG if size > block else None)
    except BaseException:
        out.closed = True  # else it would write the rest once nobody holds it
        with contextlib.suppress(OSError):  # a bucket that is gone keeps no parts
            place._ask(lambda _: out.discard())
        raise


def remove(place: Place) -> None:
    """Removes a file, or a folder with all that is in it."""
    if isinstance(place, Bucket):
        place._ask(lambda system: system.rm(place.url, recursive=True))
    elif place.is_dir():
        shutil.rmtree(place)
    else:
        place.unlink()


def rename(place: Place, target: Place) -> None:
    """Gives a folder another name, at once on disk."""
    place.rename(target)  # type: ignore[arg-type]  # both are paths, or both in a bucket


def below(folder: Place) -> dict[PurePath, Place]:
    """All that is in a folder, at any depth, by its names from there; of a bucket, its objects."""
    if isinstance(folder, Bucket):
        return {place.relative_to(folder): place for place in folder._below(_LONG)}
    return {path.relative_to(folder): path for path in folder.rglob("*")}


def _stat(kind: int, size: int) -> os.stat_result:
    return os.stat_result((kind, 0, 0, 0, 0, 0, size, 0, 0, 0))
