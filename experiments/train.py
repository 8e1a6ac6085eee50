"""Train a small Llama on bytes of source code under any parallelism strategy.

python experiments/train.py --strategy fsdp
python experiments/train.py --strategy zero2,microbatches=2,precision=bf16 --steps 500 --data some/folder
"""

import csv
import itertools
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import matplotlib.pyplot as plt
import numpy as np
import optax
import tyro
from jax.extend.backend import clear_backends
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import jaxpar as jp
from jaxpar.data import Corpus, batches, byte_corpus
from jaxpar.models import llama


@dataclass(frozen=True)
class Options:
    """Trains a small Llama on bytes and shows held-out bits per byte beside the text's own entropies."""

    strategy: str = "fsdp"
    """a preset (single dp ddp zero1 zero2 zero3 fsdp hsdp), or name=value,..., such as fsdp=8,zero=2,precision=bf16"""
    devices: int | None = None
    """simulate so many CPU devices; without it: the accelerators attached, or 8 simulated ones where there are none"""
    data: Path | None = None
    """a file or folder to learn from; without it: Python's own source"""
    out: Path = Path("runs/train")
    """where loss.csv and loss.png go"""
    size: Literal["tiny"] = "tiny"
    steps: int = 300
    rows: int = 16
    """windows of text in the global batch"""
    length: int = 64
    """bytes that each window predicts"""
    lr: float = 3e-3
    """the peak, followed by a cosine to a tenth"""
    warmup: int = 20
    """steps up to the peak, at most half of all"""
    clip: float = 1.0
    """global norm that gradients are clipped to"""
    seed: int = 0
    every: int = 50
    """steps between held-out evaluations"""
    sample: int = 24
    """held-out batches in an evaluation, the same ones each time"""

    def __post_init__(self) -> None:
        for name in ("steps", "rows", "length", "every", "sample"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} leaves nothing to do; use 1 or more")


@dataclass(frozen=True)
class Point:
    """Bits per byte after `step` updates: the training batch's before its update, and the held-out sample's."""

    step: int
    train: float
    held_out: float | None = None


def attach(devices: int | None) -> None:
    """Simulates devices if asked to, or where jax finds nothing but one CPU."""
    if devices is None and (jax.default_backend() != "cpu" or jax.device_count() > 1):
        return
    clear_backends()  # the question above started one, and its number of devices is fixed
    jp.simulate(devices or 8)


def bits(nats: jax.Array | float) -> float:
    return float(nats) / math.log(2)


def table(**rows: str) -> Table:
    grid = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        grid.add_row(f"[dim]{name.replace('_', ' ')}[/dim]", value)
    return grid


