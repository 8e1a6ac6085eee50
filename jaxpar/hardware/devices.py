"""Accelerators to compile for that this machine does not have.

A compile-only device has a compiler and no memory. On a mesh of them,
`jax.jit(f).trace(...).lower(lowering_platforms=("cuda",)).compile()` gives the scheduled program with its asynchronous
collectives and `memory_analysis()`; it cannot run. Kernels are not autotuned, so their times mean nothing; memory,
collectives, their sizes, groups and overlap do.
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

_MOST = 1 << 17  # devices of a target
INSTALL = f'pip install "jax[cuda12]=={jax.__version__}"'
INSTALL_TPU = f'pip install "jax[tpu]=={jax.__version__}"'


@dataclass(frozen=True)
class Target:
    """Devices to compile for, and what they can do.

    Attributes:
      name: as it was asked for.
      kind: of the devices, as `hardware.kind`.
      hosts: how many hosts they are in; the network joins these.
      per_host: devices of one host.
      hardware: their numbers; of simulated CPU devices, none is known.
      devices: all of them, in order of host, for `jax.sharding.Mesh` or `jaxpar.make_train_step(..., mesh=...)`. They
        hold no arrays (CPU devices do): describe arguments by `jax.ShapeDtypeStruct(shape, dtype, sharding=...)`.
    """

    name: str
    kind: str
    hosts: int
    per_host: int
    hardware: Hardware
    devices: list[jax.Device] = field(repr=False)


def target(name: str, hardware: Hardware | None = None, memory_bytes: float | None = None) -> Target:
    """Devices by name.

    Args:
      name: one of
        "8xH100": count and kind, which fill hosts of `Hardware.per_host`, 8, or are fewer, on one host;
        "32x4xH100": 32 hosts of 4;
        "64xcluster.toml": of the kind that this file describes, see `jaxpar.hardware.kinds.load`;
        "v5e:4x4": a slice of TPUs, by its shape;
        "cpu:8": so many of the CPU devices that `jaxpar.simulate` made.
      hardware: the kind that the name ends in, where the table lacks it; from `load` or `capture`.
      memory_bytes: of one device, in place of its kind's: the compiler schedules for so much.

    Raises:
      ValueError: the name is not understood, its kind is not known, the count does not fill its hosts, no slice has
        this shape, or there are fewer CPU devices.
      ImportError: the compiler for it is not installed; says how to install it.
      RuntimeError: JAX started without `JAX_PLATFORMS=cpu`, and so without the compiler for GPUs.
    """
    if not isinstance(name, str):
        raise ValueError(f"target is a {type(name).__name__}; use a text such as '8xH100', or a Target")
    if (digits := max(map(len, re.findall(r"\d+", name)), default=0)) > 18:
        raise ValueError(f"target={name[:60]!r} has a number of {digits} digits; use at most {_MOST:,} devices")
    with_memory = lambda kind: kind if memory_bytes is None else replace(kind, memory_bytes=int(memory_bytes))
    if cpu := re.fullmatch(r"cpu:(\d+)", name):
        return _cpu(name, int(cpu[1]))
    if tpu := re.fullmatch(r"(\w+):\d+(?:x\d+)*", name):
        return _tpu(name, with_memory(_known(name, tpu[1], hardware)))
    match = re.fullmatch(r"([1-9]\d*)x(?:([1-9]\d*)x)?([^\d:].*)", name)
    if match is None:
        raise ValueError(
            f"target={name!r} is not a count and a known kind; use for example '8xH100', '32x8xH100' (hosts of 8), "
            "'v5e:4x4' or 'cpu:8'"
        )
    first, second, kind = match.groups()
    if (asked := int(first) * int(second or 1)) > _MOST:  # the compiler describes each: 10**9 take 21 GB
        raise ValueError(f"target={name!r} has {asked:,} devices; use at most {_MOST:,}")
    known = load(kind) if kind.endswith(".toml") and hardware is None else _known(name, kind, hardware)
    known = with_memory(known)
    if second:
        return _gpu(name, known, int(first), int(second))
    count, full = int(first), known.per_host
    hosts, rest = divmod(count, full)
    if hosts and rest:
        raise ValueError(
            f"target={name!r}: {count} devices do not fill hosts of {full}; use {hosts * full} or {(hosts + 1) * full}"
        )
    return _gpu(name, known, hosts or 1, full if hosts else count)


def gpu_topology(name: str = "8xH100") -> list[jax.Device]:
    """The devices of `target(name)`."""
    return target(name).devices


def has_memories(device: jax.Device) -> bool:
    """Whether shardings on a device can say in which memory an array is: those that are there have some."""
    return bool(device.addressable_memories())


def mark_on_host(lowered: jax.stages.Lowered, arguments: Sequence[int]) -> None:
    """Puts some arguments of a program for devices without memories into their hosts', which shardings cannot say."""
    module: Any = lowered.compiler_ir("stablehlo")
    main = next(op for op in module.body.operations if op.attributes["sym_name"].value == "main")
    with module.context:
        attributes = list(main.attributes["arg_attrs"])
        for at in arguments:
            own: dict[str, Any] = {each.name: each.attr for each in attributes[at]}
            own["mhlo.memory_kind"] = ir.StringAttr.get("pinned_host")
            attributes[at] = ir.DictAttr.get(own)
        main.attributes["arg_attrs"] = ir.ArrayAttr.get(attributes)


