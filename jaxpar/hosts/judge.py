"""Decide which process of a run is lost, stuck or has failed, from the beats in which processes describe themselves.

This file has no threads and ends nothing: `watchdog.py` collects the beats, and ends the process after a `Verdict`.

A process's position is 2 n after n finished training steps, and 2 n + 1 within the next one:

    position    0        1     2        3     4
                before   in    after    in    after ...
                step 1         step 1         step 2

A process that stays behind the furthest one is stuck. While all are at one position they may compile, evaluate or save.
Each names its activity and how long that may last; if every process has exceeded its time, all are stuck.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ..backend.text import few

_MAX_NAMED = 4  # processes that a sentence names


@dataclass
class Beat:
    """The state of a process, which it publishes once per interval.

    Attributes:
      count: number of beats so far.
      run: number of runs that the process has begun; a later run may begin at an earlier step.
      position: position within the run, as described at the top of this file.
      has_stepped: the process has finished a step since it started, so the first compilation is over.
      has_ended: the script is done, and the process waits for the others.
      failure: why the process ends; "" while it does not.
      may_follow: the failure may be the consequence of another process's end, such as a collective that broke off.
      knows_verdict: the process knows why all processes end.
      activity: what the process does, in words.
      num_activities: number of activities that it has begun.
      longest: seconds that this activity has taken at most until now.
      patience: seconds that this activity may take; 0 for any time.
      host: name of the host.
      machine: identifies one boot of one host (or container), within which pids mean the same.
      pid: process id on that machine.
    """

    count: int = 0
    run: int = 0
    position: int = 0
    has_stepped: bool = False
    has_ended: bool = False
    failure: str = ""
    may_follow: bool = False
    knows_verdict: bool = False
    activity: str = "starting"
    num_activities: int = 0
    longest: float = 0.0
    patience: float = 0.0
    host: str = "host unknown"
    machine: str = ""
    pid: int = 0

    @staticmethod
    def first() -> Beat:
        """Return the first beat of this process."""
        boot = Path("/proc/sys/kernel/random/boot_id")
        namespace = Path("/proc/self/ns/pid")
        is_linux = boot.exists() and namespace.is_symlink()
        machine = f"{boot.read_text().strip()} {os.readlink(namespace)}" if is_linux else ""
        return Beat(host=socket.gethostname(), machine=machine, pid=os.getpid())

    @staticmethod
    def from_json(text: str) -> Beat:
        """Parse a beat that `to_json` wrote."""
        return Beat(**json.loads(text))

    def to_json(self) -> str:
        """Return the beat as JSON."""
        return json.dumps(asdict(self))

    @property
    def progress(self) -> tuple[int, int]:
        """How far the process has come: later runs and positions compare as greater."""
        return self.run, self.position

    @property
    def progress_text(self) -> str:
        """How far the process has come in this run, as the predicate of a sentence."""
        num_finished, is_inside = divmod(self.position, 2)
        if not self.position:
            return "had not begun a step"
        # The process may have gone further since its last beat.
        begun = f" and step {num_finished + 1} begun" if is_inside else ""
        return f"last reported step {num_finished} finished{begun}"


class Peer:
    """One process of the run as another one sees it. All times are seconds on the observer's clock.

    Attributes:
      beat: the last beat.
      heard_at: when it came.
      active_since: when a beat first reported the current activity.
      behind_since: when the process was first seen behind the furthest one; None if it is not behind.
    """

    def __init__(self, now: float):
        self.beat, self.heard_at, self.active_since = Beat(), now, now
        self.behind_since: float | None = None

    def receive(self, beat: Beat, now: float) -> None:
        """Note a beat, which may be the last one again."""
        # The same count means that the process has said nothing new since, whoever read the table in between.
        if beat.count != self.beat.count:
            if beat.progress != self.beat.progress:
                self.behind_since = None
            if beat.num_activities != self.beat.num_activities:
                self.active_since = now
            self.beat, self.heard_at = beat, now


@dataclass(frozen=True)
class Verdict:
    """Why all processes end, and whether the stacks of all threads help to find the cause."""

    sentence: str
    stacks: bool = False


def find_failed(peers: Mapping[int, Peer], may_follow: bool) -> Verdict | None:
    """Return the verdict on the first process that reports a failure; None if there is no failure.

    `may_follow` selects the failures that may follow from another process's end; otherwise only the others count.
    """
    for rank, peer in peers.items():
        if peer.beat.failure and peer.beat.may_follow == may_follow:
            return Verdict(f"{describe(rank, peer.beat)} failed: {peer.beat.failure} (it {peer.beat.progress_text})")
    return None


def find_lost(peers: Mapping[int, Peer], now: float, silence_limit: float) -> Verdict | None:
    """Return the verdict on the first process that is gone, or silent for `silence_limit` seconds; else None."""
    for rank, peer in peers.items():
        state = _process_state(peer.beat)
        # A process that reported its failure may be gone before the others know: the failure is the reason.
        if state == "gone" and not peer.beat.failure:
            return Verdict(f"{describe(rank, peer.beat)} is lost: its process is gone; it {peer.beat.progress_text}")
        if (silence := now - peer.heard_at) > silence_limit:
            reason = "its process is stopped" if state == "stopped" else f"nothing was heard of it for {silence:.0f} s"
            return Verdict(f"{describe(rank, peer.beat)} is lost: {reason}; it {peer.beat.progress_text}", True)
    return None


def find_stuck(peers: Mapping[int, Peer], now: float, silence_limit: float) -> Verdict | None:
    """Return the verdict on the first process that has been behind for `silence_limit` seconds; else None.

    Before all processes have finished a step, only a process that has ended counts as stuck: others may compile.
    """
    furthest = max(peer.beat.progress for peer in peers.values())
    if not all(peer.beat.has_stepped for peer in peers.values()):
        # A process that is done before its first step never finishes one; the others cannot without it.
        for rank, peer in peers.items():
            if peer.beat.has_ended and not peer.beat.has_stepped and furthest > peer.beat.progress:
                return Verdict(
                    f"{describe(rank, peer.beat)} ended, and {peer.beat.progress_text}, while others are in one"
                )
        return None
    for rank, peer in peers.items():
        # The time behind begins when the process is first seen behind, and goes on at later looks.
        peer.behind_since = None if peer.beat.progress == furthest else peer.behind_since or now
        if peer.behind_since is not None and (delay := now - peer.behind_since) > silence_limit:
            num_finished, is_inside = divmod(furthest[1], 2)
            progress = f"others are {'in' if is_inside else 'past'} step {num_finished + is_inside}"
            if peer.beat.has_ended:
                return Verdict(f"{describe(rank, peer.beat)} ended, and {peer.beat.progress_text}, while {progress}; "
                               "give every process as many batches")  # fmt: skip
            return Verdict(f"{describe(rank, peer.beat)} is stuck: it {peer.beat.progress_text}, and stayed there "
                           f"{delay:.0f} s while {progress}", True)  # fmt: skip
    return None


def find_all_stuck(peers: Mapping[int, Peer], now: float) -> Verdict | None:
    """Return the verdict on all processes if each has exceeded the time of its activity, after the first step."""
    beats = {rank: peer.beat for rank, peer in peers.items()}
    if not all(beat.has_stepped and beat.patience and not beat.has_ended for beat in beats.values()):
        return None
    # One process within its time is enough: the others may wait for it.
    if any(now - peer.active_since <= peer.beat.patience for peer in peers.values()):
        return None
    # The shortest time: none of them has begun anything else for so long.
    delay = min(now - peer.active_since for peer in peers.values())
    clauses = [f"{describe(rank, beat)} is {beat.activity}, which took {beat.longest:.1f} s at most before "
               f"(it {beat.progress_text})" for rank, beat in beats.items()]  # fmt: skip
    more = f"; and {len(clauses) - _MAX_NAMED} more" if len(clauses) > _MAX_NAMED else ""
    return Verdict(f"all {len(clauses)} processes are stuck: for {delay:.0f} s none has begun anything else; "
                   f"{'; '.join(clauses[:_MAX_NAMED])}{more}", True)  # fmt: skip


def list_busy(peers: Mapping[int, Peer]) -> str:
    """Return the processes whose script has not ended, each with its activity, for a sentence; "" if there is none."""
    busy = [f"rank {rank} ({peer.beat.activity})" for rank, peer in peers.items() if not peer.beat.has_ended]
    return few(busy, _MAX_NAMED)


def describe(rank: int, beat: Beat) -> str:
    """Return the name of a process for a sentence: its rank, host and pid."""
    return f"rank {rank} on {beat.host} (pid {beat.pid})" if beat.pid else f"rank {rank}"


def _process_state(beat: Beat) -> str:
    """Return "gone", "stopped" or "running" for a process of this machine; "" for one of another machine."""
    if not beat.pid or not beat.machine or beat.machine != _THIS_MACHINE:
        return ""
    try:
        # The state follows the name, which is in brackets and may contain some itself.
        state = Path(f"/proc/{beat.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
    return {"Z": "gone", "X": "gone", "T": "stopped", "t": "stopped"}.get(state, "running")


_THIS_MACHINE = Beat.first().machine
