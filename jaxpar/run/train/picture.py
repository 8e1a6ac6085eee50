"""The picture of a run (`loss.png`), drawn from the lines of `metrics.jsonl`.

    loss           training batches as a line, held-out losses as points, reference losses as dashed lines
    expert loads   for a mixture of experts: one row of colours per expert, its mean share at the right
    dropped        for a mixture of experts: percentage of dropped routing choices

The lower two panels appear only if the metrics have `load_0`, `load_1`, ... and `dropped`.
"""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .folder import write_whole
from .loop import Units

# Legible on white and on black: the figure has a transparent background.
_INK, _LINE, _POINTS = "#808080", "#5b8dd9", "#e07b39"
_LOAD = re.compile(r"(?:held_out_)?load_(\d+)")
_LABEL_HEIGHT = 0.055  # height of a line of text, as a fraction of the height of the axes
_EVEN_LOAD, _MAX_LOAD = 1, 2  # multiples of the mean load: the middle and the end of the colour scale


def loads(names: Iterable[str]) -> dict[str, int]:
    """Return the names that are loads of experts (`load_0`, `held_out_load_0`, ...), with the number of the expert."""
    return {name: int(match[1]) for name in names if (match := _LOAD.fullmatch(name))}


def plot(lines: Sequence[Mapping[str, Any]], path: Path, units: Units, title: str) -> None:
    """Draw a run into a PNG file that is legible on light and dark pages; write nothing if no line has a loss.

    Args:
      lines: the lines of `metrics.jsonl`. Loads are multiples of the mean load.
      path: the PNG file to write.
      units: the unit of losses, and reference losses to draw.
      title: title for a run whose lines do not name a strategy.
    """
    if (figure := draw(lines, units, title)) is not None:
        _save(figure, path)


def draw(lines: Sequence[Mapping[str, Any]], units: Units, title: str) -> Any:
    """Return the Matplotlib figure that `plot` writes; None if no line has a loss."""
    losses = [(x["step"], x["loss"] * units.factor) for x in lines if x.get("loss") is not None]
    held_out = [(x["step"], x["held_out_loss"] * units.factor) for x in lines if x.get("held_out_loss") is not None]
    if not losses:
        return None
    mixture_lines = [x for x in lines if "dropped" in x and "load_0" in x]
    figure = _figure()
    if mixture_lines:
        figure.set_size_inches(7, 7.4)
        loss_axes, load_axes, lowest_axes = figure.subplots(3, 1, sharex=True, height_ratios=(4, 2, 1))
        _draw_loads(load_axes, mixture_lines)
        _draw_dropped(lowest_axes, mixture_lines)
    else:
        loss_axes = lowest_axes = figure.add_subplot()
    _draw_losses(loss_axes, losses, held_out, units)
    loss_axes.set_title(_segments(lines) or title, color=_INK, fontsize=10)
    lowest_axes.set_xlabel("step", color=_INK)
    return figure


