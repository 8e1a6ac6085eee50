"""Frozen experts with small trainable ones beside them (LoRA): what each layout trains is what one device does."""

import functools
from typing import Any

import expert_cells as cells
import jax
import numpy as np
import optax
import pytest

import jaxpar as jp

RANK = 3


def adapted(name: str) -> jp.Model:
    model = cells.built(name)

    def init(key: jax.Array) -> Any:
        params = model.init(key)
        moe = params["layers"]["moe"]
        for i, leaf in enumerate(("up", "down")):
            *stack, into, out = moe[leaf].shape
            draw = lambda j, *shape, i=i: (
                jax.random.normal(jax.random.fold_in(key, 2 * i + j), shape) * shape[-2] ** -0.5
            )
            moe |= {f"{leaf}_a": draw(0, *stack, into, RANK), f"{leaf}_b": draw(1, *stack, RANK, out)}
        return params

    return jp.Model(init=init, loss=model.loss, rows="independent")


@functools.cache
def trained(name: str, text: str) -> tuple[Any, Any]:
    """Gradients, and how far three steps move each leaf."""
    axes = [getattr(jp.Strategy.parse(text), axis) for axis in ("pipe", "expert", "fsdp", "tensor")]
    step = jp.make_train_step(
        adapted(name),
        optax.sgd(0.1, momentum=0.9),
        text,
        mesh=jax.devices()[: int(np.prod(axes))],
        trainable=lambda path: path.endswith(("_a", "_b", "router")),
    )
    state, batch = step.init(jax.random.key(0)), cells.batch_of()
    first, (_, grads) = jax.device_get(step.params(state)), step.value_and_grad(state, batch)
    for _ in range(3):
        state, _ = step(state, batch)
    return jax.device_get(grads), jax.tree.map(np.subtract, jax.device_get(step.params(state)), first)


@pytest.mark.battery
@pytest.mark.parametrize("name", ["dropless", "grouped", "einsum"])
@pytest.mark.parametrize(
    "text",
    [
        "expert=2,fsdp=2,tensor=2",
        "expert=4,fsdp=2,zero=3",
        "pipe=2,expert=2,tensor=2,microbatches=2",
        "pipe=2,expert=2,fsdp=2,microbatches=4,schedule=zb-h1",
        "pipe=2,tensor=2,microbatches=2,schedule=1f1b,remat=layer",
    ],
)
def test_small_experts_beside_frozen_ones(name: str, text: str) -> None:
    # Three steps magnify rounding: one device differs from itself by 4e-5 if its embedding moves by one unit in the
    # last place. In float64, most of these layouts differ from one device by 5e-15.
    for expected, found, tolerance in zip(trained(name, "single"), trained(name, text), (1e-5, 1e-4), strict=True):
        for (path, reference), ours in zip(jax.tree.leaves_with_path(expected), jax.tree.leaves(found), strict=True):
            leaf = jax.tree_util.keystr(path)
            assert (np.abs(reference).max() > 0) == leaf.endswith(("_a']", "_b']", "router']")), leaf
            assert np.abs(ours - reference).max() <= tolerance * np.abs(reference).max(), leaf
