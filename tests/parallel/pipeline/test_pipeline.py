"""Pipelines train every model as one device does, under GPipe and 1F1B, alone and with the data strategies.

The cells are a covering array: every pair of choices is in one of them (`pairs`). `test_slots.py` has schedules whose
ranks branch, and the battery all schedules.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from cells import covering, pairs_of
from schedule_cells import GROUPS, MODELS, SGD, Cell, batch_of, check_cell, deep, product

import jaxpar as jp
from jaxpar.inspect.expected import expected
from jaxpar.inspect.ledger import Ledger

# ZeRO-1 is left out, which optimizers meet in `test_stages.py`, and so is more than one axis beside the pipeline, which
# the cells on 16 devices of `parallel/tensor/test_tensor.py` have.
CHOICES: dict[str, Any] = {
    "model": MODELS,
    "schedule": ("gpipe", "1f1b"),
    "chunks": (1, 2),
    "microbatches": ("p", "p+1", "3p"),
    "rows": ("1",),
    "beside": ("", "data=2", "fsdp=2,zero=2", "fsdp=2,zero=3"),
}


def pairs(cell: Cell) -> set[Any]:
    """Return the pairs of choices that a cell covers.

    The scanned models count as one choice, and loops, which become scans, as another; chunks and remat meet each model.
    """
    kinds = pairs_of(("loop" in cell.model, *cell[1:]))
    return kinds | {(cell.model, "chunks", cell.chunks), (cell.model, "remat", cell.remat)}


def chosen() -> list[Cell]:
    fits = lambda cell: all(getattr(cell, name) in choices for name, choices in CHOICES.items())
    return covering((cell for cell in product() if cell.devices <= 8 and fits(cell)), pairs)


def cells() -> Iterator[Any]:
    for cell in chosen():
        group = pytest.mark.xdist_group(f"pipeline {cell.model}")  # the cells of a model share references
        yield pytest.param(cell, marks=group, id="-".join(map(str, cell)).replace(",", "-"))


@pytest.mark.parametrize("cell", list(cells()))
def test_cell(cell: Cell) -> None:
    check_cell(cell)


def test_covering_array_is_small() -> None:
    assert len(chosen()) <= 14


@pytest.mark.battery
@pytest.mark.parametrize(("model", "pipe"), GROUPS)
def test_every_schedule(model: str, pipe: int | None) -> None:
    """Run the covering array of `schedule_cells.py` in a process with 16 devices, for 8 stages and another axis."""
    program = f"import schedule_cells; schedule_cells.run({model!r}, {pipe})"
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=16")
    folder, tests = Path(__file__).parent, Path(__file__).parents[2]
    python_path = os.pathsep.join(map(str, (tests.parent, tests, folder)))
    env = {**os.environ, "XLA_FLAGS": flags, "PJRT_NPROC": "64", "PYTHONPATH": python_path}
    process = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=7200)
    assert process.returncode == 0, process.stderr[-6000:]


def test_closed_form_has_what_one_part_of_a_slot_makes_for_another() -> None:
    """The closed form counts reductions in one part of a slot whose results another part reads.

    I sums gradients of norms' scales over `tensor`, and the prologue's backward adds them. Counted alone, each part
    lost these reductions, since nothing read their results.
    """
    step = jp.make_train_step(
        deep(layers=4), SGD, "pipe=2,tensor=2,sequence=true,schedule=zb-h1,microbatches=2", mesh=jax.devices()[:4]
    )
    batch = batch_of(2)
    closed, written = expected(step, batch), Ledger.from_jaxpr(step.trace(batch), step.mesh)
    assert written.by("kind", "axes", value="count") == closed.by("kind", "axes", value="count")
    assert written.total("count", kind="all-reduce", axes=("tensor",)) > 2 * 2 * 2  # norms, layers, microbatches
