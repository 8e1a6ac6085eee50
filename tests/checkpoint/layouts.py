"""One state under every layout, for `test_layouts.py` and for pairs of processes that it starts."""

import functools
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ports import free_port
from workers import started

import jaxpar as jp

LAYERS = 5  # a number that neither 4 stages nor 2 with 2 chunks divide
# Strategy and number of devices, by name.
LAYOUTS = {
    "single": ("single", 1),
    "ddp": ("ddp", 8),
    "zero1": ("zero1", 8),
    "zero2": ("zero2", 8),
    "zero3": ("zero3", 8),
    "hsdp": ("data=2,fsdp=4", 8),
    "six": ("fsdp", 6),
    "four": ("zero1", 4),
    "tensor": ("fsdp=4,tensor=2", 8),
    "sequence": ("data=4,tensor=2,sequence=true", 8),
    "pipe": ("pipe=4,data=2,microbatches=4", 8),
    "chunks": ("pipe=2,chunks=2,fsdp=4,microbatches=2", 8),
    "V": ("pipe=2,schedule=zb-v,chunks=2,fsdp=4,zero=1,microbatches=2", 8),
    "cut": ("pipe=4,data=2,microbatches=4,stages=cut", 8),
    "four axes": ("pipe=2,data=1,fsdp=2,tensor=2,microbatches=2", 8),
    "copies": ("zero2,precision=bf16", 8),
    "server": ("dp", 8),
}
PAIRED = ("hsdp", "copies", "four axes")  # also on two processes with four devices each, which stand for two hosts
RULES = {"layers/./up": -1, "layers/./down": -2, "table": None}


def model() -> jp.Model:
    """Return a model of five layers in a Python loop, which are rolled, and an indivisible table [211, 127]."""

    def init(key: jax.Array) -> Any:
        keys = iter(jax.random.split(key, 2 * LAYERS + 1))
        normal = lambda *shape: jax.random.normal(next(keys), shape) * 0.3
        layers = [{"up": normal(4, 8), "down": normal(8, 4), "bias": jnp.zeros(4)} for _ in range(LAYERS)]
        return {"layers": layers, "table": normal(211, 127)}

    def loss(params: Any, batch: Any, key: jax.Array | None) -> jax.Array:
        x = params["table"][batch["row"]][..., :4]
        for layer in params["layers"]:
            x = x + jnp.tanh(x @ layer["up"]) @ layer["down"] + layer["bias"]
        return ((x @ params["table"][:4, :8] - batch["y"]) ** 2).mean()

    return jp.Model(init=init, loss=loss)


@functools.cache
def step(name: str) -> Any:
    strategy, devices = LAYOUTS[name]
    rules = RULES if "tensor" in strategy else None
    return jp.make_train_step(model(), optax.adam(1e-2), strategy, jax.devices()[:devices], rules=rules)


def random_state(folder: Path) -> dict[str, np.ndarray]:
    """Save a state of random values after step 3, moments included; return them by name."""
    single, rng = step("single"), np.random.default_rng(0)

    def noise(path: Any, x: jax.Array) -> jax.Array:
        if x.dtype != np.float32:
            return x
        values = rng.normal(size=x.shape) * 0.3
        positive = "nu" in jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        return jax.device_put((np.abs(values) if positive else values).astype(x.dtype), x.sharding)

    state = single.init(jax.random.key(0))
    step_3 = jax.device_put(np.int32(3), state.step.sharding)
    state = replace(jax.tree_util.tree_map_with_path(noise, state), step=step_3)
    single.save(folder, state).wait()
    checkpoint = jp.Checkpoint(folder)
    return {name: checkpoint.read(name) for name in checkpoint.arrays}


def saved(folder: Path) -> dict[str, bytes]:
    """Verify a checkpoint, and return the bytes of its arrays by name."""
    checkpoint = jp.Checkpoint(folder)
    checkpoint.verify()
    return {name: checkpoint.read(name).tobytes() for name in checkpoint.arrays}


def bits(state: Any) -> list[bytes]:
    """Return the bytes of a state on this process: for every array the shards of its devices."""
    raw = lambda x: jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    parts = (np.asarray(shard.data).tobytes() for x in jax.tree.leaves(state) for shard in raw(x).addressable_shards)
    return list(parts)


def one_of_two(rank: int, port: str, out: str, origin: str, names: Sequence[str]) -> None:
    """In one of two processes, restore a checkpoint under each layout, save it again, and restore that."""
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
    for name in names:
        state = step(name).restore(Path(out) / origin)
        step(name).save(Path(out) / name, state, {"batches": 3}).wait()
        assert bits(step(name).restore(Path(out) / name)) == bits(state), name


def two_processes(out: Path, origin: str, names: Sequence[str]) -> None:
    """Run `one_of_two` in two processes."""
    port = str(free_port())
    code = "import sys, jax; jax.config.update('jax_num_cpu_devices', 4); sys.path[:0] = sys.argv[2:]; " \
           "import json, layouts; layouts.one_of_two(*json.loads(sys.argv[1]))"  # fmt: skip
    words = [json.dumps([rank, port, str(out), origin, names]) for rank in range(2)]
    folders = [str(folder) for folder in Path(__file__).parents[:2]]
    with started([[sys.executable, "-c", code, word, *folders] for word in words]) as workers:
        outputs = [worker.communicate(timeout=900) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], outputs[0][1][-3000:] + outputs[1][1][-3000:]
