"""Every file of figures in docs that one program makes whole: how it is made again, and which are older than it.

python experiments/figures.py                  # which are older than their program
python experiments/figures.py claims compare   # make these again

`figures.json` has the hash of each program as it was when its files were made. Of programs whose numbers stand in the
text of a page the page names the command beside the numbers.
"""

import hashlib
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORD = Path(__file__).with_suffix(".json")


@dataclass(frozen=True)
class Figure:
    """Files that a command makes, and the program that it runs; paths from the root."""

    files: tuple[str, ...]
    command: str
    programs: tuple[str, ...]

    @property
    def hash(self) -> str:
        return hashlib.sha256(b"".join((ROOT / name).read_bytes() for name in self.programs)).hexdigest()[:16]


def _asset(*names: str) -> tuple[str, ...]:
    return tuple(f"docs/assets/{name}.svg" for name in names)


def _script(files: tuple[str, ...], command: str, *more: str) -> Figure:
    return Figure(files, f"{sys.executable} experiments/{command}", (f"experiments/{command.split()[0]}", *more))


_COPY = " && cp runs/compare/compare.svg runs/compare/compare-dark.svg docs/assets/"
FIGURES = {
    "strategies": _script(_asset("strategies"), "strategies_picture.py"),
    "mechanisms": _script(_asset("ring", "fsdp", "tensor", "exchanges"), "mechanisms_picture.py"),
    "tutorial": _script(("docs/tutorial.md",), "tutorial_page.py", "docs/tutorial.ipynb"),
    "compare": _script(_asset("compare", "compare-dark"), f"compare.py{_COPY}", "experiments/compare_picture.py"),
    "claims": _script(
        ("docs/claims.md",),
        "claims.py --page docs/claims.md",
        *(f"experiments/claims_of_{kind}.py" for kind in ("traffic", "memory", "mathematics", "time")),
    ),
    "mixture": _script(_asset("mixture"), "mixture.py && cp runs/mixture/mixture.svg docs/assets/"),
    "muon": _script(_asset("muon"), "optimizers.py --devices 2 && cp runs/optimizers/muon.svg docs/assets/"),
    "async": _script(
        ("experiments/async_server/async.svg",),
        "async_compare.py && cp runs/async/async.svg experiments/async_server/",
        "experiments/async_picture.py",
    ),
}


def older() -> list[str]:
    """The names of those whose program is another than made them."""
    made = json.loads(RECORD.read_text())
    return [name for name, figure in FIGURES.items() if made.get(name) != figure.hash]


def main(names: list[str]) -> None:
    if unknown := [name for name in names if name not in FIGURES]:
        raise SystemExit(f"no figure {unknown[0]!r}; there are {', '.join(FIGURES)}")
    for name in names:
        subprocess.run(FIGURES[name].command, shell=True, check=True, cwd=ROOT)
        made = json.loads(RECORD.read_text()) | {name: FIGURES[name].hash}
        RECORD.write_text(json.dumps(made, indent=1, sort_keys=True) + "\n")
    if not names:
        print("older than their program:", ", ".join(older()) or "none")


if __name__ == "__main__":
    main(sys.argv[1:])
