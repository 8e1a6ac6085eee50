"""With a process for each GPU, hosts are machines: a host has as many processes as GPUs."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxpar.backend import machines
from jaxpar.collectives.compiling import compiler_options
from jaxpar.hardware.devices import target
from jaxpar.layout.mesh import make_mesh
from jaxpar.strategy import Strategy
from jaxpar.strategy.axes import AXES


@pytest.fixture(autouse=True)
def two_machines_of_four() -> Iterator[None]:
    """Set eight processes, alternating between two machines, as some launchers number them."""
    machines.set_machines(["a", "b"] * 4)
    yield
    machines.set_machines([])


def gpu(process: int, platform: str = "gpu") -> Any:
    """Return a stand-in for a device of a process."""
    return SimpleNamespace(process_index=process, platform=platform, client=None)


def mesh(devices: Any, **sizes: int) -> Any:
    """Return a stand-in for a mesh with all axes of a strategy."""
    shape = [sizes.get(axis, 1) for axis in AXES]
    array = np.array(devices, object).reshape(shape)
    return SimpleNamespace(devices=array, axis_names=AXES, shape=dict(zip(AXES, shape, strict=True)), size=array.size)


def test_gpus_are_of_machines_and_simulated_devices_of_processes() -> None:
    assert machines.hosts_of([gpu(process) for process in range(8)]).tolist() == [0, 1] * 4
    assert machines.hosts_of([gpu(process, "cpu") for process in range(8)]).tolist() == [*range(8)]
    assert machines.host_of(gpu(9)) == 9  # a process that was not set counts as a host
    machines.set_machines(["", "", "a", "a"])  # without an identifier a process counts as a host
    assert machines.hosts_of([gpu(process) for process in range(4)]).tolist() == [0, 1, 2, 2]


def test_axes_that_stay_within_a_machine() -> None:
    """Each process was once taken for a host: every axis seemed to leave it, and got compiler options for networks."""
    by_machine = sorted(map(gpu, range(8)), key=machines.host_of)
    hsdp = mesh(by_machine, data=2, fsdp=4)
    assert [machines.leaves_host(hsdp, (axis,)) for axis in ("data", "fsdp")] == [True, False]
    combined = "xla_gpu_all_gather_combine_threshold_bytes"
    assert combined not in (compiler_options(hsdp, ("fsdp",)) or {})
    assert combined in (compiler_options(mesh(by_machine, fsdp=8), ("fsdp",)) or {})


def test_hsdp_counts_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """hsdp once made as many replicas as GPUs and sharded nothing; tensor=4 seemed to leave hosts of one device."""
    monkeypatch.setattr("jaxpar.layout.mesh.host_of", lambda device: device.id % 2)
    hsdp = make_mesh(Strategy.parse("hsdp"))
    assert (hsdp.shape["data"], hsdp.shape["fsdp"]) == (2, 4)
    assert [device.id for device in hsdp.devices.flat] == [0, 2, 4, 6, 1, 3, 5, 7]
    make_mesh(Strategy.parse("data=2,tensor=4"))


@pytest.mark.cuda_compiler
def test_devices_that_are_not_there_have_their_own_hosts() -> None:
    described = target("2x4xH100")
    assert machines.hosts_of(described.devices).tolist() == [0] * 4 + [1] * 4
