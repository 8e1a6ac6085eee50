"""What of a step waits for collectives: seconds predicted for compiled programs, as experiments/results/fsdp.md

python experiments/exposed.py                  # all of them: an hour or two
python experiments/exposed.py --only 175B      # those whose name contains this
python experiments/exposed.py --only 70B --also concurrent=2

They are compiled for GPUs that are not there (`make gpu-compiler`), with all layers of a published run, and with 8 of a
13B model (4 of Mixtral) elsewhere. 13B, 70B, 175B: KempnerForge on hosts of 4 H200, sequences of 4,096, layers computed
again (github.com/KempnerInstitute/KempnerForge, benchmarks/weak_scaling_160gpu and benchmarks/175b_360gpu, 2026).
"""

import os
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the compiler for H100s wants it said before jax starts

import optax
import tyro

import jaxpar as jp
from jaxpar.hardware import target
from jaxpar.inspect.predict import predict
from jaxpar.models import named

LENGTH = 4096
SIZES_13B = {"layers": 8, "dim": 5120, "heads": 40, "ffn": 17920}


@dataclass(frozen=True)
class Program:
    """A strategy, beside bf16 and `remat=layer`, of a model, for devices; `rows` of a step; seconds as published."""

    strategy: str
    rows: int
    name: str = "8 layers"
    model: tuple[str, dict[str, Any]] = ("llama3-8b", SIZES_13B)
    devices: str = "64xH100"
    published: float | None = None


_OF_175B = {"layers": 96, "dim": 12288, "heads": 96, "ffn": 39680}
_MIXTRAL = ("mixtral-8x7b", {"layers": 4})
PROGRAMS = (
    Program(
        "fsdp=32,tensor=4,sequence=true,microbatches=4",
        rows=512,
        name="13B",
        model=("llama3-8b", SIZES_13B | {"layers": 40}),
        devices="32x4xH200",
        published=4.95,
    ),
    Program(
        "fsdp=40,tensor=4,sequence=true,microbatches=4",
        rows=320,
        name="70B",
        model=("llama3-70b", {}),
        devices="40x4xH200",
        published=15.32,
    ),
    Program(
        "fsdp=90,tensor=4,sequence=true",
        rows=720,
        name="175B",
        model=("llama3-70b", _OF_175B),
        devices="90x4xH200",
        published=19.09,
    ),
    Program("fsdp=64", 256),
    Program("fsdp=64,microbatches=4", 1024),
    Program("fsdp=16,tensor=4,sequence=true", 64),
    Program("fsdp=16,tensor=4,sequence=true,microbatches=4", 256),
    Program("fsdp=64,zero=1,microbatches=4", 1024),
    Program("fsdp=64,zero=2,microbatches=4", 1024),
    Program("data=4,fsdp=16,microbatches=4", 256),
    Program("pipe=4,fsdp=16,microbatches=16", 256),
    Program("fsdp=8,expert=8,microbatches=4", 256, "Mixtral", _MIXTRAL),
)


@dataclass(frozen=True)
class Options:
    """Prints seconds of steps, and what waits."""

    only: str = ""
    """programs whose name or strategy contains this"""
    also: str = ""
    """part of a strategy that each has besides"""


def line(program: Program, also: str) -> str:
    """One program's."""
    name, sizes = program.model
    model, found = named(name, **sizes), target(program.devices)
    strategy = ",".join(filter(None, (program.strategy, "remat=layer,precision=bf16", also)))
    step = jp.make_train_step(model.model, optax.adamw(3e-4), strategy, mesh=found.devices)
    batch = model.example(program.rows, LENGTH)
    compiled = step.compile(batch)
    told = predict(compiled, step, batch, found.hardware)
    memory: Any = compiled.memory_analysis()
    published = f", published {program.published:.2f} s" if program.published else ""
    return (
        f"{program.name:9} {program.devices:9} {program.strategy}{',' * bool(also)}{also}, {program.rows} rows: "
        f"{told.seconds:.3f} s, {told.exposed:.3f} exposed ({told.exposed / told.seconds:.1%}), "
        f"{memory.temp_size_in_bytes / 1e9:.1f} GB of temporaries{published}"
    )


def main(options: Options) -> None:
    for program in PROGRAMS:
        if options.only in f"{program.name} {program.strategy}":
            print(line(program, options.also), flush=True)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
