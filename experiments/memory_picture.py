"""The pictures of `zero_table.py` and `megatron_memory.py`: what is found, as dots, on the papers' sums, as lines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from report import over_devices
from report import pictures as drawn

COLORS = ("#4c8dd6", "#d9822b", "#3fa05a", "#9a6fd0")


@dataclass(frozen=True)
class Line:
    """Over numbers of devices: what is found, and the paper's sum where it has one."""

    found: Sequence[float]
    paper: Sequence[float] | None


@dataclass(frozen=True)
class Panel:
    """One diagram: its title, what is along the horizontal axis, and its lines by name."""

    title: str
    label: str
    at: Sequence[int]
    lines: Mapping[str, Line]


def pictures(panels: Sequence[Panel], path: Path) -> None:
    """Draws panels side by side, light and dark, as .svg and .png."""

    def draw(ink: str) -> Any:
        figure, axes = plt.subplots(1, len(panels), figsize=(11, 4.4), layout="constrained", squeeze=False)
        for panel, axis in zip(panels, axes[0], strict=True):
            _draw(panel, axis)
        handles, labels = axes[0][0].get_legend_handles_labels()
        line = plt.Line2D([], [], color=ink, linewidth=4, alpha=0.4)
        figure.legend([*handles, line], [*labels, "the paper"], loc="outside lower left", ncols=5)
        return figure

    drawn(path, draw)


def _draw(panel: Panel, axis: Any) -> None:
    for (name, line), color in zip(panel.lines.items(), COLORS, strict=False):
        if line.paper is not None:
            axis.plot(panel.at, line.paper, color=color, linewidth=4, alpha=0.4)
        axis.plot(panel.at, line.found, "o", color=color, markersize=5, label=name)
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axis.yaxis.set_minor_formatter(lambda x, _: f"{x:g}" if f"{x:e}"[0] in "25" else "")
    over_devices(axis, panel.at, title=panel.title, xlabel=panel.label)
