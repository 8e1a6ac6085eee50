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
from typing import Any

import jax
import numpy as np
import optax
import pytest
from ports import free_port
from rich.console import Console
from test_processes import model

import jaxpar as jp
from jaxpar.data.streams import held_out, training
from jaxpar.layout.distributed import Stop
from jaxpar.run.train.progress import Progress, _Bar
from jaxpar.run.train.recorder import read

STEPS = 6


def batches(start: int = 0, rows: int = 16) -> Iterator[dict[str, np.ndarray]]:
    for number in itertools.count(start):
        rng = np.random.default_rng(number)
        yield {
            "x": rng.normal(size=(rows, 12)).astype(np.float32),
            "y": rng.normal(size=(rows, 8)).astype(np.float32),
        }


def trainer(out: Path | None = None, hooks: Any = None, data: Any = batches, **options: Any) -> jp.Trainer:
    keys = ("strategy", "held_out", "about", "mesh", "units")
    optimizer = options.pop("optimizer", optax.adamw(1e-2))
    trainer_options = {key: options.pop(key) for key in keys if key in options}
    loop = jp.Loop(**{"steps": STEPS, "save_every": 2, "evaluate_every": 3, "quiet": True, "out": out} | options)
    trainer_options.setdefault("strategy", "fsdp" if out else "single")
    return jp.Trainer(
        model(),
        optimizer,
        data,
        loop=loop,
        hooks=hooks if isinstance(hooks, list) else [hooks] if hooks else [],
        **trainer_options,
    )


def at(step: int, action: Callable[[], Any]) -> jp.Hook:
    return jp.Hook(on_step=lambda _, metrics: action() if metrics["step"] == step else None)


def losses(out: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in read(out / "metrics.jsonl") if "loss" in line}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, float], bytes]:
    """Return the losses of a run that nobody stopped, and its last parameters."""
    out = tmp_path_factory.mktemp("unbroken")
    state = trainer(out).run()
    assert sorted(losses(out)) == list(range(1, STEPS + 1))
    return losses(out), np.asarray(state.params["layers"]).tobytes()


# -- stop, kill, resume ------------------------------------------------------------------------------------------------


