"""Values that layers save on the host for their backwards.

Gradients are as on one device. The number and size of the moves is tested in the trace, and for programs compiled for
H100s, where the copies overlap with kernels.
"""

import functools
from typing import Any

import jax
import optax
import pytest
from cells import Compiled, check
from tensor_cells import LENGTH, SGD, SHARED_BATCH, STEPS, batch_of, built, one_device, reference

import jaxpar as jp
from jaxpar.hardware import target
from jaxpar.hardware.compiled.kernels import Done, Executable, HostCopy, Kernel, Operation, While
from jaxpar.inspect.predict.prediction import predict
from jaxpar.models import named
from jaxpar.program.walk import visit
from jaxpar.slicing.access import WholeAccess
from jaxpar.slicing.layer_access import LayerAccess
from jaxpar.slicing.slices import Slice

pytestmark = SHARED_BATCH

LAYERS, DIM = 5, 64
BATCH = batch_of(8)


@functools.cache
def step_of(strategy: str) -> Any:
    return jp.make_train_step(built("scanned")[0], SGD, f"{strategy},offload=activations")


CELLS = (
    "fsdp=8",
    "data=2,fsdp=2,tensor=2,sequence=true,remat=layer,microbatches=2,prefetch=1",
    "fsdp=4,zero=2,context=2,remat=dots,microbatches=2,concurrent=2",
)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", CELLS)
def test_parity_with_one_device(strategy: str) -> None:
    first = one_device("scanned").first
    check(step_of(strategy), built("scanned")[0], first, BATCH, STEPS, *reference("scanned", 8, 8))


def moves(strategy: str) -> dict[Any, tuple[int, int]]:
    """Return how many arrays a step moves to each memory, and their bytes, on one device."""
    moved: dict[Any, tuple[int, int]] = {}
    for eqn, runs in visit(step_of(strategy).trace(BATCH).eqns):
        if eqn.primitive.name == "device_put" and isinstance(memory := eqn.params["devices"][0], jax.memory.Space):
            count, size = moved.get(memory, (0, 0))
            aval = eqn.outvars[0].aval
            moved[memory] = count + runs, size + runs * aval.size * aval.dtype.itemsize
    return moved


@pytest.mark.parametrize(
    ("strategy", "rows", "positions"), [(CELLS[1], 1, LENGTH // 2), ("fsdp=8,remat=layer", 1, LENGTH)]
)
def test_of_recomputed_layers_the_inputs_alone_are_moved(strategy: str, rows: int, positions: int) -> None:
    """Each layer's input goes to the host once per microbatch.

    Copies back run one iteration early, so that there is one more than layers.
    """
    step = step_of(strategy)
    array, m = rows * positions * DIM * 4, step.strategy.microbatches
    host, device = jax.memory.Space.Host, jax.memory.Space.Device
    assert moves(strategy) == {
        host: (m * LAYERS, m * LAYERS * array),
        device: (m * (LAYERS + 1), m * (LAYERS + 1) * array),
    }


def test_refusals() -> None:
    with pytest.raises(
        ValueError, match="pipe=4,microbatches=4: stages keep it in slots on their device; use remat='layer', or"
    ):
        jp.Strategy(pipe=4, microbatches=4, offload="activations")
    with pytest.raises(ValueError, match="server=true: a server's replicas keep it"):
        jp.Strategy(data=8, server=True, offload="activations")
    with pytest.raises(ValueError, match=r"offload='activation' is unknown.*did you mean 'activations'"):
        jp.Strategy(offload="activation")
    mlp = built("mlp")[0]
    with pytest.raises(ValueError, match="the model has no stack; scan the layers"):
        jp.make_train_step(mlp, SGD, "fsdp=8,offload=activations").trace(batch_of(8))


def beside(operations: tuple[Operation, ...]) -> list[tuple[HostCopy, bool]]:
    """Return every copy of these operations, and whether a computing kernel runs while it is under way."""
    copies = []
    for start, operation in enumerate(operations):
        if isinstance(operation, HostCopy):
            end = next(
                n for n, later in enumerate(operations) if isinstance(later, Done) and later.name == operation.name
            )
            copies.append((operation, any(isinstance(x, Kernel) and x.computes for x in operations[start:end])))
    return copies


@pytest.mark.slow
@pytest.mark.cuda_compiler
def test_compiled_for_gpus() -> None:
    """Temporaries fall by the values on the host, except for those of two layers.

    Every copy is asynchronous, and in a loop it overlaps with kernels. On a device with little memory, XLA recomputes
    nothing for the values on the host.
    """
    layers, rows, devices = 8, 2, target("2xH100")
    llama = named("llama3-8b", layers=layers, dim=1024, heads=8, kv_heads=4, ffn=2048, vocab=2048)
    batch, layer_bytes = llama.example(rows, 4096), 4096 * 1024 * 2
    compiled = lambda text, on: Compiled.of(
        jp.make_train_step(llama.model, optax.sgd(0.1), f"fsdp=2,precision=bf16,{text}", on.devices), batch
    )
    on_device, small = compiled("remat=layer", devices), target("2xH100", memory_bytes=7e8)
    offloaded = compiled("remat=layer,offload=activations", small)
    assert ".remat" not in offloaded.text
    assert offloaded.memory.host_temp_size_in_bytes == layers * layer_bytes
    assert offloaded.memory.temp_size_in_bytes <= on_device.memory.temp_size_in_bytes - (layers - 2) * layer_bytes

    program = Executable(offloaded.text, offloaded.step.mesh)
    loops = [operation for operation in program.operations if isinstance(operation, While) and beside(operation.body)]
    copies_in_loops = [(copy, hidden, loop.trips) for loop in loops for copy, hidden in beside(loop.body)]
    assert sorted((copy.to_host, copy.bytes, copy.waits, hidden, trips) for copy, hidden, trips in copies_in_loops) == [
        (False, layer_bytes, False, True, layers),
        (True, layer_bytes, False, True, layers),
    ]
    copies = predict(program, offloaded.step, batch, devices.hardware).copies
    # The last layer comes back before the loop.
    assert sum(part.bytes for part in copies) == (2 * layers + 1) * layer_bytes
    assert sum(part.exposed for part in copies) < 0.2 * sum(part.seconds for part in copies)


def test_no_stage_copies_its_layers_from_the_host() -> None:
    """The copies do not count from the first layer of a stage: for any chunk but the first they would be wrong."""

    def copy(stack: jax.Array, start: int) -> Any:
        on_host = jax.device_put(stack, jax.memory.Space.Host)
        return LayerAccess(WholeAccess(), [on_host], (Slice(0),), 2, start).copy_from_host(0)

    stack = jax.ShapeDtypeStruct((4, 2), "float32")
    assert jax.eval_shape(functools.partial(copy, start=0), stack)[0].shape == (2,)
    with pytest.raises(AssertionError):
        jax.eval_shape(functools.partial(copy, start=2), stack)
