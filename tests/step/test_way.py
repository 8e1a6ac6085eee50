"""The way of a batch through the house: from room to room, downward."""

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_house import FLOOR, PACKAGE, room

import jaxpar as jp

# Where a room calls a function that a room above handed to it, and why it is handed down.
HANDED_DOWN = {
    ("program", "step"): "the loss, to be traced",
    ("program", "slicing"): "a piece of the loss, to be traced; what is known of a value in a loop, through its body",
    ("collectives", "step"): "the gradients of one device, whose collectives are put in order",
    ("slicing", "parallel/data"): "a strategy's fetch and give, for the leaves that a piece reads",
    ("slicing", "parallel/pipeline"): "the same, where only some ranks' gradients count",
    ("program", "parallel/pipeline"): "one tick, to be traced",
    ("program", "collectives"): "a property of values, followed through what an equation holds",
    ("parallel/pipeline", "step"): "the rows of a microbatch, by its number",
}


def stays(call: Callable[[], Any]) -> list[tuple[str | None, str]]:
    """The rooms that are entered while `call` runs in this thread, in order, each behind the room that it is called
    from, whatever of jax stands between.
    """
    inside, found = f"{PACKAGE}/", []

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(inside):
            return
        above = frame.f_back
        while above is not None and not above.f_code.co_filename.startswith(inside):
            above = above.f_back
        caller = None if above is None else room(Path(above.f_code.co_filename))
        if caller != (here := room(Path(frame.f_code.co_filename))):
            found.append((caller, here))

    before = sys.getprofile()
    gc.disable()  # what is collected meanwhile is not on the way
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before)
        gc.enable()
    return found


@pytest.mark.parametrize("strategy", ["zero3", "pipe=2,data=4,microbatches=2", "dp"])
def test_a_batch_goes_downward(strategy: str) -> None:
    """`Step` called methods that `TrainStep`, five floors above it, had in their place."""

    def init(key: jax.Array) -> Any:
        return {"layers": {"w": jax.random.normal(key, (2, 8, 8))}, "out": jnp.ones((8, 1))}

    def loss(params: Any, batch: Any, key: jax.Array | None) -> Any:
        x, _ = jax.lax.scan(lambda x, layer: (jnp.tanh(x @ layer["w"]), None), batch, params["layers"])
        return ((x @ params["out"]) ** 2).mean()

    step = jp.make_train_step(jp.Model(init=init, loss=loss), optax.sgd(0.1), strategy)
    state, batch = step.init(jax.random.key(0)), np.ones((16, 8), np.float32)
    result: list[Any] = []
    first = stays(lambda: result.extend(step(state, batch)))
    again = stays(lambda: result.extend(step(result[0], batch)))
    for way in (first, again):
        assert way[0] == (None, "make")
        assert [here for _, here in way].count("make") == 1
    climbs = {(above, here) for above, here in first if above is not None and FLOOR[here] > FLOOR[above]}
    assert climbs <= {*HANDED_DOWN}
    floors = [(FLOOR[above], FLOOR[here]) for above, here in again if above is not None]
    assert {above for above, _ in again[1:2]} == {"make"}
    assert all(above > here for above, here in floors)  # what is compiled is not traced again: nothing is handed down
