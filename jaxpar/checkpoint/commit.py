"""How a checkpoint becomes complete: each host writes its part in a thread; then process 0 has Orbax commit the folder.

Orbax decides which checkpoint is complete: on disk the folder gets its name at the end, in a bucket it gets
`commit_success.txt`. Where one host could not write, nothing is committed, and all raise the same error.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import errno
import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import jax

from ..backend.buckets import Place, answered, is_bucket, remove, rename
from ..backend.files import place, sync
from ..backend.text import reason
from ..hosts import ending
from ..hosts.outcomes import Outcomes
from ..hosts.store import Coordinator
from .about import COMPLETE, UNFINISHED, numbers

Value = TypeVar("Value")
Action = Callable[[Place], object]
_writing: dict[Future[None], Place] = {}  # the folders of saves for whose end nobody has waited


class Writer:
    """This process, as one of those that write checkpoints together, one after the other."""

    def __init__(self, outcomes: Outcomes):
        self._outcomes, self._times = outcomes, collections.Counter[str]()
        # One thread: what a process says of one save is not taken for another's.
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "jaxpar-save")

    def begin(
        self, folder: Place, number: int, keep: int | None, write: Action, finish: Action = lambda unfinished: None
    ) -> Future[None]:
        """Begin to write a checkpoint, and return what `wait` takes. All hosts do so in one order.

        Args:
          folder: of the run's checkpoints.
          number: the checkpoint's name.
          keep: how many are kept, counting this one; all if None.
          write: writes this host's part into the unfinished checkpoint, whose folder it is given.
          finish: what process 0 does there once all hosts have written.
        """
        _wait_at_the_end()
        future = self._thread.submit(self._write, folder, number, keep, write, finish)
        _writing[future] = folder
        return future

    def together(
        self, name: str, action: Callable[[], Value], told: Callable[[Exception], str] = str
    ) -> tuple[Value | None, Exception | None, str]:
        """Do what all hosts do, each time in one order, and tell the others where it fails: they would wait for ever.

        Returns the action's value, its error on this host, and the reason on all hosts if it failed on one.
        """
        value, error, problem = None, None, ""
        try:
            value = action()
        except Exception as failure:  # of a disk, a bucket, or a bug
            error, problem = failure, told(failure) or type(failure).__name__
        self._times[name] += 1
        try:
            problem = self._outcomes.shared(name, self._times[name], problem)
        except Exception as failure:  # the coordinator is gone
            error, problem = error or failure, problem or told(failure)
        return value, error, problem

    def _write(self, folder: Place, number: int, keep: int | None, write: Action, finish: Action) -> None:
        from .write import temporary

        final = folder / str(number)
        unfinished = final if is_bucket(folder) else folder / f"{number}{UNFINISHED}"
        orbax = temporary(final)

        def make_folder() -> None:
            if not is_bucket(folder):
                if not folder.is_dir():  # Orbax would make it again
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
                if unfinished.is_symlink():
                    unfinished.unlink()
            answered(folder, lambda: asyncio.run(orbax.create()))

        def complete() -> None:
            answered(folder, lambda: finish(unfinished))
            sync(unfinished)
            answered(folder, lambda: asyncio.run(orbax.finalize()))
            sync(final)
            sync(folder, deep=False)
            older = [old for old in numbers(folder) if old < number]
            for old in older[: len(older) + 1 - keep] if keep else []:
                _discard(folder / str(old))

        alone = lambda action: action if self._outcomes.process == 0 else lambda: None
        actions = {"folder": alone(make_folder), "part": lambda: write(unfinished), "commit": alone(complete)}
        for name, action in actions.items():
            _, cause, problem = self.together(f"save/{name}", action, _reason)
            if problem:
                text = f"a checkpoint could not be written to {folder}: {problem}. Older ones are as they were"
                raise ValueError(text) from cause


@functools.cache
def writer() -> Writer:
    """Return this process as a writer."""
    processes = jax.process_count()
    return Writer(Outcomes(jax.process_index(), processes, Coordinator() if processes > 1 else None))


def wait(save: Future[None]) -> None:
    """Wait until a checkpoint is complete. Raises ValueError, on all hosts, where one could not write."""
    try:
        save.result()
    finally:
        _writing.pop(save, None)


def wait_for(folder: Place | str) -> None:
    """Wait for what this process is still writing to a folder of checkpoints, or to one of them, by whatever step."""
    path = place(folder, "folder").absolute()
    for save, where in list(_writing.items()):
        if where in (path, path.parent):
            wait(save)


@functools.cache
def _wait_at_the_end() -> None:
    """Have a program wait at its end for what it has begun to save, and end badly where that is not saved."""
    from . import write  # noqa: F401  # Orbax, which a thread cannot import at the end of a program

    def end() -> None:
        for save in list(_writing):
            try:
                wait(save)
            except ValueError as error:
                ending.badly(error)

    # This runs before `atexit`, and before what Orbax's modules have registered: after these no thread can be started,
    # which Orbax and the storage clients need.
    threading._register_atexit(end)  # type: ignore[attr-defined]


def _discard(old: Place) -> None:
    """Remove a checkpoint: first what makes it complete, so that a kill leaves no half of it, then the rest."""
    if is_bucket(old):
        (old / COMPLETE).unlink()
    else:
        rename(old, old := old.with_name(f"{old.name}{UNFINISHED}"))
    with contextlib.suppress(OSError):  # a file that is open elsewhere goes when the next run begins here
        remove(old)


def clear(folder: Place) -> None:
    """Remove what killed processes have left unfinished, once this process writes nothing there."""
    concurrent.futures.wait([save for save, where in _writing.items() if where == folder])
    if is_bucket(folder):
        complete = {str(number) for number in numbers(folder)}
        inside = list(folder.iterdir()) if folder.exists() else []
        unfinished = [path for path in inside if path.name.isdecimal() and path.name not in complete]
    else:
        unfinished = list(folder.glob(f"*{UNFINISHED}"))
    for path in unfinished:
        remove(path)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}; make room, or see that the folder is there and may be written to"
    return f"{type(error).__name__}: {reason(error)}; see what it says"
