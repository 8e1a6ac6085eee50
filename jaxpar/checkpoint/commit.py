"""How a checkpoint becomes complete: each host writes its part in a thread; then process 0 has Orbax commit the folder.

Orbax decides which checkpoint is complete: on disk the folder gets its name at the end, in a bucket it gets
`commit_success.txt`. Where one host could not write, nothing is committed, and all raise the same error.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import os
import threading
from collections.abc import Callable
from typing import Any

import jax
from orbax.checkpoint.path import atomicity

from ..buckets import Place, answered, is_bucket, remove, rename
from ..files import place, sync
from ..hosts import ending
from ..hosts.outcomes import Outcomes
from ..hosts.store import Coordinator
from ..text import reason
from .saved import COMPLETE, UNFINISHED, numbers
from .stores import orbax_path

_writing: set[Commit] = set()


class Writer:
    """This process, as one of those that write checkpoints together, one after the other."""

    def __init__(self, outcomes: Outcomes):
        self.outcomes = outcomes
        self.last: Commit | None = None

    def begin(
        self,
        folder: Place,
        number: int,
        keep: int | None,
        write: Callable[[Place], object],
        finish: Callable[[Place], object] = lambda unfinished: None,
    ) -> Commit:
        """Begin to write a checkpoint; all hosts do so in one order, with the same arguments but `write`.

        Args:
          folder: of the run's checkpoints.
          number: the checkpoint's name.
          keep: how many are kept, counting this one; all if None.
          write: writes this host's part into the unfinished checkpoint, whose folder it is given.
          finish: what process 0 does there once all hosts have written.
        """
        self.last = Commit(self.outcomes, self.last, folder, number, keep, write, finish)
        return self.last


@functools.cache
def writer() -> Writer:
    """Return this process as a writer."""
    # This runs before `atexit`: after it no thread can be started, which Orbax and the storage clients need.
    threading._register_atexit(_end)  # type: ignore[attr-defined]
    processes = jax.process_count()
    return Writer(Outcomes(jax.process_index(), processes, Coordinator() if processes > 1 else None))


class Commit:
    """One checkpoint that is being written, by `Writer.begin`."""

    def __init__(
        self, outcomes: Outcomes, before: Commit | None, folder: Place, number: int, keep: int | None, *parts: Any
    ):
        self.folder, self._outcomes, self._before, self._keep = folder, outcomes, before, keep
        self._serial: int = 1 if before is None else before._serial + 1
        self._final, (self._write, self._finish) = folder / str(number), parts
        kind = atomicity.CommitFileTemporaryPath if is_bucket(folder) else atomicity.AtomicRenameTemporaryPath
        self._orbax = kind.from_final(orbax_path(self._final))
        self._unfinished = self._final if is_bucket(folder) else folder / f"{number}{UNFINISHED}"
        self._problem, self._cause = "", None
        self._thread = threading.Thread(target=self._run, name="jaxpar-save", daemon=True)
        _writing.add(self)
        self._thread.start()

    _cause: Exception | None

    def wait(self) -> None:
        """Wait until it is complete. Raises ValueError, on all hosts, where one could not write."""
        self._thread.join()
        _writing.discard(self)
        if self._problem:
            raise ValueError(
                f"a checkpoint could not be written to {self.folder}: {self._problem}. Older ones are as they were"
            ) from self._cause

    def _run(self) -> None:
        if self._before is not None:  # what a process says of one save is not taken for another's
            self._before._thread.join()
            self._before = None
        is_first = self._outcomes.process == 0
        for name, action in (
            ("folder", self._make_folder if is_first else None),
            ("part", lambda: self._write(self._unfinished)),
            ("commit", self._complete if is_first else None),
        ):
            problem = "" if action is None else self._tried(action)
            try:
                self._problem = self._outcomes.shared(f"save/{name}", self._serial, problem)
            except Exception as error:  # the coordinator is gone
                self._problem, self._cause = problem or _reason(error), error
            if self._problem:
                break
        del self._write  # and with it the arrays
        if not self._problem:
            _writing.discard(self)

    def _tried(self, action: Callable[[], object]) -> str:
        try:
            action()
        except Exception as error:  # of a disk, a bucket, or a bug: all hosts are told, and `wait` raises it
            self._cause = error
            return _reason(error)
        return ""

    def _make_folder(self) -> None:
        if not is_bucket(self.folder):
            if not self.folder.is_dir():  # Orbax would make it again
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.folder))
            if self._unfinished.is_symlink():
                self._unfinished.unlink()
        answered(self.folder, lambda: asyncio.run(self._orbax.create()))

    def _complete(self) -> None:
        """Commit the checkpoint; then remove older ones that are not kept, so that a kill leaves no half of them."""
        answered(self.folder, lambda: self._finish(self._unfinished))
        sync(self._unfinished)
        answered(self.folder, lambda: asyncio.run(self._orbax.finalize()))
        sync(self._final)
        sync(self.folder, deep=False)
        before = [number for number in numbers(self.folder) if str(number) != self._final.name]
        before = [number for number in before if number < int(self._final.name)]
        for number in before[: len(before) + 1 - self._keep] if self._keep else []:
            _discard(self.folder / str(number))


def _discard(old: Place) -> None:
    """Remove a checkpoint: first what makes it complete, then the rest."""
    if is_bucket(old):
        (old / COMPLETE).unlink()
    else:
        rename(old, old := old.with_name(f"{old.name}{UNFINISHED}"))
    with contextlib.suppress(OSError):  # a file that is open elsewhere goes when the next run begins here
        remove(old)


def clear(folder: Place) -> None:
    """Remove what killed processes have left unfinished, once this process writes nothing there."""
    for commit in list(_writing):
        if commit.folder == folder:
            commit._thread.join()
    if is_bucket(folder):
        complete = {str(number) for number in numbers(folder)}
        inside = list(folder.iterdir()) if folder.exists() else []
        unfinished = [path for path in inside if path.name.isdecimal() and path.name not in complete]
    else:
        unfinished = list(folder.glob(f"*{UNFINISHED}"))
    for path in unfinished:
        remove(path)


def wait_for(folder: Place | str) -> None:
    """Wait for what this process is still writing to a folder of checkpoints, or to one of them, by whatever step."""
    path = place(folder, "folder").absolute()
    for commit in list(_writing):
        if commit.folder in (path, path.parent):
            commit.wait()


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}; make room, or see that the folder is there and may be written to"
    return f"{type(error).__name__}: {reason(error)}; see what it says"


def _end() -> None:
    """At the end of a program, wait for what it has begun to save, and end badly where that is not saved."""
    for commit in list(_writing):
        try:
            commit.wait()
        except ValueError as error:
            ending.badly(error)
