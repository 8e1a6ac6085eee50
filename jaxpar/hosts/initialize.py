"""jp.initialize: the processes of one run join, before anything touches a device.

1. `detect` reads which process this is.                       environment.py
2. Process 0 checks the coordinator's address, and prints it.
3. `jax.distributed.initialize` connects all processes.
4. CPU devices get the address on which they listen.           gloo.py
5. The watchdog starts.                                        ending.py
6. The processes tell each other on which machine they run.    backend/machines.py
"""

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

_joined_place: Place | None = None  # None until this process has joined others


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
    """Join the processes of one run. Call it in each, before anything that touches a device.

    Without arguments it reads the environment: `jaxpar launch`, srun, mpirun, Kubernetes' indexed Jobs and JobSets, or
    the variables that docs/launch.md lists. If nothing says that the process is one of several, it runs alone.

    Process 0 prints one line about the run. From then on a watchdog ends every process, with exit status 75 and one
    sentence, if another process is lost, is stuck or has failed.

    Args:
      coordinator: host:port of process 0, which listens on that address only.
      processes: number of processes.
      process: which one this is, from 0.
      bind: where process 0 listens instead, such as 0.0.0.0:12345 if a port is mapped.
      devices: number of CPU devices to simulate in each process.
      timeout: seconds to wait for the others.
      watchdog_seconds: seconds within which a lost, stopped or stuck process ends all others; 60 by default, 0 for no
        watchdog.

    Returns:
      The place of this process. A second call returns it again.

    Raises:
      ValueError: the settings are contradictory or incomplete, or process 0 cannot listen on its address.
      RuntimeError: jax has already started its devices.
    """
    global _joined_place
    place = detect(os.environ, coordinator, processes, process, socket.getfqdn, num_gpus_of_host)
    # A library may call this again; only another place is an error, as jax cannot join twice.
    if _joined_place is not None:
        if (place.processes, place.process) != (_joined_place.processes, _joined_place.process):
            raise ValueError(
                f"this process is already {_joined_place.process} of {_joined_place.processes}, and cannot become "
                f"{place.process} of {place.processes}; call jp.initialize once"
            )
        return _joined_place
    simulated = os.environ.get("JAXPAR_DEVICES") if devices is None else str(devices)
    if simulated is not None:
        if not simulated.isdigit():
            raise ValueError(
                f"JAXPAR_DEVICES={simulated!r} is not a number of CPU devices; set it to 1 or more, or unset it"
            )
        simulate(int(simulated))
    # Devices are simulated before the processes join: both must come before jax starts its devices.
    if place.processes > 1:
        _join(place, bind or os.environ.get("JAXPAR_BIND"), timeout, watchdog.limit_seconds(watchdog_seconds))
        _joined_place = place
    elif "SLURM_STEP_NUM_TASKS" not in os.environ and os.environ.get("SLURM_NTASKS", "1") != "1":
        warnings.warn(
            f"this SLURM job has {os.environ['SLURM_NTASKS']} tasks, and srun did not start this process, which runs "
            "alone; start it with srun",
            stacklevel=2,
        )
    return place


def place() -> Place:
    """Return the place of this process among those that `initialize` joined; alone if it joined none."""
    return _joined_place or Place()


def check_joined() -> None:
    """Raise ValueError if `jaxpar launch` started this process as one of several, and it has not joined the others.

    Each process would train alone.
    """
    num_processes = os.environ.get("JAXPAR_PROCESSES", "1")
    is_one_of_several = num_processes != "1" and "JAXPAR_PROCESS" in os.environ
    if _joined_place is None and is_one_of_several and jax.process_count() == 1:
        raise ValueError(
            f"this is one of {num_processes} processes (JAXPAR_PROCESSES), and has not joined them; call "
            "jp.initialize() at the beginning of the script, before anything that touches a device"
        )


def restarts() -> int:
    """Return how often `jaxpar launch` has started this run again."""
    return int(os.environ.get("JAXPAR_RESTART", 0))


def may_restart() -> bool:
    """Return whether `jaxpar launch` may start this run again after a failure."""
    return int(os.environ.get("JAXPAR_RESTARTS", 0)) > 0


