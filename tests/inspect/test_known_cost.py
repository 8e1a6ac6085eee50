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
    """Give all tests of a program to one worker, so that it is compiled once."""
    return pytest.mark.xdist_group(f"gpu known cost {name}")


ALL_CELLS = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[group(name), pytest.mark.battery] if cell.battery else group(name))
        for name, cell in CELLS.items()
    ],
)


def unread_message_bytes(step: Any, closed: Ledger) -> int:
    """Return the bytes that a pipeline's closed form counts and the compiler drops.

    Every tick sends a message, even the last one, whose message nobody reads. In a loop the compiler keeps it. With two
    ranks, a single tick remains after the last forward: the compiler inlines a loop of one iteration, and then drops
    the unread message.
    """
    if step.schedule is None or step.schedule.phases()[-1][1][-1].length > 1:
        return 0
    return closed.total(kind="collective-permute") // closed.total("count", kind="collective-permute")


@ALL_CELLS
def test_collectives_are_those_of_the_closed_form(name: str) -> None:
    """Bytes by kind, axes and dtype agree within 1%, in bfloat16 and float32 as the strategy says."""
    cell = compiled(name)
    closed_form, fields = expected(cell.step, cell.batch), ("kind", "axes", "dtype")
    compiled_bytes, expected_bytes = cell.ledger.by(*fields), closed_form.by(*fields)
    if dropped_bytes := unread_message_bytes(cell.step, closed_form):
        expected_bytes["collective-permute", ("pipe",), "bfloat16"] -= dropped_bytes
    for key in {*compiled_bytes, *expected_bytes}:
        promised = expected_bytes.get(key, 0)
        most = 0.01 * promised if promised >= FLOOR else FLOOR
        assert abs(compiled_bytes.get(key, 0) - promised) <= most, (key, compiled_bytes, expected_bytes)
    assert sum(expected_bytes.values()) > 1000 * FLOOR


@ALL_CELLS
def test_arguments_are_those_of_the_layout(name: str) -> None:
    cell = compiled(name)
    (tokens,) = jax.tree.leaves(cell.batch)
    rows = math.prod(tokens.shape) * tokens.dtype.itemsize // cell.step.replicas
    layout_bytes = cell.step.layout.bytes
    state_bytes = layout_bytes["params"] + layout_bytes["optimizer"]
    assert cell.memory.argument_size_in_bytes - rows == pytest.approx(state_bytes, rel=5e-3)


def test_padding_is_met() -> None:
    """The odd sizes make leaves that are padded and leaves that are replicated."""
    model = named("llama-tiny", **ODD)
    notes = jp.make_train_step(model.model, optax.adamw(3e-4), "zero3", gpu_topology("8xH100")).layout.notes.values()
    assert {note.split(":")[0] for note in notes} == {"padded", "replicated"}
