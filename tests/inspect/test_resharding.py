"""Involuntary rematerialisation and indivisible dims are named by parameter, axis and line, with a better spec."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import jaxpar as jp
from jaxpar.inspect.check.findings import check
from jaxpar.inspect.check.resharding import cause
from jaxpar.step.checks import indivisible
from jaxpar.step.core import Step

THIS_FILE = Path(__file__)
MESHED = "data=2,fsdp=2,tensor=2"
BATCH = {"x": np.ones((16, 64), np.float32)}
BYTES = 4 * 64 * 256


def init(key: jax.Array) -> dict[str, jax.Array]:
    return {"head": {"e": jax.random.normal(key, (64, 256))}, "t": jnp.zeros((7, 5))}


def loss(params: Any, batch: Any, key: jax.Array | None) -> jax.Array:
    return jnp.square(batch["x"] @ params["head"]["e"]).mean() + params["t"].sum()


MODEL = jp.Model(init=init, loss=loss)


def optimizer_from(fun: Any) -> Any:
    """Return an optimizer that applies a function to gradients."""
    return optax.GradientTransformationExtraArgs(lambda p: optax.EmptyState(), lambda g, s, p=None, **_: (fun(g), s))


def make_step(fun: Any, strategy: str = "zero3", model: Any = MODEL) -> Step:
    rules = {"head/e": -1} if "tensor" in strategy else None
    return jp.make_train_step(model, optimizer_from(fun), strategy, rules=rules)


def asking(spec: PartitionSpec) -> Step:
    """Return a step whose optimizer asks for this sharding."""
    mesh = make_step(lambda g: g, MESHED).mesh

    def scaled(grads: Any) -> Any:
        constrained = lax.with_sharding_constraint(0.1 * grads["head"]["e"], NamedSharding(mesh, spec))
        return {"head": {"e": constrained}, "t": grads["t"]}

    return make_step(scaled, MESHED)


def test_an_involuntary_rematerialisation_is_named_and_its_spec_spares_it() -> None:
    step = asking(PartitionSpec(("data", "fsdp", "tensor")))
    explanation = step.explain(BATCH)
    moves = [move for move in explanation.moves if move.involuntary and move.bytes == BYTES]
    assert moves
    for move in moves:
        assert (move.leaf, move.shape) == ("head/e", (64, 256))
        assert (move.kept, move.wanted) == (PartitionSpec("fsdp", "tensor"), PartitionSpec(("data", "fsdp", "tensor")))
        assert "fsdp" in move.axes
        assert "65.54 kB" in move.message
        assert "suggested spec P('fsdp', 'tensor')" in move.message
        assert "ask for P('fsdp', 'tensor') there" in cause(step, move)
        # Neither the line of the update that meets the sharding nor a line of jaxpar.
        assert f"{THIS_FILE.name}:" in move.source
    text = " ".join(str(explanation).split())
    assert "involuntary full rematerialisation; kept as P('fsdp', 'tensor'), asked for as P(('data'," in text
    assert max(map(len, str(explanation).splitlines())) <= 90  # names of axes are not cut
    listed = json.loads(json.dumps(explanation.json()))["moves"]
    assert listed[0]["spec"] == "P('fsdp', 'tensor')"
    assert listed[0]["message"] == explanation.moves[0].message
    proof = json.loads(json.dumps(check(step, BATCH).json()))
    proof_moves = [move for finding in proof["findings"] for move in finding["moves"]]
    assert any(move["involuntary"] and move["spec"] == "P('fsdp', 'tensor')" for move in proof_moves)
    assert moves[0].spec is not None
    assert asking(moves[0].spec).explain(BATCH).moves == ()


def test_what_an_operation_needs_whole() -> None:
    """Sorting needs whole rows, which tensor splits. With another dim on tensor, as suggested, nothing moves."""
    rows = lambda grads: jax.tree.map(lambda g: jnp.sort(g, axis=-1), grads)
    step = make_step(rows, "data=4,tensor=2")
    moves = step.explain(BATCH).moves
    assert {(move.leaf, move.axes, move.spec) for move in moves} == {("head/e", ("tensor",), PartitionSpec())}
    assert "rules={'head/e': None} or another dim" in cause(step, moves[0])
    spared = jp.make_train_step(MODEL, optimizer_from(rows), "data=4,tensor=2", rules={"head/e": -2})
    assert spared.explain(BATCH).moves == ()


def on(mesh: Any, *spec: Any) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*spec))


def put(mesh: Any) -> Step:
    return make_step(lambda g: {**g, "t": jax.device_put(g["t"], on(mesh, "fsdp"))})


def jitted(mesh: Any) -> Step:
    inner = jax.jit(lambda x: 2 * x, out_shardings=on(mesh, None, "fsdp"))
    return make_step(lambda g: {**g, "t": inner(g["t"])})


def mapped(mesh: Any) -> Step:
    spec = PartitionSpec("fsdp")
    inner = jax.shard_map(lambda x: x, mesh=mesh, in_specs=spec, out_specs=spec)
    return make_step(lambda g: {**g, "t": inner(g["t"])})


def first_state(mesh: Any) -> Step:
    sharded_zeros = lambda params: jax.tree.map(lambda p: jax.device_put(jnp.zeros_like(p), on(mesh, "fsdp")), params)
    optimizer = optax.GradientTransformation(sharded_zeros, lambda g, s, p=None: (g, s))
    return jp.make_train_step(MODEL, optimizer, "zero3")


def in_the_loss(mesh: Any) -> Step:
    rows = jax.jit(lambda x: x, in_shardings=on(mesh, None, "fsdp"))
    loss_of_rows = lambda params, batch, key: loss(params, {"x": rows(batch["y"])[:, :1] + batch["x"]}, key)
    return make_step(lambda g: g, model=jp.Model(init=init, loss=loss_of_rows))


def created(mesh: Any) -> Step:
    model = jp.Model(init=lambda key: jax.device_put(init(key), on(mesh, "fsdp")), loss=loss)
    return make_step(lambda g: g, model=model)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (put, r"t \[7, 5\] has 7 on dim 0, which fsdp=8 does not divide, .*; shard it as P\(\), or pad dim 0 to 8"),
        (jitted, r"t \[7, 5\] has 5 on dim 1, which fsdp=8 does not divide"),
        (mapped, r"t \[7, 5\] has 7 on dim 0, which fsdp=8 does not divide"),
        (first_state, r"t \[7, 5\] has 7 on dim 0, which fsdp=8 does not divide"),
        (in_the_loss, r"batch y \[2, 30\] has 30 on dim 1, which fsdp=8 does not divide, .* or pad dim 1 to 32"),
        (created, r"an array \[7, 5\] has 7 on dim 0, which fsdp=8 does not divide"),
    ],
)
def test_what_does_not_divide_is_named(make: Any, message: str) -> None:
    """jax names no parameter, and by default no line."""
    batch = BATCH | ({"y": np.ones((16, 30), np.float32)} if make is in_the_loss else {})
    with pytest.raises(ValueError, match=message) as error:
        make(make_step(lambda g: g).mesh).compile(batch)
    assert f", as {'/'.join(THIS_FILE.parts[-3:])}:" in str(error.value)


def test_a_dim_that_divides_is_suggested() -> None:
    step = make_step(lambda g: g)
    e = jnp.zeros((60, 256))
    with pytest.raises(ValueError, match="divide") as error:
        jax.device_put(e, on(step.mesh, "fsdp"))
    assert "shard it as P(None, 'fsdp'), or pad dim 0 to 64" in indivisible(error.value, [("e", (60, 256))])
    assert indivisible(ValueError("batch has 12 rows"), []) == ""
