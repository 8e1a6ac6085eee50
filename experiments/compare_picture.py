"""The picture of `compare.py`: one loss curve and how far all are from it, and what each strategy stores and sends."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from report import LINES, MB, pictures

from jaxpar.inspect.explain.picture import COLLECTIVE_COLORS, MEMORY_COLORS

STORED = {name: MEMORY_COLORS[name] for name in ("parameters", "gradients", "optimizer state")}
STORED["activations, the rest"] = MEMORY_COLORS["the rest"]
NAMES = {"collective-permute": "messages between stages"}


def parts(memory: Any) -> tuple[int, int, int, int]:
    """Parameters, gradients, optimizer state, and what the program needs beside them."""
    at_rest = memory.params, memory.grads, memory.optimizer
    return *at_rest, max(0, memory.total - sum(at_rest))


def draw(trials: Sequence[Any], title: str, path: Path) -> None:
    """Of trials of `compare.py`: losses and how far they are apart on the left, bytes stored and sent on the right."""

    def drawn(ink: str) -> Any:
        figure = plt.figure(figsize=(12, 6.8), layout="constrained")
        figure.suptitle(title, x=0.01, ha="left", fontsize=10)
        axes = figure.subplot_mosaic(
            [["loss", "stored"], ["apart", "sent"]], width_ratios=[1, 1.05], height_ratios=[1.15, 1]
        )
        _curves(axes["loss"], axes["apart"], trials)
        _stored(axes["stored"], trials)
        _sent(axes["sent"], trials)
        return figure

    pictures(path, drawn)


def _curves(loss: Any, apart: Any, trials: Sequence[Any]) -> None:
    """The loss of the first, and how far the furthest of the others is from it: on each other all are one curve."""
    steps, first = np.arange(1, len(trials[0].losses) + 1), np.array(trials[0].losses)
    loss.plot(steps, first, color=LINES[0], linewidth=2, solid_capstyle="round")
    furthest = np.abs(np.array([trial.losses for trial in trials]) - first).max(axis=0)
    apart.plot(steps, np.where(furthest > 0, furthest, np.nan), "o", color=LINES[0], markersize=3.5)
    loss.set(title=f"the loss of {trials[0].name}", ylabel="nats per byte", xlabel="step")
    others = ", ".join(trial.name for trial in trials[1:]) or "no other"
    apart.set(
        title=textwrap.fill(f"the largest difference from it, of {others}", 70),
        ylabel="difference of the loss",
        xlabel="step",
        yscale="log",
    )
    ulp = np.spacing(np.float32(first.max()))
    line = apart.axhline(ulp, color="0.55", linewidth=1, linestyle=":", zorder=0)
    apart.legend(
        [line], [f"one rounding of float32, at {first.max():.1f}"], frameon=False, loc="upper right", fontsize=9
    )
    apart.set_ylim(1e-8, max(1e-3, 10 * apart.dataLim.y1))
    for axis in (loss, apart):
        axis.set_xlim(0.4, max(2, len(first)) + 0.6)  # dots at the ends are whole


def _stored(axis: Any, trials: Sequence[Any]) -> None:
    bars = [
        (trial.name if role == "each device" else f"{trial.name} {role}", memory)
        for trial in trials
        for role, memory in trial.explanation.memory.items()
    ]
    for place, (_, memory) in enumerate(bars):
        left = 0.0
        for value, color in zip(parts(memory), STORED.values(), strict=True):
            axis.barh(place, value / MB, left=left / MB, color=color, height=0.66)
            left += value
        axis.text(left / MB, place, f" {left / MB:.1f}", va="center")
    _bars(axis, [name for name, _ in bars], 1.18 * max(sum(parts(m)) for _, m in bars) / MB)
    axis.set(title="stored per device during a step, MB")
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in STORED.values()]
    _below(axis, handles, list(STORED))


def _sent(axis: Any, trials: Sequence[Any]) -> None:
    most = max(max(sum(t.sent.values()), t.expected) for t in trials) or 1
    for place, trial in enumerate(trials):
        left = 0
        for kind, value in trial.sent.items():
            axis.barh(place, value / MB, left=left / MB, color=COLLECTIVE_COLORS.get(kind, "0.5"), height=0.66)
            left += value
        axis.text(left / MB, place, f" {left / MB:.1f}" if left else " nothing", va="center")
        axis.plot(
            [trial.expected / MB] * 2, [place - 0.42, place + 0.42], color=plt.rcParams["text.color"], linewidth=1.6
        )
    _bars(axis, [t.name for t in trials], 1.18 * most / MB)
    axis.set(title="sent per device and step, MB; dp: through its server")
    seen = dict.fromkeys(kind for t in trials for kind, value in t.sent.items() if value > 1e-3 * most)
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLLECTIVE_COLORS.get(kind, "0.5")) for kind in seen]
    handles.append(plt.Line2D([], [], color=plt.rcParams["text.color"], linewidth=1.6))
    _below(axis, handles, [*(NAMES.get(kind, kind) for kind in seen), "closed form"])


def _bars(axis: Any, names: Sequence[str], limit: float) -> None:
    axis.set_yticks(range(len(names)), names)
    for label, name in zip(axis.get_yticklabels(), names, strict=True):
        label.set_fontsize(10 if len(name) < 12 else 8)
    axis.invert_yaxis()
    axis.set_xlim(0, limit)
    axis.spines["left"].set_visible(False)
    axis.tick_params(axis="y", length=0)


def _below(axis: Any, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """A legend below the axis, where no bar can be."""
    columns = len(labels) if len(labels) < 5 else 3
    place = {"loc": "upper left", "bbox_to_anchor": (-0.02, -0.12), "borderaxespad": 0, "ncols": columns}
    axis.legend(handles, labels, frameon=False, fontsize=9, columnspacing=1, handlelength=1.4, **place)
