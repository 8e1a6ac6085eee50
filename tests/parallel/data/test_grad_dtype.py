"""A gradient to which nothing is added stays in the dtype in which it was computed until the update casts it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar as jp
from jaxpar.hardware.compiled.cost import Costs
from jaxpar.hardware.devices import target
from jaxpar.models import named
from jaxpar.parallel.data import access
from jaxpar.program.walk import visit

BATCH = {"tokens": np.random.default_rng(0).integers(256, size=(4, 17)).astype(np.int32)}


def step_of(strategy: str, count: int) -> Any:
    return jp.make_train_step(
        named("llama-tiny", layers=3).model,
        optax.sgd(0.1),
        f"{strategy},precision=bf16",
        mesh=jax.devices()[:count],
    )


def stack_dtypes(step: Any) -> set[str]:
    """Return the dtypes in which the step's loops carry the gradients of a feed-forward's matrices."""
    up = next(leaf.shape for leaf in step.layout.leaves if "up" in leaf.path or "gate" in leaf.path)
    carries = (
        v.aval
        for eqn, _ in visit(step.trace(BATCH).jaxpr.eqns)
        if eqn.primitive.name in ("scan", "while")
        for v in eqn.outvars
    )
    return {aval.dtype.name for aval in carries if aval.shape == up}


@pytest.mark.parametrize(
    ("strategy", "count", "dtype"),
    [
        ("data=1", 1, "bfloat16"),
        ("data=1,microbatches=2", 1, "float32"),  # two gradients add up
        ("data=2", 2, "float32"),  # so do those of two devices
    ],
)
def test_where_nothing_is_added_no_array_of_float32_is_carried(strategy: str, count: int, dtype: str) -> None:
    assert stack_dtypes(step_of(strategy, count)) == {dtype}


def overlapping() -> jp.Model:
    """Return a model whose layers read two matrices of one stack, most of them twice."""

    def loss(p: Any, batch: Any, key: Any) -> jax.Array:
        layer = lambda x, w: (x + jnp.tanh(x @ w[0]) @ w[1], None)
        x, _ = jax.lax.scan(layer, p["in"][batch["tokens"]], (p["w"][:-1], p["w"][1:]))
        return (x.astype(jnp.float32) ** 2).mean()

    draw = lambda key: {name: 0.3 * jax.random.normal(key, s) for name, s in {"in": (256, 8), "w": (4, 8, 8)}.items()}
    return jp.Model(init=draw, loss=loss)


def check_to_the_bit(monkeypatch: pytest.MonkeyPatch, model: jp.Model) -> None:
    """Check that gradients are the same as when each is cast to float32 where it is computed."""

    def gradients() -> list[Any]:
        step = jp.make_train_step(model, optax.sgd(0.1), "single,precision=bf16", mesh=jax.devices()[:1])
        _, grads = step.value_and_grad(step.init(jax.random.key(0)), BATCH)
        return jax.tree.leaves(grads)

    narrow = gradients()
    init = access.RuleAccess.__init__

    def with_sums(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.has_one_use = self.has_two_uses = [False] * len(self.has_one_use)

    monkeypatch.setattr(access.RuleAccess, "__init__", with_sums)
    for a, b in zip(narrow, gradients(), strict=True):
        assert a.dtype == b.dtype == np.float32
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("model", [named("llama-tiny", layers=3).model, overlapping()])
def test_gradients_are_the_same_to_the_bit(monkeypatch: pytest.MonkeyPatch, model: jp.Model) -> None:
    check_to_the_bit(monkeypatch, model)


def test_gradients_of_a_tied_embedding_are_the_same_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The update adds those of the lookup and of the logits in float32."""
    check_to_the_bit(monkeypatch, named("llama-tiny", layers=3, tied=True).model)


@pytest.mark.cuda_compiler
def test_the_gradients_of_a_tied_embedding_meet_in_the_update() -> None:
    """Their sum in float32 was written, and read again. So was the first of them, in float32."""
    gpt, rows, length = named("gpt2", layers=1), 2, 256
    step = jp.make_train_step(gpt.model, optax.sgd(0.1), "single,precision=bf16", mesh=target("1xH200").devices)
    costs = Costs.from_hlo(step.compile(gpt.example(rows, length)).as_text())
    table = 4 * gpt.config.vocab * gpt.config.dim
    # Only the update writes so much, and it reads the parameters and two gradients of half their size.
    (update,) = (cost.kernel for cost in costs if cost.kernel.written >= table and not cost.kernel.products)
    assert update.written == pytest.approx(table, rel=0.01)
    assert update.read == pytest.approx(2 * table, rel=0.01)
