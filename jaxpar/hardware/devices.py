"""Accelerators to compile for without having them.

A compile-only device has a compiler and no memory. On a mesh of them,

    jax.jit(f).trace(...).lower(lowering_platforms=("cuda",)).compile()

gives the scheduled program, with its asynchronous collectives and `memory_analysis()`; the program cannot run. Kernels
are not autotuned, so their times mean nothing. Memory, collectives, their sizes, groups and overlap are as on real
devices.
"""

import importlib.util
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.experimental import topologies
from jax.interpreters.mlir import ir

from .hardware import KINDS, Hardware
from .hardware import peak_flops as peak_flops
from .kinds import load, nearest

_MAX_DEVICES = 1 << 17
INSTALL = f'pip install "jax[cuda12]=={jax.__version__}"'
INSTALL_TPU = f'pip install "jax[tpu]=={jax.__version__}"'


@dataclass(frozen=True)
class Target:
    """Devices to compile for, with their capabilities.

    Attributes:
      name: the name that was passed to `target`.
      kind: kind of the devices, as in `hardware.kind`.
      hosts: number of hosts, which the network joins.
      per_host: number of devices of one host.
      hardware: the numbers of this kind. For simulated CPU devices, all are unknown.
      devices: all devices, ordered by host, for `jax.sharding.Mesh` or `jaxpar.make_train_step(..., mesh=...)`. Except
        for CPU devices they hold no arrays: describe arguments by `jax.ShapeDtypeStruct(shape, dtype, sharding=...)`.
    """

    name: str
    kind: str
    hosts: int
    per_host: int
    hardware: Hardware
    devices: list[jax.Device] = field(repr=False)


def target(name: str, hardware: Hardware | None = None, memory_bytes: float | None = None) -> Target:
    """Return devices by name.

    Args:
      name: one of
        "8xH100": a count and a kind. The devices fill hosts of `Hardware.per_host`, 8; fewer are on one host;
        "32x4xH100": 32 hosts of 4;
        "64xcluster.toml": the kind that this file describes, see `jaxpar.hardware.kinds.load`;
        "v5e:4x4": a slice of TPUs, by its shape;
        "cpu:8": 8 of the CPU devices that `jaxpar.simulate` made.
      hardware: the kind at the end of the name if the table lacks it; from `load` or `capture`.
      memory_bytes: memory of one device, instead of its kind's. The compiler schedules for it.

    Raises:
      ValueError: the name is not understood, its kind is not known, the count does not fill its hosts, no slice has
        this shape, or there are fewer CPU devices.
      ImportError: the compiler for the kind is not installed; the message says how to install it.
      RuntimeError: JAX started without `JAX_PLATFORMS=cpu`, and so without the compiler for GPUs.
    """
    if not isinstance(name, str):
        raise ValueError(f"target is a {type(name).__name__}; use a text such as '8xH100', or a Target")
    # Python's int() refuses numbers of thousands of digits, with another error.
    if (digits := max(map(len, re.findall(r"\d+", name)), default=0)) > 18:
        raise ValueError(f"target={name[:60]!r} has a number of {digits} digits; use at most {_MAX_DEVICES:,} devices")
    with_memory = lambda kind: kind if memory_bytes is None else replace(kind, memory_bytes=int(memory_bytes))
    # 1. Names with a colon: CPU devices, and slices of TPUs.
    if cpu := re.fullmatch(r"cpu:(\d+)", name):
        return _cpu(name, int(cpu[1]))
    if tpu := re.fullmatch(r"(\w+):\d+(?:x\d+)*", name):
        return _tpu(name, with_memory(_find_kind(name, tpu[1], hardware)))
    # 2. GPUs: a count, perhaps of hosts and of their devices, and a kind.
    match = re.fullmatch(r"([1-9]\d*)x(?:([1-9]\d*)x)?([^\d:].*)", name)
    if match is None:
        raise ValueError(
            f"target={name!r} is not a count and a known kind; use for example '8xH100', '32x8xH100' (hosts of 8), "
            "'v5e:4x4' or 'cpu:8'"
        )
    first, second, kind = match.groups()
    # The compiler describes each device: 10**9 of them take 21 GB.
    if (num_devices := int(first) * int(second or 1)) > _MAX_DEVICES:
        raise ValueError(f"target={name!r} has {num_devices:,} devices; use at most {_MAX_DEVICES:,}")
    gpu = with_memory(load(kind) if kind.endswith(".toml") and hardware is None else _find_kind(name, kind, hardware))
    # 3. Their hosts. Fewer devices than a host has are on one host.
    if second:
        return _gpu(name, gpu, int(first), int(second))
    per_host = gpu.per_host
    hosts, remainder = divmod(num_devices, per_host)
    if hosts and remainder:
        raise ValueError(
            f"target={name!r}: {num_devices} devices do not fill hosts of {per_host}; use {hosts * per_host} or "
            f"{(hosts + 1) * per_host}"
        )
    return _gpu(name, gpu, hosts or 1, per_host if hosts else num_devices)


def gpu_topology(name: str = "8xH100") -> list[jax.Device]:
    """Return the devices of `target(name)`."""
    return target(name).devices


def has_memories(device: jax.Device) -> bool:
    """Return whether a sharding on this device can name a memory; compile-only GPUs have none to name."""
    return bool(device.addressable_memories())


