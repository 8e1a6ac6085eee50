"""The experiments for hosts with several devices, at their smallest: each writes its record and its pictures.

What does not take a device is tested in this process; the commands run in the battery.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from jax.sharding import Mesh
from report import pictures, record

ROOT = Path(__file__).parents[2]
TINY = {
    "scaling": ["--counts", "1", "2", "--strategies", "fsdp", "pp", "--steps", "1", "--rows", "8", "--length", "16"],
    "precision": ["--precisions", "f32", "f16", "--steps", "4", "--rows", "4", "--length", "16"],
    "collectives": ["--ops", "all_reduce", "send_recv", "--largest", "16k", "--repeats", "1", "--iterations", "1"],
    "pipeline": [
        *("--pipe", "2", "--layers", "2", "--length", "32", "--rows", "2", "--steps", "1"),
        *("--schedules", "gpipe", "1f1b", "--microbatches", "8"),
    ],
}


def run(name: str, *arguments: str, launch: tuple[str, ...] = ()) -> str:
    """What a script prints in a process of its own."""
    command = [sys.executable, *launch, str(ROOT / "experiments" / f"{name}.py"), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def tiny(name: str, out: Path) -> tuple[str, dict[str, Any]]:
    """What a script prints, and its record."""
    printed = run(name, "--devices", "2", *TINY[name], "--out", str(out))
    assert max(map(len, printed.splitlines())) <= 100
    for theme in ("", "-dark"):
        assert matplotlib.image.imread(out / f"{name}{theme}.png").shape[1] > 1000
        assert (out / f"{name}{theme}.svg").stat().st_size > 10_000
    return printed, json.loads((out / f"{name}.json").read_text())


@pytest.mark.battery
def test_scaling(tmp_path: Path) -> None:
    _, found = tiny("scaling", tmp_path)
    cells = {(c["strategy"], c["devices"], c["rows"]): c for c in found["cells"]}
    # Weak 8 and 16 rows, strong 16: on two devices they are the same.
    assert sorted(cells) == [(s, n, rows) for s in ("fsdp", "pp") for n, rows in ((1, 8), (1, 16), (2, 16))]
    assert all(c["tokens"] == pytest.approx(c["rows"] * 16 / c["seconds"]) and not c["error"] for c in cells.values())
    assert cells["fsdp", 2, 16]["explained"] < cells["fsdp", 1, 16]["explained"]


@pytest.mark.battery
def test_precision(tmp_path: Path) -> None:
    _, found = tiny("precision", tmp_path)
    full, half = found["trials"]
    assert half["losses"] == pytest.approx(full["losses"], rel=0.02)
    assert half["losses"] != full["losses"]
    assert half["state"] == full["state"]
    assert half["kept"] < full["kept"]
    assert half["sent"]["float16"] > 0
    assert (half["skipped"], half["scale"]) == (0, 2**15)


@pytest.mark.battery
def test_collectives(tmp_path: Path) -> None:
    printed, found = tiny("collectives", tmp_path)
    assert "no network" in printed
    (rows,) = found["rows"].values()
    assert [(row["op"], row["bytes"], row["wrong"]) for row in rows] == [
        (op, size, 0) for op in ("all_reduce", "send_recv") for size in (4096, 16384)
    ]


@pytest.mark.battery
def test_pipeline(tmp_path: Path) -> None:
    """Tables equal the closed form, and GPipe holds more than 1F1B."""
    _, found = tiny("pipeline", tmp_path)
    cells = {cell["name"]: cell for cell in found["cells"]}
    for cell in cells.values():
        assert cell["table"] == pytest.approx(cell["formula"])
        assert cell["seconds"] > 0
    few, many = cells["1f1b"], cells["gpipe"]
    assert few["slot"] == many["slot"]
    more = (many["slots"] - few["slots"]) * few["slot"]
    # A tick of 1F1B is a forward and a backward, which takes some of it back.
    assert many["temporaries"] - few["temporaries"] > 0.5 * more > 0


@pytest.mark.battery
def test_a_pipeline_of_layers_that_wait(tmp_path: Path) -> None:
    """No step lasts less than its table, by what ranks wait; how much more is the machine's."""
    small = ["--devices", "4", "--layers", "8", "--waits", "100", "--steps", "1", "--microbatches", "4"]
    run("pipeline", *small, "--schedules", "1f1b", "zb-h1", "zb-v:2", "--out", str(tmp_path))
    cells = json.loads((tmp_path / "pipeline.json").read_text())["cells"]
    assert [cell["forwards"] for cell in cells] == [21, 15, 15]  # 3 (m + p - 1), 3 m + p - 1
    for cell in cells:
        assert cell["lasted"] > 0.999 * cell["forwards"]
        assert cell["beside"] > 0


