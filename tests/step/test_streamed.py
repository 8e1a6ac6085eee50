"""Optimizer state on the host: training as on one device; where the state is, what is moved, in place, leaf by leaf; as
compiled for H100s, where nothing of it is an argument on the device or held twice.
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
from tensor_cells import batch_of, built

import jaxpar as jp
from jaxpar.inspect.compiled.kernels import Executable, HostCopy, While
from jaxpar.inspect.predict.prediction import predict
from jaxpar.inspect.targets import target
from jaxpar.inspect.verify.parity import Reference
from jaxpar.models import named
from jaxpar.program.walk import visit
from jaxpar.step import streamed

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
    """Of a layer and less: these models have no more than one block else."""
    monkeypatch.setattr(streamed, "BLOCK", 1 << 11)


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
)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", CELLS)
def test_parity_with_one_device(strategy: str) -> None:
    one = Reference(MODEL, jp.Strategy(single=True), 8)
    wanted = one.value_and_grad(KEY, BATCH)[1], one.train(SGD, KEY, BATCH, 2)
    check(jp.make_train_step(MODEL, SGD, strategy), MODEL, initial(MODEL), BATCH, 2, *wanted)


@pytest.mark.battery
@pytest.mark.parametrize("strategy", ["expert=2,fsdp=4", "expert=2,fsdp=2,zero=1,microbatches=2"])
def test_parity_of_a_mixture(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxpar.layout.layout.PAD_FROM", 64)
    assert check_cell("capacity", f"{strategy},offload=optimizer").layout.host_bytes


def moved(step: Any) -> dict[Any, int]:
    """Bytes that a device of a step moves, by the memory that they are moved to."""
    found: dict[Any, int] = {}
    for eqn, runs in visit(step.trace(ROWS).eqns):
        if eqn.primitive.name == "device_put" and isinstance(to := eqn.params["devices"][0], jax.memory.Space):
            aval = eqn.outvars[0].aval
            found[to] = found.get(to, 0) + runs * aval.size * aval.dtype.itemsize
    return found


def test_each_array_comes_and_goes_once_and_stays_where_it_is(tmp_path: Path) -> None:
    """With clipping and Adam; its steps are those of a step without, and so is its checkpoint."""
    there, here = step_of("fsdp=8,offload=optimizer", check=True), step_of("fsdp=8")
    assert there.layout.host_bytes + there.layout.bytes["optimizer"] == here.layout.bytes["optimizer"]
    assert there.layout.host_bytes == 2 * 4 * LAYERS * PADDED * DIM // 8
    assert moved(there) == dict.fromkeys((jax.memory.Space.Host, jax.memory.Space.Device), there.layout.host_bytes)

    kinds = lambda state: [x.sharding.memory_kind for x in jax.tree.leaves(state.optimizer)]
    states = there.init(KEY), here.init(KEY)
    first = kinds(states[0])
    assert first.count("pinned_host") == 2
    assert "pinned_host" not in kinds(states[1])
    donated = jax.tree.leaves(states[0].optimizer)
    states = tuple(step(state, ROWS)[0] for step, state in zip((there, here), states, strict=True))
    assert kinds(states[0]) == first
    assert all(x.is_deleted() for x in donated)
    parts = [(state.params, state.optimizer) for state in states]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-8), *parts)

    there.save(tmp_path, states[0]).wait()
    whole = step_of("zero1")
    back, other = there.restore(tmp_path), whole.restore(tmp_path)
    assert kinds(back) == first
    assert "pinned_host" not in kinds(other)
    there.check_replicas(back)
    wanted = there.params(states[0]), states[0].optimizer
    for step, state in (there, back), (whole, other):
        jax.tree.map(np.testing.assert_array_equal, (step.params(state), state.optimizer), wanted)


def test_a_step_that_is_not_finite_leaves_it() -> None:
    step = step_of("fsdp=8,offload=optimizer", skip_nonfinite=True)
    after, metrics = step(step.init(KEY), ROWS * np.nan)
    assert not metrics["finite"]
    assert all(not np.asarray(x).any() for x in jax.tree.leaves(after.optimizer))


def test_refusals() -> None:
    for optimizer, why in (
        (optax.lamb(1e-3), "a number is made of all moments of"),
        (optax.sgd(0.1), "moves state like a parameter's, of 16,384 elements or more, and this optimizer has none"),
    ):
        with pytest.raises(ValueError, match=why):
            step_of("fsdp=8,offload=optimizer", optimizer)
    matrix = jp.Model(init=lambda key: {"w": jnp.zeros((160, 160))}, loss=loss)
    with pytest.raises(ValueError, match="does not work element by element: it multiplies matrices; use one that does"):
        jp.make_train_step(matrix, optax.contrib.muon(1e-3), "fsdp=8,offload=optimizer")
    with pytest.raises(ValueError, match="server=true: a server's replicas keep it"):
        jp.Strategy(data=8, server=True, offload="optimizer")
    assert str(jp.Strategy(offload="optimizer+activations")) == "offload=activations+optimizer"


@pytest.mark.slow
@pytest.mark.cuda_compiler
def test_compiled_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state is no argument on the device; the host's buffers are updated in place, by copies that are asynchronous,
    of a layer each, in loops both ways at once; temporaries do not grow, and the first state takes a block.
    """
    layers, rows, devices = 4, 2, target("2xH100")
    it = named("llama3-8b", layers=layers, dim=1024, heads=8, kv_heads=4, ffn=2048, vocab=2048)
    monkeypatch.setattr(streamed, "BLOCK", block := 1024 * 2048 * 4 // 2)  # a device's part of a layer of the largest
    made = lambda text: jp.make_train_step(it.model, CLIPPED, f"fsdp=2,precision=bf16{text}", devices.devices)
    there, here = (Compiled.of(made(text), it.example(rows, 4096)) for text in (",offload=optimizer", ""))
    size = there.step.layout.host_bytes
    assert here.memory.argument_size_in_bytes - there.memory.argument_size_in_bytes == size
    assert there.memory.host_argument_size_in_bytes == there.memory.host_alias_size_in_bytes == size
    assert there.memory.host_temp_size_in_bytes == 0
    assert there.memory.temp_size_in_bytes <= here.memory.temp_size_in_bytes + 6 * block

    program = Executable(there.text, there.step.mesh)
    loops = [(one.body, one.trips) for one in program.operations if isinstance(one, While)]
    every = [(one, trips) for body, trips in [(program.operations, 1), *loops] for one in body]
    copies = [(one, trips) for one, trips in every if isinstance(one, HostCopy)]
    for to_host in (True, False):
        assert sum(one.bytes * trips for one, trips in copies if one.to_host == to_host) == size
    assert not any(one.waits for one, _ in copies)
    looped = {one.name for body, _ in loops for one in body if isinstance(one, HostCopy)}
    parts = predict(program, there.step, it.example(rows, 4096), devices.hardware).copies
    parts = [part for part in parts if part.name in looped]
    assert len(parts) == 3 * 4  # three large matrices' moments, there and back
    assert sum(part.exposed for part in parts) < 0.55 * sum(part.seconds for part in parts)

    first = there.step._creating.trace(jax.eval_shape(lambda: KEY)).lower(lowering_platforms=("cuda",)).compile()
    first = first.memory_analysis()
    assert first.host_output_size_in_bytes == size
    assert first.temp_size_in_bytes < 3 * block
