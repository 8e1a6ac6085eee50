"""jaxpar on a GPU, in commands that each end well within ten minutes and leave a table and a record.

python experiments/gpu.py train --out runs/gpu
python experiments/gpu.py cells --out runs/gpu
python experiments/gpu.py attention --out runs/gpu
python experiments/gpu.py speed --model gpt2 --out runs/gpu
python experiments/gpu.py profile --model gpt2 --out runs/gpu

Each command uses one GPU. It writes NAME.json and NAME.txt into --out row by row, so a killed run keeps its results. A
failure, or a size that does not fit into memory, becomes a row. On 80 GB, 1.2B parameters need --rows 2. `speed` runs
each contender in its own process, two at a time. `cells` sets float32 matmuls to "highest", without TF32; in lower
precisions it allows 1.5 times the error of the CPU.

Where there is no GPU, or with --tiny, sizes are small and the code is the same: no figure of that means anything.
"""

import dataclasses
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from gpu_report import ROOT, Record, how_to_bring, missing, said

sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # the models of the battery


@dataclass(frozen=True, kw_only=True)
class Common:
    """What every command takes."""

    out: Path = Path("runs/gpu")
    """folder for NAME.json and NAME.txt"""
    tiny: bool = False
    """small sizes on simulated CPU devices; so it is without a GPU in any case"""
    budget: float = 480
    """seconds after which nothing new is begun; what was left out is said"""


@dataclass(frozen=True, kw_only=True)
class Train(Common):
    """`jaxpar train` with its own model and text, as `single` and as `fsdp` over this one device, then resumed."""

    steps: int = 300
    """updates of each run"""


@dataclass(frozen=True, kw_only=True)
class Cells(Common):
    """Gradients of the battery's models on the GPU beside those of the CPU in float32."""

    models: tuple[str, ...] = ("gpt", "llama-tiny", "gpt_linen", "gpt_masked", "resnet", "encoder_decoder")
    """of tests/zoo.py, of which the first takes every strategy, the others three; llama-tiny its own"""


@dataclass(frozen=True, kw_only=True)
class Attention(Common):
    """`jp.attention` beside plain attention: errors of values and gradients, time, memory."""

    rounds: int = 20
    """of alternating runs"""


@dataclass(frozen=True, kw_only=True)
class Speed(Common):
    """A training step beside a plain `jax.jit` step and `torch.compile`: time, MFU, memory, what was predicted."""

    model: str = "gpt2"
    """gpt2 (124M), gpt2-medium (355M), llama3.2-1b (1.2B), mixtral-8x7b (2 narrow layers of it, 1.05B), which takes
    `expert` too"""
    strategies: tuple[str, ...] = (
        *("fsdp", "single,remat=layer", "single,precision=fp8"),
        *("fsdp,gather=int8,reduce=int8", "hsdp,hpz=true", "pipe=-1,microbatches=4"),
    )
    """beside `single`, which all are compared with, on the cards that divide the rows; in bf16 where they name no
    precision"""
    rows: int | None = None
    """of a batch, instead of the model's own number here"""
    rounds: int = 10
    """of alternating runs"""
    torch: bool = True
    """whether torch.compile joins, where torch is there"""


@dataclass(frozen=True, kw_only=True)
class Profile(Common):
    """Five steps under jax.profiler: kernels by time, shares, gaps."""

    model: str = "gpt2"
    """as for speed"""
    strategy: str = "single"
    """without its precision, which is bf16"""


