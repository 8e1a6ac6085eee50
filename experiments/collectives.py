"""The bandwidth of collectives by size, beside the data sheets of the links: within a host, and over all of them.

python experiments/collectives.py
python experiments/collectives.py --ops all_reduce --largest 1G
srun python experiments/collectives.py

busbw is that of nccl-tests: what the busiest link carries per second, to be set beside its data sheet whatever the
number of ranks. Every result is checked. `collective_timing.py` times one.
"""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import jax
import matplotlib.pyplot as plt
import numpy as np
import tyro
from collective_timing import Dtype, Effort, Measurement, Op, bytes_of, measure
from jax.sharding import AxisType, Mesh
from report import (
    LINES,
    Common,
    console,
    grid,
    hardware,
    is_first,
    pictures,
    progress,
    record,
    simulated,
    start,
    where,
)
from rich.table import Table

from jaxpar.backend.text import size

COMMON: tuple[Op, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
MOST = 1 << 30  # bytes that the timed collectives of one size carry


@dataclass(frozen=True)
class Options(Common):
    """Measures collectives over the devices of a host and over all, beside what the links are said to do."""

    ops: tuple[Op, ...] = COMMON
    """the collectives"""
    smallest: str = "4k"
    """bytes to begin with, such as 512, 1k, 4M; 1k is 1024"""
    largest: str = "64M"
    """bytes to end with"""
    factor: int = 4
    """from each size to the next"""
    dtype: Dtype = "float32"
    """of the elements"""
    repeats: int = 5
    """timed programs, of which the median counts"""
    iterations: int = 20
    """collectives in one of them, fewer where they are large"""
    out: Path = Path("runs/collectives")
    """where collectives.json, collectives.svg, collectives.png and their dark twins go"""

    def __post_init__(self) -> None:
        if self.factor < 2:
            raise ValueError(f"factor={self.factor} never reaches the largest size; use 2 or more")
        if bytes_of(self.smallest) > bytes_of(self.largest):
            raise ValueError(f"smallest={self.smallest!r} is above largest={self.largest!r}; swap them")
        if unknown := set(self.ops) - set(get_args(Op)):
            raise ValueError(f"--ops {' '.join(sorted(unknown))}: use {', '.join(get_args(Op))}")

    @property
    def sizes(self) -> list[int]:
        """In bytes, from the smallest in steps of `factor`."""
        least, most = bytes_of(self.smallest), bytes_of(self.largest)
        return [least * self.factor**i for i in range(int(math.log(most / least, self.factor) + 1e-9) + 1)]


def meshes() -> dict[str, tuple[Mesh, str]]:
    """Devices by what joins them: those of a host by links, all of several hosts by a network. Of each the mesh,
    and the axis along which is measured.
    """
    devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    hosts, auto = jax.process_count(), (AxisType.Auto,) * 2
    grouped = Mesh(np.array(devices).reshape(hosts, -1), ("host", "rank"), axis_types=auto)
    found = {}
    if len(devices) > hosts:
        found["within a host" if hosts > 1 else "all devices"] = grouped, "rank"
    if hosts > 1:
        found["over all hosts"] = Mesh(np.array(devices)[None], ("host", "rank"), axis_types=auto), "rank"
    return found


def sheets() -> dict[str, float]:
    """GB/s of one device and direction: of its links and its network, by their data sheets, and what NCCL's own model
    expects of the links. Empty where nothing is known.
    """
    sheet = hardware()
    if sheet is None:
        return {}
    found = {"link, data sheet": sheet.link_bandwidth, "network, data sheet": sheet.network_bandwidth}
    if sheet.link_bandwidth and sheet.link_efficiency:
        found["link, of which collectives reach"] = sheet.link_bandwidth * sheet.link_efficiency
    return {name: value / 1e9 for name, value in found.items() if value and (jax.process_count() > 1 or "link" in name)}


def effort(options: Options, bytes_: int) -> Effort:
    """How often: the same in every process, whatever its clock says, or they would wait for each other for ever."""
    return Effort(max(1, min(options.iterations, MOST // (4 * bytes_))), options.repeats, 1, math.inf)


# -- what is shown -----------------------------------------------------------------------------------------------------


def table(rows: dict[str, list[Measurement]], options: Options, known: dict[str, float]) -> Table:
    """Of each collective the smallest size's time, the largest's bandwidth, and the best."""
    share = ["of data\nsheet"] if known else []
    heads = ["ranks", f"us at\n{options.smallest}", f"GB/s at\n{options.largest}", "best\nGB/s", *share, "wrong"]
    lines = grid(["collective", ""], heads)
    for at, measured in rows.items():
        mesh, axis = meshes()[at]
        peak = known.get("network, data sheet" if "over" in at else "link, data sheet")
        for op in options.ops:
            mine = [row for row in measured if row.op == op]
            best = max(row.busbw for row in mine)
            part = [f"{best / peak:.0%}" if peak else ""] if known else []
            lines.add_row(
                op,
                at,
                str(mesh.shape[axis]),
                f"{1e6 * mine[0].seconds:,.1f}",
                *(f"{x:.3g}" for x in (mine[-1].busbw, best)),
                *part,
                str(sum(row.wrong for row in mine)),
                end_section=op == options.ops[-1],
            )
    return lines


def draw(rows: dict[str, list[Measurement]], options: Options, title: str, known: dict[str, float], ink: str) -> Any:
    """One diagram for each kind of connection."""
    figure, axes = plt.subplots(1, len(rows), figsize=(6 + 3 * len(rows), 4.6), layout="constrained", squeeze=False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    for axis, (at, measured) in zip(axes[0], rows.items(), strict=True):
        for number, (op, color) in enumerate(zip(options.ops, LINES * 2, strict=False)):
            mine = [row for row in measured if row.op == op]
            axis.plot(
                [r.bytes for r in mine], [r.busbw for r in mine], "os^Dv"[number % 5] + "-", color=color, label=op
            )
        for name, value in known.items():
            axis.axhline(value, color=ink, linewidth=1, linestyle=":")
            axis.text(options.sizes[0], value, name, va="bottom", fontsize=8)
        axis.set(title=f"{at}: busbw, GB/s", xlabel="bytes", yscale="log")
        axis.set_xscale("log", base=2)
        ticks = options.sizes[:: -(-len(options.sizes) // 8)]
        axis.set_xticks(ticks, [size(n, ".3g") for n in ticks])
        axis.yaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axis.minorticks_off()
        axis.grid(axis="y", linewidth=0.5, alpha=0.6)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower left", ncols=5)
    return figure


def main(options: Options) -> dict[str, list[Measurement]]:
    """Measures, prints the table, writes the files. Raises RuntimeError where a result is wrong."""
    start(options.devices)
    screen, places, known = console(), meshes(), sheets()
    if not places:
        raise ValueError(
            f"a collective needs two devices, and there is one ({jax.devices()[0].device_kind}); try --devices 8"
        )
    rows: dict[str, list[Measurement]] = {at: [] for at in places}
    with progress(screen, len(places) * len(options.ops) * len(options.sizes)) as next_is:
        for at, (mesh, axis) in places.items():
            for op in options.ops:
                for bytes_ in options.sizes:
                    next_is(f"{op} of {size(bytes_, '.3g')} {at}")
                    rows[at].append(measure(op, bytes_, options.dtype, mesh, effort(options, bytes_), axis))
    title = f"{where()}, {options.dtype}"
    if is_first():
        found = {at: [asdict(row) for row in mine] for at, mine in rows.items()}
        record(options.out / "collectives.json", options, title=title, data_sheets=known, rows=found)
        pictures(options.out / "collectives", lambda ink: draw(rows, options, title, known, ink))
    screen.print(title)
    screen.print(table(rows, options, known))
    screen.print(
        "Simulated devices: copies within one machine, no network's bandwidth."
        if simulated()
        else "busbw, 1e9 bytes/s. Data sheets: of a device and direction; sources: jaxpar/hardware/hardware.py."
    )
    screen.print(f"{options.out}/collectives.json, .svg, .png, and -dark.svg, -dark.png")
    if wrong := sum(row.wrong for mine in rows.values() for row in mine):
        raise RuntimeError(f"{wrong} elements are wrong: these collectives cannot be trusted; see the table")
    return rows


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
