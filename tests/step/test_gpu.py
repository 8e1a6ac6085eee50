"""Steps compiled for 8 H100s that are not there: memory, collectives, overlap; against steps written by hand."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import handwritten
import jax
import jax.numpy as jnp
import optax
import pytest
from cells import Compiled

import jaxpar as jp
from jaxpar.hardware.compiled.entry import Collective, Nesting
from jaxpar.hardware.compiled.kernels import Executable, Operation, While
from jaxpar.hardware.devices import gpu_topology
from jaxpar.inspect.expected import expected
from jaxpar.inspect.ledger import collectives

pytestmark = pytest.mark.cuda_compiler
WIDTHS = handwritten.Config()  # Llama-3-8B, 8 layers
LARGE = 1 << 20  # bytes; a norm's gather takes less time than the compiler would need to hide it


class Loops(Compiled):
    def loops(self, trips: int) -> list[list[Collective]]:
        """The collectives, each for itself, of every loop of so many iterations."""

        def within(operations: Sequence[Operation]) -> Iterator[While]:
            for one in operations:
                if isinstance(one, While):
                    yield from (one, *within(one.body))

        nesting, found = Nesting(times=trips, in_loop=True), within(Executable(self.text, self.step.mesh).operations)
        return [list(collectives(loop.body, nesting)) for loop in found if loop.trips == trips]


def compiled(model: jp.Model, strategy: str, batch: Any) -> Loops:
    step = jp.make_train_step(model, optax.adamw(3e-4), f"{strategy},precision=bf16", mesh=gpu_topology("8xH100"))
    return Loops.of(step, batch)


def params(*strategies: str, battery: tuple[str, ...] = ()) -> list[Any]:
    """One worker takes all tests of a strategy, so that it is compiled once."""
    marks = lambda name: [pytest.mark.xdist_group(f"gpu {name}"), *[pytest.mark.battery] * (name in battery)]
    return [pytest.param(name, marks=marks(name)) for name in strategies]


@pytest.fixture(scope="module", params=params("zero2", "zero3"))
def llama(request: pytest.FixtureRequest) -> Loops:
    init, loss = handwritten.model_fns(WIDTHS)
    batch = {"tokens": jax.ShapeDtypeStruct((8, WIDTHS.sequence + 1), jnp.int32)}
    return compiled(jp.Model(init=init, loss=loss), f"{request.param},remat=layer", batch)


def assert_bytes_as_expected(found: Loops) -> None:
    """Bytes by kind, axes and dtype: the closed form, but for scalars that the optimizer reduces (clipping, norms)."""
    fields = "kind", "axes", "dtype"
    scalars = "all-reduce", ("fsdp",), "float32"
    theirs, ours = found.ledger.by(*fields), expected(found.step, found.batch).by(*fields)
    assert theirs.pop(scalars) < ours.pop(scalars) + 1000
    assert theirs == ours


def test_bytes_equal_the_closed_form(llama: Loops) -> None:
    assert_bytes_as_expected(llama)


@pytest.mark.slow
@pytest.mark.parametrize("llama", params("zero2", "zero3", battery=("zero2",)), indirect=True)
def test_temporaries_are_those_of_a_step_written_by_hand(llama: Loops) -> None:
    program = handwritten.compile_step(llama.step.strategy.zero, gpu_topology("8xH100"), WIDTHS)
    assert llama.memory.temp_size_in_bytes <= 1.05 * program.memory_analysis().temp_size_in_bytes


def test_arguments_are_those_of_the_layout(llama: Loops) -> None:
    bytes_ = llama.step.layout.bytes
    assert llama.memory.argument_size_in_bytes == pytest.approx(bytes_["params"] + bytes_["optimizer"], rel=5e-3)
    assert llama.memory.alias_size_in_bytes == pytest.approx(llama.memory.output_size_in_bytes, rel=5e-3)  # in nesting


def test_gradients_of_layers_are_reduced_inside_one_backward_loop(llama: Loops) -> None:
    scatters = [[one for one in loop if one.kind == "reduce-scatter"] for loop in llama.loops(WIDTHS.layers)]
    (backward,) = [loop for loop in scatters if loop]
    layers = sum(math.prod(leaf.shape) for leaf in llama.step.layout.leaves if leaf.path.startswith("layers"))
    assert sum(one.bytes for one in backward) == 4 * layers
    assert all(one.asynchronous for one in backward)
    hidden = sum(one.bytes for one in backward if one.overlapped)
    assert hidden > 0.5 * 4 * layers


def test_gradients_are_reduced_in_float32(llama: Loops) -> None:
    reductions = [one for one in llama.ledger if one.kind in ("all-reduce", "reduce-scatter")]
    assert {one.dtype for one in reductions} == {"float32"}


def test_gathers_of_layers_are_hidden_by_compute(llama: Loops) -> None:
    gathers = [one for loop in llama.loops(WIDTHS.layers) for one in loop if one.kind == "all-gather"]
    assert {one.dtype for one in gathers} == {"bfloat16"}
    large = [one for one in gathers if one.bytes > LARGE * WIDTHS.layers]
    hidden = sum(one.bytes for one in large if one.overlapped)
    if llama.step.strategy.zero == 3:  # ZeRO-2 gathers after its update, when there is nothing left to compute
        assert hidden > 0.75 * sum(one.bytes for one in large)


def piped(strategy: str) -> int:
    """Bytes of the temporaries of a pipeline of 4 over the same layers."""
    init, loss = handwritten.model_fns(WIDTHS)
    devices = gpu_topology("8xH100")[:4]
    step = jp.make_train_step(jp.Model(init=init, loss=loss), optax.adamw(3e-4), f"{strategy},precision=bf16", devices)
    rows = jax.ShapeDtypeStruct((step.strategy.microbatches, WIDTHS.sequence + 1), jnp.int32)
    return step.compile({"tokens": rows}).memory_analysis().temp_size_in_bytes


@pytest.mark.battery  # for CPUs: test_stages.py; against a closed form, of Llama-3-8B: test_gpu_tensor.py
@pytest.mark.xdist_group("gpu pipe")
@pytest.mark.parametrize("chunks", [1, 2])
def test_memory_of_a_pipeline_is_flat_in_microbatches(chunks: int) -> None:
    few, many = (piped(f"pipe=4,chunks={chunks},microbatches={m}") for m in (8, 32))
    assert many <= 1.05 * few
    if chunks == 2:
        assert many < 0.5 * piped("pipe=4,schedule=gpipe,microbatches=32")


def tied() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """An embedding of 32,000 x 1,024 that is the head as well, and 4 scanned layers."""

    def init(key: jax.Array) -> Any:
        return {"embed": jnp.ones((32_000, 1024)), "w": jnp.ones((4, 1024, 1024)), "b": jnp.ones((4, 1024))}

    def loss(p: Any, batch: jax.Array, key: jax.Array | None) -> jax.Array:
        h, _ = jax.lax.scan(lambda h, l: (h + jnp.tanh(h @ l[0] + l[1]), None), p["embed"][batch], (p["w"], p["b"]))
        return jax.nn.logsumexp((h @ p["embed"].T).astype(jnp.float32), -1).mean()

    return init, loss


def unscanned() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Six layers in a Python loop: 2 MB each, in bfloat16."""

    def init(key: jax.Array) -> Any:
        return {f"w{i}": jnp.ones((1024, 1024)) for i in range(6)}

    def loss(p: Any, batch: jax.Array, key: jax.Array | None) -> jax.Array:
        h = jnp.ones((*batch.shape, 1024), p["w0"].dtype)
        for i in range(6):
            h = h + jnp.tanh(h @ p[f"w{i}"])
        return (h.astype(jnp.float32) ** 2).mean()

    return init, loss


@pytest.mark.parametrize(
    ("model", "elements"),
    [(tied, 2 * 32_000 * 1024 + 2 * 4 * 1024 * 1024 + 4 * 1024), (unscanned, 2 * 6 * 1024 * 1024)],
    ids=["tied", "unscanned"],
)
def test_gathers_of_two_uses_are_not_merged(model: Callable[[], Any], elements: int) -> None:
    """They are equal, as the compiler can see; merged, a leaf would stay whole from its first use to its last."""
    init, loss = model()
    found = compiled(jp.Model(init=init, loss=loss), "zero3", jax.ShapeDtypeStruct((8, 512), jnp.int32))
    assert_bytes_as_expected(found)
    assert found.ledger.total(kind="all-gather") == 2 * elements
