"""The faults of a run, what is promised of each, and within how many seconds; `campaign.py` counts what is kept."""

import contextlib
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from campaign_runs import Group, Truth, complete

Outcome = tuple[bool, float, str]  # whether the promise was kept, the seconds that it took, what was said


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
      promise: what is promised, for the table.
      seconds: within which, from the fault on (for hosts that differ: from the moment when all have joined).
      run: makes it happen in a folder of its own, beside the run that nobody broke.
    """

    name: str
    promise: str
    seconds: int
    run: Callable[[Path, Truth], Outcome]


def _go_on(out: Path, truth: Truth) -> str:
    """Goes on with a broken run; how its end differs from the run that nobody broke, or ""."""
    with Group(1, out=str(out), **truth.work) as group:
        group.end(60 + truth.seconds)
    return truth.differs(out, group) if group.status == 0 else f"it does not go on: {group.said()}"


def _rank(number: signal.Signals) -> Callable[[Path, Truth], Outcome]:
    def run(out: Path, truth: Truth) -> Outcome:
        with Group(2, out=str(out), steps=10**6, save_every=50) as group:
            if not group.until(lambda: group.step >= 5, 120):
                return False, 0.0, f"it does not train: {group.said()}"
            begin = time.monotonic()
            group.send(1, number)
            ended = group.until(lambda: group.status is not None, 200, pause=0.05)
            seconds = time.monotonic() - begin
            if number == signal.SIGSTOP:
                group.send(1, signal.SIGCONT)
                ended &= group.until(lambda: not group.alive, 60, pause=0.05)
        words = group.said(0)
        # Its own status, not that of an abort, and a sentence that names the other.
        named = any(name in words for name in ("process 1", "rank 1"))
        return ended and (group.status or 0) > 0 and named and not group.crashed, seconds, words

    return run


def _full_disk(out: Path, truth: Truth) -> Outcome:
    """A small file system in memory with a file that fills it; where none may be mounted, files that cannot grow."""
    out.mkdir()
    saved = max((truth.out / "checkpoints").iterdir(), key=lambda x: int(x.name))
    room = int(1.6 * sum(4096 * -(-x.stat().st_size // 4096) for x in saved.rglob("*")))  # one checkpoint, not two
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "campaign", out], capture_output=True)
    ballast, limit = out / "ballast", None
    if mounted.returncode == 0:
        ballast.write_bytes(bytes(16 * 2**20 - room))
    else:
        limit = 4 * 1024
    try:
        begin = time.monotonic()
        with Group(1, limit, out=str(out / "run"), **truth.work) as group:
            ended = group.end(60 + truth.seconds)
        seconds, words = time.monotonic() - begin - truth.seconds, group.said()
        named = "No space left" in words or "File too large" in words
        if not ended or not group.status or group.status < 0 or not named or group.crashed:
            return False, max(0, seconds), words
        saved = complete(out / "run")
        ballast.unlink(missing_ok=True)
        moved = out.with_name(f"{out.name}-moved")
        shutil.copytree(out / "run", moved)
        wrong = _go_on(moved, truth)
        return not wrong, max(0, seconds), wrong or f"went on from checkpoint {saved}: {words}"
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", out], check=True)


def _removed(name: str) -> Callable[[Path, Truth], Outcome]:
    def run(out: Path, truth: Truth) -> Outcome:
        with contextlib.ExitStack() as groups:
            group, other = groups.enter_context(Group(1, out=str(out), steps=10**5, save_every=100)), None
            if not group.until(lambda: group.step >= 5, 120):
                return False, 0.0, f"it does not train: {group.said()}"
            if name:
                (out / name).unlink()
                other = groups.enter_context(Group(1, out=str(out), steps=10**5, save_every=100))
                other.end(60)
            else:
                shutil.rmtree(out)
            begin = time.monotonic()
            # Either run may be the one that ends: what counts is that not both write.
            ended = group.until(lambda: not group.alive or (other is not None and not other.alive), 90)
            seconds, broken = time.monotonic() - begin, group if not group.alive or other is None else other
        words = broken.said()
        kept = ended and (broken.status or 0) > 0 and str(out) in words and not broken.crashed
        return kept, seconds, words

    return run


def _unwritable(processes: int, how: str) -> Callable[[Path, Truth], Outcome]:
    def run(out: Path, truth: Truth) -> Outcome:
        group, folder = Group(processes, out=str(out), steps=10**6, save_every=50), out / "checkpoints"
        mounted = False
        try:
            if not group.until(lambda: complete(out) is not None, 120):
                return False, 0.0, f"it does not train: {group.said()}"
            if how == "removed":
                shutil.rmtree(folder, ignore_errors=True)  # it may be writing there meanwhile
                shutil.rmtree(folder, ignore_errors=True)
            else:  # root may write where permissions say no
                mounted = subprocess.run(["mount", "--bind", folder, folder]).returncode == 0
                while mounted and subprocess.run(["mount", "-o", "remount,bind,ro", folder]).returncode:
                    time.sleep(0.05)  # a file is being written
                if not mounted:
                    folder.chmod(0o500)
            begin = time.monotonic()
            ended = group.end(90)
            seconds, words = time.monotonic() - begin, group.said(0)
        finally:
            group.close()
            if mounted:
                subprocess.run(["umount", folder], check=True)
        named = str(folder) in words and ("Read-only" in words or "denied" in words or "No such file" in words)
        kept = ended and all((status or 0) > 0 for status in group.statuses) and named and not group.crashed
        return kept, seconds, words

    return run


def _clock(processes: int, jump: float) -> Callable[[Path, Truth], Outcome]:
    def run(out: Path, truth: Truth) -> Outcome:
        right = truth
        if processes > 1:
            right = Truth.of(out.with_name(f"{out.name}-unbroken"), processes, 30)
        begin = time.monotonic()
        # The clock of the last process alone, which may be the only one.
        with Group(processes, out=str(out), others={"clock": jump}, **right.work) as group:
            ended = group.end(60 + 2 * right.seconds)
        seconds = max(0.0, time.monotonic() - begin - right.seconds)
        wrong = right.differs(out, group) if ended and group.status == 0 else group.said()
        return not wrong, seconds, wrong or "the same numbers"

    return run


def _unequal(other: dict[str, object], *names: str) -> Callable[[Path, Truth], Outcome]:
    def run(out: Path, truth: Truth) -> Outcome:
        with Group(2, out=str(out), steps=60, others=other) as group:
            group.until(lambda: sum(line == "JOINED" for line in list(group.lines)) == 2, 120)
            begin = time.monotonic()
            ended = group.end(90)
            seconds = time.monotonic() - begin
        words = group.said()
        # One sentence in every process, before the first step, that names what differs.
        said = all(any(name in group.said(rank) for name in names) for rank in range(2))
        refused = ended and all((status or 0) > 0 for status in group.statuses) and group.step == 0
        return refused and said and not group.crashed, seconds, words

    return run


_SENTENCE = "no step is taken, and every host says what differs"
FAULTS = (
    Fault("rank killed", "the others end with a sentence that names it", 60, _rank(signal.SIGKILL)),
    Fault("rank stopped", "the others end with a sentence that names it, and so does it", 60, _rank(signal.SIGSTOP)),
    Fault("full disk", "ends with a sentence, and goes on bit for bit once there is room", 60, _full_disk),
    Fault("checkpoints read-only", "ends with a sentence that names the folder", 60, _unwritable(1, "read-only")),
    Fault("checkpoints removed", "ends with a sentence that names the folder", 60, _unwritable(1, "removed")),
    Fault("two hosts' read-only", "both end, with a sentence that names the folder", 60, _unwritable(2, "read-only")),
    Fault("two hosts' removed", "both end, with a sentence that names the folder", 60, _unwritable(2, "removed")),
    Fault("folder removed", "ends with a sentence that names the folder", 60, _removed("")),
    Fault("lock removed", "of two runs in a folder one ends with a sentence that names it", 60, _removed(".lock")),
    Fault("clock put on a day", "trains as if nothing were", 300, _clock(1, 86400.0)),
    Fault("clock put back a day", "trains as if nothing were", 300, _clock(1, -86400.0)),
    Fault("one host's clock put on", "trains as if nothing were", 300, _clock(2, 86400.0)),
    Fault("hosts of other seeds", _SENTENCE, 30, _unequal({"seed": 1}, "seed")),
    Fault("hosts of other lr", _SENTENCE, 30, _unequal({"lr": 2e-2}, "lr", "step")),
    Fault("hosts of other data", _SENTENCE, 30, _unequal({"shift": 7}, "batch", "data")),
    Fault("hosts of other rows", _SENTENCE, 30, _unequal({"rows": 16}, "rows")),
    Fault("hosts of other steps", _SENTENCE, 30, _unequal({"steps": 90}, "steps")),
    Fault("hosts of other strategies", _SENTENCE, 30, _unequal({"strategy": "ddp"}, "strategy")),
    Fault("hosts of other precision", _SENTENCE, 30, _unequal({"precision": "bf16"}, "precision", "strategy")),
    Fault("hosts of other versions", _SENTENCE, 30, _unequal({"version": "9.9.9"}, "optax")),
)
