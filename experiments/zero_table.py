"""The ZeRO paper's table of memory per device, from compiled programs: its three stages on 1 to 1,024 devices.

python experiments/zero_table.py
python experiments/zero_table.py --compile 7.5B 128B 1T
python experiments/zero_table.py --quick

Rajbhandari et al. 2020, arXiv:1910.02054, table 1: bytes of parameters, gradients and Adam's state in mixed precision.
Here parameters and optimizer state are the arguments of the training step, compiled for H100s (no GPU is needed). Its
gradients are among the temporaries and as large as the layout says; the temporaries stand beside them. A program is as
long for 200 layers as for 20. Of models that are not compiled, the layout alone is shown. Nothing runs.
"""

import dataclasses
import functools
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the compiler for H100s wants it said before jax starts

import jax
import optax
import tyro
from memory_picture import Line, Panel, pictures
from rich import box
from rich.console import Console
from rich.table import Table

import jaxpar as jp
from jaxpar.hardware.devices import gpu_topology
from jaxpar.models import Named, named
from jaxpar.step.core import Step

GB = 1e9
# Of about the size in the paper; 1,024 divides a dim of every leaf, so that none is padded.
MODELS = {
    "7.5B": {"dim": 5120, "layers": 23, "heads": 40},
    "128B": {"dim": 7168, "layers": 207, "heads": 56},
    "1T": {"dim": 21504, "layers": 180, "heads": 168},
}
# As printed, in GB: P_os, P_os+g, P_os+g+p.
PRINTED = {
    "7.5B": {
        1: (120, 120, 120),
        4: (52.5, 41.3, 30),
        16: (35.6, 21.6, 7.5),
        64: (31.4, 16.6, 1.88),
        256: (30.4, 15.4, 0.47),
        1024: (30.1, 15.1, 0.12),
    },
    "128B": {
        1: (2048, 2048, 2048),
        4: (896, 704, 512),
        16: (608, 368, 128),
        64: (536, 284, 32),
        256: (518, 263, 8),
        1024: (513, 257, 2),
    },
    "1T": {
        1: (16000, 16000, 16000),
        4: (7000, 5500, 4000),
        16: (4750, 2875, 1000),
        64: (4187, 2218, 250),
        256: (4046, 2054, 62.5),
        1024: (4011, 2013, 15.6),
    },
}
DEVICES = (1, 4, 16, 64, 256, 1024)
ROW = 16  # positions; activations are no part of the table


@dataclass(frozen=True)
class Stage:
    """One stage of ZeRO: its name in the paper, our strategy, bytes per parameter on N devices, theirs and ours."""

    name: str
    strategy: str
    paper: Callable[[int], float]
    ours: Callable[[int], float]


STAGES = (
    # With one microbatch, its gradients would be scattered inside the backward, and it would be the next.
    Stage("Pos", "zero1,microbatches=2", lambda n: 4 + 12 / n, lambda n: 4 + 12 / n),
    Stage("Pos+g", "zero2", lambda n: 2 + 14 / n, lambda n: 2 + 14 / n),
    Stage("Pos+g+p", "zero3", lambda n: 16 / n, lambda n: 14 / n),
)
_ALONE = 14  # bytes per parameter on one device: as zero3, without the paper's copy in bfloat16


@dataclass(frozen=True)
class Options:
    """Reproduces table 1 of the ZeRO paper from compiled programs."""

    compile: tuple[str, ...] = ("7.5B",)
    """models whose steps are compiled, ten seconds or so each; of the others the layout is shown"""
    devices: tuple[int, ...] = DEVICES
    """numbers of devices"""
    quick: bool = False
    """a tiny model on 1 and 8 simulated CPU devices"""
    out: Path = Path("runs/zero_table")
    """where zero_table.json, zero_table.svg, zero_table.png and their dark twins go"""

    def __post_init__(self) -> None:
        for name in self.compile:
            if name not in MODELS:
                raise ValueError(f"--compile {name} is no model of the table; use {', '.join(MODELS)}")
        for n in self.devices:
            if n not in DEVICES:
                raise ValueError(f"--devices {n} is no row of the table; use {', '.join(map(str, DEVICES))}")


