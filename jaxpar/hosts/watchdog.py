"""The watchdog: each process says once a second where it is, and a lost, stuck or failed one ends all, with a sentence.

Process 0 hears all and judges (`judge.py`); the others hear process 0, and judge it alone. Each has two threads: one
talks with the coordinator, which may never answer; the other looks at the clock, and ends the process.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from .environment import Place
from .judge import Beat, Heard, Verdict, failed, lost, still, stuck, who
from .store import Store

ENDED = 75  # exit status of a process that another one's end has ended
LIMIT = 60.0  # seconds until all have ended
STALL = 1800.0  # seconds that all may be at something that may take any time
TRAINING, COMPILING = "training", "compiling"  # in a step of a loop that waits for each; what may last for any time
ELSEWHERE = ("starting", "between steps", "done with the run")  # in code of the user's, which says nothing
_TIMES, _LONGER = 5, 10  # steps after which it is known how long one takes; how much longer none takes
_SILENT = 0.6  # of these, until one that says nothing, or stays behind, is given up; the rest is for the news to spread
_WAITS = 10.0  # seconds after which a process that has come to its end says that it waits for the others
_LEAVING = 3.0  # seconds that process 0, which has the coordinator, waits for the others to hear why they end


def seconds(given: float | None = None) -> float:
    """The limit: as given, or of the environment. Raises ValueError below 5 seconds, but for 0."""
    text = os.environ.get("JAXPAR_WATCHDOG") if given is None else str(given)
    return LIMIT if text is None else _read("JAXPAR_WATCHDOG", text, LIMIT, f"a watchdog of {text} s", "none")


def stall_seconds() -> float | None:
    """Of the environment, None if it says nothing. Raises ValueError below 5 seconds, but for 0, for any time."""
    text = os.environ.get("JAXPAR_STALL")
    return None if text is None else _read("JAXPAR_STALL", text, STALL, f"JAXPAR_STALL={text}", "any time")


def _read(name: str, text: str, usual: float, what: str, off: str) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise ValueError(f"{name}={text!r} is no number of seconds; set it to {usual:g}, or to 0 for none") from error
    if not (value == 0 or 5 <= value < float("inf")):
        raise ValueError(f"{what} is too quick for a busy host; use 5 or more, or 0 for {off}")
    return value


class Watch:
    """One process's watchdog.

    Args:
      store: the coordinator's table.
      place: which process this is.
      limit: seconds within which all have ended.
      leave: ends the process.
      clock: in seconds.
      stall: seconds that all may be at something of which it is not known how long it takes, 0 for any time; if None
        `STALL`, and in code of the user's any time.

    Attributes: `folder`, where stacks are written, stderr without it; `own`, what this process says of itself.
    """

    def __init__(
        self,
        store: Store,
        place: Place,
        limit: float = LIMIT,
        leave: Callable[[Watch, Verdict], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        stall: float | None = None,
    ):
        self.store, self.place, self.limit, self.clock, self.leave = store, place, limit, clock, leave or _leave
        self.silent, self.every = _SILENT * limit, min(1.0, limit / 20)
        self.folder: Path | None = None
        # What `launch` sets: without it nobody would hear of this process, or end it.
        self.parent = os.getppid() if "JAXPAR_LAUNCHER" in os.environ else None
        self.own, self.verdict = Beat.here(), None
        now = clock()
        self.heard = {
            rank: Heard(now) for rank in (range(place.processes) if place.process == 0 else (0, place.process))
        }
        self._answered, self._looked, self._problem = now, now, ""
        self.failing = 0  # times that it was found to have failed, and not to have ended
        self._broke: float | None = None  # when a process first said that a collective broke off
        self.waits = False  # whether the loop waits for each step, as a `Trainer`'s does
        self._stall, self._began, self._before = stall, now, ""
        self._longest: dict[str, tuple[int, float]] = {}  # of what it did: how often, and the most seconds
        self._ended: float | None = None  # when this process had come to its end; 0 once that was said
        self._closed = threading.Event()
        self._threads = [threading.Thread(target=loop, daemon=True) for loop in (self._talk, self._look)]

    verdict: Verdict | None

    def start(self) -> None:
        """Starts both threads, daemons."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Ends both threads, and waits for them as long as the coordinator may take to answer."""
        self._closed.set()
        faulthandler.cancel_dump_traceback_later()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(self.silent)

    # -- what a run says -----------------------------------------------------------------------------------------------

    def resumed(self, step: int) -> None:
        """A run goes on from this step."""
        self.own.run, self.own.position = self.own.run + 1, 2 * step

    def entered(self) -> None:
        """A step begins."""
        self.own.position |= 1
        self.doing(TRAINING if self.waits else "in a step")

    def left(self) -> None:
        """The step is done, or dispatched."""
        self.own.position, self.own.armed = (self.own.position | 1) + 1, True
        if not self.waits:
            self.doing("between steps")

    def doing(self, what: str) -> None:
        """From now on the process is at something, in words: a sign that it lives."""
        own, now = self.own, self.clock()
        times, longest = self._longest.get(own.doing, (0, 0.0))
        self._longest[own.doing] = times + 1, max(longest, now - self._began)
        times, own.usual = self._longest.get(what, (0, 0.0))
        unknown = (0.0 if what in ELSEWHERE else STALL) if self._stall is None else self._stall
        least = self.silent if what == TRAINING and times >= _TIMES else unknown
        own.patience = 0.0 if what == COMPILING or not least else max(least, _LONGER * own.usual)
        own.doing, self._began = what, now
        own.signs += 1

    def compiles(self, event: str, *_: object, **__: object) -> None:
        """Hears of jax that a program has been lowered, after which it is compiled, and that it has been compiled."""
        if threading.current_thread() is not threading.main_thread():
            return
        if event.endswith("/jaxpr_to_mlir_module_duration") and self.own.doing != COMPILING:
            self._before = self.own.doing
            self.doing(COMPILING)
        elif event.endswith("/backend_compile_duration") and self.own.doing == COMPILING:
            self.doing(self._before)

    def failed(self, why: str, follows: bool = False) -> None:
        """This process fails: says so, and waits until all know. `follows`: it may come of another one's end, and so it
        waits for as long as finding that takes.
        """
        self.own.failed, self.own.follows = " ".join(why.split())[:500], follows
        until = self.clock() + (self.silent + _LEAVING if follows else _LEAVING)
        while self.verdict is None and self.clock() < until and not self._closed.wait(self.every / 4):
            pass
        self._spread()

    # -- the coordinator -----------------------------------------------------------------------------------------------

    def _talk(self) -> None:
        while not self._closed.is_set():
            try:
                self.talk()
            except Exception as error:  # of whatever kind its client's is: the other thread judges its silence
                self._problem = " ".join(str(error).split())[:200]
            self._closed.wait(self.every)

    def talk(self) -> None:
        """Says where this process is, and hears where others are. Raises where the coordinator is gone."""
        rank, verdict = self.place.process, self.verdict
        self.own.count += 1
        self.own.heard = verdict is not None
        self.store.set(f"beat/{rank}", self.own.written())
        if rank == 0:
            beats = {int(rank): Beat.read(text) for rank, text in self.store.folder("beat").items()}
            if verdict:
                self.store.set("verdict", json.dumps([verdict.sentence, verdict.stacks]))
        else:
            texts = {0: self.store.get("beat/0"), rank: self.own.written()}
            beats = {rank: Beat.read(text) for rank, text in texts.items() if text is not None}
            if verdict is None and (said := self.store.get("verdict")) is not None:
                self.own.heard = True
                self.store.set(f"beat/{rank}", self.own.written())
                self.verdict = Verdict(*json.loads(said))
        now = self.clock()
        for rank, beat in beats.items():
            self.heard[rank].hear(beat, now)
        self._answered, self._problem = now, ""

    # -- the clock -----------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        stderr = sys.__stderr__
        while not self._closed.wait(self.every):
            if stderr is not None:
                # Where an extension keeps Python's lock no thread of ours runs; this one is C's. It does not end the
                # process, as its clock also runs while a scheduler has all of them stopped, to go on later.
                faulthandler.dump_traceback_later(self.limit, file=stderr)
            self.look()

    def look(self) -> None:
        """Judges, and leaves where there is reason to."""
        now = self.clock()
        if now - self._looked > max(5 * self.every, self.silent / 4):
            # It is this process that stood still, stopped and continued: it hears first what the others think.
            self._answered = now
            for each in self.heard.values():
                each.since = each.moved = now
                each.behind = None
        self._looked = now
        if self.own.ended and self._ended is None:
            self._ended = now
        elif self._ended and now - self._ended > _WAITS:
            self._ended = 0.0
            told = f"rank {self.place.process} has come to its end, after step {self.own.position // 2}"
            os.write(2, f"jaxpar: {told}, and waits for the others\n".encode())
        self.verdict = self.verdict or self._judged(now)
        if self.verdict is not None:
            self._spread()
            self.leave(self, self.verdict)

    def _judged(self, now: float) -> Verdict | None:
        others = {rank: each for rank, each in self.heard.items() if rank != self.place.process}
        if self.parent is not None and self.parent != os.getppid():
            return Verdict(f"jaxpar launch, which had started {who(self.place.process, self.own)}, is gone")
        if self.place.process:
            if (silence := now - self._answered) > self.silent:
                zero = self.heard[0].beat
                why = f": {self._problem}" if self._problem else ""
                says = f"its coordinator has not answered for {silence:.0f} s{why}"
                return Verdict(f"{who(0, zero)} is lost: {says}; it {zero.where}", True)
            # On the same machine it is seen at once. Its failure it tells itself.
            return lost(others, now, self.silent)
        if (found := failed(self.heard, follows=False)) or (found := lost(others, now, self.silent)):
            return found
        if broken := failed(self.heard, follows=True):
            self._broke = self._broke or now
            return broken if now - self._broke > self.silent else None
        return stuck(self.heard, now, self.silent) or still(self.heard, now)

    def _spread(self) -> None:
        """Process 0 lets the others hear it first: with it goes the coordinator."""
        if self.place.process:
            return
        until = time.monotonic() + _LEAVING
        others = [each for rank, each in self.heard.items() if rank]
        while time.monotonic() < until:
            if all(each.beat.heard or self.clock() - each.since > 5 * self.every for each in others):
                return
            time.sleep(self.every / 4)


