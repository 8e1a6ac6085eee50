"""Predicted against published throughput, of training runs that others have published (published_rows.py,
published_blind.py).

python experiments/published_throughput.py
python experiments/published_throughput.py --only MaxText --kernels 20
python experiments/published_throughput.py --programs runs/programs --held-out
python experiments/published_throughput.py --only Float8 --fp8

They are compiled for GPUs that are not there (`pip install "jax[cuda12]"`), from our own models, with the batch,
sharding and recomputation that was published. Nothing in the model was fitted to them. All of them take an hour or
two; `--programs` keeps the compiled ones, so that a change of the model alone is judged in minutes.
"""

import dataclasses
import gzip
import hashlib
import os
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the compiler for H100s wants it said before jax starts

import jax
import jaxlib
import optax
import tyro
from deepseek import named
from jax._src.cudnn import fused_attention_stablehlo
from published_blind import BLIND
from published_rows import FLOAT8, RUNS, Run

import jaxpar as jp
from jaxpar.hardware.devices import target
from jaxpar.inspect.predict.prediction import Prediction, predict


@dataclass(frozen=True)
class Options:
    """Prints predicted over published throughput."""

    only: str = ""
    """runs whose name contains this"""
    held_out: bool = False
    """those that were set aside too"""
    kernels: int = 0
    """so many of each run's kernels and collectives, those that take most"""
    fp8: bool = False
    """those in FP8 compiled with FP8 products, in place of bf16's at FP8's speed"""
    programs: Path | None = None
    """a folder where compiled programs are kept, by what they depend on"""


def prediction(run: Run, programs: Path | None = None) -> Prediction:
    """A run's. Raises ValueError where the model cannot be compiled so."""
    model, found = named(run.model, **dict(run.sizes)), target(run.target)
    # As in those runs; from 4 GiB on they would be made in chunks.
    strategy = dataclasses.replace(jp.Strategy.parse(run.strategy), logits="whole")
    if run.remat is not None:
        strategy = dataclasses.replace(strategy, remat=run.remat(model))
    step = jp.make_train_step(model.model, optax.adamw(3e-4), strategy, mesh=found.devices)
    batch, flops = model.example(run.rows, run.length), model.flops(run.rows, run.length)
    told = predict(_program(run, step, batch, programs), step, batch, run.hardware or found.hardware, flops)
    return _slowed(told, run.slower)


def in_fp8(run: Run) -> Run:
    """A row in FP8 by jaxpar's own recipe, which leaves gradients of weights in bf16, and with the casts it takes."""
    slower = {kind: times for kind, times in run.slower.items() if kind != "matmul"}
    return dataclasses.replace(run, strategy=run.strategy.replace("precision=bf16", "precision=fp8"), slower=slower)


def _slowed(found: Prediction, by: Mapping[str, float]) -> Prediction:
    """The same with kernels of these kinds so many times slower."""
    parts = tuple(dataclasses.replace(part, seconds=part.seconds * by.get(part.kind, 1)) for part in found.parts)
    more = sum(part.seconds for part in parts) - sum(part.seconds for part in found.parts)
    least, most = (seconds + more for seconds in found.interval)
    return dataclasses.replace(
        found, parts=parts, seconds=found.seconds + more, interval=(least, most), compute=found.compute + more
    )


def _compiled(step: Any, batch: Any) -> str:
    """As on the target: whether cuDNN takes heads beyond 128 features, such as DeepSeek-V3's, JAX asks the GPUs that
    are here (jax 0.10), and there are none.
    """
    has = tuple(map(int, step.mesh.devices.flat[0].compute_capability.split(".")))
    asked = lambda least: has >= tuple(map(int, least.split(".")))
    with mock.patch.object(fused_attention_stablehlo, "check_compute_capability", asked):
        return step.compile(batch).as_text()


def _program(run: Run, step: Any, batch: Any, programs: Path | None) -> str:
    if programs is None:
        return _compiled(step, batch)
    root = Path(jp.__file__).parent
    sources = [f.read_bytes() for f in sorted(root.rglob("*.py")) if "inspect" not in f.parts]
    # No strategy names a policy: the file of the rows stands for it.
    about = (run.name, run.strategy, run.rows, run.length, run.sizes, jax.__version__, jaxlib.__version__)
    key = hashlib.sha256(b"".join([repr(about).encode(), *sources])).hexdigest()[:16]
    file = programs / f"{key}.hlo.gz"
    if not file.exists():
        programs.mkdir(parents=True, exist_ok=True)
        text = _compiled(step, batch)
        part = file.with_suffix(f".{os.getpid()}")
        part.write_bytes(gzip.compress(text.encode(), 3))
        part.replace(file)
    return gzip.decompress(file.read_bytes()).decode()


def tokens(run: Run, found: Prediction) -> float:
    """Predicted, per second and device."""
    return found.rows_per_second * run.length / found.devices


def summary(ratios: list[float]) -> str:
    """Of predicted over published: the median, and how many are near."""
    near = {part: sum(abs(ratio - 1) <= part for ratio in ratios) for part in (0.10, 0.15)}
    counts = ", ".join(f"{n} within {part:.0%}" for part, n in near.items())
    return (
        f"{len(ratios)} runs, median {statistics.median(ratios):.2f}, {counts}, {min(ratios):.2f} to {max(ratios):.2f}"
    )


def main(options: Options) -> None:
    groups: dict[str, list[float]] = {}
    for run in (*RUNS, *BLIND):
        if options.only not in run.name or (run.held_out and not options.held_out):
            continue
        if run.unsupported:
            print(f"{run.name:60} published {run.tokens:9,.0f} tokens/s/GPU, not predicted: {run.unsupported}")
            continue
        run = in_fp8(run) if options.fp8 and run.slower.get("matmul") == FLOAT8["matmul"] else run
        found = prediction(run, options.programs)
        ratio = tokens(run, found) / run.tokens
        print(
            f"{run.name:60} {tokens(run, found):9,.0f} tokens/s/GPU, published {run.tokens:9,.0f}: {ratio:.2f}"
            f"  MFU {found.mfu:.1%}, exposed {found.exposed / found.seconds:.0%}{', held out' * run.held_out}",
            flush=True,
        )
        print(*found.lines()[: options.kernels], sep="\n", end="\n" * (options.kernels > 0))
        of = "held out" if run.held_out else "added later" if run.later else "blind" if run.blind else "not held out"
        for group in (run.group, f"all, {of}"):
            groups.setdefault(group, []).append(ratio)
    for group, ratios in sorted(groups.items()):
        print(f"{group:20} {summary(ratios)}")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
