"""Which host a device is attached to: with a process for each GPU, a host has as many processes as GPUs.

JAX's devices know their process alone. What identifies the machine of each process they tell each other as they join
(`jp.initialize`). Simulated devices of several processes stand for several hosts, on whatever machine they run; without
`jp.initialize`, and on TPUs, a process is a host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

_hosts: list[int] = []  # the host of each process


def set_machines(machines: Sequence[str]) -> None:
    """`machines`: what identifies that of each process, in their order; "" where nothing does."""
    numbers: dict[str, int] = {}
    _hosts[:] = [numbers.setdefault(machine or f"of process {at}", len(numbers)) for at, machine in enumerate(machines)]


def host_of(device: Any) -> int:
    """The number of the host of a device. Hosts are numbered in the order of their first processes."""
    process = device.process_index
    if process >= len(_hosts) or device.platform != "gpu":
        return process
    # GPUs that are not there have hosts of their own, whatever this run's processes are.
    return process if is_away(device) else _hosts[process]


def is_away(device: Any) -> bool:
    """Whether programs can be compiled for it and not run: one of a `jaxpar.hardware.target`."""
    return type(device.client).__name__ == "CompileOnlyPyClient"


def hosts_of(devices: Any) -> np.ndarray:
    """That of each of an array of devices."""
    return np.vectorize(host_of, otypes=[int])(devices)


def hosts_spanned(mesh: Any, axes: Sequence[str]) -> int:
    """On how many hosts devices are that differ along these axes alone, at most. `mesh` is a `jax.sharding.Mesh`."""
    named = {axis for part in axes for axis in part.rpartition(" of ")[2].split("+")}  # "2 of data+fsdp" too
    hosts = hosts_of(mesh.devices)
    last = [position for position, axis in enumerate(mesh.axis_names) if axis in named]
    lines = np.moveaxis(hosts, last, range(-len(last), 0)).reshape(-1, math.prod(hosts.shape[at] for at in last))
    return max(len({*line}) for line in lines.tolist())


def leaves_host(mesh: Any, axes: Sequence[str]) -> bool:
    """Whether devices that differ along these axes alone are on different hosts."""
    return hosts_spanned(mesh, axes) > 1
