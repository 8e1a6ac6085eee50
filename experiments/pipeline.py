"""What a pipeline costs: its bubble measured beside that of its table, and its memory, by microbatches and chunks.

python experiments/pipeline.py
python experiments/pipeline.py --model llama3.2-1b --layers 16 --length 2048 --rows 1 --precision bf16
python experiments/pipeline.py --target h100 --model llama3-8b --layers 8 --length 2048 --rows 1 --precision bf16
python experiments/pipeline.py --schedules 1f1b zb-h1 --pipe 8 --devices 8 --microbatches 8 24
python experiments/pipeline.py --schedules 1f1b zb-h1 --pipe 8 --devices 8 --microbatches 8 24 --waits 50

Each schedule is compiled, run and timed on the devices that are attached, or on simulated ones, one step of each in
turn, so that what else a machine does slows all alike. Under 1F1B and GPipe all ranks compute in all ticks, also in
those in which they idle, and the bubble is in the time; of the others a rank that idles computes nothing, and on one
machine whose cores they share it leaves its time to the others: there they look faster than they are.

With `--waits`, layers that do next to nothing but wait take the model's place, F, I and W as long as each other. Ranks
wait at the same time, also where they share cores: how many forwards a step lasts is then what the engine makes of its
table, and what it adds. How fast F, I and W of a model are on a device of its own, no shared machine shows.

With `--target h100` the programs are compiled for H100s (no GPU is needed) and only their memory is looked at.

The measured bubble is what a step takes beyond its work, over its work. Work is m times what one more microbatch adds:
the slope of a line through the steps' times over m. Beside the idle ticks that leaves what a step does once, such as
the update: the closed form is what remains on a model that is large enough. Simulated devices share the cores of one
machine, and wait for each other's turn: what is measured there need not be the table's, and beside other work is not.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import matplotlib.pyplot as plt
import numpy as np
import optax
import tyro
import waits
from report import (
    LINES,
    MB,
    WARM,
    Timed,
    console,
    grid,
    is_first,
    over_devices,
    pictures,
    progress,
    record,
    start,
    where,
)
from rich.table import Table

import jaxpar as jp
from jaxpar.hardware.devices import gpu_topology
from jaxpar.inspect.memory import slot_bytes
from jaxpar.models import Named, named
from jaxpar.parallel.pipeline.schedules import Schedule


@dataclass(frozen=True)
class Options(Timed):
    """Compares the bubble and the memory of schedules with their closed forms."""

    schedules: tuple[str, ...] = ("gpipe", "1f1b", "1f1b:2")
    """by name; after a colon the chunks of each rank"""
    layers: int = 8
    """that it gets"""
    pipe: int = 4
    """ranks; what devices there are beside them hold replicas"""
    microbatches: tuple[int, ...] = (4, 8, 16)
    """numbers of microbatches"""
    rows: int = 4
    """of a microbatch"""
    precision: Literal["f32", "bf16", "f16"] = "f32"
    """compute dtype"""
    remat: Literal["none", "layer", "twice", "dots"] = "dots"
    """what each layer recomputes in its backward; an activation is what it does not"""
    waits: int | None = None
    """milliseconds: in place of a model, layers that wait so long in F, I and W of a rank, and hardly compute"""
    target: Literal["attached", "h100"] = "attached"
    """h100: compile for H100s that need not be there, run nothing"""
    out: Path = Path("runs/pipeline")
    """where pipeline.json, pipeline.svg, pipeline.png and their dark twins go"""

    def __post_init__(self) -> None:
        self.positive("layers", "rows", "length", "steps", *["waits"] * (self.waits is not None))
        if self.waits and self.target == "h100":
            raise ValueError("--waits measures time, and with --target h100 nothing runs; leave one of the two out")
        for (_, kind, v), m in itertools.product(map(split, self.schedules), self.microbatches):
            Schedule(kind, self.pipe, m, v)  # before the first is compiled


@dataclass(kw_only=True)
class Cell:
    """One schedule with m microbatches; bytes are those of one device.

    Attributes:
      table: idle time over busy time, as the schedule's table has it.
      formula: (p - 1) / (v m).
      slots: activations that every rank has room for.
      slot, temporaries: bytes of one slot and of all temporaries of the compiled step.
      forwards: that a step lasts by the table, a forward through all of a rank's layers taking 1.
      seconds: the fastest step; None where nothing ran.
      lasted: forwards that it was measured to last: with `waits` of so long each, else by the slope.
      beside: the median, over rounds, of a step's time over that of the first schedule with as many microbatches.
      cpu: median seconds of all cores that a step takes.
      measured: idle time over busy time, by the slope over all m; None where it takes more than one m to know it.
    """

    name: str
    microbatches: int
    table: float
    formula: float
    slots: int
    slot: int = 0
    temporaries: int = 0
    forwards: float = 0.0
    seconds: float | None = None
    lasted: float | None = None
    beside: float | None = None
    cpu: float | None = None
    measured: float | None = None


def split(text: str) -> tuple[str, str, int]:
    """A schedule's name in words, its kind, its chunks."""
    kind, _, chunks = text.partition(":")
    if chunks and not chunks.isdigit():
        raise ValueError(f"--schedules {text}: the chunks of a rank must be a whole number, as in {kind}:2")
    return f"{kind}, {chunks} chunks" if chunks else kind, kind, int(chunks or 1)


