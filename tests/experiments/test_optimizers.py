"""The experiment with Muon beside AdamW, at its smallest."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.battery
def test_it_writes_losses_of_both_and_draws_the_best(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "experiments" / "optimizers.py"), "--devices", "2", "--steps", "12"]
    command += ["--every", "6", "--model", "llama-tiny,layers=1,dim=32", "--out", str(tmp_path)]
    subprocess.run([*command, "--adamw", "1e-3", "3e-3", "--muon", "1e-2"], check=True, cwd=tmp_path, timeout=600)
    trials = json.loads((tmp_path / "optimizers.json").read_text())["trials"]
    assert [(trial["optimizer"], trial["rate"]) for trial in trials] == [
        ("adamw", 1e-3),
        ("adamw", 3e-3),
        ("muon", 1e-2),
    ]
    assert all(len(trial["losses"]) == 12 and [step for step, _ in trial["held_out"]] == [6, 12] for trial in trials)
    assert (tmp_path / "muon.svg").exists()
