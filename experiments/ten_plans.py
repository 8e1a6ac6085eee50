"""Ten plans: does the search find a strategy that is within 5% of the best one known?

    python experiments/ten_plans.py
    python experiments/ten_plans.py --only gpt2-xl resnet50
    python experiments/ten_plans.py --only gpt2-xl --top 40   # a wider search: is there a better one?

Nothing runs on a device: all is compiled for GPUs that are not there (`make gpu-compiler`), and both times of a row are
predicted for compiled programs, with the same model of the hardware. The best known strategy of a row is the fastest
of those that are named here, from published configurations and wider searches; where a plan finds a faster one, that is
the row's next best known. Published: Llama-3.1-8B on 8 H100 by FSDP with selective recomputation (torchtitan,
docs/performance.md, table 1); Llama-3.1-405B on 1,024 H100 by 8 tensor x 8 pipeline x 2 context ranks (Megatron Bridge,
bridge.perf_recipes.llama.h100.llama31).

One plan at a time. Each row is appended to `--results` as soon as it is there, and a row that is there is not computed
again; compiled programs are in the planner's cache, so that a run which was ended goes on where it was.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import tyro

import jaxpar as jp
from jaxpar.forecast.plan.ranking import Plan
from jaxpar.models import named


@dataclass(frozen=True)
class Case:
    """One question: `rows` of `length` tokens (0 of images) of a model on devices; `known` are good strategies."""

    model: str
    target: str
    rows: int
    length: int
    known: tuple[str, ...]


CASES = {
    "gpt2": Case(
        "gpt2",
        "8xH100",
        256,
        1024,
        ("fsdp=8,zero=1,reduce=compute,logits=whole", "fsdp=8,reduce=compute,logits=whole"),
    ),
    "gpt2-xl": Case(
        "gpt2-xl", "8xA100-80GB", 64, 1024, ("fsdp=8,zero=1,reduce=compute,remat=dots", "fsdp=8,reduce=compute")
    ),
    "llama3.2-1b": Case(
        "llama3.2-1b", "8xH100", 64, 4096, ("fsdp=8,reduce=compute", "fsdp=8,reduce=compute,logits=whole")
    ),
    "llama3-8b": Case(
        "llama3-8b",
        "8xH100",
        16,
        8192,
        ("fsdp=8,remat=layer", "fsdp=8,reduce=compute,remat=dots", "fsdp=8,reduce=compute,remat=dots,logits=whole"),
    ),
    "llama3-8b on 64": Case(
        "llama3-8b",
        "64xH100",
        128,
        8192,
        ("fsdp=64,reduce=compute", "data=2,fsdp=32,reduce=compute", "data=2,fsdp=32,reduce=compute,logits=whole"),
    ),
    "llama2-13b": Case(
        "llama2-13b",
        "16xA100-80GB",
        64,
        4096,
        ("fsdp=16,microbatches=2,reduce=compute,remat=dots", "data=2,fsdp=8,microbatches=2,reduce=compute"),
    ),
    "llama3-70b on 32": Case(
        "llama3-70b",
        "32xH100",
        32,
        8192,
        ("pipe=4,tensor=8,sequence=true,microbatches=32,remat=layer", "fsdp=32,reduce=compute,remat=layer"),
    ),
    "llama3-70b on 256": Case(
        "llama3-70b",
        "256xH100",
        512,
        8192,
        (
            "fsdp=256,reduce=compute,remat=layer",
            "data=4,fsdp=64,reduce=compute,remat=layer",
            "data=4,fsdp=64,reduce=compute,remat=layer,logits=whole",
        ),
    ),
    "resnet50": Case("resnet50", "8xH100", 2048, 0, ("data=8", "fsdp=8,remat=dots", "fsdp=8")),
    "llama3-405b": Case(
        "llama3-405b",
        "1024xH100",
        512,
        8192,
        (
            "pipe=16,tensor=8,sequence=true,fsdp=8,zero=1,microbatches=64,chunks=4,remat=layer",
            "pipe=8,context=2,tensor=8,sequence=true,fsdp=8,zero=1,microbatches=64,chunks=4,remat=layer",
            "fsdp=512,context=2,reduce=compute,remat=layer",
            "fsdp=512,context=2,attention=ring,reduce=compute,remat=layer",
        ),
    ),
}


@dataclass(frozen=True)
class Options:
    """Plans each case, and prints what was found beside the best known."""

    only: tuple[str, ...] = ()
    """names of cases; all if none"""
    top: int = 16
    """so many programs are compiled for a plan"""
    cpu: int = 1200
    """seconds of this process's CPU time for one plan: what was compiled until then is ranked"""
    results: Path = Path("ten_plans.jsonl")
    """a line of JSON for each row"""


