"""`jaxpar doctor`: what a run stands on, looked at before it begins, with a plain reason where something is off.

Every process looks at its own host and tells the others by JAX's key-value store, which needs no device; so all of them
come to the same findings. Only the collectives use devices, and they come last: where one hangs, the rest is said.
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
# Where they are: of jaxlib's own version, and what they bring.
PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
LIBRARIES = ("nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "libtpu")
SKEW = 1.0  # seconds by which clocks may differ
SHARE = 0.5  # of the bandwidth that such hardware reaches
PINGS = 5
_TIMES, _REPEATS = 5, 3  # all-reduces in one timed program, and timed programs: as many on every host
_DRIVER, _SHM = Path("/proc/driver/nvidia/version"), Path("/dev/shm")
now = time.time


@dataclass(frozen=True)
class Diagnosis:
    """One thing that was looked at: what was found, and where it is off, the reason and the next thing to try."""

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
    """A process has told nothing for too long."""


class Others:
    """The processes of the run: what each tells all the others, within `seconds`, else `Silent` is raised."""

    def __init__(self, seconds: float = 60.0):
        from jax._src import distributed as joined  # JAX's public API has no key-value store

        self.count, self.me, self._seconds = jax.process_count(), jax.process_index(), seconds
        self._client: Any = joined.global_state.client

    def tell(self, key: str, value: Any) -> None:
        """Makes a value known, once, under a name of its own."""
        self._client.key_value_set(f"jaxpar/doctor/{key}", json.dumps(value))

    def hear(self, key: str, whom: int) -> Any:
        """What process `whom` tells under that name, once it does."""
        try:
            return json.loads(self._client.blocking_key_value_get(f"jaxpar/doctor/{key}", int(1e3 * self._seconds)))
        except jax.errors.JaxRuntimeError as error:
            raise Silent(
                f"process {whom} has not answered for {self._seconds:g} s ({key}); see what it printed last"
            ) from error

    def gather(self, name: str, value: Any) -> list[Any]:
        """The values of all processes, in their order; each waits for all."""
        if self.count == 1:
            return [json.loads(json.dumps(value))]
        self.tell(f"{name}/{self.me}", value)
        return [self.hear(f"{name}/{process}", process) for process in range(self.count)]


def examine(
    strategy: str, folder: Path, bytes_: int | None = None, others: Others | None = None
) -> Iterator[Diagnosis]:
    """The findings, one after another; every process of the run calls this, and all get the same.

    Args:
      strategy: over whose axes collectives are measured; the devices must suit it.
      folder: that all hosts should share, made if need be.
      bytes_: of a collective; without it 64 MB on accelerators, 1 MB on CPUs.
      others: the processes.
    """
    others = others or Others()
    names = [f"host {h}" for h in others.gather("name", socket.gethostname())]
    who = names if len(set(names)) == len(names) else [f"process {p} on {name}" for p, name in enumerate(names)]
    yield versions(others.gather("versions", installed()), who)
    yield devices(others.gather("devices", attached()), who)
    yield cpu_compiler(others.gather("cpu compiler", failing(os.environ)), who)
    yield addresses(others.gather("addresses", own_addresses()), names)
    yield clocks(others.gather("clocks", skew(others)), who)
    yield shared(others, folder, who)
    yield shared_memory(others.gather("shm", shutil.disk_usage(_SHM).total if _SHM.exists() else None), who)
    yield from collectives(strategy, bytes_, others)


def installed() -> dict[str, str]:
    """Versions by name, of what is there."""
    found = {"Python": platform.python_version()}
    for name in (*PACKAGES, *PLUGINS, *LIBRARIES):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if jax.default_backend() == "gpu":
        found["CUDA"] = " ".join(jax.local_devices()[0].client.platform_version.split())
    if _DRIVER.exists():
        found["driver"] = _DRIVER.read_text().splitlines()[0]
    return found


def versions(all_: Sequence[Mapping[str, str]], who: Sequence[str]) -> Diagnosis:
    """Whether the hosts have the same, and plugins are of jaxlib's version."""
    first = all_[0]
    found = ", ".join(f"{name} {version}" for name, version in first.items())
    for other, about in zip(all_[1:], who[1:], strict=True):
        for name in {**first, **other}:
            a, b = first.get(name, "nothing"), other.get(name, "nothing")
            if a != b:
                wrong = f"{name}: {who[0]} has {a}, {about} has {b}; their programs may differ, and wait for each other"
                return Diagnosis("versions", found, wrong, "install the same packages everywhere, best from one image")
    for name in PLUGINS:
        if first.get(name, first["jaxlib"]) != first["jaxlib"]:
            wrong = f"{name} {first[name]} is not of jaxlib's version {first['jaxlib']}, and is not loaded"
            return Diagnosis("versions", found, wrong, f"pip install {name}=={first['jaxlib']}")
    return Diagnosis("versions", found)


