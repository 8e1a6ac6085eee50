"""Lists of blocks that stages of layers refuse: the error names stages='cut', which trains them exactly."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cells import OneDevice, check

import jaxpar as jp

SGD = optax.sgd(0.05, momentum=0.9)
ROWS, DIM, HIDDEN = 8, 12, 20


def block(x: jax.Array, w: Any, act: Callable[[jax.Array], jax.Array] = jnp.tanh) -> jax.Array:
    return x + act(x @ w["up"]) @ w["down"]


def in_turn(x: jax.Array, blocks: Sequence[Any]) -> jax.Array:
    """Run rounds of two different blocks, and one block more."""
    for i, w in enumerate(blocks):
        x = block(x, w, jnp.tanh if i % 2 else jax.nn.silu)
    return x


def other_first(x: jax.Array, blocks: Sequence[Any]) -> jax.Array:
    """Run a first block without a residual connection, and then blocks with one."""
    x = jnp.sin(x @ blocks[0]["up"]) @ blocks[0]["down"]
    return functools.reduce(block, blocks[1:], x)


def backwards(x: jax.Array, blocks: Sequence[Any]) -> jax.Array:
    return functools.reduce(block, blocks[::-1], x)


def twice(x: jax.Array, blocks: Sequence[Any]) -> jax.Array:
    return functools.reduce(block, [*blocks, *blocks], x)


# The function that runs the list, its number of blocks, and the error of stages of layers ("" if they run it).
LISTS: dict[str, tuple[Any, int, str]] = {
    "in_turn": (in_turn, 5, "differ"),
    "other_first": (other_first, 4, "differ"),
    "backwards": (backwards, 4, "runs it from its last layer to its first; run it forwards"),
    "twice": (twice, 4, ""),
}


@functools.cache
def model_and_batch(name: str) -> tuple[jp.Model, Any]:
    run, blocks, _ = LISTS[name]
    draw = np.random.default_rng(0)
    random = lambda *shape: draw.normal(size=shape).astype(np.float32)

    def init(key: jax.Array) -> Any:
        make = lambda i, *shape: shape[0] ** -0.5 * jax.random.normal(jax.random.fold_in(key, i), shape)
        return {"blocks": [{"up": make(i, DIM, HIDDEN), "down": make(i + 99, HIDDEN, DIM)} for i in range(blocks)]}

    def loss(params: Any, batch: Any, key: jax.Array | None) -> jp.Mean:
        losses = jnp.square(run(batch["x"], params["blocks"]) - batch["y"]).mean(-1)
        return jp.Mean((losses * batch["w"]).sum(), batch["w"].sum())

    weights = draw.uniform(0.1, 2, ROWS).astype(np.float32)
    return jp.Model(init=init, loss=loss), {"x": random(ROWS, DIM), "y": random(ROWS, DIM), "w": weights}


def make_step(name: str, text: str) -> Any:
    return jp.make_train_step(model_and_batch(name)[0], SGD, text, mesh=jax.devices()[:2])


@pytest.mark.parametrize("name", [name for name, (_, _, refusal) in LISTS.items() if refusal])
def test_stages_of_layers_name_cut(name: str) -> None:
    with pytest.raises(ValueError, match=f"{LISTS[name][2]}.*stages='cut'"):
        make_step(name, "pipe=2,microbatches=2").trace(model_and_batch(name)[1])


CELLS = [("backwards", "cut"), ("in_turn", "cut"), ("other_first", "cut"), ("twice", "cut"), ("twice", "layers")]


@pytest.mark.parametrize(
    ("name", "stages"), [CELLS[0], *(pytest.param(*cell, marks=pytest.mark.battery) for cell in CELLS[1:])]
)
def test_cut_trains_them(name: str, stages: str) -> None:
    (model, batch), device = model_and_batch(name), OneDevice(model_and_batch(name)[0])
    step = make_step(name, f"pipe=2,microbatches=2,stages={stages}")
    check(step, model, device.first, batch, 3, *device.train(SGD, batch, 2, 3))
