"""Cells of a covering array: every schedule with every number of stages and microbatches, and with every other axis.

A schedule with a number of chunks appears with every p and every m. It appears with every model, mesh, number of rows
and choice of remat at least once, and so does every pair of these choices.
"""

import functools
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from cells import check, covering, pairs_of
from test_pipeline import (
    BLOCKS,
    BUILDERS,
    DEEP,
    LAYERS,
    LENGTH,
    MODELS,
    SGD,
    STEPS,
    batch_of,
    model_of,
    one_device,
)

import jaxpar as jp
from jaxpar.inspect.expected import expected
from jaxpar.strategy.schedules import SCHEDULES

COUNTS: dict[str, Callable[[int], int]] = {
    "1": lambda p: 1,
    "p": lambda p: p,
    "p+1": lambda p: p + 1,
    "2p": lambda p: 2 * p,
    "3p": lambda p: 3 * p,
}
BESIDE = ("", "data=2", "fsdp=2,zero=1", "fsdp=2,zero=2", "fsdp=2,zero=3", "data=2,fsdp=2,zero=3")
LOCKSTEP = ("gpipe", "1f1b", "1f1b-overlap")
TENSOR = ("tensor=2", "tensor=2,sequence=true", "fsdp=2,zero=3,tensor=2,sequence=true")


DEPTH = {name: DEEP if name == "deep" else BLOCKS if "loop" in name else LAYERS for name in BUILDERS}


class Cell(NamedTuple):
    model: str
    pipe: int
    schedule: str
    chunks: int
    microbatches: str  # in terms of p
    rows: str  # of a microbatch; with p rows, each rank computes the head of one
    beside: str
    remat: str

    @property
    def devices(self) -> int:
        """Return the number of devices."""
        return self.pipe * 2 ** self.beside.count("=2") // (2 if "zero=2" in self.beside else 1)


def kinds() -> Iterator[tuple[str, int]]:
    """Yield each schedule with each number of chunks that it may have."""
    for name, recipe in SCHEDULES.items():
        chunks = dict.fromkeys(LOCKSTEP, (1, 2, 4))
        yield from ((name, v) for v in chunks.get(name, (2,) if recipe.placement == "V" else (1,)))


def product() -> Iterator[Cell]:
    for model, pipe, (name, chunks), count, rows, beside, remat in itertools.product(
        BUILDERS, (2, 4, 8), kinds(), COUNTS, ("1", "p"), (*BESIDE, *TENSOR), ("none", "layer", "twice")
    ):
        cell, m = Cell(model, pipe, name, chunks, count, rows, beside, remat), COUNTS[count](pipe)
        if name == "dualpipe-v" and m < 2 * pipe:
            continue  # it needs a microbatch for each stage
        if name in LOCKSTEP and chunks > 1 and m % pipe:
            continue  # their chunks take microbatches in groups of p
        if name in LOCKSTEP and remat == "twice":
            continue  # their backwards are whole
        if cell.devices <= 16 and pipe * chunks <= DEPTH[model] and ("tensor" not in beside or model == "deep"):
            yield cell


def covered_choices(cell: Cell) -> set[Any]:
    """Return what one cell covers: pairs of choices, and the triple of schedule (with its chunks), p and m."""
    kind = (cell.schedule, cell.chunks)
    choices = (kind, cell.pipe, cell.microbatches, cell.rows, cell.beside, cell.remat, cell.model)
    return {*pairs_of(choices), (kind, cell.pipe, cell.microbatches)}


@functools.cache
def chosen() -> tuple[Cell, ...]:
    """Return the covering array."""
    return tuple(sorted(covering(product(), covered_choices)))


@functools.cache
def reference(name: str, blocks: int, rows: int) -> tuple[Any, Any]:
    """Return gradients and parameters of one device that trains on `blocks` blocks of `rows` rows."""
    return one_device(name).train(SGD, batch_of(blocks * rows), blocks, STEPS)


def check_cell(cell: Cell) -> None:
    """Compare one compiled step with one device, and its messages with the schedule's slots."""
    m = COUNTS[cell.microbatches](cell.pipe)
    text = f"pipe={cell.pipe},schedule={cell.schedule},chunks={cell.chunks},microbatches={m},remat={cell.remat}"
    step = jp.make_train_step(
        model_of(cell.model), SGD, f"{text},{cell.beside}".rstrip(","), mesh=jax.devices()[: cell.devices]
    )
    blocks, rows = step.replicas * m, COUNTS[cell.rows](cell.pipe)
    first = one_device(cell.model).first
    check(step, model_of(cell.model), first, batch_of(blocks * rows), STEPS, *reference(cell.model, blocks, rows))
    if cell.model != "experts":  # messages have its balance losses as well
        (sent,) = (entry for entry in expected(step, batch_of(blocks * rows)) if entry.kind == "collective-permute")
        assert (sent.count, sent.bytes) == messages(cell, step.schedule, rows)


def messages(cell: Cell, schedule: Any, rows: int) -> tuple[int, int]:
    """Return how many activations a rank sends in a step, and their bytes.

    If ranks branch, a slot has one each way. In lockstep, a tick with forwards has one, and a tick with backwards one
    back.
    """
    count = 2 * schedule.ticks if schedule.branches else schedule.messages("F") + schedule.messages("B")
    dim = 16 if cell.model == "deep" else 12
    return count, count * rows * (LENGTH - 1) * dim * 4 // (2 if "sequence=true" in cell.beside else 1)


GROUPS = (*(("deep", pipe) for pipe in (2, 4, 8)), *((name, None) for name in MODELS))


def run(model: str, pipe: int | None) -> None:
    """Check all chosen cells of a model, or its cells with `pipe` stages, on 16 devices; report which fail, and why."""
    cells = [cell for cell in chosen() if cell.model == model and pipe in (None, cell.pipe)]
    failed = []
    for number, cell in enumerate(cells, start=1):
        begin = time.process_time()
        try:
            check_cell(cell)
        except Exception as error:
            failed.append(f"{cell}: {type(error).__name__}: {error}")
        result = failed[-1] if failed and failed[-1].startswith(f"{cell}:") else cell
        spent = time.process_time() - begin
        print(f"{number} of {len(cells)}, {len(failed)} failed, {spent:.0f} s: {result}", flush=True)
    assert not failed, "\n".join(failed)