def attached() -> dict[str, Any]:
    """This process's devices, and whether there is an NVIDIA driver."""
    mine = jax.local_devices()
    memory = (mine[0].memory_stats() or {}).get("bytes_limit")
    gpu = _DRIVER.exists() or Path("/dev/nvidia0").exists()
    return {"kind": mine[0].device_kind, "platform": mine[0].platform, "count": len(mine), "memory": memory, "gpu": gpu}


def devices(all_: Sequence[Mapping[str, Any]], who: Sequence[str]) -> Diagnosis:
    """Whether every process has as many of a kind, GPUs are used where there are some, and each by its own process."""
    first = all_[0]
    memory = f", {size(first['memory'])} each" if first["memory"] else ""
    found = f"{len(all_)} process{'es' * (len(all_) > 1)} x {first['count']} x {first['kind']}{memory}"
    for other, about in zip(all_, who, strict=True):
        if other["platform"] == "cpu" and other["gpu"]:
            set_ = os.environ.get("JAX_PLATFORMS")
            hint = f"unset JAX_PLATFORMS, which is {set_!r}" if set_ else INSTALL
            return Diagnosis("devices", found, f"{about} has an NVIDIA GPU, and jax uses its CPU", hint)
        for name in ("count", "kind"):
            if other[name] != first[name]:
                wrong = (
                    f"{who[0]} has {first['count']} x {first['kind']}, {about} has {other['count']} x {other['kind']}"
                )
                hint = "ask the launcher for the same on every host; see CUDA_VISIBLE_DEVICES and nvidia-smi there"
                return Diagnosis("devices", found, wrong, hint)
    if first["platform"] == "gpu" and first["count"] > 1 and os.environ.get("NCCL_LAUNCH_MODE") != "GROUP":
        wrong = (
            f"a process drives {first['count']} GPUs; it can hang where a CUDA call that waits for all of them meets a "
            "collective"
        )
        hint = "a process for each GPU, by srun, mpirun or jaxpar launch (docs/launch.md), or NCCL_LAUNCH_MODE=GROUP"
        return Diagnosis("devices", found, wrong, hint)
    return Diagnosis("devices", found)


def cpu_compiler(all_: Sequence[Mapping[str, str]], who: Sequence[str]) -> Diagnosis:
    """Whether programs that some releases' CPU compiler got wrong are right everywhere, as a plain `jit` has them."""
    flag = "".join(f", {word}" for word in os.environ.get("XLA_FLAGS", "").split() if NAME in word)
    worst, about = max(zip(all_, who, strict=True), key=lambda one: len(one[0]))
    found = f"jaxlib {jaxlib.__version__}{flag}: {len(CANARIES) - len(worst)} of {len(CANARIES)} known programs right"
    if not worst:
        return Diagnosis("cpu compiler", found)
    wrong = f"{about}: " + "; ".join(f"{name}: {what}" for name, what in worst.items())
    hint = (
        f"XLA_FLAGS={FLAG} in every process, before jax starts; if that is set, another jaxlib. Nothing that runs on "
        "CPUs can be relied on until then, jp.verify on simulated devices included"
    )
    return Diagnosis("cpu compiler", found, wrong, hint)


def own_addresses() -> list[str]:
    """Addresses to which this host's own name leads; none if it leads nowhere."""
    try:
        return sorted({str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)})
    except OSError:
        return []


def addresses(all_: Sequence[Sequence[str]], names: Sequence[str]) -> Diagnosis:
    """Whether hosts can be reached under their own names, where there are several."""
    found = "; ".join(dict.fromkeys(f"{n}: {', '.join(a) or 'unknown'}" for n, a in zip(names, all_, strict=True)))
    for name, own in zip(names, all_, strict=True):
        if len(set(names)) > 1 and all(address.startswith("127.") or address == "::1" for address in own):
            leads = f"leads to {', '.join(own)}" if own else "is not known"
            wrong = f"{name}'s own name {leads} there, under which no other host reaches it"
            return Diagnosis(
                "addresses", found, wrong, "mend /etc/hosts or the DNS there, or give addresses, not names"
            )
    return Diagnosis("addresses", found)