@dataclass(frozen=True)
class Cell:
    """One stage on some devices; all in bytes per device.

    Attributes:
      printed: the paper's number, None where it has none.
      paper, expected: the paper's closed form, and ours.
      layout: parameters and optimizer state as the layout has them.
      gradients: of all parameters that the update or, over microbatches, the sum of them holds.
      arguments, temporaries: of the compiled step; None if it was not compiled. Gradients are among the latter.
    """

    model: str
    stage: str
    devices: int
    printed: float | None
    paper: float
    expected: float
    layout: int
    gradients: int
    arguments: int | None = None
    temporaries: int | None = None

    @property
    def found(self) -> int:
        """Parameters, optimizer state and gradients."""
        return (self.layout if self.arguments is None else self.arguments) + self.gradients


def gradients(step: Step) -> int:
    """Bytes of gradients that a device holds: what the update gets, or whole ones where microbatches are added up."""
    if step.strategy.zero != 1 or step.strategy.microbatches == 1:
        return step.layout.bytes["grads"]
    size = lambda leaf: math.prod(leaf.shape) * step.policy.reduced(leaf.dtype).itemsize
    return sum(size(leaf) for leaf in step.layout.leaves if leaf.trainable)


def measure(chosen: Named, strategy: str, devices: Sequence[jax.Device], compiles: bool) -> tuple[int, ...]:
    """Layout and gradients, and of the compiled step arguments and temporaries."""
    # Gradients in bfloat16, as the paper has them.
    step = jp.make_train_step(
        chosen.model, optax.adamw(3e-4), f"{strategy},precision=bf16,reduce=compute,remat=layer", mesh=devices
    )
    at_rest = step.layout.bytes
    sizes = at_rest["params"] + at_rest["optimizer"], gradients(step)
    if not compiles:
        return sizes
    batch = chosen.example(len(devices) * step.strategy.microbatches, ROW)
    memory = step.compile(batch).memory_analysis()
    return *sizes, memory.argument_size_in_bytes, memory.temp_size_in_bytes


def cells_of(
    name: str, chosen: Named, counts: Sequence[int], attach: Callable[[int], Sequence[jax.Device]], compiles: bool,
    console: Console,
) -> list[Cell]:  # fmt: skip
    """The cells of one model. One device has no stages: it is compiled once."""
    cells = []
    run = functools.cache(lambda strategy, n: measure(chosen, strategy, attach(n), compiles))
    for n in counts:
        for number, stage in enumerate(STAGES):
            with console.status(f"{name}: {stage.name} on {n}"):
                sizes = run("single" if n == 1 else stage.strategy, n)
            printed = PRINTED[name][n][number] * GB if name in PRINTED else None
            ours = _ALONE if n == 1 else stage.ours(n)
            size = chosen.parameters
            cells.append(Cell(name, stage.name, n, printed, size * stage.paper(n), size * ours, *sizes))
    return cells


# -- what is shown -----------------------------------------------------------------------------------------------------


def table(cells: Sequence[Cell]) -> Table:
    unit, label = (GB, "GB") if max(cell.paper for cell in cells) > GB else (1e6, "MB")
    grid = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False, header_style="bold")
    heads = ("devices", "stage", f"paper\n{label}", f"expected\n{label}", f"found\n{label}", "found\n/ paper")
    for head in (*heads, "found /\nexpected", "of it\ngrads", "tempo-\nraries"):
        grid.add_column(head, justify="left" if head == "stage" else "right", no_wrap=True)
    show = lambda size: "" if size is None else f"{size / unit:.4g}" if size < 1e3 * unit else f"{size / unit:,.0f}"
    for cell in cells:
        ratios = f"{cell.found / cell.paper:.3f}", f"{cell.found / cell.expected:.4f}"
        sizes = map(show, (cell.gradients, cell.temporaries))
        paper = cell.paper if cell.printed is None else cell.printed
        grid.add_row(
            str(cell.devices), cell.stage, show(paper), show(cell.expected), show(cell.found), *ratios, *sizes,
            end_section=cell.stage == STAGES[-1].name,
        )  # fmt: skip
    return grid


