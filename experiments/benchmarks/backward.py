"""Forward and backward on one CPU device, beside the forward alone and beside plain `jax.jit`.

Six layers of llama-tiny on 16 rows of 128 tokens. The four programs take turns in one process, so that a busy machine
slows all; ratios are of medians of the process's CPU time, all its threads together.

    python experiments/benchmarks/backward.py
"""

import argparse
import resource
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

import jaxpar as jp
from jaxpar.models import named

LAYERS, ROWS, LENGTH = 6, 16, 128


def programs() -> dict[str, Callable[[], Any]]:
    """What is measured, each compiled."""
    model = named("llama-tiny", layers=LAYERS).model
    batch = {"tokens": np.random.default_rng(0).integers(0, 256, (ROWS, LENGTH + 1), dtype=np.int32)}
    step = jp.make_train_step(model, optax.sgd(0.1), "single")
    state = step.init(jax.random.key(0))
    params, variables = jax.jit(model.create)(jax.random.key(0))

    def loss(params: Any, batch: Any) -> jax.Array:
        mean = model.call(params, variables, batch, None)[0]["loss"]
        return mean.total / mean.count

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


def seconds(run: Callable[[], Any]) -> float:
    """CPU seconds of one call, all threads together."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    jax.block_until_ready(run())
    after = resource.getrusage(resource.RUSAGE_SELF)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    runs = programs()
    seconds(runs["forward"])
    table = {name: float(np.median(each)) for name, each in zip(
        runs, zip(*([seconds(run) for run in runs.values()] for _ in range(rounds)), strict=True), strict=True
    )}  # fmt: skip
    for name, found in table.items():
        print(f"{name:14} {1e3 * found:6.0f} ms of CPU time")
    print(f"forward and backward over forward: {table['both'] / table['forward']:.2f}")
    print(f"plain jit over jaxpar, forward and backward: {table['plain both'] / table['both']:.2f}")


if __name__ == "__main__":
    main()
