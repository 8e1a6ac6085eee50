"""What a low precision changes: loss curves of f32, bf16 and f16 (with its loss scale) on the same data, and the bytes.

python experiments/precision.py
python experiments/precision.py --model gpt2 --length 1024 --rows 64 --steps 1000 --optimizer adamw

Bytes that a step keeps for its backward and sends are those of the traced program, which every compiler is given; the
CPU's widens what is in bfloat16.
"""

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import jax
import matplotlib.pyplot as plt
import numpy as np
import optax
import tyro
from report import LINES, MB, WARM, Common, console, grid, is_first, pictures, progress, record, start, where
from rich.table import Table

import jaxpar as jp
from jaxpar.data import text
from jaxpar.inspect.ledger import Ledger
from jaxpar.inspect.memory import saved
from jaxpar.models import named


@dataclass(frozen=True)
class Options(Common):
    """Trains one model in several precisions, from the same initial values on the same data."""

    precisions: tuple[str, ...] = ("f32", "bf16", "bf16,reduce=compute", "f16", "f16,reduce=compute")
    """f32, bf16 or f16, each with more of a strategy after a comma; the first is what others are compared with"""
    strategy: str = "fsdp"
    """a preset, or name=value,..., without its precision"""
    model: str = "llama-tiny"
    """the name of a model of text"""
    data: Path | None = None
    """a file or folder to learn from; without it: Python's own source"""
    steps: int = 100
    """of each"""
    rows: int = 16
    """of the global batch"""
    length: int = 64
    """positions of a row"""
    optimizer: Literal["sgd", "adamw"] = "adamw"
    """sgd has momentum; gradients are clipped to norm 1"""
    lr: float | None = None
    """learning rate; without it: 0.1 for sgd, 0.003 for adamw"""
    seed: int = 0
    """of the initial values and of the data"""
    out: Path = Path("runs/precision")
    """where precision.json, precision.svg, precision.png and their dark twins go"""

    def __post_init__(self) -> None:
        self.positive("steps", "rows", "length")
        for precision in self.precisions:  # before the first is compiled
            jp.Strategy.parse(f"{self.strategy},precision={precision}")


@dataclass(kw_only=True)
class Trial:
    """One precision. Bytes are those of one device.

    Attributes:
      losses: nats per byte, of every step.
      seconds: of every step.
      state: parameters and optimizer state, which are float32 in all.
      kept: of a microbatch's forward for its backward.
      sent: per step, by dtype.
      scale, skipped: the loss scale at the end, and steps that were skipped for it; None where there is none.
    """

    name: str
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    state: int = 0
    kept: int = 0
    sent: dict[str, int] = field(default_factory=dict)
    scale: float | None = None
    skipped: int | None = None

    @property
    def milliseconds(self) -> float:
        """The median step."""
        return 1e3 * statistics.median(self.seconds[WARM:] or self.seconds)


def train(trial: Trial, options: Options, chosen: Any, batches: Sequence[Any]) -> None:
    rate = options.lr or {"sgd": 0.1, "adamw": 3e-3}[options.optimizer]
    descent = optax.sgd(rate, momentum=0.9) if options.optimizer == "sgd" else optax.adamw(rate)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), descent)
    step = jp.make_train_step(chosen.model, optimizer, f"{options.strategy},precision={trial.name}")
    at_rest = step.layout.bytes
    trial.state, trial.kept = at_rest["params"] + at_rest["optimizer"], saved(step, batches[0])
    trial.sent = Ledger.from_jaxpr(step.trace(batches[0]), step.mesh).by("dtype", value="sent")
    state = step.init(jax.random.key(options.seed))
    for batch in batches:
        begin = time.perf_counter()
        state, metrics = jax.block_until_ready(step(state, batch))
        trial.seconds.append(time.perf_counter() - begin)
        trial.losses.append(float(metrics["loss"]))
    if state.scale is not None:
        trial.scale, trial.skipped = float(state.scale.scale), int(state.scale.skipped)


# -- what is shown -----------------------------------------------------------------------------------------------------


