"""Schedules whose ranks run different operations in one slot: two of them train as one device does, beside other axes
too, and messages are as many as slots. All of them: `test_every_schedule.py`.
"""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
import tensor_cells
from cells import check
from test_pipeline import COUNTS, SGD, STEPS, Cell, batch_of, model_of, one_device, reference

import jaxpar as jp
from jaxpar.inspect.expected import expected

FIRST = (
    Cell("experts", 4, "zb-h1", 1, "p+1", "fsdp=2,zero=3", "none"),
    Cell("loop", 2, "zb-v", 2, "2p", "data=2", "layer"),
)


def cells() -> Iterator[Any]:
    for cell in FIRST:
        marks = [pytest.mark.xdist_group(f"pipeline {cell.model}")]  # the cells of a model share references
        yield pytest.param(cell, marks=marks, id="-".join(map(str, cell)).replace(",", "-"))


def step_of(cell: Cell) -> tuple[Any, dict[str, np.ndarray]]:
    m = COUNTS[cell.microbatches](cell.pipe)
    text = f"pipe={cell.pipe},schedule={cell.schedule},chunks={cell.chunks},microbatches={m},remat={cell.remat}"
    strategy = jp.Strategy.parse(f"{text},{cell.beside}".rstrip(","))
    devices = jax.devices()[: strategy.pipe * strategy.data * strategy.fsdp]  # type: ignore[operator]
    step = jp.make_train_step(model_of(cell.model), SGD, strategy, mesh=devices)
    return step, batch_of(step.replicas * m)


@pytest.mark.parametrize("cell", list(cells()))
def test_cell(cell: Cell) -> None:
    step, batch = step_of(cell)
    rows = step.replicas * step.strategy.microbatches
    check(step, model_of(cell.model), one_device(cell.model).first, batch, STEPS, *reference(cell.model, rows))
    (messages,) = (one for one in expected(step, batch) if one.kind == "collective-permute")
    parts = 2 if cell.model == "experts" else 1  # its balance losses travel along
    assert messages.count == 2 * parts * step.schedule.ticks  # one each way


@pytest.mark.parametrize(
    "cell",
    [
        tensor_cells.Cell("function", 2, "pipe=2,microbatches=3,schedule=zb-h1", True, "none"),
        *(
            pytest.param(
                tensor_cells.Cell(model, 2, f"pipe=2,{beside},{schedule}", sequence, remat), marks=pytest.mark.battery
            )
            for model, beside, schedule, sequence, remat in (
                ("scanned", "fsdp=2,zero=3", "schedule=zb-h1,microbatches=4", True, "layer"),
                ("scanned", "data=2", "schedule=zb-v,chunks=2,microbatches=5", False, "dots"),
                ("linen", "fsdp=2,zero=1", "schedule=zb-h2,microbatches=5", True, "none"),
                ("scanned", "fsdp=2,zero=2", "schedule=dualpipe-v,chunks=2,microbatches=4", True, "layer"),
            )
        ),
    ],
)
def test_beside_tensor(cell: tensor_cells.Cell) -> None:
    tensor_cells.check_cell(cell)


@pytest.mark.xdist_group("pipeline experts")
def test_evaluation() -> None:
    """In a V, whose order of layers is its own: the loss before an update, twice."""
    step, batch = step_of(Cell("experts", 2, "zb-v", 2, "p", "", "none"))
    state = step.init(jax.random.key(0), params=one_device("experts").first)
    alone = step.evaluate(state, batch)
    _, metrics = step(state, batch)
    np.testing.assert_allclose(alone["loss"], metrics["loss"], rtol=1e-5)
    np.testing.assert_allclose(alone["balance"], metrics["balance"], rtol=1e-5)
