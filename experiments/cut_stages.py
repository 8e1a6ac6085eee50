"""A model of images cut into stages, compiled for devices that are not here: how even stages are, and what they cost.

JAX_PLATFORMS=cpu python experiments/cut_stages.py
JAX_PLATFORMS=cpu python experiments/cut_stages.py --strategies pipe=2,data=4,microbatches=4 data=8

Nothing runs. Of each strategy it prints the stages' parts of the predicted time, the temporaries, what a device sends,
and the seconds of CPU time that tracing and compiling took.
"""

import time
from dataclasses import dataclass

import optax
import tyro
from report import GB, console

import jaxpar as jp
from jaxpar.hardware import target
from jaxpar.inspect.ledger import Ledger
from jaxpar.models import named
from jaxpar.parallel.pipeline.flat.cut import times


@dataclass(frozen=True)
class Options:
    """Compiles one model under some strategies."""

    model: str = "resnet50"
    """the name of a model"""
    target: str = "8xH100"
    """devices that need not be here"""
    strategies: tuple[str, ...] = ("data=8", "pipe=4,data=2,microbatches=4", "pipe=2,data=4,microbatches=4")
    """without precision"""
    rows: int = 256
    """of a batch"""


def compile_one(options: Options, strategy: str) -> None:
    """Compiles one strategy in bfloat16, and prints what came of it."""
    screen, chosen, began = console(), named(options.model), time.process_time()
    there = target(options.target).devices
    step = jp.make_train_step(chosen.model, optax.sgd(0.1, momentum=0.9), f"{strategy},precision=bf16", mesh=there)
    batch = chosen.example(options.rows)
    every = [times(group).sum() for group in step.traced(batch).program.groups]
    program = step.compile(batch)
    spent = time.process_time() - began
    screen.print(f"{strategy}: {program.memory_analysis().temp_size_in_bytes / GB:.2f} GB of temporaries,", end=" ")
    screen.print(f"{spent:.0f} s of CPU time")
    if every:
        screen.print(f"  stages {', '.join(f'{one / sum(every):.0%}' for one in every)} of the predicted time")
    sent = Ledger.from_hlo(program.as_text() or "", step.mesh).by("kind", "axes", value="sent")
    for (kind, axes), nbytes in sent.items():
        screen.print(f"  {kind} over {'+'.join(axes)}: {nbytes / GB:.3f} GB sent by a device")


def main(options: Options) -> None:
    """Each strategy."""
    for strategy in options.strategies:
        compile_one(options, strategy)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
