"""A mixture of experts beside a dense model of as many FLOPs: losses, load of each expert, what is dropped.

python experiments/mixture.py
python experiments/mixture.py --models llama-tiny,ffn=512 mixtral-tiny --strategies fsdp expert=8

Each run is that of `jaxpar train --model MODEL --strategy STRATEGY`, with the same data in the same order.
"""

import dataclasses
import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import matplotlib.pyplot as plt
import numpy as np
import tyro
from flax import nnx
from report import LINES, Common, console, grid, is_first, pictures, record, start, where

from jaxpar.run.cli.options import TrainOptions, trainer_of
from jaxpar.run.train.loop import Hook


@dataclass(frozen=True)
class Options(Common):
    """Trains several models of text on Python's own source."""

    models: tuple[str, ...] = ("llama-tiny", "mixtral-tiny", "mixtral-tiny,capacity=1.25")
    """names, and sizes to change, as for `jaxpar train`; llama-tiny has the FLOPs of mixtral-tiny"""
    strategies: tuple[str, ...] = ("fsdp=8", "expert=4,fsdp=2", "expert=4,fsdp=2")
    """of each"""
    steps: int = 200
    """of each"""
    rows: int = 16
    """of the global batch"""
    length: int = 64
    """bytes that each row predicts"""
    every: int = 40
    """steps between evaluations: 8 batches that are held out, and there the load of each expert"""
    seed: int = 0
    """of the initial values and of the data"""
    out: Path = Path("runs/mixture")
    """where mixture.json, mixture.svg, mixture.png and their dark twins go"""

    def __post_init__(self) -> None:
        self.positive("steps", "rows", "length", "every")
        if len(self.models) != len(self.strategies):
            raise ValueError(f"{len(self.models)} models and {len(self.strategies)} strategies; give one for each")


@dataclass(kw_only=True)
class Trial:
    """One run.

    Attributes:
      parameters: of the model.
      flops: of a step, without empty slots.
      losses: bits per byte, of every step, without balance losses.
      held_out: (step, bits per byte), likewise.
      dropped: the share of choices that was dropped, of every step.
      load: (step, of each layer the share of choices that falls on each expert).
      seconds: of a core, with what compiles.
    """

    name: str
    strategy: str
    parameters: int = 0
    flops: float = 0.0
    losses: list[float] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)
    dropped: list[float] = field(default_factory=list)
    load: list[tuple[int, list[list[float]]]] = field(default_factory=list)
    seconds: float = 0.0


def train(trial: Trial, options: Options) -> None:
    """Runs one, and fills it in."""
    said = TrainOptions(
        model=trial.name,
        strategy=trial.strategy,
        steps=options.steps,
        rows=options.rows,
        length=options.length,
        seed=options.seed,
        evaluate_every=options.every,
        evaluate_batches=8,
        quiet=True,
    )
    begin, bits = time.process_time(), 1 / np.log(2)

    def on_step(trainer: Any, metrics: dict[str, float]) -> None:
        trial.losses.append(bits * metrics.get("nats", metrics["loss"]))
        trial.dropped.append(metrics.get("dropped", 0.0))

    def on_evaluate(trainer: Any, metrics: dict[str, float]) -> None:
        nats = metrics.get("held_out_nats", metrics["held_out_loss"])
        trial.held_out.append((int(metrics["step"]), bits * nats))
        module = trainer.step.model(trainer.state)
        if hasattr(module, "routed"):
            load = np.asarray(load_of(*nnx.split(module), rows)).round(6).tolist()
            trial.load.append((int(metrics["step"]), load))

    trainer, model = trainer_of(said, [Hook(on_step=on_step, on_evaluate=on_evaluate)])
    assert model is not None
    held_out = trainer.data.corpus.held_out[: 64 * options.length]
    rows = np.asarray(held_out, np.int32).reshape(64, -1)
    trial.parameters, trial.flops = model.parameters, model.flops(options.rows, options.length)
    trainer.run()
    trial.seconds = time.process_time() - begin


@functools.partial(jax.jit, static_argnums=0)
def load_of(graph: Any, state: Any, tokens: Any) -> jax.Array:
    """The share of choices that falls on each expert, [layers, experts]."""
    _, found = nnx.merge(graph, state).routed(tokens)
    routing = found if hasattr(found, "load") else found[0]
    return routing.load.mean(axis=1)


# -- what is shown -----------------------------------------------------------------------------------------------------