@contextlib.contextmanager
def ended_after(seconds: int) -> Iterator[None]:
    """After so many seconds of CPU time, what a plan takes for Ctrl-C: it ranks what it has."""
    before = signal.signal(signal.SIGPROF, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def planned(case: Case, top: int = 16, cpu: int = 1200) -> tuple[Plan, Plan]:
    """What a plan finds within so many seconds of CPU time, and the plan of the known strategies alone."""
    model = named(case.model)
    batch = model.example(case.rows, case.length)
    options: dict[str, Any] = {"flops": model.flops(case.rows, case.length), "length": case.length or None}
    known = jp.plan(
        model.model, batch, case.target, strategies=[f"{one},precision=bf16" for one in case.known], **options
    )
    assert known.lines[0].fits, f"{known.lines[0].strategy} does not fit"
    with ended_after(cpu):
        return jp.plan(model.model, batch, case.target, top=top, **options), known


def row(name: str, top: int, cpu: int) -> dict[str, Any]:
    """A row of the table: strategies, predicted seconds, their ratio, and what the plan took."""
    begin = time.process_time()
    found, known = planned(CASES[name], top, cpu)
    first, best = found.lines[0], known.lines[0]
    return {
        "case": name,
        "top": top,
        "found": str(first.strategy),
        "seconds": first.seconds,
        "fits": first.fits,
        "known": str(best.strategy),
        "known_seconds": best.seconds,
        "ratio": first.seconds / best.seconds,
        "compiled": len(found.lines),
        "cached": sum(line.cached for line in found.lines),
        "cpu": time.process_time() - begin,
        "ended_early": found.interrupted,
        "lines": [[str(line.strategy), line.seconds, line.memory["total"], line.fits] for line in found.lines],
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    lines = ["| case | found | s | best known | s | ratio | compiled |", "|-|-|-:|-|-:|-:|-:|"]
    for one in rows:
        plain = {side: one[side].replace(",precision=bf16", "") for side in ("found", "known")}
        early = ", ended early" if one["ended_early"] else ""
        lines.append(
            f"| {one['case']} | `{plain['found']}` | {one['seconds']:.3f} | `{plain['known']}` | "
            f"{one['known_seconds']:.3f} | {one['ratio']:.2f} | {one['compiled']}{early} |"
        )
    return "\n".join(lines)


def main(options: Options) -> None:
    """Computes what is not in the results, and prints the table."""
    names = options.only or tuple(CASES)
    if unknown := [name for name in names if name not in CASES]:
        raise SystemExit(f"--only {unknown[0]!r}: there are {', '.join(CASES)}")
    done: dict[str, dict[str, Any]] = {}
    if options.results.exists():
        for line in options.results.read_text().splitlines():
            found = json.loads(line)
            if found["top"] == options.top:
                done[found["case"]] = found
    for name in names:
        if name not in done:
            done[name] = row(name, options.top, options.cpu)
            with options.results.open("a") as file:
                file.write(json.dumps(done[name]) + "\n")
    print(table([done[name] for name in names]))


if __name__ == "__main__":
    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")  # else the compiler for GPUs is missing where there is none
    main(tyro.cli(Options, description=__doc__))
