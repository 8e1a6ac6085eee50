"""The page of claims says what experiments/claims.py finds: the cheap claims in every test, all in the battery."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "experiments" / "results" / "claims.md").read_text().splitlines()
# A second or less each: read from tables, layouts and one trace.
CHEAP = ("sixteen_bytes", "bubble_by_microbatches", "one_f_one_b_holds_less", "ring_is_flat", "interleaving",
         "seventy_billion")  # fmt: skip


def measured(out: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "experiments" / "claims.py"), "--out", str(out), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3600, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads((out / "claims.json").read_text())["claims"]


@pytest.mark.slow
def test_cheap_claims(tmp_path: Path) -> None:
    found = measured(tmp_path, "--only", *CHEAP)
    assert set(found) == set(CHEAP)
    for name, claim in found.items():
        assert claim["line"] in PAGE, (name, claim["line"])


@pytest.mark.battery
def test_all_claims(tmp_path: Path) -> None:
    """Figures of traced programs to the letter. What compilers and sums make of it differs in the last digits: there
    the verdict, which follows from the numbers.
    """
    for name, claim in measured(tmp_path, "--how", "traced", "compiled", "run").items():
        if claim["how"] == "traced":
            assert claim["line"] in PAGE, (name, claim["line"])
        said, verdict = f"| {claim['says']} ({claim['source']}) |", f"| **{claim['verdict']}** |"
        assert any(line.startswith(said) and verdict in line for line in PAGE), (name, claim["verdict"])


def test_the_page_holds_them_all() -> None:
    from claims import CLAIMS

    rows = [line for line in PAGE if line.startswith("| ") and not line.startswith("| said ")]
    assert len(rows) == len(CLAIMS) >= 20
    for one in CLAIMS.values():
        assert sum(line.startswith(f"| {one.says} ({one.source}) |") for line in rows) == 1, one.name
