"""`jaxpar launch`: the processes of one run on this machine, which end together and may be started again.

One for each GPU, unless another number is asked for: a process that drives several can hang where a CUDA call that
waits for all of them (cudaFree) meets a collective (github.com/NVIDIA/JAX-Toolbox, docs/GPU_performance.md, "Debugging
hangs"). Started once on each of several hosts, as pods and ssh do, the launchers' processes are those of one run.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO

from ..backend.quiet import Coordination, Gloo
from .environment import Place, detect
from .initialize import gpus_here
from .watchdog import ENDED

_GRACE = 20.0  # seconds that the others have to end by themselves, with their own sentence, once one has failed
_ALONE = 10.0  # seconds after which it is told that a process has ended well, and others go on
_MENDABLE = 2  # exit status of `jaxpar` for what the user can mend: the same would come of the same


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Start a script as several processes on this machine: jaxpar launch --processes 2 -- script.py ARGUMENTS.

    What follows -- is for Python: a script, or -m and a module, as in `-- -m jaxpar train --out runs/two`. The script
    calls `jp.initialize()` first; `jaxpar train` does. Output is prefixed with the process's number, signals are passed
    on, and when one process fails all are ended; the exit status is that of the first that failed. Lines of Gloo about
    its own connections, and the stacks with which XLA ends a process whose coordinator is gone, are left out. Started
    once on each of several hosts (by srun, mpirun or Kubernetes, or with JAXPAR_COORDINATOR, JAXPAR_PROCESSES and
    JAXPAR_PROCESS, which then count hosts), all their processes are one run.
    """

    processes: int | None = None
    """how many; without it: one for each GPU"""
    devices: int | None = None
    """simulate so many CPU devices in each; without it: this machine's GPUs are shared among them, or one CPU device"""
    restarts: int = 0
    """how often the run is started again after a process has failed, on one host; a `Trainer` goes on from its last
    checkpoint"""
    least: int | None = None
    """start again with one process less for each that was killed, down to so many; without it: with all of them"""

    def __post_init__(self) -> None:
        for name, lowest in {"processes": 1, "devices": 1, "restarts": 0, "least": 1}.items():
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise ValueError(f"{name}={value} is too small; use {lowest} or more")
        if self.least is not None and self.processes is None:
            raise ValueError(f"least={self.least} needs processes=, to start with; say both")
        if self.least is not None and self.processes is not None and self.least > self.processes:
            raise ValueError(
                f"least={self.least} is more than processes={self.processes}; use {self.processes} or less"
            )


@dataclass
class Outcome:
    """How the processes of one start ended.

    Attributes:
      failed: rank -> return code as `subprocess` has it, of those that failed by themselves, the first one first.
      lost: how many are not to be counted on: those that a signal ended, or that had to be ended, or else one.
      early: the first rank that ended with exit status 0 before any failed, None where there was none.
      stopped: the signal that the launcher was sent, None without one.
      coordinator: where JAX's coordinator of this start is, and what it reported to a process that it then ended, "".
    """

    failed: dict[int, int] = field(default_factory=dict)
    lost: int = 0
    early: int | None = None
    stopped: int | None = None
    coordinator: tuple[str, str] = "", ""

    @property
    def status(self) -> int:
        """The launcher's exit status."""
        code = next(iter(self.failed.values()), 0)
        return 128 - code if code < 0 else code

    def __str__(self) -> str:
        who = ", ".join(f"rank {rank} {ended(code)}" for rank, code in self.failed.items())
        if self.early is not None and self.status == ENDED:  # nobody else is a reason for their end
            who = f"rank {self.early} ended with exit status 0 before the others, {who}"
        where, error = self.coordinator
        if error and -signal.SIGABRT in self.failed.values():
            who += f"; JAX's coordinator at {where} had ended it: {error.rstrip('.')}."
            if not error.startswith("UNAVAILABLE"):
                who += f" It asks nobody for a password: see that nothing else speaks to {where}"
        return who