def mark_on_host(lowered: jax.stages.Lowered, arguments: Sequence[int]) -> None:
    """Place some arguments of a lowered program in the host's memory, in place.

    Shardings cannot say this for devices without memories, so it is written into the StableHLO module.
    """
    module: Any = lowered.compiler_ir("stablehlo")
    # The module also has functions that the main one calls.
    main = next(op for op in module.body.operations if op.attributes["sym_name"].value == "main")
    with module.context:
        all_attributes = list(main.attributes["arg_attrs"])
        for i in arguments:
            attributes: dict[str, Any] = {attribute.name: attribute.attr for attribute in all_attributes[i]}
            attributes["mhlo.memory_kind"] = ir.StringAttr.get("pinned_host")
            all_attributes[i] = ir.DictAttr.get(attributes)
        main.attributes["arg_attrs"] = ir.ArrayAttr.get(all_attributes)


def missing_compiler() -> str:
    """Return why the CUDA compiler is missing, such as "package jax_cuda12_plugin is not installed"; "" otherwise."""
    # Each package exists for CUDA 12 and 13; one of the two is enough.
    for packages in (("jax_cuda12_plugin", "jax_cuda13_plugin"), ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")):
        if not any(_is_installed(package) for package in packages):
            return f"package {packages[0]} is not installed"
    return ""


def _is_installed(module: str) -> bool:
    """Return whether a module can be imported, without importing it."""
    parent = module.rpartition(".")[0]
    # `find_spec` raises if the parent is missing.
    return (not parent or _is_installed(parent)) and importlib.util.find_spec(module) is not None


def _find_kind(name: str, kind: str, hardware: Hardware | None) -> Hardware:
    """Return the kind of a target: `hardware` if it is given, else from the table. Raises ValueError."""
    if hardware is not None:
        if hardware.kind != kind:
            raise ValueError(f"target={name!r} names {kind!r}, but hardware is {hardware.kind!r}; use one kind in both")
        return hardware
    if kind not in KINDS:
        raise ValueError(
            f"target={name!r}: {kind!r} is not a known kind{nearest(kind)}; describe another in a file, and name it: "
            "'8xcluster.toml'"
        )
    return KINDS[kind]


def _gpu(name: str, hardware: Hardware, hosts: int, per_host: int) -> Target:
    """Return compile-only GPUs. Raises ValueError, ImportError or RuntimeError; see `target`."""
    if not hardware.config:
        raise ValueError(
            f"target={name!r}: {hardware.kind} has no config for the compiler; "
            + (
                f"name a slice of TPUs by its shape, as '{hardware.kind}:4x4'"
                if _is_tpu(hardware)
                else "give it a config in a file (jaxpar.hardware.kinds.load)"
            )
        )
    if reason := missing_compiler():
        raise ImportError(f"target={name!r} needs the CUDA compiler, and {reason}; {INSTALL}")
    shape = f"1x{hosts}x{per_host}"  # slices x hosts x devices
    try:
        topology = topologies.get_topology_desc("", "cuda", target_config=hardware.target_config, topology=shape)
    except NotImplementedError as error:  # jax found no GPU at its start, and did not load its plugin
        raise RuntimeError(
            f"target={name!r}: JAX started without the CUDA compiler, as it found no GPU; set JAX_PLATFORMS=cpu first"
        ) from error
    return Target(name, hardware.kind, hosts, per_host, hardware, list(topology.devices))


def _tpu(name: str, hardware: Hardware) -> Target:
    """Return a compile-only slice of TPUs. Raises ValueError or ImportError; see `target`."""
    if not _is_tpu(hardware):
        count = name.partition(":")[2]
        raise ValueError(
            f"target={name!r}: {hardware.kind} are not TPUs, which have shapes; use '{count}x{hardware.kind}'"
        )
    if not _is_installed("libtpu"):
        raise ImportError(f"target={name!r} needs the TPU compiler, and package libtpu is not installed; {INSTALL_TPU}")
    # Outside Google's cloud, libtpu would wait for a metadata server, as if this machine were one of the cloud's.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    try:
        devices = list(topologies.get_topology_desc(name, "tpu").devices)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"target={name!r} is not a slice that the compiler knows: {error}") from error
    return _by_hosts(name, hardware, devices)


def _is_tpu(hardware: Hardware) -> bool:
    """Return whether a kind is a TPU."""
    return hardware.device_kind.startswith("TPU")


def _cpu(name: str, count: int) -> Target:
    """Return simulated CPU devices, which can run. Raises ValueError if there are fewer."""
    devices = jax.devices("cpu")
    if not 0 < count <= len(devices):
        raise ValueError(
            f"target={name!r}: there are {len(devices)} CPU devices; call jaxpar.simulate({max(count, 1)}) right after "
            "`import jaxpar`, before the first array"
        )
    return _by_hosts(name, Hardware(kind="cpu", device_kind=devices[0].device_kind, per_host=count), devices[:count])


def _by_hosts(name: str, hardware: Hardware, devices: list[jax.Device]) -> Target:
    """Return a target of devices that know their hosts."""
    hosts = len({device.process_index for device in devices})
    return Target(name, hardware.kind, hosts, len(devices) // hosts, hardware, devices)
