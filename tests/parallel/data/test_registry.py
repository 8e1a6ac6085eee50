"""Rules that users register: the rule of the documentation, a rule that shards, a rule with a wrong promise."""

import contextlib
import dataclasses
import io
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar as jp
import jaxpar.parallel
from jaxpar.forecast.plan.estimates import Estimator
from jaxpar.hardware.devices import target
from jaxpar.hardware.hardware import KINDS
from jaxpar.inspect.check import check
from jaxpar.inspect.expected import expected
from jaxpar.inspect.explain import explain
from jaxpar.inspect.ledger import Ledger
from jaxpar.parallel import Promise, Rule, register
from jaxpar.parallel.data.fsdp import ZERO3

PAGE = Path(__file__).parents[3] / "docs" / "strategies" / "own.md"
SGD = optax.sgd(0.1, momentum=0.9)
LAYERS, DIM = 4, 24
BATCH = np.random.default_rng(0).normal(size=(16, DIM)).astype(np.float32)
FIELDS = ("kind", "axes", "dtype")


def init(key: jax.Array) -> dict[str, jax.Array]:
    """Return a stack and a leaf `odd`, of which no dim divides by the number of devices."""
    shapes = {"w": (LAYERS, DIM, DIM), "scale": (LAYERS, DIM), "odd": (DIM, 7)}
    return {name: 0.2 * jax.random.normal(key, shape) for name, shape in shapes.items()}


