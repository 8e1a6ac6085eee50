"""What a pipeline costs: its bubble and its memory over microbatches and chunks, beside the closed forms.

python experiments/pipeline.py
python experiments/pipeline.py --quick

The bubble is that of the schedules, counted from their tables. Memory is that of the compiled step: for H100s where the
CUDA compiler is installed (no GPU is needed), else for simulated CPU devices. Nothing runs.
"""

import dataclasses
import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Literal

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the compiler for H100s wants it said before jax starts

import jax
import matplotlib.pyplot as plt
import numpy as np
import optax
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

import jaxpar as jp
from jaxpar.inspect.targets.devices import gpu_topology, missing_compiler
from jaxpar.inspect.timeline.drawing import slot_bytes
from jaxpar.models import Named, named
from jaxpar.parallel.pipeline.schedules import Schedule

GB = 1e9
THEMES = {"": ("#1f2328", "#ffffff", "#d0d7de"), "-dark": ("#e6edf3", "#0d1117", "#3d444d")}  # ink, paper, lines
# Name, schedule, chunks, colour. Memory is asked of all but the last.
SCHEDULES = (
    ("gpipe", "gpipe", 1, "#d9822b"),
    ("1f1b", "1f1b", 1, "#4c8dd6"),
    ("1f1b, 2 chunks", "1f1b", 2, "#3fa05a"),
    ("1f1b, 4 chunks", "1f1b", 4, "#9a6fd0"),
)


@dataclass(frozen=True)
class Options:
    """Compares the bubble and the memory of schedules with their closed forms."""

    model: str = "llama3-8b"
    """the name of a model of text"""
    layers: int = 8
    """that it gets"""
    pipe: int = 4
    """ranks"""
    microbatches: tuple[int, ...] = (4, 8, 16, 32)
    """numbers of microbatches, each of one row"""
    length: int = 2048
    """positions of a row"""
    remat: Literal["none", "layer", "dots"] = "dots"
    """what each layer recomputes in its backward; an activation is what it does not"""
    target: Literal["auto", "h100", "cpu"] = "auto"
    """what to compile for; auto: H100s if their compiler is installed"""
    quick: bool = False
    """a tiny model on two simulated CPU devices, 32 microbatches, without chunks"""
    out: Path = Path("runs/pipeline")
    """where pipeline.json, pipeline.svg, pipeline.png and their dark twins go"""


@dataclass(frozen=True)
class Cell:
    """One schedule: its bubble as part of the work, counted and by closed form, and the memory of its step.

    Attributes:
      bubble, expected: idle time over busy time, from the table and as (p - 1) / (v m).
      slots: activations that every rank has room for.
      slot, temporaries: bytes of one slot and of all temporaries of the compiled step; None where it was not compiled.
    """

    name: str
    microbatches: int
    bubble: float
    expected: float
    slots: int
    slot: int | None = None
    temporaries: int | None = None


def bubble(schedule: Schedule) -> Fraction:
    """Idle time over busy time of the first rank. A tick takes 1 for forwards and 2 for backwards, if it has some."""
    time = busy = 0
    for column in schedule.table():
        kinds = {op.kind for ops in column for op in ops}
        time += ("F" in kinds) + 2 * ("B" in kinds)
        busy += sum(1 if op.kind == "F" else 2 for op in column[0])
    return Fraction(time - busy, busy)


def compiled(options: Options, chosen: Named, schedule: Schedule, devices: Sequence[jax.Device]) -> tuple[int, int]:
    """Bytes of one slot, and of the temporaries of the compiled step."""
    strategy = jp.Strategy(
        pipe=schedule.ranks,
        microbatches=schedule.microbatches,
        schedule=schedule.kind,
        chunks=schedule.chunks,
        precision="bf16",
        remat=options.remat,
    )
    step = jp.make_train_step(chosen.model, optax.adamw(3e-4), strategy, mesh=devices)
    batch = chosen.example(schedule.microbatches, options.length)
    return slot_bytes(step, batch), step.compile(batch).memory_analysis().temp_size_in_bytes


def measure(options: Options, chosen: Named, devices: Sequence[jax.Device], console: Console) -> list[Cell]:
    cells = []
    p = options.pipe
    for (name, kind, v, _), m in itertools.product(SCHEDULES, options.microbatches):
        schedule = Schedule(kind, p, m, v)
        cell = Cell(name, m, float(bubble(schedule)), (p - 1) / (v * m), schedule.slots)
        if v <= (1 if options.quick else 2):
            with console.status(f"compiling {name}, {m} microbatches"):
                slot, temporaries = compiled(options, chosen, schedule, devices)
            cell = dataclasses.replace(cell, slot=slot, temporaries=temporaries)
        cells.append(cell)
    return cells


# -- what is shown -----------------------------------------------------------------------------------------------------


