"""Schedules whose ranks branch: two of them train as one device does, also with other axes, with two messages per slot.

The battery of `test_pipeline.py` tests all of them.
"""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
import tensor_cells
from cells import check
from schedule_cells import SGD, STEPS, Cell, batch_of, check_cell, model_of, one_device, reference

import jaxpar as jp
from jaxpar.models import named
from jaxpar.parallel.pipeline.schedules import Schedule

pytestmark = tensor_cells.SHARED_BATCH

CELLS = (
    Cell("experts", 4, "zb-h1", 1, "p+1", "1", "fsdp=2,zero=3", "none"),
    Cell("loop", 2, "zb-v", 2, "2p", "1", "data=2", "layer"),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "cell", [pytest.param(cell, marks=pytest.mark.xdist_group(f"pipeline {cell.model}")) for cell in CELLS]
)
def test_cell(cell: Cell) -> None:
    check_cell(cell)


@pytest.mark.parametrize(
    "cell",
    [
        tensor_cells.Cell("function", 2, "pipe=2,microbatches=3,schedule=zb-h1", True, "none"),
        *(
            pytest.param(
                tensor_cells.Cell("scanned", 2, f"pipe=2,{beside}", sequence, remat), marks=pytest.mark.battery
            )
            for beside, sequence, remat in (
                ("fsdp=2,zero=3,schedule=zb-h1,microbatches=4", True, "layer"),
                ("data=2,schedule=zb-v,chunks=2,microbatches=5", False, "dots"),
                ("fsdp=2,zero=2,schedule=dualpipe-v,chunks=2,microbatches=4", True, "layer"),
            )
        ),
    ],
)
def test_beside_tensor(cell: tensor_cells.Cell) -> None:
    tensor_cells.check_cell(cell)


@pytest.mark.xdist_group("pipeline experts")
def test_a_strategy_takes_a_table_by_name_as_value_and_from_a_file(tmp_path: Path) -> None:
    """All three give the same table, by which the first cell above trains."""
    named = Schedule("zb-h1", 4, 5)
    file, value = tmp_path / "mine.csv", Schedule.from_table(named.table(), named.placement, "mine")
    file.write_text("\n".join(named.csv()))
    for argument, name in ((named, "zb-h1"), (value, value.label), (str(file), str(file))):
        strategy = jp.Strategy(pipe=4, microbatches=5, schedule=argument)
        step = jp.make_train_step(model_of("experts"), SGD, strategy, mesh=jax.devices()[:4])
        assert str(strategy) == f"pipe=4,schedule={name},microbatches=5"
        assert step.schedule is not None
        assert step.schedule.table() == named.table()
        if argument is not value:
            assert jp.Strategy.parse(str(strategy)).schedule == name
    mismatched = dataclasses.replace(strategy, microbatches=8, schedule=value)
    with pytest.raises(
        ValueError, match=rf"{value.label} has pipe=4, microbatches=5, .* strategy has pipe=4, micro.*=8"
    ):
        jp.make_train_step(model_of("experts"), SGD, mismatched, mesh=jax.devices()[:4])
    with pytest.raises(ValueError, match=r"schedule=none\.csv: there is no such file"):
        Schedule.of("none.csv", 4, 5, 1)


TABLES = {
    # Whole backwards, which ranks run while others run forwards; two chunks in a loop rather than a V.
    "1f1b of the papers": ["0F0,0F1,0B0,0F2,0B1,0B2", "1F0,1B0,1F1,1B1,1F2,1B2"],
    "interleaved": list(Schedule("1f1b", 2, 4, 2).csv()),
    "whole and in halves": ["0F0,0F1,0I0,0F2,0W0,0B1,0B2", "1F0,1B0,1F1,1I1,1F2,1W1,1B2"],
}


@pytest.mark.xdist_group("pipeline experts")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if "halves" in name else pytest.mark.battery) for name in TABLES]
)
def test_tables_from_elsewhere_train(name: str) -> None:
    schedule = Schedule.from_csv(TABLES[name])
    strategy = jp.Strategy(pipe=2, microbatches=schedule.microbatches, chunks=schedule.chunks, schedule=schedule)
    step = jp.make_train_step(model_of("experts"), SGD, strategy, mesh=jax.devices()[:2])
    m = schedule.microbatches
    check(step, model_of("experts"), one_device("experts").first, batch_of(m), STEPS, *reference("experts", m, 1))


@pytest.mark.xdist_group("pipeline experts")
def test_evaluation() -> None:
    """In a V, with its own order of layers, an evaluation gives the loss that a step reports before its update."""
    step = jp.make_train_step(model_of("experts"), SGD, "pipe=2,microbatches=2,schedule=zb-v", mesh=jax.devices()[:2])
    batch = batch_of(2)
    state = step.init(jax.random.key(0), params=one_device("experts").first)
    evaluated = step.evaluate(state, batch)
    _, metrics = step(state, batch)
    np.testing.assert_allclose(evaluated["loss"], metrics["loss"], rtol=1e-5)
    np.testing.assert_allclose(evaluated["balance"], metrics["balance"], rtol=1e-5)


def test_64_bit_numbers() -> None:
    """Under `jax_enable_x64`, integers of two dtypes once addressed the stash of a schedule with halves."""
    with jax.enable_x64(True):
        model = named("llama-tiny", vocab=64, dim=16, layers=2, heads=2, kv_heads=2, ffn=16).model
        step = jp.make_train_step(model, SGD, "pipe=2,microbatches=4,schedule=zb-h1", jax.devices()[:2])
        step.trace({"tokens": np.zeros((8, 17), np.int32)})