def test_a_run_that_falls_back_to_an_older_checkpoint_compares_that_one(
    tmp_path: Path, unbroken: tuple[dict[int, float], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of the damaged checkpoint was compared among processes, which may find different ones damaged."""
    out = tmp_path / "run"
    trainer(out, steps=4).run()
    path = max((out / "checkpoints" / "4").rglob("d/*"), key=lambda path: path.stat().st_size)
    path.write_bytes(path.read_bytes()[:-8] + bytes(8))
    compared: list[dict[str, Any]] = []
    monkeypatch.setattr("jaxpar.hosts.consistency.compare", lambda _, values: compared.append(values))
    trainer(out, resume="latest-good").run()
    assert {"the last checkpoint": 2} in compared
    assert losses(out) == unbroken[0]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_stopped_run_is_saved_and_goes_on_bit_by_bit(
    number: signal.Signals, code: int, unbroken: Any, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:  # as under nohup, where a run goes on
        signal.signal(number, signal.SIG_DFL)
    old_handler = signal.getsignal(number)
    stopped = trainer(tmp_path / "run", at(3, lambda: signal.raise_signal(number)), quiet=False)
    with pytest.raises(SystemExit) as exit_:
        stopped.run()
    assert exit_.value.code == code
    assert signal.getsignal(number) == old_handler
    shown = capsys.readouterr().out
    assert f"stopped by {number.name} after step {stopped.number}, saved in {tmp_path}" in shown
    assert "resume=True" in shown
    assert 3 <= stopped.number < STEPS
    state = trainer(tmp_path / "run", resume=True).run()
    assert losses(tmp_path / "run") == unbroken[0]
    assert np.asarray(state.params["layers"]).tobytes() == unbroken[1]


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


@pytest.mark.slow
def test_a_killed_run_goes_on_bit_by_bit(unbroken: Any, tmp_path: Path) -> None:
    """The run is killed while a checkpoint is being written, and its log is ahead of that checkpoint."""
    program = f"""
import os, sys
sys.path[:0] = {[str(folder) for folder in Path(__file__).parents[:3]]!r}
from test_trainer import *
trainer(Path({str(tmp_path)!r}), jp.Hook(on_save=lambda trainer, at: at["step"] == 4 and os.kill(os.getpid(), 9))).run()
"""
    killed = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=1800)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()[-3000:]
    assert max(losses(tmp_path)) == 4
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "loss": 1.0}\n{"step": 6, "lo')  # lines that it might have written before the kill
    state = trainer(tmp_path, resume=True).run()
    assert [line["step"] for line in read(tmp_path / "metrics.jsonl")] == list(range(1, STEPS + 1))
    assert losses(tmp_path) == unbroken[0]
    assert np.asarray(state.params["layers"]).tobytes() == unbroken[1]


@pytest.mark.slow
def test_a_run_that_nobody_reads_any_more_is_saved(tmp_path: Path) -> None:
    program = f"""
import sys
sys.path[:0] = {[str(folder) for folder in Path(__file__).parents[:3]]!r}
from test_trainer import *
trainer(Path({str(tmp_path)!r}), quiet=False, strategy="single", steps=100_000, save_every=100_000, print_every=1).run()
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as unread:
        assert unread.stdout is not None
        assert unread.stderr is not None
        for _ in range(3):
            unread.stdout.readline()
        unread.stdout.close()
        assert unread.wait(timeout=1800) == 130, unread.stderr.read().decode()[-3000:]
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
    out, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    out.mkdir()
    elsewhere.mkdir()
    (out / "metrics.jsonl").write_text("{}\n")

    def checkpoints(kind: str) -> None:
        if (out / "checkpoints").is_symlink():
            (out / "checkpoints").unlink()
        (elsewhere / "kept").mkdir(exist_ok=True)
        match kind:
            case "link":
                (out / "checkpoints").symlink_to(elsewhere)
            case "dangling":
                (out / "checkpoints").symlink_to(tmp_path / "gone")
            case "folder":
                (out / "checkpoints" / "3").mkdir(parents=True, exist_ok=True)

    def refused(says: str) -> None:
        with pytest.raises(ValueError, match=says):
            trainer(out, steps=1, overwrite=True).run()
        assert (out / "metrics.jsonl").read_text() == "{}\n"
        assert (elsewhere / "kept").is_dir()
        assert not (out / ".owner").exists()

    checkpoints("link")
    refused(
        r"checkpoints is a link to .*elsewhere, and overwrite=True removes only what lies in .*; remove the link, empty"
    )
    checkpoints("dangling")
    refused(r"checkpoints is a link to .*gone, and overwrite=True .*; remove the link, or name another out=")
    checkpoints("none")
    (out / "loss.png").symlink_to(elsewhere / "loss.png")
    (elsewhere / "loss.png").write_text("mine")
    refused(r"loss.png is a link to .*; remove the link, or name another out=")
    (out / "loss.png").unlink()
    (elsewhere / "loss.png").unlink()
    checkpoints("folder")
    with monkeypatch.context() as patch:
        patch.setattr("os.path.ismount", lambda path: str(path).endswith("3"))
        refused(r"checkpoints/3 is a mount point, which overwrite=True cannot remove; empty it, or name another")
    with monkeypatch.context() as patch:
        patch.setattr("os.access", lambda path, _: not str(path).endswith("3"))
        refused(r"checkpoints/3 cannot be removed, as you may not write to it; make it writable, or name another")
    # The first advice works: a link to an empty folder is used.
    shutil.rmtree(out / "checkpoints")
    checkpoints("link")
    shutil.rmtree(elsewhere / "kept")
    trainer(out, steps=1, overwrite=True).run()
    assert sorted(losses(out)) == [1]
    assert [path.name for path in elsewhere.iterdir()] == ["1"]
    # The other advice works: without the link.
    (out / "checkpoints").unlink()
    trainer(out, steps=1, overwrite=True).run()
    assert [path.name for path in elsewhere.iterdir()] == ["1"]


def test_what_is_not_finite_ends_the_run_and_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    def spoilt(start: int) -> Iterator[Any]:
        for number, batch in enumerate(batches(start), start + 1):
            yield {**batch, "x": batch["x"] * (np.nan if number == 4 else 1)}

    failing = trainer(tmp_path, data=spoilt, save_every=3)
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


@pytest.mark.slow
def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    program = "import sys; from filelock import FileLock; FileLock(sys.argv[1], blocking=False).acquire()"

    def try_other_runs(_: jp.Trainer, at: dict[str, float]) -> None:
        for option in ("resume", "overwrite"):
            with pytest.raises(
                ValueError, match=r"another run is going on in .*; wait for its end, or name another out"
            ):
                trainer(tmp_path, **{option: True}).run()
        process = [sys.executable, "-c", program, str(tmp_path / ".lock")]
        assert "Timeout" in subprocess.run(process, capture_output=True, text=True, timeout=1800).stderr
        refused.append(at["step"])

    refused: list[float] = []
    trainer(tmp_path, jp.Hook(on_save=try_other_runs), steps=2).run()
    assert refused == [2]
    trainer(tmp_path, resume=True, steps=3).run()
    assert sorted(losses(tmp_path)) == [1, 2, 3]


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
def test_data_that_ends_or_raises_costs_no_step(
    error: type[BaseException] | None, tmp_path: Path, unbroken: Any
) -> None:
    def short() -> Iterator[Any]:
        yield from itertools.islice(batches(), 3)
        if error is not None:
            raise error("of the loader")

    says = "of the loader" if error else "the data ended after 3 batches; train for so many steps"
    with pytest.raises(error or ValueError, match=says):
        trainer(tmp_path, data=short()).run()
    assert sorted(losses(tmp_path)) == [1, 2, 3]
    trainer(tmp_path, resume=True).run()
    assert losses(tmp_path) == unbroken[0]


def test_of_several_hosts_one_whose_data_fails_waits_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """It checked the parameters first, which all hosts compute together. So all waited for ever."""

    def failing() -> Iterator[Any]:
        yield next(batches())
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        monkeypatch.setattr("jaxpar.run.train.trainer.all_finite", lambda params: pytest.fail("waits for the others"))
        raise KeyError("of the loader")

    with pytest.raises(KeyError, match="of the loader"):
        trainer(data=failing()).run()


def masked() -> jp.Model:
    def loss(params: Any, batch: Any, key: Any) -> Any:
        error = ((batch["x"] * params["w"]) ** 2).sum(axis=1)
        return jp.Mean((error * batch["mask"]).sum(), batch["mask"].sum())

    return jp.Model(init=lambda key: {"w": jax.numpy.ones((4,))}, loss=loss)


def test_evaluation_is_exact_over_unequal_batches() -> None:
    x = np.random.default_rng(0).normal(size=(37, 4)).astype(np.float32)

    def padded() -> Iterator[dict[str, np.ndarray]]:
        for begin in range(0, 37, 16):
            batch, mask = jp.pad_rows({"x": x[begin : begin + 16]}, 16)
            yield {**batch, "mask": mask}

    held_out_losses = []
    full = [{"x": x[:16], "mask": np.ones(16, np.float32)}]
    jp.Trainer(
        masked(), optax.set_to_zero(), full, "fsdp", jp.Loop(steps=1, quiet=True), held_out=padded,
        hooks=[jp.Hook(on_evaluate=lambda _, metrics: held_out_losses.append(metrics["held_out_loss"]))],
    ).run()  # fmt: skip
    assert held_out_losses == [pytest.approx((x**2).sum(axis=1).mean(), rel=1e-6)]
    with pytest.raises(ValueError, match="ends after one evaluation"):
        trainer(held_out=padded(), steps=1).run()
    with pytest.raises(ValueError, match="no batch to evaluate on"):
        trainer(held_out=[], steps=1).run()


def test_some_of_the_held_out_batches_are_spread_over_all() -> None:
    assert list(held_out(range(10), 1, None)) == list(range(10))
    assert list(held_out(range(10), 1, 3)) == [0, 4, 8]
    assert list(held_out(range(2), 1, 3)) == [0, 1]


def test_hooks_hear_of_everything_in_order_and_may_stop_the_run(tmp_path: Path) -> None:
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
    state = trainer(
        tmp_path, [StoppingHook(), other_hook], held_out=[next(batches())], save_every=4, evaluate_every=2, steps=9
    ).run()
    assert int(state.step) == 5  # the hook was called for step 4 while step 5 ran
    steps = ["start 0", "step 1", "step 2", "evaluate 2", "step 3", "step 4", "evaluate 4", "save 4"]
    assert [f"{name} {int(number)}" for name, number in events[: len(steps)]] == steps
    assert events[-1] == ("end", 0)

    class Typo:
        def on_steps(self, trainer: jp.Trainer, metrics: dict[str, float]) -> None: ...

    with pytest.raises(ValueError, match=r"on_steps, which is not an event.*did you mean 'on_step'"):
        trainer(hooks=[Typo()])
    with pytest.raises(ValueError, match="has none of on_start"):
        trainer(hooks=[print])


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
    ]:
        with pytest.raises(ValueError, match=says):
            jp.Trainer(model(), optax.sgd(0.1), batches, **options)
    with pytest.raises(ValueError, match="held_out is a NoneType; pass a list of batches, or a function"):
        trainer().evaluate()


# -- what is shown and written -----------------------------------------------------------------------------------------


def shown(terminal: bool, width: int, **options: Any) -> str:
    """Return the output of a run, to a terminal or a pipe."""
    run = trainer(held_out=[next(batches())], **options)
    console = Console(file=io.StringIO(), force_terminal=terminal, width=width, color_system=None, legacy_windows=False)
    run.progress.console = console
    run.run()
    return console.file.getvalue()


def test_a_pipe_gets_plain_lines() -> None:
    text = shown(terminal=False, width=80, print_every=2)
    assert text.isascii()
    assert "\x1b" not in text
    assert "\r" not in text
    lines = text.splitlines()
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
    lines = shown(terminal=False, width=80, strategy="ddp").splitlines()
    compiling, evaluating = lines.index("compiling the step"), lines.index("evaluating")
    assert lines[compiling + 1] == "compiling the step, 0 s so far"
    assert lines[evaluating + 1 : evaluating + 4] == 3 * ["evaluating, 0 s so far"]
    assert "held out" in lines[-1]  # and nothing is printed after the end


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


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_step_is_compiled_once(prefetch: int, caplog: pytest.LogCaptureFixture) -> None:
    """Batches on their devices have another type than shapes, for which the step used to be compiled first."""
    with jax.log_compiles():
        trainer(strategy="fsdp", prefetch=prefetch).run()
    assert sum("Compiling jit(_train)" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("width", [80, 40])
def test_a_terminal_gets_a_bar_that_fits(width: int) -> None:
    text = shown(terminal=True, width=width)
    frames = [line for line in text.replace("\r", "\n").splitlines() if "step" in line and "/6" in line]
    assert frames
    progress = Progress(console=Console(file=io.StringIO(), force_terminal=True, width=width))
    assert progress.console.width == width
    plain = [_without_escapes(line) for line in text.replace("\r", "\n").splitlines()]
    bars = [line for line in plain if "━" in line or "rows/s" in line]
    assert bars
    assert max(map(len, bars)) <= width
    assert "\x1b[?25h" in text  # the cursor is back


def _without_escapes(text: str) -> str:
    return re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", text)


def test_metrics_are_json_and_the_plot_is_drawn(tmp_path: Path) -> None:
    units = jp.Units(lines={"guess": 2.0})
    trainer(tmp_path, held_out=[next(batches())], units=units).run()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "held_out_loss" in line] == [3, 6]
    first = next(line for line in lines if "loss" in line)
    names = {"step", "loss", "grad_norm", "finite", "skipped", "seconds", "rows_per_second", "input_share"}
    assert set(first) == names | {"strategy", "devices"}
    assert all(set(line) == names for line in lines[1:] if "loss" in line)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    if list(tmp_path.glob("tensorboard")):
        assert list((tmp_path / "tensorboard").glob("events.*"))


def test_no_steps_explain_and_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert trainer(tmp_path / "run", steps=0, quiet=False).run() is None
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
rank, port, out, steps, resume = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), sys.argv[5] != ""
jp.initialize(f"127.0.0.1:{port}", 2, rank)
from test_trainer import at, batches, signal, trainer
# Only one process gets the signal; the other learns of it.
tell = at(2, lambda: None if resume or rank == 0 else os.kill(os.getpid(), signal.SIGTERM))
often = {"evaluate_every": 1000, "save_every": 1000}
trainer(out, tell, held_out=[next(batches())], steps=steps, resume=resume, quiet=False, **often).run()
"""


def two_processes(out: Path, steps: int, resume: str) -> list[tuple[int, str]]:
    """Return the exit codes and the outputs of two processes."""
    port = str(free_port())
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), port, str(out), str(steps), resume],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [worker.communicate(timeout=1800) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert all(worker.returncode in (0, 143) for worker in workers), outputs
    return [(worker.returncode, text) for worker, (text, _) in zip(workers, outputs, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [1, pytest.param(2, marks=pytest.mark.battery)])
def test_two_hosts_stop_at_one_step_and_go_on(hosts: int, tmp_path: Path) -> None:
    """The run continues on two hosts or on one. `tests/checkpoint` restores a state on two hosts."""
    (first, shown), (second, second_output) = two_processes(tmp_path, 4000, "")
    assert (first, second) == (143, 143)
    assert "stopped by SIGTERM after step" in shown
    assert "step" not in second_output  # Gloo prints in every process
    (saved,) = (int(path.name) for path in (tmp_path / "checkpoints").iterdir())
    if hosts == 2:
        assert [code for code, _ in two_processes(tmp_path, saved + 4, "resume")] == [0, 0]
    else:
        trainer(tmp_path, steps=saved + 4, resume=True, save_every=1000).run()
    alone = tmp_path / "alone"
    trainer(alone, steps=saved + 4, save_every=1000).run()
    assert losses(tmp_path) == pytest.approx(losses(alone), rel=1e-5)
