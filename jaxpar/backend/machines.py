"""The host of each device. With a process for each GPU, a host has as many processes as GPUs.

A JAX device has only the index of its process. In `jp.initialize`, processes tell each other an identifier of their
machine, and `set_machines` numbers the hosts by it. Without `jp.initialize`, and on TPUs and simulated devices, each
process counts as a host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

_hosts: list[int] = []  # the host of each process; empty before `set_machines`


def set_machines(machines: Sequence[str]) -> None:
    """Number the hosts by an identifier of each process's machine; a process with the identifier "" counts as one."""
    host_numbers: dict[str, int] = {}
    _hosts[:] = [
        host_numbers.setdefault(machine or f"of process {process}", len(host_numbers))
        for process, machine in enumerate(machines)
    ]


def host_of(device: Any) -> int:
    """Return the number of a device's host. Hosts are numbered in the order of their first processes."""
    process = device.process_index
    if process >= len(_hosts) or device.platform != "gpu":
        return process
    # The described GPUs of a target are on described hosts, which have nothing to do with this run's processes.
    return process if is_away(device) else _hosts[process]


def is_away(device: Any) -> bool:
    """Tell whether a device belongs to a `jaxpar.hardware.target`: programs can be compiled for it but not run."""
    return type(device.client).__name__ == "CompileOnlyPyClient"


def hosts_of(devices: Any) -> np.ndarray:
    """Return the host of each device, int with the shape of `devices`."""
    return np.vectorize(host_of, otypes=[int])(devices)


def hosts_spanned(mesh: Any, axes: Sequence[str]) -> int:
    """Return the largest number of hosts in a group of devices that differ only along these axes.

    An axis may also be a combination, such as "2 of data+fsdp".
    """
    axis_names = {axis for part in axes for axis in part.rpartition(" of ")[2].split("+")}
    hosts = hosts_of(mesh.devices)
    dims = [dim for dim, axis in enumerate(mesh.axis_names) if axis in axis_names]
    # [groups, devices of a group]
    groups = np.moveaxis(hosts, dims, range(-len(dims), 0)).reshape(-1, math.prod(hosts.shape[dim] for dim in dims))
    return max(len({*group}) for group in groups.tolist())


def leaves_host(mesh: Any, axes: Sequence[str]) -> bool:
    """Tell whether devices that differ only along these axes are on different hosts."""
    return hosts_spanned(mesh, axes) > 1
