"""A stopped, killed or failed run goes on as if it had never been; a trainer takes anyone's model, data and hooks."""

import io
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax
import pytest
from ports import free_port
from rich.console import Console
from test_processes import model
from workers import started

import jaxpar as jp
from jaxpar.data.streams import held_out, training
from jaxpar.layout.distributed import Stop
from jaxpar.run.train.progress import Progress, _Bar
from jaxpar.run.train.recorder import read

STEPS = 6
TIME_OF_DAY = re.compile(r"\d\d:\d\d:\d\d  ")


def batches(start: int = 0, rows: int = 16) -> Iterator[dict[str, np.ndarray]]:
    for number in itertools.count(start):
        rng = np.random.default_rng(number)
        yield {
            "x": rng.normal(size=(rows, 12)).astype(np.float32),
            "y": rng.normal(size=(rows, 8)).astype(np.float32),
        }


def spoilt(*numbers: int, by: float = np.nan) -> Callable[[int], Iterator[Any]]:
    """Return data whose batches of these steps are multiplied by a number."""

    def data(start: int) -> Iterator[Any]:
        for number, batch in enumerate(batches(start), start + 1):
            yield {**batch, "x": batch["x"] * (by if number in numbers else 1)}

    return data


def trainer(out: Path | None = None, hooks: Any = None, data: Any = batches, **options: Any) -> jp.Trainer:
    optimizer, strategy = options.pop("optimizer", optax.adamw(1e-2)), options.pop("strategy", "single")
    others = {key: options.pop(key) for key in ("held_out", "about", "units") if key in options}
    loop = jp.Loop(**{"steps": STEPS, "save_every": 2, "evaluate_every": 3, "quiet": True, "out": out} | options)
    hooks = hooks if isinstance(hooks, list) else [hooks] if hooks else []
    return jp.Trainer(model(), optimizer, data, strategy, loop, hooks=hooks, **others)


def at(step: int, action: Callable[[], Any]) -> jp.Hook:
    return jp.Hook(on_step=lambda _, metrics: action() if metrics["step"] == step else None)


def losses(out: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in read(out / "metrics.jsonl") if "loss" in line}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """Return the folder of a run that nobody stopped, and its last parameters."""
    out = tmp_path_factory.mktemp("unbroken")
    units = jp.Units(lines={"guess": 2.0})
    state = trainer(out, strategy="fsdp", held_out=[next(batches())], units=units).run()
    return out, np.asarray(state.params["layers"]).tobytes()


def check_goes_on(out: Path, unbroken: tuple[Path, bytes], **options: Any) -> None:
    """Resume a run, and compare all its losses and its last parameters with those of the unbroken run."""
    state = trainer(out, strategy="fsdp", **{"resume": True} | options).run()
    assert [line["step"] for line in read(out / "metrics.jsonl")] == list(range(1, STEPS + 1))
    assert losses(out) == losses(unbroken[0])
    assert np.asarray(state.params["layers"]).tobytes() == unbroken[1]


# -- stop, kill, resume ------------------------------------------------------------------------------------------------


