"""Every strategy, compiled for H100s that are not there, against its closed form: collectives and argument bytes.

A small Llama whose sizes divide by few numbers, so that leaves are padded or replicated, and one of even sizes where
eight tensor ranks must divide heads and words. (Of `pipe`, `fsdp`, `tensor` together, also with `sequence`, those of
Llama-3-8B are in `parallel/tensor/test_gpu_tensor.py`.)
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import optax
import pytest
from cells import Compiled

import jaxpar as jp
from jaxpar.hardware.devices import gpu_topology
from jaxpar.inspect.expected import expected
from jaxpar.inspect.ledger import Ledger
from jaxpar.models import named

pytestmark = pytest.mark.cuda_compiler
LENGTH, ROWS = 128, 2  # of one microbatch of one replica
FLOOR = 1000  # bytes: scalars of the loss, the metrics and the optimizer's norms, 36 B at most in these programs
ODD = {"vocab": 1002, "dim": 268, "layers": 4, "heads": 2, "kv_heads": 2, "ffn": 502}
EVEN = {"vocab": 2048, "dim": 256, "layers": 4, "heads": 8, "kv_heads": 8, "ffn": 768}
FOUR = "pipe=2,data=2,fsdp=2,tensor=2,microbatches=4"


class Cell(NamedTuple):
    strategy: str
    target: str
    sizes: dict[str, int]
    battery: bool = True  # where others have what it shows


CELLS = {
    "ddp": Cell("ddp", "8xH100", ODD),
    "zero1": Cell("zero1", "8xH100", ODD),
    "zero2": Cell("zero2", "8xH100", ODD),
    "zero3": Cell("zero3", "8xH100", ODD),
    "hsdp": Cell("hsdp", "2x8xH100", ODD, battery=False),
    "tensor": Cell("tensor=8", "8xH100", EVEN),
    "sequence": Cell("tensor=8,sequence=true", "8xH100", EVEN),
    "pipe": Cell("pipe=4,microbatches=8", "4xH100", ODD | {"layers": 6}),  # 2 layers of padding
    "four axes, zero1": Cell(f"{FOUR},zero=1", "2x8xH100", ODD),
    "four axes, zero2, sequence": Cell(f"{FOUR},zero=2,sequence=true", "2x8xH100", EVEN),
    "four axes, zero3": Cell(f"{FOUR},zero=3", "2x8xH100", ODD),
    "four axes, zero3, sequence": Cell(f"{FOUR},zero=3,sequence=true", "2x8xH100", ODD),
}


@functools.cache
def compiled(name: str) -> Compiled:
    cell = CELLS[name]
    model = named("llama-tiny", **cell.sizes)
    text = f"{cell.strategy},precision=bf16,remat=layer"
    step = jp.make_train_step(model.model, optax.adamw(3e-4), text, gpu_topology(cell.target))
    return Compiled.of(step, model.example(ROWS * step.replicas * step.strategy.microbatches, LENGTH))


def group(name: str) -> pytest.MarkDecorator:
    """One worker takes all tests of a program, so that it is compiled once."""
    return pytest.mark.xdist_group(f"gpu known cost {name}")


EVERY = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[group(name), pytest.mark.battery] if cell.battery else group(name))
        for name, cell in CELLS.items()
    ],
)


def unread(step: Any, closed: Ledger) -> int:
    """Bytes that a pipeline's closed form counts and that the compiler drops.

    Every tick sends a message, the last one too, though nobody reads that. Ticks are in loops, where it stays. But of
    two ranks a single tick is left when the last forward is done: the compiler inlines a loop of one iteration, and
    then sees that its message is not read.
    """
    if step.schedule is None or step.schedule.phases()[-1][1][-1].length > 1:
        return 0
    return closed.total(kind="collective-permute") // closed.total("count", kind="collective-permute")


@EVERY
def test_collectives_are_those_of_the_closed_form(name: str) -> None:
    """Bytes by kind, axes and dtype, 1% either way: bfloat16 and float32 where the strategy says so."""
    it = compiled(name)
    closed, fields = expected(it.step, it.batch), ("kind", "axes", "dtype")
    found, wanted = it.ledger.by(*fields), closed.by(*fields)
    if less := unread(it.step, closed):
        wanted["collective-permute", ("pipe",), "bfloat16"] -= less
    pairs = {key: (found.get(key, 0), wanted.get(key, 0)) for key in {*found, *wanted}}
    assert {key: (a, b) for key, (a, b) in pairs.items() if abs(a - b) > (0.01 * b if b >= FLOOR else FLOOR)} == {}
    assert sum(wanted.values()) > 1000 * FLOOR


@EVERY
def test_arguments_are_those_of_the_layout(name: str) -> None:
    it = compiled(name)
    (tokens,) = jax.tree.leaves(it.batch)
    rows = math.prod(tokens.shape) * tokens.dtype.itemsize // it.step.replicas
    stored = it.step.layout.bytes
    closed = stored["params"] + stored["optimizer"]
    assert it.memory.argument_size_in_bytes - rows == pytest.approx(closed, rel=5e-3)


def test_padding_is_met() -> None:
    """The odd sizes make leaves that are padded and leaves that are replicated."""
    model = named("llama-tiny", **ODD)
    notes = jp.make_train_step(model.model, optax.adamw(3e-4), "zero3", gpu_topology("8xH100")).layout.notes.values()
    assert {note.split(":")[0] for note in notes} == {"padded", "replicated"}
