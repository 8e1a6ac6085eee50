"""`jaxpar doctor`: checks of hosts, devices and network before a run begins, with a plain reason for whatever is wrong.

Every process examines its own host and publishes the result in JAX's key-value store, which needs no device. So all
processes come to the same findings. Only the check of collectives uses devices.
"""

import functools
import json
import os
import platform
import shutil
import socket
import statistics
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from filelock import FileLock, Timeout
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ... import collectives as nccl
from ...backend.cpu_compiler import CANARIES, FLAG, NAME, failing
from ...backend.machines import host_of, hosts_of
from ...backend.text import size
from ...hardware.devices import INSTALL
from ...hardware.hardware import KINDS
from ...layout.mesh import make_mesh
from ...strategy import Strategy

PACKAGES = ("jaxpar", "jax", "jaxlib", "flax", "optax", "numpy")
# Checked if they are installed: plugins must have jaxlib's version, libraries may have any.
PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
LIBRARIES = ("nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "libtpu")
SKEW = 1.0  # seconds by which clocks may differ
_ANSWER_SECONDS = 60.0  # how long a process waits for a value of another one
_FILE_SECONDS = 5.0  # how long a process waits for a file of another one: NFS may show it only after some seconds
SHARE = 0.5  # the lowest good bandwidth, as a share of the hardware's
PINGS = 5  # tries of each process to measure its clock
# Constants, so that all hosts run equally many collectives.
_ALL_REDUCES, _REPEATS = 5, 3  # all-reduces in a timed program, and timed programs
_DRIVER, _SHM = Path("/proc/driver/nvidia/version"), Path("/dev/shm")
wall_clock = time.time


@dataclass(frozen=True)
class Diagnosis:
    """The result of the check `name`: what it found, what is wrong ("" if nothing is), and what to try."""

    name: str
    found: str
    wrong: str = ""
    hint: str = ""

    def __str__(self) -> str:
        lines = [f"{'OFF' if self.wrong else 'ok ':3} {self.name:12} {self.found}"]
        if self.wrong:
            lines += [f"    {self.wrong}", f"    try: {self.hint}"]
        return "\n".join(lines)


class Silent(RuntimeError):
    """Raised when a process has published nothing for too long."""


class ProcessGroup:
    """The processes of a run, which exchange values through JAX's key-value store."""

    def __init__(self) -> None:
        from jax._src import distributed as joined  # JAX's public API has no key-value store

        self.count, self.index = jax.process_count(), jax.process_index()
        self._client: Any = joined.global_state.client

    def publish(self, key: str, value: Any) -> None:
        """Publish a value under a key, once."""
        self._client.key_value_set(f"jaxpar/doctor/{key}", json.dumps(value))

    def receive(self, key: str, sender: int) -> Any:
        """Return the value that process `sender` publishes under a key; wait for it."""
        try:
            return json.loads(self._client.blocking_key_value_get(f"jaxpar/doctor/{key}", int(1e3 * _ANSWER_SECONDS)))
        except jax.errors.JaxRuntimeError as error:
            raise Silent(
                f"process {sender} has not answered for {_ANSWER_SECONDS:g} s ({key}); see what it printed last"
            ) from error

    def gather(self, name: str, value: Any) -> list[Any]:
        """Return the values of all processes, in order; every process waits for all others."""
        if self.count == 1:
            # A single process has no key-value store. Its value takes the same way through JSON as with several.
            return [json.loads(json.dumps(value))]
        self.publish(f"{name}/{self.index}", value)
        return [self.receive(f"{name}/{process}", process) for process in range(self.count)]


def examine(strategy: str, folder: Path, num_bytes: int | None) -> Iterator[Diagnosis]:
    """Yield the diagnoses one by one. Every process of the run calls this, and all get the same ones.

    Args:
      strategy: the strategy whose mesh axes the collectives are measured over. The devices must suit it.
      folder: the folder that all hosts should share. It is created if it does not exist.
      num_bytes: the size of a collective; if None, 64 MB on accelerators and 1 MB on CPUs.
    """
    processes = ProcessGroup()
    host_names = [f"host {host}" for host in processes.gather("name", socket.gethostname())]
    # If every host has one process, the host's name is enough to name it.
    labels = (
        host_names
        if len(set(host_names)) == len(host_names)
        else [f"process {index} on {name}" for index, name in enumerate(host_names)]
    )
    # The checks without collectives come first: if the devices hang, their findings have been printed.
    yield check_versions(processes.gather("versions", installed_versions()), labels)
    yield check_devices(processes.gather("devices", local_device_info()), labels)
    yield check_cpu_compiler(processes.gather("cpu compiler", failing(os.environ)), labels)
    yield check_addresses(processes.gather("addresses", local_addresses()), host_names)
    yield check_clocks(processes.gather("clocks", clock_skew(processes)), labels)
    yield check_folder(processes, folder, labels)
    yield check_shared_memory(processes.gather("shm", shutil.disk_usage(_SHM).total if _SHM.exists() else None), labels)
    yield from check_collectives(strategy, num_bytes, processes)


def installed_versions() -> dict[str, str]:
    """Return the versions of installed packages, by name."""
    versions = {"Python": platform.python_version()}
    for name in (*PACKAGES, *PLUGINS, *LIBRARIES):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    # CUDA's version is not a package's: the client of the GPU knows it.
    if jax.default_backend() == "gpu":
        versions["CUDA"] = " ".join(jax.local_devices()[0].client.platform_version.split())
    if _DRIVER.exists():
        versions["driver"] = _DRIVER.read_text().splitlines()[0]
    return versions


def check_versions(versions_by_process: Sequence[Mapping[str, str]], labels: Sequence[str]) -> Diagnosis:
    """Check that all processes have the same versions, and that plugins have jaxlib's."""
    first = versions_by_process[0]
    summary = ", ".join(f"{name} {version}" for name, version in first.items())
    for versions, label in zip(versions_by_process[1:], labels[1:], strict=True):
        # A package that only one of both has differs as well.
        for name in {**first, **versions}:
            first_version, version = first.get(name, "nothing"), versions.get(name, "nothing")
            if first_version != version:
                wrong = (
                    f"{name}: {labels[0]} has {first_version}, {label} has {version}; their programs may differ, and "
                    "wait for each other"
                )
                return Diagnosis(
                    "versions", summary, wrong, "install the same packages everywhere, best from one image"
                )
    # JAX does not load a plugin of another version than jaxlib's, and then uses the CPU.
    for name in PLUGINS:
        if first.get(name, first["jaxlib"]) != first["jaxlib"]:
            wrong = f"{name} {first[name]} is not of jaxlib's version {first['jaxlib']}, and is not loaded"
            return Diagnosis("versions", summary, wrong, f"pip install {name}=={first['jaxlib']}")
    return Diagnosis("versions", summary)


def local_device_info() -> dict[str, Any]:
    """Return this process's devices, and whether there is an NVIDIA GPU."""
    devices = jax.local_devices()
    return {
        "kind": devices[0].device_kind,
        "platform": devices[0].platform,
        "count": len(devices),
        "memory": (devices[0].memory_stats() or {}).get("bytes_limit"),
        "gpu": _DRIVER.exists() or Path("/dev/nvidia0").exists(),
    }


def check_devices(info_by_process: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> Diagnosis:
    """Check that all processes have equal devices, that GPUs are used, and that each GPU has its own process."""
    first = info_by_process[0]
    memory = f", {size(first['memory'])} each" if first["memory"] else ""
    processes = f"{len(info_by_process)} process{'es' * (len(info_by_process) > 1)}"
    summary = f"{processes} x {first['count']} x {first['kind']}{memory}"
    for info, label in zip(info_by_process, labels, strict=True):
        # JAX falls back to the CPU if its CUDA plugin is missing or JAX_PLATFORMS excludes it.
        if info["platform"] == "cpu" and info["gpu"]:
            platforms = os.environ.get("JAX_PLATFORMS")
            hint = f"unset JAX_PLATFORMS, which is {platforms!r}" if platforms else INSTALL
            return Diagnosis("devices", summary, f"{label} has an NVIDIA GPU, and jax uses its CPU", hint)
        for name in ("count", "kind"):
            if info[name] != first[name]:
                wrong = (
                    f"{labels[0]} has {first['count']} x {first['kind']}, {label} has {info['count']} x {info['kind']}"
                )
                hint = "ask the launcher for the same on every host; see CUDA_VISIBLE_DEVICES and nvidia-smi there"
                return Diagnosis("devices", summary, wrong, hint)
    # A CUDA call that synchronizes all GPUs of a process waits for kernels of a collective that wait for each other.
    if first["platform"] == "gpu" and first["count"] > 1 and os.environ.get("NCCL_LAUNCH_MODE") != "GROUP":
        wrong = (
            f"a process drives {first['count']} GPUs; it can hang where a CUDA call that waits for all of them meets a "
            "collective"
        )
        hint = "a process for each GPU, by srun, mpirun or jaxpar launch (docs/launch.md), or NCCL_LAUNCH_MODE=GROUP"
        return Diagnosis("devices", summary, wrong, hint)
    return Diagnosis("devices", summary)


def check_cpu_compiler(failures_by_process: Sequence[Mapping[str, str]], labels: Sequence[str]) -> Diagnosis:
    """Check known programs that the CPU compiler of some releases gets wrong; each was run as a plain `jit`."""
    flag_text = "".join(f", {word}" for word in os.environ.get("XLA_FLAGS", "").split() if NAME in word)
    # One process is enough to show the problem: the one with most failures.
    failures, label = max(zip(failures_by_process, labels, strict=True), key=lambda labelled: len(labelled[0]))
    num_right = len(CANARIES) - len(failures)
    summary = f"jaxlib {jaxlib.__version__}{flag_text}: {num_right} of {len(CANARIES)} known programs right"
    if not failures:
        return Diagnosis("cpu compiler", summary)
    wrong = f"{label}: " + "; ".join(f"{name}: {failure}" for name, failure in failures.items())
    hint = (
        f"XLA_FLAGS={FLAG} in every process, before jax starts; if that is set, another jaxlib. Nothing that runs on "
        "CPUs can be relied on until then, jp.verify on simulated devices included"
    )
    return Diagnosis("cpu compiler", summary, wrong, hint)


def local_addresses() -> list[str]:
    """Return the addresses to which this host's own name resolves; none if it does not."""
    try:
        return sorted({str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)})
    except OSError:
        return []


def check_addresses(addresses_by_process: Sequence[Sequence[str]], names: Sequence[str]) -> Diagnosis:
    """Check that hosts can be reached under their own names, if there are several."""
    summary = "; ".join(
        dict.fromkeys(
            f"{name}: {', '.join(addresses) or 'unknown'}"
            for name, addresses in zip(names, addresses_by_process, strict=True)
        )
    )
    for name, addresses in zip(names, addresses_by_process, strict=True):
        # Debian maps a host's own name to 127.0.1.1, which is harmless only as long as no other host uses the name.
        if len(set(names)) > 1 and all(address.startswith("127.") or address == "::1" for address in addresses):
            resolution = f"leads to {', '.join(addresses)}" if addresses else "is not known"
            wrong = f"{name}'s own name {resolution} there, under which no other host reaches it"
            return Diagnosis(
                "addresses", summary, wrong, "mend /etc/hosts or the DNS there, or give addresses, not names"
            )
    return Diagnosis("addresses", summary)


def clock_skew(processes: ProcessGroup) -> tuple[float, float]:
    """Return the seconds by which this process's clock is ahead of process 0's, and the error of this number.

    As in NTP, process 0 publishes its time between two readings of this clock. The try with the shortest interval
    counts.
    """
    # Process 0 answers the others one by one, so that their questions do not delay each other.
    tries = [(0.0, 0.0)] if processes.index == 0 else []
    for process in range(1, processes.count):
        for ping in range(PINGS):
            key = f"clock/{process}/{ping}"
            if processes.index == 0:
                processes.receive(f"{key}/ask", process)
                processes.publish(f"{key}/answer", wall_clock())
            elif processes.index == process:
                start, local_time = time.perf_counter(), wall_clock()
                processes.publish(f"{key}/ask", None)
                remote_time = processes.receive(f"{key}/answer", 0)
                # Process 0's time was read about in the middle between the two readings here.
                half_interval = (time.perf_counter() - start) / 2
                tries.append((local_time + half_interval - remote_time, half_interval))
    return min(tries, key=lambda measured: measured[1])


def check_clocks(skews: Sequence[Sequence[float]], labels: Sequence[str]) -> Diagnosis:
    """Check that the hosts' clocks agree."""
    if len(skews) == 1:
        return Diagnosis("clock", "one process, nothing to compare")
    ahead, error = max(skews, key=lambda measured: abs(measured[0]))
    summary = f"at most {abs(ahead):.3f} s apart, +- {error:.3f} s"
    # A slow network makes the measured skew uncertain: report only what exceeds the error.
    if abs(ahead) - error > SKEW:
        label = labels[next(i for i, measured in enumerate(skews) if measured[0] == ahead)]
        wrong = (
            f"the clock of {label} is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} that of {labels[0]}"
        )
        return Diagnosis(
            "clock", summary, wrong, "start chrony or ntpd there (timedatectl says whether it is synchronised)"
        )
    return Diagnosis("clock", summary)


def check_folder(processes: ProcessGroup, folder: Path, labels: Sequence[str]) -> Diagnosis:
    """Check that every process can write to the folder, sees what the others write, and is kept out by their locks."""
    # 1. Write a file. Its name and text are of this run, so that files of an earlier one are not mistaken for it.
    run_id = processes.gather("run", uuid.uuid4().hex)[0]
    file_of = lambda process: folder / f".doctor-{run_id}-{process}"
    lock_path, problem, start = folder / f".doctor-{run_id}.lock", "", time.perf_counter()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with file_of(processes.index).open("w") as file:
            file.write(run_id)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        problem = f"{labels[processes.index]} cannot write to {folder}: {error.strerror}"
    seconds = time.perf_counter() - start
    lock = FileLock(lock_path)
    # Process 0 takes the lock, and holds it until all others have tried.
    if not problem and processes.index == 0:
        problem = (
            _lock_error(lambda: lock.acquire(blocking=False)) and f"files in {folder} cannot be locked by {labels[0]}"
        )
    # 2. Wait until all have written, and read the files of all others.
    processes.gather("written", True)
    # With a problem a process reads nothing, but still takes part in every `gather`, for which the others wait.
    for process in range(processes.count if not problem else 0):
        if not _wait_for_text(file_of(process), run_id):
            problem = f"{labels[processes.index]} does not see in {folder} what {labels[process]} has written there"
            break
    # A process alone tries its own lock, through a second object.
    if (
        not problem
        and (processes.index or processes.count == 1)
        and not _lock_error(lambda: FileLock(lock_path).acquire(blocking=False))
    ):
        problem = f"a lock that {labels[0]} holds in {folder} does not keep {labels[processes.index]} out"
    # 3. Collect the problems, and clean up. The lock may go once `gather` returns: then all processes have tried it.
    problems = [p for p in processes.gather("folder", problem) if p]
    lock.release()
    if folder.is_dir():
        for path in (file_of(processes.index), *([lock_path] if processes.index == 0 else [])):
            path.unlink(missing_ok=True)
    free = size(shutil.disk_usage(folder).free) if folder.exists() else "none"
    summary = f"{folder}: written in {seconds * 1e3:.0f} ms, {free} free"
    hint = (
        "name one with --folder that all hosts mount (NFS, Lustre, a volume), with locks, and that you may write to; "
        "checkpoints and the lock of a run live there"
    )
    return Diagnosis("folder", summary, problems[0], hint) if problems else Diagnosis("folder", summary)


def _wait_for_text(path: Path, text: str) -> bool:
    """Wait until a file has this text; return whether it does."""
    deadline = time.monotonic() + _FILE_SECONDS
    while not (path.exists() and path.read_text() == text):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _lock_error(acquire: Callable[[], Any]) -> str:
    """Return why a lock could not be acquired; "" if it was."""
    try:
        acquire()
    except Timeout:
        return "held"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def check_shared_memory(sizes: Sequence[int | None], labels: Sequence[str]) -> Diagnosis:
    """Check that /dev/shm has room for NCCL; the 64 MB of a container are not enough."""
    smallest = min((num_bytes for num_bytes in sizes if num_bytes is not None), default=None)
    summary = "none" if smallest is None else f"{_SHM}: {size(smallest)}"
    host = host_of(jax.local_devices()[0])
    num_local_devices = sum(host_of(device) == host for device in jax.devices())
    if jax.default_backend() == "gpu" and num_local_devices > 1 and (smallest or 0) < 2**30:
        wrong = f"{labels[sizes.index(smallest)]} has {summary}; NCCL's processes share buffers there, and fail without"
        return Diagnosis(
            "shm", summary, wrong, "docker run --ipc=host or --shm-size=8g; Kubernetes: an emptyDir of medium Memory"
        )
    return Diagnosis("shm", summary)


def check_collectives(strategy: str, num_bytes: int | None, processes: ProcessGroup) -> Iterator[Diagnosis]:
    """Check an all-reduce over each axis of the strategy's mesh, and its bandwidth against the hardware's."""
    mesh = make_mesh(Strategy.parse(strategy))
    axes = [axis for axis, axis_size in mesh.shape.items() if axis_size > 1]
    if not axes:
        yield Diagnosis("collectives", "one device, nothing to send")
    first_device = mesh.devices.flat[0]
    amount = num_bytes or (10**6 if first_device.platform == "cpu" else 64 * 10**6)
    # Only a known kind has a bandwidth to compare with.
    kind = next((kind for kind in KINDS.values() if kind.device_kind == first_device.device_kind), None)
    for axis in axes:
        local_busbw, wrong_elements = _all_reduce(mesh, str(axis), amount)
        # All report process 0's number, and so come to the same diagnosis.
        busbw = processes.gather(f"busbw/{axis}", local_busbw)[0]
        summary = f"{axis}={mesh.shape[axis]}: all-reduce of {size(amount)} at {busbw:.3g} GB/s busbw"
        summary += " (copies in memory)" if first_device.platform == "cpu" and processes.count == 1 else ""
        if wrong_elements:
            wrong = f"{wrong_elements} elements of an all-reduce over {axis} are wrong"
            yield Diagnosis("collectives", summary, wrong, "jaxpar doctor on each host alone, to find whose link it is")
            continue
        # [ranks of the axis, groups]; the first group stands for all.
        groups = mesh.devices.swapaxes(0, mesh.axis_names.index(axis)).reshape(mesh.shape[axis], -1)
        group_hosts = hosts_of(groups[:, 0]).tolist()
        is_across_hosts = len(set(group_hosts)) > 1
        best_bandwidth = kind and (kind.network_bandwidth if is_across_hosts else kind.link_bandwidth)
        if kind and best_bandwidth:
            # Across hosts, each device of the group on a host adds its own adapter.
            best_bandwidth *= group_hosts.count(group_hosts[0]) if is_across_hosts else kind.link_efficiency or 1
            summary += f" of {best_bandwidth / 1e9:.0f}"
            if busbw * 1e9 < SHARE * best_bandwidth:
                link = "the network" if is_across_hosts else "the link inside a host"
                wrong = f"{busbw:.3g} GB/s over {axis} is less than {SHARE:.0%} of what {link} of {kind.kind} reaches"
                hint = (
                    "NCCL_DEBUG=INFO says which way it takes (NET/IB, not NET/Socket; P2P, not SHM); see docs/launch.md"
                )
                yield Diagnosis("collectives", summary, wrong, hint)
                continue
        yield Diagnosis("collectives", summary)


def _all_reduce(mesh: Mesh, axis: str, num_bytes: int) -> tuple[float, int]:
    """Measure an all-reduce of float32 by all groups along an axis at once.

    The bus bandwidth is 2 (n - 1) / n times its bytes over its time (nccl-tests, doc/PERFORMANCE.md). Each timed
    program has several all-reduces, one after another, so that the time of the launch counts less.

    Args:
      num_bytes: the bytes on each device.

    Returns:
      The bus bandwidth in 1e9 bytes/s, and the number of wrong elements.
    """
    all_axes, num_devices, num_elements = tuple(mesh.axis_names), mesh.shape[axis], max(num_bytes // 4, 1)
    # Small whole numbers, whose sum over devices is exact: n pattern + (0 + 1 + ... + (n - 1)).
    pattern = lambda: (lax.iota(jnp.int32, num_elements) % 7).astype(jnp.float32)
    local_values = lambda: pattern() + lax.axis_index(axis)

    # The number of repetitions is an argument, so that one compilation serves the check and the timing.
    def repeated(values: jax.Array, num_repetitions: jax.Array) -> jax.Array:
        return lax.fori_loop(0, num_repetitions, lambda _, sums: nccl.all_reduce(sums, axis), values)

    # Repeated all-reduces grow by the factor n each time, so that only one is checked.
    def wrong(sums: jax.Array) -> jax.Array:
        return lax.psum(
            (sums != num_devices * pattern() + num_devices * (num_devices - 1) // 2).sum(dtype=jnp.int32), all_axes
        )

    sharded = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
    values = jax.jit(sharded(local_values, in_specs=(), out_specs=P(all_axes)))()
    program = jax.jit(sharded(repeated, in_specs=(P(all_axes), P()), out_specs=P(all_axes)))
    one_repetition, repetitions = (
        jax.device_put(np.int32(num_repetitions), NamedSharding(mesh, P())) for num_repetitions in (1, _ALL_REDUCES)
    )
    num_wrong = int(jax.jit(sharded(wrong, in_specs=P(all_axes), out_specs=P()))(program(values, one_repetition)))
    seconds = []
    # The check above has compiled the program, so that no timing includes compilation.
    for _ in range(_REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(program(values, repetitions))
        seconds.append(time.perf_counter() - start)
    sent_bytes = 2 * (num_devices - 1) / num_devices * 4 * num_elements * _ALL_REDUCES
    return sent_bytes / statistics.median(seconds) / 1e9, num_wrong