def agreement(cells: Sequence[Cell]) -> str:
    """How far the compiled arguments are from the layout's, and whether the temporaries hold the gradients."""
    worst = max((abs(c.arguments / c.layout - 1) for c in cells if c.arguments is not None), default=None)
    if worst is None:
        return "Not compiled: parameters and optimizer state are those of the layout."
    least = min(c.temporaries / c.gradients for c in cells if c.temporaries is not None)
    return (
        f"Arguments of the {len(cells)} compiled cells are those of the layout to {worst:.0e}; temporaries are "
        f"{least:.2f} x the gradients or more."
    )


NOTES = (
    "found: arguments of the step + gradients. Ratios are to the closed forms, which the paper's table rounds.",
    "Pos, Pos+g: the paper's accounting, 4P + 12P/N and 2P + 14P/N. Pos is compiled for two microbatches: with one, "
    "gradients are scattered inside the backward, and it holds what Pos+g does.",
    "Pos+g+p, and one device: 14P/N, where the paper has 16P/N. It stores parameters twice, in float32 and bfloat16; "
    "here the float32 shard alone is stored, and cast on its way into a layer.",
    "temporaries: gradients, the layer at work, its activations, and what the program needs to communicate.",
)


def panel(name: str, cells: Sequence[Cell]) -> Panel:
    """One model's."""
    lines = {
        stage.name: Line(
            [cell.found / GB for cell in cells if cell.stage == stage.name],
            [cell.paper / GB for cell in cells if cell.stage == stage.name],
        )
        for stage in STAGES
    }
    kind = "layout" if cells[0].arguments is None else "compiled"
    counts = [cell.devices for cell in cells if cell.stage == STAGES[0].name]
    return Panel(f"{name}, {kind}: GB per device", "devices", counts, lines)


def main(options: Options) -> list[Cell]:
    """Measures, prints the tables, writes the files."""
    console = Console(width=max(80, min(100, Console().width)), highlight=False)
    if options.quick:
        jp.simulate(8)
        chosen, counts, compiles = {"gpt-tiny": named("gpt-tiny")}, (1, 8), ("gpt-tiny",)
        where, attach = "simulated CPU devices", lambda n: jax.devices()[:n]
    else:
        chosen = {name: named("gpt2", **sizes) for name, sizes in MODELS.items()}
        counts, compiles = options.devices, options.compile
        where, attach = "H100", lambda n: gpu_topology(f"{n}xH100")
    options.out.mkdir(parents=True, exist_ok=True)
    cells: list[Cell] = []
    for name, model in chosen.items():
        mine = cells_of(name, model, counts, attach, name in compiles, console)
        console.print(f"{name}: GPT with {model.parameters:,} parameters, {model.config.layers} layers; AdamW, {where}")
        console.print(table(mine))
        console.print(agreement(mine), "\n")
        cells += mine
    rows = [dataclasses.asdict(cell) | {"found": cell.found} for cell in cells]
    parameters = {name: model.parameters for name, model in chosen.items()}
    found = {"parameters": parameters, "jax": jax.__version__, "cells": rows}
    (options.out / "zero_table.json").write_text(json.dumps(found, indent=1))
    pictures([panel(name, [c for c in cells if c.model == name]) for name in chosen], options.out / "zero_table")
    console.print(*NOTES, sep="\n")
    console.print(f"{options.out}/zero_table.json, .svg, .png, and -dark.svg, -dark.png")
    return cells


if __name__ == "__main__":
    main(tyro.cli(Options))
