"""Schedules whose ranks run different operations in one slot: each trains as one device does, alone and beside the
other axes; messages are as many as slots; no temporaries grow with microbatches.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
import tensor_cells
from cells import check, covering
from test_pipeline import (
    BESIDE,
    BLOCKS,
    LAYERS,
    LENGTH,
    MODELS,
    SGD,
    STEPS,
    Cell,
    batch_of,
    model_of,
    one_device,
    reference,
)

import jaxpar as jp
from jaxpar.inspect.expected import expected
from jaxpar.parallel.pipeline.schedules import Schedule
from jaxpar.tables import SCHEDULES

CHUNKS = {name: 2 if recipe.placement == "V" else 1 for name, recipe in SCHEDULES.items()}
NAMES = [name for name, chunks in CHUNKS.items() if Schedule(name, 2, 4, chunks).branches]
COUNTS = {"1": lambda p: 1, "p": lambda p: p, "p+1": lambda p: p + 1, "2p": lambda p: 2 * p, "3p": lambda p: 3 * p}


def product() -> Iterator[Cell]:
    for model, pipe, name, count, beside, remat in itertools.product(
        MODELS, (2, 4, 8), NAMES, COUNTS, BESIDE, ("none", "layer")
    ):
        if name == "dualpipe-v" and COUNTS[count](pipe) < 2 * pipe:
            continue  # it wants a microbatch for each stage
        devices = pipe * (1 if not beside else 4 if beside.startswith("data=2,") else 2)
        if devices <= 8 and pipe * CHUNKS[name] <= (BLOCKS if "loop" in model else LAYERS):
            yield Cell(model, pipe, name, CHUNKS[name], count, beside, remat)


FIRST = (
    Cell("experts", 4, "zb-h1", 1, "p+1", "fsdp=2,zero=3", "none"),
    Cell("loop", 2, "zb-v", 2, "2p", "data=2", "layer"),
)


def cells() -> Iterator[Any]:
    """Two, and in the battery every pair of choices."""
    for cell in (*FIRST, *covering(product())):
        marks = [pytest.mark.xdist_group(f"pipeline {cell.model}")]  # the cells of a model share references
        marks += [] if cell in FIRST else [pytest.mark.battery]
        yield pytest.param(cell, marks=marks, id="-".join(map(str, cell)).replace(",", "-"))


def step_of(cell: Cell) -> tuple[Any, dict[str, np.ndarray]]:
    m = COUNTS[cell.microbatches](cell.pipe)
    text = f"pipe={cell.pipe},schedule={cell.schedule},chunks={cell.chunks},microbatches={m},remat={cell.remat}"
    strategy = jp.Strategy.parse(f"{text},{cell.beside}".rstrip(","))
    devices = jax.devices()[: strategy.pipe * strategy.data * strategy.fsdp]  # type: ignore[operator]
    step = jp.make_train_step(model_of(cell.model), SGD, strategy, mesh=devices)
    return step, batch_of(step.replicas * m)


@pytest.mark.filterwarnings("ignore:pipe=. with microbatches=1")
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


@pytest.mark.battery
@pytest.mark.xdist_group("pipeline experts")
@pytest.mark.parametrize("name", NAMES)
def test_memory_does_not_grow_with_microbatches(name: str) -> None:
    """But for rows, keys and the table itself: temporaries hold as many activations as the table says."""

    def temporaries(m: int) -> int:
        strategy = f"pipe=4,schedule={name},chunks={CHUNKS[name]},microbatches={m}"
        step = jp.make_train_step(model_of("experts"), SGD, strategy, mesh=jax.devices()[:4])
        return step.compile(batch_of(m)).memory_analysis().temp_size_in_bytes

    residual = (LENGTH - 1) * 12 * 4  # bytes of one microbatch between two layers
    assert temporaries(48) - temporaries(16) < (48 - 16) * residual
