"""A fault during a run ends it with a clear error, or does not end it. It never changes its numbers."""

import contextlib
import errno
import functools
import importlib.util
import io
import itertools
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from test_processes import model
from test_trainer import at, batches, losses, spoilt, trainer

import jaxpar as jp
from jaxpar.run.train import finite
from jaxpar.run.train.folder import Claim, claim_folder
from jaxpar.run.train.progress import Progress
from jaxpar.run.train.recorder import Recorder, read


@functools.cache
def single() -> Any:
    return jp.make_train_step(model(), optax.adamw(1e-2), "single")


def without(*numbers: int) -> bytes:
    """Return the layers after 8 steps without the batches of these steps."""
    step = single()
    state = step.init(jax.random.key(0))
    for number, batch in zip(range(1, 9), batches(), strict=False):
        if number not in numbers:
            state, _ = step(state, batch)
    return np.asarray(state.params["layers"]).tobytes()


# -- rows --------------------------------------------------------------------------------------------------------------


def test_a_loss_that_may_couple_rows_is_run_once_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the program decides neither case: a mean over the values that are not NaN, without and with NaN."""

    def run(loss: Callable[[Any, Any], Any]) -> tuple[list[str], list[int]]:
        messages, steps = list[str](), list[int]()
        coupled = jp.Model(lambda key: {"w": jax.random.normal(key, (12, 8))}, lambda p, batch, key: loss(p, batch))
        hook = jp.Hook(on_step=lambda _, metrics: steps.append(int(metrics["step"])))
        run_trainer = jp.Trainer(coupled, optax.sgd(0.1), batches, "ddp", jp.Loop(steps=2, quiet=True), hooks=[hook])
        monkeypatch.setattr(run_trainer.progress, "say", messages.append)
        with pytest.warns(UserWarning, match="the loss may couple rows"):
            run_trainer.run()
        return [text for text in messages if text.startswith("rows ")], steps

    def loss_of_some(p: Any, batch: Any) -> jax.Array:  # the number of values depends on the block
        squares = (batch["x"] @ p["w"] - batch["y"]) ** 2
        return jax.numpy.nanmean(jax.numpy.where(batch["y"] > 0, squares, np.nan))

    (message,), steps = run(lambda p, batch: jax.numpy.nanmean((batch["x"] @ p["w"] - batch["y"]) ** 2))
    assert message.startswith("rows are independent: 8 x 1 blocks (replicas x microbatches) of 2 rows, 4 evaluations")
    assert steps == [1, 2]
    with pytest.raises(ValueError, match=r"(?s)rows are COUPLED.*rows='independent'"):
        run(loss_of_some)


# -- loss that is not finite -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("how", "lost"), [("skip", (4,)), ("rollback", (3, 4))])
def test_a_run_goes_on_after_nonfinite_loss(how: str, lost: Any, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The checkpoint before the bad batch is of step 2. Numbers of steps stay numbers of batches, so a resumed run sees
    the same batches.
    """
    options = {"on_nonfinite": how, "data": spoilt(4), "quiet": False}
    state = trainer(tmp_path, steps=8, **options).run()
    assert np.asarray(state.params["layers"]).tobytes() == without(*lost)
    assert int(state.step) == 8
    lines = [line for line in read(tmp_path / "metrics.jsonl") if "loss" in line]
    told = {
        "skip": "; it is not applied",
        "rollback": "; the run goes back to the checkpoint of step 2, and on with the batch of step 5",
    }[how]
    says = "step 4: loss is nan and grad_norm is nan: batch leaf x holds nan at row 0, [0]"
    assert says + told in capsys.readouterr().out
    if how == "skip":
        assert [(line["loss"] is None, line["finite"], line["skipped"]) for line in lines[2:5]] == [
            (False, 1.0, 0), (True, 0.0, 1), (False, 1.0, 1)]  # fmt: skip
    else:
        assert [(line["step"], line["rollbacks"]) for line in lines] == [
            (1, 0), (2, 0), (3, 0), (5, 1), (6, 1), (7, 1), (8, 1)]  # fmt: skip