def test_an_older_checkpoint_is_compared(tmp_path: Path, unbroken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of the damaged checkpoint was compared among processes, which may find different ones damaged."""
    trainer(tmp_path, strategy="fsdp", steps=4).run()
    path = max((tmp_path / "checkpoints" / "4").rglob("d/*"), key=lambda path: path.stat().st_size)
    path.write_bytes(path.read_bytes()[:-8] + bytes(8))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "loss": 1.0}\n{"step": 6, "lo')  # lines that it might have written before a kill
    compared: list[dict[str, Any]] = []
    monkeypatch.setattr("jaxpar.hosts.consistency.compare", lambda _, values: compared.append(values))
    check_goes_on(tmp_path, unbroken, resume="latest-good")
    assert {"the last checkpoint": 2} in compared


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_stopped_run_is_saved_and_goes_on_bit_by_bit(
    number: signal.Signals, code: int, unbroken: Any, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:  # as under nohup, where a run goes on
        signal.signal(number, signal.SIG_DFL)
    old_handler = signal.getsignal(number)
    stopped = trainer(tmp_path, at(3, lambda: signal.raise_signal(number)), strategy="fsdp", quiet=False)
    with pytest.raises(SystemExit) as exit_:
        stopped.run()
    assert exit_.value.code == code
    assert signal.getsignal(number) == old_handler
    shown = capsys.readouterr().out
    assert f"stopped by {number.name} after step {stopped.number}, saved in {tmp_path}" in shown
    assert "resume=True" in shown
    assert 3 <= stopped.number < STEPS
    check_goes_on(tmp_path, unbroken)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_in_the_last_step_is_not_told(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process asks the others to stop by SIGTERM. If some of them were leaving already, all hung."""
    sent_signals: list[int] = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(os, "kill", lambda _, signal_number: sent_signals.append(signal_number))
    for last in (False, True):
        if signal.getsignal(number) is signal.SIG_IGN:  # as under nohup
            signal.signal(number, signal.SIG_DFL)
        with Stop() as stop:
            stop.last = last
            signal.raise_signal(number)
        assert stop.signal == number
        assert sent_signals == [signal.SIGTERM]


def test_a_run_that_nobody_reads_any_more_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    options = {"quiet": False, "print_every": 1, "steps": 100_000, "save_every": 100_000}
    with os.fdopen(writer, "w") as unread:
        monkeypatch.setattr("sys.stdout", unread)
        with pytest.raises(SystemExit) as exit_:
            trainer(tmp_path, at(3, lambda: os.close(reader)), **options).run()
    assert exit_.value.code == 130
    assert [int(path.name) for path in (tmp_path / "checkpoints").iterdir()] == [max(losses(tmp_path))]


def test_a_second_ctrl_c_ends_the_process_at_once() -> None:
    program = """
import os, signal, time
from jaxpar.layout.distributed import Stop
with Stop() as stop:
    os.kill(os.getpid(), signal.SIGINT)
    assert stop.after(1)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1000)
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=1800).returncode == -signal.SIGINT


def test_resume_starts_where_there_is_nothing_and_ends_where_all_is_done(tmp_path: Path) -> None:
    steps = []
    hook = jp.Hook(on_start=lambda _, at: steps.append(at["step"]))
    trainer(tmp_path, hook, resume=True, steps=2).run()
    trainer(tmp_path, hook, resume=True, steps=2).run()
    state = trainer(tmp_path, hook, resume=True, steps=3).run()
    assert steps == [0, 2]
    assert int(state.step) == 3
    assert (tmp_path / "checkpoints" / "3").is_dir()  # although the interval of saves is 2


@pytest.mark.slow
def test_another_run_is_neither_resumed_nor_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    trainer(tmp_path, steps=2, about={"lr": 0.01}).run()
    for options, says in [
        ({}, r"already holds a run \(metrics.jsonl, loss.png, checkpoints.*resume.*overwrite"),
        ({"resume": True, "seed": 1}, "seed 0 there and 1 here"),
        ({"resume": True, "about": {"lr": 0.02}}, "lr 0.01 there and 0.02 here"),
        ({"resume": "last"}, "resume=.last.: use True, False or .latest-good."),
    ]:
        with pytest.raises(ValueError, match=says):
            trainer(tmp_path, **{"about": {"lr": 0.01}} | options).run()
    assert sorted(losses(tmp_path)) == [1, 2]
    log = (tmp_path / "metrics.jsonl").read_bytes()
    (tmp_path / "metrics.jsonl").write_bytes(b"\0\xff}\n" + log)
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 1 is b.*remove the line, or the file"):
        trainer(tmp_path, about={"lr": 0.01}, resume=True).run()
    trainer(tmp_path, steps=1, overwrite=True).run()
    assert sorted(losses(tmp_path)) == [1]
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_overwrite_decides_before_it_deletes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If `checkpoints` was a link to another disk, it deleted config, metrics and plot, and then failed."""
    out, kept = tmp_path / "run", tmp_path / "elsewhere" / "kept"
    checkpoints, overwrite = out / "checkpoints", lambda: trainer(out, steps=1, overwrite=True).run()
    out.mkdir()
    kept.mkdir(parents=True)
    (out / "metrics.jsonl").write_text("{}\n")
    (kept / "loss.png").write_text("mine")

    def refused(says: str) -> None:
        with pytest.raises(ValueError, match=says):
            overwrite()
        assert (out / "metrics.jsonl").read_text() == "{}\n"
        assert (kept / "loss.png").read_text() == "mine"
        assert not (out / ".owner").exists()

    for path, target, advice in [
        (checkpoints, kept.parent, "remove the link, empty the folder that it leads to, or name another out="),
        (checkpoints, tmp_path / "gone", "remove the link, or name another out="),
        (out / "loss.png", kept / "loss.png", "remove the link, or name another out="),
    ]:
        path.symlink_to(target)
        refused(f"{path} is a link to {target}, and overwrite=True removes only what lies in {out}; {advice}")
        path.unlink()
    (checkpoints / "3").mkdir(parents=True)
    for name, fake, says in [
        ("os.path.ismount", lambda path: str(path).endswith("3"), "is a mount point, .* cannot remove; empty it, or"),
        ("os.access", lambda path, _: not str(path).endswith("3"), "cannot be removed, .* make it writable, or name"),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(name, fake)
            refused(f"checkpoints/3 {says}")
    # The advice works: a link to an empty folder is used, and no link is needed.
    shutil.rmtree(checkpoints)
    shutil.rmtree(kept)
    for follow_advice in (lambda: checkpoints.symlink_to(kept.parent), checkpoints.unlink):
        follow_advice()
        overwrite()
        assert sorted(losses(out)) == [1]
        assert [path.name for path in kept.parent.iterdir()] == ["1"]


def test_what_is_not_finite_ends_the_run_and_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    failing = trainer(tmp_path, data=spoilt(4), save_every=3)
    with pytest.raises(FloatingPointError, match="step 4: loss is nan and grad_norm is nan: batch leaf x holds nan"):
        failing.run()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["3"]
    assert (tmp_path / "loss.png").exists()


def test_an_update_that_is_not_finite_is_neither_evaluated_nor_saved(tmp_path: Path) -> None:
    """Loss and gradients are computed before the update, so the last step's do not show the fault."""
    failing = trainer(tmp_path, optimizer=optax.sgd(lambda step: np.inf), steps=1, held_out=[next(batches())])
    with pytest.raises(FloatingPointError, match=r"the update of step 1 left parameters that are not finite; try"):
        failing.run()
    assert "held_out_loss" not in (tmp_path / "metrics.jsonl").read_text()
    assert not list((tmp_path / "checkpoints").iterdir())


# -- data, evaluation, hooks -------------------------------------------------------------------------------------------


def test_data_is_a_function_a_list_a_loader_or_an_iterator() -> None:
    from_three = lambda data: [next(batches) for batches in [training(data, 16, 0, start=3)] for _ in range(4)]
    assert from_three([0, 1, 2, 3, 4]) == from_three(itertools.cycle(range(5))) == [3, 4, 0, 1]
    assert from_three(itertools.count) == [3, 4, 5, 6]
    for data, says in [
        (iter(range(5)), "the data ended after 5 batches"),
        ([], "the data ended after 0 batches"),
        (lambda start: iter(range(start, 5)), "the data ended after 5 batches"),
        (3, "data is a int"),
        ({"x": 1}, "data is a dict"),
        (lambda start: None, r"data\(3\) returned NoneType; return an iterator"),
    ]:
        with pytest.raises(ValueError, match=says):
            from_three(data)


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt, None])
def test_data_that_ends_or_raises_costs_no_step(error: Any, tmp_path: Path, unbroken: Any) -> None:
    def short() -> Iterator[Any]:
        yield from itertools.islice(batches(), 3)
        if error is not None:
            raise error("of the loader")

    says = "of the loader" if error else "the data ended after 3 batches; train for so many steps"
    with pytest.raises(error or ValueError, match=says):
        trainer(tmp_path, data=short(), strategy="fsdp").run()
    assert sorted(losses(tmp_path)) == [1, 2, 3]
    check_goes_on(tmp_path, unbroken)