def cells_of(options: Options) -> list[tuple[Cell, Schedule]]:
    p, cells = options.pipe, []
    for text, m in itertools.product(options.schedules, options.microbatches):
        name, kind, v = split(text)
        schedule = Schedule(kind, p, m, v)
        idle = float(schedule.bubble / (1 - schedule.bubble))  # of the work, where `bubble` is of the whole time
        known = {"formula": (p - 1) / (v * m), "slots": schedule.slots, "forwards": float(schedule.time)}
        cells.append((Cell(name=name, microbatches=m, table=idle, **known), schedule))
    return cells


def compiled(
    cell: Cell, schedule: Schedule, options: Options, chosen: Named, devices: Sequence[jax.Device]
) -> Callable[[], tuple[float, float]]:
    """Compiles; what it gives takes so many seconds for a step, and so many of all cores."""
    strategy = jp.Strategy(
        pipe=schedule.ranks,
        data=-1,
        microbatches=schedule.microbatches,
        schedule=schedule.kind,
        chunks=schedule.chunks,
        precision=options.precision,
        remat="none" if options.waits else options.remat,  # to wait again in I is none of the table's
    )
    step = jp.make_train_step(chosen.model, optax.sgd(1e-3), strategy, mesh=devices)
    rows = options.rows * schedule.microbatches * len(devices) // schedule.ranks
    batch: Any = chosen.example(rows, options.length)
    cell.slot = slot_bytes(step, batch)
    cell.temporaries = step.compile(batch).memory_analysis().temp_size_in_bytes
    if options.target == "h100":
        return lambda: (0.0, 0.0)
    if not options.waits:
        tokens = np.random.default_rng(0).integers(chosen.config.vocab, size=batch["tokens"].shape)
        batch = {"tokens": tokens.astype(np.int32)}
    states = [step.init(jax.random.key(0))]

    def turn() -> tuple[float, float]:
        begin = time.perf_counter(), time.process_time()
        state, metrics = step(states.pop(), batch)
        jax.block_until_ready((state, metrics))
        states.append(state)
        return time.perf_counter() - begin[0], time.process_time() - begin[1]

    return turn


