"""Commands that train nothing: what they take, what their help shows, and what reaches the terminal."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

import jaxpar
from jaxpar.forecast.plan.line import Line
from jaxpar.forecast.plan.ranking import Plan
from jaxpar.run.cli import plan
from jaxpar.run.cli.commands import main
from jaxpar.run.cli.model_sources import load_user_model
from jaxpar.run.cli.options import TrainOptions, named_model
from jaxpar.strategy import PRESETS, Strategy

TINY = "llama-tiny,layers=1,dim=16,heads=2,kv_heads=1,ffn=16"
USER_MODULE = """
import jax, jax.numpy as jnp, jaxpar as jp
LOSS = lambda params, batch, key: jnp.square(batch["x"] @ params["w"]).mean()
def make():
    batch = {"x": jax.ShapeDtypeStruct((1, 8), jnp.float32)}
    return jp.Model(init=lambda key: {"w": jnp.ones((8, 8))}, loss=LOSS), batch
def three(): return 3
def of(size): return size
"""


def output_of(words: list[str], code: int, capsys: pytest.CaptureFixture) -> str:
    """Run a command that exits with `code`, and return its output."""
    with pytest.raises(SystemExit) as exit_:
        main(words)
    output = capsys.readouterr()
    assert exit_.value.code == code, output
    return output.err + output.out


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "mine_of_test.py").write_text(USER_MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mine_of_test", raising=False)
    return "mine_of_test"


def test_explain_shows_a_model_of_ones_own(user_module: str, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    # `jaxpar explain` said that there is no such command (did you mean 'plan'?).
    main(["explain", "--model", f"{user_module}:make", "--strategy", "fsdp", "--rows", "8", "--picture", "found.svg"])
    shown = capsys.readouterr().out
    for part in ("fsdp=-1: 8 x cpu", "64 parameters", "all-gather", "expected v found", "written: found.svg"):
        assert part in shown
    assert (tmp_path / "found.svg").read_text().startswith("<?xml")


def test_models_that_are_none_are_named(user_module: str, capsys: pytest.CaptureFixture) -> None:
    for reference, message in (
        (f"{user_module}:nope", r"mine_of_test has no function 'nope'; write def nope\(\): return model, data"),
        (f"{user_module}:three", r"returned a int; return \(model, data\)"),
        (f"{user_module}:of", r"is of\(size\), and is called as of\(\): .*'size'; write it as def of\(\)"),
        ("no_such_module:make", "there is no module 'no_such_module'"),
    ):
        with pytest.raises(ValueError, match=message):
            load_user_model(reference)
    with pytest.raises(ValueError, match=r"--model \./folder: there is no folder/config\.json"):
        named_model("./folder", 8)
    shown = output_of(["train", "--model", f"{user_module}:make"], 2, capsys)
    assert "returned a model and a batch, and training takes data: return model, data" in shown


@pytest.mark.parametrize("command", ["check", "explain", "plan", "train"])
def test_help_has_no_broken_words(command: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = output_of([command, "--help"], 0, capsys)
    assert max(map(len, shown.splitlines())) <= 80  # what is longer is broken by the terminal, anywhere
    if command in ("check", "explain"):
        for option in ("--steps", "--lr", "--resume", "--sample", "--out", "--keep", "--seed", "--export", "--profile"):
            assert option not in shown
        assert f"{command} has no option '--steps'" in output_of([command, "--steps", "3"], 2, capsys)
    if command != "plan":
        words = set(re.findall(r"\w+", shown))
        assert words.issuperset({*PRESETS, "microbatches", "tensor", "sequence", "remat", "schedule", "rule"})


def test_a_runs_config_serves_to_check_and_explain(tmp_path: Path) -> None:
    from jaxpar.run.cli.options import CheckOptions, ExplainOptions, read

    (path := tmp_path / "config.yaml").write_text(TrainOptions(steps=7, lr=1e-4, model=TINY).dump())
    for options in (CheckOptions, ExplainOptions):
        assert options(**read(options, path)).model == TINY


# A process that writes what C++ code writes (absl, XLA, Gloo), and then aborts.
NOISY = """
import os, sys, {name}
sys.argv, sys.orig_argv = {argv!r}, {argv!r}
spec = importlib.util.spec_from_file_location("quiet", {path!r})
quiet = importlib.util.module_from_spec(spec); spec.loader.exec_module(quiet)
if quiet.is_command(): quiet.filter_start()
write = lambda line: os.write(2, line)
write(b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\\n")
write(b"I0000 00:00:1795355066.684374   25575 cudart_stub.cc:31] Could not find cuda drivers on your machine\\n")
print("ours", file=sys.stderr)
os.write(1, b"[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1\\n")
os.write(1, b"[Gloo] timed out\\n")
print("our answer", flush=True)
write(b"E0000 00:00:1795355066.684374   25575 rendezvous.cc:1] an error\\n")
write(b"F0000 00:00:1795355066.684374   25575 check.cc:1] last words")
os.abort()
"""


@pytest.mark.parametrize(
    ("argv", "level", "noise"),
    [(["/usr/bin/jaxpar"], None, False), (["user.py"], None, True), (["/usr/bin/jaxpar"], "0", True)],
)
def test_only_errors_of_cpp_reach_the_terminal(
    argv: list[str], level: str | None, noise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every command began with 6 to 16 lines of absl, and under srun and mpirun continued with lines of Gloo. These are
    filtered now, but the last words before an abort are not.
    """
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    if level is not None:
        monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", level)
    path = str(Path(jaxpar.__file__).parent / "backend" / "quiet.py")
    script = NOISY.format(name="importlib.util", argv=argv, path=path)
    completed = subprocess.run([sys.executable, "-S", "-c", script], capture_output=True, text=True, timeout=1800)
    assert ("absl::InitializeLog" in completed.stderr) == ("cudart_stub" in completed.stderr) == noise
    assert all(part in completed.stderr for part in ("ours", "an error", "last words")), completed.stderr
    assert ("peer ranks" in completed.stdout) == noise
    assert all(part in completed.stdout for part in ("our answer", "[Gloo] timed out")), completed.stdout


def test_a_sweep_ends_where_rows_are_no_faster(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    requests: list[Any] = []

    def fake_plan(model: Any, batch: Any, target: str, optimizer: Any, **options: Any) -> Plan:
        rows = jax.tree.leaves(batch)[0].shape[0]
        requests.append((rows, options["memory_bytes"]))
        prediction = {"mfu": None, "rows_per_second": min(rows, 16), "seconds": 1.0, "devices": 8}
        strategy = Strategy.parse("fsdp=8")
        line = Line(strategy, None, 40, {"total": rows}, prediction, [], {}, {}, [], 0.0, 0.0)
        return Plan(target, "8 x H100", 40, rows, options["length"], (line,), {}, {}, False)

    monkeypatch.setattr(plan, "plan", fake_plan)
    words = ["plan", "--model", "gpt-tiny", "--seq", "64", "--batch", "8", "--memory", "40GB"]
    main([*words, "--sweep", "batch", "--tokens", "1B", "--price", "2"])
    assert requests == [(8, 40e9), (16, 40e9), (32, 40e9)]
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.replace("\n  ", " ").splitlines()]
    assert [line.partition(" rows")[0] for line in lines] == ["8", "16", "32"]
    assert "22.6 days for 1B tokens; 4,340 device hours at 2 are 8,681: fsdp=8" in lines[0]
    for words, message in (
        (["--memory", "40GiB"], "'40GiB' is no amount above 0; write it as 40GB"),
        (["--tokens", "0"], "--tokens 0 is no number above 0 of tokens; write it as 300B, 2T or 1.5e12"),
        (["--price", "-1"], "use a number from 0"),
        (["--sweep", "batch", "--json"], "leave out --explain and --json"),
    ):
        assert message in re.sub(r"[\s│]+", " ", output_of(["plan", "--model", "gpt-tiny", *words], 2, capsys))
