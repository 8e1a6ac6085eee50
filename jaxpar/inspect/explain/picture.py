"""The picture of `explain`: a device's memory as one bar, and bars of the bytes that it sends, by kind and axes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ...backend.text import size
from ..memory import Memory

# Legible on white and on black: the figure has no ground of its own.
_INK = "#808080"
# One colour for one thing, here and in the pictures of docs and experiments.
HELD = {
    "parameters": "#4c8dd6",
    "gradients": "#d9822b",
    "optimizer state": "#3fa05a",
    "saved activations": "#a07bd0",
    "the rest": "#8c959f",
}
SENT = {
    "all-reduce": "#c8553d",
    "reduce-scatter": "#e0b13c",
    "all-gather": "#2aa5a0",
    "collective-permute": "#6b5fb5",
    "all-to-all": "#b5838d",
    "scatter": "#a3b18a",
    "broadcast": "#588157",
    "gather": "#8d5a97",
}
_PLAIN: dict[str, Any] = {"frameon": False, "labelcolor": _INK, "fontsize": 8}


@dataclass(frozen=True)
class Bar:
    """Bytes of one `kind` of collective: found, beside the closed form; `across` hosts or within."""

    kind: str
    label: str
    expected: int
    found: int
    across: bool = False


def picture(words: str, strategy: str, memory: dict[str, Memory], bars: list[Bar], sent: str, path: Path) -> None:
    """Draws into a file, whose suffix says what it is. Raises ValueError for one that matplotlib does not know.

    Args:
      words: the title; `strategy` is the value behind it, in small below.
      sent: the title of the bars.
    """
    rows = max(len(memory), len(bars), 2)
    figure = Figure(figsize=(9.5, 2.1 + 0.3 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    if path.suffix.removeprefix(".") not in figure.canvas.get_supported_filetypes():
        raise ValueError(f"{path} has a suffix that is no kind of picture; use .svg, .png or .pdf")
    figure.suptitle(f"{words}\n{strategy}", color=_INK, fontsize=10, x=0.01, ha="left")
    left, right = figure.subplots(1, 2, gridspec_kw={"width_ratios": (1, 1.25)})
    _memory(left, memory)
    _sent(right, bars)
    for axes, name in ((left, "memory of a device"), (right, sent)):
        axes.set_title(name, color=_INK, fontsize=9, loc="left")
        axes.set_ylim(rows - 0.4, -0.6)
        axes.tick_params(colors=_INK, labelsize=8, length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(_INK)
    patches = [Patch(color=color, label=name) for name, color in HELD.items()]
    figure.legend(handles=patches, loc="outside lower left", ncols=3, **_PLAIN)
    figure.legend(handles=_key(right, bars), loc="outside lower right", ncols=3, **_PLAIN)
    figure.savefig(path, dpi=160, transparent=True)


def held(memory: Memory) -> dict[str, int]:
    """The parts of a device's memory, which add up to the compiler's total: what is traced as saved, but for what is on
    the host, and no more than the compiler leaves room for, and the rest.
    """
    parts = {"parameters": memory.params, "gradients": memory.grads, "optimizer state": memory.optimizer}
    room = max(0, memory.total - sum(parts.values()))
    parts["saved activations"] = min(max(0, memory.saved - memory.host + memory.host_state), room)
    return parts | {"the rest": room - parts["saved activations"]}


def _memory(axes: Any, memory: dict[str, Memory]) -> None:
    for row, one in enumerate(memory.values()):
        start = 0
        for name, value in held(one).items():
            axes.barh(row, value, left=start, height=0.55, color=HELD[name])
            start += value
        axes.text(start, row, f"  {size(one.total)}", color=_INK, va="center", fontsize=8)
    axes.set(yticks=range(len(memory)), yticklabels=list(memory))
    _ticks(axes, max(sum(held(one).values()) for one in memory.values()))


def _sent(axes: Any, bars: list[Bar]) -> None:
    for row, bar in enumerate(bars):
        hatch = "///" if bar.across else None
        axes.barh(row, bar.found, height=0.55, color=_color(bar.kind), hatch=hatch, edgecolor=_INK, linewidth=0)
        axes.vlines(bar.expected, row - 0.42, row + 0.42, color=_INK, linewidth=1.5)
        axes.text(max(bar.found, bar.expected), row, f"  {size(bar.found)}", color=_INK, va="center", fontsize=8)
    axes.set(yticks=range(len(bars)), yticklabels=[bar.label for bar in bars])
    _ticks(axes, max((max(bar.found, bar.expected) for bar in bars), default=0))


def _color(kind: str) -> str:
    return SENT.get(kind, _INK)


def _key(axes: Any, bars: list[Bar]) -> list[Any]:
    kinds = dict.fromkeys(bar.kind for bar in bars)
    handles: list[Any] = [Patch(color=_color(kind), label=kind) for kind in kinds]
    if any(bar.across for bar in bars):
        handles.append(Patch(facecolor="none", edgecolor=_INK, hatch="///", label="across hosts"))
    return [*handles, axes.vlines([], 0, 1, color=_INK, linewidth=1.5, label="closed form")] if bars else handles


def _ticks(axes: Any, largest: int) -> None:
    """Round numbers of bytes, with room for a label behind the longest bar."""
    axes.set_xlim(0, max(largest, 1) * 1.3)
    axes.xaxis.set_major_formatter(lambda value, _: size(value).replace(".00", "") if value else "0")
    axes.locator_params(axis="x", nbins=4)
