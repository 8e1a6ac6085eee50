"""Every picture, page and number of docs that a program of `experiments/` makes: how it is made again, and its age.

python experiments/figures.py                  # when and by which jaxpar each was made, and which programs have changed
python experiments/figures.py claims compare   # make these again
python experiments/figures.py all              # make all again: hours, and the compiler for GPUs

`figures.json` has of each the hash of its program, the day, and the jaxpar (a hash of its source) and the jax that made
it; null where that was not kept. A program that has changed fails a test. Another jaxpar does not, since each commit is
one, and most change no figure: what is quickly made again is compared in the battery. A program whose numbers stand in
the text of a page prints them: bring the page up to date with what it says.
"""

import ast
import datetime
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
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
        return _hash(ROOT / name for name in self.programs)


def _hash(files: Iterable[Path]) -> str:
    return hashlib.sha256("".join(map(_code, files)).encode()).hexdigest()[:16]


def _code(file: Path) -> str:
    """Return the text of a file; a program's is without docstrings and lines of comments, which change no figure."""
    text = file.read_text()
    if file.suffix != ".py":
        return text
    words = set[int]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            words.update(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    lines = enumerate(text.splitlines(keepends=True), start=1)
    return "".join(line for n, line in lines if n not in words and not line.lstrip().startswith("#"))


def _asset(*names: str) -> tuple[str, ...]:
    return tuple(f"docs/assets/{name}.svg" for name in names)


def _script(files: tuple[str, ...], command: str, *more: str) -> Figure:
    return Figure(files, f"{sys.executable} experiments/{command}", (f"experiments/{command.split()[0]}", *more))


_COPY = " && cp runs/compare/compare.svg runs/compare/compare-dark.svg docs/assets/"
FIGURES = {
    "strategies": _script(_asset("strategies"), "strategies_picture.py"),
    "mechanisms": _script(_asset("collectives", "ring", "fsdp", "tensor", "exchanges"), "mechanisms_picture.py"),
    "tutorial": _script(("docs/tutorial.md",), "tutorial_page.py", "docs/tutorial.ipynb"),
    "compare": _script(_asset("compare", "compare-dark"), f"compare.py{_COPY}", "experiments/compare_picture.py"),
    "claims": _script(
        ("experiments/results/claims.md",),
        "claims.py --page experiments/results/claims.md",
        *(f"experiments/claims_of_{kind}.py" for kind in ("traffic", "memory", "mathematics", "time")),
    ),
    "mixture": _script(_asset("mixture"), "mixture.py && cp runs/mixture/mixture.svg docs/assets/"),
    "muon": _script(_asset("muon"), "optimizers.py --devices 2 && cp runs/optimizers/muon.svg docs/assets/"),
    "eight-bits": _script(
        (*_asset("eight-bits"), "experiments/results/precision.md", "experiments/eight_bits.json"),
        "eight_bits.py && cp runs/eight-bits/eight-bits.svg docs/assets/",
    ),
    "async": _script(
        ("experiments/async_server/async.svg",),
        "async_compare.py && cp runs/async/async.svg experiments/async_server/",
        "experiments/async_picture.py",
    ),
    "radar": _script(("experiments/results/radar.md", "experiments/radar.json"), "radar.py"),
    "zero": _script(("experiments/results/papers.md",), "zero_table.py"),
    "megatron": _script(("experiments/results/megatron.md",), "megatron_memory.py", "experiments/megatron_sums.py"),
    "published": _script(
        ("experiments/results/published.md", "experiments/published_ratios.csv"),
        "published_throughput.py",
        "experiments/published_rows.py",
        "experiments/published_blind.py",
    ),
    "exposed": _script(("experiments/results/fsdp.md",), "exposed.py"),
    "plan": Figure(
        ("docs/plan.md",),
        f"{sys.executable} -m jaxpar plan --model llama3-8b --target 8xH100 --batch 8 --seq 4096",
        (),  # jaxpar itself
    ),
    "plans": _script(("experiments/results/plans.md",), "ten_plans.py"),
    "speedup": _script(("docs/drawn.md",), f"speedup.py && {sys.executable} experiments/speedup.py --rows 1"),
    "planner": _script(("experiments/results/plans.md",), "benchmarks/planner.py"),
    "experts": _script(("experiments/results/mixtures.md",), "benchmarks/experts.py"),
    "five-axes": _script(("experiments/results/experts.md",), "five_axes.py"),
    "cut-stages": _script(("experiments/results/pipelines.md",), "cut_stages.py"),
    "schedules": _script(("experiments/results/pipelines.md",), "schedules.py"),
    "pipeline": _script(("experiments/results/pipelines.md",), "pipeline.py"),
    "checkpoint": _script(("docs/checkpoints.md",), "benchmarks/checkpoint.py"),
    "strategies-time": _script(("docs/measurements.md",), "benchmarks/strategies.py"),
    "torch": _script(("experiments/results/cpus.md",), "benchmarks/torch_gloo.py"),
    "handwritten": _script(("docs/measurements.md",), "benchmarks/handwritten.py"),
}


def older() -> list[str]:
    """The names of those whose program is another than made them."""
    made = json.loads(RECORD.read_text())
    return [name for name, figure in FIGURES.items() if made.get(name, {}).get("program") != figure.hash]


def now(figure: Figure) -> dict[str, str]:
    """What is kept of a figure that is made now."""
    return {"program": figure.hash, "by": _maker(), "made": str(datetime.datetime.now(datetime.UTC).date())}


def _maker() -> str:
    return f"jaxpar {_hash(sorted((ROOT / 'jaxpar').rglob('*.py')))}, jax {version('jax')}"


def ages() -> Iterable[str]:
    """A line for each: when it was made, by what, and whether its program is another since."""
    made, changed, this = json.loads(RECORD.read_text()), older(), _maker()
    for name in FIGURES:
        of = {"by": None, "made": None} | made.get(name, {})
        by = "this jaxpar and jax" if of["by"] == this else of["by"] or "a jaxpar that was not kept"
        yield f"{name:16}{of['made'] or 'no date':12}by {by}{'; its program is another since' * (name in changed)}"


def main(names: list[str]) -> None:
    names = list(FIGURES) if names == ["all"] else names
    if unknown := [name for name in names if name not in FIGURES]:
        raise SystemExit(f"no figure {unknown[0]!r}; there are {', '.join(FIGURES)}, or all")
    for name in names:
        subprocess.run(FIGURES[name].command, shell=True, check=True, cwd=ROOT)
        made = json.loads(RECORD.read_text()) | {name: now(FIGURES[name])}
        RECORD.write_text(json.dumps(made, indent=1, sort_keys=True) + "\n")
    if not names:
        print(*ages(), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
