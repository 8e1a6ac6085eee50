"""docs/tutorial.ipynb runs from its first cell to its last, in a process of its own, and prints what it shows."""

import doctest
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tutorial_page import rendered

NOTEBOOK = Path(__file__).parents[2] / "docs" / "tutorial.ipynb"
CELLS = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
# What a kernel does: cells share their names, a last expression that draws itself is drawn.
RUN = """
import ast, contextlib, io, json, sys

names, found = {"__name__": "__main__"}, []
for source in json.load(sys.stdin):
    printed, drawn, body = io.StringIO(), "", ast.parse(source).body
    last = ast.Expression(body.pop().value) if isinstance(body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(body, []), "cell", "exec"), names)
        value = eval(compile(last, "cell", "eval"), names) if last else None
    found.append([printed.getvalue(), value._repr_svg_() if hasattr(value, "_repr_svg_") else ""])
print(json.dumps(found))
"""


def shown(cell: dict[str, Any]) -> str:
    """What the stored outputs of a cell print."""
    return "".join("".join(out["text"]) for out in cell["outputs"] if out["output_type"] == "stream")


@pytest.mark.battery
def test_runs_and_prints_what_it_shows(tmp_path: Path) -> None:
    sources = ["".join(cell["source"]) for cell in CELLS]
    command, given = [sys.executable, "-c", RUN], json.dumps(sources)
    done = subprocess.run(command, input=given, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=1800)
    assert done.returncode == 0, done.stderr
    for cell, (printed, drawn) in zip(CELLS, json.loads(done.stdout), strict=True):
        want = shown(cell)
        assert doctest.OutputChecker().check_output(want, printed, doctest.NORMALIZE_WHITESPACE), (want, printed)
        assert bool(drawn) == any(out["output_type"] == "execute_result" for out in cell["outputs"])
        assert not drawn or "<svg" in drawn


def test_the_page_is_the_notebook() -> None:
    """The site showed no notebook: it linked a file of JSON."""
    for name, text in rendered().items():
        assert (NOTEBOOK.parent / name).read_text() == text, f"python experiments/tutorial_page.py makes {name} anew"


def test_ten_cells_in_order_and_small() -> None:
    assert len(CELLS) == 10
    for number, cell in enumerate(CELLS, 1):
        assert "".join(cell["source"]).startswith(f"# {number}. ")
    assert NOTEBOOK.stat().st_size < 500_000