def loss(params: dict[str, jax.Array], batch: jax.Array, key: jax.Array | None) -> jax.Array:
    def layer(h: jax.Array, w: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return h + jnp.tanh(h * (1 + w[1]) @ w[0]), None

    h = batch.astype(params["w"].dtype)
    return jnp.square(jax.lax.scan(layer, h, (params["w"], params["scale"]))[0] @ params["odd"]).mean()


MODEL = jp.Model(init=init, loss=loss)


@pytest.fixture
def int8(monkeypatch: pytest.MonkeyPatch) -> Rule:
    """Register the rule of the page for one test."""
    monkeypatch.setattr(jaxpar.parallel.data, "_RULES", {})
    code_block = re.search(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert code_block is not None
    with contextlib.redirect_stdout(io.StringIO()):
        exec(code_block[1], {})
    return jaxpar.parallel.data._RULES["int8"]


def make_step(strategy: Any, **options: Any) -> Any:
    return jp.make_train_step(MODEL, SGD, strategy, **options)


def test_a_rule_is_one_value_and_text(int8: Rule) -> None:
    strategy = jp.Strategy(data=8, rule="int8", microbatches=2)
    assert str(strategy) == "data=8,rule=int8,microbatches=2"
    assert jp.Strategy.parse(str(strategy)) == strategy
    assert make_step(strategy).rule is int8
    # A notebook's cell that runs again registers the rule again.
    replacement = register(dataclasses.replace(int8))
    assert make_step(strategy).rule is replacement


@pytest.mark.slow
def test_the_page_s_rule_trains_explains_and_keeps_its_promises(int8: Rule) -> None:
    step = make_step("data=8,rule=int8")
    compiled = step.compile(BATCH)
    proof = check(step, BATCH, compiled)
    assert proof.ok, proof
    assert {f.what for f in proof.findings if f.part == "as compiled"} >= {"all-to-all data", "all-gather data"}
    assert ("all-to-all", ("data",)) in {(c.kind, c.axes) for c in explain(step, BATCH, compiled).checks}
    report = jp.verify(MODEL, "data=8,rule=int8", BATCH, steps=1)
    assert 1e-4 < report.worst.error < 0.02  # quantised twice, to 1 / 254 of the largest value


@pytest.mark.parametrize(
    "strategy",
    ["data=4,microbatches=2", "pipe=2,data=4,microbatches=2", "pipe=2,data=2,tensor=2,microbatches=2,precision=bf16"],
)
def test_a_rule_of_one_s_own_composes(strategy: str, int8: Rule) -> None:
    """The rule's closed form for each leaf agrees with the collectives of the program."""
    devices = jax.devices()[: 4 if "pipe" not in strategy else 8]
    step = make_step(f"{strategy},rule=int8", mesh=devices, rules={"w": -1} if "tensor" in strategy else None)
    closed_form, traced = expected(step, BATCH), Ledger.from_jaxpr(step.trace(BATCH), step.mesh)
    for value in ("bytes", "count"):
        assert traced.by(*FIELDS, value=value) == closed_form.by(*FIELDS, value=value)
    assert closed_form.total(kind="all-to-all") > 0


def test_a_rule_that_shards_is_as_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxpar.parallel.data, "_RULES", {})
    register(dataclasses.replace(ZERO3, name="mine"))
    builtin_step, user_step = make_step("data=2,fsdp=4"), make_step("data=2,fsdp=4,rule=mine")
    assert user_step.layout.bytes == builtin_step.layout.bytes
    assert expected(user_step, BATCH) == expected(builtin_step, BATCH)
    assert str(user_step.trace(BATCH)) == str(builtin_step.trace(BATCH))


def test_a_promise_that_is_not_kept_is_caught(int8: Rule) -> None:
    register(dataclasses.replace(int8, promise=Promise(frozenset(), lambda leaf: ())))
    findings = check(make_step("data=8,rule=int8"), BATCH).broken
    broken = {(finding.verdict, finding.part, finding.what.partition(" x")[0]) for finding in findings}
    assert ("UNPROMISED", "as written", "all-to-all data int8 0") in broken


def test_plans_ask_the_rule_what_it_sends(int8: Rule) -> None:
    cluster = dataclasses.replace(target("cpu:8"), hardware=KINDS["H100"])
    estimator = Estimator(MODEL, SGD, cluster, BATCH)
    seconds = {text: estimator.estimate(jp.Strategy.parse(text)).sent for text in ("data=8", "data=8,rule=int8")}
    assert 0 < seconds["data=8,rule=int8"] != seconds["data=8"] > 0


def test_zero1_and_zero2_send_alike_in_one_microbatch() -> None:
    """The estimate for ZeRO-1 counted a shard of the gradients, because the update receives them sharded."""
    cluster = dataclasses.replace(target("cpu:8"), hardware=KINDS["H100"])
    estimator = Estimator(MODEL, SGD, cluster, BATCH)
    zero1_seconds, zero2_seconds = (estimator.estimate(jp.Strategy(fsdp=8, zero=zero)).sent for zero in (1, 2))
    assert zero1_seconds == zero2_seconds > 0


@pytest.mark.parametrize("zero", [1, 3])
def test_a_stack_that_is_used_outside_its_loop_too(zero: int) -> None:
    """Weight decay in the loss reads all layers, so that the stages of a pipeline gather whole leaves without padding.

    The closed form counted a shard of them for ZeRO-1, and their padding for ZeRO-3.
    """

    def init(key: jax.Array) -> dict[str, jax.Array]:
        return {"w": jax.random.normal(key, (LAYERS, 129, 129)), "scale": jnp.ones((LAYERS, 129))}

    def decayed(params: dict[str, jax.Array], batch: jax.Array, key: jax.Array | None) -> jax.Array:
        def layer(h: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
            return h + jnp.tanh(h * w["scale"] @ w["w"]), None

        return jnp.square(jax.lax.scan(layer, batch, params)[0]).mean() + 1e-3 * jnp.square(params["w"]).sum()

    step = jp.make_train_step(jp.Model(init, decayed), SGD, f"pipe=2,fsdp=4,zero={zero},microbatches=2")
    batch = jax.ShapeDtypeStruct((16, 129), jnp.float32)
    closed_form, traced = expected(step, batch), Ledger.from_jaxpr(step.trace(batch), step.mesh)
    for value in ("bytes", "count"):
        assert traced.by(*FIELDS, value=value) == closed_form.by(*FIELDS, value=value)
    assert closed_form.total(kind="all-gather", axes=("pipe",)) > 0


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (
            "data=8,rule=int",
            r"rule='int' is not registered; use one of int8, mine \(did you mean 'int8'\?\), or call jaxpar",
        ),
        ("fsdp=8,rule=int8", "rule='int8' shards nothing and fsdp=8; use data instead of fsdp"),
        ("data=8,rule=mine", "rule='mine' shards grads, optimizer, params and fsdp=1; give fsdp a size"),
        ("data=8,rule=8", "rule=8 is not the name of a rule"),
        ("fsdp=8,zero=2,rule=mine", "zero choose rules of jaxpar's own; leave them out, or leave rule out"),
        ("data=8,server=true,rule=int8", "server, single and zero choose rules"),
    ],
)
def test_a_rule_that_cannot_be_is_refused(strategy: str, message: str, int8: Rule) -> None:
    register(dataclasses.replace(ZERO3, name="mine"))
    with pytest.raises(ValueError, match=message):
        make_step(strategy)


def test_what_cannot_be_registered_says_so(int8: Rule) -> None:
    for rule, message in [
        ("int8", "give a jaxpar.parallel.Rule"),
        (dataclasses.replace(int8, name="8 bits"), "a rule cannot be named '8 bits'; use letters"),
        (dataclasses.replace(int8, name="zero2"), "none of jaxpar's own names"),
        (dataclasses.replace(int8, sharded=frozenset({"weights"})), r"shards \['weights'\]; use some of params"),
        (dataclasses.replace(int8, promise=None), "promises None; give a jaxpar.parallel.Promise"),
    ]:
        with pytest.raises(ValueError, match=message):
            register(rule)  # type: ignore[arg-type]
