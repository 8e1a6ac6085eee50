"""Mixtures of experts under several axes at once, compiled for devices that are not here: what is held, sent, hidden.

JAX_PLATFORMS=cpu python experiments/five_axes.py
JAX_PLATFORMS=cpu python experiments/five_axes.py --only deepseek

Nothing runs. Of each step it prints the state and the temporaries of a device, its collectives as promised and as
compiled, how many of these bytes a kernel runs beside, and how many of their predicted seconds no kernel hides. These
are the tables of experiments/results/experts.md. Each cell takes 15 to 40 s of a core.
"""

import dataclasses
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import optax
import tyro
from deepseek import named
from jax._src.cudnn import fused_attention_stablehlo
from report import GB, console, grid, record

import jaxpar as jp
from jaxpar.hardware import target
from jaxpar.hardware.compiled.kernels import Executable
from jaxpar.inspect.expected import expected
from jaxpar.inspect.ledger import Ledger
from jaxpar.inspect.predict.prediction import predict


@dataclass(frozen=True)
class Cell:
    """One program: a model of rows of 4,096 tokens, a strategy, a batch."""

    name: str
    model: str
    target: str
    strategy: str
    rows: int


_OF_MIXTRAL = "pipe=4,fsdp=2,expert=8,microbatches=8,precision=bf16,remat=layer"
_OF_DEEPSEEK = "pipe=16,expert=64,fsdp=2,zero=1,microbatches=120,precision=bf16,remat=layer"
CELLS = (
    Cell("mixtral", "mixtral-8x7b", "8x8xH100", _OF_MIXTRAL, 128),
    Cell("mixtral, overlap", "mixtral-8x7b", "8x8xH100", f"{_OF_MIXTRAL},schedule=1f1b-overlap", 128),
    Cell(
        "mixtral with tensor",
        "mixtral-8x7b",
        "8x8xH100",
        "pipe=4,expert=8,tensor=2,microbatches=16,precision=bf16,remat=layer",
        128,
    ),
    Cell("deepseek", "deepseek-v3", "256x8xH100", _OF_DEEPSEEK, 15360),
    Cell("deepseek, overlap", "deepseek-v3", "256x8xH100", f"{_OF_DEEPSEEK},schedule=1f1b-overlap", 15360),
)


@dataclass(frozen=True)
class Options:
    """Compiles mixtures under several axes, and prints what they send."""

    only: str = ""
    """cells whose name contains this"""
    layers: int | None = None
    """of each model; its own number without it"""
    out: Path = Path("runs/five_axes")
    """where five_axes.json and the programs go"""


@dataclass
class Row:
    """Collectives of one kind over the same axes, of a device and step.

    Attributes:
      promised: bytes of the closed form.
      compiled: bytes of the compiled program; scalars of the optimizer's norms, and what is not promised, aside.
      beside: of these, bytes that a kernel runs beside.
      seconds, exposed: predicted, and those in which kernels wait.
    """

    name: str
    promised: float = 0.0
    compiled: float = 0.0
    beside: float = 0.0
    seconds: float = 0.0
    exposed: float = 0.0


def beside(device: Any) -> Any:
    """As on the target: whether cuDNN takes heads beyond 128 features, such as DeepSeek-V3's, JAX asks the GPUs that
    are here (jax 0.10), and there are none.
    """
    has = tuple(map(int, device.compute_capability.split(".")))
    asked = lambda least: has >= tuple(map(int, least.split(".")))
    return mock.patch.object(fused_attention_stablehlo, "check_compute_capability", asked)


def key(kind: str, axes: Iterable[str], overflow: bool) -> str:
    """A row's name; what a dropless mixture sends only where tokens overflow has a row of its own."""
    return f"{kind} over {' and '.join(axes)}{', overflow' if overflow else ''}"


def rows_of(promised: Ledger, found: Ledger, parts: Iterable[Any]) -> list[Row]:
    """The largest first."""
    rows: dict[str, Row] = {}

    def row(kind: str, axes: Iterable[str], overflow: bool) -> Row:
        name = key(kind, axes, overflow)
        return rows.setdefault(name, Row(name))

    for one in promised:
        row(one.kind, one.axes, one.conditional).promised += one.bytes
    for one in found:
        here = row(one.kind, one.axes, one.conditional)
        here.compiled += one.bytes
        here.beside += one.bytes * one.overlapped
    for part in parts:  # tokens overflow nowhere in a prediction
        here = row(part.kind, part.axes, False)
        here.seconds, here.exposed = here.seconds + part.seconds, here.exposed + part.exposed
    return sorted(rows.values(), key=lambda one: -one.compiled)


def measure(cell: Cell, options: Options) -> dict[str, Any]:
    """Compiles one."""
    there = target(cell.target)
    chosen = named(cell.model, **({"layers": options.layers} if options.layers else {}))
    step = jp.make_train_step(chosen.model, optax.adamw(1e-4), cell.strategy, mesh=there.devices)
    batch = chosen.example(cell.rows, 4096)
    with beside(step.mesh.devices.flat[0]):
        begin = time.process_time()
        program = step.compile(batch)
        spent = time.process_time() - begin
        promised = expected(step, batch)
    held, read = program.memory_analysis(), Executable(program.as_text() or "", step.mesh)
    found = predict(read, step, batch, there.hardware, chosen.flops(cell.rows, 4096))
    rows = rows_of(promised, Ledger.of(read), found.collectives)
    return {
        "name": cell.name,
        "strategy": cell.strategy,
        "state": held.argument_size_in_bytes,
        "temporaries": held.temp_size_in_bytes,
        "seconds": found.seconds,
        "compute": found.compute,
        "exposed": found.exposed,
        "mfu": found.mfu,
        "compiling": spent,
        "rows": [dataclasses.asdict(row) for row in rows],
    }


def show(screen: Any, one: dict[str, Any]) -> None:
    """One cell as a table."""
    screen.print(
        f"{one['name']}: {one['strategy']}\n"
        f"{one['state'] / GB:.2f} GB of state, {one['temporaries'] / GB:.2f} GB of temporaries; predicted "
        f"{one['seconds']:.2f} s a step, of which kernels wait {one['exposed']:.2f} s; MFU {one['mfu']:.1%}; "
        f"compiled in {one['compiling']:.0f} s of a core"
    )
    table = grid(["per device and step"], ["promised, GB", "compiled, GB", "beside kernels", "s", "exposed, s"])
    for row in one["rows"]:
        if row["compiled"] >= 0.01 * GB:
            sizes = (f"{row[name] / GB:,.2f}" for name in ("promised", "compiled", "beside"))
            table.add_row(row["name"], *sizes, f"{row['seconds']:.3f}", f"{row['exposed']:.3f}")
    screen.print(table)


def main(options: Options) -> list[dict[str, Any]]:
    """Compiles one after the other, prints their tables, writes the file after each."""
    jax.config.update("jax_platforms", "cpu")  # so that the CUDA compiler does without a GPU
    screen, found = console(), []
    for cell in CELLS:
        if options.only in cell.name:
            found.append(measure(cell, options))
            show(screen, found[-1])
            record(options.out / "five_axes.json", options, cells=found)
    return found


if __name__ == "__main__":
    main(tyro.cli(Options))