def last(trial: Trial) -> float:
    """The mean of the last tenth of the losses."""
    return statistics.mean(trial.losses[-max(1, len(trial.losses) // 10) :])


def apart(trial: Trial, first: Trial) -> float:
    """The largest difference of two losses at the same step."""
    return max(abs(a - b) for a, b in zip(trial.losses, first.losses, strict=True))


def table(trials: Sequence[Trial]) -> Table:
    heads = [
        "loss at\nthe end",
        "most off\nthe first",
        "state\nMB",
        "kept\nMB",
        "sent\nMB",
        "loss\nscale",
        "skip-\nped",
    ]
    lines = grid(["precision"], [*heads, "step\nms"])
    for trial in trials:
        lines.add_row(
            trial.name,
            f"{last(trial):.4f}",
            f"{apart(trial, trials[0]):.0e}" if trial is not trials[0] else "",
            *(f"{x / MB:.2f}" for x in (trial.state, trial.kept, sum(trial.sent.values()))),
            "" if trial.scale is None else f"2^{np.log2(trial.scale):.0f}",
            "" if trial.skipped is None else str(trial.skipped),
            f"{trial.milliseconds:.0f}",
        )
    return lines


def draw(trials: Sequence[Trial], title: str, ink: str) -> Any:
    """Losses, how far they are from the first, bytes."""
    figure, (loss, off, sizes) = plt.subplots(1, 3, figsize=(13, 4.4), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    steps = np.arange(1, len(trials[0].losses) + 1)
    for number, (trial, color) in enumerate(zip(trials, LINES, strict=False)):
        width = 1.2 + 1.2 * (len(trials) - 1 - number)  # the first is the widest, so that all are seen
        loss.plot(steps, trial.losses, color=color, linewidth=width, label=trial.name)
        if number:
            off.plot(steps, np.abs(np.subtract(trial.losses, trials[0].losses)), ".-", color=color, linewidth=1)
    loss.set(title="loss, nats per byte", xlabel="step")
    off.set(title=f"how far from {trials[0].name}", xlabel="step", yscale="log")
    parts = {
        "state, at rest": [t.state for t in trials],
        "kept for the backward": [t.kept for t in trials],
        "sent in a step": [sum(t.sent.values()) for t in trials],
    }
    height = 0.8 / len(trials)
    for number, color in zip(range(len(trials)), LINES, strict=False):
        for place, values in enumerate(parts.values()):
            at, value = place + (number - (len(trials) - 1) / 2) * height, values[number] / MB
            sizes.barh(at, value, height=0.9 * height, color=color)
            sizes.text(value, at, f" {value:.1f}", va="center", fontsize=8)
    sizes.set_yticks(range(len(parts)), list(parts))
    sizes.invert_yaxis()
    sizes.set(title="MB of a device")
    sizes.margins(x=0.15)
    sizes.spines["left"].set_visible(False)
    sizes.tick_params(axis="y", length=0)
    for axis in (loss, off):
        axis.grid(axis="y", linewidth=0.5, alpha=0.6)
    handles, labels = loss.get_legend_handles_labels()
    for handle in figure.legend(handles, labels, loc="outside lower left", ncols=6).legend_handles:
        handle.set_linewidth(4)
    return figure


def main(options: Options) -> list[Trial]:
    """Trains, prints the table, writes the files."""
    start(options.devices)
    screen, chosen = console(), named(options.model)
    source = text(options.data, options.length)
    batches = list(itertools.islice(source.batches(options.rows, options.seed), options.steps))
    trials = [Trial(name=precision) for precision in options.precisions]
    with progress(screen, len(trials)) as next_is:
        for trial in trials:
            next_is(trial.name)
            train(trial, options, chosen, batches)
    title = f"{options.model}, {chosen.parameters:,} parameters, batch {options.rows} x {options.length}, "
    title += f"{options.optimizer}, {options.strategy}, {where()}"
    if is_first():
        record(options.out / "precision.json", options, title=title, trials=[asdict(trial) for trial in trials])
        pictures(options.out / "precision", lambda ink: draw(trials, title, ink))
    screen.print(title)
    screen.print(source.description)
    screen.print(table(trials))
    screen.print(
        "State: parameters and optimizer state, float32 in all. Kept: of a forward for its backward. Sent: on the wire "
        "per step, in the dtypes of the traced program; gradients are float32 unless reduce=compute."
    )
    screen.print(f"{options.out}/precision.json, .svg, .png, and -dark.svg, -dark.png")
    return trials


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