def launch(options: LaunchOptions, command: Sequence[str]) -> int:
    """Runs the command in so many processes, again after failures where that is asked for; the exit status.

    Raises ValueError where there is no command, nothing says how many processes there are to be, a host has more than
    one launcher, or several hosts are to start a run again, which is for what started them.
    """
    if not command:
        raise ValueError(
            "launch needs a script behind --, as in jaxpar launch --processes 2 -- script.py, or -- -m jaxpar train"
        )
    host = detect(os.environ, name=socket.getfqdn)
    if (host.neighbours or 1) > 1:
        raise ValueError(
            f"{host.source} starts {host.neighbours} processes on each host, and each would start more; leave "
            "`jaxpar launch --` out, or start one process on each host"
        )
    if host.processes > 1 and options.restarts:
        raise ValueError(
            f"restarts={options.restarts} is for one host, and this is one of {host.processes} ({host.source}), which "
            "have to begin together; let what started them do it (sbatch --requeue, a JobSet's maxRestarts)"
        )
    processes = options.processes or len(visible_gpus(os.environ))
    if not processes:
        raise ValueError("launch starts a process for each GPU, and there is none; say how many, as in "
                         "jaxpar launch --processes 2 --devices 4 for simulated devices")  # fmt: skip
    least, restart, shrunk = options.least or processes, 0, False
    while True:
        outcome = run_once(command, host, processes, options, restart)
        if outcome.stopped is not None or not outcome.failed:
            return outcome.status
        if shrunk and outcome.status == _MENDABLE and processes > least:
            processes -= 1  # so many do not divide the rows, or the layers: this is no new failure
            _say(f"{outcome}; {processes} processes are tried")
            continue
        if restart == options.restarts or outcome.status == _MENDABLE:
            after = f"after {restart} restarts " if restart else ""
            _say(f"{outcome}; {after}the run ends with status {outcome.status}")
            return outcome.status
        restart, before = restart + 1, processes
        processes = max(least, processes - outcome.lost)
        shrunk = shrunk or processes < before
        _say(f"{outcome}; started again with {processes} processes, restart {restart} of {options.restarts}")


