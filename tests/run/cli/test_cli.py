"""The command: what it trains, what it says, what it refuses and how, and its config."""

import dataclasses
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml
from PIL import Image
from test_commands import TINY, output_of
from workers import started

import jaxpar as jp
from jaxpar.hardware.devices import peak_flops
from jaxpar.models import named
from jaxpar.run.cli import commands
from jaxpar.run.cli.commands import main
from jaxpar.run.cli.options import CheckOptions, ExplainOptions, TrainOptions, model_of, optimizer_of, units_of
from jaxpar.run.cli.parsing import parse
from jaxpar.run.train.recorder import read


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(400)))
    return path


def command(text: Path, *words: str) -> list[str]:
    """Return the words of a short `jaxpar train` on a text."""
    options = {"model": TINY, "data": text, "length": 16, "steps": 4, "sample": 8, "evaluate-batches": 2}
    options["save-every"] = 2
    return ["train", *(word for name, value in options.items() for word in (f"--{name}", str(value))), *words]


def fails(words: list[str], code: int, capsys: pytest.CaptureFixture) -> str:
    """Run a command that must fail, and return its output: one message, and no traceback."""
    output = output_of(words, code, capsys)
    assert "Traceback" not in output
    return " ".join(re.sub(r"[─│╭╮╰╯]", " ", output).split())


