"""`make bench`: ratios beside those that were stored. Nothing is timed here."""

import json
from pathlib import Path
from typing import Any

import pytest
import suite

HERE = {"name": "here", "processor": "x86_64", "cores": 2}
RATIOS = {"a over b": 0.5, "c over d": 2.0}


def test_ten_percent_worse_is_worse() -> None:
    stored = suite.kept(RATIOS, {}, HERE)
    now = {"a over b": 0.549, "c over d": 2.21, "new": 9.0}
    assert [(x.name, x.worse) for x in suite.compared(now, stored)] == [
        ("a over b", False), ("c over d", True), ("new", False)]  # fmt: skip
    assert str(suite.compared(now, stored)[1]).split()[-4:] == ["2.21", "stored", "2.00", "WORSE"]
    assert not any(x.worse for x in suite.compared(now, {}))


def test_ratios_of_another_machine_are_not_mixed_in() -> None:
    stored = suite.kept(RATIOS, {}, HERE)
    assert suite.kept({"new": 1.0}, stored, HERE)["ratios"] == {**RATIOS, "new": 1.0}
    assert suite.kept({"new": 1.0}, stored, {**HERE, "name": "there"})["ratios"] == {"new": 1.0}


@pytest.mark.parametrize(("before", "where", "code"), [(1.0, HERE, 1), (1.9, HERE, 0), (1.0, {**HERE, "cores": 4}, 0)])
def test_the_command(
    before: float, where: dict[str, Any], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails by what the same machine stored, stores where it is told to, and compares with what was there before."""
    file = tmp_path / "ratios.json"
    file.write_text(json.dumps(suite.kept({"x": before}, {}, where)))
    monkeypatch.setattr(suite, "STORED", file)
    monkeypatch.setattr(suite, "machine", lambda: HERE)
    monkeypatch.setattr(suite, "run", lambda name, arguments: {"x": 2.0})
    monkeypatch.setattr("sys.argv", ["suite.py", "--only", "backward"])
    assert suite.main() == code
    assert json.loads(file.read_text())["ratios"] == {"x": before}
    monkeypatch.setattr("sys.argv", ["suite.py", "--only", "backward", "--store"])
    assert suite.main() == code
    assert json.loads(file.read_text()) == {"machine": HERE, "ratios": {"x": 2.0}}


def test_a_script_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "HERE", tmp_path)
    (tmp_path / "good.py").write_text("print('a line')\nprint('{\"x\": 1.5}')\n")
    (tmp_path / "bad.py").write_text("raise SystemExit(3)\n")
    assert suite.run("good", []) == {"x": 1.5}
    with pytest.raises(RuntimeError, match=r"bad\.py ended with 3"):
        suite.run("bad", [])


def test_every_script_is_there() -> None:
    assert all((Path(suite.__file__).parent / f"{name}.py").exists() for name in suite.SCRIPTS)
