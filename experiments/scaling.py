"""How strategies scale: tokens/s, MFU and memory over 1, 2, 4, ... devices, weak and strong, beside what was predicted.

python experiments/scaling.py
python experiments/scaling.py --model llama3.2-1b --length 2048 --strategies fsdp,precision=bf16 ddp,precision=bf16
srun python experiments/scaling.py --model llama3-8b --length 4096 --strategies hsdp,precision=bf16,remat=layer

Weak: so many rows for each device, so that more devices do more. Strong: the rows of all devices, whatever their
number. Several processes measure first on the devices of each alone, all at once, then on those of all.
"""

import gc
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import matplotlib.pyplot as plt
import numpy as np
import optax
import tyro
from report import (
    GB,
    LINES,
    MB,
    Timed,
    console,
    grid,
    hardware,
    is_first,
    over_devices,
    pictures,
    progress,
    record,
    seconds_of,
    simulated,
    start,
    where,
)
from rich.table import Table

import jaxpar as jp
from jaxpar.hardware.hardware import peak_flops
from jaxpar.inspect.explain import explain
from jaxpar.inspect.predict import predict
from jaxpar.models import Named, named

KINDS = ("weak", "strong")


@dataclass(frozen=True)
class Options(Timed):
    """Trains one model on 1, 2, 4, ... devices under some strategies, with as many rows for each, or as many in all."""

    strategies: tuple[str, ...] = ("ddp", "fsdp", "pp")
    """presets, or name=value,...; an axis without a size, or -1, takes the devices that there are"""
    layers: int | None = None
    """that it gets, instead of its own number"""
    rows: int = 4
    """for each device; strong scaling has those of all devices on any number of them"""
    counts: tuple[int, ...] = ()
    """numbers of devices; without it: 1, 2, 4, ... of one process, and all"""
    out: Path = Path("runs/scaling")
    """where scaling.json, scaling.svg, scaling.png and their dark twins go"""

    def __post_init__(self) -> None:
        self.positive("rows", "length", "steps")
        for name in self.strategies:  # before the first is compiled
            if jp.Strategy.parse(name).server:
                raise ValueError(
                    f"--strategies {name}: a server's step is several programs; experiments/compare.py times it"
                )


@dataclass(kw_only=True)
class Cell:
    """One strategy on some devices with some rows; bytes are those of one device.

    Attributes:
      seconds: the median step.
      tokens: per second, of all devices.
      mfu: model FLOPs over the devices' peak; None where it is not known.
      explained: bytes that the compiled program says it needs.
      allocated: the peak that the device counted; None where it counts nothing.
      predicted: seconds; None where the device has no data sheet here.
    """

    strategy: str
    devices: int
    rows: int
    seconds: float = 0.0
    tokens: float = 0.0
    mfu: float | None = None
    explained: int = 0
    allocated: int | None = None
    predicted: float | None = None
    error: str = ""


def counts_of(options: Options) -> list[int]:
    """Numbers of devices to measure on. Raises ValueError for one that no process has, and that is not all."""
    here, total = jax.local_device_count(), jax.device_count()
    doubled = [2**i for i in range(here.bit_length()) if 2**i <= here]
    asked = sorted({*(options.counts or doubled), *(() if options.counts else (here, total))})
    for n in asked:
        if not (1 <= n <= here or n == total):
            raise ValueError(
                f"--counts {n}: a process has {here} devices, and all have {total}; use 1 to {here}, or {total}"
            )
    return asked


def cells_of(options: Options, counts: Sequence[int]) -> tuple[list[Cell], list[str]]:
    """What to measure, each once: on the most devices weak and strong are the same. And what does not fit."""
    cells, left_out = [], []
    for name in options.strategies:
        for n in counts:
            try:
                jp.Strategy.parse(name).sizes(n)
            except ValueError:
                left_out.append(f"{name} on {n}")
                continue
            cells += [
                Cell(strategy=name, devices=n, rows=rows)
                for rows in sorted({options.rows * n, options.rows * counts[-1]})
            ]
    return cells, left_out


