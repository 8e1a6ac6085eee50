"""`experiments/pipeline.py --quick`: bubbles equal the closed form, GPipe holds more than 1F1B, files are written."""

import json
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import pytest

ROOT = Path(__file__).parents[2]


def test_quick(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "experiments" / "pipeline.py"), "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 100
    cells = {cell["name"]: cell for cell in json.loads((tmp_path / "pipeline.json").read_text())["cells"]}
    for cell in cells.values():
        assert cell["bubble"] == pytest.approx(cell["expected"])
    few, many = cells["1f1b"], cells["gpipe"]
    assert few["slot"] == many["slot"]
    more = (many["slots"] - few["slots"]) * few["slot"]
    # A tick of 1F1B is a forward and a backward, which takes some of it back.
    assert many["temporaries"] - few["temporaries"] > 0.5 * more > 0
    for theme in ("", "-dark"):
        assert matplotlib.image.imread(tmp_path / f"pipeline{theme}.png").shape[1] > 1000
        assert (tmp_path / f"pipeline{theme}.svg").stat().st_size > 10_000