def test_of_several_hosts_one_whose_data_fails_waits_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """It checked the parameters first, which all hosts compute together. So all waited for ever."""

    def failing() -> Iterator[Any]:
        yield next(batches())
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        monkeypatch.setattr("jaxpar.run.train.trainer.all_finite", lambda params: pytest.fail("waits for the others"))
        raise KeyError("of the loader")

    with pytest.raises(KeyError, match="of the loader"):
        trainer(data=failing()).run()


def test_evaluation_is_exact_over_unequal_batches() -> None:
    """The loss of a batch that is masked throughout is 0 / 0: times its weight 0, it made the evaluation NaN."""
    x = np.random.default_rng(0).normal(size=(37, 4)).astype(np.float32)
    full, blank = ({"x": x[:16], "mask": np.full(16, mask, np.float32)} for mask in (1, 0))

    def loss(params: Any, batch: Any, key: Any) -> Any:
        error = ((batch["x"] * params["w"]) ** 2).sum(axis=1)
        return jp.Mean((error * batch["mask"]).sum(), batch["mask"].sum())

    def padded() -> Iterator[dict[str, np.ndarray]]:
        for begin in range(0, 37, 16):
            batch, mask = jp.pad_rows({"x": x[begin : begin + 16]}, 16)
            yield {**batch, "mask": mask}
        yield blank

    masked = jp.Model(init=lambda key: {"w": jax.numpy.ones((4,))}, loss=loss)
    run = jp.Trainer(masked, optax.set_to_zero(), [full], "fsdp", jp.Loop(steps=1, quiet=True), held_out=padded)
    run.run()
    assert run.evaluate()["held_out_loss"] == pytest.approx((x**2).sum(axis=1).mean(), rel=1e-6)
    for data, says in [
        ([blank], "held_out is masked throughout"),
        (padded(), "ends after one evaluation"),
        ([], "no batch to evaluate on"),
        (None, "held_out is a NoneType; pass a list of batches, or a function"),
    ]:
        run.held_out = data
        with pytest.raises(ValueError, match=says):
            run.evaluate()