def measure(cell: Cell, options: Options, chosen: Named) -> None:
    """Compiles, explains, predicts, runs."""
    every = cell.devices == jax.device_count()
    devices = jax.devices() if every else jax.local_devices()[: cell.devices]
    step = jp.make_train_step(chosen.model, optax.adamw(3e-4), cell.strategy, devices)
    tokens = np.random.default_rng(0).integers(chosen.config.vocab, size=(cell.rows, options.length + 1))
    batch, flops = {"tokens": tokens.astype(np.int32)}, chosen.flops(cell.rows, options.length)
    compiled = step.compile(batch)
    cell.explained = explain(step, batch, compiled).memory["each device"].total
    if (sheet := hardware()) is not None:
        cell.predicted = predict(compiled, step, batch, sheet, flops).seconds
    state = step.init(jax.random.key(0))
    taken, state = seconds_of(step, state, batch, options.steps)
    cell.seconds = statistics.median(taken)
    cell.tokens = cell.rows * options.length / cell.seconds
    peak = peak_flops(jax.devices()[0].device_kind, step.strategy.precision)
    cell.mfu = flops / (cell.seconds * cell.devices * peak) if peak else None
    stats = devices[0].memory_stats() if devices[0].process_index == jax.process_index() else None
    cell.allocated = stats["peak_bytes_in_use"] if stats else None


# -- what is shown -----------------------------------------------------------------------------------------------------


def efficiency(cell: Cell, cells: Sequence[Cell], kind: str, per_device: bool) -> float | None:
    """Tokens per second over those of the same strategy on its fewest devices; per device, or, where all share the same
    cores, in all. "weak": with as many rows for each device; "strong": in all. None where it is no cell of that kind.
    """
    line = [c for c in of_kind(cells, kind) if c.strategy == cell.strategy]
    if cell not in line:
        return None
    base = min(line, key=lambda c: c.devices)
    return cell.tokens / base.tokens / (cell.devices / base.devices if per_device else 1)


def of_kind(cells: Sequence[Cell], kind: str) -> list[Cell]:
    """Those that ran, with the fewest rows for each device ("weak"), or with the most in all ("strong")."""
    each, most = min(c.rows / c.devices for c in cells), max(c.rows for c in cells)
    return [c for c in cells if not c.error and (c.rows / c.devices == each if kind == "weak" else c.rows == most)]


def table(cells: Sequence[Cell], per_device: bool) -> Table:
    known = {name: any(getattr(c, name) is not None for c in cells) for name in ("mfu", "allocated", "predicted")}
    heads = ["de-\nvices", "rows", "step\nms", "tokens/s", "weak\neff.", "strong\neff."]
    heads += ["MFU"] * known["mfu"] + ["explained\nMB"] + ["allocated\nMB"] * known["allocated"]
    heads += ["predicted\nms", "/ mea-\nsured"] * known["predicted"]
    lines = grid(["strategy"], heads)
    for place, cell in enumerate(cells):
        last = place + 1 < len(cells) and cells[place + 1].strategy != cell.strategy
        counts = [str(cell.devices), str(cell.rows)]
        if cell.error:
            lines.add_row(f"{cell.strategy}: {cell.error}", *counts, end_section=last)
            continue
        parts = [efficiency(cell, cells, kind, per_device) for kind in KINDS]
        row = [*counts, f"{1e3 * cell.seconds:.1f}", f"{cell.tokens:,.0f}"]
        row += ["" if part is None else f"{part:.2f}" for part in parts]
        row += [f"{cell.mfu:.1%}" if cell.mfu else ""] * known["mfu"] + [f"{cell.explained / MB:,.1f}"]
        row += [f"{cell.allocated / MB:,.1f}" if cell.allocated else ""] * known["allocated"]
        if known["predicted"]:
            row += (
                [f"{1e3 * cell.predicted:.1f}", f"{cell.predicted / cell.seconds:.2f}"] if cell.predicted else ["", ""]
            )
        lines.add_row(cell.strategy, *row, end_section=last)
    return lines


