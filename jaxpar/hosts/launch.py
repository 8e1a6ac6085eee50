"""`jaxpar launch`: start the processes of one run on this machine, end them together, and start them again.

    launch          decides about restarts
      run_once      starts the processes once, forwards their output and signals       -> Outcome
        _wait_for_all   watches them; after the first failure the others have `_GRACE` seconds to end

By default each GPU gets its own process. A process that drives several GPUs can hang, if a CUDA call that waits for all
of them (cudaFree) meets a collective (github.com/NVIDIA/JAX-Toolbox, docs/GPU_performance.md, "Debugging hangs").

If a launcher is started once on each of several hosts, as pods and ssh do, the processes of all launchers are one run.
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
from .initialize import num_gpus_of_host
from .watchdog import ENDED_BY_ANOTHER

# Seconds that the others have to end, with their own sentence, once a process has failed.
_GRACE = 20.0
_ALONE = 10.0  # seconds after which stderr says that a process has ended with status 0 while others go on
# Exit status of `jaxpar` for an error that the user can mend. A restart would only repeat it.
_USER_ERROR = 2


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Start a script as several processes on this machine: jaxpar launch --processes 2 -- script.py ARGUMENTS.

    What follows -- is for Python: a script, or -m and a module, as in `-- -m jaxpar train --out runs/two`. The script
    calls `jp.initialize()` first; `jaxpar train` does. Each output line begins with the process's number. Signals are
    passed on. When one process fails, all are ended, and the exit status is the first failed process's. Two kinds of
    lines are left out: Gloo's about its own connections, and the stacks with which XLA ends a process whose coordinator
    is gone. Started once on each of several hosts (by srun, mpirun or Kubernetes, or with JAXPAR_COORDINATOR,
    JAXPAR_PROCESSES and JAXPAR_PROCESS, which then count hosts), all their processes are one run.
    """

    processes: int | None = None
    """number of processes; default: one for each GPU"""
    devices: int | None = None
    """number of CPU devices to simulate in each process; default: the processes share this machine's GPUs, or have one
    CPU device each"""
    restarts: int = 0
    """how often to start the run again after a process has failed, on one host; a `Trainer` resumes from its last
    checkpoint"""
    least: int | None = None
    """start again with one process less for each that was killed, but with at least this many; default: with all"""

    def __post_init__(self) -> None:
        for name, minimum in {"processes": 1, "devices": 1, "restarts": 0, "least": 1}.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise ValueError(f"{name}={value} is too small; use {minimum} or more")
        if self.least is not None and self.processes is None:
            raise ValueError(f"least={self.least} needs processes= too; give the number of processes to start with")
        if self.least is not None and self.processes is not None and self.least > self.processes:
            raise ValueError(
                f"least={self.least} is more than processes={self.processes}; use {self.processes} or less"
            )


@dataclass
class Outcome:
    """How the processes of one start ended.

    Attributes:
      failures: rank -> return code, as `subprocess` has it, of the processes that failed on their own, in that order.
      num_lost: how many processes a restart should do without: those that a signal ended, or that had to be killed;
        else one.
      early_rank: the first rank that ended with exit status 0 before any process failed; None if none did.
      received_signal: the signal that the launcher received; None if it received none.
      coordinator: address of JAX's coordinator.
      coordinator_error: what the coordinator reported to a process that it then ended; "" if nothing.
    """

    failures: dict[int, int] = field(default_factory=dict)
    num_lost: int = 0
    early_rank: int | None = None
    received_signal: int | None = None
    coordinator: str = ""
    coordinator_error: str = ""

    @property
    def status(self) -> int:
        """The launcher's exit status: the first failure's, as a shell gives it."""
        code = next(iter(self.failures.values()), 0)
        return 128 - code if code < 0 else code

    def __str__(self) -> str:
        text = ", ".join(f"rank {rank} {describe_exit(code)}" for rank, code in self.failures.items())
        # All ended because of another process, and only one can be that other process.
        if self.early_rank is not None and self.status == ENDED_BY_ANOTHER:
            text = f"rank {self.early_rank} ended with exit status 0 before the others, {text}"
        error, address = self.coordinator_error, self.coordinator
        if error and -signal.SIGABRT in self.failures.values():
            text += f"; JAX's coordinator at {address} had ended it: {error.rstrip('.')}."
            if not error.startswith("UNAVAILABLE"):
                text += f" It asks nobody for a password: see that nothing else speaks to {address}"
        return text