def test_some_of_the_held_out_batches_are_spread_over_all() -> None:
    assert list(held_out(range(10), 1, None)) == list(range(10))
    assert list(held_out(range(10), 1, 3)) == [0, 3, 6]
    assert list(held_out(range(10), 1, 6)) == [0, 1, 3, 5, 6, 8]  # it took every second one, so 5
    assert list(held_out(range(2), 1, 3)) == [0, 1]


def test_hooks_hear_of_all_in_order_and_may_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, float]] = []

    class StoppingHook:
        def on_start(self, trainer: jp.Trainer, metrics: dict[str, float]) -> None:
            events.append(("start", metrics["step"]))

        def on_step(self, trainer: jp.Trainer, metrics: dict[str, float]) -> None:
            assert {"loss", "grad_norm", "seconds", "rows_per_second"} <= set(metrics)
            events.append(("step", metrics["step"]))
            if metrics["step"] == 4:
                trainer.stop()

        def on_evaluate(self, trainer: jp.Trainer, metrics: dict[str, float]) -> None:
            assert trainer.number == metrics["step"] == int(trainer.state.step)
            events.append(("evaluate", metrics["step"]))

    other_hook = jp.Hook(
        on_save=lambda _, at: events.append(("save", at["step"])), on_end=lambda _, at: events.append(("end", 0))
    )
    options = {"held_out": [next(batches())], "save_every": 4, "evaluate_every": 2, "check_replicas_every": 4}
    run = trainer(tmp_path, [StoppingHook(), other_hook], steps=9, **options)
    monkeypatch.setattr(run.step, "check_replicas", lambda state: events.append(("replicas", int(state.step))))
    assert int(run.run().step) == 5  # the hook was called for step 4 while step 5 ran
    steps = ["start 0", "step 1", "step 2", "evaluate 2", "step 3", "step 4"]
    steps += ["replicas 4", "evaluate 4", "save 4"]
    assert [f"{name} {int(number)}" for name, number in events[: len(steps)]] == steps
    assert events[-1] == ("end", 0)