def _leave(watch: Watch, verdict: Verdict) -> None:
    """Ends this process: its threads are beyond help, and whatever waits for others would wait for ever."""
    rank = watch.place.process
    if watch.own.failed:
        # It has its own error to tell, and ends by itself, unless what it leaves behind waits for the others.
        watch.failing += 1
        if watch.failing * watch.every < _LEAVING + 10:
            return
    said = f"\njaxpar: {verdict.sentence}"
    if verdict.stacks:
        said += f"; {stacks(watch)}"
    status = 1 if watch.own.failed and not watch.own.follows else ENDED  # its own, where what it leaves behind hangs
    end(f"{said}. Rank {rank}, after step {watch.own.position // 2}, ends with it.", status)


def end(sentence: str, status: int) -> None:
    """Says it, and ends this process at once, whatever it is doing."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
    if sentence:
        os.write(2, f"{sentence}\n".encode())
    os._exit(status)


def stacks(watch: Watch) -> str:
    """Writes the stacks of all threads of this process; where they are."""
    if watch.folder is not None and watch.folder.is_dir():
        path = watch.folder / f"stacks-rank-{watch.place.process}.txt"
        try:
            with path.open("w") as file:
                faulthandler.dump_traceback(file, all_threads=True)
            return f"where its threads were is in {path}"
        except OSError as error:  # a full disk, perhaps the reason of it all: stderr is left
            os.write(2, f"{path}: {error.strerror}\n".encode())
    faulthandler.dump_traceback(2, all_threads=True)
    return "where its threads were is above"
