"""The picture of `async_compare.py`: loss by samples and time, staleness, what a killed worker does to others."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

_GREY = "#768390"  # reads on white and on black
WINDOW = 80  # rows of which a point of a curve is the mean


def draw(trials: Sequence[Any], title: str, path: Path) -> None:
    """Writes path.svg and path.png."""
    texts = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    style: dict[str, Any] = dict.fromkeys(texts, _GREY)
    style |= {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True}
    style |= {"grid.color": _GREY, "grid.alpha": 0.25, "svg.hashsalt": "jaxpar", "legend.frameon": False}
    with plt.rc_context(style):
        figure, axes = plt.subplots(2, 2, figsize=(11, 7.5), layout="constrained")
        figure.suptitle(title, x=0.01, ha="left", fontsize=10)
        _losses(axes[0, 0], [t for t in trials if t.case == "equal"], "samples", "equal workers: loss by samples")
        _losses(axes[0, 1], [t for t in trials if t.case == "slow"], "seconds", "one slow worker: loss by time")
        _stale(axes[1, 0], [t for t in trials if t.case == "slow" and t.staleness])
        _killed(axes[1, 1], [t for t in trials if t.case == "killed"])
        for suffix in (".svg", ".png"):
            figure.savefig(path.with_suffix(suffix), dpi=150, transparent=True)
        plt.close(figure)


def _losses(axes: Any, trials: Sequence[Any], along: str, title: str) -> None:
    for i, trial in enumerate(trials):
        each = trial.samples[0]
        n = max(1, min(WINDOW // each or 1, len(trial.losses) // 4))
        smooth = np.convolve(trial.losses, np.ones(n) / n, "valid")
        at = np.array(getattr(trial, along))
        at = at - at[0] if along == "seconds" else at  # without what compiles
        axes.plot(at[n - 1 :], smooth, color=f"C{i}", linewidth=1.3, label=trial.name)
    axes.set(xlabel=f"{along} learnt from" if along == "samples" else along, ylabel="nats per byte", title=title)
    axes.legend(fontsize=8)


def _stale(axes: Any, trials: Sequence[Any]) -> None:
    for i, trial in enumerate(trials, 1):  # the colours of the curves above
        counts = Counter(trial.staleness)
        at = sorted(counts)
        share = [counts[x] / len(trial.staleness) for x in at]
        axes.plot(at, share, marker="o", markersize=3, color=f"C{i}", linewidth=1, label=trial.name)
    axes.set(xlabel="updates between pull and push", ylabel="share of gradients", title="one slow worker: staleness")
    axes.set_xscale("symlog", linthresh=1)
    axes.set_yscale("log")
    axes.legend(fontsize=8)


def _killed(axes: Any, trials: Sequence[Any]) -> None:
    for i, trial in enumerate(trials):
        last = max(trial.workers)
        for worker in range(last + 1):
            at = [s for s, w in zip(trial.seconds, trial.workers, strict=True) if w == worker]
            label = f"{trial.name}: {'killed' if worker == last else 'the others'}" if worker in (0, last) else None
            dashes = "--" if worker == last else "-"
            axes.plot(at, range(1, len(at) + 1), dashes, color=f"C{i}", linewidth=1.3, label=label)
        axes.axvline(trial.killed, color=f"C{i}", linewidth=0.8, linestyle=":")
    axes.set(xlabel="seconds", ylabel="gradients of each worker", title="a worker killed (dotted)")
    axes.legend(fontsize=8)
