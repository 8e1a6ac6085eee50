"""The experiment with a mixture beside a dense model, at its smallest."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.battery
def test_it_writes_losses_and_the_load_of_each_expert(tmp_path: Path) -> None:
    models = ["llama-tiny,layers=1,dim=32", "mixtral-tiny,layers=2,dim=32,head_dim=8,experts=4,capacity=0.5"]
    command = [sys.executable, str(ROOT / "experiments" / "mixture.py"), "--devices", "4", "--steps", "2"]
    command += ["--every", "1", "--rows", "4", "--length", "16", "--out", str(tmp_path), "--models", *models]
    subprocess.run([*command, "--strategies", "fsdp", "expert=2,fsdp=2"], check=True, cwd=tmp_path, timeout=600)
    dense, mixture = json.loads((tmp_path / "mixture.json").read_text())["trials"]
    assert len(dense["losses"]) == len(mixture["losses"]) == 2
    assert not dense["load"]
    assert max(mixture["dropped"]) > 0
    for _, load in mixture["load"]:
        np.testing.assert_allclose(np.sum(load, axis=1), [1, 1], rtol=1e-4)
    assert (tmp_path / "mixture.svg").exists()
