"""Runs with a deadline: which number of devices is compiled, which is estimated, days and money, signals, mistakes."""

import contextlib
import dataclasses
import io
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console
from test_plan import ADAM, BATCH, H100, MODEL, cpu_target, line_of

import jaxpar as jp
from jaxpar.backend.text import WIDTH, size
from jaxpar.forecast.plan import progress
from jaxpar.forecast.plan.estimates import Estimator
from jaxpar.forecast.plan.planner import Planner
from jaxpar.forecast.plan.run import PlannedRun, RunPlan, plan_run
from jaxpar.run.cli import plan as command
from jaxpar.run.cli.commands import main
from jaxpar.run.cli.plan import PlanOptions

# FLOPs alone take time: twice the devices take half of it.
SLOW = dataclasses.replace(H100, peaks={"bf16": 1e9}, memory_bandwidth=1e15, collective_latency=0.0)
SLOWER = 1.25  # a program's seconds / its closed form
STEPS = 10**10


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, jp.Strategy]]:
    """Replace compiling, and return the list of (devices, strategy), which grows."""
    programs: list[tuple[int, jp.Strategy]] = []

    def line_fields(self: Planner, strategy: jp.Strategy) -> Any:
        programs.append((len(self.target.devices), strategy))
        line = vars(line_of("ddp", matmul=SLOWER * self.estimator.estimate(strategy).seconds, exposed=0.0))
        names = ("memory", "prediction", "kernels", "links", "exposed", "sent", "bubble", "compile_seconds")
        return {name: line[name] for name in names}

    monkeypatch.setattr(Planner, "_line_fields", line_fields)
    return programs


def planners(examined: list[int], counts: tuple[int, ...] = (1, 2, 4, 8), hardware: Any = SLOW) -> Iterator[Planner]:
    """Yield planners for these numbers of devices, and note for which."""
    estimator = Estimator(MODEL, ADAM, cpu_target(hardware, counts[0]), BATCH)
    for devices in counts:
        examined.append(devices)
        yield Planner(estimator.for_target(cpu_target(hardware, devices)), cache=False)


def bound(devices: int) -> float:
    """Return the seconds of a step of any strategy that keeps all devices busy, by closed forms."""
    return Estimator(MODEL, ADAM, cpu_target(SLOW), BATCH).estimate(jp.Strategy(data=8, precision="bf16")).seconds * (
        8 / devices
    )


def run_of(seconds: float, price: float | None = None) -> PlannedRun:
    """Return a run whose steps may take so long."""
    return PlannedRun(STEPS * 100.0, 100, STEPS * seconds / 86_400, price)


def planned(run: PlannedRun, examined: list[int] | None = None, **options: Any) -> RunPlan:
    return plan_run(planners([] if examined is None else examined), run, "a model", top=2, **options)


def test_only_what_may_meet_the_deadline_is_compiled(compiled: list[Any]) -> None:
    """Two devices miss it by their closed forms, four by their programs; eight meet it."""
    plan = planned(run_of(1.1 * bound(4)), examined := [])
    assert examined == [1, 2, 4, 8]
    assert [row.compiled for row in plan.rows] == [0, 0, 2, 2]
    assert {devices for devices, _ in compiled} == {4, 8}
    assert plan.answer == plan.rows[-1]
    for row in plan.rows:
        assert row.seconds == pytest.approx(SLOWER * bound(row.devices), rel=0.05)


def test_one_count_beyond_the_first_that_meets_it_is_estimated(compiled: list[Any]) -> None:
    plan = planned(run_of(1.3 * bound(2), price=2.0), examined := [])
    assert examined == [1, 2, 4]
    assert [row.compiled for row in plan.rows] == [0, 2, 0]
    assert {devices for devices, _ in compiled} == {2}
    assert plan.ratios == (pytest.approx(SLOWER),)
    text = str(plan)
    assert all(len(line) <= WIDTH for line in text.splitlines()), text
    starred = [line for line in text.splitlines() if line.startswith("*") and "compiled" in line]
    assert len(starred) == 1
    (row,) = [row for row in plan.rows if row.compiled]
    days = STEPS * row.seconds / 86_400
    hours = 48 * days
    assert f"1 host (2 cpu): {days:,.1f} days for 1T tokens" in " ".join(text.split())
    numbers = ["1", "2", f"{days:,.1f}", f"{hours:,.0f}", f"{2 * hours:,.0f}", "compiled"]
    assert starred[0].removeprefix("*").split()[:6] == numbers
    assert text.count("estimate ") >= 2
    words = " ".join(text.split())
    assert "times 1.25" in words
    assert f", {row.memory / 1e9:.1f} of {size(row.usable, '.1f')} each" in words
    assert row.memory <= row.usable
    assert "--target 2xcpu, with --batch" in words


