"""Every picture, page and number of docs that a program of `experiments/` makes: how it is made again, and which are
older than their program.

python experiments/figures.py                  # which are older than their program
python experiments/figures.py claims compare   # make these again
python experiments/figures.py all              # make all again: hours, and the compiler for GPUs

`figures.json` has the hash of each program as it was when its figures were made. A program whose numbers stand in the
text of a page prints them: bring the page up to date with what it says.
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
    "eight-bits": _script(
        (*_asset("eight-bits"), "docs/recipes/precision.md", "experiments/eight_bits.json"),
        "eight_bits.py && cp runs/eight-bits/eight-bits.svg docs/assets/",
    ),
    "async": _script(
        ("experiments/async_server/async.svg",),
        "async_compare.py && cp runs/async/async.svg experiments/async_server/",
        "experiments/async_picture.py",
    ),
    "radar": _script(("docs/radar.md", "experiments/radar.json"), "radar.py"),
    "zero": _script(("docs/memory.md",), "zero_table.py"),
    "megatron": _script(("docs/memory.md",), "megatron_memory.py", "experiments/megatron_sums.py"),
    "published": _script(
        ("docs/predict.md", "experiments/published_ratios.csv"),
        "published_throughput.py",
        "experiments/published_rows.py",
        "experiments/published_blind.py",
    ),
    "exposed": _script(("docs/strategies/zero3.md",), "exposed.py"),
    "plans": _script(("docs/plan.md",), "ten_plans.py"),
    "planner": _script(("docs/plan.md",), "benchmarks/planner.py"),
    "experts": _script(("docs/experts.md",), "benchmarks/experts.py"),
    "five-axes": _script(("docs/strategies/expert.md",), "five_axes.py"),
    "cut-stages": _script(("docs/strategies/pipe-all.md",), "cut_stages.py"),
    "schedules": _script(("docs/strategies/pipe-all.md",), "schedules.py"),
    "pipeline": _script(("docs/strategies/pipe-all.md",), "pipeline.py"),
    "checkpoint": _script(("docs/checkpoints.md",), "benchmarks/checkpoint.py"),
    "strategies-time": _script(("README.md",), "benchmarks/strategies.py"),
    "torch": _script(("docs/from-pytorch.md",), "benchmarks/torch_gloo.py"),
    "handwritten": _script(("README.md",), "benchmarks/handwritten.py"),
}


def older() -> list[str]:
    """The names of those whose program is another than made them."""
    made = json.loads(RECORD.read_text())
    return [name for name, figure in FIGURES.items() if made.get(name) != figure.hash]


def main(names: list[str]) -> None:
    names = list(FIGURES) if names == ["all"] else names
    if unknown := [name for name in names if name not in FIGURES]:
        raise SystemExit(f"no figure {unknown[0]!r}; there are {', '.join(FIGURES)}, or all")
    for name in names:
        subprocess.run(FIGURES[name].command, shell=True, check=True, cwd=ROOT)
        made = json.loads(RECORD.read_text()) | {name: FIGURES[name].hash}
        RECORD.write_text(json.dumps(made, indent=1, sort_keys=True) + "\n")
    if not names:
        print("older than their program:", ", ".join(older()) or "none")


if __name__ == "__main__":
    main(sys.argv[1:])