def optimizer(options: Options) -> optax.GradientTransformation:
    warmup = min(options.warmup, options.steps // 2)
    rate = optax.warmup_cosine_decay_schedule(0, options.lr, warmup, options.steps, options.lr / 10)
    return optax.chain(optax.clip_by_global_norm(options.clip), optax.adamw(rate, b2=0.95, weight_decay=0.1))


def train(step: Any, corpus: Corpus, options: Options, console: Console) -> list[Point]:
    held_out = list(itertools.islice(batches(corpus.held_out, options.rows, options.length, seed=0), options.sample))
    source = batches(corpus.train, options.rows, options.length, options.seed)
    state = step.init(jax.random.key(options.seed))
    points: list[Point] = []
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("compiling", total=options.steps)
        begin, timed = time.perf_counter(), 0
        for number, batch in enumerate(itertools.islice(source, options.steps), 1):
            state, metrics = step(state, batch)
            points.append(Point(number, bits(metrics["loss"])))
            progress.update(task, advance=1, description=f"{points[-1].train:.3f} bits/byte")
            if number == 1:
                console.print(f"compiled and made the first step in {time.perf_counter() - begin:.1f} s")
                begin, timed = time.perf_counter(), number
            if number % options.every == 0 or number == options.steps:
                speed = (number - timed) * options.rows * options.length / (time.perf_counter() - begin)
                nats = np.mean([float(step.evaluate(state, batch)["loss"]) for batch in held_out])
                points[-1] = replace(points[-1], held_out=bits(nats))
                recent = np.mean([point.train for point in points[-options.every :]])
                result = f"train {recent:.3f}   held out {bits(nats):.3f} bits/byte"
                console.print(f"step {number:5}   {result}   {speed:9,.0f} bytes/s")
                begin, timed = time.perf_counter(), number  # neither compiling nor evaluating is part of the speed
    return points


def save(points: list[Point], folder: Path) -> None:
    with (folder / "loss.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "train_bits_per_byte", "held_out_bits_per_byte"])
        writer.writerows((p.step, f"{p.train:.5f}", "" if p.held_out is None else f"{p.held_out:.5f}") for p in points)


def plot(points: list[Point], corpus: Corpus, title: str, path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    axes.plot([p.step for p in points], [p.train for p in points], color="0.7", linewidth=0.8, label="training batch")
    measured = [p for p in points if p.held_out is not None]
    axes.plot(
        [p.step for p in measured], [p.held_out for p in measured], "o-", color="C0", label="held out", clip_on=False
    )
    end = measured[-1]
    beside = {"xytext": (6, 0), "textcoords": "offset points", "va": "center"}
    axes.annotate(f"{end.held_out:.2f}", (end.step, end.held_out), color="C0", fontweight="bold", **beside)
    for name, entropy in (("unigram", corpus.unigram_entropy), ("bigram", corpus.bigram_entropy)):
        axes.axhline(entropy, color="C3", linewidth=1, linestyle="--")
        axes.text(end.step, entropy, f"{name} entropy {entropy:.2f}", color="C3", ha="right", va="bottom")
    axes.set(xlabel="step", ylabel="bits per byte", title=title, ylim=(0, None), xlim=(0, end.step))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower left")
    figure.savefig(path, dpi=160)
    plt.close(figure)


def main(options: Options) -> None:
    begin = time.perf_counter()
    console = Console(width=min(80, Console().width), highlight=False)
    attach(options.devices)
    corpus = byte_corpus(options.data)
    config = llama.SIZES[options.size]
    model = jp.from_nnx(lambda rngs: llama.Llama(config, rngs=rngs), llama.loss)
    step = jp.make_train_step(model, optimizer(options), options.strategy)
    options.out.mkdir(parents=True, exist_ok=True)
    where = f"{step.mesh.size} x {jax.devices()[0].device_kind}"
    console.print(
        table(
            text=corpus.source,
            bytes=f"{corpus.train.size:,} to train on, {corpus.held_out.size:,} held out, {corpus.files} files",
            entropy=f"unigram {corpus.unigram_entropy:.3f}, bigram {corpus.bigram_entropy:.3f} bits/byte",
            model=f"llama {options.size}, {config.parameters:,} parameters",
            strategy=f"{options.strategy} on {where}",
            per_device=", ".join(f"{name} {size / 2**20:.2f}" for name, size in step.layout.bytes.items()) + " MiB",
        )
    )
    points = train(step, corpus, options, console)
    save(points, options.out)
    plot(points, corpus, f"{options.strategy} on {where}: llama {options.size}", options.out / "loss.png")
    result = points[-1].held_out
    console.print(
        table(
            held_out=f"[bold]{result:.3f} bits/byte[/bold]",
            unigram=f"{corpus.unigram_entropy:.3f} (entropy), {corpus.unigram_bits:.3f} held out",
            bigram=f"{corpus.bigram_entropy:.3f} (entropy), {corpus.bigram_bits:.3f} held out",
            seconds=f"{time.perf_counter() - begin:.0f}",
            written=f"{options.out / 'loss.csv'}, {options.out / 'loss.png'}",
        )
    )


if __name__ == "__main__":
    main(tyro.cli(Options))
