"""The published runs: each names its source, and a strategy of as many devices as it ran on."""

import math

import deepseek
import published_throughput
import pytest
from published_blind import BLIND
from published_rows import RUNS, Run

import jaxpar as jp
from jaxpar.models import NAMES


@pytest.mark.parametrize("run", [*RUNS, *BLIND], ids=lambda run: run.name)
def test_a_run_can_be_predicted(run: Run) -> None:
    strategy = jp.Strategy.parse(run.strategy)
    devices = math.prod(int(part) for part in run.target.split("x")[:-1])
    axes = [getattr(strategy, axis) for axis in ("pipe", "data", "fsdp", "expert", "context", "tensor")]
    axis_product = math.prod(size for size in axes if size > 0)
    assert devices == axis_product or (-1 in axes and devices % axis_product == 0)
    assert run.rows % (devices // (strategy.pipe * strategy.tensor * strategy.context) * strategy.microbatches) == 0
    assert run.source
    assert run.tokens > 0
    assert run.model in (*NAMES, *deepseek.SIZES) or run.unsupported


def test_names_are_of_one_run_each() -> None:
    assert len({run.name for run in (*RUNS, *BLIND)}) == len(RUNS) + len(BLIND)
    assert [sum(run.held_out for run in RUNS), sum(run.later for run in RUNS)] == [19, 16]


def test_a_summary_counts_what_is_near() -> None:
    summary = published_throughput.summary([0.8, 0.91, 1.0, 1.09, 1.16])
    assert summary == "5 runs, median 1.00, 3 within 10%, 3 within 15%, 0.80 to 1.16"
