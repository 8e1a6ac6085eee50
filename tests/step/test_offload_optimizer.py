"""Optimizer state and parameters on the host.

A step trains as on one device. Each array is moved once in each direction, leaf by leaf, and stays in its place. In
programs compiled for H100s, no such array is an argument on the device, and the host stores none twice.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cells import Compiled, check, initial
from expert_cells import check_cell
from tensor_cells import SHARED_BATCH, batch_of, built

import jaxpar as jp
from jaxpar.checkpoint.arrays import arrays_of
from jaxpar.checkpoint.checkpoints import copied_boxes
from jaxpar.hardware import target
from jaxpar.hardware.compiled.kernels import Executable, HostCopy, While
from jaxpar.inspect.predict.prediction import predict
from jaxpar.models import named
from jaxpar.parity.parity import Reference
from jaxpar.program.walk import visit

pytestmark = SHARED_BATCH

MODEL, BATCH = built("scanned")[0], batch_of(8)
LAYERS, DIM, PADDED, ROWS = 3, 83, 88, np.ones((8, 83), np.float32)


def loss(params: Any, rows: jax.Array, key: jax.Array) -> jax.Array:
    return (jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), rows, params["w"])[0] ** 2).mean()


STACK = jp.Model(init=lambda key: {"w": 0.1 * jax.random.normal(key, (LAYERS, DIM, DIM))}, loss=loss)
SGD = optax.sgd(0.05, momentum=0.9)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
KEY = jax.random.key(0)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make blocks of one layer or less: these small models would have one block otherwise."""
    monkeypatch.setattr("jaxpar.step.offload.BLOCK", 1 << 11)


def step_of(strategy: str, optimizer: Any = CLIPPED, **options: Any) -> Any:
    return jp.make_train_step(STACK, optimizer, strategy, **options)


CELLS = (
    "data=2,fsdp=2,tensor=2,sequence=true,microbatches=2,remat=layer,offload=activations+optimizer",
    *(
        pytest.param(f"{strategy},offload=optimizer", marks=pytest.mark.battery)
        for strategy in (
            "ddp",
            "pipe=2,fsdp=2,tensor=2,microbatches=2,schedule=zb-h1",
            "zero1",
            "fsdp=4,zero=2,context=2",
            "pipe=2,chunks=2,fsdp=4,zero=1,microbatches=2",
        )
    ),
    "data=2,fsdp=2,tensor=2,sequence=true,microbatches=2,remat=dots,offload=activations+optimizer+params",
    *(
        pytest.param(f"{strategy},offload=params", marks=pytest.mark.battery)
        for strategy in (
            "data=2,tensor=4,microbatches=2,concurrent=2",
            "fsdp=4,context=2,remat=layer",
            "fsdp=8,sync=step",
        )
    ),
)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", CELLS)
def test_parity_with_one_device(strategy: str) -> None:
    reference = Reference(MODEL, jp.Strategy(single=True), 8)
    expected = reference.value_and_grad(KEY, BATCH)[1], reference.train(SGD, KEY, BATCH, 2)
    check(jp.make_train_step(MODEL, SGD, strategy), MODEL, initial(MODEL), BATCH, 2, *expected)


