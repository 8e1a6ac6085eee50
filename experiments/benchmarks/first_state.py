"""A first state of many small random leaves: CPU seconds to compile and run it, beside `jax.jit` of the model's `init`.

100 leaves of seven shapes on 4 simulated devices. XLA compiles each draw of random numbers anew; jaxpar makes equal
ones together. Each measurement is a fresh process; the two take turns.

    python experiments/benchmarks/first_state.py
"""

import json
import sys
from typing import Any

import numpy as np
from turns import cpu, fresh, report

DEVICES, LEAVES = 4, 100


def one(contender: str) -> float:
    """CPU seconds of this process for a first state."""
    import jax
    import optax

    import jaxpar as jp

    jp.simulate(DEVICES)
    jax.block_until_ready(jax.jit(lambda x: x + 1)(np.ones(3)))  # the backend has started

    def init(key: jax.Array) -> dict[str, jax.Array]:
        keys = jax.random.split(key, LEAVES)
        return {f"w{i}": 0.02 * jax.random.normal(keys[i], (16, 16 + i % 7)) for i in range(LEAVES)}

    def loss(params: dict[str, jax.Array], batch: jax.Array, key: Any) -> jax.Array:
        return sum(jax.numpy.square(x).sum() for x in params.values()) * batch.mean()  # type: ignore[return-value]

    begin = cpu()
    if contender == "plain":
        jax.block_until_ready(jax.jit(init)(jax.random.key(0)))
    else:
        step = jp.make_train_step(jp.Model(init, loss), optax.sgd(0.1), "fsdp")
        jax.block_until_ready(step.init(jax.random.key(0)))
    return cpu() - begin


def ratios(rounds: int) -> dict[str, float]:
    """Prints both medians; ours over the plain one's, by name."""
    found = [[json.loads(fresh(__file__, "--one", name)) for name in ("plain", "jaxpar")] for _ in range(rounds)]
    plain, ours = np.median(found, axis=0)
    print(f"first state of {LEAVES} leaves: plain jit {plain:.2f}, jaxpar {ours:.2f} s of CPU time", flush=True)
    return {f"first state of {LEAVES} small leaves over plain jit": float(ours / plain)}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(one(sys.argv[2])))
    else:
        report(ratios, __doc__, rounds=3)