def _join(place: Place, bind: str | None, timeout: int, watchdog_limit: float) -> None:
    """Connect this process with the others; the steps are those at the top of this file, from the second on."""
    assert place.coordinator is not None
    listen_address = None
    # 2. Check the address before jax does, in whose C++ code an error ends the process.
    if place.process == 0:
        listen_address = bind or coordinator_address(place.coordinator)
        check_free(listen_address)
        per_host = f", {place.neighbours} on each host" if place.neighbours else ""
        gpus = f", of {len(place.gpus)} GPUs each" if place.gpus else ""
        run = f"{place.processes} processes ({place.source}){per_host}{gpus}"
        print(f"jaxpar: {run}; process 0 listens on {listen_address}", file=sys.stderr, flush=True)  # noqa: T201
    # 3. Connect. Within this block, an abort by jax's client is explained.
    with ending.joining(place, timeout):
        jax.distributed.initialize(
            place.coordinator,
            place.processes,
            place.process,
            None if place.gpus is None else list(place.gpus),
            "deactivate",  # jax need not detect the cluster again
            timeout,
            # Longer than our watchdog, whose sentence says more than jax's.
            heartbeat_timeout_seconds=max(100, round(2 * watchdog_limit)),
            coordinator_bind_address=listen_address,
        )
    # 4. and 5. Before any device exists, and as soon as the table does.
    listen_towards(place.coordinator)
    store = Coordinator()
    ending.start(store, place, watchdog_limit)
    # 6. The machines.
    # A JAX device knows its process, but not its host, which may have several processes (`backend/machines.py`).
    store.set(f"machines/{place.process}", Beat.first().machine)
    if not store.wait("machines", timeout):
        raise RuntimeError(f"not all of the {place.processes} processes have said within {timeout} s on which machine "
                           "they are; see what each printed last")  # fmt: skip
    machines = store.folder("machines")
    set_machines([machines[str(rank)] for rank in range(place.processes)])


def coordinator_address(coordinator: str) -> str:
    """Return the address:port on which process 0 listens.

    This is the coordinator's own address if other hosts can reach it. On some hosts their own name means loopback to
    themselves alone (127.0.1.1 in Debian's /etc/hosts); then it is the address of the interface to other hosts.

    Raises:
      ValueError: the coordinator's name is unknown.
    """
    host, _, port = coordinator.rpartition(":")
    host = host.strip("[]")
    try:
        addresses = [str(info[4][0]) for info in socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)]
    except socket.gaierror as error:
        raise ValueError(f"coordinator={coordinator!r}: this host does not know {host} ({error.strerror}); give an "
                         "address that every host knows") from error  # fmt: skip
    reachable = [address for address in addresses if not ipaddress.ip_address(address.partition("%")[0]).is_loopback]
    if reachable:
        return _join_port(reachable[0], port)
    if host == "localhost" or _is_address(host):  # the user asks for loopback
        return _join_port("127.0.0.1" if "127.0.0.1" in addresses else addresses[0], port)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # An address for documentation, which no host has (RFC 5737). A datagram socket sends nothing.
            probe.connect(("192.0.2.1", 9))
            return _join_port(str(probe.getsockname()[0]), port)
        except OSError:  # there is no network except loopback
            return _join_port(addresses[0], port)


def _join_port(address: str, port: str) -> str:
    """Return address:port, with brackets around an IPv6 address."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _is_address(host: str) -> bool:
    """Return whether a host is given by an address instead of a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def check_free(listen_address: str) -> None:
    """Raise ValueError if process 0 cannot listen on address:port; the coordinator would end it without a word."""
    host, _, port = listen_address.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdigit():
        raise ValueError(f"bind={listen_address!r} is not address:port; give it as 0.0.0.0:12345")
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            # As the coordinator does, so that connections of an earlier run which are closing do not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, int(port)))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ValueError(f"port {port} of {host} is in use; name another in the coordinator's address") from error
        if error.errno == errno.EADDRNOTAVAIL:
            raise ValueError(
                f"{host} is not an address of this host, which is process 0; the coordinator's address must be one of "
                "process 0's (behind a mapped port, give bind=0.0.0.0:PORT or JAXPAR_BIND)"
            ) from error
        raise ValueError(
            f"process 0 cannot listen on {listen_address}: {error.strerror}; name another address"
        ) from error


def num_gpus_of_host() -> int:
    """Return the number of NVIDIA GPUs of this host, without loading a driver."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))