def test_a_run_ends_with_the_equation(tmp_path: Path) -> None:
    """The equation is found with the state before the step: the run stops there, although steps are checked late."""

    seen: list[int] = []
    hook = jp.Hook(on_step=lambda _, metrics: seen.append(int(metrics["step"])))
    data = spoilt(4, by=1e30)  # whose square is no float32
    failing = trainer(tmp_path, [hook], data, strategy="ddp", on_nonfinite="explain", steps=8)
    says = r"(?s)^step 4: .*\nstep 4: the loss is not finite: .* makes inf at .*\.py"
    with pytest.raises(FloatingPointError, match=says) as error:
        failing.run()
    assert seen == [1, 2, 3]
    assert "the last checkpoint in" in str(error.value)
    assert "no block is finite, nor any row of this block alone" in str(error.value)


def test_an_overflow_by_float16s_scale_ends_a_run_where_nothing_is_applied_any_more() -> None:
    check_metrics = finite.Finite(jp.Loop(on_nonfinite="explain")).check_metrics
    values = {"loss": 1.0, "grad_norm": np.inf}
    assert not check_metrics(1, {**values, "skipped": 1.0})
    with pytest.raises(finite.NotFiniteError, match=r"step 2: grad_norm is inf; .*, by log at line 3"):
        check_metrics(2, {**values, "skipped": 2.0}, explain_origin=lambda: ", by log at line 3", has_stopped=True)


def test_a_run_that_comes_no_further_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finite, "HOPELESS", 2)
    options = {"steps": 20, "save_every": 2}
    words = r"step 4: loss is nan and grad_norm is nan, 2 in a row are not applied"
    with pytest.raises(FloatingPointError, match=words) as error:
        trainer(tmp_path / "skip", on_nonfinite="skip", data=spoilt(3, 4, 5), **options).run()
    assert "on_nonfinite" not in str(error.value)  # it advised the policy in use
    words = r"step 6: .*; the run went back 3 times in a row, at last to the checkpoint of step 4, and"
    with pytest.raises(FloatingPointError, match=words):
        trainer(tmp_path / "back", on_nonfinite="rollback", data=spoilt(*range(3, 20)), **options).run()
    assert sorted(path.name for path in (tmp_path / "back" / "checkpoints").iterdir()) == ["2", "4"]  # of one state
    # Without a checkpoint, the run goes back to the initial values.
    state = trainer(tmp_path / "first", on_nonfinite="rollback", data=spoilt(1), steps=8).run()
    assert np.asarray(state.params["layers"]).tobytes() == without(1)


# -- replicas, kinds of batches, slow input ----------------------------------------------------------------------------


def test_compiling_again_and_slow_input_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    late, clock = [0], time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + late[0])

    def data(start: int) -> Iterator[Any]:
        for number in itertools.count(start):
            if number == 4:
                jax.block_until_ready(slow_run.state)  # the devices are done with their step
                late[0] = 1000  # seconds; no real work takes so long
            yield next(batches(number, rows=8 if number == 2 else 16))

    shares: list[float] = []
    hook = jp.Hook(on_step=lambda _, metrics: shares.append(metrics["input_share"]))
    slow_run = trainer(hooks=hook, data=data, quiet=False, print_every=1, prefetch=0)
    slow_run.run()
    shown = capsys.readouterr().out
    assert shown.count("compiled again") == 1  # not when the first shapes come back
    assert "step 3 is compiled again: rows 8, 16 before (program 2)" in shown
    assert shares[3] > 0.5  # most of the fourth step's time was spent waiting for the fifth batch
    assert "input " in next(line for line in shown.splitlines() if "  step 4/" in line)


# -- the folder --------------------------------------------------------------------------------------------------------


def test_a_folder_that_is_removed_or_taken_ends_the_run(tmp_path: Path) -> None:
    """Such a run ended with status 0 and nothing saved; without its lock two runs destroyed each other's files."""
    out = tmp_path / "removed"

    def remove() -> None:
        while not (out / "checkpoints" / "2").exists():  # `make campaign` covers removal during a save
            time.sleep(0.01)
        shutil.rmtree(out)

    with pytest.raises(ValueError, match=r"removed is no longer this run's: it was removed or moved while"):
        trainer(out, at(3, remove)).run()
    assert not out.exists()
    out = tmp_path / "taken"

    def take() -> None:
        (out / ".owner").write_text(json.dumps({"id": "x", "host": "other", "pid": 7, "began": "1"}))

    with pytest.raises(ValueError, match=r"taken is no longer this run's: process 7 on other has taken it"):
        trainer(out, at(3, take)).run()
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["2"]


