"""Tensor and sequence parallelism, alone and beside the other axes, train every model as one device does.

A cell compiles one step and checks gradients, three steps of SGD with momentum, bytes at rest, and the collectives.
The cells of `make test` are a covering array of those on 8 devices, and four-axis meshes on 16.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cells import covering
from tensor_cells import FOUR, Cell, check_cell, product

CHOSEN = covering(product())


def cells() -> list[Any]:
    marks = lambda cell: [] if cell in CHOSEN else [pytest.mark.battery]
    return [
        pytest.param(
            cell,
            marks=[pytest.mark.xdist_group(f"tensor {cell.model}"), *marks(cell)],  # they share references
            id="-".join(map(str, cell)).replace(",", "-"),
        )
        for cell in product()
    ]


def test_covering_array_is_small() -> None:
    assert len(CHOSEN) + len(FOUR) <= 40


@pytest.mark.parametrize("cell", cells())
def test_cell(cell: Cell) -> None:
    check_cell(cell)


@pytest.mark.parametrize("model", sorted({cell.model for cell in FOUR}))
def test_four_axes_on_sixteen_devices(model: str) -> None:
    program = "import sys, tensor_cells as t; [t.check_cell(c) for c in t.FOUR if c.model == sys.argv[1]]"
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=16")
    env = {**os.environ, "XLA_FLAGS": flags, "PJRT_NPROC": "64", "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run([sys.executable, "-c", program, model], env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