def skew(others: Others) -> tuple[float, float]:
    """Seconds by which this process's clock is ahead of process 0's, and how far that may be off.

    As NTP has it: process 0 says its time between two readings here; of some tries, the one that took least.
    """
    tries = [(0.0, 0.0)] if others.me == 0 else []
    for process in range(1, others.count):
        for ping in range(PINGS):
            key = f"clock/{process}/{ping}"
            if others.me == 0:
                others.hear(f"{key}/ask", process)
                others.tell(f"{key}/answer", now())
            elif others.me == process:
                begin, clock = time.perf_counter(), now()
                others.tell(f"{key}/ask", None)
                theirs = others.hear(f"{key}/answer", 0)
                half = (time.perf_counter() - begin) / 2
                tries.append((clock + half - theirs, half))
    return min(tries, key=lambda one: one[1])


def clocks(all_: Sequence[Sequence[float]], who: Sequence[str]) -> Diagnosis:
    """Whether the hosts agree on the time."""
    if len(all_) == 1:
        return Diagnosis("clock", "one process, nothing to compare")
    ahead, off = max(all_, key=lambda one: abs(one[0]))
    found = f"at most {abs(ahead):.3f} s apart, +- {off:.3f} s"
    if abs(ahead) - off > SKEW:
        about = who[next(i for i, one in enumerate(all_) if one[0] == ahead)]
        wrong = f"the clock of {about} is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} that of {who[0]}"
        return Diagnosis(
            "clock", found, wrong, "start chrony or ntpd there (timedatectl says whether it is synchronised)"
        )
    return Diagnosis("clock", found)


def shared(others: Others, folder: Path, who: Sequence[str]) -> Diagnosis:
    """Whether every process can write to the folder, sees what the others write, and is kept out by their locks."""
    run = others.gather("run", uuid.uuid4().hex)[0]
    mine = lambda process: folder / f".doctor-{run}-{process}"
    lock, problem, began = folder / f".doctor-{run}.lock", "", time.perf_counter()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with mine(others.me).open("w") as file:
            file.write(run)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        problem = f"{who[others.me]} cannot write to {folder}: {error.strerror}"
    seconds = time.perf_counter() - began
    held = FileLock(lock)
    if not problem and others.me == 0:
        problem = _tried(lambda: held.acquire(blocking=False)) and f"files in {folder} cannot be locked by {who[0]}"
    others.gather("written", True)
    for process in range(others.count if not problem else 0):
        if not _becomes(mine(process), run):
            problem = f"{who[others.me]} does not see in {folder} what {who[process]} has written there"
            break
    if not problem and (others.me or others.count == 1) and not _tried(lambda: FileLock(lock).acquire(blocking=False)):
        problem = f"a lock that {who[0]} holds in {folder} does not keep {who[others.me]} out"
    problems = [p for p in others.gather("folder", problem) if p]
    held.release()
    if folder.is_dir():
        for path in (mine(others.me), *([lock] if others.me == 0 else [])):
            path.unlink(missing_ok=True)
    free = size(shutil.disk_usage(folder).free) if folder.exists() else "none"
    found = f"{folder}: written in {seconds * 1e3:.0f} ms, {free} free"
    hint = (
        "name one with --folder that all hosts mount (NFS, Lustre, a volume), with locks, and that you may write to; "
        "checkpoints and the lock of a run live there"
    )
    return Diagnosis("folder", found, problems[0], hint) if problems else Diagnosis("folder", found)


def _becomes(path: Path, text: str, seconds: float = 5.0) -> bool:
    """Whether the file has that text before long: NFS may show a new file after some seconds only."""
    until = time.monotonic() + seconds
    while not (path.exists() and path.read_text() == text):
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def _tried(lock: Callable[[], Any]) -> str:
    """Why the lock was not got; "" if it was."""
    try:
        lock()
    except Timeout:
        return "held"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def shared_memory(all_: Sequence[int | None], who: Sequence[str]) -> Diagnosis:
    """Whether /dev/shm has room for NCCL, which a container's 64 MB have not."""
    least = min((one for one in all_ if one is not None), default=None)
    found = "none" if least is None else f"{_SHM}: {size(least)}"
    here = host_of(jax.local_devices()[0])
    beside = sum(host_of(device) == here for device in jax.devices())
    if jax.default_backend() == "gpu" and beside > 1 and (least or 0) < 2**30:
        wrong = f"{who[all_.index(least)]} has {found}; NCCL's processes share buffers there, and fail without"
        return Diagnosis(
            "shm", found, wrong, "docker run --ipc=host or --shm-size=8g; Kubernetes: an emptyDir of medium Memory"
        )
    return Diagnosis("shm", found)


