"""The watchdog: if one process of a run is lost, stuck or has failed, all processes end with a sentence that says so.

Each process publishes a beat (`judge.Beat`) in the coordinator's table, about once per second. Process 0 reads all
beats, and judges the processes. The others read only process 0's beat and its verdict:

    table            written by          read by
    beat/RANK        every process       process 0; beat/0 by all
    verdict          process 0           the others

Each process has two daemon threads, because a call to the coordinator may never return. `_exchange_forever` talks to
the coordinator. `_check_forever` looks at the clock, and ends the process.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from .environment import Place
from .judge import Beat, Peer, Verdict, describe, find_all_stuck, find_failed, find_lost, find_stuck, list_busy
from .store import Store

ENDED_BY_ANOTHER = 75  # exit status of a process that ends because of another one
DEFAULT_LIMIT = 60.0  # seconds until all have ended
DEFAULT_STALL = 1800.0  # seconds for an activity of unknown duration
TRAINING = "training"  # within a step of a loop that waits for each step
COMPILING = "compiling"  # may last for any time
# Activities in the user's code, which does not report what it does.
USER_CODE = ("starting", "between steps", "done with the run")
_MIN_STEPS = 5  # steps after which the longest one tells how long a step takes
_PATIENCE_FACTOR = 10  # an activity may take this many times its longest duration so far
# The part of the limit after which a process that is silent or behind is given up. In the rest the news spreads.
_SILENCE_FRACTION = 0.6
_NOTICE_INTERVAL = 10.0  # seconds until a process that has ended says that it waits; process 0 then repeats it
# Seconds that process 0, which holds the coordinator, waits for the others to hear why they end.
_SPREAD_TIME = 3.0


def limit_seconds(limit: float | None = None) -> float:
    """Return the argument, else JAXPAR_WATCHDOG, else the default. Raises ValueError below 5 seconds, except for 0."""
    text = os.environ.get("JAXPAR_WATCHDOG") if limit is None else str(limit)
    if text is None:
        return DEFAULT_LIMIT
    return _parse_seconds("JAXPAR_WATCHDOG", text, DEFAULT_LIMIT, f"a watchdog of {text} s", "none")


def stall_seconds() -> float | None:
    """Return JAXPAR_STALL, None if it is not set. Raises ValueError below 5 seconds, except for 0: any time."""
    text = os.environ.get("JAXPAR_STALL")
    if text is None:
        return None
    return _parse_seconds("JAXPAR_STALL", text, DEFAULT_STALL, f"JAXPAR_STALL={text}", "any time")


def _parse_seconds(variable: str, text: str, default: float, subject: str, zero_means: str) -> float:
    """Parse a number of seconds; `subject` and `zero_means` are parts of the errors."""
    try:
        value = float(text)
    except ValueError as error:
        raise ValueError(
            f"{variable}={text!r} is not a number of seconds; set it to {default:g}, or to 0 for {zero_means}"
        ) from error
    if not (value == 0 or 5 <= value < float("inf")):
        raise ValueError(f"{subject} is too quick for a busy host; use 5 or more, or 0 for {zero_means}")
    return value


class Watch:
    """The watchdog of one process.

    Args:
      store, place: the coordinator's table, and this process.
      limit: seconds within which all processes have ended.
      on_verdict: ends the process.
      clock: returns seconds.
      stall: seconds for an activity of unknown duration, 0 for any time. None means `DEFAULT_STALL`, and any time in
        the user's code.

    Attributes:
      beat: the state that this process publishes.
      peers: rank -> the processes that this one hears, itself included.
      verdict: why all processes end; None while they do not.
      stack_folder: folder for the stacks of threads; None means stderr.
      waits_for_steps: the training loop waits for each step, as a `Trainer`'s does.
      silence_limit: seconds after which a process that is silent or behind is given up.
      interval: seconds between beats, and between checks.
      launcher_pid: process id of `jaxpar launch`; None if it did not start this process.
      num_failed_checks: number of checks that found this process failed and not yet ended.
    """

    def __init__(
        self,
        store: Store,
        place: Place,
        limit: float = DEFAULT_LIMIT,
        on_verdict: Callable[[Watch, Verdict], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        stall: float | None = None,
    ):
        self.store, self.place, self.limit, self.clock = store, place, limit, clock
        self.on_verdict = on_verdict or _end_process
        self.silence_limit, self.interval = _SILENCE_FRACTION * limit, min(1.0, limit / 20)
        self.stack_folder: Path | None = None
        # Without its launcher nobody would hear of this process, or end it.
        self.launcher_pid = os.getppid() if "JAXPAR_LAUNCHER" in os.environ else None
        self.beat, self.verdict = Beat.first(), None
        now = clock()
        ranks = range(place.processes) if place.process == 0 else (0, place.process)
        self.peers = {rank: Peer(now) for rank in ranks}
        self._answered_at, self._checked_at, self._coordinator_error = now, now, ""
        self.num_failed_checks = 0
        self._broken_since: float | None = None  # when a process first reported a failure that may follow from another
        self.waits_for_steps = False
        self._stall, self._activity_since, self._activity_before_compiling = stall, now, ""
        self._history: dict[str, tuple[int, float]] = {}  # activity -> number of times, longest seconds
        self._ended_at: float | None = None  # when this process ended its script
        self._next_notice = 0.0  # when it says next that it waits for the others
        self._closed = threading.Event()
        loops = (self._exchange_forever, self._check_forever)
        self._threads = [threading.Thread(target=loop, daemon=True) for loop in loops]

    verdict: Verdict | None

    def start(self) -> None:
        """Start both threads."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End both threads, and wait for them as long as the coordinator may take to answer."""
        self._closed.set()
        faulthandler.cancel_dump_traceback_later()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(self.silence_limit)

    # -- what this process reports -------------------------------------------------------------------------------------

    def begin_run(self, step: int) -> None:
        """Note that a run begins after this step, which is 0 or a checkpoint's."""
        self.beat.run, self.beat.position = self.beat.run + 1, 2 * step

    def begin_step(self) -> None:
        """Note that a training step begins."""
        # An odd position is within a step.
        self.beat.position |= 1
        self.begin_activity(TRAINING if self.waits_for_steps else "in a step")

    def end_step(self) -> None:
        """Note that the step is done, or dispatched."""
        # Even again: `| 1` first, so that a step whose beginning nobody noted counts as well.
        self.beat.position, self.beat.has_stepped = (self.beat.position | 1) + 1, True
        if not self.waits_for_steps:
            self.begin_activity("between steps")

    def begin_activity(self, activity: str) -> None:
        """Note that the process does something else from now on, or the same again: a sign that it lives.

        The time that the activity may take is

            compiling                                               any time
            training, after `_MIN_STEPS` steps                      max(silence_limit, 10 * longest so far)
            anything else, or the user's code with JAXPAR_STALL     max(stall, 10 * longest so far)
            the user's code without JAXPAR_STALL                    any time
        """
        beat, now = self.beat, self.clock()
        count, longest = self._history.get(beat.activity, (0, 0.0))
        self._history[beat.activity] = count + 1, max(longest, now - self._activity_since)
        count, beat.longest = self._history.get(activity, (0, 0.0))
        default_stall = 0.0 if activity in USER_CODE else DEFAULT_STALL
        stall = default_stall if self._stall is None else self._stall
        min_patience = self.silence_limit if activity == TRAINING and count >= _MIN_STEPS else stall
        is_unlimited = activity == COMPILING or not min_patience
        beat.patience = 0.0 if is_unlimited else max(min_patience, _PATIENCE_FACTOR * beat.longest)
        beat.activity, self._activity_since = activity, now
        beat.num_activities += 1

    def on_jax_event(self, event: str, *_: object, **__: object) -> None:
        """Listen to jax's monitoring: a program that has been lowered is compiled next, until its compilation ends."""
        # Programs that other threads compile say nothing about what this process does.
        if threading.current_thread() is not threading.main_thread():
            return
        if event.endswith("/jaxpr_to_mlir_module_duration") and self.beat.activity != COMPILING:
            self._activity_before_compiling = self.beat.activity
            self.begin_activity(COMPILING)
        elif event.endswith("/backend_compile_duration") and self.beat.activity == COMPILING:
            self.begin_activity(self._activity_before_compiling)

    def report_failure(self, reason: str, may_follow: bool = False) -> None:
        """Report that this process fails, and wait until all know.

        If the failure may follow from another process's end, wait as long as finding that end takes.
        """
        # In one line and short: it goes into the table with every beat.
        self.beat.failure, self.beat.may_follow = " ".join(reason.split())[:500], may_follow
        deadline = self.clock() + (self.silence_limit + _SPREAD_TIME if may_follow else _SPREAD_TIME)
        while self.verdict is None and self.clock() < deadline and not self._closed.wait(self.interval / 4):
            pass
        self._wait_for_spread()

    # -- the coordinator -----------------------------------------------------------------------------------------------

    def _exchange_forever(self) -> None:
        """Exchange beats until the watchdog is closed."""
        while not self._closed.is_set():
            try:
                self.exchange()
            except Exception as error:  # the client raises many kinds; `check` judges how long it is silent
                self._coordinator_error = " ".join(str(error).split())[:200]
            self._closed.wait(self.interval)

    def exchange(self) -> None:
        """Publish this process's beat, and read the others' and the verdict. Raises if the coordinator is gone."""
        # Read once: the other thread may set a verdict meanwhile.
        rank, verdict = self.place.process, self.verdict
        self.beat.count += 1
        self.beat.knows_verdict = verdict is not None
        self.store.set(f"beat/{rank}", self.beat.to_json())
        if rank == 0:
            beats = {int(rank): Beat.from_json(text) for rank, text in self.store.folder("beat").items()}
            if verdict:
                self.store.set("verdict", json.dumps([verdict.sentence, verdict.stacks]))
        else:
            texts = {0: self.store.get("beat/0"), rank: self.beat.to_json()}
            beats = {rank: Beat.from_json(text) for rank, text in texts.items() if text is not None}
            if verdict is None and (text := self.store.get("verdict")) is not None:
                # Tell process 0 first: the other thread ends this process as soon as it sees the verdict.
                self.beat.knows_verdict = True
                self.store.set(f"beat/{rank}", self.beat.to_json())
                self.verdict = Verdict(*json.loads(text))
        now = self.clock()
        for rank, beat in beats.items():
            self.peers[rank].receive(beat, now)
        self._answered_at, self._coordinator_error = now, ""

    # -- the clock -----------------------------------------------------------------------------------------------------

    def _check_forever(self) -> None:
        """Check until the watchdog is closed."""
        stderr = sys.__stderr__
        while not self._closed.wait(self.interval):
            if stderr is not None:
                # If an extension holds Python's lock, no thread of ours runs; this timer is a thread of C. It does not
                # end the process, because its clock also runs while a scheduler has suspended the whole job.
                faulthandler.dump_traceback_later(self.limit, file=stderr)
            self.check()

    def check(self) -> None:
        """Judge the processes, and end this one if there is a verdict."""
        now = self.clock()
        if now - self._checked_at > max(5 * self.interval, self.silence_limit / 4):
            # This process itself was stopped and continued. It hears first what the others have decided.
            self._answered_at = now
            for peer in self.peers.values():
                peer.heard_at = peer.active_since = now
                peer.behind_since = None
        self._checked_at = now
        if self.beat.has_ended:
            self._say_waiting(now)
        self.verdict = self.verdict or self._judge(now)
        if self.verdict is not None:
            self._wait_for_spread()
            self.on_verdict(self, self.verdict)

    def _say_waiting(self, now: float) -> None:
        """Say that this process has ended and waits for the others. Process 0 repeats it at intervals, for all."""
        if self._ended_at is None:
            self._ended_at, self._next_notice = now, now + _NOTICE_INTERVAL
        if now < self._next_notice:
            return
        rank = self.place.process
        self._next_notice = math.inf if rank else now + _NOTICE_INTERVAL
        busy = list_busy(self.peers) or "the others"
        notice = f"rank {rank} has come to its end, after step {self.beat.position // 2}, and waits for {busy}"
        os.write(2, f"jaxpar: {notice}, {now - self._ended_at:.0f} s so far\n".encode())

    def _judge(self, now: float) -> Verdict | None:
        """Return this process's verdict at this time: process 0 judges all, the others judge process 0."""
        other_peers = {rank: peer for rank, peer in self.peers.items() if rank != self.place.process}
        if self.launcher_pid is not None and self.launcher_pid != os.getppid():
            return Verdict(f"jaxpar launch, which had started {describe(self.place.process, self.beat)}, is gone")
        if self.place.process:
            if (silence := now - self._answered_at) > self.silence_limit:
                beat_0 = self.peers[0].beat
                cause = f": {self._coordinator_error}" if self._coordinator_error else ""
                reason = f"its coordinator has not answered for {silence:.0f} s{cause}"
                return Verdict(f"{describe(0, beat_0)} is lost: {reason}; it {beat_0.progress_text}", True)
            # On the same machine the end of process 0 is seen at once. Its failure process 0 publishes as a verdict.
            return find_lost(other_peers, now, self.silence_limit)
        if verdict := find_failed(self.peers, may_follow=False) or find_lost(other_peers, now, self.silence_limit):
            return verdict
        if verdict := find_failed(self.peers, may_follow=True):
            # A collective broke off. Its cause, a lost process, may be found within the silence limit.
            self._broken_since = self._broken_since or now
            return verdict if now - self._broken_since > self.silence_limit else None
        return find_stuck(self.peers, now, self.silence_limit) or find_all_stuck(self.peers, now)

    def _wait_for_spread(self) -> None:
        """On process 0, wait until the others have heard the verdict: the coordinator ends with process 0."""
        if self.place.process:
            return
        deadline = time.monotonic() + _SPREAD_TIME
        other_peers = [peer for rank, peer in self.peers.items() if rank]
        while time.monotonic() < deadline:
            silence = 5 * self.interval  # a process that is silent for so long hears nothing any more
            if all(peer.beat.knows_verdict or self.clock() - peer.heard_at > silence for peer in other_peers):
                return
            time.sleep(self.interval / 4)


