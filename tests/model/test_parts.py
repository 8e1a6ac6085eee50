"""`part_of_rows`: the rows of a batch that a host passes follow from the place of its devices in the mesh."""

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxpar.model.batches import part_of_rows
from jaxpar.strategy.axes import AXES


def parts(sizes: dict[str, int], hosts: int, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return the part of each of `hosts` hosts, which have the 8 devices of a mesh in order."""
    devices = np.array([SimpleNamespace(process_index=i * hosts // 8) for i in range(8)], object)
    mesh: Any = SimpleNamespace(axis_names=AXES, devices=devices.reshape([sizes.get(axis, 1) for axis in AXES]))
    parts_of_hosts = []
    monkeypatch.setattr(jax, "process_count", lambda: hosts)
    for host in range(hosts):
        monkeypatch.setattr(jax, "process_index", lambda host=host: host)
        parts_of_hosts.append(part_of_rows(mesh))
    return parts_of_hosts


def test_hosts_that_hold_the_same_rows_have_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts of one sequence were taken for two parts of the rows."""
    assert parts({"data": 2, "fsdp": 4}, 2, monkeypatch) == [(0, 2), (1, 2)]
    assert parts({"pipe": 2, "data": 4}, 2, monkeypatch) == [(0, 1), (0, 1)]
    assert parts({"context": 2, "tensor": 4}, 2, monkeypatch) == [(0, 1), (0, 1)]
    assert parts({"data": 2, "context": 4}, 4, monkeypatch) == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert parts({"data": 2, "context": 2, "tensor": 2}, 2, monkeypatch) == [(0, 2), (1, 2)]


def test_hosts_that_share_some_rows_give_global_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = np.array([SimpleNamespace(process_index=i) for i in (0, 0, 0, 0, 1, 1, 2, 2)], object)
    shape = [{"pipe": 2, "data": 4}.get(axis, 1) for axis in AXES]
    mesh: Any = SimpleNamespace(axis_names=AXES, devices=devices.reshape(shape))
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    with pytest.raises(
        ValueError, match=r"of 4 blocks of a batch the hosts have \[0, 1, 2, 3\], \[0, 1\], \[2, 3\]; use"
    ):
        part_of_rows(mesh)