@pytest.mark.battery
def test_optimizers(tmp_path: Path) -> None:
    """Losses of AdamW and Muon at every rate, and a picture of the best."""
    small = ["--devices", "2", "--steps", "12", "--every", "6", "--model", "llama-tiny,layers=1,dim=32"]
    run("optimizers", *small, "--adamw", "1e-3", "3e-3", "--muon", "1e-2", "--out", str(tmp_path))
    trials = json.loads((tmp_path / "optimizers.json").read_text())["trials"]
    rates = [(trial["optimizer"], trial["rate"]) for trial in trials]
    assert rates == [("adamw", 1e-3), ("adamw", 3e-3), ("muon", 1e-2)]
    for trial in trials:
        assert len(trial["losses"]) == 12
        assert [step for step, _ in trial["held_out"]] == [6, 12]
    assert (tmp_path / "muon.svg").exists()


@pytest.mark.battery
def test_mixture(tmp_path: Path) -> None:
    """Losses of a dense model and of a mixture, and the load of each expert."""
    models = ["llama-tiny,layers=1,dim=32", "mixtral-tiny,layers=2,dim=32,head_dim=8,experts=4,capacity=0.5"]
    small = ["--devices", "4", "--steps", "2", "--every", "1", "--rows", "4", "--length", "16"]
    run("mixture", *small, "--models", *models, "--strategies", "fsdp", "expert=2,fsdp=2", "--out", str(tmp_path))
    dense, mixture = json.loads((tmp_path / "mixture.json").read_text())["trials"]
    assert len(dense["losses"]) == len(mixture["losses"]) == 2
    assert not dense["load"]
    assert max(mixture["dropped"]) > 0
    for _, load in mixture["load"]:
        np.testing.assert_allclose(np.sum(load, axis=1), [1, 1], rtol=1e-4)
    assert (tmp_path / "mixture.svg").exists()


@pytest.mark.battery
def test_two_processes(tmp_path: Path) -> None:
    """Under `jaxpar launch` they join, measure on the devices of each and of both, and one of them writes."""
    launch = ("-m", "jaxpar", "launch", "--processes", "2", "--devices", "2", "--")
    small = [*TINY["collectives"], "--out", str(tmp_path / "c")]
    run("collectives", *small, launch=launch)
    rows = json.loads((tmp_path / "c" / "collectives.json").read_text())["rows"]
    assert sorted(rows) == ["over all hosts", "within a host"]
    small = ["--counts", "2", "4", *TINY["scaling"][3:], "--strategies", "fsdp", "--out", str(tmp_path / "s")]
    run("scaling", *small, launch=launch)
    cells = json.loads((tmp_path / "s" / "scaling.json").read_text())["cells"]
    assert sorted((c["devices"], c["rows"], c["error"]) for c in cells) == [(2, 16, ""), (2, 32, ""), (4, 32, "")]


# -- without devices ---------------------------------------------------------------------------------------------------