def measure(cells: Sequence[Cell], turns: Sequence[Callable[[], tuple[float, float]]], steps: int) -> None:
    """The fastest of each cell's steps, which run in turn: what else a machine does makes them slower, never faster."""
    rounds = np.array([[turn() for turn in turns] for _ in range(WARM + steps)][WARM:])  # [round, cell, (wall, CPU)]
    for at, cell in enumerate(cells):
        first = next(i for i, other in enumerate(cells) if other.microbatches == cell.microbatches)
        cell.seconds, cell.cpu = float(rounds[:, at, 0].min()), float(np.median(rounds[:, at, 1]))
        cell.beside = float(np.median(rounds[:, at, 0] / rounds[:, first, 0]))


def fit(cells: Sequence[Cell]) -> None:
    """The measured bubbles, from the slope of each schedule's line of seconds over microbatches."""
    for _, group in itertools.groupby(cells, key=lambda cell: cell.name):
        mine = [cell for cell in group if cell.seconds is not None]
        if len(mine) > 1:
            slope, _ = np.polyfit([c.microbatches for c in mine], [c.seconds for c in mine], 1)
            for c in mine:
                c.measured = float(c.seconds / (slope * c.microbatches) - 1) if slope > 0 and c.seconds else None
                c.lasted = None if c.measured is None else 3 * c.microbatches * (1 + c.measured)


# -- what is shown -----------------------------------------------------------------------------------------------------


def table(cells: Sequence[Cell], waits: bool) -> Table:
    """Bubbles, times and memory; of layers that wait how long a step lasts, in forwards of a rank."""
    ran = any(cell.seconds for cell in cells)
    heads = ["forwards\nin table", "measured"] if waits else ["(p-1)\n/(v m)", "bubble\nin table"] + ["measured"] * ran
    heads += ["step\nms", "of\nfirst", "CPU\nms"] * ran
    heads += [] if waits else ["slots", "a slot\nMB", "temporaries\nMB"]
    lines = grid(["schedule"], ["micro-\nbatches", *heads])
    said = lambda x, form: "" if x is None else format(x, form)
    for place, cell in enumerate(cells):
        row = [f"{cell.formula:.1%}", f"{cell.table:.1%}"] + [said(cell.measured, ".1%")] * ran
        row = [f"{cell.forwards:g}", said(cell.lasted, ".1f")] if waits else row
        times = f"{1e3 * (cell.seconds or 0):.0f}", said(cell.beside, ".2f"), f"{1e3 * (cell.cpu or 0):.0f}"
        sizes = str(cell.slots), f"{cell.slot / MB:,.2f}", f"{cell.temporaries / MB:,.1f}"
        row += [*(times if ran else ()), *(() if waits else sizes)]
        last = place + 1 < len(cells) and cells[place + 1].name != cell.name
        lines.add_row(cell.name, str(cell.microbatches), *row, end_section=last)
    return lines


def words(options: Options) -> Iterator[str]:
    """What the columns are, and what a machine that ranks share can show."""
    if options.target == "attached":
        yield "Step: the fastest. Of first: the median, over rounds in which each schedule runs a step, of its time to"
        yield "that of the first with as many microbatches. CPU: the median of what a step takes of all cores."
    if options.waits:
        yield "Forwards: that a step lasts, where F, I and W of a rank take as long as each other. Ranks wait at once,"
        yield "also on shared cores: what is measured beyond the table is what the engine and a busy machine add. How"
        yield "long F, I and W of a model take, it does not say."
        return
    yield "Bubble: idle time over work. Measured: what a step takes beyond m times the slope of its time over m, which"
    yield "holds what it does once, too. Temporaries: of the compiled step; activations are slots x a slot of them."
    if jax.default_backend() == "cpu" and options.target == "attached":
        yield "Simulated devices share this machine's cores: a step's time is the work of all ranks, not that of the"
        yield "busiest. Where ranks branch an idle one leaves its core to others, and no bubble is in the time; 1f1b"
        yield "and gpipe compute in idle ticks too. CPU says which does more work, --waits who waits for whom."


