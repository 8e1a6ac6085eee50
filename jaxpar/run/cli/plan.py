"""The command `jaxpar plan`: ranks strategies for one batch size, or for a sweep over batch sizes."""

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

_SPEEDUP_TO_CONTINUE = 1.01  # smallest gain in rows/s from twice as many rows with which a sweep continues


@dataclass(frozen=True)
class PlanOptions:
    """Rank strategies for a model on devices that need not be here: which fit, how fast they are, and why others lose.

    The best few by closed forms are compiled; nothing runs. The results of compilation are cached.
    """

    model: Annotated[str, tyro.conf.arg(help=MODEL_HELP)] = "llama3-8b"
    target: str = "8xH100"
    """devices to plan for: 8xH100, 32x8xH100, 64xcluster.toml"""
    batch: int = 8
    """rows of the global batch"""
    seq: int = 4096
    """text: tokens of a row"""
    strategy: tyro.conf.UseAppendAction[list[str]] = field(default_factory=list)
    """compile only this strategy; give it several times for several: tensor=8,pipe=16,data=128,precision=bf16"""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """optimizer to plan for; muon updates the model's hidden matrices, and all other parameters by AdamW"""
    precision: Literal["bf16", "f16", "f32", "fp8"] = "bf16"
    """compute dtype of all strategies"""
    memory: str | None = None
    """memory of one device, instead of the target's: 40GB"""
    sweep: Literal["batch"] | None = None
    """plan for --batch, twice as many rows, and so on, until nothing fits or more rows are not faster"""
    tokens: str | None = None
    """tokens of a whole run, to show its days: 300B, 15T; rows, if the model reads no text"""
    price: float | None = None
    """price of one device for an hour, to show the cost of such a run"""
    top: int = 16
    """number of strategies to compile"""
    explain: int | None = None
    """print every number of this line of the table, with its source"""
    json: bool = False
    """print JSON instead of a table"""
    cache: Path | None = None
    """folder of cached results; by default JAXPAR_CACHE, or ~/.cache/jaxpar/plan"""

    def __post_init__(self) -> None:
        for name in ("batch", "seq", "top"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)} is too small; use a whole number from 1")
        if self.price is not None and not 0 <= self.price < float("inf"):
            raise ValueError(f"--price {self.price} is no price; use a number from 0, for an hour of one device")
        if self.sweep and (self.explain is not None or self.json):
            raise ValueError("--sweep prints a line for each batch; leave out --explain and --json, or the sweep")


def main(options: PlanOptions) -> None:
    """Plan, and print the plan. Exits with 1 if no strategy fits, 130 after Ctrl-C."""
    for text in options.strategy:
        Strategy.parse(text)  # an error now, not after minutes
    if os.environ.get("JAX_PLATFORMS") is None:
        jax.config.update("jax_platforms", "cpu")  # without this, machines without GPUs lack the GPU compiler
    # Refuse an unknown target before the model is read. A missing compiler is reported by `plan`, after other errors.
    with contextlib.suppress(ImportError):
        planned_for(options.target)
    if options.sweep:
        _sweep(options)
        return
    result = _plan(options, options.batch)
    # The plan is printed even if Ctrl-C has interrupted it: it holds the strategies ranked so far.
    if options.json:
        print(json.dumps(result.json(), indent=1))  # noqa: T201
    else:
        print(result if options.explain is None else result.explain(options.explain))  # noqa: T201
    if result.interrupted:
        raise KeyboardInterrupt
    if not any(line.fits for line in result.lines):
        sys.exit(1)


def _sweep(options: PlanOptions) -> None:
    """Plan for a growing batch, and print a sentence about each size. Exits with 1 if not even the first one fits."""
    rows, last_speed = options.batch, 0.0
    while True:
        try:
            result = _plan(options, rows)
        except ValueError as error:
            # An error at the first batch is the user's. At a larger one it ends the sweep.
            if not last_speed:
                raise
            # The first batch fitted, so a larger one that cannot be split is the end of the sweep, and no failure.
            print(textwrap.fill(f"{rows:,} rows: {error}", WIDTH, subsequent_indent="  "))  # noqa: T201
            return
        sentence = f"{rows:,} rows: {summary(result)}"
        print(textwrap.fill(sentence, WIDTH, subsequent_indent="  "), flush=True)  # noqa: T201
        if result.interrupted:
            raise KeyboardInterrupt
        # Lines are ranked, the best one first.
        best = result.lines[0]
        if not best.fits and not last_speed:
            sys.exit(1)
        # The second test also ends a sweep in which twice the rows take twice the time.
        if not best.fits or (speed := best.prediction["rows_per_second"]) < _SPEEDUP_TO_CONTINUE * last_speed:
            return
        rows, last_speed = 2 * rows, speed


def _plan(options: PlanOptions, rows: int) -> Plan:
    """Return the plan for a global batch of `rows` rows."""
    memory = None if options.memory is None else amount(options.memory, "B")
    tokens = None if options.tokens is None else amount(options.tokens.replace("B", "G"))  # B for billions, not bytes
    # A user's function says nothing about FLOPs, positions or frozen parameters.
    if is_function(options.model):
        user_model = load_user_model(options.model)
        model, batch = user_model.model, user_model.example(rows)
        flops, reads_text, trainable = None, False, None
    else:
        named = named_model(options.model, options.seq)
        model, batch, reads_text = named.model, named.example(rows, options.seq), named.kind == "text"
        trainable, flops = named.trainable, named.flops(rows, options.seq)
    result = plan(
        model,
        batch,
        options.target,
        # Without an optimizer, `plan` takes AdamW.
        optimizer_named(options.optimizer, 3e-4, 0.1, model, batch) if options.optimizer == "muon" else None,
        flops=flops,
        strategies=options.strategy or None,
        top=options.top,
        precision=options.precision,
        length=options.seq if reads_text else None,
        cache=True if options.cache is None else options.cache,
        trainable=trainable,
        memory_bytes=memory,
    )
    return replace(result, tokens=tokens, price=options.price)
