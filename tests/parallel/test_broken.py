"""Strategies broken on purpose: what verify and the layout are there to catch, and that they do.

The same checks pass on the strategies as they are: here, and for verify in `test_transparency.py`.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxpar as jp
from jaxpar.layout.layout import place_optimizer
from jaxpar.layout.leaves import Leaf, ModelLeaf
from jaxpar.step.gradients import Local
from jaxpar.step.server import ServerStep

STRATEGIES = ("dp", "ddp", "zero1", "zero2", "zero3", "hsdp")
LAYERS, DIM, VOCAB = 4, 32, 64
# The same two rows for each of 8 replicas: what one replica has alone is then exactly an eighth.
BATCH = {"tokens": np.tile(np.random.default_rng(0).integers(0, VOCAB, (2, 6), dtype=np.int32), (8, 1))}
SGD = optax.sgd(0.1, momentum=0.9)


def init(key: jax.Array) -> dict[str, jax.Array]:
    """Every leaf has a dim that 8 devices can share."""
    shapes = {"embed": (VOCAB, DIM), "w": (LAYERS, DIM, DIM), "scale": (LAYERS, DIM), "head": (DIM, VOCAB)}
    keys = jax.random.split(key, len(shapes))
    return {name: 0.2 * jax.random.normal(k, shape) for k, (name, shape) in zip(keys, shapes.items(), strict=True)}


def loss(params: dict[str, jax.Array], batch: dict[str, jax.Array], key: jax.Array | None) -> jax.Array:
    def layer(h: jax.Array, w: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return h + jnp.tanh(h * (1 + w[1]) @ w[0]), None

    h, _ = lax.scan(layer, params["embed"][batch["tokens"][:, :-1]], (params["w"], params["scale"]))
    return optax.softmax_cross_entropy_with_integer_labels(h @ params["head"], batch["tokens"][:, 1:]).mean()


MODEL = jp.Model(init=init, loss=loss)
WHOLE = 4 * sum(math.prod(x.shape) for x in jax.eval_shape(init, jax.random.key(0)).values())  # bytes
summed, count = ServerStep._summed, Local._count


# Breaks. Each takes the place of what its table names.


def not_summed(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    return x


def scattered_not_summed(x: jax.Array, axes: Sequence[str], dim: int, dtype: Any) -> jax.Array:
    """This device's part, of its own gradient alone."""
    if not axes:
        return x.astype(dtype)
    size = x.shape[dim] // lax.axis_size("fsdp")
    return lax.dynamic_slice_in_dim(x.astype(dtype), lax.axis_index("fsdp") * size, size, dim)


def of_one_replica(step: ServerStep, state: Any, gathered: Any) -> Any:
    grads, variables, sums = gathered
    return summed(step, state, ([g.at[1:].set(0) for g in grads], variables, sums))


DROPPED: dict[str, tuple[str, Callable[..., Any], str]] = {
    "dp": ("jaxpar.step.server.ServerStep._summed", of_one_replica, "x1/8: a sum over replicas"),
    "ddp": ("jaxpar.parallel.data.ddp.all_reduce", not_summed, "x1/8: a sum over replicas"),
    "zero1": ("jaxpar.parallel.data.zero.reduce_scatter_as", scattered_not_summed, "x1/8: a sum over replicas"),
    "zero2": ("jaxpar.parallel.data.zero.reduce_scatter_as", scattered_not_summed, "x1/8: a sum over replicas"),
    "zero3": ("jaxpar.parallel.data.zero.reduce_scatter_as", scattered_not_summed, "x1/8: a sum over replicas"),
    "hsdp": ("jaxpar.parallel.data.zero.all_reduce", not_summed, "x1/2: a sum over replicas"),  # the one over `data`
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_verify_sees_a_dropped_reduction(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, broken, hint = DROPPED[strategy]
    monkeypatch.setattr(name, broken)
    report = jp.verify(MODEL, strategy, BATCH, steps=1, equation=False)
    assert not report.ok
    assert report.worst.kind == "gradient"
    assert report.worst.hint.startswith(hint)
    assert report.loss == pytest.approx(report.expected_loss)  # which says nothing about gradients


FACTORS = (8, "x8: a mean over replicas"), (1 / 8, "x1/8: a sum over replicas")  # missing, and taken twice


@pytest.mark.parametrize(
    ("strategy", "factor", "hint"), [(strategy, *FACTORS[i % 2]) for i, strategy in enumerate(STRATEGIES)]
)
def test_verify_sees_a_mean_that_is_missing_or_taken_twice(
    strategy: str, factor: float, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scaled(step: ServerStep, state: Any, gathered: Any) -> Any:
        grads, variables, sums = summed(step, state, gathered)
        return jax.tree.map(lambda g: g * factor, grads), variables, sums

    monkeypatch.setattr(ServerStep, "_summed", scaled)
    monkeypatch.setattr(Local, "_count", lambda *args: count(*args) / factor)
    report = jp.verify(MODEL, strategy, BATCH, steps=1, equation=False)
    assert not report.ok
    assert {d.hint.partition(" or ")[0] for d in report.differences if d.kind == "gradient"} == {hint}


def made(strategy: str) -> Any:
    return jp.make_train_step(MODEL, SGD, strategy)


def device_bytes(step: Any) -> dict[str, int]:
    """Bytes of the state on the device that stores most of it."""
    state = step.abstract_state()

    def local(x: Any) -> int:
        return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize

    return {name: sum(map(local, jax.tree.leaves(getattr(state, name)))) for name in ("params", "optimizer")}


# What each device stores of parameters and of momentum, as a part of the whole.
STORED = {"zero2": (1, 1 / 8), "zero3": (1 / 8, 1 / 8), "hsdp": (1 / 4, 1 / 4)}


_placed = ModelLeaf.placed


def replicated(model_leaf: ModelLeaf, *others: Any) -> Leaf:
    leaf = _placed(model_leaf, *others)
    return dataclasses.replace(leaf, dim=None, padded=0) if leaf.path == "scale" else leaf  # the smallest


def optimizer_replicated(state: Any, params: Any, leaves: Sequence[Leaf], *_: bool) -> Any:
    return place_optimizer(state, params, leaves, False)


@pytest.mark.parametrize("strategy", STORED)
@pytest.mark.parametrize(
    ("name", "broken"),
    [("jaxpar.layout.leaves.ModelLeaf.placed", replicated), ("jaxpar.step.core.place_optimizer", optimizer_replicated)],
    ids=["leaf", "optimizer"],
)
def test_layout_sees_what_was_left_replicated(
    strategy: str, name: str, broken: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers would be right."""
    params, optimizer = (int(WHOLE * part) for part in STORED[strategy])
    closed = {"params": params, "optimizer": optimizer}
    step = made(strategy)
    assert device_bytes(step) == closed
    assert closed.items() <= step.layout.bytes.items()

    monkeypatch.setattr(name, broken)
    step = made(strategy)
    for found in (device_bytes(step), step.layout.bytes):
        assert found["optimizer"] > closed["optimizer"]
        assert (found["params"] > closed["params"]) == (broken is replicated and params < WHOLE)


def test_state_of_a_server_is_on_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data parallel 1.0 stores nothing twice; the break gives every device a copy, as ddp does."""

    def stored() -> int:
        state = made("dp").init(jax.random.key(0))
        return sum(shard.data.nbytes for x in jax.tree.leaves(state.params) for shard in x.addressable_shards)

    assert stored() == WHOLE
    monkeypatch.setattr(ServerStep, "_home", lambda step: step.mesh)
    assert stored() == 8 * WHOLE
