"""How a process of several ends: its failure ends the others, and the coordinator's end is told in a sentence."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import jax

from . import exit_status, watchdog
from .environment import Place
from .judge import who
from .store import Store
from .watchdog import ENDED, Watch, end

_LEAVES = 600  # seconds for which a process that has come to its end waits for the others: one of them may write on
_TOGETHER = 5.0  # seconds for which it does with another status than 0, with which all may leave at once
_NOTICED = 1.5  # seconds within which jax's thread has seen a signal, and all have answered it
_watch: Watch | None = None
_status: int | None = None  # with which a failed process of several exits
_bad: int | None = None  # with which a process exits that has come to its end
_agreed = False  # whether all processes leave with the same status, after the same step
_waiting: tuple[Place, int] | None = None  # while the processes join: for whom, and how long


def watch() -> Watch | None:
    """This process's watchdog; None where there is none."""
    return _watch


def start(store: Store, place: Place, limit: float) -> None:
    """Starts the watchdog, unless the limit is 0."""
    global _watch
    if not limit:
        return
    _watch = Watch(store, place, limit, stall=watchdog.stall_seconds())
    jax.monitoring.register_event_duration_secs_listener(_watch.compiles)
    sys.excepthook = _excepthook_after(sys.excepthook)
    exit_status.watch_exit()
    # Handlers run last in, first out: before jax's own, which waits for processes that may not come.
    atexit.register(_at_exit)
    _watch.start()


def fail(error: BaseException | str, status: int = 1) -> None:
    """This process fails, and so all others end too, with a sentence that says so. Returns once they know; what remains
    is to exit. Nothing where there is one process.
    """
    global _status
    known, _status = _status is not None, status
    if _watch is None or known:
        return
    follows = isinstance(error, jax.errors.JaxRuntimeError)
    _watch.failed(error if isinstance(error, str) else f"{type(error).__name__}: {error}", follows)
    verdict = _watch.verdict
    if follows and verdict is not None and not verdict.sentence.startswith(who(_watch.place.process, _watch.own)):
        end(
            f"\njaxpar: {verdict.sentence}. It broke off a collective of rank {_watch.place.process}, which ends too.",
            ENDED,
        )


def has_failed() -> bool:
    """Whether this process leaves with an error, alone as far as it knows."""
    return _status is not None or (exit_status.left()[0] != 0 and not _agreed)


def agreed() -> None:
    """All processes leave after the same step, with whatever status: none of them fails."""
    global _agreed
    _agreed = True


def badly(error: Exception) -> None:
    """What a process that has come to its end still had to do fails: it says so, and exits with status 1."""
    global _bad
    _bad = 1
    os.write(2, f"error: {error}\n".encode())
    fail(error)


@contextlib.contextmanager
def failing() -> Iterator[None]:
    """An error within it ends the others at once, and not only when it has gone through what waits for them."""
    try:
        yield
    except Exception as error:
        fail(error)
        raise


@contextlib.contextmanager
def step() -> Iterator[None]:
    """Around a training step that all processes take."""
    if _watch is None:
        yield
        return
    _watch.entered()
    yield
    _watch.left()


def going_on(step: int, folder: Path | None) -> None:
    """A run begins after `step`, in a folder, which stacks are written beside; it waits for each of its steps."""
    if _watch is not None:
        _watch.resumed(step)
        _watch.folder, _watch.waits = folder, True


def alive() -> None:
    """This process goes on with what it is at."""
    if _watch is not None:
        _watch.doing(_watch.own.doing)


def doing(what: str) -> None:
    """What this process is at from now on, as a `Trainer` knows it: "evaluating", "reading a batch"."""
    if _watch is not None:
        _watch.doing(what)


def _excepthook_after(before: object):  # noqa: ANN202, a closure
    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)  # type: ignore[operator]
        fail(error, 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1)

    return hook


def _at_exit() -> None:
    assert _watch is not None
    status, text = exit_status.left()
    if _status is None and (not status or _agreed):
        _watch.own.ended = True
        begin = time.monotonic()
        if not _leave(_watch, _LEAVES) and time.monotonic() - begin >= _LEAVES:  # else another one has failed
            fail(
                f"it came to its end and waited {_LEAVES} s for the others, which go on; let all processes end within "
                "that time, and see what the others do"
            )
    elif _status is None and not _leave(_watch, _TOGETHER):
        fail(f"it left with exit status {status}" + (f", {text}" if text else ""), status)
    if _status is not None:
        end("", _status)  # jax would wait at its own exit for processes that have ended


@atexit.register  # when this is imported, and so after those of the user's program
def _exit_badly() -> None:
    if _bad is not None:
        end("", _bad)


def _leave(watch: Watch, seconds: float) -> bool:
    """All processes leave together, and no signal counts any more. Whoever gets SIGTERM asks all others at which step
    they are, in a thread of jax's that looks for it once a second (XLA, preemption_notifier.cc); asked of one that has
    gone, it would wait for a quarter of an hour, and this process for it. Whether all have come within the time.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if watch.store.wait("leaving", seconds):
        time.sleep(_NOTICED)
        watch.close()  # a thread that comes back from C++ when Python has gone ends its process by abort()
        return True
    return False


# -- the coordinator's end ---------------------------------------------------------------------------------------------
#
# Where the coordinator's connection closes, jax's client ends the process by abort(), at once, from its own thread:
# before a thread of ours can say why. A handler of C's is asked last. It may be a function of Python's, as the other
# threads wait in C++ without Python's lock.


@contextlib.contextmanager
def joining(place: Place, timeout: int) -> Iterator[None]:
    """While the processes wait for each other: what follows when one does not come is said in a sentence."""
    global _waiting
    _waiting = place, timeout
    _libc.signal(signal.SIGABRT, _ON_ABORT)
    yield
    _waiting = None


def _on_abort(_: int) -> None:
    if _waiting is not None:
        place, timeout = _waiting
        missing = (
            f"see that process 0 runs and listens on {place.coordinator}" if place.process else "start all of them"
        )
        end(f"\njaxpar: process {place.process} of {place.processes} has waited {timeout} s for the others at "
            f"{place.coordinator}: {missing}, within that time, and that no firewall is between.", ENDED)  # fmt: skip
    if _watch is not None:
        rank, own = _watch.place.process, _watch.own
        if _watch.verdict is not None and (not own.failed or own.follows):
            end(f"\njaxpar: {_watch.verdict.sentence}. Rank {rank} ends with it.", ENDED)
        if rank and (_status is None or own.follows) and not _answers(_watch.place.coordinator):
            zero = _watch.heard[0].beat
            lost = f"{who(0, zero)} is lost: the coordinator in it has closed; it {zero.where}"
            end(f"\njaxpar: {lost}. Rank {rank}, after step {own.position // 2}, ends with it.", ENDED)
        if _status is not None:
            end("", _status)  # it has told its own error, and process 0 has ended before it
        telling = threading.Thread(target=fail, args=("it was aborted; its own stderr says why", 128 + 6), daemon=True)
        telling.start()
        telling.join(5)
    # As it would have ended without this.
    _libc.signal(signal.SIGABRT, _Handler())
    os.kill(os.getpid(), signal.SIGABRT)


def _answers(address: str | None) -> bool:
    assert address is not None
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), 2):
            return True
    except OSError:
        return False


_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int)
_ON_ABORT = _Handler(_on_abort)  # kept: C holds no reference to it
_libc = ctypes.CDLL(None)
_libc.signal.argtypes, _libc.signal.restype = [ctypes.c_int, _Handler], ctypes.c_void_p