def missing_compiler() -> str:
    """What the CUDA compiler lacks here, as half a sentence ("package jax_cuda12_plugin is not installed"), or ""."""
    for either in (("jax_cuda12_plugin", "jax_cuda13_plugin"), ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")):
        if not any(_found(name) for name in either):
            return f"package {either[0]} is not installed"
    return ""


def _found(name: str) -> bool:
    parent = name.rpartition(".")[0]
    return (not parent or _found(parent)) and importlib.util.find_spec(name) is not None


def _known(name: str, kind: str, hardware: Hardware | None) -> Hardware:
    if hardware is not None:
        if hardware.kind != kind:
            raise ValueError(f"target={name!r} is of {kind!r}, and hardware of {hardware.kind!r}; give both one name")
        return hardware
    if kind not in KINDS:
        raise ValueError(
            f"target={name!r}: {kind!r} is no known kind{nearest(kind)}; describe another in a file, and name it: "
            "'8xcluster.toml'"
        )
    return KINDS[kind]


def _gpu(name: str, hardware: Hardware, hosts: int, per_host: int) -> Target:
    if not hardware.config:
        raise ValueError(
            f"target={name!r}: {hardware.kind} has no config for the compiler; "
            + (f"name a slice of TPUs by its shape, as '{hardware.kind}:4x4'" if _is_tpu(hardware) else "give it one")
        )
    if missing := missing_compiler():
        raise ImportError(f"target={name!r} needs the CUDA compiler, and {missing}; {INSTALL}")
    shape = f"1x{hosts}x{per_host}"  # slices x hosts x devices
    try:
        found = topologies.get_topology_desc("", "cuda", target_config=hardware.target_config, topology=shape)
    except NotImplementedError as error:  # so jax says that its plugin is there and was not loaded
        raise RuntimeError(
            f"target={name!r}: JAX started without the CUDA compiler, as it found no GPU; set JAX_PLATFORMS=cpu first"
        ) from error
    return Target(name, hardware.kind, hosts, per_host, hardware, list(found.devices))


def _tpu(name: str, hardware: Hardware) -> Target:
    if not _is_tpu(hardware):
        raise ValueError(f"target={name!r}: {hardware.kind} are no TPUs, which have shapes; use '8x{hardware.kind}'")
    if not _found("libtpu"):
        raise ImportError(f"target={name!r} needs the TPU compiler, and package libtpu is not installed; {INSTALL_TPU}")
    # Outside Google's cloud, libtpu would wait for the metadata server of the machine that it takes this one for.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    try:
        devices = list(topologies.get_topology_desc(name, "tpu").devices)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"target={name!r} is no slice that the compiler knows: {error}") from error
    return _of_hosts(name, hardware, devices)


def _is_tpu(hardware: Hardware) -> bool:
    return hardware.device_kind.startswith("TPU")


def _cpu(name: str, count: int) -> Target:
    devices = jax.devices("cpu")
    if not 0 < count <= len(devices):
        raise ValueError(
            f"target={name!r}: {len(devices)} CPU devices are there; call jaxpar.simulate({max(count, 1)}) right after "
            "`import jaxpar`, before the first array"
        )
    return _of_hosts(name, Hardware(kind="cpu", device_kind=devices[0].device_kind, per_host=count), devices[:count])


def _of_hosts(name: str, hardware: Hardware, devices: list[jax.Device]) -> Target:
    hosts = len({device.process_index for device in devices})
    return Target(name, hardware.kind, hosts, len(devices) // hosts, hardware, devices)
