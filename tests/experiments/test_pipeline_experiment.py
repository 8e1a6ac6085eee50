"""`experiments/pipeline.py`, small: tables equal the closed form, GPipe holds more than 1F1B, files are written."""

import json
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.battery
def test_small(tmp_path: Path) -> None:
    small = ["--devices", "2", "--pipe", "2", "--layers", "2", "--length", "32", "--rows", "2", "--steps", "1"]
    small += ["--schedules", "gpipe", "1f1b", "--microbatches", "8", "--out", str(tmp_path)]
    command = [sys.executable, str(ROOT / "experiments" / "pipeline.py"), *small]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 100
    cells = {cell["name"]: cell for cell in json.loads((tmp_path / "pipeline.json").read_text())["cells"]}
    for cell in cells.values():
        assert cell["table"] == pytest.approx(cell["formula"])
        assert cell["seconds"] > 0
    few, many = cells["1f1b"], cells["gpipe"]
    assert few["slot"] == many["slot"]
    more = (many["slots"] - few["slots"]) * few["slot"]
    # A tick of 1F1B is a forward and a backward, which takes some of it back.
    assert many["temporaries"] - few["temporaries"] > 0.5 * more > 0
    for theme in ("", "-dark"):
        assert matplotlib.image.imread(tmp_path / f"pipeline{theme}.png").shape[1] > 1000
        assert (tmp_path / f"pipeline{theme}.svg").stat().st_size > 10_000


@pytest.mark.battery
def test_layers_that_wait(tmp_path: Path) -> None:
    """No step lasts less than its table, by what ranks wait; how much more is the machine's."""
    small = ["--devices", "4", "--layers", "8", "--waits", "100", "--steps", "1", "--microbatches", "4"]
    small += ["--schedules", "1f1b", "zb-h1", "zb-v:2", "--out", str(tmp_path)]
    command = [sys.executable, str(ROOT / "experiments" / "pipeline.py"), *small]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr
    cells = json.loads((tmp_path / "pipeline.json").read_text())["cells"]
    assert [cell["forwards"] for cell in cells] == [21, 15, 15]  # 3 (m + p - 1), 3 m + p - 1
    for cell in cells:
        assert cell["lasted"] > 0.999 * cell["forwards"]
        assert cell["beside"] > 0


def test_the_measured_bubble_is_what_is_beyond_the_slope() -> None:
    from pipeline import Cell, fit

    p, each = 4, 0.1
    cells = [
        Cell(name="gpipe", microbatches=m, table=0, formula=0, slots=0, seconds=each * (m + p - 1)) for m in (4, 8, 16)
    ]
    fit(cells)
    assert [cell.measured for cell in cells] == pytest.approx([(p - 1) / m for m in (4, 8, 16)])