@pytest.mark.slow
def test_train_writes_its_run_and_goes_on_with_it(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    sample, outputs = commands._sample, []
    record = lambda *args: outputs.append(capsys.readouterr().out) or sample(*args)
    monkeypatch.setattr(commands, "_sample", record)
    main(command(text))
    (out,) = (tmp_path / "runs").iterdir()
    assert out.name.startswith("llama-tiny-layers=1")
    # Two processes printed nothing for 41 s after "written".
    assert outputs[0].endswith("compiling and writing a sample of 8 tokens\n")
    shown = outputs[0] + capsys.readouterr().out
    for part in ("bigram entropy", "bits/byte", "tokens/s", "held out", f"written: runs/{out.name}", "a sample"):
        assert part in shown
    assert {"config.yaml", "metrics.jsonl", "loss.png", "checkpoints"} <= {path.name for path in out.iterdir()}
    main(["train", "--resume", "--out", str(out), "--steps", "6", "--sample", "0"])  # others come from config.yaml
    shown = capsys.readouterr().out
    assert "resumed after step 4" in shown
    assert "steps is now 6, and was 4" in shown
    assert [line["step"] for line in read(out / "metrics.jsonl") if "loss" in line] == [1, 2, 3, 4, 5, 6]
    assert yaml.safe_load((out / "config.yaml").read_text())["steps"] == 6
    output = fails(["train", "--resume", "--out", str(out), "--lr", "1e-4"], 2, capsys)
    assert "lr 0.003 there and 0.0001 here" in output
    output = fails(command(text, "--out", str(out)), 2, capsys)  # "resume goes on with it" is no option of a command
    assert "already holds a run" in output
    assert "; --resume goes on with it, --overwrite removes it, another --out leaves it alone" in output


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["trian"], "there is no command 'trian' (did you mean 'train'?)"),
        (["train", "--stepss", "3"], "jaxpar: train has no option '--stepss' (did you mean '--steps'?); jaxpar"),
        (["train", "--strategi=ddp"], "train has no option '--strategi' (did you mean '--strategy'?); jaxpar"),
        (["convert", "run", "--dtyp", "3"], "convert has no option '--dtyp' (did you mean '--dtype'?); jaxpar convert"),
        (["train", "ddp"], "train does not take 'ddp'; jaxpar train --help explains each option"),
        (["train", "--steps", "many"], "jaxpar: --steps: 'many' is not a whole number; jaxpar train --help"),
        (["train", "--lr=low"], "jaxpar: --lr: 'low' is not a number; jaxpar train --help explains each option"),
        (["train", "--steps"], "jaxpar: Missing value for argument '--steps'."),
        (["train", "--broken", "skpi"], "jaxpar: invalid choice 'skpi' for argument '--broken'."),
        (["verify-checkpoint"], "jaxpar: Missing from jaxpar verify-checkpoint: FOLDER"),
        (["train", "--model", "lama-tiny"], "did you mean 'llama-tiny'?"),
        (["train", "--model", "llama-tiny,layer=2"], "did you mean 'layers'?"),
        (["train", "--model", "llama-tiny,layers"], "write sizes to change as name=value"),
        (["train", "--strategy", "fsd"], "did you mean 'fsdp'?"),
        (["train", "--data", "nowhere"], "there is no file or folder nowhere"),
        (["train", "--length", "4096"], "beyond the context of llama-tiny"),
        (["train", "--resume"], "--resume needs the run's folder: give it as --out"),
        (["train", "--steps", "-1"], "jaxpar: --steps -1 is too small; use 0 or more"),
        (["train", "--lr", "0"], "--lr 0.0 is not a positive number"),
        (["train", "--weight-decay", "nan"], "--weight-decay nan is not a number from 0"),
        (["train", "--seed", "-1"], "--seed -1 is too small"),
        (["train", "--model", "llama-tiny,layers=["], "'layers=[' in model 'llama-tiny,layers=[': '[' is not a value"),
        (["train", "--model", "llama-tiny,layers=2,layers=3"], "sets layers again; give each size once"),
        (["train", "--rows", "3"], "use --rows 8, or any multiple of 8"),
        (["train", "--on-nonfinite", "halt"], "--on-nonfinite halt is not one of stop, explain, skip, rollback"),
        (["train", "--strategy", "fsdp,prefetch=x"], "jaxpar: prefetch='x' is unknown"),  # an option of the strategy
        (["launch", "--least", "3", "--", "x.py"], "--least 3 needs --processes too; give the number of processes to"),
        (["--verson"], "did you mean '--version'?"),
        (["train", "--config", "nowhere.yaml"], "nowhere.yaml cannot be read"),
        (["train", "--processes", "2"], "give all three"),
    ],
)
def test_mistakes_are_named_in_one_message(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert says in fails(words, 2, capsys)
    assert not list(tmp_path.rglob("*.*"))  # no file prevents the next attempt


@pytest.mark.slow
def test_an_unreadable_image_is_left_out_as_its_error_says(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The error of the command said `broken='skip'`."""
    for label in "ab":
        (tmp_path / "photos" / label).mkdir(parents=True)
        for i in range(20):
            pixels = np.full((4, 4), 10 * i, np.uint8 if (label, i) != ("a", 3) else np.float32)
            Image.fromarray(pixels).save(tmp_path / "photos" / label / f"{i}.tiff")
    words = ["train", "--model", "mlp-tiny", "--data", str(tmp_path / "photos"), "--out", str(tmp_path / "run")]
    words += ["--strategy", "ddp", "--rows", "8", "--steps", "5"]
    output = fails([*words, "--quiet"], 2, capsys)
    assert "1 image cannot be read" in output
    (advice,) = re.findall(r"leave them out with (--broken skip)$", output)
    main([*words, *advice.split(), "--steps", "1"])
    shown = capsys.readouterr().out
    assert "images/s" in shown
    assert "accuracy" in shown


def test_a_run_that_diverges_exits_with_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    def diverge(options: TrainOptions) -> None:
        raise FloatingPointError("step 4: loss is nan; try a lower learning rate")

    monkeypatch.setattr("jaxpar.run.cli.commands.train", diverge)
    assert fails(["train"], 1, capsys) == "jaxpar: step 4: loss is nan; try a lower learning rate"


def test_unusable_files_are_named(text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """These errors were tracebacks."""

    def missing(*_: Any) -> None:
        raise ImportError("target='v5e:2x2' needs the TPU compiler; pip install")

    monkeypatch.setattr("jaxpar.hardware.devices.target", missing)
    assert "jaxpar: target='v5e:2x2' needs" in fails(["check", "--target", "v5e:2x2"], 2, capsys)
    svg = str(text / "below.svg")
    assert f"jaxpar: {svg}: Not a directory; see that" in fails(["timeline", "--svg", svg], 1, capsys)
    assert f"--out {text} cannot be used: File exists" in fails(command(text, "--out", str(text)), 2, capsys)
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        with pytest.raises(SystemExit) as exit_:
            main([])
    assert exit_.value.code == 1
    assert not capsys.readouterr().err


def test_help_explains_every_option_with_its_default(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["train", "--help"])
    assert exit_.value.code == 0
    shown = " ".join(re.sub(r"[─│╭╮╰╯]", " ", capsys.readouterr().out).split())
    for field in dataclasses.fields(TrainOptions):
        option = f"--{field.name.replace('_', '-')}"
        assert re.search(rf"{option}[ \w{{}}|,-]* .*?\(default: {re.escape(str(field.default))}\)", shown), option
    main([])
    overview = capsys.readouterr().out
    assert "timeline" in overview
    assert max(map(len, overview.splitlines())) <= 80
    main(["--version"])
    assert capsys.readouterr().out.startswith(f"jaxpar {jp.__version__}")


def test_a_flag_can_be_repeated_and_taken_back_when_a_run_goes_on() -> None:
    """The options of the earlier run are defaults then, and a flag that was on could be given no more."""
    earlier = TrainOptions(quiet=True, steps=7)
    assert parse(TrainOptions, "train", ["--quiet"], earlier) == earlier
    assert parse(TrainOptions, "train", ["--no-quiet"], earlier) == dataclasses.replace(earlier, quiet=False)
    assert parse(TrainOptions, "train", ["--quiet"]).quiet


def test_yaml_holds_every_option_and_the_command_line_comes_before_it(tmp_path: Path) -> None:
    options = TrainOptions(steps=7, lr=2e-4, data=Path("some/folder"), out=Path("o"), print_every=3, model=TINY)
    path = tmp_path / "run.yaml"
    path.write_text(options.dump())
    assert TrainOptions.load(path) == options
    from jaxpar.run.cli.commands import _default

    words = ["--config", str(path), "--steps", "9"]
    parsed = parse(TrainOptions, "train", words, _default(words))
    assert parsed == dataclasses.replace(options, steps=9, config=path)


@pytest.mark.parametrize(
    ("yaml", "says"),
    [
        ("stepps: 3", "option 'stepps', which does not exist (did you mean 'steps'?)"),
        ("steps: many", "steps is 'many'; it must be int"),
        ("steps: 1.5", "steps is 1.5; it must be int"),
        ("quiet: 1", "quiet is 1; it must be bool"),
        ("- steps", "holds a list"),
        ("steps: [", "cannot be read as YAML"),
        ("steps: -2", "steps=-2 is too small"),
    ],
)
def test_yaml_that_is_wrong_is_refused(yaml: str, says: str, tmp_path: Path) -> None:
    (path := tmp_path / "run.yaml").write_text(yaml)
    with pytest.raises(ValueError, match=re.escape(says)):
        TrainOptions.load(path)


def test_yaml_takes_numbers_as_people_write_them(tmp_path: Path) -> None:
    (path := tmp_path / "run.yaml").write_text("lr: 3e-4\nclip: 1\n")  # PyYAML reads the first as text
    options = TrainOptions.load(path)
    assert (options.lr, options.clip) == (3e-4, 1.0)
    assert isinstance(options.clip, float)


@pytest.mark.slow
def test_ctrl_c_saves_and_the_command_shown_goes_on(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The command runs in a process and is interrupted. It continues with the command that it prints."""
    out = tmp_path / "run"
    words = [*command(text, "--out", str(out)), "--steps", "100000", "--save-every", "100000"]
    metrics, deadline = out / "metrics.jsonl", time.monotonic() + 1800
    with started([[sys.executable, "-um", "jaxpar", *words]]) as (process,):
        while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        shown, errors = process.communicate(timeout=1800)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    (step, again) = re.search(r"stopped by SIGINT after step (\d+), saved in .*; to go on: jaxpar (.*)", shown).groups()
    assert [path.name for path in (out / "checkpoints").iterdir()] == [step]
    main([*again.split(), "--steps", str(int(step) + 1), "--sample", "0"])
    assert f"resumed after step {step}" in capsys.readouterr().out


def test_flops_and_peaks_make_the_mfu() -> None:
    options = TrainOptions(model="llama-tiny", rows=16, length=64)
    model, source = model_of(options)
    assert units_of(options, model, source).flops == model.flops(16, 64)
    assert peak_flops("NVIDIA H100 PCIe", "bf16") == 756e12
    assert peak_flops("NVIDIA H200", "f32") == 494.7e12
    assert peak_flops("cpu", "bf16") is None


def test_muon_takes_the_hidden_matrices() -> None:
    """Its state has momenta of these alone, and all else is AdamW's. `explain` and `check` refused the option."""

    for command, options in {"explain": ExplainOptions, "check": CheckOptions}.items():
        assert parse(options, command, ["--optimizer", "muon"]).optimizer == "muon"
    model = named("llama-tiny")
    options = TrainOptions(model="llama-tiny", optimizer="muon")
    tx = optimizer_of(options, model.model, model.example(1, 8))
    state = jax.eval_shape(tx.init, jax.eval_shape(model.model.create, jax.random.key(0))[0])
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    assert sum("'muon'" in path and ".mu[" in path for path in paths) == 7
    assert sum("'adam'" in path and ".nu[" in path for path in paths) == 5