def launch(options: LaunchOptions, command: Sequence[str]) -> int:
    """Run Python with the arguments `command` in several processes, and again after failures; return the exit status.

    Raises:
      ValueError: there is no command, or no number of processes. Or a host has more than one launcher. Or a run on
        several hosts is to restart, which only the launcher of the hosts can do.
    """
    # 1. Check the options and the place of this launcher.
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
    num_processes = options.processes or len(visible_gpus(os.environ))
    if not num_processes:
        raise ValueError("launch starts a process for each GPU, and found none; give their number, as in "
                         "jaxpar launch --processes 2 --devices 4 for simulated devices")  # fmt: skip
    # 2. Run, and restart with fewer processes after losses.
    min_processes, restart, has_shrunk = options.least or num_processes, 0, False
    while True:
        outcome = run_once(command, host, num_processes, options, restart)
        # A signal to the launcher ends everything, as does a run without a failure.
        if outcome.received_signal is not None or not outcome.failures:
            return outcome.status
        if has_shrunk and outcome.status == _USER_ERROR and num_processes > min_processes:
            # This number may not divide the rows or the layers. That is no new failure, so it costs no restart.
            num_processes -= 1
            _print(f"{outcome}; the run is tried with {num_processes} processes")
            continue
        if restart == options.restarts or outcome.status == _USER_ERROR:
            after_restarts = f"after {restart} restarts " if restart else ""
            _print(f"{outcome}; {after_restarts}the run ends with status {outcome.status}")
            return outcome.status
        restart, old_num_processes = restart + 1, num_processes
        num_processes = max(min_processes, num_processes - outcome.num_lost)
        has_shrunk = has_shrunk or num_processes < old_num_processes
        _print(f"{outcome}; started again with {num_processes} processes, restart {restart} of {options.restarts}")


def run_once(command: Sequence[str], host: Place, num_processes: int, options: LaunchOptions, restart: int) -> Outcome:
    """Start `num_processes` processes on this host once, and wait until all have ended.

    `host` is this host among those of the run: its `processes` count hosts. `restart` counts the earlier starts.
    """
    if host.processes == 1:
        host = Place(coordinator=f"127.0.0.1:{free_port()}")  # alone, the host has no coordinator yet
    assert host.coordinator is not None
    first_rank = host.process * num_processes
    children = _start(command, host, num_processes, options, restart)

    # One thread per stream forwards its lines.
    lock, coordinations = threading.Lock(), [Coordination() for _ in children]
    readers = [
        threading.Thread(target=_forward_lines, args=(stream, target, f"[{rank}] ", lock, is_hidden), daemon=True)
        for rank, (child, coordination) in enumerate(zip(children, coordinations, strict=True), first_rank)
        for stream, target, is_hidden in ((child.stdout, sys.stdout, Gloo()), (child.stderr, sys.stderr, coordination))
    ]
    for reader in readers:
        reader.start()
    outcome = Outcome()

    def pass_on(number: int, _: object) -> None:
        outcome.received_signal = number
        _send_signal(children, number)

    handlers = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        _wait_for_all(children, outcome, first_rank)
    finally:
        # No process outlives the launcher, whatever ended the wait.
        _send_signal(children, signal.SIGKILL)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for reader in readers:
        reader.join(5)  # a grandchild may hold the pipe open
    outcome.coordinator = host.coordinator
    outcome.coordinator_error = next((coordination.error for coordination in coordinations if coordination.error), "")
    return outcome


def _start(
    command: Sequence[str], host: Place, num_processes: int, options: LaunchOptions, restart: int
) -> list[subprocess.Popen]:
    """Start the processes of this host, each with its rank and devices in the environment; see `run_once`."""
    assert host.coordinator is not None
    common_env = {
        **os.environ,
        "JAXPAR_COORDINATOR": host.coordinator,
        "JAXPAR_PROCESSES": str(host.processes * num_processes),
        "JAXPAR_RESTART": str(restart),
        "JAXPAR_RESTARTS": str(options.restarts),
        "JAXPAR_LAUNCHER": str(os.getpid()),
        "PYTHONUNBUFFERED": "1",  # through a pipe a line would come long after it was printed
    }

    # Every process sees only its own GPUs, so that no two of them allocate on one device.
    def env_of(local: int) -> dict[str, str]:
        env = common_env | {"JAXPAR_PROCESS": str(host.process * num_processes + local)}
        if options.devices is not None:
            return env | {"JAXPAR_DEVICES": str(options.devices), "JAX_PLATFORMS": "cpu"}
        gpus = share_of_gpus(os.environ, local, num_processes)
        return env | {"CUDA_VISIBLE_DEVICES": gpus} if gpus else env

    return [
        subprocess.Popen(
            [sys.executable, *command],
            env=env_of(local),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a terminal's Ctrl-C comes to this process, which passes it on, once
        )
        for local in range(num_processes)
    ]


