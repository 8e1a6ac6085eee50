"""Two processes on loopback, four devices each, stand for two hosts: each feeds its own rows, and the losses are one
device's.
"""

import json
import socket
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest

import jaxpar as jp
from jaxpar.data import batches, byte_corpus
from jaxpar.models import llama

WORKER = """
import json, sys
import jax
jax.config.update("jax_num_cpu_devices", 4)
rank, port = int(sys.argv[1]), sys.argv[2]
jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
import optax
sys.path[:0] = ["tests", "tests/train"]
import jaxpar as jp
from test_processes import model, rows
found = {}
for strategy in sys.argv[3:]:
    step = jp.make_train_step(model(strategy), optax.sgd(0.1, momentum=0.9), strategy)
    # Two stages of a pipeline have the same rows.
    mine = {name: x if "pipe" in strategy else x[rank * 8 : rank * 8 + 8] for name, x in rows(strategy).items()}
    state = step.init(jax.random.key(0))
    losses = []
    for _ in range(3):
        state, metrics = step(state, mine)
        losses.append(float(metrics["loss"]))
    losses.append(float(step.evaluate(state, mine)["loss"]))
    found[strategy] = [dict(step.mesh.shape), losses]
print("RESULT", json.dumps(found))
"""
FOUR_AXES = "pipe=2,fsdp=2,tensor=2,sequence=true,microbatches=2"
STRATEGIES = ("ddp", "zero2", "fsdp", "hsdp", "pipe=2,data=4,microbatches=2", FOUR_AXES)


def rows(strategy: str = "ddp") -> dict[str, np.ndarray]:
    """Noise, or for a pipeline bytes of Python's own source."""
    if "pipe" in strategy:
        return next(batches(byte_corpus().train, rows=16, length=12, seed=0))
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(16, 12)).astype(np.float32), "y": rng.normal(size=(16, 8)).astype(np.float32)}


def model(strategy: str = "ddp") -> jp.Model:
    """Three scanned layers, or for a pipeline a Llama of bytes."""
    if "pipe" in strategy:
        config = llama.Config(vocab=256, dim=16, layers=4, heads=2, kv_heads=2, ffn=24)
        return jp.from_nnx(lambda rngs: llama.Llama(config, rngs=rngs), llama.loss)

    def init(key: jax.Array) -> dict[str, jax.Array]:
        a, b = jax.random.split(key)
        return {"in": jax.random.normal(a, (12, 16)) * 0.3, "layers": jax.random.normal(b, (3, 16, 16)) * 0.2}

    def loss(params: dict[str, jax.Array], batch: dict[str, jax.Array], key: jax.Array | None) -> jax.Array:
        x, _ = jax.lax.scan(lambda x, w: (x + jax.numpy.tanh(x @ w), None), batch["x"] @ params["in"], params["layers"])
        return ((x[:, :8] - batch["y"]) ** 2).mean()

    return jp.Model(init=init, loss=loss)


def one_device(strategy: str) -> list[float]:
    step = jp.make_train_step(model(strategy), optax.sgd(0.1, momentum=0.9), "single")
    state = step.init(jax.random.key(0))
    losses = []
    for _ in range(3):
        state, metrics = step(state, rows(strategy))
        losses.append(float(metrics["loss"]))
    return [*losses, float(step.evaluate(state, rows(strategy))["loss"])]


def test_two_hosts_train_as_one_device() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), port, *STRATEGIES],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        # Strategies of one model have one truth, computed while the workers compile.
        truths = {strategy: one_device(strategy) for strategy in ("ddp", FOUR_AXES)}
        outs = [worker.communicate(timeout=300) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for out, errors in outs:
        lines = [line for line in out.splitlines() if line.startswith("RESULT")]
        assert lines, errors[-3000:]
        found = json.loads(lines[0].removeprefix("RESULT"))
        for strategy in STRATEGIES:
            truth = truths[FOUR_AXES if "pipe" in strategy else "ddp"]
            assert found[strategy][1] == pytest.approx(truth, rel=1e-5), strategy
        assert found["hsdp"][0] == {"pipe": 1, "data": 2, "fsdp": 4, "tensor": 1}  # data = hosts, fsdp = their devices