def test_loops_that_cannot_be_are_refused() -> None:
    for options, says in [
        ({"steps": -1}, "steps=-1 is too small; use 0 or more"),
        ({"evaluate_every": 0}, "evaluate_every=0 is too small; use 1 or more"),
        ({"steps": 2.5}, "steps=2.5 is not a whole number; use one from 0"),  # it ended without a checkpoint
        ({"seed": None}, "seed=None is not a whole number"),
        ({"seed": 2**32}, "seed=4294967296 is too large for jax's random keys; use 4294967295 or less"),
        ({"resume": True}, "resume=True needs the run's folder"),
        ({"resume": True, "overwrite": True, "out": Path("x")}, "contradict"),
    ]:
        with pytest.raises(ValueError, match=says):
            jp.Loop(**options)
    assert jp.Loop(out="runs/x").out == Path("runs/x")  # as a stopped run says it
    for options, says in [
        ({"loop": {"steps": 3}}, "loop is a dict; pass a jp.Loop"),
        ({"hooks": jp.Hook(on_step=print)}, "hooks is a Hook; pass a list of hooks"),
        ({"hooks": [SimpleNamespace(on_steps=print)]}, r"on_steps, which is not an event.*did you mean 'on_step'"),
        ({"hooks": [print]}, "has none of on_start"),
    ]:
        with pytest.raises(ValueError, match=says):
            jp.Trainer(model(), optax.sgd(0.1), batches, **options)


# -- what is shown and written -----------------------------------------------------------------------------------------


def shown(terminal: bool, width: int, **options: Any) -> str:
    """Return the output of a run, to a terminal or a pipe."""
    run = trainer(held_out=[next(batches())], **options)
    console = Console(file=io.StringIO(), force_terminal=terminal, width=width, color_system=None, legacy_windows=False)
    run.progress.console = console
    run.run()
    return console.file.getvalue()


def untimed(text: str) -> list[str]:
    """Return the lines of an output without their time of day."""
    return [TIME_OF_DAY.sub("", line) for line in text.splitlines()]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_pipe_gets_plain_lines_and_a_step_is_compiled_once(prefetch: int, caplog: pytest.LogCaptureFixture) -> None:
    """Batches on their devices have another type than shapes, for which the step used to be compiled first."""
    with jax.log_compiles():
        text = shown(terminal=False, width=80, print_every=2, strategy="fsdp", prefetch=prefetch)
    assert sum("Compiling jit(_train)" in record.getMessage() for record in caplog.records) == 1
    assert text.isascii()
    assert "\x1b" not in text
    assert "\r" not in text
    assert all(TIME_OF_DAY.match(line) for line in text.splitlines())
    lines = untimed(text)
    assert "parameters under" in lines[2]
    assert [line.split("  ")[0] for line in lines[:2] + lines[3:]] == [
        "compiling the step", "compiling and computing the first parameters", "step 1/6", "step 2/6", "evaluating",
        "step 3", "step 4/6", "step 6/6", "evaluating", "step 6",
    ]  # fmt: skip
    assert "rows/s" in lines[3]
    assert "held out" in lines[6]


def test_a_run_says_again_what_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes printed nothing for over a minute while they compiled, and in the last evaluation."""
    monkeypatch.setattr("jaxpar.run.train.progress._REPEAT_SECONDS", 0.02)
    monkeypatch.setattr(jp.Trainer, "evaluate", lambda self: time.sleep(0.2) or {"held_out_loss": 1.0})
    lines = untimed(shown(terminal=False, width=80, strategy="ddp"))
    compiling, evaluating = lines.index("compiling the step"), lines.index("evaluating")
    assert re.fullmatch(r"compiling the step, \d+ s so far", lines[compiling + 1])
    assert all(re.fullmatch(r"evaluating, \d+ s so far", line) for line in lines[evaluating + 1 : evaluating + 4])
    assert "held out" in lines[-1]  # and nothing is printed after the end


def test_a_run_says_that_it_writes_its_last_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plot of the loss, hooks at the end and copies into a bucket took their time in silence."""
    monkeypatch.setattr("jaxpar.run.train.progress._REPEAT_SECONDS", 0.02)
    monkeypatch.setattr("jaxpar.run.train.recorder.plot", lambda *_: time.sleep(0.2))
    lines = untimed(shown(terminal=False, width=80, out=tmp_path / "run"))
    assert all(re.fullmatch(r"writing the last files, \d s so far", line) for line in lines[-3:])


def test_a_report_has_no_time_of_day() -> None:
    assert not TIME_OF_DAY.search(shown(terminal=False, width=80, steps=0))