def train(options: Train) -> None:
    from jaxpar.layout.distributed import attach
    from jaxpar.run.cli import commands as cli
    from jaxpar.run.cli.options import TrainOptions
    from jaxpar.run.train.recorder import read

    attach(1 if options.tiny else None, default=1)
    record, devices = Record(options.out, "train", options.budget), 1 if _is_cpu() else None
    steps = 4 if options.tiny else options.steps
    for strategy in ("single", "fsdp", "fsdp,precision=bf16"):
        folder = options.out / f"train-{strategy.replace(',', '-').replace('=', '-')}"
        run = TrainOptions(
            model="llama-tiny",
            strategy=strategy,
            out=folder,
            overwrite=True,
            steps=steps,
            sample=0,
            evaluate_every=max(steps // 2, 1),
            evaluate_batches=2 if options.tiny else 50,
            devices=devices,
        )
        if options.tiny:
            run = dataclasses.replace(run, model="llama-tiny,layers=2,dim=32,ffn=48", rows=4, length=16)
        for more in (0, max(steps // 4, 2)):  # then on from its checkpoint
            if record.left < 0:
                record.add(strategy=strategy, steps=run.steps + more, error="not begun: the budget is spent")
                continue
            begin = time.perf_counter()
            try:
                cli.train(dataclasses.replace(run, steps=run.steps + more, overwrite=not more, resume=bool(more)))
                lines = read(folder / "metrics.jsonl")
            except Exception as error:
                record.add(strategy=strategy, steps=run.steps + more, error=said(error))
                continue
            taken = [line for line in lines if "seconds" in line]
            held_out = [line["held_out_loss"] for line in lines if "held_out_loss" in line]
            last = sorted(line["seconds"] for line in taken[len(taken) // 2 :])
            record.add(strategy=strategy, steps=run.steps + more, resumed=bool(more), loss=taken[-1]["loss"],
                       held_out=held_out[-1], step_ms=1e3 * last[len(last) // 2],
                       seconds=time.perf_counter() - begin)  # fmt: skip
    record.show(("strategy", "steps", "resumed", "loss", "held_out", "step_ms", "seconds", "error"),
                note="loss in nats; single and fsdp see the same batches: their losses agree to rounding")  # fmt: skip
    _exit(record)


def cells(options: Cells) -> None:
    import gpu_cells

    _simulate(options, 2)
    record = Record(options.out, "cells", options.budget)
    models = ("function",) if options.tiny else options.models
    gpu_cells.run(record, models, few=options.tiny)
    _exit(record)


def attention(options: Attention) -> None:
    import gpu_attention

    _simulate(options, 1)
    record = Record(options.out, "attention", options.budget)
    gpu_attention.run(record, options.rounds, options.tiny or _is_cpu())
    _exit(record)


def speed(options: Speed) -> None:
    import gpu_speed

    # In the processes of the contenders alone: this one would keep some of the card's memory.
    gpu_speed.run(options, options.tiny)


def profile(options: Profile) -> None:
    import gpu_profile

    _simulate(options, 1)
    record = Record(options.out, "profile", options.budget)
    gpu_profile.run(record, options.model, options.strategy, options.tiny or _is_cpu())
    _exit(record)


def _simulate(options: Common, devices: int) -> None:
    """So many CPU devices where that is asked for, or there is nothing else."""
    from jaxpar.layout.distributed import attach

    attach(devices if options.tiny else None, default=devices)


def _is_cpu() -> bool:
    import jax

    return jax.default_backend() == "cpu"


def _exit(record: Record) -> None:
    """With 1 where something failed or is off, after everything was written."""
    wrong = [row for row in record.rows if row.get("error") or row.get("ok") is False]
    if wrong:
        sys.exit(f"{len(wrong)} of {len(record.rows)} rows failed or are off; see {record.out / record.name}.json")


def main() -> None:
    lacking = missing()
    if lacking:
        print(how_to_bring(lacking), file=sys.stderr)
        if any(one.startswith(("tyro", "jax", "flax", "optax", "numpy")) for one in lacking):
            sys.exit(2)
    import tyro

    commands = {Train: train, Cells: cells, Attention: attention, Speed: speed, Profile: profile}
    union: Any = None
    for kind in commands:
        one = Annotated[kind, tyro.conf.subcommand(kind.__name__.lower(), prefix_name=False)]
        union = one if union is None else union | one
    options = tyro.cli(union, prog="experiments/gpu.py", config=(tyro.conf.FlagCreatePairsOff,))
    commands[type(options)](options)


if __name__ == "__main__":
    main()
