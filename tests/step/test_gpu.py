"""Steps compiled for 8 H100s without a GPU: memory, collectives and overlap, against steps written by hand."""

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
        """Return the separate collectives of every loop with this number of iterations."""

        def within(operations: Sequence[Operation]) -> Iterator[While]:
            for operation in operations:
                if isinstance(operation, While):
                    yield from (operation, *within(operation.body))

        nesting, all_loops = (
            Nesting(times=trips, in_loop=True),
            within(Executable(self.text, self.step.mesh).operations),
        )
        return [list(collectives(loop.body, nesting)) for loop in all_loops if loop.trips == trips]


def compiled(model: jp.Model, strategy: str, batch: Any) -> Loops:
    step = jp.make_train_step(model, optax.adamw(3e-4), f"{strategy},precision=bf16", mesh=gpu_topology("8xH100"))
    return Loops.of(step, batch)


# One worker runs all tests of a strategy, so that it is compiled once.
STRATEGIES = [pytest.param(name, marks=pytest.mark.xdist_group(f"gpu {name}")) for name in ("zero2", "zero3")]


@pytest.fixture(scope="module", params=STRATEGIES)
def llama(request: pytest.FixtureRequest) -> Loops:
    init, loss = handwritten.model_fns(WIDTHS)
    batch = {"tokens": jax.ShapeDtypeStruct((8, WIDTHS.sequence + 1), jnp.int32)}
    return compiled(jp.Model(init=init, loss=loss), f"{request.param},remat=layer", batch)


def assert_bytes_as_expected(program: Loops) -> None:
    """Assert that bytes by kind, axes and dtype equal the closed form, except for scalars of clipping and norms."""
    fields = "kind", "axes", "dtype"
    scalars = "all-reduce", ("fsdp",), "float32"
    program_bytes, expected_bytes = program.ledger.by(*fields), expected(program.step, program.batch).by(*fields)
    assert program_bytes.pop(scalars) < expected_bytes.pop(scalars) + 1000
    assert program_bytes == expected_bytes


def test_bytes_equal_the_closed_form(llama: Loops) -> None:
    assert_bytes_as_expected(llama)


@pytest.mark.slow
def test_temporaries_are_those_of_a_step_written_by_hand(llama: Loops) -> None:
    program = handwritten.compile_step(llama.step.strategy.zero, gpu_topology("8xH100"), WIDTHS)
    assert llama.memory.temp_size_in_bytes <= 1.05 * program.memory_analysis().temp_size_in_bytes


def test_arguments_are_those_of_the_layout(llama: Loops) -> None:
    bytes_ = llama.step.layout.bytes
    assert llama.memory.argument_size_in_bytes == pytest.approx(bytes_["params"] + bytes_["optimizer"], rel=5e-3)
    assert llama.memory.alias_size_in_bytes == pytest.approx(llama.memory.output_size_in_bytes, rel=5e-3)  # in nesting


def test_gradients_of_layers_are_reduced_inside_one_backward_loop(llama: Loops) -> None:
    scatters = [
        [collective for collective in loop if collective.kind == "reduce-scatter"]
        for loop in llama.loops(WIDTHS.layers)
    ]
    (backward,) = [loop for loop in scatters if loop]
    layers = sum(math.prod(leaf.shape) for leaf in llama.step.layout.leaves if leaf.path.startswith("layers"))
    assert sum(collective.bytes for collective in backward) == 4 * layers
    assert all(collective.asynchronous for collective in backward)
    overlapped_bytes = sum(collective.bytes for collective in backward if collective.overlapped)
    assert overlapped_bytes > 0.5 * 4 * layers


def test_gathers_of_layers_are_hidden_by_compute(llama: Loops) -> None:
    gathers = [
        collective for loop in llama.loops(WIDTHS.layers) for collective in loop if collective.kind == "all-gather"
    ]
    assert {collective.dtype for collective in gathers} == {"bfloat16"}
    large = [collective for collective in gathers if collective.bytes > LARGE * WIDTHS.layers]
    overlapped_bytes = sum(collective.bytes for collective in large if collective.overlapped)
    if llama.step.strategy.zero == 3:  # ZeRO-2 gathers after its update, when there is nothing left to compute
        assert overlapped_bytes > 0.75 * sum(collective.bytes for collective in large)


def tied() -> jp.Model:
    """Return a model with an embedding of 32,000 x 1,024 that is also the head, and 4 scanned layers."""
    shapes = {"embed": (32_000, 1024), "w": (4, 1024, 1024), "b": (4, 1024)}

    def loss(p: Any, batch: jax.Array, key: jax.Array | None) -> jax.Array:
        h, _ = jax.lax.scan(lambda h, l: (h + jnp.tanh(h @ l[0] + l[1]), None), p["embed"][batch], (p["w"], p["b"]))
        return jax.nn.logsumexp((h @ p["embed"].T).astype(jnp.float32), -1).mean()

    return jp.Model(lambda key: {name: jnp.ones(shape) for name, shape in shapes.items()}, loss)


def unscanned() -> jp.Model:
    """Return a model with six layers in a Python loop, 2 MB each in bfloat16."""

    def loss(p: Any, batch: jax.Array, key: jax.Array | None) -> jax.Array:
        h = jnp.ones((*batch.shape, 1024), p["w0"].dtype)
        for i in range(6):
            h = h + jnp.tanh(h @ p[f"w{i}"])
        return (h.astype(jnp.float32) ** 2).mean()

    return jp.Model(lambda key: {f"w{i}": jnp.ones((1024, 1024)) for i in range(6)}, loss)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "elements"),
    [(tied, 2 * 32_000 * 1024 + 2 * 4 * 1024 * 1024 + 4 * 1024), (unscanned, 2 * 6 * 1024 * 1024)],
    ids=["tied", "unscanned"],
)
def test_gathers_of_two_uses_are_not_merged(model: Callable[[], jp.Model], elements: int) -> None:
    """The compiler could merge equal gathers; a leaf would then stay whole from its first use to its last."""
    program = compiled(model(), "zero3", jax.ShapeDtypeStruct((8, 512), jnp.int32))
    assert_bytes_as_expected(program)
    assert program.ledger.total(kind="all-gather") == 2 * elements
