"""The path of a batch through the package: from room to room, downward."""

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
    ("program", "numerics"): "a rewriting, for the programs that an equation holds",
    ("parallel/pipeline", "step"): "the rows of a microbatch, by its number",
}


def stays(call: Callable[[], Any]) -> list[tuple[str | None, str]]:
    """Return the rooms that are entered while `call` runs in this thread, in order, as (calling room, room).

    Frames of jax between the two are skipped.
    """
    package_prefix, entries = f"{PACKAGE}/", []

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(package_prefix):
            return
        above = frame.f_back
        while above is not None and not above.f_code.co_filename.startswith(package_prefix):
            above = above.f_back
        caller = None if above is None else room(Path(above.f_code.co_filename))
        if caller != (callee := room(Path(frame.f_code.co_filename))):
            entries.append((caller, callee))

    previous_profile = sys.getprofile()
    gc.disable()  # finalizers of other objects would enter rooms too
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(previous_profile)
        gc.enable()
    return entries


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero3", "pipe=2,data=4,microbatches=2", "dp"])
def test_a_batch_goes_downward(strategy: str) -> None:
    """`Step` called methods that `TrainStep`, five floors above it, overrode."""

    def init(key: jax.Array) -> Any:
        return {"layers": {"w": jax.random.normal(key, (2, 8, 8))}, "out": jnp.ones((8, 1))}

    def loss(params: Any, batch: Any, key: jax.Array | None) -> Any:
        x, _ = jax.lax.scan(lambda x, layer: (jnp.tanh(x @ layer["w"]), None), batch, params["layers"])
        return ((x @ params["out"]) ** 2).mean()

    step = jp.make_train_step(jp.Model(init=init, loss=loss), optax.sgd(0.1), strategy)
    state, batch = step.init(jax.random.key(0)), np.ones((16, 8), np.float32)
    result: list[Any] = []
    first_call = stays(lambda: result.extend(step(state, batch)))
    second_call = stays(lambda: result.extend(step(result[0], batch)))
    for entries in (first_call, second_call):
        assert entries[0] == (None, "make")
        assert [room_entered for _, room_entered in entries].count("make") == 1
    climbs = {
        (caller, room_entered)
        for caller, room_entered in first_call
        if caller is not None and FLOOR[room_entered] > FLOOR[caller]
    }
    assert climbs <= {*HANDED_DOWN}
    floors = [(FLOOR[caller], FLOOR[room_entered]) for caller, room_entered in second_call if caller is not None]
    assert {caller for caller, _ in second_call[1:2]} == {"make"}
    assert all(
        caller > room_entered for caller, room_entered in floors
    )  # what is compiled is not traced again: nothing is handed down
