"""Predicted against published throughput, of three training runs. Nothing was fitted to them.

python experiments/published_throughput.py
python experiments/published_throughput.py --kernels 20

They are compiled for GPUs that are not there (`pip install "jaxpar[cuda12]"`), from our own models, with the batch,
sharding and recomputation that was published. What the second run's hardware and kernels differed in is put in one
by one. The third was looked up when the model was done.
"""

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import optax
import tyro

import jaxpar as jp
from jaxpar.inspect.predict.prediction import Prediction, predict
from jaxpar.inspect.targets.devices import target
from jaxpar.inspect.targets.hardware import KINDS, Hardware, peaks_of
from jaxpar.models import Named, named

# Shah et al. 2024, arXiv:2407.08608, figures 5 and 6, TFLOP/s at 8k, head_dim 128: cuDNN over FlashAttention-2.
FLASH_2 = {"attention": 529 / 333, "attention backward": 518 / 318}


@dataclass(frozen=True)
class Options:
    """Prints predicted over published throughput."""

    kernels: int = 0
    """so many of each run's kernels and collectives, those that take most"""


@dataclass(frozen=True)
class Run:
    """A published run.

    Attributes:
      name: who ran it.
      source: where it was published, and how it was run.
      model: of `jaxpar.models`.
      target: devices to compile for; all are one `fsdp` axis.
      rows, length: of the global batch.
      reduce: dtype of gradients as they are reduced.
      remat: what is kept of a layer, as a `jax.checkpoint` policy.
      tokens: per second and device, as published.
      hardware: what it ran on, step by step from an H100 by its data sheet.
      slower: kinds of kernels that took so many times longer there.
    """

    name: str
    source: str
    model: str
    target: str
    rows: int
    length: int
    reduce: str
    remat: Callable[[Named], Callable[..., bool]]
    tokens: float
    hardware: dict[str, Hardware]
    slower: dict[str, float] = dataclasses.field(default_factory=dict)


def minimal_flash(_: Named) -> Callable[..., bool]:
    """MaxText's: products and attention are kept."""
    return lambda prim, *_, **params: prim.name in ("dot_general", "custom_vmap_call")  # the latter is attention


def every_second(model: Named) -> Callable[..., bool]:
    """torchtitan's selective checkpointing, "op": attention is kept, and of the products all but every second.

    In their order query, key, value, out, gate, up, down: key, out and up are computed again. A policy sees shapes
    only, so it counts: of two alike, is it the first that is computed again, or the second?
    """
    c = model.config
    again = {(c.dim, c.kv_heads * c.head_dim): 0, (c.dim, c.dim): 1, (c.dim, c.ffn): 1}
    seen = dict.fromkeys(again, 0)

    def policy(prim: Any, *avals: Any, **params: Any) -> bool:
        if prim.name != "dot_general":
            return prim.name == "custom_vmap_call"
        shape = avals[1].shape
        if shape not in again:
            return True
        seen[shape] += 1
        return (seen[shape] - 1) % 2 != again[shape]

    return policy


H100 = KINDS["H100"]
SLOW_MEMORY = dataclasses.replace(H100, kind="H100-HBM2e", memory_bytes=96 * 2**30, memory_bandwidth=2.4e12)
RUNS = (
    Run(
        name="MaxText, JAX-Toolbox",
        source="github.com/NVIDIA/JAX-Toolbox, docs/frameworks/maxtext/README.md: 8 H100 80G SXM, FSDP 8,\n"
        "2 sequences of 4,096 to a GPU, minimal_flash, not scanned: 0.721 s, 22.19 sequences/s",
        model="llama2-7b",
        target="8xH100",
        rows=16,
        length=4096,
        reduce="compute",
        remat=minimal_flash,
        tokens=22.19 * 4096 / 8,
        hardware={"H100 SXM": H100},
    ),
    Run(
        name="torchtitan",
        source="github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: 8 H100, 96 GB HBM2e,\n"
        "2.4 TB/s, 500 W, FSDP, 2 sequences of 8,192 to a GPU, selective checkpointing, torch.compile: 6,667\n"
        'tokens/s/GPU; "the actual peak TFLOPs number is between SXM and NVL"',
        model="llama3-8b",
        target="8xH100",
        rows=16,
        length=8192,
        reduce="f32",
        remat=every_second,
        tokens=6667,
        hardware={
            "H100 SXM": H100,
            "+ 2.4 TB/s": SLOW_MEMORY,
            "+ peak of an NVL": dataclasses.replace(SLOW_MEMORY, peaks=peaks_of("NVIDIA H100 NVL")),
        },
        # github.com/pytorch/pytorch/pull/138522: FlashAttention-2 by default; torchtitan's cuDNN came in March 2025.
        slower=FLASH_2,
    ),
    Run(
        name="torchtitan on A100s",
        source="github.com/pytorch/torchtitan, docs/performance.md (2024): 64 A100 80GB, FSDP, 1 sequence to a GPU\n"
        "(of 8,192, as its MFU implies), selective checkpointing: 2,973 tokens/s/GPU; network not given: as of a DGX",
        model="llama3-8b",
        target="64xA100-80GB",
        rows=64,
        length=8192,
        reduce="f32",
        remat=every_second,
        tokens=2973,
        hardware={"A100 SXM": KINDS["A100-80GB"]},
    ),
)


def predictions(run: Run) -> dict[str, Prediction]:
    """A run on each of its hardwares; compiled once."""
    model, devices = named(run.model), target(run.target).devices
    strategy = jp.Strategy(fsdp=len(devices), precision="bf16", reduce=run.reduce, remat=run.remat(model))
    step = jp.make_train_step(model.model, optax.adamw(3e-4), strategy, mesh=devices)
    batch, flops = model.example(run.rows, run.length), model.flops(run.rows, run.length)
    text = step.compile(batch).as_text()
    found = {name: predict(text, step, batch, hardware, flops) for name, hardware in run.hardware.items()}
    if run.slower:
        found["+ FlashAttention-2"] = slowed(list(found.values())[-1], run.slower)
    return found


def slowed(found: Prediction, by: dict[str, float]) -> Prediction:
    """The same with kernels of these kinds so many times slower."""
    parts = tuple(dataclasses.replace(part, seconds=part.seconds * by.get(part.kind, 1)) for part in found.parts)
    more = sum(part.seconds for part in parts) - sum(part.seconds for part in found.parts)
    return dataclasses.replace(found, parts=parts, seconds=found.seconds + more, compute=found.compute + more)


def tokens(run: Run, found: Prediction) -> float:
    """Predicted, per second and device."""
    return found.rows_per_second * run.length / found.devices


def main(options: Options) -> None:
    for run in RUNS:
        print(f"{run.name}\n{run.source}")
        for name, found in predictions(run).items():
            speed = tokens(run, found)
            ratio = f"MFU {found.mfu:.1%}  predicted / published {speed / run.tokens:.2f}"
            print(f"  {name:20} {1e3 * found.seconds:7.1f} ms  {speed:8,.0f} tokens/s/GPU  {ratio}")
        seconds = run.rows * run.length / (found.devices * run.tokens)
        print(f"  {'published':20} {1e3 * seconds:7.1f} ms  {run.tokens:8,.0f} tokens/s/GPU")
        print(found, *found.lines()[: options.kernels], "", sep="\n")


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    main(tyro.cli(Options, description=__doc__))
