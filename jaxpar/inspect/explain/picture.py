"""The picture of `explain`: a device's memory as one bar, and the bytes that it sends as bars by kind and axes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ...backend.text import size
from ..memory import Memory

# Legible on white and on black, since the figure has no background.
_INK = "#808080"
# The pictures of docs and experiments use the same colours.
MEMORY_COLORS = {
    "parameters": "#4c8dd6",
    "gradients": "#d9822b",
    "optimizer state": "#3fa05a",
    "saved activations": "#a07bd0",
    "the rest": "#8c959f",
}
COLLECTIVE_COLORS = {
    "all-reduce": "#c8553d",
    "reduce-scatter": "#e0b13c",
    "all-gather": "#2aa5a0",
    "collective-permute": "#6b5fb5",
    "all-to-all": "#b5838d",
    "scatter": "#a3b18a",
    "broadcast": "#588157",
    "gather": "#8d5a97",
}
_LEGEND_STYLE: dict[str, Any] = {"frameon": False, "labelcolor": _INK, "fontsize": 8}


@dataclass(frozen=True)
class Bar:
    """The bytes of one kind of collective.

    Attributes:
      kind: the kind of collective, for the colour.
      label: the text beside the bar.
      expected: bytes of the closed form, drawn as a line.
      found: bytes of the compiled program, drawn as the bar.
      across: whether they leave a host, drawn as hatching.
    """

    kind: str
    label: str
    expected: int
    found: int
    across: bool = False


def picture(title: str, strategy: str, memory: dict[str, Memory], bars: list[Bar], bars_title: str, path: Path) -> None:
    """Draw a device's memory and the bytes that it sends into a file.

    Args:
      title: the title of the picture.
      strategy: the subtitle.
      memory: kind of device -> its memory.
      bars: the bytes sent.
      bars_title: the title of the bars.
      path: the file, whose suffix gives its format.

    Raises:
      ValueError: matplotlib does not know the suffix.
    """
    rows = max(len(memory), len(bars), 2)
    figure = Figure(figsize=(9.5, 2.1 + 0.3 * rows), layout="constrained")
    # Not pyplot, which keeps figures and may open windows.
    FigureCanvasAgg(figure)
    if path.suffix.removeprefix(".") not in figure.canvas.get_supported_filetypes():
        raise ValueError(f"{path} has a suffix that is no kind of picture; use .svg, .png or .pdf")
    figure.suptitle(f"{title}\n{strategy}", color=_INK, fontsize=10, x=0.01, ha="left")
    left, right = figure.subplots(1, 2, gridspec_kw={"width_ratios": (1, 1.25)})
    _draw_memory(left, memory)
    _draw_sent(right, bars)
    for axes, name in ((left, "memory of a device"), (right, bars_title)):
        axes.set_title(name, color=_INK, fontsize=9, loc="left")
        axes.set_ylim(rows - 0.4, -0.6)  # both halves have the same height of bars, and the first bar on top
        axes.tick_params(colors=_INK, labelsize=8, length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(_INK)
    patches = [Patch(color=color, label=name) for name, color in MEMORY_COLORS.items()]
    figure.legend(handles=patches, loc="outside lower left", ncols=3, **_LEGEND_STYLE)
    figure.legend(handles=_legend_handles(right, bars), loc="outside lower right", ncols=3, **_LEGEND_STYLE)
    figure.savefig(path, dpi=160, transparent=True)


def memory_parts(memory: Memory) -> dict[str, int]:
    """Return the parts of a device's memory, which sum to the compiler's total.

    The traced size of saved activations excludes those on the host. It is capped to the room that the compiler leaves,
    and the rest of the total is one part.
    """
    parts = {"parameters": memory.params, "gradients": memory.grads, "optimizer state": memory.optimizer}
    remaining_bytes = max(0, memory.total - sum(parts.values()))
    # The compiler may keep fewer activations than are traced.
    parts["saved activations"] = min(max(0, memory.saved - memory.host + memory.host_state), remaining_bytes)
    return parts | {"the rest": remaining_bytes - parts["saved activations"]}


def _draw_memory(axes: Any, memory: dict[str, Memory]) -> None:
    """Draw one stacked bar of memory for each kind of device."""
    for row, device_memory in enumerate(memory.values()):
        offset = 0
        for name, num_bytes in memory_parts(device_memory).items():
            axes.barh(row, num_bytes, left=offset, height=0.55, color=MEMORY_COLORS[name])
            offset += num_bytes
        axes.text(offset, row, f"  {size(device_memory.total)}", color=_INK, va="center", fontsize=8)
    axes.set(yticks=range(len(memory)), yticklabels=list(memory))
    _set_byte_axis(axes, max(sum(memory_parts(device_memory).values()) for device_memory in memory.values()))


def _draw_sent(axes: Any, bars: list[Bar]) -> None:
    """Draw one bar of bytes sent for each kind of collective and axes, with a line for the closed form."""
    for row, bar in enumerate(bars):
        hatch = "///" if bar.across else None
        axes.barh(row, bar.found, height=0.55, color=_color(bar.kind), hatch=hatch, edgecolor=_INK, linewidth=0)
        axes.vlines(bar.expected, row - 0.42, row + 0.42, color=_INK, linewidth=1.5)
        axes.text(max(bar.found, bar.expected), row, f"  {size(bar.found)}", color=_INK, va="center", fontsize=8)
    axes.set(yticks=range(len(bars)), yticklabels=[bar.label for bar in bars])
    _set_byte_axis(axes, max((max(bar.found, bar.expected) for bar in bars), default=0))


def _color(kind: str) -> str:
    """Return the colour of a kind of collective."""
    return COLLECTIVE_COLORS.get(kind, _INK)


def _legend_handles(axes: Any, bars: list[Bar]) -> list[Any]:
    """Return the handles of the legend of `_draw_sent`."""
    kinds = dict.fromkeys(bar.kind for bar in bars)
    handles: list[Any] = [Patch(color=_color(kind), label=kind) for kind in kinds]
    if any(bar.across for bar in bars):
        handles.append(Patch(facecolor="none", edgecolor=_INK, hatch="///", label="across hosts"))
    return [*handles, axes.vlines([], 0, 1, color=_INK, linewidth=1.5, label="closed form")] if bars else handles


def _set_byte_axis(axes: Any, largest: int) -> None:
    """Format the axis in round numbers of bytes, with room for a label to the right of the longest bar."""
    axes.set_xlim(0, max(largest, 1) * 1.3)
    axes.xaxis.set_major_formatter(lambda value, _: size(value).replace(".00", "") if value else "0")
    axes.locator_params(axis="x", nbins=4)
