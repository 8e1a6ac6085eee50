"""A step on 4 simulated devices under each data strategy, beside a plain `jax.jit` step whose batch is sharded.

Six layers of llama-tiny on 16 rows of 128 tokens, AdamW. The plain step has its parameters replicated, and leaves the
sums of gradients to XLA's partitioner. All take turns in one process, so that a busy machine slows all; ratios are of
medians of CPU time of the process, all its threads together, and of seconds on the clock.

    python experiments/benchmarks/data_parallel.py
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import plain
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from turns import cpu, medians, report

import jaxpar as jp
from jaxpar.models import named

DEVICES, LAYERS, ROWS, LENGTH = 4, 6, 16, 128
STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")


class Runner:
    """A step with its state, which goes on from call to call."""

    def __init__(self, step: Callable[[Any, Any], Any], state: Any, batch: Any):
        self.step, self.state, self.batch = step, state, batch
        self.loss = 0.0

    def __call__(self) -> tuple[float, float]:
        """(seconds, CPU seconds) of one step."""
        begin, used = time.perf_counter(), cpu()
        self.state, metrics = jax.block_until_ready(self.step(self.state, self.batch))
        self.loss = float(metrics["loss"])
        return time.perf_counter() - begin, cpu() - used


def runners() -> dict[str, Runner]:
    """What is measured, by name; each has run once."""
    jp.simulate(DEVICES)
    model, optimizer = named("llama-tiny", layers=LAYERS).model, optax.adamw(1e-3)
    batch = {"tokens": np.random.default_rng(0).integers(0, 256, (ROWS, LENGTH + 1), dtype=np.int32)}
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
    whole, rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))

    step = jax.jit(
        plain.train(model, optimizer), donate_argnums=0, in_shardings=(whole, rows), out_shardings=(whole, whole)
    )
    create = jax.jit(plain.create(model, optimizer), out_shardings=whole)
    made = {"plain": Runner(step, create(jax.random.key(0)), batch)}
    for strategy in STRATEGIES:
        step = jp.make_train_step(model, optimizer, strategy)
        made[strategy] = Runner(step, step.init(jax.random.key(0)), batch)
    for run in made.values():
        run()
    losses = [run.loss for run in made.values()]
    assert np.allclose(losses, losses[0], rtol=1e-4), losses
    return made


def ratios(rounds: int) -> dict[str, float]:
    """Prints a line for each strategy; its time over that of the plain step, by name."""
    made = runners()
    found = medians(made, rounds)
    for name, (seconds, used) in found.items():
        beside = f"  x{seconds / found['plain'][0]:.2f} on the clock, x{used / found['plain'][1]:.2f} CPU"
        print(f"{name:6} {1e3 * seconds:6.0f} ms, {1e3 * used:6.0f} ms of CPU time{beside}", flush=True)
    return {f"{name} over plain jit": found[name][1] / found["plain"][1] for name in STRATEGIES}


if __name__ == "__main__":
    report(ratios, __doc__, rounds=20)
