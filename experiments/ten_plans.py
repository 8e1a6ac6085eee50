"""Ten plans: does the search find a strategy that is within 5% of the best one known?

    python experiments/ten_plans.py
    python experiments/ten_plans.py --only gpt2-xl resnet50

Nothing runs on a device: all is compiled for GPUs that are not there (`make gpu-compiler`), and both times of a row are
predicted for compiled programs. The best known strategy of a row is the fastest that anybody here has compiled; it is
compiled beside the plan's own, with the same model of the hardware. Where a plan finds a faster one, that is the row's
next best known. Compiled programs are kept in the planner's cache.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import tyro

import jaxpar as jp
from jaxpar.inspect.plan.ranking import Plan
from jaxpar.models import named


@dataclass(frozen=True)
class Case:
    """One question: `rows` of `length` tokens (0 of images) of a model on devices."""

    model: str
    target: str
    rows: int
    length: int
    best: str


CASES = {
    "resnet50": Case("resnet50", "8xH100", 2048, 0, "data=8"),
    "gpt2": Case("gpt2", "8xH100", 256, 1024, "data=8"),
    "gpt2-xl": Case("gpt2-xl", "8xA100-80GB", 64, 1024, "fsdp=8,zero=1"),
    "llama3.2-1b": Case("llama3.2-1b", "8xH100", 64, 4096, "fsdp=8,zero=1,remat=layer"),
    "llama3-8b": Case("llama3-8b", "8xH100", 16, 8192, "fsdp=8,zero=3,remat=layer"),
    "llama3-8b on 64": Case("llama3-8b", "64xH100", 128, 8192, "data=8,fsdp=8,zero=3,remat=layer"),
    "llama2-13b": Case("llama2-13b", "16xA100-80GB", 64, 4096, "fsdp=16,zero=3,remat=layer"),
    "llama3-70b on 32": Case(
        "llama3-70b", "32xH100", 32, 8192, "pipe=4,tensor=8,sequence=true,microbatches=32,remat=layer"
    ),
    "llama3-70b on 256": Case("llama3-70b", "256xH100", 512, 8192, "fsdp=256,zero=3,remat=layer"),
    "llama3-405b": Case(
        "llama3-405b",
        "1024xH100",
        512,
        8192,
        "pipe=16,tensor=8,sequence=true,fsdp=8,zero=1,microbatches=64,chunks=4,remat=layer",
    ),
}


@dataclass(frozen=True)
class Options:
    """Plans each case, and prints what was found beside the best known."""

    only: tuple[str, ...] = ()
    """names of cases; all if none"""
    top: int = 16
    """so many programs are compiled for a plan"""


def ratio(case: Case, top: int = 16) -> tuple[float, Plan, Plan]:
    """Seconds of what a plan finds over those of the best known strategy; both plans."""
    model = named(case.model)
    batch = model.example(case.rows, case.length)
    options: dict[str, Any] = {"flops": model.flops(case.rows, case.length), "length": case.length or None}
    known = jp.plan(model.model, batch, case.target, strategies=[f"{case.best},precision=bf16"], **options)
    found = jp.plan(model.model, batch, case.target, top=top, **options)
    assert known.lines[0].fits, f"{known.best} does not fit"
    return found.lines[0].seconds / known.lines[0].seconds, found, known


def main(options: Options) -> None:
    """One line a case."""
    names = options.only or tuple(CASES)
    if unknown := [name for name in names if name not in CASES]:
        raise SystemExit(f"--only {unknown[0]!r}: there are {', '.join(CASES)}")
    print("| case | found | s | best known | s | ratio |\n|-|-|-|-|-|-|", flush=True)
    for name in names:
        share, found, known = ratio(CASES[name], options.top)
        first, best = found.lines[0], known.lines[0]
        print(
            f"| {name} | `{first.strategy}` | {first.seconds:.3f} | `{best.strategy}` | {best.seconds:.3f} "
            f"| {share:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    main(tyro.cli(Options, description=__doc__))
