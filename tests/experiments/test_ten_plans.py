"""`experiments/ten_plans.py`: its questions can be asked, and what a plan finds is within 5% of the best one known."""

import math

import pytest
import ten_plans

from jaxpar.strategy import as_strategy


@pytest.mark.parametrize("name", ten_plans.CASES)
def test_the_best_known_fills_the_devices_and_the_rows(name: str) -> None:
    case = ten_plans.CASES[name]
    devices = int(case.target.partition("x")[0])
    strategy = as_strategy(case.best)
    sizes = strategy.sizes(devices, max(1, devices // 8))
    assert math.prod(sizes.values()) == devices
    assert case.rows % (sizes["data"] * sizes["fsdp"] * strategy.microbatches) == 0


@pytest.mark.battery
@pytest.mark.cuda_compiler
@pytest.mark.parametrize("name", ten_plans.CASES)
def test_a_plan_finds_what_is_known_to_be_best(name: str) -> None:
    share, found, known = ten_plans.ratio(ten_plans.CASES[name])
    assert share <= 1.05, f"{found.best} for {known.best}"
