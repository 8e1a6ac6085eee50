"""The command `jaxpar timeline`: a pipeline's schedule in the terminal, as SVG, and as CSV for torch."""

import contextlib
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import jax
import optax
import tyro
from rich.console import Console

from ...inspect.memory import slot_bytes
from ...inspect.timeline.drawing import activations_in_flight, draw, summary
from ...inspect.timeline.svg import svg
from ...layout.mesh import simulate
from ...make import make_train_step
from ...models import named
from ...parallel.pipeline.schedules import Schedule
from ...strategy import Strategy
from ...strategy.schedules import SCHEDULES
from .options import split_model

_SCHEDULE_HELP = "; ".join(f"{name}: {recipe.words}" for name, recipe in SCHEDULES.items())


@dataclass(frozen=True)
class TimelineOptions:
    """Draw the schedule of a pipeline: forwards, backwards or their halves, idle time, and the memory of each rank."""

    pipe: int = 4
    """number of ranks"""
    microbatches: int = 8
    """number of microbatches, the parts of a replica's rows that pass through the ranks one after the other"""
    schedule: Annotated[str, tyro.conf.arg(help=_SCHEDULE_HELP)] = Strategy.schedule
    chunks: int | None = None
    """stages per rank: more than one for interleaved 1f1b, two for the V of zb-v and others; by default the number that
    the schedule needs"""
    table: Path | None = None
    """draw this table, in the cells of torch that --csv writes, instead of a schedule by name"""
    model: str | None = None
    """name of a model, to show the memory of the ranks in bytes; nothing is allocated"""
    rows: int | None = None
    """rows of the model's global batch; by default one row per microbatch"""
    length: int = 1024
    """tokens in a row of text"""
    precision: Literal["f32", "bf16", "f16"] = "f32"
    """compute dtype of the model"""
    remat: Literal["none", "layer", "dots", "twice"] = "none"
    """what each of the model's layers recomputes in its backward"""
    svg: Path | None = None
    """also draw the schedule into this file"""
    csv: Path | None = None
    """write cells such as 0F0 (stage, kind, microbatch) that torch.distributed.pipelining reads as compute_only"""


def main(options: TimelineOptions, console: Console | None = None) -> None:
    """Draw a schedule in the terminal, and write the files that the options name.

    Raises:
      ValueError: if the options contradict each other.
    """
    # 1. The schedule: a table of the user, or one by name.
    if options.table:
        schedule = Schedule.read(options.table)
    else:
        recipe = SCHEDULES.get(options.schedule)  # `Schedule` raises an error for an unknown one
        # By default the number that the schedule needs: two for a V, one for most.
        chunks = options.chunks or (1 if recipe is None else recipe.chunks)
        schedule = Schedule(options.schedule, options.pipe, options.microbatches, chunks)
    # 2. Draw it, with bytes if the options name a model.
    bytes_per_slot = None if options.model is None else _slot_bytes(options, schedule)
    console = console or Console(highlight=False)
    for line in draw(schedule, console.width, console.color_system is not None):
        console.print(line, no_wrap=True, crop=False)
    for name, text in summary(schedule, bytes_per_slot).items():
        console.print(textwrap.fill(f"{name:<11}{text}", console.width, subsequent_indent=" " * 11), soft_wrap=True)
    # 3. Write the files.
    if options.svg:
        options.svg.write_text(svg(schedule, activations_in_flight(schedule, bytes_per_slot)))
    if options.csv:
        options.csv.write_text("\n".join(schedule.csv()) + "\n")
    if written := [str(path) for path in (options.svg, options.csv) if path]:
        console.print("written: " + ", ".join(written), soft_wrap=True)


def _slot_bytes(options: TimelineOptions, schedule: Schedule) -> int:
    """Return the bytes that a rank stores for one microbatch's forward through one chunk of the named model."""
    assert options.model is not None
    # Each rank needs a device, although nothing runs: the layout of a pipeline is over devices.
    with contextlib.suppress(RuntimeError):  # jax may run already, perhaps with enough devices
        simulate(schedule.ranks)
    if len(jax.devices()) < schedule.ranks:
        raise ValueError(
            f"pipe={schedule.ranks} ranks need as many devices, and jax already runs on {len(jax.devices())}; draw the "
            "timeline before anything else uses a device"
        )
    name, changes = split_model(options.model)
    model = named(name, **changes)
    strategy = Strategy(
        pipe=schedule.ranks,
        microbatches=schedule.microbatches,
        schedule=schedule,
        chunks=schedule.chunks,
        precision=options.precision,
        remat=options.remat,
    )
    # Nothing is compiled: `slot_bytes` needs only shapes.
    step = make_train_step(model.model, optax.sgd(0.1), strategy, mesh=jax.devices()[: schedule.ranks])
    return slot_bytes(step, model.example(options.rows or schedule.microbatches, options.length))
