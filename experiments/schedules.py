"""A model's pipeline under several schedules, compiled for devices that are not here, and ranked by predicted time.

JAX_PLATFORMS=cpu python experiments/schedules.py
JAX_PLATFORMS=cpu python experiments/schedules.py --microbatches 16 --schedules 1f1b zb-h1 zb-v:2 dualpipe-v:2

Nothing runs. Of each step it prints the temporaries, the predicted time, and the collectives beside which nothing runs:
those of another schedule that are asynchronous there are what its branches cost. With `--keep`, the programs are
written as text.
"""

import dataclasses
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import optax
import tyro
from pipeline import split
from report import GB, console, grid, progress, record
from rich.table import Table

import jaxpar as jp
from jaxpar.hardware import target
from jaxpar.hardware.compiled.kernels import Executable
from jaxpar.inspect.ledger import Ledger
from jaxpar.inspect.predict.prediction import predict
from jaxpar.models import named


@dataclass(frozen=True)
class Options:
    """Ranks schedules of one model on one mesh."""

    model: str = "llama3-8b"
    """the name of a model of text"""
    layers: int | None = None
    """that it gets; its own number without it"""
    target: str = "64xH100"
    """devices that need not be here"""
    strategy: str = "pipe=8,fsdp=4,tensor=2,zero=1,precision=bf16"
    """all but schedule, chunks, microbatches and remat"""
    schedules: tuple[str, ...] = ("1f1b", "zb-h1", "zb-v:2", "dualpipe-v:2")
    """by name; after a colon the chunks of each rank"""
    microbatches: int = 32
    """of a step"""
    rows: int = 1
    """of a microbatch"""
    length: int = 4096
    """positions of a row"""
    remat: Literal["none", "layer", "dots", "twice"] = "none"
    """what each layer recomputes in its backward"""
    keep: Path | None = None
    """a folder for the compiled programs"""
    out: Path = Path("runs/schedules")
    """where schedules.json goes"""


@dataclass
class Ranked:
    """One schedule.

    Attributes:
      temporaries: bytes of the compiled step, per device.
      seconds: predicted, of a step; `least` and `most` are the ends of its interval.
      exposed: seconds in which kernels wait for collectives.
      bubble: part of the table's time in which ranks are idle.
      messages: permutes that a device sends.
      waits: collectives beside which nothing runs, by kind and axes: how many of a step, and their bytes.
      compiling: seconds.
    """

    name: str
    temporaries: int
    seconds: float
    least: float
    most: float
    exposed: float
    bubble: float
    messages: int
    waits: dict[str, tuple[int, int]]
    compiling: float


def waiting(ledger: Ledger) -> dict[str, tuple[int, int]]:
    """The synchronous collectives of a program, by kind and axes."""
    counts, sizes = Counter[str](), Counter[str]()
    for one in ledger:
        if not one.asynchronous:
            name = f"{one.kind} over {'+'.join(one.axes)}{' in a loop' if one.in_loop else ''}"
            counts[name] += one.count or 0
            sizes[name] += one.bytes
    return {name: (counts[name], sizes[name]) for name in sorted(counts)}


def rank(options: Options, text: str) -> Ranked:
    """Compiles one schedule."""
    name, kind, chunks = split(text)
    given = f"schedule={kind},chunks={chunks},microbatches={options.microbatches},remat={options.remat}"
    there, changes = target(options.target), {"layers": options.layers} if options.layers else {}
    chosen = named(options.model, **changes)
    step = jp.make_train_step(chosen.model, optax.adamw(1e-4), f"{options.strategy},{given}", mesh=there.devices)
    batch: Any = chosen.example(options.rows * options.microbatches * step.replicas, options.length)
    begin = time.perf_counter()
    compiled = step.compile(batch)
    spent = time.perf_counter() - begin
    program = compiled.as_text() or ""
    if options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
        (options.keep / f"{kind}-{chunks}-{options.microbatches}-{options.remat}.hlo").write_text(program)
    read = Executable(program, step.mesh)
    found, ledger = predict(read, step, batch, there.hardware), Ledger.of(read)
    assert step.schedule is not None
    return Ranked(
        name=name,
        temporaries=compiled.memory_analysis().temp_size_in_bytes,
        seconds=found.seconds,
        least=found.interval[0],
        most=found.interval[1],
        exposed=found.exposed,
        bubble=float(step.schedule.bubble),
        messages=ledger.total("count", kind="collective-permute"),
        waits=waiting(ledger),
        compiling=spent,
    )


def table(found: list[Ranked]) -> Table:
    """The fastest first."""
    lines = grid(
        ["schedule"], ["a step, s", "between", "exposed, s", "bubble\nin table", "messages", "temporaries\nGB"]
    )
    for one in sorted(found, key=lambda one: one.seconds):
        between = f"{one.least:.2f} to {one.most:.2f}"
        rest = f"{one.exposed:.2f}", f"{one.bubble:.1%}", str(one.messages), f"{one.temporaries / GB:.1f}"
        lines.add_row(one.name, f"{one.seconds:.2f}", between, *rest)
    return lines


def main(options: Options) -> list[Ranked]:
    """Compiles one after the other, prints the table, writes the file."""
    jax.config.update("jax_platforms", "cpu")  # so that the CUDA compiler does without a GPU
    screen, found = console(), []
    with progress(screen, len(options.schedules)) as next_is:
        for text in options.schedules:
            next_is(text)
            found.append(rank(options, text))
    title = f"{options.model}, {options.strategy},microbatches={options.microbatches},remat={options.remat}"
    record(options.out / "schedules.json", options, title=title, cells=[dataclasses.asdict(one) for one in found])
    screen.print(f"{title}\nmicrobatches of {options.rows} x {options.length}; compiled for {options.target}")
    screen.print(table(found))
    for one in found:
        said = [f"{count} {name} ({size / GB:.3f} GB)" for name, (count, size) in one.waits.items()]
        screen.print(f"{one.name}: nothing runs beside {', '.join(said) or 'no collective'}")
    screen.print(f"{options.out}/schedules.json")
    return found


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