def collectives(strategy: str, bytes_: int | None, others: Others) -> Iterator[Diagnosis]:
    """An all-reduce over each axis of the strategy's mesh, checked, with its bandwidth beside the hardware's."""
    mesh = make_mesh(Strategy.parse(strategy))
    axes = [axis for axis, n in mesh.shape.items() if n > 1]
    if not axes:
        yield Diagnosis("collectives", "one device, nothing to send")
    first = mesh.devices.flat[0]
    amount = bytes_ or (10**6 if first.platform == "cpu" else 64 * 10**6)
    kind = next((kind for kind in KINDS.values() if kind.device_kind == first.device_kind), None)
    for axis in axes:
        own, wrong_elements = _all_reduce(mesh, str(axis), amount)
        busbw = others.gather(f"busbw/{axis}", own)[0]
        found = f"{axis}={mesh.shape[axis]}: all-reduce of {size(amount)} at {busbw:.3g} GB/s busbw"
        found += " (copies in memory)" if first.platform == "cpu" and others.count == 1 else ""
        if wrong_elements:
            wrong = f"{wrong_elements} elements of an all-reduce over {axis} are wrong"
            yield Diagnosis("collectives", found, wrong, "jaxpar doctor on each host alone, to find whose link it is")
            continue
        along = mesh.devices.swapaxes(0, mesh.axis_names.index(axis)).reshape(mesh.shape[axis], -1)
        group = hosts_of(along[:, 0]).tolist()
        across = len(set(group)) > 1
        best = kind and (kind.network_bandwidth if across else kind.link_bandwidth)
        if kind and best:
            best *= group.count(group[0]) if across else kind.link_efficiency or 1
            found += f" of {best / 1e9:.0f}"
            if busbw * 1e9 < SHARE * best:
                way = "the network" if across else "the link inside a host"
                wrong = f"{busbw:.3g} GB/s over {axis} is less than {SHARE:.0%} of what {way} of {kind.kind} reaches"
                hint = (
                    "NCCL_DEBUG=INFO says which way it takes (NET/IB, not NET/Socket; P2P, not SHM); see docs/launch.md"
                )
                yield Diagnosis("collectives", found, wrong, hint)
                continue
        yield Diagnosis("collectives", found)


def _all_reduce(mesh: Mesh, axis: str, bytes_: int) -> tuple[float, int]:
    """The busbw of an all-reduce of float32 by all groups along an axis at once, in 1e9 bytes/s (nccl-tests,
    doc/PERFORMANCE.md: 2 (n - 1) / n times its bytes over its time), and how many elements of it are wrong.

    Timed is one program of several, each of which waits for the one before.
    """
    every, n, count = tuple(mesh.axis_names), mesh.shape[axis], max(bytes_ // 4, 1)
    number = lambda: (lax.iota(jnp.int32, count) % 7).astype(jnp.float32)
    own = lambda: number() + lax.axis_index(axis)

    def repeated(x: jax.Array, times: jax.Array) -> jax.Array:
        return lax.fori_loop(0, times, lambda _, y: nccl.all_reduce(y, axis), x)

    def wrong(y: jax.Array) -> jax.Array:
        return lax.psum((y != n * number() + n * (n - 1) // 2).sum(dtype=jnp.int32), every)

    over = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
    x = jax.jit(over(own, in_specs=(), out_specs=P(every)))()
    program = jax.jit(over(repeated, in_specs=(P(every), P()), out_specs=P(every)))
    once, several = (jax.device_put(np.int32(times), NamedSharding(mesh, P())) for times in (1, _TIMES))
    mistakes = int(jax.jit(over(wrong, in_specs=P(every), out_specs=P()))(program(x, once)))
    taken = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        jax.block_until_ready(program(x, several))
        taken.append(time.perf_counter() - begin)
    return 2 * (n - 1) / n * 4 * count * _TIMES / statistics.median(taken) / 1e9, mistakes