def _end_process(watch: Watch, verdict: Verdict) -> None:
    """End this process at once: whatever its threads wait for would never come."""
    rank = watch.place.process
    if watch.beat.failure:
        # The process prints its own error and exits, unless its exit handlers wait for the others.
        watch.num_failed_checks += 1
        if watch.num_failed_checks * watch.interval < _SPREAD_TIME + 10:
            return
    message = f"\njaxpar: {verdict.sentence}"
    if verdict.stacks:
        message += f"; {write_stacks(watch)}"
    # A process that failed for its own reason, and then hung in its exit handlers, keeps its own status.
    status = 1 if watch.beat.failure and not watch.beat.may_follow else ENDED_BY_ANOTHER
    exit_now(f"{message}. Rank {rank}, after step {watch.beat.position // 2}, ends with it.", status)


def exit_now(sentence: str, status: int) -> None:
    """Print a sentence on stderr, and end this process at once, without its exit handlers."""
    # `os._exit` flushes nothing, and what the script printed must not be lost.
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
    if sentence:
        os.write(2, f"{sentence}\n".encode())
    os._exit(status)


def write_stacks(watch: Watch) -> str:
    """Write the stacks of all threads of this process, and return where they are, in words."""
    if watch.stack_folder is not None and watch.stack_folder.is_dir():
        path = watch.stack_folder / f"stacks-rank-{watch.place.process}.txt"
        try:
            with path.open("w") as file:
                faulthandler.dump_traceback(file, all_threads=True)
            return f"where the threads of this process were is in {path}"
        except OSError as error:  # a full disk may be the cause of the failure; write to stderr
            os.write(2, f"{path}: {error.strerror}\n".encode())
    faulthandler.dump_traceback(2, all_threads=True)
    return "where the threads of this process were is above"
