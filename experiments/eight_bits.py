"""What a language model loses by 8 bits: held-out losses of FP8 products, and of weights and gradients that travel in 8
bits, each beside the same run in bfloat16.

python experiments/eight_bits.py
python experiments/eight_bits.py --steps 100 --every 20 --kept runs/short.json

Each run is that of `jaxpar train --model MODEL --devices 2 --strategy STRATEGY`, with the same data in the same order.
Its losses are appended to a file when it is done (`experiments/eight_bits.json`); what is there is not run again, and
what was ended goes on from its checkpoint.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import tyro
from report import LINES, Common, console, grid, pictures, start

from jaxpar.run.cli import commands
from jaxpar.run.cli.options import TrainOptions
from jaxpar.run.train.recorder import read

# By what is in 8 bits: the model, the strategy in bfloat16, and what changes.
TRIALS = {
    "precision=fp8, products": ("llama-tiny", "fsdp=2,precision=bf16", "precision=fp8"),
    "fp8_scaling=tensor": ("llama-tiny", "fsdp=2,precision=bf16", "precision=fp8,fp8_scaling=tensor"),
    "gather=int8, weights": ("llama-tiny", "fsdp=2,precision=bf16", "gather=int8"),
    "reduce=int8, gradients": ("llama-tiny", "fsdp=2,precision=bf16", "reduce=int8"),
}
ALLOWED = 1.0  # percent of bfloat16's loss, which is shaded
RECORD = Path(__file__).with_suffix(".json")
Curve = dict[int, float]  # bits a byte by step


@dataclass(frozen=True)
class Options(Common):
    """Trains small models of text on Python's own source."""

    devices: int | None = 2
    """simulated ones; every strategy here has two"""
    steps: int = 1000
    """of each"""
    every: int = 200
    """steps between evaluations of all that is held out"""
    only: str = ""
    """part of the names of those to train and draw, as "gather"; without it: all"""
    out: Path = Path("runs/eight-bits")
    """where the runs, eight-bits.svg, eight-bits.png and their dark twins go"""
    kept: Path = RECORD
    """bits a byte of the runs that are done, by strategy and step"""

    def __post_init__(self) -> None:
        self.positive("steps", "every")


def low_of(base: str, change: str) -> str:
    """The strategy `base` with what changes: a choice that both name is the change's."""
    said = dict(part.split("=") for part in f"{base},{change}".split(","))
    return ",".join(f"{name}={value}" for name, value in said.items())


def train(options: Options, model: str, strategy: str) -> Curve:
    """Trains one, and gives its losses held out, without balance losses, at multiples of `every`."""
    folder = options.out / strategy
    run = TrainOptions(
        model=model,
        strategy=strategy,
        devices=options.devices,
        steps=options.steps,
        evaluate_every=options.every,
        save_every=options.every,
        out=folder,
        resume=folder.exists(),
        sample=0,
        quiet=True,
    )
    commands.train(run)
    lines = [line for line in read(folder / "metrics.jsonl") if "held_out_loss" in line]
    losses = {line["step"]: line.get("held_out_nats", line["held_out_loss"]) / math.log(2) for line in lines}
    return {step: round(loss, 4) for step, loss in losses.items() if step % options.every == 0}


def more(low: Curve, base: Curve) -> Curve:
    """How much more, in percent."""
    return {step: 100 * (loss / base[step] - 1) for step, loss in low.items()}


def draw(trials: Mapping[str, tuple[str, str, str]], found: Mapping[str, Curve], path: Path) -> None:
    """The losses of bfloat16, and below of each trial how much more there is of it, held out."""

    def drawn(ink: str) -> Any:
        heights = [2.4, *[1.0] * len(trials)]
        figure, (loss, *rows) = plt.subplots(
            len(heights), 1, figsize=(5.4, 6.4), sharex=True, height_ratios=heights, layout="constrained"
        )
        bases = {base: model for model, base, _ in trials.values()}
        for color, (base, model) in zip(LINES, bases.items(), strict=False):
            name = f"{model}, {base.removesuffix(',precision=bf16')}"
            loss.plot(*zip(*found[base].items(), strict=True), "o-", color=color, markersize=4, label=name)
            loss.set_title("in bfloat16: bits per byte, held out")
        loss.legend(fontsize=10)
        for row, (name, (_, base, change)) in zip(rows, trials.items(), strict=True):
            curve = more(found[low_of(base, change)], found[base])
            row.axhspan(-ALLOWED, ALLOWED, color="0.5", alpha=0.14, linewidth=0)
            row.axhline(0, color="0.5", linewidth=1)
            color = LINES[list(bases).index(base)]
            row.plot(*zip(*curve.items(), strict=True), "o-", color=color, linewidth=1.5, markersize=6)
            row.set(ylim=(-1.25, 1.25), yticks=(-1, 0, 1), yticklabels=("-1%", "0", "+1%"), xlim=(0, 1.03 * max(curve)))
            row.set_title(f"{name}: {curve[max(curve)]:+.1f}%", fontsize=11, fontweight="normal", pad=2)
        rows[-1].set_xlabel("step")
        return figure

    pictures(path, drawn)


def main(options: Options) -> None:
    """Trains, keeps, draws."""
    start(options.devices)
    trials = {name: trial for name, trial in TRIALS.items() if options.only in name}
    screen, kept = console(), json.loads(options.kept.read_text()) if options.kept.exists() else {}
    table, at = grid(["in 8 bits", "strategy"], []), range(options.every, options.steps + 1, options.every)
    for step in at:
        table.add_column(str(step), justify="right")
    for model, base, change in trials.values():
        for strategy in (base, low_of(base, change)):
            if strategy not in kept:
                kept[strategy] = train(options, model, strategy)
                options.kept.write_text(json.dumps(kept, indent=1) + "\n")
    found = {strategy: {int(step): loss for step, loss in curve.items()} for strategy, curve in kept.items()}
    for name, (_, base, change) in trials.items():
        table.add_row(name, base, *(f"{found[base][step]:.3f}" for step in at))
        table.add_row("", change, *(f"{found[low_of(base, change)][step]:.3f}" for step in at))
    screen.print(table)
    options.out.mkdir(parents=True, exist_ok=True)
    draw(trials, found, options.out / "eight-bits")
    screen.print(f"bits per byte, held out; written: {options.out}, {options.kept}")


if __name__ == "__main__":
    main(tyro.cli(Options))
