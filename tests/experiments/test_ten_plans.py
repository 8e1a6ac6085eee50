"""`experiments/ten_plans.py`: its questions can be asked, it goes on where it was, plans find the best known."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import ten_plans

from jaxpar.strategy import as_strategy
from jaxpar.strategy.axes import ROWS

ROW = {
    "top": 16,
    "found": "fsdp=8,precision=bf16",
    "seconds": 1.0,
    "known": "data=8,precision=bf16",
    "known_seconds": 2.0,
    "ratio": 0.5,
    "compiled": 16,
    "ended_early": False,
}


@pytest.mark.parametrize("name", ten_plans.CASES)
def test_the_best_known_fills_the_devices_and_the_rows(name: str) -> None:
    case = ten_plans.CASES[name]
    devices = int(case.target.partition("x")[0])
    for known in case.known:
        strategy = as_strategy(known)
        sizes = strategy.sizes(devices, max(1, devices // 8))
        assert math.prod(sizes.values()) == devices
        assert case.rows % (math.prod(sizes[axis] for axis in ROWS) * strategy.microbatches) == 0


def test_a_row_that_is_there_is_not_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    computed: list[str] = []

    def row(name: str, top: int, cpu: int) -> dict[str, Any]:
        computed.append(name)
        if name == "llama2-13b" and len(computed) == 2:
            raise KeyboardInterrupt
        return {**ROW, "case": name}

    monkeypatch.setattr(ten_plans, "row", row)
    options = ten_plans.Options(only=("gpt2", "llama2-13b"), results=tmp_path / "rows")
    with pytest.raises(KeyboardInterrupt):
        ten_plans.main(options)
    assert [json.loads(line)["case"] for line in options.results.read_text().splitlines()] == ["gpt2"]
    ten_plans.main(options)
    assert computed == ["gpt2", "llama2-13b", "llama2-13b"]
    assert "| gpt2 | `fsdp=8` | 1.000 | `data=8` | 2.000 | 0.50 | 16 |" in capsys.readouterr().out


@pytest.mark.battery
@pytest.mark.cuda_compiler
@pytest.mark.parametrize("name", ten_plans.CASES)
def test_a_plan_finds_what_is_known_to_be_best(name: str) -> None:
    found, known = ten_plans.planned(ten_plans.CASES[name])
    assert found.lines[0].seconds <= 1.05 * known.lines[0].seconds, f"{found.best} for {known.best}"