def draw(cells: Sequence[Cell], options: Options, title: str, per_device: bool, ink: str) -> Any:
    """Tokens/s above, memory below; weak on the left, strong on the right."""
    figure, axes = plt.subplots(2, 2, figsize=(11, 7), layout="constrained", sharex=True)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    ran = [cell for cell in cells if not cell.error]
    at, most = sorted({c.devices for c in ran}), max(c.rows for c in ran)
    unit, label = (GB, "GB") if max(c.explained for c in ran) > GB else (MB, "MB")
    for column, kind in enumerate(KINDS):
        speed, memory = axes[:, column]
        wanted = of_kind(cells, kind)
        for name, color in zip(options.strategies, LINES, strict=False):
            mine = [c for c in wanted if c.strategy == name]
            n = [c.devices for c in mine]
            speed.plot(n, [c.tokens for c in mine], "o-", color=color, label=name)
            if guesses := [(c.devices, c.rows * options.length / c.predicted) for c in mine if c.predicted]:
                speed.plot(*zip(*guesses, strict=True), "D", color=color, markerfacecolor="none", markersize=8)
            memory.plot(n, [c.explained / unit for c in mine], "o-", color=color)
            if counted := [(c.devices, c.allocated / unit) for c in mine if c.allocated]:
                memory.plot(*zip(*counted, strict=True), "s", color=color, markerfacecolor="none", markersize=8)
        if first := [c for c in wanted if c.devices == at[0]]:
            best = max(c.tokens for c in first)
            ideal = [best * (n / at[0] if per_device else 1) for n in at]
            speed.plot(at, ideal, ":", color=ink, linewidth=1, zorder=0)
        rows = f"{options.rows} rows for each device" if kind == "weak" else f"{most} rows in all"
        over_devices(speed, at, title=f"{kind}: tokens/s, {rows}")
        if per_device:
            speed.set_yscale("log", base=2)
        else:  # all share the cores: a line that is level is a good one
            speed.set_ylim(0, None)
        speed.yaxis.set_major_formatter(lambda x, _: f"{x:,.0f}" if x < 1e5 else f"{x / 1e3:,.0f}k")
        over_devices(memory, at, title=f"memory of a device, {label}", xlabel="devices")
        memory.set_ylim(0, None)
    names, labels = axes[0, 0].get_legend_handles_labels()
    extra = {"nothing lost": plt.Line2D([], [], color=ink, linestyle=":")}
    empty = {"color": ink, "linestyle": "", "markerfacecolor": "none"}
    if any(c.predicted for c in ran):
        extra["predicted"] = plt.Line2D([], [], marker="D", **empty)
    if any(c.allocated for c in ran):
        extra["allocated (dots: explained)"] = plt.Line2D([], [], marker="s", **empty)
    figure.legend([*names, *extra.values()], [*labels, *extra], loc="outside lower left", ncols=4)
    return figure


def _caption(left_out: Sequence[str], per_device: bool) -> str:
    loss = (
        "Efficiency: tokens/s and device over those on the fewest devices."
        if per_device
        else "Simulated devices share the cores, so that more of them are no faster: efficiency is all tokens/s over "
        "those on the fewest devices. What lacks is what the strategy costs there; it says nothing of an accelerator."
    )
    without = f" Left out, as the strategy does not fit: {', '.join(left_out)}." if left_out else ""
    return f"{loss} Explained: what the compiled step says it needs on each device.{without}"


def main(options: Options) -> list[Cell]:
    """Measures, prints the table, writes the files."""
    start(options.devices)
    screen, counts = console(), counts_of(options)
    chosen = named(options.model, **({} if options.layers is None else {"layers": options.layers}))
    cells, left_out = cells_of(options, counts)
    # A device remembers its highest peak alone: what needs least comes first. And every process alone before all.
    for_all = lambda c: jax.process_count() > 1 and c.devices == counts[-1]
    with progress(screen, len(cells)) as next_is:
        for cell in sorted(cells, key=lambda c: (for_all(c), c.rows / c.devices, -c.devices)):
            next_is(f"{cell.strategy} on {cell.devices}, {cell.rows} rows")
            try:
                measure(cell, options, chosen)
            except (ValueError, jax.errors.JaxRuntimeError) as error:  # out of memory, or rows that do not divide
                cell.error = str(error).splitlines()[0][:200]
            gc.collect()
    if all(cell.error for cell in cells):
        raise ValueError(f"nothing ran: {cells[0].strategy} on {cells[0].devices}: {cells[0].error}")
    cells.sort(key=lambda c: (options.strategies.index(c.strategy), c.rows, c.devices))
    per_device = not simulated()
    title = f"{options.model}, {chosen.parameters:,} parameters, rows of {options.length}, AdamW, {where()}"
    if is_first():
        record(options.out / "scaling.json", options, title=title, left_out=left_out, cells=[asdict(c) for c in cells])
        pictures(options.out / "scaling", lambda ink: draw(cells, options, title, per_device, ink))
    screen.print(title)
    screen.print(table(cells, per_device))
    screen.print(_caption(left_out, per_device))
    screen.print(f"{options.out}/scaling.json, .svg, .png, and -dark.svg, -dark.png")
    return cells


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
