"""Who is lost, stuck or has failed, from what processes say of themselves. Nothing here waits or ends anything.

A process's position is twice the training steps that it has finished, and one more while it is in a step. Who is
behind others, and stays there, is stuck. Where all are at one position they may compile, evaluate or save; each says
what it does, and how long that may last, and all are stuck where each has been at it for longer.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

_NAMED = 4  # processes that a sentence names


@dataclass
class Beat:
    """What a process says of itself, again and again.

    Attributes:
      count: of its beats.
      run, position: how many runs it has begun, and see above: in a later run it may be at an earlier step.
      armed: it has finished a step since it started: what is slow from now on is not the first compilation.
      ended: its script is done, and it waits for the others to be.
      failed: why it ends, "" while it does not.
      follows: whether that may follow from another one's end, as a collective that broke off.
      heard: it knows why all end.
      doing: what it is at, in words.
      signs: how often it has begun something else.
      usual: seconds that this has taken at most until now.
      patience: seconds that it may take; 0 for any number.
      host, machine, pid: where it runs; `machine` is one boot of one host (or container), where pids mean the same.
    """

    count: int = 0
    run: int = 0
    position: int = 0
    armed: bool = False
    ended: bool = False
    failed: str = ""
    follows: bool = False
    heard: bool = False
    doing: str = "starting"
    signs: int = 0
    usual: float = 0.0
    patience: float = 0.0
    host: str = "host unknown"
    machine: str = ""
    pid: int = 0

    @staticmethod
    def here() -> Beat:
        """The first one of this process."""
        boot = Path("/proc/sys/kernel/random/boot_id")
        space = Path("/proc/self/ns/pid")
        machine = f"{boot.read_text().strip()} {os.readlink(space)}" if boot.exists() and space.is_symlink() else ""
        return Beat(host=socket.gethostname(), machine=machine, pid=os.getpid())

    @staticmethod
    def read(text: str) -> Beat:
        """From what `written` wrote."""
        return Beat(**json.loads(text))

    def written(self) -> str:
        """As text."""
        return json.dumps(asdict(self))

    @property
    def reached(self) -> tuple[int, int]:
        """How far it has come."""
        return self.run, self.position

    @property
    def where(self) -> str:
        """How far it has come in this run, in words."""
        step, inside = divmod(self.position, 2)
        if not self.position:
            return "had not begun a step"
        return f"last finished step {step}" + (f" and was in step {step + 1}" if inside else "")


class Heard:
    """The last beat of one process; when it came, by the clock of who heard it; since when it has been at what it does;
    and since when it has been behind.
    """

    def __init__(self, now: float):
        self.beat, self.since, self.moved = Beat(), now, now
        self.behind: float | None = None

    def hear(self, beat: Beat, now: float) -> None:
        """A beat that may be the same again."""
        if beat.count != self.beat.count:
            if beat.reached != self.beat.reached:
                self.behind = None
            if beat.signs != self.beat.signs:
                self.moved = now
            self.beat, self.since = beat, now


@dataclass(frozen=True)
class Verdict:
    """Why all end, and whether the stacks of threads help to see it."""

    sentence: str
    stacks: bool = False


def failed(heard: Mapping[int, Heard], follows: bool) -> Verdict | None:
    """Of the first process that says it has failed: itself, or, where `follows`, perhaps for another one's sake."""
    for rank, each in heard.items():
        if each.beat.failed and each.beat.follows == follows:
            return Verdict(f"{who(rank, each.beat)} failed: {each.beat.failed} (it {each.beat.where})")
    return None


def lost(heard: Mapping[int, Heard], now: float, silent: float) -> Verdict | None:
    """Of the first process that is gone, or has said nothing for `silent` seconds."""
    for rank, each in heard.items():
        state = _state(each.beat)
        if state == "gone" and not each.beat.failed:
            return Verdict(f"{who(rank, each.beat)} is lost: its process is gone; it {each.beat.where}")
        if (seconds := now - each.since) > silent:
            why = "its process is stopped" if state == "stopped" else f"nothing was heard of it for {seconds:.0f} s"
            return Verdict(f"{who(rank, each.beat)} is lost: {why}; it {each.beat.where}", True)
    return None


def stuck(heard: Mapping[int, Heard], now: float, silent: float) -> Verdict | None:
    """Of the first process that has been behind others for `silent` seconds, once all have finished a step."""
    furthest = max(each.beat.reached for each in heard.values())
    most = furthest[1]
    if not all(each.beat.armed for each in heard.values()):
        # A process that is done before its first step never finishes one; the others cannot without it.
        for rank, each in heard.items():
            if each.beat.ended and not each.beat.armed and furthest > each.beat.reached:
                return Verdict(f"{who(rank, each.beat)} ended, and {each.beat.where}, while others are in one")
        return None
    for rank, each in heard.items():
        each.behind = None if each.beat.reached == furthest else each.behind or now
        if each.behind is not None and (seconds := now - each.behind) > silent:
            others = f"others are {'in' if most % 2 else 'past'} step {most // 2 + most % 2}"
            if each.beat.ended:
                return Verdict(f"{who(rank, each.beat)} ended, and {each.beat.where}, while {others}; "
                               "give every process as many batches")  # fmt: skip
            return Verdict(f"{who(rank, each.beat)} is stuck: it {each.beat.where}, and stayed there {seconds:.0f} s "
                           f"while {others}", True)  # fmt: skip
    return None


def still(heard: Mapping[int, Heard], now: float) -> Verdict | None:
    """Of all processes, where each has been at one thing for longer than that may take, after the first step."""
    beats = {rank: each.beat for rank, each in heard.items()}
    if not all(beat.armed and beat.patience and not beat.ended for beat in beats.values()):
        return None
    if any(now - each.moved <= each.beat.patience for each in heard.values()):
        return None
    seconds = min(now - each.moved for each in heard.values())
    at = [f"{who(rank, beat)} is {beat.doing}, which took {beat.usual:.1f} s at most before (it {beat.where})"
          for rank, beat in beats.items()]  # fmt: skip
    more = f"; and {len(at) - _NAMED} more" if len(at) > _NAMED else ""
    return Verdict(f"all {len(at)} processes are stuck: for {seconds:.0f} s none has begun anything else; "
                   f"{'; '.join(at[:_NAMED])}{more}", True)  # fmt: skip


def who(rank: int, beat: Beat) -> str:
    """A process, in words."""
    return f"rank {rank} on {beat.host} (pid {beat.pid})" if beat.pid else f"rank {rank}"


def _state(beat: Beat) -> str:
    """Of a process on this machine "gone", "stopped" or "there"; "" of one elsewhere."""
    if not beat.pid or not beat.machine or beat.machine != _HERE:
        return ""
    try:
        state = Path(f"/proc/{beat.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
    return {"Z": "gone", "X": "gone", "T": "stopped", "t": "stopped"}.get(state, "there")


_HERE = Beat.here().machine
