"""step.explain: memory, ledger, exchanges of a server and closed forms, as text and as JSON."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxpar as jp
from jaxpar.inspect.explain import Explanation, size
from jaxpar.inspect.ledger import Ledger
from jaxpar.server import Live, ServerStep

DEVICES, LAYERS, DIM = 8, 4, 32
BATCH = {"x": np.ones((16, DIM), np.float32), "weight": jp.Replicated(np.ones(3, np.float32))}


def init(key: jax.Array) -> dict[str, jax.Array]:
    return {"w": jax.random.normal(key, (LAYERS, DIM, DIM)) / DIM**0.5, "odd": jnp.ones(3)}


def loss(params: dict[str, jax.Array], batch: Any, key: jax.Array | None) -> tuple[jax.Array, dict[str, Any]]:
    h, _ = lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), batch["x"], params["w"])
    value = (h**2).mean() * (batch["weight"] * params["odd"]).sum()
    return value, {"size": jp.Mean(jnp.abs(h).sum(), h.size)}


MODEL = jp.Model(init=init, loss=loss)
P = 4 * (LAYERS * DIM * DIM + 3)  # bytes of the parameters, and of their momentum


def explained(strategy: str) -> Explanation:
    return jp.make_train_step(MODEL, optax.sgd(0.1, momentum=0.9), strategy).explain(BATCH)


@pytest.mark.parametrize(("strategy", "shards"), [("single", 1), ("ddp", 1), ("zero3", 8), ("hsdp", 4)])
def test_of_one_program(strategy: str, shards: int) -> None:
    step = jp.make_train_step(MODEL, optax.sgd(0.1, momentum=0.9), strategy)
    found = step.explain(BATCH)
    stored = 4 * (LAYERS * DIM * DIM // shards + 3)
    memory = found.memory["each device"]
    assert (memory.params, memory.grads, memory.optimizer) == (stored, stored, stored)
    compiled = step.compile(BATCH)
    program = compiled.memory_analysis()
    assert memory.temporaries == program.temp_size_in_bytes
    assert memory.arguments == program.argument_size_in_bytes >= 2 * stored
    assert memory.arguments <= memory.total <= memory.arguments + memory.outputs + memory.temporaries - 2 * stored + 64
    assert found.ledger == Ledger.from_hlo(compiled.as_text(), step.mesh)
    assert found.transfers == ()
    assert (found.checks == ()) == (strategy == "single")
    for check in found.checks:
        assert check.written_count == check.expected_count
        assert 0 <= check.found - check.expected <= 64, check
    assert list(found.notes) == (["odd"] if shards > 1 else [])
    shown(found)


def shown(found: Explanation) -> None:
    text = str(found)
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("closed form") == bool(found.checks) + bool(found.transfers)
    assert all(path in text for path in found.notes)
    plain = json.loads(json.dumps(found.json(), allow_nan=False))
    assert plain["memory"].keys() == found.memory.keys()
    assert [c["found"] for c in plain["checks"]] == [c.found for c in found.checks]


def test_of_a_server() -> None:
    """Five exchanges; the server holds the optimizer's state and the gradients of all replicas."""
    found = explained("dp")
    others = DEVICES - 1
    keys = 4 + 8  # the step's number and the key go with the weights
    assert [(t.kind, t.what, t.found) for t in found.transfers] == [
        ("scatter", "rows of the batch", others * (2 * DIM * 4 + 3 * 4)),
        ("broadcast", "weights", others * (P + keys)),
        ("gather", "losses", others * 2 * 2 * 4),
        ("scatter", "gradients of the losses", others * 4),
        ("gather", "gradients", others * P),
    ]
    assert [t.expected for t in found.transfers] == [t.found for t in found.transfers]
    server, rest = found.memory["server"], found.memory["others"]
    assert (server.params, server.grads, server.optimizer) == (P, DEVICES * P, P)
    assert (rest.params, rest.grads, rest.optimizer) == (P, P, 0)
    assert server.program == "update"
    assert server.total > rest.total
    assert found.ledger == ()
    shown(found)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_exchanges_are_those_that_run(microbatches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is rehearsed is what a real step moves: same order, same sizes, and to where."""
    step = jp.make_train_step(MODEL, optax.sgd(0.1), f"dp,microbatches={microbatches}")
    assert isinstance(step, ServerStep)
    moves = []
    move = Live.move

    def watched(self: Live, kind: str, what: str, tree: Any, to: Any) -> Any:
        moved = move(self, kind, what, tree, to)
        places = {len(x.sharding.device_set) for x in jax.tree.leaves(moved)}
        moves.append((kind, what, *places))
        return moved

    monkeypatch.setattr(Live, "move", watched)
    step(step.init(jax.random.key(0)), BATCH)
    assert [(kind, what) for kind, what, _ in moves] == [(t.kind, t.what) for t in step.explain(BATCH).transfers]
    assert [devices for *_, devices in moves] == [DEVICES, DEVICES, 1, DEVICES, 1]


def test_a_missing_shard_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gather that the closed form does not know is a ratio above 1."""
    from jaxpar.parallel import zero

    monkeypatch.setattr(zero, "all_reduce", lambda x, axes: x)
    found = explained("hsdp")
    check = next(c for c in found.checks if c.axes == ("data",))
    assert check.found < check.expected
    assert check.ratio is not None
    assert check.ratio < 0.1


def test_rows_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="batch has 12 rows; 8 replicas"):
        jp.make_train_step(MODEL, optax.sgd(0.1), "ddp").explain({**BATCH, "x": np.ones((12, DIM), np.float32)})


def test_sizes() -> None:
    assert [size(n) for n in (0, 999, 1000, 3_412_480, 2.5e9, 7e12)] == [
        "0 B",
        "999 B",
        "1.00 kB",
        "3.41 MB",
        "2.50 GB",
        "7.00 TB",
    ]