def test_where_none_meets_it_the_fastest_is_compiled(compiled: list[Any]) -> None:
    plan = planned(run_of(0.5 * bound(8)))
    assert plan.answer is None
    assert [row.compiled for row in plan.rows] == [0, 0, 0, 2]
    assert "no count finishes 1T tokens" in str(plan)
    assert "the fastest is 1 host (8 cpu)" in " ".join(str(plan).split())


def test_a_count_that_is_given_is_compiled(compiled: list[Any]) -> None:
    """And it is said whether it is late."""
    late = plan_run(planners([], (2,)), run_of(0.5 * bound(2)), "a model", searched=False, top=1)
    assert [row.compiled for row in late.rows] == [1]
    assert "not compiled" not in str(late)
    assert late.answer is None
    assert str(late).startswith("too late: 1 host (2 cpu): ")
    assert "no count" not in str(late)


def test_a_count_that_does_not_divide_the_rows_is_refused(compiled: list[Any]) -> None:
    """It was "nothing fits", though memory was not the reason."""
    with pytest.raises(ValueError, match=r"no strategy is valid for \d+ rows on .* \(7 devices\): .* they divide"):
        plan_run(planners([], (7,)), run_of(1.3 * bound(2)), "a model", searched=False, top=1)
    assert not compiled


def test_state_that_does_not_fit_is_not_searched(compiled: list[Any]) -> None:
    """Its candidates would be offload and context, whose closed forms took minutes for large models."""
    small = dataclasses.replace(SLOW, memory_bytes=100_000)  # parameters and optimizer take 129 kB
    plan = plan_run(planners([], (1, 2), small), run_of(1.3 * bound(2)), "a model", top=2)
    assert [row.strategy is None for row in plan.rows] == [True, False]
    assert "129 kB of state" in str(plan)


