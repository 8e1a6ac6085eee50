"""`jaxpar bench collectives`: collectives over all devices, in nccl-tests' terms, as a table, JSON and a picture."""

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import jax
import matplotlib.pyplot as plt
import numpy as np
from jax.sharding import AxisType, Mesh
from rich.console import Console
from rich.table import Table

from ...layout.distributed import attach
from ...text import did_you_mean
from .timing import Dtype, Effort, Measurement, Op, measure

_GREY = "#768390"  # reads on white and on black


@dataclass(frozen=True)
class BenchOptions:
    """Measures collectives over all devices, and checks their results."""

    ops: tuple[Op, ...] = get_args(Op)
    """the collectives to measure"""
    smallest: str = "1k"
    """bytes to begin with, such as 512, 1k, 4M, 1G; 1k is 1024"""
    largest: str = "256M"
    """bytes to end with"""
    factor: int = 4
    """from each size to the next"""
    dtype: Dtype = "float32"
    """of the elements"""
    devices: int | None = None
    """simulate so many CPU devices; without it: the accelerators attached, or 8 simulated ones where there are none"""
    iterations: int = 20
    """collectives in one timed program, at most"""
    repeats: int = 5
    """timed programs, of which the median counts, at most"""
    warmup: int = 1
    """collectives that run before anything is timed"""
    seconds: float = 1.0
    """for the timed programs of one size: large sizes get fewer iterations and repeats, at least one"""
    out: Path = Path("runs/collectives")
    """where collectives.json and collectives.png go"""

    def __post_init__(self) -> None:
        for name in ("iterations", "repeats", "warmup"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} measures nothing; use 1 or more")
        if self.factor < 2:
            raise ValueError(f"factor={self.factor} never reaches the largest size; use 2 or more")
        if bytes_of(self.smallest) > bytes_of(self.largest):
            raise ValueError(f"smallest={self.smallest!r} is above largest={self.largest!r}; swap them")
        for name, value, known in (
            *(("ops", op, get_args(Op)) for op in self.ops),
            ("dtype", self.dtype, get_args(Dtype)),
        ):
            if value not in known:
                near = did_you_mean(value, known)
                raise ValueError(f"{name}: {value!r} cannot be measured; use {', '.join(known)}{near}")

    @property
    def effort(self) -> Effort:
        """How long to measure each."""
        return Effort(self.iterations, self.repeats, self.warmup, self.seconds)

    @property
    def sizes(self) -> list[int]:
        """In bytes, from the smallest in steps of `factor`, the largest among them if a step meets it."""
        size, sizes = bytes_of(self.smallest), []
        while size <= bytes_of(self.largest):
            sizes.append(size)
            size *= self.factor
        return sizes


def bytes_of(text: str) -> int:
    """A size in bytes.

    >>> bytes_of("1k"), bytes_of("256MB"), bytes_of("100")
    (1024, 268435456, 100)
    """
    found = re.fullmatch(r"(\d+) ?([kMG]?)i?B?", text, re.IGNORECASE)
    if found is None or not int(found[1]):
        raise ValueError(f"{text!r} is no size; use for example 1000, 64k, 256M or 1G")
    return int(found[1]) * 1024 ** " KMG".index(found[2].upper() or " ")


def main(options: BenchOptions) -> list[Measurement]:
    """Measure and print a table; write collectives.json and collectives.png to `options.out`.

    Raises:
      ValueError: there is one device.
      RuntimeError: a result was wrong.
    """
    attach(options.devices)
    devices = jax.devices()
    if len(devices) == 1:
        raise ValueError(f"a collective needs two devices, and there is 1 ({devices[0].device_kind}); try devices=8")
    mesh, console = Mesh(np.array(devices), ("rank",), axis_types=(AxisType.Auto,)), Console()
    title = f"{mesh.size} x {devices[0].device_kind}, {options.dtype}"
    simulated = devices[0].platform == "cpu"
    if simulated:
        title += ", simulated"
        console.print(
            "Simulated devices: these are copies within the memory of one machine, not a network's bandwidth."
        )
    measured: list[Measurement] = []
    with console.status("") as status:
        for op in options.ops:
            for size in options.sizes:
                status.update(f"{op}, {_short(size)}B")
                measured.append(measure(op, size, options.dtype, mesh, options.effort))
            if not console.is_terminal:
                console.print(f"{op}: {max(row.busbw for row in measured if row.op == op):.3g} GB/s busbw at best")
    console.print(_table(measured, title))
    options.out.mkdir(parents=True, exist_ok=True)
    about = {"devices": title, "ranks": mesh.size, "simulated": simulated, "jax": jax.__version__}
    rows = [dataclasses.asdict(row) for row in measured]
    (options.out / "collectives.json").write_text(json.dumps(about | {"rows": rows}, indent=1))
    _plot(measured, title, options.out / "collectives.png")
    console.print(f"written: {options.out}/collectives.json, {options.out}/collectives.png")
    if wrong := sum(row.wrong for row in measured):
        raise RuntimeError(f"{wrong} elements are wrong: this machine's collectives cannot be trusted; see the table")
    return measured


def _table(measured: Sequence[Measurement], title: str) -> Table:
    table = Table(title=title, caption="algbw, busbw: 1e9 bytes/s, as nccl-tests define them")
    for column in ("collective", "bytes", "time (us)", "algbw", "busbw", "wrong"):
        table.add_column(column, justify="left" if column == "collective" else "right")
    for row, after in zip(measured, [*measured[1:], None], strict=True):
        table.add_row(
            *(row.op, f"{row.bytes:,}", f"{row.seconds * 1e6:,.1f}", f"{row.algbw:.4g}", f"{row.busbw:.4g}"),
            str(row.wrong),
            style="bold red" if row.wrong else None,
            end_section=after is not None and after.op != row.op,
        )
    return table


def _plot(measured: Sequence[Measurement], title: str, path: Path) -> None:
    texts = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    grey: dict[Any, str] = dict.fromkeys(texts, _GREY)
    with plt.rc_context(grey):
        figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
        ops = list(dict.fromkeys(row.op for row in measured))
        for i, op in enumerate(ops):
            mine = [row for row in measured if row.op == op]
            x, y = [row.bytes for row in mine], [row.busbw for row in mine]
            axes.plot(x, y, marker="os^Dv"[i % 5], markersize=4, linewidth=1.5, color=f"C{i % 10}", label=op)
        axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="busbw (1e9 bytes/s)", title=title)
        ticks = sorted({row.bytes for row in measured})
        ticks = ticks[:: -(-len(ticks) // 10)]
        axes.set_xticks(ticks, [_short(size) for size in ticks])
        axes.minorticks_off()
        axes.grid(color=_GREY, alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside right upper", frameon=False)
        figure.savefig(path, dpi=160, transparent=True)
        plt.close(figure)


def _short(size: int) -> str:
    """1024 -> "1k": nccl-tests' units, which are binary and have no B, unlike all others here."""
    power = min((size.bit_length() - 1) // 10, 3)
    return f"{size / 1024**power:.3g}{' kMG'[power].strip()}"