def test_of_two_claims_of_a_folder_the_second_is_refused_until_the_first_is_released(tmp_path: Path) -> None:
    first, second = Claim(tmp_path), Claim(tmp_path)
    assert first.take() == ""
    assert second.take().startswith(f"another run, process {os.getpid()}, is going on in {tmp_path}; wait for its end")
    first.release()
    assert second.take() == ""
    assert first.loss_reason().startswith(f"{tmp_path} is no longer this run's: process {os.getpid()} on ")
    second.release()


def test_with_its_lock_and_without_it_a_run_has_its_folder(tmp_path: Path) -> None:
    with claim_folder(jp.Loop(out=tmp_path)) as claim:
        for option in ("resume", "overwrite"):
            says = r"another run is going on in .*; wait for its end, or name another out"
            with pytest.raises(ValueError, match=says):
                claim_folder(jp.Loop(out=tmp_path, **{option: True})).__enter__()
        (tmp_path / ".lock").unlink()
        (tmp_path / "checkpoints").mkdir()
        (tmp_path / ".owner").unlink()
        claim.check()  # hidden files were swept up, and nobody has taken the folder
        with pytest.raises(ValueError, match=rf"another run, process {os.getpid()}, is going on"):
            claim_folder(jp.Loop(out=tmp_path, resume=True)).__enter__()
    assert not (tmp_path / ".owner").exists()
    # A process with the same number but another start time is another process.
    own_claim = Claim(tmp_path)
    assert not own_claim.take()
    owner = json.loads((tmp_path / ".owner").read_text())
    (tmp_path / ".owner").write_text(json.dumps(owner | {"began": "1"}))
    assert not Claim(tmp_path).take()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a file on a full disk")
@pytest.mark.parametrize("name", ["metrics.jsonl", "tensorboard"])
def test_a_full_disk_ends_the_run_with_the_name_of_the_file(name: str, tmp_path: Path) -> None:
    """TensorBoard's writer thread died, and the run waited for it for ever."""
    if name == "tensorboard" and importlib.util.find_spec("tensorboardX") is None:
        pytest.skip("tensorboardX is not installed")
    full_run = trainer(tmp_path, steps=200, save_every=1000)

    def fill() -> None:
        report: Recorder = full_run.report
        if name == "tensorboard":
            events = report._board._events._py_recordio_writer
            events._writer.close()
            events._writer = full
        else:
            report._file.close()
            report._file = full

    full_run.hooks.append(at(2, fill))
    full: Any = open("/dev/full", *(("wb",) if name == "tensorboard" else ("w", 1)))  # noqa: SIM115
    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}/{name}'"):
        full_run.run()
    with contextlib.suppress(OSError):
        full.close()


def test_no_file_is_cut_short_by_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`loss.png` and `config.yaml` were written in place."""
    trainer(tmp_path, steps=2).run()
    picture_bytes = (tmp_path / "loss.png").read_bytes()
    assert sorted(path.name for path in tmp_path.glob(".*")) == [".lock"]
    monkeypatch.setattr("jaxpar.run.train.folder.os.replace", lambda *_: pytest.fail("killed"))
    with pytest.raises(pytest.fail.Exception):
        trainer(tmp_path, steps=3, resume=True).run()
    assert (tmp_path / "loss.png").read_bytes() == picture_bytes
    assert sorted(losses(tmp_path)) == [1, 2]


def test_a_terminal_that_is_gone_ends_the_run_as_sighup_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The failing write comes before the signal, and ended the run without a checkpoint."""

    class GoneTerminal(io.StringIO):
        def flush(self) -> None:
            raise OSError(errno.EIO, "Input/output error")

    signals: list[int] = []
    monkeypatch.setattr("sys.stdout", GoneTerminal())
    monkeypatch.setattr("jaxpar.run.train.progress.discard_output", lambda: None)
    old_handler = signal.signal(signal.SIGHUP, lambda number, _: signals.append(number))
    try:
        Progress().say("step 1")
    finally:
        signal.signal(signal.SIGHUP, old_handler)
    assert signals
    assert set(signals) == {signal.SIGHUP}


# -- ids beyond their limits -------------------------------------------------------------------------------------------

IDS = {"y": 8}
STRATEGIES = ("ddp", "fsdp,microbatches=2", "pipe=2,data=4,microbatches=2", "dp")