@pytest.mark.battery
@pytest.mark.parametrize(
    "strategy",
    [
        "expert=2,fsdp=4,offload=optimizer",
        "expert=2,fsdp=2,zero=1,microbatches=2,offload=optimizer",
        "expert=2,fsdp=4,offload=optimizer+params",
    ],
)
def test_parity_of_a_mixture(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxpar.layout.layout.PAD_FROM", 64)
    assert check_cell("capacity", strategy).layout.host_bytes["optimizer"]


def moved(step: Any) -> dict[Any, int]:
    """Return the bytes that one device moves in a step, by the memory that they are moved to."""
    moved_bytes: dict[Any, int] = {}
    for eqn, runs in visit(step.trace(ROWS).eqns):
        if eqn.primitive.name == "device_put" and isinstance(space := eqn.params["devices"][0], jax.memory.Space):
            aval = eqn.outvars[0].aval
            moved_bytes[space] = moved_bytes.get(space, 0) + runs * aval.size * aval.dtype.itemsize
    return moved_bytes


@pytest.mark.slow
@pytest.mark.parametrize("offload", ["optimizer", "optimizer+params"])
def test_each_array_comes_and_goes_once_and_stays_where_it_is(offload: str, tmp_path: Path) -> None:
    """With clipping and Adam, steps and checkpoints equal those without offload.

    Offloaded parameters come to the device in the forward and in the backward loop, one layer too many in each.
    """
    offloaded, resident = step_of(f"fsdp=8,offload={offload}", check=True), step_of("fsdp=8")
    arrays, layer, kinds_of_state = 2 + ("params" in offload), 4 * PADDED * DIM // 8, ("params", "optimizer")
    size = sum(offloaded.layout.host_bytes.values())
    assert size + sum(offloaded.layout.bytes[kind] for kind in kinds_of_state) == sum(
        resident.layout.bytes[kind] for kind in kinds_of_state
    )
    assert size == arrays * LAYERS * layer
    host, device = jax.memory.Space.Host, jax.memory.Space.Device
    assert moved(offloaded) == {host: size, device: size + 2 * (LAYERS + 1) * layer * ("params" in offload)}

    kinds = lambda state: [x.sharding.memory_kind for x in jax.tree.leaves((state.params, state.optimizer))]
    states = offloaded.init(KEY), resident.init(KEY)
    initial_kinds = kinds(states[0])
    assert initial_kinds.count("pinned_host") == arrays
    assert "pinned_host" not in kinds(states[1])
    donated = jax.tree.leaves((states[0].params, states[0].optimizer))
    states = tuple(step(state, ROWS)[0] for step, state in zip((offloaded, resident), states, strict=True))
    assert kinds(states[0]) == initial_kinds
    assert all(x.is_deleted() for x in donated)
    parts = [(step.params(state), state.optimizer) for step, state in zip((offloaded, resident), states, strict=True)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-8), *parts)

    host_arrays = [x for x in jax.tree.leaves(states[0]) if x.sharding.memory_kind == "pinned_host"]
    views = [np.asarray(shard.data) for x in host_arrays for shard in x.addressable_shards]
    boxes = copied_boxes(arrays_of(offloaded)[0], states[0], {})
    are_views = [any(np.shares_memory(x, view) for view in views) for parts in boxes.values() for _, x in parts]
    assert sum(are_views) == len(views)  # a save copies none of them
    assert offloaded.save(tmp_path, states[0]).latest == 1  # which is why a save waits until they are written
    zero1 = step_of("zero1")
    restored, restored_by_zero1 = offloaded.restore(tmp_path), zero1.restore(tmp_path)
    assert kinds(restored) == initial_kinds
    assert "pinned_host" not in kinds(restored_by_zero1)
    offloaded.check_replicas(restored)
    expected = offloaded.params(states[0]), states[0].optimizer
    for step, state in (offloaded, restored), (zero1, restored_by_zero1):
        jax.tree.map(np.testing.assert_array_equal, (step.params(state), state.optimizer), expected)
    replaced = offloaded.with_params(offloaded.init(KEY), expected[0])
    assert kinds(replaced) == initial_kinds
    jax.tree.map(np.testing.assert_array_equal, offloaded.params(replaced), expected[0])


@pytest.mark.slow
def test_a_frozen_base_waits_on_the_host_and_its_adapter_trains() -> None:
    """Any optimizer will do, since nothing that it sees is on the host; ddp stores the base in the compute dtype."""

    def adapted(params: Any, rows: jax.Array, key: jax.Array) -> jax.Array:
        layer = lambda x, w: (jnp.tanh(x @ w[0] + (x @ w[1]) @ w[1].T), None)
        first = rows.astype(params["base"].dtype)
        return (jax.lax.scan(layer, first, (params["base"], params["adapter"]))[0] ** 2).mean()

    base = STACK.init(KEY)["w"]
    model = jp.Model(init=lambda key: {"base": base, "adapter": 0.1 * base[:, :, :2]}, loss=adapted)
    adapters = []
    for text in ("", ",offload=params"):
        step = jp.make_train_step(
            model, optax.lamb(1e-2), f"ddp,precision=bf16{text}", trainable=lambda p: p == "adapter"
        )
        state, _ = step(step.init(KEY), ROWS)
        adapters.append(step.params(state)["adapter"])
    assert state.params["base"].sharding.memory_kind == "pinned_host"
    assert step.layout.host_bytes["params"] == 2 * LAYERS * DIM * DIM
    np.testing.assert_array_equal(*adapters)


@pytest.mark.slow
@pytest.mark.parametrize("option", ["trace_nonfinite", "skip_nonfinite"])
def test_a_step_that_is_not_finite_leaves_it(option: str) -> None:
    """Parameters and state do not change; trace_nonfinite finds the equation with parameters that are on the host."""
    step = step_of("fsdp=8,offload=optimizer+params", **{option: True})
    state = step.init(KEY)
    expected = np.asarray(step.params(state)["w"])
    stopped_state, metrics = step(state, ROWS * np.nan)
    assert not metrics["finite"]
    np.testing.assert_array_equal(step.params(stopped_state)["w"], expected)
    assert all(not np.asarray(x).any() for x in jax.tree.leaves(stopped_state.optimizer))
    if option == "trace_nonfinite":
        with pytest.raises(FloatingPointError, match="batch"):
            step(stopped_state, ROWS)


