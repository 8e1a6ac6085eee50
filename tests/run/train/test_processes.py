"""Two processes on loopback with four devices each, which stand for two hosts, have the losses of one device.

Each feeds its own rows, or both feed the same batch, to a step or to a trainer.
"""

import json
import logging
import re
import sys
from typing import Any

import jax
import numpy as np
import optax
import pytest
from ports import free_port
from workers import started

import jaxpar as jp
from jaxpar.data import Rows

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
results = {name: case(name, rank) for name in sys.argv[3:]}
print("RESULT", json.dumps([results, refusals(rank)]))
"""
# Who has which rows ("global" or "host"), what takes them, and the strategy.
CASES = ("global step ddp", "host rows fsdp", "global trainer fsdp", "host step pipe=2,data=4,microbatches=2")
MORE_CASES = ("host step ddp", "host step zero2", "host step fsdp", "host step hsdp", "global step hsdp",
              "global trainer ddp", "host trainer ddp", "host trainer pipe=2,data=4,microbatches=2")  # fmt: skip


class Compilations(logging.Handler):
    """A context that records the names of the functions that jax compiles, under `jax.log_compiles`."""

    def __enter__(self) -> "Compilations":
        self.names: list[str] = []
        logging.getLogger("jax").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("jax").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.names += re.findall(r"Compiling jit\((\w+)\)", record.getMessage())


def rows() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(16, 12)).astype(np.float32), "y": rng.normal(size=(16, 8)).astype(np.float32)}


def model() -> jp.Model:
    """Return a model of three scanned layers."""

    def init(key: jax.Array) -> dict[str, jax.Array]:
        a, b = jax.random.split(key)
        return {"in": jax.random.normal(a, (12, 16)) * 0.3, "layers": jax.random.normal(b, (3, 16, 16)) * 0.2}

    def loss(params: dict[str, jax.Array], batch: dict[str, jax.Array], key: jax.Array | None) -> jax.Array:
        x, _ = jax.lax.scan(lambda x, w: (x + jax.numpy.tanh(x @ w), None), batch["x"] @ params["in"], params["layers"])
        return ((x[:, :8] - batch["y"]) ** 2).mean()

    return jp.Model(init=init, loss=loss)


def losses(strategy: str, rows_of: str, takes: str, batch: Any) -> tuple[Any, list[float]]:
    """Return the step and the losses of three steps and an evaluation.

    Args:
      strategy: the strategy to train under.
      rows_of: who has which rows: "global" or "host".
      takes: what takes the rows: "step", "trainer", or "rows" for a trainer on `Rows`.
      batch: the batch.
    """
    tx, values = optax.sgd(0.1, momentum=0.9), []
    if takes in ("trainer", "rows"):  # with "rows", each host reads its part of the rows
        data = Rows(rows(), shuffle=False) if takes == "rows" else [batch]
        hook = jp.Hook(
            on_step=lambda _, metrics: values.append(metrics["loss"]),
            on_evaluate=lambda _, metrics: values.append(metrics["held_out_loss"]),
        )
        loop = jp.Loop(steps=3, quiet=True)
        options = {"held_out": [batch], "hooks": [hook], "rows": rows_of}
        trainer = jp.Trainer(model(), tx, data, strategy, loop, **options)
        with jax.log_compiles(), Compilations() as compiled:
            trainer.run()
        assert compiled.names.count("_train") == 1  # two processes compiled it twice: for shapes, and for their batch
        assert trainer.rows == 16
        return trainer.step, values
    step = jp.make_train_step(model(), tx, strategy, rows=rows_of)
    state = step.init(jax.random.key(0))
    for _ in range(3):
        state, metrics = step(state, batch)
        values.append(float(metrics["loss"]))
    return step, [*values, float(step.evaluate(state, batch)["loss"])]


def case(name: str, rank: int) -> tuple[dict[str, int], list[float]]:
    """Return the mesh and the losses of one of CASES, in one of two processes."""
    rows_of, takes, strategy = name.split(" ")
    batch = rows()
    if rows_of == "host" and "pipe" not in strategy:  # two stages of a pipeline have the same rows
        batch = {name: x[rank * 8 : rank * 8 + 8] for name, x in batch.items()}
    step, values = losses(strategy, rows_of, takes, batch)
    assert jax.tree.leaves(step.shapes(batch))[0].shape[0] == 16
    return dict(step.mesh.shape), values


def refusals(rank: int) -> list[str]:
    """Return the errors of one of two processes about batches that do not fit."""
    messages = []
    steps = {
        rows_of: jp.make_train_step(model(), optax.sgd(0.1), "ddp", rows=rows_of) for rows_of in ("global", "host")
    }
    states = {rows_of: step.init(jax.random.key(0)) for rows_of, step in steps.items()}
    host_rows = {name: x[rank * 8 : rank * 8 + 8] for name, x in rows().items()}
    for rows_of, batch in (
        ("global", host_rows),  # rows of this host: half of them were dropped in silence
        ("global", {name: x[: 8 + 8 * rank] for name, x in rows().items()}),
        ("host", {name: x[: 8 + 8 * rank] for name, x in rows().items()}),
        ("host", {name: x[:6] for name, x in host_rows.items()}),
        ("global", {name: x[:12] for name, x in rows().items()}),
    ):
        with pytest.raises(ValueError, match=r"rows") as error:
            steps[rows_of](states[rows_of], batch)
        messages.append(str(error.value))
    host_rows["x"][3] += np.nan if rank else 0
    run = jp.Trainer(model(), optax.sgd(0.1), [host_rows], "ddp", jp.Loop(steps=1, quiet=True), rows="host")
    with pytest.raises(FloatingPointError) as nonfinite_error:
        run.run()
    return [*messages, str(nonfinite_error.value)]


MESSAGE_PARTS = (
    ("the batch to train: its checksum is", "on rank 0", "on rank 1", "the same on each, or pass rows='host'"),
    ("its shape is ['x'] float32[8, 12]", "float32[16, 12]", "on rank 1", "pass rows='host'"),
    ("its shape is ['x'] float32[8, 12]", "float32[16, 12]", "on rank 1", "give as many rows on each"),
    ("12 rows (6 from each of 2 hosts)", "multiple of 8", "here rows='host'", "jp.pad_rows(batch, 4)"),
    ("12 rows;", "multiple of 8", "rows='global' takes the same rows on every host", "jp.pad_rows(batch, 8)"),
    # This error named neither host nor leaf, and blamed the learning rate.
    ("step 1: loss is nan", "batch leaf x holds nan at row 11, [0] of rank 1 on ", "mend these rows"),
)


@pytest.mark.slow
@pytest.mark.parametrize("cases", [CASES, pytest.param(MORE_CASES, marks=pytest.mark.battery)], ids=["some", "more"])
def test_two_hosts_train_as_one_device(cases: tuple[str, ...]) -> None:
    """A step trained twice on a global batch, and a trainer dropped half of the rows of each host."""
    port = str(free_port())
    with started([[sys.executable, "-c", WORKER, str(rank), port, *cases] for rank in range(2)]) as workers:
        _, expected = losses("single", "global", "step", rows())  # while the workers compile
        outputs = [worker.communicate(timeout=1800) for worker in workers]
    for out, errors in outputs:
        lines = [line for line in out.splitlines() if line.startswith("RESULT")]
        assert lines, errors[-3000:]
        results, messages = json.loads(lines[0].removeprefix("RESULT"))
        for name in cases:
            assert results[name][1] == pytest.approx(expected, rel=1e-5), name
            if "hsdp" in name:  # data = hosts, fsdp = their devices
                assert {axis: size for axis, size in results[name][0].items() if size > 1} == {"data": 2, "fsdp": 4}
        for message, words in zip(messages, MESSAGE_PARTS, strict=True):
            assert all(word in message for word in words), message