def test_a_signal_leaves_a_table_that_says_that_it_is_not_complete(
    compiled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    line_fields = Planner._line_fields

    def interrupted(self: Planner, strategy: jp.Strategy) -> Any:
        if len(compiled) == 1:
            raise KeyboardInterrupt
        return line_fields(self, strategy)

    monkeypatch.setattr(Planner, "_line_fields", interrupted)
    plan = planned(run_of(1.1 * bound(4)))
    assert plan.interrupted
    assert [row.compiled for row in plan.rows] == [0, 0, 1]
    assert str(plan).startswith("not complete: ")
    assert str(plan).endswith("Interrupted: this table is not complete.")

    monkeypatch.setattr(Estimator, "estimate", interrupted)  # before the first count has closed forms
    assert planned(run_of(1.0)).rows == ()


def test_progress_is_printed_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan in a log was silent for minutes."""
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.01)
    output = io.StringIO()
    best = line_of("fsdp=8", matmul=1.0, exposed=0.5)
    with progress.PlanProgress(Console(file=output, width=20)) as bar:
        task = bar.add_task("", total=6)
        bar.advance(task)
        bar.compiling(task, "8xH100", jp.Strategy(data=8), best)
        while "compile" not in output.getvalue():
            time.sleep(0.01)
    expected = "8xH100: compile data=8 (1 of at most 6 done, best so far: 1,500 ms by fsdp=8)"
    assert expected in output.getvalue().splitlines()


# -- the command -------------------------------------------------------------------------------------------------------

DEADLINE = ["--tokens", "2T", "--days", "30"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--tokens", "2T", "--days", "0"], "--days 0 is no deadline; use a number of days above 0: --days 30"),
        (["--tokens", "2T", "--days", "nan"], "--days nan is no deadline"),
        (["--days", "30"], "--days 30 is the deadline of a run, which needs a length; add --tokens 2T"),
        (["--tokens", "2T"], "names no number of devices; give it, as 8xH100, or add --days 30 to search"),
        ([], "names no number of devices; give it, as 8xH100, or add --tokens 2T --days 30 to search"),
        ([*DEADLINE, "--price", "-1"], "--price -1 is no price; use a number from 0, for an hour of one device: 2.5"),
        ([*DEADLINE, "--tokens", "many"], "--tokens many is no number above 0 of tokens; write it as 300B, 2T or"),
        ([*DEADLINE, "--tokens", "2000"], "--tokens 2000 is less than one batch, 1,024 rows of 4,096 tokens; give the"),
        ([*DEADLINE, "--json"], "--days prints one table of days and takes no --json; leave one of the two out"),
        ([*DEADLINE, "--target", "H1000"], "did you mean H100"),
        ([*DEADLINE, "--target", "H100:64"], "use '64xH100'"),
        ([*DEADLINE, "--model", "resnet50"], "and none are usual for resnet50; add --batch 1024"),
    ],
)
def test_mistakes_are_named(words: list[str], says: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["plan", "--model", "llama2-13b", "--target", "H100", *words])
    assert exit_.value.code == 2
    assert says in capsys.readouterr().err


def test_their_advice_is_taken() -> None:
    PlanOptions(target="H100", tokens="2T", days=30)
    PlanOptions(target="cluster.toml", tokens="300B", days=30, price=2.5)
    PlanOptions(target="8xH100", tokens="1.5e12")
    PlanOptions(target="64xH100", tokens="2T", days=30, model="resnet50", batch=1024)
    assert [command.tokens_of(PlanOptions(tokens=text)) for text in ("300B", "2T", "1.5e12")] == [300e9, 2e12, 1.5e12]
    assert command._usual_batch(PlanOptions(model="resnet50", batch=1024))[0] == 1024


def test_a_usual_batch_is_said() -> None:
    for model, rows, length, tokens in (
        ("llama2-13b", 1024, 4096, "4.2 M"), ("llama3-8b", 512, 8192, "4.2 M"), ("gpt2", 512, 1024, "524.3 k"),
    ):  # fmt: skip
        found = command._usual_batch(PlanOptions(model=model))
        assert found == (rows, length, f", a usual batch of {tokens} tokens, which --batch and --seq change")
    assert command._usual_batch(PlanOptions(model="llama2-13b", batch=64, seq=2048)) == (64, 2048, "")


@pytest.mark.cuda_compiler
@pytest.mark.parametrize("dropped", [False, True])
def test_sigterm_prints_the_table_and_exits_with_143(
    dropped: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Any
) -> None:
    """The exception of a signal that arrived in the garbage collector was dropped, and the search went on."""
    estimate = Estimator.estimate

    def terminated(self: Estimator, strategy: jp.Strategy, exact: bool = True) -> Any:
        with contextlib.suppress(KeyboardInterrupt) if dropped else contextlib.nullcontext():
            os.kill(os.getpid(), signal.SIGTERM)
        return estimate(self, strategy, exact)

    monkeypatch.setattr(Estimator, "estimate", terminated)
    model = "llama-tiny,layers=1,dim=16,heads=2,kv_heads=2,ffn=32"
    words = ["plan", "--model", model, "--target", "1xH100", "--batch", "1", "--seq", "32", "--cache", str(tmp_path)]
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with pytest.raises(SystemExit) as exit_:
        main([*words, "--tokens", "1M", "--days", "1"])
    assert exit_.value.code == 143
    assert "this table is not complete" in capsys.readouterr().out
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers


@pytest.mark.cuda_compiler
def test_sigterm_ends_a_background_job_whose_shell_lets_it_ignore_ctrl_c(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Any
) -> None:
    """SIGTERM was passed on as SIGINT, which such a job ignores: the plan went on."""
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        test_sigterm_prints_the_table_and_exits_with_143(False, monkeypatch, capsys, tmp_path)
    finally:
        signal.signal(signal.SIGINT, handler)
