"""Names and options that jaxpar once had say what to do instead, wherever a user writes them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import jaxpar as jp
from jaxpar.backend.removed import REMOVED, removed
from jaxpar.models import named
from jaxpar.parallel.pipeline.schedules import Schedule
from jaxpar.run.cli import main
from jaxpar.run.cli.options import TrainOptions
from jaxpar.run.cli.parsing import in_flags

MODEL = jp.Model(lambda key: {}, lambda params, batch, key: 0.0)
CALLS: dict[str, Callable[[str], list[Callable[[], Any]]]] = {
    "jp.bisect(b=path)": lambda _: [lambda: jp.bisect(MODEL, "ddp", Path("there"), {})],  # type: ignore[arg-type]
    "schedule=auto": lambda _: [
        lambda: jp.Strategy.parse("pipe=2,schedule=auto"),
        lambda: jp.Strategy(pipe=2, schedule="auto:8.8:10.6:9.3:1.4:8"),
        lambda: Schedule("auto:1:1:1", 2, 4),
    ],
    "jaxpar": lambda name: [lambda: exec(f"from jaxpar.models import {name.partition('.')[2]}")],
    "model deepseek-tiny": lambda _: [lambda: named("deepseek-tiny")],
    "model deepseek-v3": lambda _: [lambda: named("deepseek-v3", layers=4)],
    "jp": lambda name: [lambda: getattr(jp, name), lambda: exec(f"from jaxpar import {name}")],
    "Strategy": lambda name: [
        lambda: jp.Strategy.parse(f"fsdp,{name}=int8"),
        lambda: jp.Strategy(**{name: "int8"}),
    ],
    "Loop": lambda name: [lambda: jp.Loop(**{name: 10}), lambda: TrainOptions(**{name: 10})],
}


@pytest.mark.parametrize("name", REMOVED)
def test_what_was_removed_says_what_to_do_instead(name: str, capsys: pytest.CaptureFixture) -> None:
    kind, _, attribute = name.partition(".")
    calls = CALLS.get(name, CALLS.get(kind, lambda _: []))(attribute)
    for call in calls:
        with pytest.raises((ValueError, ImportError)) as raised:
            call()
        assert str(raised.value) == removed(name)
    words = {"Loop": ["train", f"--{attribute}", "10"]}.get(
        kind, name.split()[1:] if name.startswith("jaxpar ") else []
    )
    if words:
        with pytest.raises(SystemExit):
            main(words)
        assert in_flags(removed(name), TrainOptions) in capsys.readouterr().err
    assert calls or words, f"{name} is refused nowhere"


def test_a_config_file_with_a_removed_option_says_what_to_do_instead(tmp_path: Path) -> None:
    """The config.yaml of an older run has a line for each option of its time, and `--resume` reads it."""
    (path := tmp_path / "config.yaml").write_text("steps: 3\nrecord: null\n")
    with pytest.raises(ValueError, match=r"config.yaml has an option 'record': .*; remove its line there"):
        TrainOptions.load(path)
    path.write_text("steps: 3\n")
    assert TrainOptions.load(path).steps == 3
