"""A step shows its loss before anything is compiled, and inspect/ reads public names of a step alone."""

import ast
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxpar as jp
from jaxpar.slicing.access import WholeAccess
from jaxpar.slicing.pieces import Segment, Stack
from jaxpar.step.tracing import Loss

LAYERS, DIM = 4, 8
BATCH = {"x": np.zeros((16, DIM), np.float32), "mask": np.ones(16, np.float32)}
calls = []


def init(key: jax.Array) -> dict[str, jax.Array]:
    return {"mlp": {"up": jnp.zeros((LAYERS, DIM, 4 * DIM)), "down": jnp.zeros((LAYERS, 4 * DIM, DIM))}}


def loss(params: Any, batch: Any, key: jax.Array | None) -> tuple[jp.Mean, dict[str, jp.Mean]]:
    calls.append(batch["x"].shape[0])
    layer = lambda h, w: (h + jnp.tanh(h @ w["up"]) @ w["down"], None)
    h, _ = lax.scan(layer, batch["x"], params["mlp"])
    errors = jnp.square(h).sum(1) * batch["mask"]
    return jp.Mean(errors.sum(), batch["mask"].sum()), {"rows": jp.Mean(errors.sum(), len(errors))}


def step_of(strategy: str) -> Any:
    return jp.make_train_step(jp.Model(init, loss), optax.sgd(0.1), strategy)


def test_a_step_shows_its_loss_in_pieces() -> None:
    step = step_of("fsdp=8,microbatches=2")
    calls.clear()
    traced = step.traced(BATCH)
    assert [type(piece) for piece in traced.program.pieces] == [Stack, Segment]
    assert [x.shape for x in jax.tree.leaves(traced.rows)] == [(1,), (1, DIM)]  # 16 rows of 8 replicas x 2
    assert [v.aval.shape for v in traced.program.leaves] == [x.shape for x in traced.leaves]
    assert (dict(traced.axes), traced.traced_axes, traced.schedule) == ({"fsdp": 8}, {"fsdp": 8}, None)
    assert traced.counts
    assert (step.replicas, step.schedule) == (8, None)
    count = len(calls)
    step.trace({name: x + 1 for name, x in BATCH.items()})
    assert step.traced(BATCH) is traced
    assert len(calls) == count  # a batch of these shapes is traced once, for the step as well

    def run(leaves: Any, *inputs: Any) -> Any:
        bound = Loss(traced, WholeAccess(), leaves)
        sums, variables, tape = bound.forward(*inputs)
        return sums, variables, bound.backward(tape, jnp.float32(1), [None] * len(leaves))

    sums, variables, grads = jax.eval_shape(run, traced.leaves, traced.variables, traced.rows, traced.key)
    assert jax.tree.structure((sums, variables)) == jax.tree.structure(traced.outputs)
    assert traced.outputs[0]["loss"] == jp.Mean(traced.total, traced.count)
    assert [g.shape for g in grads] == [x.shape for x in traced.leaves]
    with pytest.raises(ValueError, match="batch has 12 rows; 8 replicas x 2 microbatches need a multiple of 16"):
        step.traced({name: x[:12] for name, x in BATCH.items()})


@pytest.mark.parametrize(
    ("strategy", "up"), [("data=4,pipe=2,microbatches=2", (2, DIM, 32)), ("data=4,tensor=2", (LAYERS, DIM, 16))]
)
def test_leaves_are_those_of_one_rank(strategy: str, up: tuple[int, ...]) -> None:
    step = step_of(strategy)
    traced = step.traced(BATCH)
    assert up in [x.shape for x in traced.leaves]
    assert traced.schedule is step.schedule
    assert (step.schedule is not None) == ("pipe" in strategy)


def test_inspect_reads_no_private_names() -> None:
    """It read `_abstract`, `_shardings`, `_mapped` and others some 30 times, and broke when a step changed."""
    jaxpar = Path(jp.__file__).parent
    rooms = ("inspect", "forecast", "parity", "hardware")
    paths = [path for room in rooms for path in (jaxpar / room).rglob("*.py")]
    assert len({path.relative_to(jaxpar).parts[0] for path in paths}) == len(rooms)
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
                assert ast.unparse(node.value) in ("self", "cls"), f"{path}:{node.lineno}: {ast.unparse(node)}"
