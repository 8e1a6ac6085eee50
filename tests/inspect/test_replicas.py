"""Replicas stay the same to the bit, and one that does not is found."""

import dataclasses
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar as jp
from jaxpar.inspect.check.replicas import checksums

X = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)


class Net(nnx.Module):
    """BatchNorm and dropout: mutable state and random streams are replicated too."""

    def __init__(self, rngs: nnx.Rngs):
        self.wide, self.norm = nnx.Linear(16, 1024, rngs=rngs), nnx.BatchNorm(1024, rngs=rngs)
        self.drop, self.out = nnx.Dropout(0.1, rngs=rngs), nnx.Linear(1024, 16, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(self.drop(jax.nn.relu(self.norm(self.wide(x)))))


def step_of(strategy: str) -> Any:
    model = jp.from_nnx(lambda rngs: Net(rngs), lambda net, batch: ((net(batch["x"]) - batch["x"]) ** 2).mean())
    return jp.make_train_step(model, optax.adam(1e-2), strategy, jax.devices()[:4])


def perturbed(x: jax.Array, device: int) -> jax.Array:
    """The array with another last bit in its first element on one device, which jax is not told."""
    shards = []
    for shard in x.addressable_shards:
        data = np.array(shard.data)
        if shard.device.id == device:
            data.reshape(-1).view(np.uint32)[0] ^= 1
        shards.append(jax.device_put(data, shard.device))
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)


@pytest.mark.parametrize(
    ("strategy", "odd"),
    [  # the last device's replica: under ddp one of four, in a group of its own one of the second half's two
        ("ddp", "device 3 of process 0 differs from device 0 of process 0, device 1 of process 0, device 2 of"),
        ("data=2,fsdp=2", "device 1 of process 0, device 3 of process 0 differ, and"),
    ],
)
def test_replicas_never_drift_and_one_that_does_is_found(strategy: str, odd: str) -> None:
    step = step_of(strategy)
    state = step.init(jax.random.key(0))
    for number in range(50):
        state, _ = step(state, {"x": X + number})
    step.check_replicas(state)
    params = jax.tree.map(lambda x: x, state.params)
    params["out"]["kernel"] = perturbed(params["out"]["kernel"], 3)
    with pytest.raises(ValueError, match=rf"after step 50 in params/out/kernel \[1024, 16\]: {odd}"):  # fmt: skip
        step.check_replicas(dataclasses.replace(state, params=params))


def test_a_server_has_no_replicas() -> None:
    step = step_of("dp")
    step.check_replicas(step.init(jax.random.key(0)))


def test_every_dtype_has_a_checksum_that_one_element_changes() -> None:
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    kinds = ("float32", "bfloat16", "float16", "int32", "int8", "bool", "complex64", "float8_e4m3fn")
    arrays = [np.array([1, 2, 3, 4, 0, 6], jax.numpy.dtype(kind)) for kind in kinds]
    changed = [np.array([1, 2, 3, 4, 1, 6], jax.numpy.dtype(kind)) for kind in kinds]
    sums = checksums(mesh, [jax.sharding.PartitionSpec()] * (len(kinds) + 1))
    key = jax.random.key(0)
    sums_of_arrays, sums_of_changed = np.asarray(sums([*arrays, key])), np.asarray(sums([*changed, key]))
    assert (sums_of_arrays[0] == sums_of_arrays[1]).all()
    has_changed = (sums_of_arrays != sums_of_changed).all(axis=0)[:-1]
    assert [kind for kind, changed in zip(kinds, has_changed, strict=True) if not changed] == []


@pytest.mark.slow
def test_what_is_on_the_host_has_the_checksum_that_it_has_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """`offload=optimizer` leaves arrays on the host; the checksum copies one block at a time to the device."""
    monkeypatch.setattr("jaxpar.step.offload.BLOCK", 64)
    mesh, spec = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2]), jax.sharding.PartitionSpec("x")
    x = np.random.default_rng(0).normal(size=(12, 20)).astype("float32")
    place = lambda kind: jax.device_put(x, jax.sharding.NamedSharding(mesh, spec, memory_kind=kind))
    host_sums, device_sums = (np.asarray(checksums(mesh, [spec])([place(kind)])) for kind in ("pinned_host", "device"))
    np.testing.assert_array_equal(host_sums, device_sums)
    step = step_of("fsdp=2,data=2,offload=optimizer")
    step.check_replicas(step.init(jax.random.key(0)))
