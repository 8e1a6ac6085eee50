"""Processes of a run that a campaign breaks, and the run that nobody broke, with which they are compared."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from jaxpar.backend.buckets import Place
from jaxpar.backend.files import place
from jaxpar.checkpoint.saved import complete_steps

_WORKER = Path(__file__).with_name("campaign_worker.py")
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # of programs that run for seconds
    "JAX_ENABLE_COMPILATION_CACHE": "0",
    "MPLBACKEND": "agg",
}
_NOISE = ("WARNING: All log messages", "I0000", "W0000", "START", "STEP", "JOINED", "[Gloo]", "step ")


class Group:
    """The processes of one run. `lines` is what all of them have said, with standard error.

    Args:
      processes: how many.
      limit: bytes to which a file of theirs may grow; None for no limit.
      others: what is different in the last process.
      work: fields of `campaign_worker.Work`.
    """

    def __init__(self, processes: int, limit: int | None = None, others: Any = None, **work: Any):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.lines: list[str] = []
        self.by_rank: list[list[str]] = [[] for _ in range(processes)]
        self._processes: list[subprocess.Popen[str]] = []
        self._readers: list[threading.Thread] = []
        self.out = place(work["out"], "out")
        for rank in range(processes):
            mine = {**work, **(others or {})} if rank == processes - 1 else work
            words = json.dumps({**mine, "rank": rank, "processes": processes, "port": port})
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, str(_WORKER), words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                    text=True, errors="replace", env={**os.environ, **_ENVIRONMENT},
                    preexec_fn=None if limit is None else lambda: _limit(limit),
                )
            )  # fmt: skip
            self._readers.append(threading.Thread(target=self._read, args=(rank,), daemon=True))
            self._readers[-1].start()

    def _read(self, rank: int) -> None:
        stream = self._processes[rank].stdout
        assert stream is not None
        for line in stream:
            self.lines.append(line.rstrip())
            self.by_rank[rank].append(line.rstrip())

    @property
    def status(self) -> int | None:
        """Of the first process; None while it runs."""
        return self._processes[0].poll()

    @property
    def statuses(self) -> list[int | None]:
        """Of all."""
        return [process.poll() for process in self._processes]

    @property
    def alive(self) -> bool:
        """Whether any runs."""
        return None in self.statuses

    def _last(self, word: str) -> int | None:
        found = [line.split()[1] for line in list(self.lines) if line.startswith(f"{word} ")]
        return int(found[-1]) if found else None

    @property
    def started(self) -> int | None:
        """The step that it went on from."""
        return self._last("START")

    @property
    def step(self) -> int:
        """The last step of which it told."""
        return self._last("STEP") or 0

    def said(self, rank: int | None = None) -> str:
        """The end of what they said, without steps and without other people's logs."""
        lines = self.lines if rank is None else self.by_rank[rank]
        return f"status {self.statuses}, " + " | ".join(x for x in lines if not x.startswith(_NOISE))[-400:]

    @property
    def crashed(self) -> bool:
        """Whether a traceback was shown where a sentence should be."""
        return any(line.startswith("Traceback") for line in self.lines)

    def until(self, met: Callable[[], bool], seconds: float, pause: float = 0.002) -> bool:
        """Waits until `met`, or every process has ended, or the time is over. Whether it was met."""
        end = time.monotonic() + seconds
        while not met():
            if not self.alive or time.monotonic() > end:
                return met()
            time.sleep(pause)
        return True

    def wait(self, moment: str, choice: random.Random, truth: "Truth") -> None:
        """Until a random moment of this kind."""
        if moment == "anywhere":
            self.until(lambda: False, choice.uniform(0, truth.seconds))
            return
        if moment == "while it starts":  # it reads its checkpoint and compiles
            self.until(lambda: "JOINED" in self.lines or len(self._processes) == 1, 60)
            time.sleep(choice.uniform(0, truth.seconds - truth.running))
            return
        if moment == "at its end":  # the last steps, the last save, and what they wait for afterwards
            self.until(lambda: self.step >= truth.steps - 3, 60 + truth.seconds)
            time.sleep(choice.uniform(0, 0.4))
            return
        self.until(lambda: self.started is not None, 60)
        first = self.started or 0
        at = choice.randint(first, min(truth.steps - 1, first + truth.steps // 3))
        self.until(lambda: self.step >= at, 60)
        if moment == "in a save":
            folder = self.out / "checkpoints"
            self.until(lambda: bool(unfinished(folder)), 20, pause=0.0005)
            time.sleep(choice.uniform(0, 0.03))
        else:
            time.sleep(choice.uniform(0, 0.01))

    def send(self, rank: int, number: signal.Signals) -> bool:
        """Whether the process was still there."""
        if self._processes[rank].poll() is not None:
            return False
        self._processes[rank].send_signal(number)
        return True

    def end(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Waits for the end of all. Whether it came within the time."""
        self.until(until, seconds, pause=0.01)
        ended = not self.alive
        if ended:
            for reader in self._readers:
                reader.join(10)
        return ended

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends what is still there."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        for reader in self._readers:
            reader.join(10)
        for process in self._processes:
            if process.stdout is not None:
                process.stdout.close()


@dataclass(frozen=True)
class Truth:
    """The run that nobody broke.

    Attributes: `seconds` of the whole process, `running` from its first step to its end, `ends` what it said of its
    parameters' bits.
    """

    out: Path
    processes: int
    steps: int
    save_every: int
    seconds: float
    running: float
    ends: list[str]
    data: str

    @classmethod
    def of(cls, out: Path, processes: int, steps: int, save_every: int = 3, data: str = "noise") -> "Truth":
        """Trains it."""
        begin = time.monotonic()
        with Group(processes, out=str(out), steps=steps, save_every=save_every, data=data) as group:
            group.until(lambda: group.started is not None, 300)
            started = time.monotonic()
            group.end(300)
        if any(group.statuses):
            sys.exit(f"the run that nobody breaks does not train: {group.said()}")
        now = time.monotonic()
        return cls(out, processes, steps, save_every, now - begin, now - started, ends(group), data)

    @property
    def work(self) -> dict[str, Any]:
        """Of the same run in another folder: fields of `campaign_worker.Work`."""
        return {"steps": self.steps, "save_every": self.save_every, "data": self.data}

    def differs(self, out: Place, group: Group) -> str:
        """How a run that has come to its end is another than this one; "" if it is the same bit for bit."""
        right, found = metrics(self.out), metrics(out)
        if [number for number, *_ in found] != [number for number, *_ in right]:
            return f"metrics.jsonl has steps {[number for number, *_ in found][:8]}... of {len(found)}"
        for a, b in zip(right, found, strict=True):
            if a != b:
                return f"step {a[0]} has {b[1:]}, and {a[1:]} where nobody broke it"
        if (mine := ends(group)) != self.ends:
            return f"the parameters are others: {mine} and {self.ends}"
        left = unfinished(out / "checkpoints")
        return f"half a checkpoint is left: {left}" if left else ""


def ends(group: Group) -> list[str]:
    """What the processes said of their parameters' bits."""
    return sorted(line for line in group.lines if line.startswith("END "))


def metrics(out: Place) -> list[tuple[Any, ...]]:
    """The lines of a run without those of its speed."""
    with contextlib.suppress(FileNotFoundError):
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        numbers = ("loss", "grad_norm", "held_out_loss")
        return [(line["step"], *(line[name] for name in numbers if name in line)) for line in lines]
    return []


def last(out: Place) -> int | None:
    """The last step in a run's metrics."""
    found = metrics(out)
    return found[-1][0] if found else None


def complete(out: Place) -> int | None:
    """The step of the last complete checkpoint of a run."""
    return max(complete_steps(out / "checkpoints"), default=None)


def unfinished(folder: Place) -> list[str]:
    """What is in a folder of checkpoints, and is none."""
    with contextlib.suppress(FileNotFoundError):
        return sorted({x.name for x in folder.iterdir()} - set(map(str, complete_steps(folder))))
    return []


def _limit(size: int) -> None:
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