def run_once(command: Sequence[str], host: Place, processes: int, options: LaunchOptions, restart: int) -> Outcome:
    """Starts so many processes on this host, which is one of `host.processes`, and waits until all have ended."""
    if host.processes == 1:
        host = Place(coordinator=f"127.0.0.1:{free_port()}")
    assert host.coordinator is not None
    first = host.process * processes
    ours = {
        **os.environ,
        "JAXPAR_COORDINATOR": host.coordinator,
        "JAXPAR_PROCESSES": str(host.processes * processes),
        "JAXPAR_RESTART": str(restart),
        "JAXPAR_RESTARTS": str(options.restarts),
        "JAXPAR_LAUNCHER": str(os.getpid()),
        "PYTHONUNBUFFERED": "1",  # through a pipe a line would come long after it was printed
    }

    def own(local: int) -> dict[str, str]:
        if options.devices is not None:
            return {"JAXPAR_DEVICES": str(options.devices), "JAX_PLATFORMS": "cpu"}
        gpus = share_of_gpus(os.environ, local, processes)
        return {"CUDA_VISIBLE_DEVICES": gpus} if gpus else {}

    children = [
        subprocess.Popen(
            [sys.executable, *command],
            env={**ours, "JAXPAR_PROCESS": str(first + local), **own(local)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a terminal's Ctrl-C comes to this process, which passes it on, once
        )
        for local in range(processes)
    ]
    lock, errors = threading.Lock(), [Coordination() for _ in children]
    readers = [
        threading.Thread(target=_prefixed, args=(stream, into, f"[{rank}] ", lock, left_out), daemon=True)
        for rank, (child, error) in enumerate(zip(children, errors, strict=True), first)
        for stream, into, left_out in ((child.stdout, sys.stdout, Gloo()), (child.stderr, sys.stderr, error))
    ]
    for reader in readers:
        reader.start()
    outcome = Outcome()

    def pass_on(number: int, _: object) -> None:
        outcome.stopped = number
        _signal(children, number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        _until_all_end(children, outcome, first)
    finally:
        _signal(children, signal.SIGKILL)
        for number, handler in before.items():
            signal.signal(number, handler)
    for reader in readers:
        reader.join(5)  # a grandchild may hold the pipe open
    outcome.coordinator = host.coordinator, next((each.error for each in errors if each.error), "")
    return outcome


def visible_gpus(base: Mapping[str, str]) -> list[str]:
    """The GPUs that processes may have, as CUDA_VISIBLE_DEVICES names them."""
    if base.get("JAX_PLATFORMS") == "cpu":
        return []
    listed = base.get("CUDA_VISIBLE_DEVICES")
    return [str(n) for n in range(gpus_here())] if listed is None else [word for word in listed.split(",") if word]


def share_of_gpus(base: Mapping[str, str], rank: int, processes: int) -> str:
    """The GPUs of one process, as CUDA_VISIBLE_DEVICES; "" where there are none. Raises ValueError where they cannot be
    shared.
    """
    gpus = visible_gpus(base)
    if not gpus:
        return ""
    if len(gpus) % processes:
        raise ValueError(f"{len(gpus)} GPUs do not divide among {processes} processes; use as many processes as divide "
                         "them, or devices=N for simulated CPU devices")  # fmt: skip
    share = len(gpus) // processes
    return ",".join(gpus[rank * share : (rank + 1) * share])


def free_port() -> int:
    """A port of loopback that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ended(code: int) -> str:
    """How a process ended, by its return code, in words."""
    if code >= 0:
        return f"failed with exit status {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal has no name
        return f"was ended by signal {-code}"


def _until_all_end(children: Sequence[subprocess.Popen], outcome: Outcome, first: int) -> None:
    """Notes who failed, of ranks from `first` on. Once one has, the others have a while to end by themselves."""
    done: dict[int, int] = {}
    until: float | None = None
    alone: float | None = None
    killed: set[int] = set()
    going_on = lambda: f"{len(children) - len(done)} of {len(children)} processes"
    while len(done) < len(children):
        time.sleep(0.05)
        for rank, child in enumerate(children):
            if rank not in done and (code := child.poll()) is not None:
                done[rank] = code
                if code and rank not in killed and until is None:
                    until = time.monotonic() + _GRACE
                    if code != ENDED and outcome.stopped is None and len(done) < len(children):
                        _say(f"rank {first + rank} {ended(code)}; {going_on()} have {_GRACE:.0f} s to end")
                elif not code and until is None and outcome.early is None:
                    outcome.early, alone = first + rank, time.monotonic() + _ALONE
        if alone is not None and until is None and time.monotonic() > alone and len(done) < len(children):
            _say(f"rank {outcome.early} has ended with exit status 0, and {going_on()} go on")
            alone = None
        if until is not None and time.monotonic() > until and not killed:
            killed = {rank for rank in range(len(children)) if rank not in done}
            for rank in killed:
                children[rank].kill()
    own = {first + place: code for place, code in done.items() if code and place not in killed}
    # Who was ended by another one's failure is no reason, unless nothing else is to be seen.
    reasons = {rank: code for rank, code in own.items() if code != ENDED}
    # An error of the program itself all have at once, and it is nobody's loss.
    outcome.failed, outcome.lost = reasons or own, sum(code < 0 for code in own.values()) or len(killed) or 1


def _signal(children: Sequence[subprocess.Popen], number: int) -> None:
    for child in children:
        if child.poll() is None:
            child.send_signal(number)


def _prefixed(
    stream: IO[bytes], into: IO[str], prefix: str, lock: threading.Lock, left_out: Callable[[bytes], bool]
) -> None:
    """Passes lines on, but those that are left out. Nothing is decoded that is not whole, and lines of two processes do
    not mix.
    """
    with stream:
        for line in stream:
            if left_out(line):
                continue
            with lock:
                into.write(prefix + line.decode(errors="replace").rstrip("\r\n") + "\n")
                into.flush()


def _say(sentence: str) -> None:
    print(f"jaxpar launch: {sentence}", file=sys.stderr, flush=True)  # noqa: T201