def test_refusals() -> None:
    for optimizer, reason in (
        (optax.lamb(1e-3), "it computes a number from all of w or its moments"),
        (optax.sgd(0.1), "moves arrays of 16,384 elements or more .* and this optimizer has none"),
    ):
        with pytest.raises(ValueError, match=reason):
            step_of("fsdp=8,offload=optimizer", optimizer)
    matrix = jp.Model(init=lambda key: {"w": jnp.zeros((160, 160))}, loss=loss)
    with pytest.raises(ValueError, match="does not work element by element: it multiplies matrices; use one that does"):
        jp.make_train_step(matrix, optax.contrib.muon(1e-3), "fsdp=8,offload=optimizer")
    with pytest.raises(ValueError, match="server=true: a server's replicas keep it"):
        jp.Strategy(data=8, server=True, offload="optimizer")
    for text, reason in (
        ("pipe=2,microbatches=2", "stages keep layers in the order of a table on their device; use fsdp with zero=3"),
        ("fsdp=8,zero=1", "zero=1 gathers updated parameters to where they are whole"),
        ("fsdp=8,prefetch=1", "loops bring the next layer, and gather it when it runs: leave prefetch out"),
    ):
        with pytest.raises(ValueError, match=reason):
            jp.Strategy.parse(f"{text},offload=params")
    small = jp.Model(init=lambda key: {"w": jnp.zeros((3, 8, 8))}, loss=loss)
    with pytest.raises(
        ValueError, match="offload='params' moves stacks of layers of 16,384 elements or more, and this"
    ):
        jp.make_train_step(small, SGD, "fsdp=8,offload=params")
    assert str(jp.Strategy(offload="optimizer+activations")) == "offload=activations+optimizer"


@pytest.mark.slow
@pytest.mark.cuda_compiler
@pytest.mark.parametrize("params", [False, True])
def test_compiled_for_gpus(params: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No array on the host is an argument on the device, and the host's buffers are updated in place.

    Copies are asynchronous, of one layer each, in loops and in both directions at once. Temporaries grow by two layers
    of parameters at most. Making the first state takes a block, or a stack of parameters.
    """
    layers, rows, devices = 4, 2, target("2xH100")
    entry = named("llama3-8b", layers=layers, dim=1024, heads=8, kv_heads=4, ffn=2048, vocab=2048)
    monkeypatch.setattr("jaxpar.step.offload.BLOCK", block := 1024 * 2048 * 4 // 2)  # a device's part of the largest
    make_step = lambda text: jp.make_train_step(entry.model, CLIPPED, f"fsdp=2,precision=bf16{text}", devices.devices)
    offload = ",offload=optimizer" + params * "+params"
    offloaded, resident = (Compiled.of(make_step(text), entry.example(rows, 4096)) for text in (offload, ""))
    size = sum(offloaded.step.layout.host_bytes.values())
    assert resident.memory.argument_size_in_bytes - offloaded.memory.argument_size_in_bytes == size
    assert offloaded.memory.host_argument_size_in_bytes == offloaded.memory.host_alias_size_in_bytes == size
    assert offloaded.memory.host_temp_size_in_bytes == 0
    layer = offloaded.step.layout.host_bytes["params"] // layers
    assert offloaded.memory.temp_size_in_bytes <= resident.memory.temp_size_in_bytes + 6 * block + 2 * layer

    program = Executable(offloaded.text, offloaded.step.mesh)
    loops = [(operation.body, operation.trips) for operation in program.operations if isinstance(operation, While)]
    operations = [(operation, trips) for body, trips in [(program.operations, 1), *loops] for operation in body]
    copies = [(operation, trips) for operation, trips in operations if isinstance(operation, HostCopy)]
    to_host, to_device = (
        sum(operation.bytes * n for operation, n in copies if operation.to_host == direction)
        for direction in (True, False)
    )
    assert to_host == size
    assert 0 <= size + 2 * (layers + 1) * layer - to_device <= layer  # the last copy of a loop is one too many
    assert not any(operation.waits for operation, _ in copies)
    looped = {operation.name for body, _ in loops for operation in body if isinstance(operation, HostCopy)}
    parts = predict(program, offloaded.step, entry.example(rows, 4096), devices.hardware).copies
    parts = [part for part in parts if part.name in looped]
    if not params:  # whose layers wait, of a model that computes so little
        assert len(parts) == 3 * 4  # three large matrices' moments, there and back
        assert sum(part.exposed for part in parts) < 0.55 * sum(part.seconds for part in parts)

    first = offloaded.step._creating.trace(jax.eval_shape(lambda: KEY)).lower(lowering_platforms=("cuda",)).compile()
    first = first.memory_analysis()
    assert first.host_output_size_in_bytes == size
    assert first.temp_size_in_bytes < 3 * block + params * size // 3
