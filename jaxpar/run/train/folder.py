"""The folder of a run: whose it is, and files in it that are whole whenever the run dies."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import tempfile
import uuid
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
from filelock import FileLock, Timeout
from jax.experimental import multihost_utils

from ...backend.buckets import Place, is_bucket, remove
from .loop import Loop

# What a run writes into its folder, and all that `overwrite` removes.
WRITTEN = (
    "config.yaml",
    "metrics.jsonl",
    "loss.png",
    "checkpoints",
    "tensorboard",
)
_OWNER = ".owner"
_live: set[str] = set()  # claims of this process: one that it could not take back does not keep it out


class Claim:
    """That a folder is this run's own, which `check` looks at again: a lock holds only while nobody removes its file.

    Args:
      out: the folder; None for a run that writes nothing.
    """

    def __init__(self, out: Place | None):
        self.out, self._mine = out, {"id": uuid.uuid4().hex, **_process()}

    def take(self) -> str:
        """Writes into the folder whose it is; or why it cannot be taken: a run that still goes on has it."""
        assert self.out is not None
        there = _read(self.out / _OWNER)
        own = there and all(there[name] == self._mine[name] for name in ("host", "pid", "began"))
        alive = there and there["host"] == self._mine["host"] and there == {**there, **_process(int(there["pid"]))}
        if alive and not (own and there["id"] not in _live):
            return f"another run, {there['pid']}, is going on in {self.out}; wait for its end, or name another out="
        write_whole(self.out / _OWNER, json.dumps(self._mine).encode())
        _live.add(str(self._mine["id"]))
        return ""

    def release(self) -> None:
        """Takes away what `take` wrote, where it is still there."""
        assert self.out is not None
        _live.discard(str(self._mine["id"]))
        if _read(self.out / _OWNER) == self._mine:
            (self.out / _OWNER).unlink()

    def lost(self) -> str:
        """Why the folder is not this run's any more, "" if it is; to be asked on process 0. Claims it again where
        nobody else has it.
        """
        if self.out is None or (there := _read(self.out / _OWNER)) == self._mine:
            return ""
        if not there and (self.out / "checkpoints").is_dir():  # who sweeps up hidden files takes nothing from a run
            write_whole(self.out / _OWNER, json.dumps(self._mine).encode())
            return ""
        taken = f"process {there['pid']} on {there['host']} has taken it" if there else "it was removed or moved"
        return (
            f"{self.out} is no longer this run's: {taken} while the run went on; nothing more is saved, begin again "
            "with another out="
        )

    def check(self) -> None:
        """Raise ValueError, on all hosts, where the folder is gone or another run's. All hosts must ask."""
        if self.out is None:
            return
        problem = self.lost() if jax.process_index() == 0 else ""
        if jax.process_count() > 1 and multihost_utils.broadcast_one_to_all(np.bool_(problem)) and not problem:
            problem = f"{self.out} is no longer this run's; the error of process 0 says why"
        if problem:
            raise ValueError(problem)

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Within it, whatever files are missed because the folder is gone, the error says that it is gone."""
        try:
            yield
        except (OSError, ValueError) as error:
            with contextlib.suppress(ConnectionError):  # the bucket does not answer this either
                if jax.process_index() == 0 and (problem := self.lost()):
                    raise ValueError(problem) from error
            raise


class Staging:
    """What a run adds to, line by line: in its folder, or, as nothing can be added to an object, in a folder of this
    machine that is copied to the bucket with every checkpoint, before that is complete, and at the end.

    Args:
      claim: that the place is this run's own.

    Attributes: `folder`, where files are written; None for a run that writes nothing.
    """

    def __init__(self, claim: Claim):
        self._claim, self._copied = claim, dict[Path, tuple[int, int]]()
        out = claim.out
        self._made = tempfile.TemporaryDirectory(prefix="jaxpar-") if is_bucket(out) else None
        self.folder: Path | None = Path(self._made.name) if self._made else out if isinstance(out, Path) else None

    def copy(self) -> None:
        """Copy the files that have changed to the bucket, unless another run has taken the place meanwhile."""
        if (out := self._claim.out) is None or not is_bucket(out) or self.folder is None:
            return
        # A slow save calls this too, after the run has ended because its place was taken.
        if jax.process_index() == 0 and self._claim.lost():
            return
        for path in sorted(path for path in self.folder.rglob("*") if path.is_file()):
            about = path.stat()
            if self._copied.get(path) != (version := (about.st_size, about.st_mtime_ns)):
                out.fs.put_file(str(path), (out / path.relative_to(self.folder).as_posix()).path)
                self._copied[path] = version

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, *_: object) -> None:
        if self._made is not None:
            with self._made:
                self.copy()


@contextlib.contextmanager
def claimed(loop: Loop) -> Iterator[Claim]:
    """Within it the folder of a run is its own. Raises ValueError where another run is in it that is not to be
    resumed, or that is still going on; with several hosts, on all of them.
    """
    claim = Claim(loop.out)
    if (out := loop.out) is None:
        yield claim
        return
    there = [name for name in WRITTEN if (out / name).is_file() or any((out / name).rglob("*"))]
    if there and not (loop.resume or loop.overwrite):
        raise ValueError(
            f"{out} already holds a run ({', '.join(there)}); resume=True goes on with it, overwrite=True "
            "removes it, another out= leaves it alone"
        )
    several, problem = jax.process_count() > 1, ""
    if several:  # none removes what another has not looked at yet, or writes what one then removes
        multihost_utils.sync_global_devices("looked")
    with contextlib.ExitStack() as stack:
        if jax.process_index() == 0:
            try:
                out.mkdir(parents=True, exist_ok=True)
                try:
                    if isinstance(out, Path):  # in a bucket nothing can be locked: `check` finds that another has it
                        stack.enter_context(FileLock(out / ".lock", blocking=False))
                except OSError as error:
                    if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):
                        raise
                    says = f"{out} is where files cannot be locked; see to it that no two runs use it at once"
                    warnings.warn(says, stacklevel=2)
                problem = claim.take()
                if not problem:
                    stack.callback(claim.release)
                    problem = _not_removable(out, there) if loop.overwrite and isinstance(out, Path) else ""
            except Timeout:
                problem = f"another run is going on in {out}; wait for its end, or name another out="
            except OSError as error:
                problem = f"out={str(out)!r} cannot be used: {error.strerror}; name a folder that you may write to"
            for path in (out / name for name in there if loop.overwrite and not problem):
                remove(path)
        if several and multihost_utils.broadcast_one_to_all(bool(problem)) and not problem:
            problem = f"process 0 cannot use {out}; its own error says why"
        if problem:
            raise ValueError(problem)
        yield claim


def _not_removable(out: Path, names: Sequence[str]) -> str:
    """Return why `overwrite` cannot remove what an earlier run wrote, or "". It is asked before anything is removed.

    Args:
      out: the folder of the run.
      names: those of `WRITTEN` that hold something.
    """
    other = "or name another out="
    for path in (out / name for name in WRITTEN):
        # What a link leads to belongs to somebody else. A link to an empty folder is used as it is.
        if path.is_symlink() and (path.name in names or not path.exists()):
            do = "remove the link, empty the folder that it leads to" if path.is_dir() else "remove the link"
            says = f"{path} is a link to {path.readlink()}, and overwrite=True removes only what lies in {out}"
            return f"{says}; {do}, {other}"
        for folder, _, _ in os.walk(path) if path.name in names else ():
            if os.path.ismount(folder):
                return f"{folder} is a mount point, which overwrite=True cannot remove; empty it, {other}"
            if not os.access(folder, os.W_OK | os.X_OK):
                return f"{folder} cannot be removed, as you may not write to it; make it writable, {other}"
    return ""


def write_whole(path: Place, data: bytes) -> None:
    """Writes a file such that, whenever the process dies, its name has what was there before or all of `data`."""
    if is_bucket(path):  # where an object is there once all of it is
        path.write_bytes(data)
        return
    fresh = path.with_name(f".{path.name.removeprefix('.')}.new")
    fresh.write_bytes(data)
    os.replace(fresh, path)


def _process(pid: int | None = None) -> dict[str, str | int]:
    """A process of this host as a claim names it: number, and where Linux tells it when it began, as numbers come
    again. Nothing where there is no such process.
    """
    pid = os.getpid() if pid is None else pid
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return {"pid": -1}
    except PermissionError:
        pass  # it is there, and someone else's
    try:
        began = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:  # not Linux, or it has ended by now
        began = ""
    return {"host": socket.gethostname(), "pid": pid, "began": began}


def _read(path: Place) -> dict[str, str | int]:
    """A claim; nothing where there is none, or none that a run writes."""
    try:
        found = json.loads(path.read_bytes())
    except ConnectionError:  # a bucket that does not answer may hold another run's claim
        raise
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and {"id", "host", "pid", "began"} <= set(found) else {}
