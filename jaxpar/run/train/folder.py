"""The folder of a run: which run owns it, and how its files stay whole when the run dies.

`claim_folder` gives a run its folder, or raises an error if another run has it. Three things protect the folder:

    .lock     a file lock, for the time of the run. Buckets and some network file systems cannot lock.
    .owner    a file that names the owning process (`Claim`). It is read again at every save, because a lock does not
              help against a user who removes its file.
    WRITTEN   the names that a run writes. `overwrite` removes these and no other file.

`Staging` holds the files that grow line by line. `write_whole` replaces a file in one step.
"""

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
WRITTEN = ("config.yaml", "metrics.jsonl", "loss.png", "checkpoints", "tensorboard")
_OWNER = ".owner"
# The claims that this process has not released. A claim of this process that is not among them is a leftover (its
# release failed), and does not keep the process out of the folder.
_live: set[str] = set()


class Claim:
    """A run's claim on its folder: the file `.owner`, which names the process that owns the folder.

    `out` is None for a run that writes nothing.
    """

    def __init__(self, out: Place | None):
        self.out, self._owner = out, {"id": uuid.uuid4().hex, **_process()}

    def take(self) -> str:
        """Write the claim into the folder and return "", or return why another run prevents that."""
        assert self.out is not None
        owner = _read(self.out / _OWNER)
        is_this_process = owner and all(owner[name] == self._owner[name] for name in ("host", "pid", "began"))
        # Only a process of this host can be looked up. A claim from another host counts as a leftover.
        # Alive: a process with this number runs, and it began when the owner did.
        is_alive = owner and owner["host"] == self._owner["host"] and owner == {**owner, **_process(int(owner["pid"]))}
        if is_alive and not (is_this_process and owner["id"] not in _live):
            process = f"process {owner['pid']}"
            return f"another run, {process}, is going on in {self.out}; wait for its end, or name another out="
        write_whole(self.out / _OWNER, json.dumps(self._owner).encode())
        _live.add(str(self._owner["id"]))
        return ""

    def release(self) -> None:
        """Remove the claim from the folder, if it is still this run's."""
        assert self.out is not None
        _live.discard(str(self._owner["id"]))
        # Another run may have taken the folder meanwhile: then the claim is its own.
        if _read(self.out / _OWNER) == self._owner:
            (self.out / _OWNER).unlink()

    def loss_reason(self) -> str:
        """Return why this run no longer owns the folder, or "" if it does. Only process 0 may call it.

        If the claim has gone and no other run has the folder, the claim is written again.
        """
        if self.out is None or (owner := _read(self.out / _OWNER)) == self._owner:
            return ""
        # A user who sweeps up hidden files does not mean to take the folder from its run.
        if not owner and (self.out / "checkpoints").is_dir():
            write_whole(self.out / _OWNER, json.dumps(self._owner).encode())
            return ""
        event = f"process {owner['pid']} on {owner['host']} has taken it" if owner else "it was removed or moved"
        return (
            f"{self.out} is no longer this run's: {event} while the run went on; nothing more is saved, begin again "
            "with another out="
        )

    def check(self) -> None:
        """Raise ValueError on all hosts if this run no longer owns the folder. All hosts must call it together."""
        if self.out is None:
            return
        problem = self.loss_reason() if jax.process_index() == 0 else ""
        # The other hosts get only the fact. The text is on process 0, which raises it.
        if jax.process_count() > 1 and multihost_utils.broadcast_one_to_all(np.bool_(problem)) and not problem:
            problem = f"{self.out} is no longer this run's; the error of process 0 says why"
        if problem:
            raise ValueError(problem)

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Replace errors about missing files in the block by one that says that the folder is gone, if it is."""
        try:
            yield
        except (OSError, ValueError) as error:
            with contextlib.suppress(ConnectionError):  # a silent bucket does not answer this question either
                if jax.process_index() == 0 and (problem := self.loss_reason()):
                    raise ValueError(problem) from error
            raise


class Staging:
    """The folder in which a run appends to files.

    For a folder on disk it is the run's folder. For a bucket, which cannot append, it is a temporary folder of this
    machine. Its files are copied to the bucket before each checkpoint is complete, and at the end.

    Attributes:
      folder: where files are written; None for a run that writes nothing.
    """

    def __init__(self, claim: Claim):
        self._claim, self._copied_versions = claim, dict[Path, tuple[int, int]]()
        out = claim.out
        self._temporary = tempfile.TemporaryDirectory(prefix="jaxpar-") if is_bucket(out) else None
        self.folder: Path | None = (
            Path(self._temporary.name) if self._temporary else out if isinstance(out, Path) else None
        )

    def copy(self) -> None:
        """Copy the files that have changed to the bucket, unless another run has taken the folder."""
        if (out := self._claim.out) is None or not is_bucket(out) or self.folder is None:
            return
        # A slow save calls this too, after the run has ended because another run took its folder.
        if jax.process_index() == 0 and self._claim.loss_reason():
            return
        for path in sorted(path for path in self.folder.rglob("*") if path.is_file()):
            stat = path.stat()
            if self._copied_versions.get(path) != (version := (stat.st_size, stat.st_mtime_ns)):
                out.fs.put_file(str(path), (out / path.relative_to(self.folder).as_posix()).path)
                # Noted after the copy: a copy that failed is tried again at the next save.
                self._copied_versions[path] = version

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, *_: object) -> None:
        if self._temporary is not None:
            with self._temporary:
                self.copy()


@contextlib.contextmanager
def claim_folder(loop: Loop) -> Iterator[Claim]:
    """Claim the folder of a run for the block, and yield the claim. All hosts must enter it together.

    Raises:
      ValueError: on all hosts, if the folder holds a run that is not to be resumed, if its run is still going on, or if
        the folder cannot be used.
    """
    claim = Claim(loop.out)
    if (out := loop.out) is None:
        yield claim
        return
    if not isinstance(out, Path):
        out.mkdir(parents=True, exist_ok=True)  # raises if the bucket does not exist
    # 1. Every host looks for an earlier run.
    # An empty folder does not count as a run's.
    existing = [name for name in WRITTEN if (out / name).is_file() or any((out / name).rglob("*"))]
    if existing and not (loop.resume or loop.overwrite):
        raise ValueError(
            f"{out} already holds a run ({', '.join(existing)}); resume=True goes on with it, overwrite=True "
            "removes it, another out= leaves it alone"
        )
    is_multihost, problem = jax.process_count() > 1, ""
    if is_multihost:
        # Process 0 removes and writes files below. The barrier keeps it from doing so before other hosts have looked.
        multihost_utils.sync_global_devices("looked")
    with contextlib.ExitStack() as stack:
        # 2. Process 0 locks the folder, claims it, and removes the earlier run with `overwrite`.
        if jax.process_index() == 0:
            try:
                out.mkdir(parents=True, exist_ok=True)
                try:
                    if isinstance(out, Path):  # a bucket cannot lock: `Claim.check` detects another run there
                        stack.enter_context(FileLock(out / ".lock", blocking=False))
                except OSError as error:
                    # A network file system without locks: the claim still finds runs of this host.
                    if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):
                        raise
                    message = f"files in {out} cannot be locked; make sure that no two runs use it at once"
                    warnings.warn(message, stacklevel=2)
                problem = claim.take()
                if not problem:
                    stack.callback(claim.release)
                    problem = _removal_problem(out, existing) if loop.overwrite and isinstance(out, Path) else ""
            except Timeout:
                problem = f"another run is going on in {out}; wait for its end, or name another out="
            except OSError as error:
                problem = f"out={str(out)!r} cannot be used: {error.strerror}; name a folder that you may write to"
            # Only names that a run writes, never the folder itself: other files of the user may be in it.
            for path in (out / name for name in existing if loop.overwrite and not problem):
                remove(path)
        # 3. A problem of process 0 ends all hosts, which would wait for it otherwise.
        if is_multihost and multihost_utils.broadcast_one_to_all(bool(problem)) and not problem:
            problem = f"process 0 cannot use {out}; its own error says why"
        if problem:
            raise ValueError(problem)
        yield claim


def _removal_problem(out: Path, names: Sequence[str]) -> str:
    """Return why `overwrite` cannot remove what an earlier run wrote, or "". Called before anything is removed.

    `names` are the names of `WRITTEN` that hold something.
    """
    alternative = "or name another out="
    for path in (out / name for name in WRITTEN):
        # The target of a link belongs to somebody else. A link to an empty folder is used as it is.
        if path.is_symlink() and (path.name in names or not path.exists()):
            fix = "remove the link, empty the folder that it leads to" if path.is_dir() else "remove the link"
            message = f"{path} is a link to {path.readlink()}, and overwrite=True removes only what lies in {out}"
            return f"{message}; {fix}, {alternative}"
        for folder, _, _ in os.walk(path) if path.name in names else ():
            if os.path.ismount(folder):
                return f"{folder} is a mount point, which overwrite=True cannot remove; empty it, {alternative}"
            if not os.access(folder, os.W_OK | os.X_OK):
                return f"{folder} cannot be removed, as you may not write to it; make it writable, {alternative}"
    return ""


def write_whole(path: Place, data: bytes) -> None:
    """Write a file so that, if the process dies, the path holds its earlier content or all of `data`."""
    if is_bucket(path):  # an object appears only once all of it is stored
        path.write_bytes(data)
        return
    temporary = path.with_name(f".{path.name.removeprefix('.')}.new")
    temporary.write_bytes(data)
    os.replace(temporary, path)


def _process(pid: int | None = None) -> dict[str, str | int]:
    """Return how a claim identifies a process of this host (default: this process): host, number and start time.

    The start time is there because numbers of processes are used again. It is "" if the system is not Linux. For a
    number without a process the result is `{"pid": -1}`, which equals no claim.
    """
    pid = os.getpid() if pid is None else pid
    try:
        # Signal 0 is not delivered. It asks whether the process exists.
        os.kill(pid, 0)
    except ProcessLookupError:
        return {"pid": -1}
    except PermissionError:
        pass  # the process exists, and belongs to another user
    try:
        # The name of the program, in parentheses, may hold blanks: count the fields after it (proc_pid_stat(5), 22).
        began = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:  # not Linux, or the process has just ended
        began = ""
    return {"host": socket.gethostname(), "pid": pid, "began": began}


def _read(path: Place) -> dict[str, str | int]:
    """Return the claim in a file; an empty dict if there is no file, or if a run did not write it."""
    try:
        content = json.loads(path.read_bytes())
    except ConnectionError:  # a bucket that does not answer may hold another run's claim
        raise
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) and {"id", "host", "pid", "began"} <= set(content) else {}