def visible_gpus(env: Mapping[str, str]) -> list[str]:
    """Return the GPUs that processes may use, as CUDA_VISIBLE_DEVICES names them."""
    if env.get("JAX_PLATFORMS") == "cpu":
        return []
    text = env.get("CUDA_VISIBLE_DEVICES")
    return [str(n) for n in range(num_gpus_of_host())] if text is None else [word for word in text.split(",") if word]


def share_of_gpus(env: Mapping[str, str], local: int, num_processes: int) -> str:
    """Return CUDA_VISIBLE_DEVICES for a process of this host; "" without GPUs. Raises ValueError for unequal shares."""
    gpus = visible_gpus(env)
    if not gpus:
        return ""
    if len(gpus) % num_processes:
        raise ValueError(f"{len(gpus)} GPUs cannot be shared equally among {num_processes} processes; use a number of "
                         f"processes that divides {len(gpus)}, or devices=N for simulated CPU devices")  # fmt: skip
    share = len(gpus) // num_processes
    return ",".join(gpus[local * share : (local + 1) * share])


def free_port() -> int:
    """Return a port of loopback on which nothing listens."""
    with socket.socket() as probe:
        # The system chooses a free port. Another process could still take it before the coordinator does.
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def describe_exit(code: int) -> str:
    """Describe the return code of a process, which is minus the signal that ended it, as a sentence's predicate."""
    if code >= 0:
        return f"failed with exit status {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal has no name
        return f"was ended by signal {-code}"


def _wait_for_all(children: Sequence[subprocess.Popen], outcome: Outcome, first_rank: int) -> None:
    """Wait until all processes have ended, and note in `outcome` how.

    Once a process has failed, the others have `_GRACE` seconds to end, and are then killed.
    """
    # Processes are counted within this host from here on, and by rank in `outcome` and in sentences.
    codes: dict[int, int] = {}
    kill_time: float | None = None
    notice_time: float | None = None  # when to say that a process has ended early
    killed: set[int] = set()
    describe_remaining = lambda: f"{len(children) - len(codes)} of {len(children)} processes"
    while len(codes) < len(children):
        time.sleep(0.05)
        # 1. Note who has ended. The first failure sets the time at which the others are killed.
        for local, child in enumerate(children):
            if local not in codes and (code := child.poll()) is not None:
                codes[local] = code
                if code and local not in killed and kill_time is None:
                    kill_time = time.monotonic() + _GRACE
                    if code != ENDED_BY_ANOTHER and outcome.received_signal is None and len(codes) < len(children):
                        remaining = describe_remaining()
                        _print(f"rank {first_rank + local} {describe_exit(code)}; {remaining} have {_GRACE:.0f} s to "
                               "end")  # fmt: skip
                elif not code and kill_time is None and outcome.early_rank is None:
                    outcome.early_rank, notice_time = first_rank + local, time.monotonic() + _ALONE
        # 2. A process that ended with status 0, while others wait for it, may be a mistake that nobody else reports.
        is_early = notice_time is not None and kill_time is None and time.monotonic() > notice_time
        if is_early and len(codes) < len(children):
            _print(f"rank {outcome.early_rank} has ended with exit status 0, and {describe_remaining()} go on")
            notice_time = None
        # 3. Kill the rest once the time is over.
        if kill_time is not None and time.monotonic() > kill_time and not killed:
            killed = {local for local in range(len(children)) if local not in codes}
            for local in killed:
                children[local].kill()
    # 4. Find the causes. Killed processes are not among them.
    failures = {first_rank + local: code for local, code in codes.items() if code and local not in killed}
    # A process that another one's failure ended is the reason only if there is no other failure.
    causes = {rank: code for rank, code in failures.items() if code != ENDED_BY_ANOTHER}
    outcome.failures = causes or failures
    # An error of the program occurs in all processes at once, and loses none of them.
    outcome.num_lost = sum(code < 0 for code in failures.values()) or len(killed) or 1


def _send_signal(children: Sequence[subprocess.Popen], number: int) -> None:
    """Send a signal to all processes that still run."""
    for child in children:
        if child.poll() is None:
            child.send_signal(number)


def _forward_lines(
    stream: IO[bytes], target: IO[str], prefix: str, lock: threading.Lock, is_hidden: Callable[[bytes], bool]
) -> None:
    """Copy the lines of a process to `target`, each with a prefix, without the lines for which `is_hidden` is true.

    Only whole lines are decoded and written, so that lines of two processes do not mix.
    """
    with stream:
        for line in stream:
            if is_hidden(line):
                continue
            with lock:  # the threads of all processes write to one stream
                target.write(prefix + line.decode(errors="replace").rstrip("\r\n") + "\n")
                target.flush()


def _print(sentence: str) -> None:
    """Print a sentence of the launcher on stderr."""
    print(f"jaxpar launch: {sentence}", file=sys.stderr, flush=True)  # noqa: T201
