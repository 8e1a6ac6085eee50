"""Experts on ranks of two processes: gradients are those of one process."""

from pathlib import Path

import pytest
from two_processes import check_two


@pytest.mark.battery
@pytest.mark.parametrize("name", ["dropless", "grouped", "einsum"])
def test_gradients_of_two_processes_are_those_of_one(name: str, tmp_path: Path) -> None:
    check_two(tmp_path / "grads.npz", "expert_cells", name, "expert=2")