def test_efficiency() -> None:
    """Of twice the devices: twice the tokens per second is 1, on accelerators; simulated ones share what there is."""
    from scaling import Cell, efficiency

    make = lambda n, rows, tokens: Cell(strategy="ddp", devices=n, rows=rows, tokens=tokens)
    cells = [make(1, 4, 100.0), make(1, 8, 110.0), make(2, 8, 180.0)]
    weak, strong = (efficiency(cells[2], cells, kind, per_device=True) for kind in ("weak", "strong"))
    assert (weak, strong) == (pytest.approx(0.9), pytest.approx(180 / 220))
    assert efficiency(cells[1], cells, "weak", per_device=True) is None
    assert efficiency(cells[2], cells, "weak", per_device=False) == pytest.approx(1.8)


def test_a_strategy_that_does_not_fit_is_left_out() -> None:
    from scaling import Options, cells_of

    cells, left_out = cells_of(Options(strategies=("tensor=4", "ddp"), rows=2), [1, 2, 4])
    assert left_out == ["tensor=4 on 1", "tensor=4 on 2"]
    assert [(c.strategy, c.devices, c.rows) for c in cells] == [
        *[("tensor=4", 4, 8), ("ddp", 1, 2), ("ddp", 1, 8), ("ddp", 2, 4), ("ddp", 2, 8), ("ddp", 4, 8)]
    ]


def test_every_process_runs_as_many_collectives() -> None:
    """By size, whatever their clocks say."""
    from collectives import Options, effort

    counts = [effort(Options(), size).iterations for size in (1 << 10, 1 << 26, 1 << 32)]
    assert counts == [20, 4, 1]
    assert effort(Options(), 1024).seconds == float("inf")
    assert Options(smallest="1k", largest="20k", factor=4).sizes == [1024, 4096, 16384]


def test_data_sheets_stand_in_the_picture_and_the_table(tmp_path: Path) -> None:
    import collectives
    from collective_timing import Measurement
    from collectives import Options, draw, table

    options = Options(ops=("all_reduce",), smallest="1k", largest="4k")
    rows = {"all devices": [Measurement("all_reduce", n, 1e-5, 100.0, 175.0, 0, 1) for n in options.sizes]}
    known = {"link, data sheet": 450.0, "link, of which collectives reach": 371.0}
    pictures(tmp_path / "picture", lambda ink: draw(rows, options, "8 x H100", known, ink))
    assert (tmp_path / "picture-dark.svg").exists()
    mesh = collectives.meshes()
    assert [type(mesh) for mesh, _ in mesh.values()] == [Mesh]
    (share,) = [list(column.cells) for column in table(rows, options, known).columns if "sheet" in str(column.header)]
    assert share == ["39%"]


def test_the_measured_bubble_is_what_is_beyond_the_slope() -> None:
    from pipeline import Cell, fit

    p, each = 4, 0.1
    cell = lambda m: Cell(name="gpipe", microbatches=m, table=0, formula=0, slots=0, seconds=each * (m + p - 1))
    fit(cells := [cell(m) for m in (4, 8, 16)])
    assert [cell.measured for cell in cells] == pytest.approx([(p - 1) / m for m in (4, 8, 16)])


def test_record_holds_the_options(tmp_path: Path) -> None:
    from precision import Options

    record(tmp_path / "new" / "x.json", Options(out=tmp_path), trials=[1])
    found = json.loads((tmp_path / "new" / "x.json").read_text())
    assert found["options"]["out"] == str(tmp_path)
    assert found["trials"] == [1]


@pytest.mark.parametrize(("name", "options", "says"), [
    ("scaling", {"strategies": ("fsdpp",)}, "did you mean"),
    ("scaling", {"strategies": ("dp",)}, "compare.py"),
    ("precision", {"precisions": ("f8",)}, "one of f32, bf16, f16"),
    ("collectives", {"ops": ("all_redduce",)}, "use all_reduce"),
    ("pipeline", {"schedules": ("1f1b:two",)}, "1f1b:2"),
])  # fmt: skip
def test_what_does_not_fit_is_said_before_anything_runs(name: str, options: dict[str, Any], says: str) -> None:
    module = __import__(name)
    with pytest.raises(ValueError, match=says):
        module.Options(**options)
