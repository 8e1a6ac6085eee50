"""jp.initialize: the processes of one run join, before anything touches a device."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import sys
import warnings
from pathlib import Path

import jax

from ..backend.machines import set_machines
from ..layout.mesh import simulate
from . import ending, watchdog
from .environment import Place, detect
from .gloo import listen_towards
from .judge import Beat
from .store import Coordinator

_joined: Place | None = None


def initialize(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    bind: str | None = None,
    devices: int | None = None,
    timeout: int = 300,
    watchdog_seconds: float | None = None,
) -> Place:
    """Joins the processes of one run; call it in each, before anything that touches a device.

    Without arguments it asks the environment: `jaxpar launch`, srun, mpirun, Kubernetes' indexed Jobs and JobSets, or
    the variables in `jaxpar/hosts/README.md`. A process is alone where nothing says that it is one of several.
    Process 0 prints one line of what was found. From then on a watchdog ends every process, with exit status 75 and one
    sentence, where another is lost, stuck or has failed.

    Args:
      coordinator: host:port of process 0, which listens on that address and no other.
      processes, process: how many there are, and which one this is, from 0.
      bind: where process 0 listens instead, such as 0.0.0.0:12345 where a port is mapped.
      devices: simulate so many CPU devices in each process.
      timeout: seconds to wait for the others.
      watchdog_seconds: within how many seconds a lost, stopped or stuck process ends all others; 60 if nothing is said,
        0 for no watchdog.

    Returns what was found. A second call returns it again.

    Raises ValueError where what is said is contradictory or incomplete, and where process 0 cannot listen on its
    address; RuntimeError after jax has started its devices.
    """
    global _joined
    asked = detect(os.environ, coordinator, processes, process, socket.getfqdn, gpus_here)
    if _joined is not None:
        if (asked.processes, asked.process) != (_joined.processes, _joined.process):
            raise ValueError(f"this process is already {_joined.process} of {_joined.processes}, and cannot become "
                             f"{asked.process} of {asked.processes}; call jp.initialize once")  # fmt: skip
        return _joined
    simulated = os.environ.get("JAXPAR_DEVICES") if devices is None else str(devices)
    if simulated is not None:
        if not simulated.isdigit():
            raise ValueError(
                f"JAXPAR_DEVICES={simulated!r} is no number of CPU devices; set it to one from 1, or unset it"
            )
        simulate(int(simulated))
    if asked.processes > 1:
        _join(asked, bind or os.environ.get("JAXPAR_BIND"), timeout, watchdog.seconds(watchdog_seconds))
        _joined = asked
    elif "SLURM_STEP_NUM_TASKS" not in os.environ and os.environ.get("SLURM_NTASKS", "1") != "1":
        warnings.warn(
            f"this SLURM job has {os.environ['SLURM_NTASKS']} tasks, and srun did not start this process, which runs "
            "alone; start it with srun",
            stacklevel=2,
        )
    return asked


def place() -> Place:
    """Where this process stands, as `initialize` found it; alone without it."""
    return _joined or Place()


def check_joined() -> None:
    """Raise ValueError where `jaxpar launch` started this process as one of several, and it has not joined them: each
    would train alone.
    """
    count = os.environ.get("JAXPAR_PROCESSES", "1")
    if _joined is None and count != "1" and "JAXPAR_PROCESS" in os.environ and jax.process_count() == 1:
        raise ValueError(
            f"this is one of {count} processes (JAXPAR_PROCESSES), and has not joined them; call jp.initialize() at "
            "the beginning of the script, before anything that touches a device"
        )


def restarts() -> int:
    """How often `jaxpar launch` has started this run again."""
    return int(os.environ.get("JAXPAR_RESTART", 0))


def may_restart() -> bool:
    """Whether `jaxpar launch` would start this run again."""
    return int(os.environ.get("JAXPAR_RESTARTS", 0)) > 0


def _join(here: Place, bind: str | None, timeout: int, limit: float) -> None:
    assert here.coordinator is not None
    listen = None
    if here.process == 0:
        listen = bind or listening(here.coordinator)
        check_free(listen)
        where = f", {here.neighbours} on each host" if here.neighbours else ""
        gpus = f", of {len(here.gpus)} GPUs each" if here.gpus else ""
        says = f"jaxpar: {here.processes} processes ({here.source}){where}{gpus}; process 0 listens on {listen}"
        print(says, file=sys.stderr, flush=True)  # noqa: T201
    with ending.joining(here, timeout):
        jax.distributed.initialize(
            here.coordinator,
            here.processes,
            here.process,
            None if here.gpus is None else list(here.gpus),
            "deactivate",  # what jax would find itself has been found
            timeout,
            # Ours comes first, and says more.
            heartbeat_timeout_seconds=max(100, round(2 * limit)),
            coordinator_bind_address=listen,
        )
    listen_towards(here.coordinator)
    store = Coordinator()
    ending.start(store, here, limit)
    store.set(f"machines/{here.process}", Beat.here().machine)
    if not store.wait("machines", timeout):
        raise RuntimeError(f"not all of the {here.processes} processes have said within {timeout} s on which machine "
                           "they are; see what each printed last")  # fmt: skip
    machines = store.folder("machines")
    set_machines([machines[str(process)] for process in range(here.processes)])


def listening(coordinator: str) -> str:
    """The address:port on which process 0 listens: the coordinator's own, and where its name means this machine to
    itself alone (127.0.1.1 in Debian's /etc/hosts), that of the interface to the others.

    Raises ValueError where the name is not known.
    """
    host, _, port = coordinator.rpartition(":")
    host = host.strip("[]")
    try:
        found = [str(info[4][0]) for info in socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)]
    except socket.gaierror as error:
        raise ValueError(f"coordinator={coordinator!r}: this host does not know {host} ({error.strerror}); give an "
                         "address that every host knows") from error  # fmt: skip
    outside = [address for address in found if not ipaddress.ip_address(address.partition("%")[0]).is_loopback]
    if outside:
        return _join_port(outside[0], port)
    if host == "localhost" or _is_address(host):
        return _join_port("127.0.0.1" if "127.0.0.1" in found else found[0], port)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # of no host; nothing is sent
            return _join_port(str(probe.getsockname()[0]), port)
        except OSError:  # no network but loopback
            return _join_port(found[0], port)


def _join_port(address: str, port: str) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def check_free(listen: str) -> None:
    """Raise ValueError where nothing can listen there: the coordinator itself would end the process without a word."""
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdigit():
        raise ValueError(f"bind={listen!r} is no address:port; give it as 0.0.0.0:12345")
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, int(port)))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ValueError(f"port {port} of {host} is in use; name another in the coordinator's address") from error
        if error.errno == errno.EADDRNOTAVAIL:
            raise ValueError(
                f"{host} is no address of this host, which is process 0; the coordinator's address is that of process "
                "0 (behind a mapped port, give bind=0.0.0.0:PORT or JAXPAR_BIND)"
            ) from error
        raise ValueError(f"process 0 cannot listen on {listen}: {error.strerror}; name another address") from error


def gpus_here() -> int:
    """NVIDIA GPUs of this host, without asking a driver."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))