def draw(cells: Sequence[Cell], options: Options, title: str, ink: str) -> Any:
    """The bubble on the left, memory on the right."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    for number, (name, color) in enumerate(zip(dict.fromkeys(c.name for c in cells), LINES, strict=False)):
        mine = [cell for cell in cells if cell.name == name]
        m = [cell.microbatches for cell in mine]
        # The first is the widest, so that schedules of equal bubble are all seen.
        left.plot(m, [c.table for c in mine], color=color, linewidth=5 if number == 0 else 1.8, alpha=0.5)
        if known := [(c.microbatches, c.measured) for c in mine if c.measured is not None]:
            left.plot(*zip(*known, strict=True), "o", color=color, markersize=8 if number == 0 else 5)
        used = [cell.temporaries / MB for cell in mine]
        right.plot(m, used, "o-", color=color, label=name)
        right.plot(m, [cell.slots * cell.slot / MB for cell in mine], ":", color=color)
    left.set_ylim(min([0, *(1.1 * c.measured for c in cells if c.measured is not None)]), None)
    left.yaxis.set_major_formatter(lambda x, _: f"{x:.0%}")
    over_devices(left, options.microbatches, title="bubble: idle time over work", xlabel="microbatches")
    right.set_ylim(0, None)
    over_devices(right, options.microbatches, title="temporaries of a device, MB", xlabel="microbatches")
    left.legend(
        [
            plt.Line2D([], [], color=ink, alpha=0.5, linewidth=3),
            plt.Line2D([], [], color=ink, marker="o", linestyle=""),
        ],
        ["the schedule's table", "measured"],
    )
    handles, labels = right.get_legend_handles_labels()
    handles.append(plt.Line2D([], [], color=ink, linestyle=":"))
    figure.legend(handles, [*labels, "of it activations: slots x a slot"], loc="outside lower left", ncols=5)
    return figure


def main(options: Options) -> list[Cell]:
    """Measures, prints the table, writes the files."""
    if options.target == "h100":
        jax.config.update("jax_platforms", "cpu")  # so that the CUDA compiler does without a GPU
        devices, place = gpu_topology(f"{options.pipe}xH100"), f"{options.pipe} H100, compiled for"
    else:
        start(options.devices)
        devices, place = jax.devices(), where()
    screen = console()
    chosen: Any = named(options.model, layers=options.layers)
    if options.waits:
        chosen = waits.model(options.layers, options.waits / 1e3 * options.pipe / options.layers)
    planned = cells_of(options)
    cells, turns = [cell for cell, _ in planned], []
    with progress(screen, len(planned)) as next_is:
        for cell, schedule in planned:
            next_is(f"{cell.name}, {cell.microbatches} microbatches")
            turns.append(compiled(cell, schedule, options, chosen, devices))
    if options.target == "attached":
        measure(cells, turns, options.steps)
    fit(cells)
    for cell in cells if options.waits else ():
        assert cell.seconds is not None  # it ran
        cell.lasted = cell.seconds / (options.waits / 1e3)
        cell.measured = cell.lasted / (3 * cell.microbatches) - 1
    name = f"layers that wait, {options.waits} ms a rank," if options.waits else options.model
    size = f"{name} of {options.layers} layers, {chosen.parameters:,} parameters, {options.pipe} ranks"
    each = f"microbatches of {options.rows} x {options.length}, {options.precision}, remat={options.remat}"
    each = f"{options.steps} steps of each" if options.waits else each
    title = f"{size}\n{each}; {place}"
    if is_first():
        record(options.out / "pipeline.json", options, title=title, cells=[asdict(cell) for cell in cells])
        pictures(options.out / "pipeline", lambda ink: draw(cells, options, title, ink))
    screen.print(title)
    screen.print(table(cells, bool(options.waits)))
    screen.print(" ".join(words(options)))
    screen.print(f"{options.out}/pipeline.json, .svg, .png, and -dark.svg, -dark.png")
    return cells


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
