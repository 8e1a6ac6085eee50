"""Two processes on loopback, four devices each, stand for two hosts: whether each feeds its own rows or all feed the
same batch, to a step or to a trainer, the losses are one device's.
"""

import json
import logging
import re
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import optax
import pytest
from ports import free_port

import jaxpar as jp
from jaxpar.data import Rows, batches, byte_corpus
from jaxpar.models import llama

WORKER = """
import json, sys
import jax
jax.config.update("jax_num_cpu_devices", 4)
rank, port = int(sys.argv[1]), sys.argv[2]
jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
import optax
sys.path[:0] = ["tests", "tests/run/train"]
import jaxpar as jp
from test_processes import case, refusals
found = {name: case(name, rank) for name in sys.argv[3:]}
print("RESULT", json.dumps([found, refusals(rank)]))
"""
FOUR_AXES = "pipe=2,fsdp=2,tensor=2,sequence=true,microbatches=2"
# Whose rows, what takes them, under which strategy.
CASES = ("global step ddp", "host rows fsdp", "global trainer fsdp", "host step pipe=2,data=4,microbatches=2")
MORE = ("host step ddp", "host step zero2", "host step fsdp", "host step hsdp", "global step hsdp",
        "global trainer ddp", "host trainer ddp", f"host step {FOUR_AXES}",
        f"global trainer {FOUR_AXES}", f"host trainer {FOUR_AXES}")  # fmt: skip


class Compilations(logging.Handler):
    """The names of the functions that jax compiles while it is entered, under `jax.log_compiles`."""

    def __enter__(self) -> "Compilations":
        self.names: list[str] = []
        logging.getLogger("jax").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("jax").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.names += re.findall(r"Compiling jit\((\w+)\)", record.getMessage())


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


def losses(of: str, strategy: str, whose: str, takes: str, batch: Any) -> tuple[Any, list[float]]:
    """Three steps and an evaluation of the model that `of`, a strategy, is tested with."""
    tx, found = optax.sgd(0.1, momentum=0.9), []
    if takes in ("trainer", "rows"):  # of rows, each host reads its part of what all have
        data = Rows(rows(of), shuffle=False) if takes == "rows" else [batch]
        hook = jp.Hook(
            on_step=lambda _, metrics: found.append(metrics["loss"]),
            on_evaluate=lambda _, metrics: found.append(metrics["held_out_loss"]),
        )
        loop = jp.Loop(steps=3, quiet=True)
        trainer = jp.Trainer(model(of), tx, data, strategy, loop, held_out=[batch], hooks=[hook], rows=whose)
        with jax.log_compiles(), Compilations() as compiled:
            trainer.run()
        assert compiled.names.count("_train") == 1  # two processes compiled it for shapes, and again for their batch
        assert trainer.rows == 16
        return trainer.step, found
    step = jp.make_train_step(model(of), tx, strategy, rows=whose)
    state = step.init(jax.random.key(0))
    for _ in range(3):
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
    return step, [*found, float(step.evaluate(state, batch)["loss"])]


def case(name: str, rank: int) -> tuple[dict[str, int], list[float]]:
    """In one of two processes: the mesh and the losses of one of CASES."""
    whose, takes, strategy = name.split(" ")
    batch = rows(strategy)
    if whose == "host" and "pipe" not in strategy:  # two stages of a pipeline have the same rows
        batch = {name: x[rank * 8 : rank * 8 + 8] for name, x in batch.items()}
    step, found = losses(strategy, strategy, whose, takes, batch)
    assert jax.tree.leaves(step.shapes(batch))[0].shape[0] == 16
    return dict(step.mesh.shape), found


def refusals(rank: int) -> list[str]:
    """What each of two processes is told of batches that cannot be."""
    said = []
    steps = {whose: jp.make_train_step(model(), optax.sgd(0.1), "ddp", rows=whose) for whose in ("global", "host")}
    states = {whose: step.init(jax.random.key(0)) for whose, step in steps.items()}
    mine = {name: x[rank * 8 : rank * 8 + 8] for name, x in rows().items()}
    for whose, batch in (
        ("global", mine),  # own rows: half of them were dropped in silence
        ("global", {name: x[: 8 + 8 * rank] for name, x in rows().items()}),
        ("host", {name: x[: 8 + 8 * rank] for name, x in rows().items()}),
        ("host", {name: x[:6] for name, x in mine.items()}),
        ("global", {name: x[:12] for name, x in rows().items()}),
    ):
        with pytest.raises(ValueError, match=r"rows") as error:
            steps[whose](states[whose], batch)
        said.append(str(error.value))
    mine["x"][3] += np.nan if rank else 0
    run = jp.Trainer(model(), optax.sgd(0.1), [mine], "ddp", jp.Loop(steps=1, quiet=True), rows="host")
    with pytest.raises(FloatingPointError) as of_numbers:
        run.run()
    return [*said, str(of_numbers.value)]


def two_processes(cases: tuple[str, ...]) -> None:
    port = str(free_port())
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), port, *cases],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        # Strategies of one model have one truth, computed while the workers compile.
        truths = {name: losses(name, "single", "global", "step", rows(name))[1] for name in ("ddp", FOUR_AXES)}
        outs = [worker.communicate(timeout=1800) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for out, errors in outs:
        lines = [line for line in out.splitlines() if line.startswith("RESULT")]
        assert lines, errors[-3000:]
        found, said = json.loads(lines[0].removeprefix("RESULT"))
        for name in cases:
            truth = truths[FOUR_AXES if "pipe" in name else "ddp"]
            assert found[name][1] == pytest.approx(truth, rel=1e-5), name
            if "hsdp" in name:  # data = hosts, fsdp = their devices
                assert found[name][0] == {"pipe": 1, "data": 2, "fsdp": 4, "tensor": 1}
        for message, words in zip(said, SAID, strict=True):
            assert all(word in message for word in words), message


SAID = (
    ("the batch to train: its checksum is", "on rank 0", "on rank 1", "the same on each, or say rows='host'"),
    ("its shape is ['x'] float32[8, 12]", "float32[16, 12]", "on rank 1", "say rows='host'"),
    ("its shape is ['x'] float32[8, 12]", "float32[16, 12]", "on rank 1", "give as many rows on each"),
    ("12 rows (6 from each of 2 hosts)", "multiple of 8", "here rows are own", "jp.pad_rows(batch, 4)"),
    ("12 rows;", "multiple of 8", "rows are global, the same on every host", "jp.pad_rows(batch, 8)"),
    # It named neither the host nor the leaf, and the learning rate.
    ("step 1: loss is nan", "batch leaf x holds nan at row 11, [0] of rank 1 on ", "mend these rows"),
)


@pytest.mark.slow
def test_two_hosts_train_as_one_device() -> None:
    """A global batch given to a step was trained on twice, and of own rows given to a trainer half were dropped."""
    two_processes(CASES)


@pytest.mark.battery
def test_two_hosts_train_as_one_device_under_every_strategy() -> None:
    two_processes(MORE)