def table(cells: Sequence[Cell]) -> Table:
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    grid.add_column("schedule", no_wrap=True)
    for head in ("micro-\nbatches", "bubble /\nwork", "(p-1)\n/(v m)", "slots", "a slot\nMB", "temporaries\nGB"):
        grid.add_column(head, justify="right", no_wrap=True)
    for cell in cells:
        slot = "" if cell.slot is None else f"{cell.slot / 1e6:.3f}"
        temporaries = "" if cell.temporaries is None else f"{cell.temporaries / GB:.3f}"
        numbers = f"{cell.bubble:.4f}", f"{cell.expected:.4f}", str(cell.slots), slot, temporaries
        grid.add_row(cell.name, str(cell.microbatches), *numbers)
    return grid


def draw(cells: Sequence[Cell], options: Options, title: str, theme: str) -> None:
    ink, paper, lines = THEMES[theme]
    style = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), ink)
    style |= {"figure.facecolor": paper, "axes.facecolor": paper, "axes.edgecolor": lines, "grid.color": lines}
    style |= {"font.size": 10, "axes.titlesize": 11, "axes.titleweight": "bold", "axes.titlelocation": "left"}
    style |= {"axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "jaxpar"}
    with plt.rc_context(style):
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
        figure.suptitle(title, x=0.01, ha="left", fontsize=10)
        for name, *_, color in SCHEDULES:
            mine, wide = [cell for cell in cells if cell.name == name], name == "gpipe"  # under 1f1b, of equal bubble
            m = np.array([cell.microbatches for cell in mine])
            dense = np.geomspace(m[0], m[-1], 50)
            left.plot(dense, mine[0].expected * m[0] / dense, color=color, linewidth=4 if wide else 1.5, alpha=0.6)
            left.plot(m, [cell.bubble for cell in mine], "o", color=color, markersize=9 if wide else 5, label=name)
            if mine[0].temporaries is not None:
                used = [cell.temporaries / GB for cell in mine if cell.temporaries is not None]
                stash = [cell.slots * cell.slot / GB for cell in mine if cell.slot is not None]
                right.plot(m, used, "o-", color=color, label=name)
                right.plot(m, stash, ":", color=color)
                right.annotate(f" {used[-1]:.3g}", (m[-1], used[-1]), color=color, va="center", fontweight="bold")
        left.set(title="bubble: idle time over work", yscale="log", xlabel="microbatches m")
        left.set_yticks([0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1], ["1%", "2%", "5%", "10%", "20%", "50%", "100%"])
        left.yaxis.minorticks_off()
        right.set(title="temporaries of the compiled step, GB", xlabel="microbatches m", ylim=(0, None))
        handle = plt.Line2D([], [], color=ink, alpha=0.6)
        left.legend(
            [*left.get_legend_handles_labels()[0], handle],
            [*left.get_legend_handles_labels()[1], "closed form (p - 1) / (v m)"],
            frameon=False,
        )
        stash_handle = plt.Line2D([], [], color=ink, linestyle=":")
        right.legend(
            [*right.get_legend_handles_labels()[0], stash_handle],
            [*right.get_legend_handles_labels()[1], "of it activations: slots x a slot"],
            frameon=False,
        )
        for axis in (left, right):
            axis.set_xscale("log", base=2)
            axis.set_xticks(options.microbatches, [str(m) for m in options.microbatches])
            axis.grid(axis="y", linewidth=0.5, alpha=0.6)
        for suffix in (".svg", ".png"):
            figure.savefig(options.out / f"pipeline{theme}{suffix}", dpi=150)
        plt.close(figure)


def attach(options: Options) -> tuple[list[jax.Device], str]:
    """The devices to compile for, and what to call them."""
    missing = missing_compiler()
    if options.target == "h100" or (options.target == "auto" and not missing and not options.quick):
        return gpu_topology(f"{options.pipe}xH100"), f"{options.pipe} H100"
    jp.simulate(options.pipe)
    return jax.devices()[: options.pipe], f"{options.pipe} simulated CPU devices"


def main(options: Options) -> list[Cell]:
    """Measures, prints the table, writes the files."""
    console = Console(width=max(80, min(100, Console().width)), highlight=False)
    if options.quick:
        options = dataclasses.replace(options, model="llama-tiny", layers=4, pipe=2, microbatches=(32,), length=64)
    devices, where = attach(options)
    chosen = named(options.model, layers=options.layers)
    options.out.mkdir(parents=True, exist_ok=True)
    cells = measure(options, chosen, devices, console)
    size = f"{options.model} with {options.layers} layers, {chosen.parameters:,} parameters"
    title = f"{size}; rows of {options.length}, one a microbatch; bf16, remat={options.remat}; {where}"
    rows = [dataclasses.asdict(cell) for cell in cells]
    found = {"title": title, "pipe": options.pipe, "jax": jax.__version__, "cells": rows}
    (options.out / "pipeline.json").write_text(json.dumps(found, indent=1))
    for theme in THEMES:
        draw(cells, options, title, theme)
    console.print(title)
    console.print(table(cells))
    console.print(f"{options.out}/pipeline.json, .svg, .png, and -dark.svg, -dark.png")
    return cells


if __name__ == "__main__":
    main(tyro.cli(Options))
