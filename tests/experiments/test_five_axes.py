"""`experiments/five_axes.py`: each program's bytes are the closed form's, compiled for GPUs that are not there."""

from pathlib import Path

import five_axes
import pytest


@pytest.mark.parametrize("cell", five_axes.CELLS, ids=lambda cell: cell.name)
def test_a_cell_fills_its_devices(cell: five_axes.Cell) -> None:
    strategy = five_axes.jp.Strategy.parse(cell.strategy)
    hosts, devices, _ = cell.target.replace("H100", "xH100").split("x", 2)
    sizes = strategy.sizes(int(hosts) * int(devices), int(hosts))
    assert cell.rows % (sizes["data"] * sizes["fsdp"] * sizes["expert"] * strategy.microbatches) == 0


@pytest.mark.battery
@pytest.mark.cuda_compiler
@pytest.mark.parametrize("schedule", ["1f1b", "1f1b-overlap"])
def test_compiled_bytes_are_those_promised(schedule: str, tmp_path: Path) -> None:
    text = f"pipe=2,fsdp=2,expert=4,microbatches=2,precision=bf16,remat=layer,schedule={schedule}"
    cell = five_axes.Cell("small", "mixtral-tiny", "2x8xH100", text, 16)
    found = five_axes.measure(cell, five_axes.Options(layers=4, out=tmp_path))
    rows = {row["name"]: row for row in found["rows"]}
    tokens = rows["all-to-all over expert"]
    assert tokens["compiled"] == tokens["promised"] > 0
    for name in ("all-gather over fsdp", "reduce-scatter over fsdp"):
        assert rows[name]["compiled"] == rows[name]["promised"] > 0
    overflow = rows["all-to-all over expert, overflow"]
    assert 0 < overflow["compiled"] <= overflow["promised"]
    assert found["exposed"] <= found["seconds"]