def of_ids() -> jp.Model:
    """Return a model of labels with 8 classes. For other labels its loss is NaN, or meaningless."""

    def init(key: jax.Array) -> Any:
        a, b = jax.random.split(key)
        return {"in": jax.random.normal(a, (12, 8)) * 0.3, "layers": jax.random.normal(b, (4, 8, 8)) * 0.2}

    def loss(params: Any, batch: Any, key: jax.Array | None) -> jax.Array:
        x, _ = jax.lax.scan(lambda x, w: (x + jax.numpy.tanh(x @ w), None), batch["x"] @ params["in"], params["layers"])
        return optax.softmax_cross_entropy_with_integer_labels(x, batch["y"]).mean()

    return jp.Model(init=init, loss=loss)


def labelled(wrong: int | None) -> Callable[[int], Iterator[Any]]:
    """Return data whose batch 3 has the label `wrong`, which may be out of range."""

    def data(start: int) -> Iterator[Any]:
        for number in itertools.count(start + 1):
            rng = np.random.default_rng(number)
            y = rng.integers(0, 8, 16)
            y[13] = wrong if number == 3 and wrong is not None else y[13]
            yield {"x": rng.normal(size=(16, 12)).astype(np.float32), "y": y}

    return data


@pytest.mark.parametrize(
    "strategy", STRATEGIES[:1] + tuple(pytest.param(s, marks=pytest.mark.battery) for s in STRATEGIES[1:])
)
def test_a_label_beyond_its_limit_is_named_by_the_step_that_saw_it(strategy: str) -> None:
    """It ended as "loss is nan; try a lower learning rate"."""
    batch = next(labelled(None)(0))
    checks = strategy != "dp"  # against the closed form, which a server with several programs lacks
    steps = [jp.make_train_step(of_ids(), optax.sgd(0.1), strategy, ids=ids, check=checks) for ids in (None, IDS)]
    without_ids, with_ids = [step(step.init(jax.random.key(0)), batch) for step in steps]
    assert float(without_ids[1]["loss"]) == float(with_ids[1]["loss"])
    assert float(with_ids[1]["outside/y"]) == 0
    bad = {**batch, "y": np.where(np.arange(16) < 4, 8, batch["y"])}
    assert float(steps[1](with_ids[0], bad)[1]["outside/y"]) == 0.25
    loop = jp.Loop(steps=5, quiet=True)
    run = jp.Trainer(of_ids(), optax.sgd(0.1), labelled(-7), strategy, loop, held_out=[bad], ids=IDS)
    for action, says in (
        (run.run, "step 3: batch leaf y holds -7 at row 13"),
        (run.evaluate, "held out: batch leaf y holds 8 at row 0"),
    ):
        with pytest.raises(ValueError, match=f"{says}, but limits allow 0 to 7; use the tokenizer"):
            action()


@pytest.mark.slow
def test_labels_that_are_looked_up_where_nothing_is_are_told() -> None:
    """The label -1 trained in silence, as the last class, and for 8 the advice was a lower learning rate."""

    def run(wrong: int, optimizer: optax.GradientTransformation) -> None:
        jp.Trainer(of_ids(), optimizer, labelled(wrong), "ddp", jp.Loop(steps=4, quiet=True)).run()

    says = r"step 3: batch leaf y holds -1 at row 13, and the loss looks it up among 0 to 7 \(.*test_faults.py.*\)"
    with pytest.warns(UserWarning, match=f"{says}, where under jit it reads 7; use ids within that range"):
        run(-1, optax.sgd(0.1))
    with pytest.warns(UserWarning, match="holds 8 at row 13"), pytest.raises(FloatingPointError) as error:
        run(8, optax.sgd(0.1))
    assert str(error.value).startswith("step 3: loss is nan: batch leaf y holds 8 at row 13, and the loss looks it up")
    assert "mend these rows, or leave them out" in str(error.value)
    assert "learning rate" not in str(error.value)
    with pytest.raises(FloatingPointError, match=r"loss is nan.*; try a lower learning rate"):
        run(7, optax.sgd(float("inf")))  # without a warning; with 1e30 the loss is finite on jax 0.12


def test_ids_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match=r"ids=\{'y': 0\}: give the number of ids"):
        jp.make_train_step(of_ids(), optax.sgd(0.1), "ddp", ids={"y": 0})
    step = jp.make_train_step(of_ids(), optax.sgd(0.1), "ddp", ids={"x": 8})
    with pytest.raises(ValueError, match=r"leaf x is float32\[.*\], and ids are integers; name another leaf"):
        step(step.init(jax.random.key(0)), next(labelled(None)(0)))
