"""Accelerators to compile for that this machine does not have.

A compile-only device has a compiler and no memory. On a mesh of them,
`jax.jit(f).trace(...).lower(lowering_platforms=("cuda",)).compile()` gives the scheduled program with its asynchronous
collectives and `memory_analysis()`; it cannot run. Kernels are not autotuned, so their times mean nothing; memory,
collectives, their sizes, groups and overlap do.
"""

import importlib.util
import pathlib
import re

import jax
from jax.experimental import topologies

DEVICES_PER_HOST = 8
CONFIGS = {"H100": "h100_sxm.txtpb"}
INSTALL = 'pip install "jaxpar[cuda12]"'


def gpu_topology(name: str = "8xH100") -> list[jax.Device]:
    """Compile-only GPUs, in order of host; 8 to a host, so "64xH100" is 8 hosts joined by InfiniBand.

    Args:
      name: count and kind, as "8xH100".

    Returns:
      The devices, for `jax.sharding.Mesh` or `jaxpar.make_train_step(..., mesh=...)`. They hold no arrays: describe
      arguments by `jax.ShapeDtypeStruct(shape, dtype, sharding=...)`.

    Raises:
      ValueError: the name is not understood, or the count does not fill its hosts.
      ImportError: the CUDA compiler is not installed; says how to install it.
      RuntimeError: JAX started without `JAX_PLATFORMS=cpu`, and so without the compiler.
    """
    match = re.fullmatch(r"([1-9]\d*)x(\w+)", name)
    if match is None or match[2] not in CONFIGS:
        raise ValueError(f"target={name!r} is not a count and a known kind; use for example '8x{next(iter(CONFIGS))}'")
    count = int(match[1])
    hosts, rest = divmod(count, DEVICES_PER_HOST)
    if hosts and rest:
        raise ValueError(
            f"target={name!r}: {count} devices do not fill hosts of {DEVICES_PER_HOST}; use {hosts * DEVICES_PER_HOST} "
            f"or {(hosts + 1) * DEVICES_PER_HOST}"
        )
    if missing := missing_compiler():
        raise ImportError(f"target={name!r} needs the CUDA compiler, and {missing}; {INSTALL}")
    shape = f"1x{hosts or 1}x{DEVICES_PER_HOST if hosts else count}"  # slices x hosts x devices
    config = pathlib.Path(__file__).with_name(CONFIGS[match[2]]).read_text()
    try:
        return list(topologies.get_topology_desc("", "cuda", target_config=config, topology=shape).devices)
    except NotImplementedError as error:
        raise RuntimeError(
            f"target={name!r}: JAX started without the CUDA compiler, as it found no GPU; set JAX_PLATFORMS=cpu first"
        ) from error


def missing_compiler() -> str:
    """What the CUDA compiler lacks here, as half a sentence ("package jax_cuda12_plugin is not installed"), or ""."""
    for either in (("jax_cuda12_plugin", "jax_cuda13_plugin"), ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")):
        if not any(_found(name) for name in either):
            return f"package {either[0]} is not installed"
    return ""


def _found(name: str) -> bool:
    parent = name.rpartition(".")[0]
    return (not parent or _found(parent)) and importlib.util.find_spec(name) is not None


# Dense peaks of matrix products in TFLOP/s: bf16 and f16; TF32, in which XLA multiplies float32. By the beginning of
# `device_kind`, the longest that fits. From NVIDIA's data sheets (A100 2021, H100 2023, H200 2024, HGX B200 2025, of
# its 8 GPUs), which print twice as much, "with sparsity".
_PEAKS = {
    "NVIDIA A100": (312, 156),
    "NVIDIA H100": (989.4, 494.7),
    "NVIDIA H100 PCIe": (756, 378),
    "NVIDIA H100 NVL": (835, 417.5),
    "NVIDIA H200": (989.4, 494.7),
    "NVIDIA H200 NVL": (835, 417.5),
    "NVIDIA B200": (2250, 1125),
}


def peak_flops(device_kind: str, precision: str) -> float | None:
    """Peak FLOP/s of one device in dense matrix products; None where it is not known.

    Args:
      device_kind: as `jax.Device.device_kind` has it.
      precision: of a `Strategy`, "f32" (TF32 on these GPUs), "bf16" or "f16".

    >>> peak_flops("NVIDIA H100 80GB HBM3", "bf16")
    989400000000000.0
    """
    known = max((kind for kind in _PEAKS if device_kind.startswith(kind)), key=len, default=None)
    return None if known is None else 1e12 * _PEAKS[known][precision == "f32"]