@pytest.mark.parametrize("terminal", [False, True])
def test_a_quiet_run_says_nothing_at_all(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxpar.run.train.progress._REPEAT_SECONDS", 0.001)
    console = Console(file=io.StringIO(), force_terminal=terminal, quiet=True)
    with Progress(console=console).activity("evaluating"):
        time.sleep(0.02)
    assert not console.file.getvalue()


def test_a_live_bar_shows_what_the_run_is_doing_in_its_own_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line for each activity would push the bar down, and lines that bypass rich would break it."""
    monkeypatch.setattr("jaxpar.run.train.progress._REPEAT_SECONDS", 0.02)
    console = Console(file=io.StringIO(), force_terminal=True, width=60, color_system=None, legacy_windows=False)
    progress = Progress(console=console)
    progress._bar = _Bar(console)
    progress._bar.begin(0, 6)
    progress._bar.move(3, "numbers of step 3")
    with progress.activity("evaluating"):
        time.sleep(0.1)
    assert progress._bar.line.plain == "numbers of step 3"
    progress._bar.stop()
    shown = console.file.getvalue()
    assert "evaluating, 0 s so far" in shown
    frames = [_without_escapes(frame) for frame in re.split("\r", shown)]
    assert all("step 3/6" in frame for frame in frames if "evaluating" in frame)  # each within a frame of the bar


@pytest.mark.parametrize("width", [80, 40])
def test_a_terminal_gets_a_bar_that_fits(width: int) -> None:
    text = shown(terminal=True, width=width)
    plain = [_without_escapes(line) for line in text.replace("\r", "\n").splitlines()]
    assert any("step" in line and "/6" in line for line in plain)
    assert 0 < max(len(line) for line in plain if "━" in line or "rows/s" in line) <= width
    assert "\x1b[?25h" in text  # the cursor is back


def _without_escapes(text: str) -> str:
    return re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", text)


def test_metrics_are_json_and_the_plot_is_drawn(unbroken: Any) -> None:
    out = unbroken[0]
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "held_out_loss" in line] == [3, 6]
    first = next(line for line in lines if "loss" in line)
    names = {"step", "loss", "grad_norm", "finite", "skipped", "seconds", "rows_per_second", "input_share"}
    assert set(first) == names | {"strategy", "devices"}
    assert all(set(line) == names for line in lines[1:] if "loss" in line)
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "tensorboard").exists() == bool(list(out.glob("tensorboard/events.*")))


def test_no_steps_explain_and_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert trainer(tmp_path / "run", strategy="fsdp", steps=0, quiet=False).run() is None
    assert "fsdp" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


# -- several hosts -----------------------------------------------------------------------------------------------------

WORKER = """
import os, sys
from pathlib import Path
sys.path[:0] = ["tests", "tests/run/train"]
import jax
jax.config.update("jax_num_cpu_devices", 4)
import jaxpar as jp
rank, port, out = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
jp.initialize(f"127.0.0.1:{port}", 2, rank)
from test_trainer import at, batches, signal, trainer
# Only one process gets the signal; the other learns of it.
tell = at(2, lambda: None if rank == 0 else os.kill(os.getpid(), signal.SIGTERM))
options = {"steps": 4000, "evaluate_every": 1000, "save_every": 1000, "quiet": False}
trainer(out, tell, strategy="fsdp", held_out=[next(batches())], **options).run()
"""


@pytest.mark.slow
def test_two_hosts_stop_at_one_step_and_go_on(tmp_path: Path) -> None:
    """The run continues on one host. `tests/checkpoint` restores a state on two hosts."""
    port = str(free_port())
    with started([[sys.executable, "-c", WORKER, str(rank), port, str(tmp_path)] for rank in range(2)]) as workers:
        (shown, errors), (second_output, _) = [worker.communicate(timeout=1800) for worker in workers]
    assert [worker.returncode for worker in workers] == [143, 143], errors
    assert "stopped by SIGTERM after step" in shown
    assert "step" not in second_output  # Gloo prints in every process
    (saved,) = (int(path.name) for path in (tmp_path / "checkpoints").iterdir())
    options = {"strategy": "fsdp", "steps": saved + 4, "save_every": 1000}
    trainer(tmp_path, resume=True, **options).run()
    trainer(tmp_path / "alone", **options).run()
    assert losses(tmp_path) == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)
