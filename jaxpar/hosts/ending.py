"""How one process of several ends: its failure ends the others, and a sentence reports the coordinator's end.

A process can end in these ways, and each has its hook:

    an exception that nobody catches    `sys.excepthook`                   -> `fail`
    sys.exit, or the end of the script  `atexit`, with exit_status.py      -> `_at_exit`
    abort() by jax's client             a C handler of SIGABRT             -> `_on_abort`
    a verdict on another process        the watchdog's thread              -> `watchdog.exit_now`

The module's state belongs to the process: a process takes part in one run of processes.
"""

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
from .judge import describe
from .store import Store
from .watchdog import ENDED_BY_ANOTHER, Watch, exit_now

# Seconds that a process which has come to its end waits for the others, because one of them may still write.
_LEAVE_TIMEOUT = 600
# The same for a process with a status other than 0, with which all may leave at once.
_LEAVE_TIMEOUT_AFTER_ERROR = 5.0
_SIGNAL_TIME = 1.5  # seconds within which jax's thread has seen a signal, and all have answered it
_watch: Watch | None = None
_failure_status: int | None = None  # exit status of this process after `fail`
_late_status: int | None = None  # exit status of this process after `badly`
_agreed = False  # whether all processes leave with the same status, after the same step
_joining: tuple[Place, int] | None = None  # while the processes join: this process's place, and the timeout


def watch() -> Watch | None:
    """Return this process's watchdog; None if it has none."""
    return _watch


def start(store: Store, place: Place, limit: float) -> None:
    """Start the watchdog, unless the limit is 0."""
    global _watch
    if not limit:
        return
    _watch = Watch(store, place, limit, stall=watchdog.stall_seconds())
    jax.monitoring.register_event_duration_secs_listener(_watch.on_jax_event)
    sys.excepthook = _excepthook_after(sys.excepthook)
    exit_status.watch_exit()
    # Handlers run last in, first out: before jax's own, which waits for processes that may not come.
    atexit.register(_at_exit)
    _watch.start()


def fail(error: BaseException | str, status: int = 1) -> None:
    """Report that this process fails, so that all others end with a sentence that says so.

    Returns once they know. The caller then exits, with this status. Does nothing in a run of one process.
    """
    global _failure_status
    # After the first failure, of which all know, a later one changes only the exit status.
    has_failed_before, _failure_status = _failure_status is not None, status
    if _watch is None or has_failed_before:
        return
    # An error of the runtime may be a collective that broke off because another process is gone. jax raises a plain
    # RuntimeError in its place if that happens while the devices are being listed.
    may_follow = any(isinstance(e, jax.errors.JaxRuntimeError) for e in (error, getattr(error, "__context__", None)))
    _watch.report_failure(error if isinstance(error, str) else f"{type(error).__name__}: {error}", may_follow)
    verdict = _watch.verdict
    name = describe(_watch.place.process, _watch.beat)
    # The verdict is about another process: its end is the cause, and this process's error is the consequence.
    if may_follow and verdict is not None and not verdict.sentence.startswith(name):
        exit_now(
            f"\njaxpar: {verdict.sentence}. It broke off a collective of rank {_watch.place.process}, which ends too.",
            ENDED_BY_ANOTHER,
        )


def has_failed() -> bool:
    """Return whether this process leaves with an error, while the others may go on."""
    return _failure_status is not None or (exit_status.status_and_text()[0] != 0 and not _agreed)


def agreed() -> None:
    """Note that all processes leave after the same step. Then no exit status counts as a failure."""
    global _agreed
    _agreed = True


def badly(error: Exception) -> None:
    """Report an error in the exit handlers of this process, which then exits with status 1."""
    global _late_status
    _late_status = 1
    os.write(2, f"error: {error}\n".encode())
    fail(error)


@contextlib.contextmanager
def failing() -> Iterator[None]:
    """End the other processes as soon as an error leaves this context.

    The error may pass through code that waits for them before it reaches the excepthook.
    """
    try:
        yield
    except Exception as error:
        fail(error)
        raise


@contextlib.contextmanager
def step() -> Iterator[None]:
    """Enclose a training step that all processes take."""
    if _watch is None:
        yield
        return
    _watch.begin_step()
    yield
    _watch.end_step()


def going_on(step: int, folder: Path | None) -> None:
    """Note that a training loop begins after `step` steps, and that it waits for each of its steps.

    Stacks of threads are written to `folder`; None means stderr.
    """
    if _watch is not None:
        _watch.begin_run(step)
        _watch.stack_folder, _watch.waits_for_steps = folder, True


def alive() -> None:
    """Note that this process makes progress in its current activity."""
    if _watch is not None:
        _watch.begin_activity(_watch.beat.activity)


def doing(activity: str) -> None:
    """Note what this process does from now on, such as "evaluating" or "reading a batch"."""
    if _watch is not None:
        _watch.begin_activity(activity)


