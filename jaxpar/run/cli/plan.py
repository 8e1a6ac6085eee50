"""The command `jaxpar plan`."""

import contextlib
import json
import os
import sys
import textwrap
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import jax
import tyro

from ...backend.text import WIDTH, amount
from ...forecast.plan.planner import plan, planned_for
from ...forecast.plan.ranking import Plan, summary
from ...strategy import Strategy
from .model_sources import is_function, load_user_model
from .options import MODEL_HELP, named_model, optimizer_named

_FASTER = 1.01  # times the rows/s of half as many rows: a sweep goes on


@dataclass(frozen=True)
class PlanOptions:
    """Ranks strategies for a model on devices that need not be here: what fits, how fast, and why the others lose.

    The best few by closed forms are compiled; nothing runs. What was compiled is kept for the next time.
    """

    model: Annotated[str, tyro.conf.arg(help=MODEL_HELP)] = "llama3-8b"
    target: str = "8xH100"
    """devices to plan for: 8xH100, 32x8xH100, 64xcluster.toml"""
    batch: int = 8
    """rows of the global batch"""
    seq: int = 4096
    """text: tokens of a row"""
    strategy: tyro.conf.UseAppendAction[list[str]] = field(default_factory=list)
    """compile this alone, or these if given several times: tensor=8,pipe=16,data=128,microbatches=16,precision=bf16"""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """whose state is held and whose update is computed; muon: for the model's hidden matrices, AdamW for all else"""
    precision: Literal["bf16", "f16", "f32", "fp8"] = "bf16"
    """compute dtype of the strategies that are tried"""
    memory: str | None = None
    """of one device, in place of the target's: 40GB"""
    sweep: Literal["batch"] | None = None
    """plan for --batch, twice as many rows, and so on, until nothing fits or more rows are no faster"""
    tokens: str | None = None
    """of a whole run, for its days: 300B, 15T; rows, where a model reads no text"""
    price: float | None = None
    """of an hour of one device, for what such a run costs"""
    top: int = 16
    """so many are compiled"""
    explain: int | None = None
    """print every number of this line with its source"""
    json: bool = False
    """print JSON instead of a table"""
    cache: Path | None = None
    """folder of what was compiled before; without it: JAXPAR_CACHE, or ~/.cache/jaxpar/plan"""

    def __post_init__(self) -> None:
        for name in ("batch", "seq", "top"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)}: use a whole number from 1")
        if self.price is not None and not 0 <= self.price < float("inf"):
            raise ValueError(f"--price {self.price}: use a number from 0, of an hour of one device")
        if self.sweep and (self.explain is not None or self.json):
            raise ValueError("--sweep prints a line for each batch; leave out --explain and --json, or the sweep")


def main(options: PlanOptions) -> None:
    """Plans and prints. Exits with 1 where nothing fits, 130 after Ctrl-C."""
    for text in options.strategy:
        Strategy.parse(text)  # before anything that takes time
    if os.environ.get("JAX_PLATFORMS") is None:
        jax.config.update("jax_platforms", "cpu")  # else the compiler for GPUs is missing where there is none
    with contextlib.suppress(ImportError):  # of the compiler: `plan` says so, when nothing else is wrong
        planned_for(options.target)  # before the model is read
    if options.sweep:
        _sweep(options)
        return
    found = _planned(options, options.batch)
    if options.json:
        print(json.dumps(found.json(), indent=1))  # noqa: T201
    else:
        print(found if options.explain is None else found.explain(options.explain))  # noqa: T201
    if found.interrupted:
        raise KeyboardInterrupt
    if not any(line.fits for line in found.lines):
        sys.exit(1)


def _sweep(options: PlanOptions) -> None:
    """A plan for each batch, a sentence of each."""
    rows, before = options.batch, 0.0
    while True:
        try:
            found = _planned(options, rows)
        except ValueError as error:
            if not before:
                raise
            print(textwrap.fill(f"{rows:,} rows: {error}", WIDTH, subsequent_indent="  "))  # noqa: T201
            return
        print(textwrap.fill(f"{rows:,} rows: {summary(found)}", WIDTH, subsequent_indent="  "), flush=True)  # noqa: T201
        if found.interrupted:
            raise KeyboardInterrupt
        best = found.lines[0]
        if not best.fits and not before:
            sys.exit(1)
        if not best.fits or (speed := best.prediction["rows_per_second"]) < _FASTER * before:
            return
        rows, before = 2 * rows, speed


def _planned(options: PlanOptions, rows: int) -> Plan:
    memory = None if options.memory is None else amount(options.memory, "B")
    tokens = None if options.tokens is None else amount(options.tokens.replace("B", "G"))  # billions
    if is_function(options.model):
        mine = load_user_model(options.model)
        model, batch, flops, text, trainable = mine.model, mine.example(rows), None, False, None
    else:
        known = named_model(options.model, options.seq)
        model, batch, text = known.model, known.example(rows, options.seq), known.kind == "text"
        trainable, flops = known.trainable, known.flops(rows, options.seq)
    found = plan(
        model,
        batch,
        options.target,
        optimizer_named(options.optimizer, 3e-4, 0.1, model, batch) if options.optimizer == "muon" else None,
        flops=flops,
        strategies=options.strategy or None,
        top=options.top,
        precision=options.precision,
        length=options.seq if text else None,
        cache=True if options.cache is None else options.cache,
        trainable=trainable,
        memory_bytes=memory,
    )
    return replace(found, tokens=tokens, price=options.price)