def _figure() -> Any:
    """Return an empty figure. It uses no pyplot, so that a run changes no global state of Matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    # The canvas attaches itself to the figure, which can then be saved without a display.
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Any, path: Path) -> None:
    """Style the axes and write the figure. A run that dies meanwhile leaves the earlier picture."""
    for axes in figure.axes:
        axes.tick_params(colors=_INK)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["bottom", "left"]].set_color(_INK)
        axes.yaxis.label.set_color(_INK)
    png = io.BytesIO()
    figure.savefig(png, dpi=160, transparent=True)
    write_whole(path, png.getvalue())


def _draw_losses(axes: Any, losses: Any, held_out: Any, units: Units) -> None:
    """Draw training, held-out and reference losses; `losses` and `held_out` are pairs of step and loss."""
    axes.plot(*zip(*losses, strict=True), color=_LINE, alpha=0.6, linewidth=0.9, label="training batch")
    # Labels stand to the right of the axes. Inside they would hide the end of the curve, which is near the reference
    # losses.
    labels = [(value, f"{name} {value:.3f}", {"color": _INK}) for name, value in units.lines.items()]
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o-", color=_POINTS, markersize=4, label="held out", clip_on=False)
        labels.append((held_out[-1][1], f"{held_out[-1][1]:.3f}", {"color": _POINTS, "fontweight": "bold"}))
    last_step = max(losses[-1][0], 2)
    for value in units.lines.values():
        axes.axhline(value, color=_INK, linewidth=1, linestyle="--")
    axes.set_ylabel(units.loss)
    axes.set(xlim=(0, last_step), ylim=(0, None))
    # `_spread` takes labels from the lowest to the highest.
    labels.sort(key=lambda label: label[0])
    for height, (_, text, style) in zip(
        _spread([label[0] / axes.get_ylim()[1] for label in labels]), labels, strict=True
    ):
        axes.annotate(text, (1.01, height), xycoords="axes fraction", va="center", fontsize=9, **style)
    axes.legend(frameon=False, loc="lower left", labelcolor=_INK)


def _spread(heights: Sequence[float]) -> list[float]:
    """Move labels apart so that no two lines of text overlap.

    Heights are fractions of the axes in rising order; the new ones are at most 1.
    """
    spread = list(heights)
    # Upwards first, then back down from the top edge.
    for i in range(1, len(spread)):
        spread[i] = max(spread[i], spread[i - 1] + _LABEL_HEIGHT)
    for i in reversed(range(len(spread))):
        spread[i] = min(spread[i], spread[i + 1] - _LABEL_HEIGHT if i + 1 < len(spread) else 1.0)
    return spread


def _segments(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the strategy and the devices of each part of a run, one part a line; "" if no line names them.

    A run has several parts if it was resumed under another strategy.
    """
    starts = [(x["step"], f"{x['strategy']} on {x['devices']}") for x in lines if "strategy" in x]
    changes = [(step, setup) for i, (step, setup) in enumerate(starts) if not i or setup != starts[i - 1][1]]
    if len(changes) <= 1:
        return changes[0][1] if changes else ""
    ends = [step - 1 for step, _ in changes[1:]] + [max(x["step"] for x in lines)]
    parts = [f"steps {step} to {end}: {setup}" for (step, setup), end in zip(changes, ends, strict=True)]
    # More than three parts would fill the picture with lines of title.
    middle = [f"{len(parts) - 2} other strategies"] if len(parts) > 3 else parts[1:-1]
    return "\n".join([parts[0], *middle, parts[-1]])


def _draw_loads(axes: Any, lines: Sequence[Mapping[str, Any]]) -> None:
    """Draw a row of colours for each expert, and at the right its mean over the last tenth of the steps."""
    names = sorted(loads(lines[0]), key=loads(lines[0]).__getitem__)
    shares = np.array([[x[name] for x in lines] for name in names], float)  # [experts, steps]; null becomes NaN
    steps = [x["step"] for x in lines]
    # A cell reaches half the way to the next step that was recorded, so that gaps leave no holes.
    edges = [steps[0] - 0.5, *((a + b) / 2 for a, b in itertools.pairwise(steps)), steps[-1] + 0.5]
    rows = np.arange(len(names) + 1) - 0.5
    mesh = axes.pcolormesh(edges, rows, shares, cmap="RdBu_r", vmin=0, vmax=_MAX_LOAD)
    mean_shares = shares[:, -max(1, len(lines) // 10) :].mean(axis=1)
    for expert, share in enumerate(mean_shares):
        axes.annotate(f"{share:.2f}", (1.01, expert), xycoords=("axes fraction", "data"), color=_INK, fontsize=8,
                      va="center")  # fmt: skip
    # Downwards, with expert 0 at the top.
    axes.set(ylabel="expert", yticks=range(len(names)), ylim=(len(names) - 0.5, -0.5))
    bar = axes.figure.colorbar(mesh, ax=axes, pad=0.08, ticks=(0, _EVEN_LOAD, _MAX_LOAD), extend="max")
    bar.set_label("load, times the mean", color=_INK)
    bar.outline.set_visible(False)
    bar.ax.tick_params(colors=_INK)


def _draw_dropped(axes: Any, lines: Sequence[Mapping[str, Any]]) -> None:
    """Draw the percentage of dropped routing choices, and its last value."""
    # A value that was not finite is null in the file.
    steps, percentages = [x["step"] for x in lines], [100 * (x["dropped"] or 0) for x in lines]
    axes.plot(steps, percentages, color=_LINE, linewidth=0.9, clip_on=False)
    axes.annotate(f"{percentages[-1]:.1f}%", (steps[-1], percentages[-1]), (0, 4), textcoords="offset points",
                  color=_INK, ha="right", va="bottom", fontsize=9)  # fmt: skip
    axes.set(ylabel="dropped, %", ylim=(0, max(1, 1.1 * max(percentages))))
