"""A checkpoint's way to disk, or to a bucket: every host writes its files in a thread; once all have, process 0 writes
the last one, `about.json`, and on disk the folder gets its name.

One process needs nothing but the thread. Several say to each other, in the coordinator's table, how they fared: where
one could not write, none waits for it, the folder gets no name, and all say why. No device takes part.
"""

from __future__ import annotations

import functools
import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from ..buckets import Bucket, Place, below, remove, rename
from ..files import place
from ..hosts import ending
from ..hosts.store import Coordinator, Store
from .files import ABOUT, write_json
from .saved import STATE, UNFINISHED, half, numbers

_PAUSES = 0.002, 0.2  # seconds between looks at the table: the first, and the longest
_writing: set[Commit] = set()


class Writer:
    """This process, as one of those that write checkpoints together.

    Args:
      own, hosts: which of how many.
      store: the coordinator's table; None for one process.
    """

    def __init__(self, own: int, hosts: int, store: Store | None):
        self.own, self.hosts, self.store = own, hosts, store
        self._last: Commit | None = None

    def begin(
        self, folder: Place, number: int, keep: int | None, write: Callable[[Any], object], about: Any = None
    ) -> Commit:
        """Begins to write one; all hosts do so in one order, with the same arguments but `write`.

        Args:
          folder: of the run's checkpoints.
          number: the checkpoint's name.
          keep: how many are kept, with those before it; all if None.
          write: writes this host's files into the folder that it is given.
          about: what `about.json` holds.
        """
        # One after the other, so that a key of the table is one save's.
        self._last = Commit(self, self._last, folder, number, keep, write, about)
        return self._last


@functools.cache
def writer() -> Writer:
    """This process."""
    # Before `atexit`, when asyncio, by which a bucket is written to, can still look up a host in a thread.
    threading._register_atexit(_end)  # type: ignore[attr-defined]
    hosts = jax.process_count()
    return Writer(jax.process_index(), hosts, Coordinator() if hosts > 1 else None)


class Commit:
    """One checkpoint that is being written, by `Writer.begin`."""

    def __init__(
        self,
        by: Writer,
        before: Commit | None,
        folder: Place,
        number: int,
        keep: int | None,
        write: Callable[[Any], object],
        about: Any,
    ):
        self.folder, self._by, self._before = folder, by, before
        self._number, self._keep, self._write, self._about = number, keep, write, about
        self._turn: int = 1 if before is None else before._turn + 1
        self._problem, self._cause = "", None
        self._thread = threading.Thread(target=self._run, name="jaxpar-save", daemon=True)
        _writing.add(self)
        self._thread.start()

    _cause: Exception | None

    def wait(self) -> None:
        """Waits until it is complete. Raises ValueError, on all hosts, where one could not write."""
        self._thread.join()
        _writing.discard(self)
        if self._problem:
            raise ValueError(
                f"a checkpoint could not be written to {self.folder}: {self._problem}. Older ones are as they were"
            ) from self._cause

    def _run(self) -> None:
        if self._before is not None:
            self._before._thread.join()
            self._before = None
        try:
            self._problem = self._alone() if self._by.store is None else self._together(self._by.store)
        except Exception as error:  # of the coordinator that is gone: whoever waits for the thread says it
            self._problem, self._cause = _why(error), error
        del self._write  # and the arrays with it
        if not self._problem:
            _writing.discard(self)

    def _alone(self) -> str:
        return self._tried(self._begin) or self._tried(self._files) or self._tried(self._finish)

    def _together(self, store: Store) -> str:
        """Process 0 makes the folder, all write into it, process 0 gives it its name. What went wrong, on any host."""
        own, hosts = self._by.own, self._by.hosts
        if own == 0:
            problem = self._tried(self._begin)
            self._tell(store, "begun", problem)
        else:
            problem = self._told(store, "begun")
        if problem:
            return problem
        self._tell(store, f"wrote/{own}", self._tried(self._files))
        if own:
            return self._told(store, "done")
        found = {host: self._told(store, f"wrote/{host}") for host in range(hosts)}  # none writes on, where one failed
        problem = next((f"process {host}: {why}" for host, why in found.items() if why), "")
        problem = problem or self._tried(self._finish)
        self._tell(store, "done", problem)
        return problem

    def _tell(self, store: Store, what: str, problem: str) -> None:
        store.set(f"save/{what}", json.dumps([self._turn, problem]))

    def _told(self, store: Store, what: str) -> str:
        """What a process says of this save, once it does; who would wait for ever is ended by the watchdog."""
        pause, longest = _PAUSES
        while True:
            turn, problem = json.loads(store.get(f"save/{what}") or '[0, ""]')
            if turn == self._turn:
                return problem
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _tried(self, what: Callable[[], None]) -> str:
        try:
            what()
        except Exception as error:  # of a disk, or a bug: it is told to all hosts, and raised by `wait`
            self._cause = error
            return _why(error)
        return ""

    @property
    def _half(self) -> Place:
        return half(self.folder / str(self._number))

    def _begin(self) -> None:
        if self._half.exists():  # of a save that failed
            remove(self._half)
        self._half.mkdir()

    def _files(self) -> None:
        for folder in (self._half, self._half / STATE):
            folder.mkdir(exist_ok=True)  # also where a file system does not show at once what process 0 has made
        self._write(self._half / STATE)

    def _finish(self) -> None:
        """Completes it, and removes those before it that are kept no more, of which a kill leaves no half."""
        write_json(self._half / STATE / ABOUT, self._about)
        if isinstance(self._half, Path):
            rename(self._half, self.folder / str(self._number))
        before = [number for number in numbers(self.folder) if number < self._number]
        for old in before[: len(before) + 1 - self._keep] if self._keep else []:
            if isinstance(gone := self.folder / str(old), Bucket):
                (gone / STATE / ABOUT).unlink()
                remove(gone)
            else:
                rename(gone, half(gone))
                shutil.rmtree(str(half(gone)), ignore_errors=True)  # what is open elsewhere goes when a run begins here


def clear(folder: Place) -> None:
    """Removes what killed processes have left half-written, once this process writes nothing there."""
    for commit in list(_writing):
        if commit.folder == folder:
            commit._thread.join()
    if isinstance(folder, Bucket):
        whole = numbers(folder)
        steps = {name.parts[0] for name in below(folder)}
        left = [folder / step for step in steps if step.isdecimal() and int(step) not in whole]
    else:
        left = list(folder.glob(f"*{UNFINISHED}"))
    for unfinished in left:
        remove(unfinished)


def wait_for(folder: Place | str) -> None:
    """Waits for what this process is still writing to a folder of checkpoints, or to one of them, by whatever step."""
    path = place(folder, "folder").absolute()
    for commit in list(_writing):
        if commit.folder in (path, path.parent):
            commit.wait()


def _why(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}; make room, or see that the folder is there and may be written to"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}; see what it says"


def _end() -> None:
    """A program that ends waits for what it has begun to save, and does not end well where that is not saved."""
    for commit in list(_writing):
        try:
            commit.wait()
        except ValueError as error:
            ending.badly(error)