def smooth(values: Sequence[float], window: int = 25) -> np.ndarray:
    """Means of the last `window` steps."""
    sums = np.cumsum(np.insert(np.asarray(values), 0, 0.0))
    ends = np.arange(1, len(values) + 1)
    begins = np.maximum(ends - window, 0)
    return (sums[ends] - sums[begins]) / (ends - begins)


def draw(trials: Sequence[Trial], title: str, path: Path) -> None:
    """Losses, then of the first mixture the load of each expert, then what is dropped."""
    mixtures = [trial for trial in trials if trial.load]

    def drawn(ink: str) -> Any:
        figure, (loss, load, dropped) = plt.subplots(1, 3, figsize=(12, 3.9), layout="constrained")
        figure.suptitle(title, x=0.01, ha="left", fontsize=10)
        for color, trial in zip(LINES, trials, strict=False):
            name = f"{trial.name}  ({trial.parameters / 1e6:.2f} M)"
            loss.plot(smooth(trial.losses), color=color, linewidth=1, alpha=0.6)
            loss.plot(*zip(*trial.held_out, strict=True), "o-", color=color, markersize=3, label=name)
            if trial in mixtures:
                dropped.plot(100 * smooth(trial.dropped), color=color, linewidth=1.2, label=trial.name)
        first = np.concatenate([trial.losses[-len(trial.losses) * 3 // 4 :] for trial in trials])
        loss.set(title="held out (points), training (lines)", xlabel="step", ylabel="bits per byte")
        loss.set_ylim(0.98 * first.min(), 1.02 * first.max())
        loss.legend(fontsize=8)
        for trial in mixtures[:1]:
            steps = [step for step, _ in trial.load]
            shares = np.array([share for _, share in trial.load])  # [evaluations, layers, experts]
            experts = shares.shape[2]
            layers = shares.shape[1]
            at = np.array([0, *steps])  # a column stands for the steps up to its evaluation
            every = experts * shares.reshape(len(steps), -1).T
            drawn = load.pcolormesh(at, np.arange(layers * experts + 1), every, cmap="RdBu_r", vmin=0, vmax=2)
            for layer in range(1, layers):
                load.axhline(layer * experts, color=ink, linewidth=1)
            middles = [(layer + 0.5) * experts for layer in range(layers)]
            load.set_yticks(middles, [f"layer {layer}" for layer in range(layers)], fontsize=8)
            load.set(title=f"{trial.name}: load of each expert", xlabel="step", ylim=(layers * experts, 0))
            figure.colorbar(drawn, ax=load, ticks=(0, 1, 2), extend="max").set_label("times the mean")
        dropped.set(title="choices that are dropped", xlabel="step", ylabel="%", ylim=(-0.2, None))
        if mixtures:
            dropped.legend(fontsize=8)
        return figure

    pictures(path, drawn)


def main(options: Options) -> None:
    """Trains, draws, records."""
    start(options.devices)
    screen = console()
    trials = [Trial(name=name, strategy=text) for name, text in zip(options.models, options.strategies, strict=True)]
    for trial in trials:
        train(trial, options)
        screen.print(f"{trial.name} as {trial.strategy}: {trial.held_out[-1][1]:.3f} bits per byte")
    table = grid(["run"], ["parameters", "FLOPs", "held out", "dropped, %", "load", "core s"])
    for trial in trials:
        shares = np.array(trial.load[-1][1]) * len(trial.load[-1][1][0]) if trial.load else None
        load = "" if shares is None else f"{shares.min():.2f} to {shares.max():.2f}"
        lost = f"{100 * smooth(trial.dropped)[-1]:.2f}" if trial.load else ""
        about = f"{trial.parameters:,}", f"{trial.flops:.3g}", f"{trial.held_out[-1][1]:.3f}"
        table.add_row(f"{trial.name} as {trial.strategy}", *about, lost, load, f"{trial.seconds:.0f}")
    screen.print(table)
    screen.print(
        "FLOPs: of a step; held out: bits per byte; load: of each expert of each layer, at the end; 1 is the mean"
    )
    if is_first():
        about = f"{options.steps} steps of {options.rows} rows of {options.length} bytes, {where()}"
        options.out.mkdir(parents=True, exist_ok=True)
        draw(trials, about, options.out / "mixture")
        record(options.out / "mixture.json", options, trials=[dataclasses.asdict(trial) for trial in trials])
        screen.print(f"written: {options.out}")


if __name__ == "__main__":
    main(tyro.cli(Options))
