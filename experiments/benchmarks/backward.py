"""Forward and backward on one CPU device, beside the forward alone and beside plain `jax.jit`.

Six layers of llama-tiny on 16 rows of 128 tokens. The four programs take turns in one process, so that a busy machine
slows all; ratios are of medians of the process's CPU time, all its threads together. What a run used is still being
freed after it has ended: the next waits for that, and each is charged with its own.

    python experiments/benchmarks/backward.py
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import plain
from turns import cpu, medians, report

import jaxpar as jp
from jaxpar.models import named

LAYERS, ROWS, LENGTH = 6, 16, 128
SETTLE = 0.03  # seconds


def programs() -> dict[str, Callable[[], Any]]:
    """What is measured, each compiled."""
    model = named("llama-tiny", layers=LAYERS).model
    batch = {"tokens": np.random.default_rng(0).integers(0, 256, (ROWS, LENGTH + 1), dtype=np.int32)}
    step = jp.make_train_step(model, optax.sgd(0.1), "single")
    state = step.init(jax.random.key(0))
    params, variables = jax.jit(model.create)(jax.random.key(0))

    def loss(params: Any, batch: Any) -> jax.Array:
        return plain.loss(model, params, variables, batch)[0]

    forward, both = jax.jit(loss), jax.jit(jax.value_and_grad(loss))
    made = {
        "forward": lambda: step.evaluate(state, batch),
        "both": lambda: step.value_and_grad(state, batch),
        "plain forward": lambda: forward(params, batch),
        "plain both": lambda: both(params, batch),
    }
    values = [float(jax.tree.leaves(run())[0]) for run in (made["both"], made["plain both"])]
    assert np.allclose(*values, rtol=1e-4), values
    return made


def ratios(rounds: int) -> dict[str, float]:
    """Prints the CPU time of each; the ratios that matter, by name."""

    def timed(run: Callable[[], Any]) -> tuple[float]:
        time.sleep(SETTLE)
        before = cpu()
        jax.block_until_ready(run())
        time.sleep(SETTLE)
        return (cpu() - before,)

    runs = {name: functools.partial(timed, run) for name, run in programs().items()}
    for run in runs.values():
        run()
    found = {name: used for name, (used,) in medians(runs, rounds).items()}
    for name, used in found.items():
        print(f"{name:14} {1e3 * used:6.0f} ms of CPU time", flush=True)
    return {
        "forward and backward over forward": found["both"] / found["forward"],
        "forward and backward over plain jit": found["both"] / found["plain both"],
    }


if __name__ == "__main__":
    report(ratios, __doc__, rounds=20)
