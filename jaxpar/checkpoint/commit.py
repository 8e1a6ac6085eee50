"""The commit of a checkpoint: written by all hosts, or by none.

    thread of process 0          thread of each other process
    create the folder
      - - - - - - - - - - - - all know the outcome - - - - - - - -
    write its part               write its part
      - - - - - - - - - - - - all know the outcome - - - - - - - -
    finish, sync, rename,
    remove old checkpoints
      - - - - - - - - - - - - all know the outcome - - - - - - - -

Orbax decides which checkpoint is complete. On disk the folder gets its name at the end; in a bucket it gets the file
`commit_success.txt`. If a host cannot write, nothing is committed, and all hosts raise the same error.
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
from .about import COMPLETE, UNFINISHED, complete_steps

Value = TypeVar("Value")
Action = Callable[[Place], object]
_pending_saves: dict[Future[None], Place] = {}  # saves that nobody has waited for yet, with their folders


class Writer:
    """One of the processes that write checkpoints together, one checkpoint after the other."""

    def __init__(self, outcomes: Outcomes):
        # `_counts` has the number of runs of each kind of action. All processes count alike, so that name and count
        # identify an action.
        self._outcomes, self._counts = outcomes, collections.Counter[str]()
        # One thread, so that saves follow each other in one order on all processes.
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "jaxpar-save")

    def begin(
        self, folder: Place, number: int, keep: int | None, write: Action, finish: Action = lambda unfinished: None
    ) -> Future[None]:
        """Begin to write a checkpoint in the background; return a future for `wait`. All hosts call it, in one order.

        Args:
          folder: the folder of the run's checkpoints.
          number: the checkpoint's step, which is its name.
          keep: number of checkpoints to keep, counting this one; all if None.
          write: writes this host's part, called with the folder of the unfinished checkpoint.
          finish: completes the folder, called on process 0 once all hosts have written.
        """
        _wait_at_exit()
        future = self._thread.submit(self._write, folder, number, keep, write, finish)
        _pending_saves[future] = folder
        return future

    def attempt_on_all_hosts(
        self, name: str, action: Callable[[], Value], describe: Callable[[Exception], str] = str
    ) -> tuple[Value | None, Exception | None, str]:
        """Run an action that all hosts run, and exchange the outcome. All hosts must call it, in one order.

        A host whose action failed tells the others, which would wait for it for ever.

        Args:
          name: the kind of action, the same on all hosts.
          describe: returns the text of an error for the other hosts.

        Returns:
          The action's value, or None; its error on this host, or None; and the reason if it failed on any host, or "".
        """
        value, error, problem = None, None, ""
        try:
            # No Exception may leave this function before the exchange: the other hosts wait for this host's outcome.
            value = action()
        except Exception as failure:  # from a disk, a bucket, or a bug
            error, problem = failure, describe(failure) or type(failure).__name__
        self._counts[name] += 1
        try:
            problem = self._outcomes.shared(name, self._counts[name], problem)
        except Exception as failure:  # the coordinator does not answer
            error, problem = error or failure, problem or describe(failure)
        return value, error, problem

    def _write(self, folder: Place, number: int, keep: int | None, write: Action, finish: Action) -> None:
        """Write a checkpoint, in the thread: see `begin`. Raises ValueError on all hosts if one could not write."""
        from .write import temporary

        final = folder / str(number)
        unfinished = final if is_bucket(folder) else folder / f"{number}{UNFINISHED}"
        orbax = temporary(final)

        def make_folder() -> None:
            if is_bucket(folder):
                folder.mkdir(parents=True, exist_ok=True)  # raises if the bucket is gone; Orbax would create it again
            elif not folder.is_dir():  # it was removed during the run, and Orbax would make it again
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
            elif unfinished.is_symlink():  # the files would go to where it leads
                unfinished.unlink()
            answered(folder, lambda: asyncio.run(orbax.create()))

        def complete() -> None:
            answered(folder, lambda: finish(unfinished))
            # The files must be on the disk before the folder has its name: a power cut could leave a folder that looks
            # complete and is not.
            sync(unfinished)
            answered(folder, lambda: asyncio.run(orbax.finalize()))
            sync(final)
            sync(folder, deep=False)
            # Old checkpoints go only now that the new one is safe.
            older = [step for step in complete_steps(folder) if step < number]
            surplus = len(older) + 1 - keep if keep else 0
            for step in older[: max(surplus, 0)]:
                _discard(folder / str(step))

        on_process_0 = lambda action: action if self._outcomes.process == 0 else lambda: None
        actions = {
            "folder": on_process_0(make_folder),
            "part": lambda: write(unfinished),
            "commit": on_process_0(complete),
        }
        # Each action ends with an exchange of outcomes, so that no host begins an action before all have ended the one
        # before.
        for name, action in actions.items():
            _, cause, problem = self.attempt_on_all_hosts(f"save/{name}", action, _reason)
            if problem:
                raise ValueError(f"a checkpoint could not be written to {folder}: {problem}") from cause


@functools.cache
def writer() -> Writer:
    """Return the writer of this process."""
    processes = jax.process_count()
    return Writer(Outcomes(jax.process_index(), processes, Coordinator() if processes > 1 else None))


def wait(save: Future[None]) -> None:
    """Wait until a checkpoint is complete. Raises ValueError on all hosts if one could not write."""
    try:
        save.result()
    finally:
        # An error is raised once: waiting for the save again must not raise it again.
        _pending_saves.pop(save, None)


def wait_for(folder: Place | str) -> None:
    """Wait for all saves of this process into a folder of checkpoints, given that folder or one of the checkpoints."""
    path = place(folder, "folder").absolute()
    # A copy of the items, because `wait` removes its own.
    for save, save_folder in list(_pending_saves.items()):
        if save_folder in (path, path.parent):
            wait(save)


@functools.cache
def _wait_at_exit() -> None:
    """Make the program wait for its saves before it exits, and exit with an error if one fails. Acts once."""
    from . import write  # noqa: F401  # imports Orbax now: a thread cannot import it while the program exits

    def wait_for_all() -> None:
        for save in list(_pending_saves):
            try:
                wait(save)
            except ValueError as error:
                ending.badly(error)

    # Functions registered here run before all `atexit` functions, in the reverse order of registration. `wait_for_all`
    # is registered after the functions of Orbax's modules, and so runs before them: once they have run, no thread can
    # be started, and Orbax and the storage clients need threads.
    threading._register_atexit(wait_for_all)  # type: ignore[attr-defined]


def _discard(checkpoint: Place) -> None:
    """Remove a checkpoint.

    The mark that makes it complete goes first. If the process is killed meanwhile, no damaged checkpoint remains.
    """
    if is_bucket(checkpoint):
        (checkpoint / COMPLETE).unlink()
    else:
        rename(checkpoint, checkpoint := checkpoint.with_name(f"{checkpoint.name}{UNFINISHED}"))
    with contextlib.suppress(OSError):  # a file may be open elsewhere; the next run in this folder removes it
        remove(checkpoint)


def remove_unfinished(folder: Place) -> None:
    """Remove the unfinished checkpoints that killed processes have left. Waits for this process's own saves there."""
    concurrent.futures.wait([save for save, save_folder in _pending_saves.items() if save_folder == folder])
    if is_bucket(folder):
        complete = {str(number) for number in complete_steps(folder)}
        paths = list(folder.iterdir()) if folder.exists() else []
        # In a bucket an unfinished checkpoint has its number as its name already, and lacks the last file.
        unfinished = [path for path in paths if path.name.isdecimal() and path.name not in complete]
    else:
        unfinished = list(folder.glob(f"*{UNFINISHED}"))
    for path in unfinished:
        remove(path)


def _reason(error: Exception) -> str:
    """Return why a save failed, and what to try."""
    if isinstance(error, FileNotFoundError) and error.strerror:  # older checkpoints may be gone too
        return f"{error.strerror}; create it, and see that all hosts have the same folder"
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.strerror}; make room, or see that all hosts have the same folder and may write to it"
    else:
        text = f"{type(error).__name__}: {reason(error)}; see what it says"
    return f"{text}. Older checkpoints are unchanged"
