"""Muon beside AdamW: held-out losses after as many steps, each at several rates; the curves of the best of each.

python experiments/optimizers.py
python experiments/optimizers.py --steps 100 --adamw 3e-3 --muon 1e-2

Each run is that of `jaxpar train --model MODEL --strategy STRATEGY --optimizer NAME --lr RATE`, with the same data in
the same order.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import matplotlib.pyplot as plt
import numpy as np
import tyro
from report import LINES, Common, console, grid, is_first, pictures, record, start, where

from jaxpar.run.cli.options import TrainOptions, trainer_of
from jaxpar.run.train.loop import Hook

SMOOTH = 10  # steps of training of which a mean is drawn


@dataclass(frozen=True)
class Options(Common):
    """Trains one model of text on Python's own source by two optimizers."""

    adamw: tuple[float, ...] = (1e-3, 3e-3, 1e-2, 3e-2)
    """peak rates"""
    muon: tuple[float, ...] = (3e-3, 1e-2, 3e-2)
    """peak rates"""
    model: str = "llama-tiny"
    """a name, and sizes to change, as for `jaxpar train`"""
    strategy: str = "fsdp"
    """as for `jaxpar train`"""
    steps: int = 300
    """of each"""
    every: int = 100
    """steps between evaluations: 50 batches that are held out"""
    seed: int = 0
    """of the initial values and of the data"""
    out: Path = Path("runs/optimizers")
    """where optimizers.json, muon.svg, muon.png and their dark twins go"""

    def __post_init__(self) -> None:
        self.positive("steps", "every")


@dataclass(kw_only=True)
class Trial:
    """One run: bits a byte of every step, and held out as (step, bits a byte)."""

    optimizer: Literal["adamw", "muon"]
    rate: float
    losses: list[float] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)

    @property
    def last(self) -> float:
        """What it comes to."""
        return self.held_out[-1][1]


def train(trial: Trial, options: Options) -> None:
    """Runs one, and fills it in."""
    said = TrainOptions(
        model=options.model,
        strategy=options.strategy,
        steps=options.steps,
        seed=options.seed,
        optimizer=trial.optimizer,
        lr=trial.rate,
        evaluate_every=options.every,
        evaluate_batches=50,
        quiet=True,
    )
    bits = 1 / np.log(2)
    on_step = lambda trainer, metrics: trial.losses.append(bits * metrics["loss"])
    on_evaluate = lambda trainer, metrics: trial.held_out.append(
        (int(metrics["step"]), bits * metrics["held_out_loss"])
    )
    trainer, _ = trainer_of(said, [Hook(on_step=on_step, on_evaluate=on_evaluate)])
    trainer.run()


def draw(trials: Sequence[Trial], title: str, path: Path) -> None:
    """Losses of training, and held out."""

    def drawn(ink: str) -> Any:
        figure, axis = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
        axis.set_title(title, loc="left", fontsize=9)
        for color, trial in zip(LINES, trials, strict=False):
            means = np.convolve(trial.losses, np.ones(SMOOTH) / SMOOTH, "valid")
            axis.plot(np.arange(len(means)) + SMOOTH, means, color=color, linewidth=1, alpha=0.6)
            name = f"{trial.optimizer}, {trial.rate:g}"
            axis.plot(*zip(*trial.held_out, strict=True), "o", color=color, markersize=5, label=name)
        last = np.concatenate([trial.losses[len(trial.losses) // 10 :] for trial in trials])
        axis.set(xlabel="step", ylabel="bits per byte", ylim=(0.98 * last.min(), 1.02 * last.max()))
        axis.legend(fontsize=8)
        return figure

    pictures(path, drawn)


def main(options: Options) -> None:
    """Trains, draws, records."""
    start(options.devices)
    screen = console()
    trials = [Trial(optimizer="adamw", rate=rate) for rate in options.adamw]
    trials += [Trial(optimizer="muon", rate=rate) for rate in options.muon]
    table = grid(["optimizer"], ["rate", "held out"])
    for trial in trials:
        train(trial, options)
        table.add_row(trial.optimizer, f"{trial.rate:g}", f"{trial.last:.3f}")
        screen.print(f"{trial.optimizer} at {trial.rate:g}: {trial.last:.3f} bits per byte")
    screen.print(table)
    if is_first():
        best = [min((t for t in trials if t.optimizer == name), key=lambda t: t.last) for name in ("adamw", "muon")]
        title = f"{options.model} as {options.strategy}, {options.steps} steps, {where()}"
        options.out.mkdir(parents=True, exist_ok=True)
        draw(best, title, options.out / "muon")
        record(options.out / "optimizers.json", options, trials=[dataclasses.asdict(trial) for trial in trials])
        screen.print(f"written: {options.out}")


if __name__ == "__main__":
    main(tyro.cli(Options))
