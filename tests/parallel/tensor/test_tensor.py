"""Tensor and sequence parallelism, alone and beside the other axes, train every model as one device does.

A cell compiles one step and checks gradients, three steps of SGD with momentum, bytes at rest, and the collectives.
The cells of `make test` are a covering array of those on 8 devices, and four-axis meshes on 16.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from cells import covering, pairs_of
from tensor_cells import SGD, SHARED_BATCH, Cell, batch_of, built, check_cell, one_device, product

import jaxpar as jp

pytestmark = SHARED_BATCH


def pairs(cell: Cell) -> set[Any]:
    """Return the pairs of choices in a cell. With other axes, the three models that scan their layers count as one."""
    beside = Cell._fields.index("beside")
    kind = cell.model if cell.model in ("loop", "mlp") else "scanned"
    return {(a, b) for a, b in pairs_of(cell) if a[0] or b[0] != beside} | {(kind, cell.beside)}


CHOSEN = covering(product(), pairs)


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
    assert len(CHOSEN) <= 19


@pytest.mark.parametrize("cell", cells())
def test_cell(cell: Cell) -> None:
    check_cell(cell)


@pytest.mark.xdist_group("tensor loop")
def test_collectives_beside_a_loop_keep_their_order() -> None:
    """Side by side with a loop's, they hung or aborted this step within ten runs (jax 0.10.2)."""
    model, rules = built("loop")
    strategy = "tensor=2,sequence=True,fsdp=2,zero=2,microbatches=2"
    step = jp.make_train_step(model, SGD, strategy, jax.devices()[:4], rules=rules)
    state, batch = step.init(jax.random.key(0), params=one_device("loop").first), batch_of(12)
    losses = []
    for _ in range(30):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.8 * losses[0]


# Pairs of axes, and each axis with every kind of model, ZeRO stage, schedule and option, are in the cells on 8 devices,
# here and in `parallel/pipeline/`. Left for 16 are all four at once, here ZeRO-3 with sequence parallelism and remat.
@pytest.mark.slow
@pytest.mark.parametrize("first", [True, pytest.param(False, marks=pytest.mark.battery)], ids=["first", "others"])
def test_four_axes_on_sixteen_devices(first: bool) -> None:
    """One process has several cells, since its start takes as long as a cell."""
    program = f"import tensor_cells as t; [t.check_cell(cell) for cell in t.FOUR[{':1' if first else '1:'}]]"
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=16")
    env = {**os.environ, "XLA_FLAGS": flags, "PJRT_NPROC": "64", "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=900)
    assert process.returncode == 0, process.stderr[-3000:]
