"""The command `jaxpar plan`."""

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import jax
import tyro

from ..inspect.plan.planner import plan
from ..strategy import Strategy
from .options import MODEL, named_of, optimizer_named
from .own import is_function, own


@dataclass(frozen=True)
class PlanOptions:
    """Ranks strategies for a model on devices that need not be here: what fits, how fast, and why the others lose.

    The best few by closed forms are compiled; nothing runs. What was compiled is kept for the next time.
    """

    model: Annotated[str, tyro.conf.arg(help=MODEL)] = "llama3-8b"
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
    precision: Literal["bf16", "f16", "f32"] = "bf16"
    """compute dtype of the strategies that are tried"""
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


def main(options: PlanOptions) -> None:
    """Plans and prints. Exits with 1 where nothing fits, 130 after Ctrl-C."""
    for text in options.strategy:
        Strategy.parse(text)  # before anything that takes time
    if os.environ.get("JAX_PLATFORMS") is None:
        jax.config.update("jax_platforms", "cpu")  # else the compiler for GPUs is missing where there is none
    if is_function(options.model):
        mine = own(options.model)
        model, batch, flops, text, trainable = mine.model, mine.example(options.batch), None, False, None
    else:
        known = named_of(options.model, options.seq)
        model, batch, text = known.model, known.example(options.batch, options.seq), known.kind == "text"
        trainable = known.trainable
        flops = known.flops(options.batch, options.seq)
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
    )
    if options.json:
        print(json.dumps(found.json(), indent=1))  # noqa: T201
    else:
        print(found if options.explain is None else found.explain(options.explain))  # noqa: T201
    if found.interrupted:
        raise KeyboardInterrupt
    if not any(line.fits for line in found.lines):
        sys.exit(1)
