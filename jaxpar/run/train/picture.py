"""A run, drawn: its losses; of a mixture also the load of each expert, and what is dropped."""

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

# Legible on white and on black: the figure has no ground of its own.
_INK, _LINE, _POINTS = "#808080", "#5b8dd9", "#e07b39"
_LOAD = re.compile(r"(?:held_out_)?load_(\d+)")
_LABEL = 0.055  # of the height of the axes, for a line of text
_EVEN, _MOST = 1, 2  # times the mean load: the middle and the end of the colours


def loads(names: Iterable[str]) -> dict[str, int]:
    """Of the names of metrics those of experts' loads, `load_0`, ..., with the number of the expert."""
    return {name: int(found[1]) for name in names if (found := _LOAD.fullmatch(name))}


def plot(lines: Sequence[Mapping[str, Any]], path: Path, units: Units, title: str) -> None:
    """Draws the loss over steps, held-out losses and `units.lines`, legible on light and dark pages alike. Of a
    mixture, whose metrics have `load_0`, `load_1`, ... in units of the mean load, and `dropped`, these as well.

    Args:
      lines: of `metrics.jsonl`.
      path: of the picture, a PNG.
      units: what losses are shown in.
      title: where no line says which strategy a part of the run had.
    """
    if (figure := drawn(lines, units, title)) is not None:
        _written(figure, path)


def drawn(lines: Sequence[Mapping[str, Any]], units: Units, title: str) -> Any:
    """The figure that `plot` writes; None where no line has a loss."""
    steps = [(x["step"], x["loss"] * units.factor) for x in lines if x.get("loss") is not None]
    points = [(x["step"], x["held_out_loss"] * units.factor) for x in lines if x.get("held_out_loss") is not None]
    if not steps:
        return None
    routed = [x for x in lines if "dropped" in x and "load_0" in x]
    figure = _figure()
    if routed:
        figure.set_size_inches(7, 7.4)
        axes, load, dropped = figure.subplots(3, 1, sharex=True, height_ratios=(4, 2, 1))
        _draw_loads(load, routed)
        _draw_dropped(dropped, routed)
    else:
        axes = dropped = figure.add_subplot()
    _draw_losses(axes, steps, points, units)
    axes.set_title(_segments(lines) or title, color=_INK, fontsize=10)
    dropped.set_xlabel("step", color=_INK)
    return figure


def _figure() -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _written(figure: Any, path: Path) -> None:
    for one in figure.axes:
        one.tick_params(colors=_INK)
        one.spines[["top", "right"]].set_visible(False)
        one.spines[["bottom", "left"]].set_color(_INK)
        one.yaxis.label.set_color(_INK)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=160, transparent=True)
    write_whole(path, picture.getvalue())


def _draw_losses(axes: Any, steps: Any, points: Any, units: Units) -> None:
    axes.plot(*zip(*steps, strict=True), color=_LINE, alpha=0.6, linewidth=0.9, label="training batch")
    # Labels stand to the right of the axes: inside they lay on the curve, which ends near what it is compared with.
    labels = [(value, f"{name} {value:.3f}", {"color": _INK}) for name, value in units.lines.items()]
    if points:
        axes.plot(*zip(*points, strict=True), "o-", color=_POINTS, markersize=4, label="held out", clip_on=False)
        labels.append((points[-1][1], f"{points[-1][1]:.3f}", {"color": _POINTS, "fontweight": "bold"}))
    end = max(steps[-1][0], 2)
    for value in units.lines.values():
        axes.axhline(value, color=_INK, linewidth=1, linestyle="--")
    axes.set_ylabel(units.loss)
    axes.set(xlim=(0, end), ylim=(0, None))
    labels.sort(key=lambda label: label[0])
    for height, (_, text, style) in zip(
        _apart([label[0] / axes.get_ylim()[1] for label in labels]), labels, strict=True
    ):
        axes.annotate(text, (1.01, height), xycoords="axes fraction", va="center", fontsize=9, **style)
    axes.legend(frameon=False, loc="lower left", labelcolor=_INK)


def _apart(heights: Sequence[float]) -> list[float]:
    """Rising heights of labels, in fractions of the axes, moved as little as needed so that no two lines overlap."""
    found = list(heights)
    for at in range(1, len(found)):
        found[at] = max(found[at], found[at - 1] + _LABEL)
    for at in reversed(range(len(found))):
        found[at] = min(found[at], found[at + 1] - _LABEL if at + 1 < len(found) else 1.0)
    return found


def _segments(lines: Sequence[Mapping[str, Any]]) -> str:
    """The strategy and devices of each part of a run, which may be resumed under others; "" where no line says them."""
    starts = [(x["step"], f"{x['strategy']} on {x['devices']}") for x in lines if "strategy" in x]
    changes = [(step, under) for at, (step, under) in enumerate(starts) if not at or under != starts[at - 1][1]]
    if len(changes) <= 1:
        return changes[0][1] if changes else ""
    ends = [step - 1 for step, _ in changes[1:]] + [max(x["step"] for x in lines)]
    parts = [f"steps {step} to {end}: {under}" for (step, under), end in zip(changes, ends, strict=True)]
    more = [f"{len(parts) - 2} other strategies"] if len(parts) > 3 else parts[1:-1]
    return "\n".join([parts[0], *more, parts[-1]])


def _draw_loads(axes: Any, lines: Sequence[Mapping[str, Any]]) -> None:
    """A row of colours for each expert; to the right its mean over the last tenth of the steps."""
    names = sorted(loads(lines[0]), key=loads(lines[0]).__getitem__)
    shares = np.array([[x[name] for x in lines] for name in names], float)  # [experts, steps]; null is NaN
    at = [x["step"] for x in lines]
    edges = [at[0] - 0.5, *((a + b) / 2 for a, b in itertools.pairwise(at)), at[-1] + 0.5]
    rows = np.arange(len(names) + 1) - 0.5
    drawn = axes.pcolormesh(edges, rows, shares, cmap="RdBu_r", vmin=0, vmax=_MOST)
    last = shares[:, -max(1, len(lines) // 10) :].mean(axis=1)
    for expert, share in enumerate(last):
        axes.annotate(f"{share:.2f}", (1.01, expert), xycoords=("axes fraction", "data"), color=_INK, fontsize=8,
                      va="center")  # fmt: skip
    axes.set(ylabel="expert", yticks=range(len(names)), ylim=(len(names) - 0.5, -0.5))
    bar = axes.figure.colorbar(drawn, ax=axes, pad=0.08, ticks=(0, _EVEN, _MOST), extend="max")
    bar.set_label("load, times the mean", color=_INK)
    bar.outline.set_visible(False)
    bar.ax.tick_params(colors=_INK)


def _draw_dropped(axes: Any, lines: Sequence[Mapping[str, Any]]) -> None:
    at, share = [x["step"] for x in lines], [100 * (x["dropped"] or 0) for x in lines]
    axes.plot(at, share, color=_LINE, linewidth=0.9, clip_on=False)
    axes.annotate(f"{share[-1]:.1f}%", (at[-1], share[-1]), (0, 4), textcoords="offset points", color=_INK,
                  ha="right", va="bottom", fontsize=9)  # fmt: skip
    axes.set(ylabel="dropped, %", ylim=(0, max(1, 1.1 * max(share))))