def _excepthook_after(earlier_hook: object):  # noqa: ANN202, a closure
    """Return an excepthook that calls the earlier one, and then reports the failure."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # The traceback first: `fail` waits until the others know.
        earlier_hook(kind, error, trace)  # type: ignore[operator]
        fail(error, 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1)

    return hook


def _at_exit() -> None:
    """Leave together with the others, or report why this process leaves alone."""
    assert _watch is not None
    status, text = exit_status.status_and_text()
    if _failure_status is None and (not status or _agreed):
        _watch.beat.has_ended = True
        begin = time.monotonic()
        # If `_leave_together` returns early, another process has failed, and the watchdog says so.
        if not _leave_together(_watch, _LEAVE_TIMEOUT) and time.monotonic() - begin >= _LEAVE_TIMEOUT:
            fail(
                f"it came to its end and waited {_LEAVE_TIMEOUT} s for the others, which go on; let all processes end "
                "within that time, and see what the others do"
            )
    elif _failure_status is None and not _leave_together(_watch, _LEAVE_TIMEOUT_AFTER_ERROR):
        fail(f"it left with exit status {status}" + (f", {text}" if text else ""), status)
    if _failure_status is not None:
        exit_now("", _failure_status)  # jax's exit handler would wait for processes that have ended


@atexit.register  # at import, so that it runs after the handlers of the user's program
def _exit_with_late_status() -> None:
    if _late_status is not None:
        exit_now("", _late_status)


def _leave_together(watch: Watch, seconds: float) -> bool:
    """Wait at a barrier for all processes to leave, and return whether all came within this time.

    From here on SIGTERM is ignored. A process that gets it asks all others at which step they are, in a thread of jax's
    that looks for the signal once a second (XLA, preemption_notifier.cc). If it asks a process that has gone, it waits
    for a quarter of an hour, and this process waits for it.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if watch.store.wait("leaving", seconds):
        time.sleep(_SIGNAL_TIME)
        watch.close()  # a thread that returns from C++ after Python has gone ends its process by abort()
        return True
    return False


# -- the coordinator's end ---------------------------------------------------------------------------------------------
#
# When the coordinator's connection closes, jax's client ends the process by abort(), at once, from its own thread:
# before a thread of ours can say why. A C handler of SIGABRT is called last. It may be a Python function, because the
# other threads wait in C++ without Python's lock.


@contextlib.contextmanager
def joining(place: Place, timeout: int) -> Iterator[None]:
    """Enclose the time in which the processes join: if one does not come, a sentence says what to do."""
    global _joining
    _joining = place, timeout
    _libc.signal(signal.SIGABRT, _ON_ABORT)
    yield
    _joining = None


def _on_abort(_: int) -> None:
    """Say why jax's client aborts this process, and exit; if the reason is unknown, abort."""
    # 1. The processes were joining, and not all came.
    if _joining is not None:
        place, timeout = _joining
        advice = f"see that process 0 runs and listens on {place.coordinator}" if place.process else "start all of them"
        exit_now(f"\njaxpar: process {place.process} of {place.processes} has waited {timeout} s for the others at "
                 f"{place.coordinator}: {advice}, within that time, and that no firewall is between.",
                 ENDED_BY_ANOTHER)  # fmt: skip
    if _watch is not None:
        rank, beat = _watch.place.process, _watch.beat
        # 2. There is a verdict on another process.
        if _watch.verdict is not None and (not beat.failure or beat.may_follow):
            exit_now(f"\njaxpar: {_watch.verdict.sentence}. Rank {rank} ends with it.", ENDED_BY_ANOTHER)
        # 3. The coordinator is gone, and with it process 0.
        if rank and (_failure_status is None or beat.may_follow) and not _accepts_connections(_watch.place.coordinator):
            beat_0 = _watch.peers[0].beat
            lost = f"{describe(0, beat_0)} is lost: the coordinator in it has closed; it {beat_0.progress_text}"
            exit_now(f"\njaxpar: {lost}. Rank {rank}, after step {beat.position // 2}, ends with it.", ENDED_BY_ANOTHER)
        # 4. This process has printed its own error, and process 0 has ended before it.
        if _failure_status is not None:
            exit_now("", _failure_status)
        # 5. This process itself was aborted. Tell the others, in a thread that may hang.
        reason = "it was aborted; its own stderr says why"
        reporter = threading.Thread(target=fail, args=(reason, 128 + signal.SIGABRT), daemon=True)
        reporter.start()
        reporter.join(5)
    # End as the process would have ended without this handler.
    _libc.signal(signal.SIGABRT, _Handler())
    os.kill(os.getpid(), signal.SIGABRT)


def _accepts_connections(address: str | None) -> bool:
    """Return whether something listens at host:port."""
    assert address is not None
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), 2):
            return True
    except OSError:
        return False


_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int)
_ON_ABORT = _Handler(_on_abort)  # a global, because C holds no reference to it
_libc = ctypes.CDLL(None)
_libc.signal.argtypes, _libc.signal.restype = [ctypes.c_int, _Handler], ctypes.c_void_p
