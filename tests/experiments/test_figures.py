"""Files of figures in docs are as new as the programs that make them, and some as new as jaxpar."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import figures
import pytest

ROOT = Path(__file__).parents[2]


def test_none_is_older_than_its_program() -> None:
    assert figures.older() == [], "python experiments/figures.py NAME makes it again"


def test_every_file_is_there_and_every_picture_has_a_command() -> None:
    made = {file for figure in figures.FIGURES.values() for file in figure.files}
    assert all((ROOT / file).exists() for file in made)
    pictures = {str(path.relative_to(ROOT)) for path in (ROOT / "docs" / "assets").glob("*.svg")}
    # Those of the notebook come with its page; `jaxpar timeline` draws a pipeline's (tests/inspect/test_timeline.py).
    assert not {name for name in pictures - made if not name.startswith(("docs/assets/pipe", "docs/assets/tutorial-"))}


def test_every_program_that_a_page_names_is_known() -> None:
    """But this one, the GPU's, which wait for one, and the naive references, which tests run."""
    known = {program for figure in figures.FIGURES.values() for program in figure.programs}
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    named = {name for page in pages for name in re.findall(r"experiments/[\w/]+\.py", page.read_text())}
    assert not {
        name for name in named - known if not re.match(r"experiments/(figures|gpu)\.py|experiments/naive/", name)
    }


def numbers(text: str) -> list[str]:
    return re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?![\w.]*\w)", text)


@pytest.mark.battery
@pytest.mark.cuda_compiler
@pytest.mark.parametrize(("name", "head"), [
    ("zero", "| devices | Pos, `zero1` |"),
    ("plan", "| strategy | GB of 84.9 |"),
    ("strategies-time", "| strategy | rows | state, GB per device |"),
])  # fmt: skip
def test_what_is_quickly_made_again_is_what_docs_say(name: str, head: str) -> None:
    """Each number of a table is one that the program prints, at as many digits: seconds to minutes of two cores."""
    figure = figures.FIGURES[name]
    plain = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS")}
    made = subprocess.run(figure.command, shell=True, cwd=ROOT, env=plain, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    printed = [float(number.replace(",", "")) for number in numbers(made.stdout)]
    table = (ROOT / figure.files[0]).read_text().split(head)[1].split("\n\n")[0]
    shown = numbers(re.sub(r"`[^`]*`", "", table.split("\n", 1)[1]))
    assert len(shown) > 15
    stale = [x for x in shown if x.replace(",", "") not in {f"{y:.{len(x.partition('.')[2])}f}" for y in printed}]
    assert not stale, f"python experiments/figures.py {name} makes it again"


def test_a_program_that_changes_makes_its_figures_older(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    program, record = tmp_path / "draws.py", tmp_path / "figures.json"
    program.write_text(f"open({str(tmp_path / 'drawn')!r}, 'w').write('1')")
    record.write_text("{}")
    monkeypatch.setattr(figures, "RECORD", record)
    figure = figures.Figure(("drawn",), f"{sys.executable} {program}", (str(program),))
    monkeypatch.setattr(figures, "FIGURES", {"drawn": figure})
    assert figures.older() == ["drawn"]
    figures.main(["drawn"])
    assert (tmp_path / "drawn").read_text() == "1"
    kept = figures.now(figure)
    assert json.loads(record.read_text()) == {"drawn": kept}
    assert figures.older() == []
    assert list(figures.ages()) == [f"drawn           {kept['made']}  by this jaxpar and jax"]
    program.write_text(program.read_text() + "  # more")
    record.write_text(json.dumps({"drawn": kept | {"by": "jaxpar 0, jax 0"}}))
    figures.main([])
    assert "by jaxpar 0, jax 0; its program is another since" in capsys.readouterr().out
    figures.main(["all"])
    assert figures.older() == []
    with pytest.raises(SystemExit, match="no figure 'other'; there are drawn"):
        figures.main(["other"])
