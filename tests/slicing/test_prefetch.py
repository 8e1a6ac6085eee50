"""Loops over layers that fetch the next layer and give the previous layer's gradient (`InFlight`).

Gradients are the same, microbatch after microbatch. In a step, no product waits for a collective of its iteration, and
there are as many collectives as in the closed form.
"""

import functools
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cells import OneDevice, check
from jax import lax
from zoo import GPT, Entry, gpt

import jaxpar as jp
import jaxpar.strategy
from jaxpar.backend.text import size
from jaxpar.inspect.expected import expected
from jaxpar.inspect.ledger import Ledger
from jaxpar.program import jaxpr as jx
from jaxpar.program.collectives import PRIMITIVES
from jaxpar.program.walk import visit
from jaxpar.slicing.access import WholeAccess
from jaxpar.slicing.slicer import Slicing, slice_program

LAYERS, DIM, ROWS = 4, 6, 5
SGD = optax.sgd(0.05, momentum=0.9)


class Ahead(WholeAccess):
    """Access to whole parameters; `frozen` has no gradient, and `at_once` gives it in its own iteration."""

    def __init__(self, frozen: int, at_once: int) -> None:
        super().__init__(sends=lambda index: (index != at_once, index not in (frozen, at_once)))
        self.frozen = frozen

    def give(self, index: int, cotangent: jax.Array, sliced: bool) -> jax.Array | None:
        return None if index == self.frozen else cotangent


def loss(leaves: list[jax.Array], x: jax.Array) -> jax.Array:
    """Three stacks: with biases, which no backward reads; in reverse; and with pairs of neighbouring layers."""
    w, bias, gain, reverse_w, pairs = leaves
    y, _ = lax.scan(lambda c, p: (jnp.tanh(c @ p[0] + p[1]) * p[2], None), x, (w, bias, gain))
    y, _ = lax.scan(lambda c, p: (jnp.sin(c @ p), None), y, reverse_w, reverse=True)
    y, _ = lax.scan(lambda c, p: (jnp.tanh(c @ p[0]) @ p[1], None), y, (pairs[:-1], pairs[1:]))
    return jnp.sum(y**2)


def params() -> list[jax.Array]:
    shapes = [(DIM, DIM), (DIM,), (DIM,), (DIM, DIM), (DIM, DIM)]
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(k, (LAYERS, *s)) / 2 for k, s in zip(keys, shapes, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("remat", "frozen", "at_once"), [("none", -1, -1), ("layer", -1, -1), ("layer", 0, 2), ("none", 4, 1)]
)
def test_gradients_of_two_microbatches(remat: str, frozen: int, at_once: int) -> None:
    access, blocks = Ahead(frozen, at_once), jax.random.normal(jax.random.key(1), (2, ROWS, DIM))
    program = slice_program(jx.trace(loss, params(), blocks[0])[0], Slicing(params(), [None] * 5, remat=remat))
    assert [stack.reverse for stack in program.stacks] == [False, True, False]

    @jax.jit
    def run(leaves: list[jax.Array]) -> Any:
        flights, grads = program.in_flight(access, leaves), [None] * len(leaves)
        for block in blocks:
            _, tape = program.forward(access, leaves, [block], True, flights)
            grads = program.backward(access, leaves, tape, {0: jnp.ones(())}, grads, flights)
        return program.with_pending_gradients(access, flights, grads)

    theirs = jax.grad(lambda leaves: sum(loss(leaves, block) for block in blocks))(params())
    for i, (a, b) in enumerate(zip(run(params()), theirs, strict=True)):
        assert (a is None) == (i == frozen)
        if a is not None:
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_a_stack_that_the_loss_does_not_differentiate_begins_again() -> None:
    """The first layer of the next microbatch got the last layer's weights."""

    def beside(leaves: list[jax.Array], x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y, _ = lax.scan(lambda c, w: (jnp.sin(c @ w), None), x, leaves[0])
        return jnp.sum(x @ leaves[1][0]), y

    leaves, x = params()[::3], jnp.ones((ROWS, DIM))
    program = slice_program(jx.trace(beside, leaves, x)[0], Slicing(leaves, [None] * 2))
    access = Ahead(-1, -1)
    flights = program.in_flight(access, leaves)
    for _ in range(2):
        (_, value), tape = program.forward(access, leaves, [x], True, flights)
        np.testing.assert_allclose(value, beside(leaves, x)[1], rtol=1e-5)
        grads = program.backward(access, leaves, tape, {0: jnp.ones(())}, [None] * 2, flights)
        assert program.with_pending_gradients(access, flights, grads)[0] is None


@functools.cache
def tiny_gpt() -> Entry:
    return gpt()


@functools.cache
def step_of(strategy: str) -> Any:
    return jp.make_train_step(tiny_gpt().model, SGD, strategy)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        "pipe=2,fsdp=4,microbatches=4",
        pytest.param("pipe=2,fsdp=2,data=2,zero=2,microbatches=2", marks=pytest.mark.battery),
    ],
)
@pytest.mark.filterwarnings("ignore:.*layers in 2 x 1 chunks")
def test_ticks_of_a_pipeline_are_as_on_one_device(strategy: str) -> None:
    """Three layers on two ranks, so that one is padding, and idle ticks, whose gradients count nothing.

    A step gathers two more layers than without prefetch, where forwards begin and where they end. It reduces one more.
    """
    prefetching, plain = (step_of(f"{strategy},prefetch={n}") for n in (1, 0))
    device, blocks = OneDevice(tiny_gpt().model), prefetching.strategy.microbatches * prefetching.replicas
    expected_values = device.train(SGD, tiny_gpt().batch, blocks, 2)
    check(prefetching, tiny_gpt().model, device.first, tiny_gpt().batch, 2, *expected_values)
    counts = [
        Ledger.from_jaxpr(step.trace(tiny_gpt().batch), step.mesh).by("kind", value="count")
        for step in (prefetching, plain)
    ]
    sharded = len(
        [leaf for leaf in prefetching.layout.leaves if leaf.path.startswith("layers") and leaf.dim is not None]
    )
    more = {kind: counts[0][kind] - counts[1][kind] for kind in ("all-gather", "reduce-scatter", "collective-permute")}
    gathered = 2 * sharded * (prefetching.strategy.zero == 3)
    assert more == {"all-gather": gathered, "reduce-scatter": sharded, "collective-permute": 0}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*layers in 2 x 1 chunks")
def test_what_a_phase_of_ticks_needs_is_gathered_behind_the_one_before() -> None:
    """XLA gathered it with the first phase's weights, and held it through all ticks: 0.7 GB of a 13B model's layer."""
    step = step_of("pipe=2,fsdp=4,microbatches=4,prefetch=1")
    eqns = [eqn for eqn, _ in visit(step.trace(tiny_gpt().batch).eqns) if "mesh" in eqn.params]
    mapped = jx.opened(eqns[0].params["jaxpr"])[0]
    phase = next(eqn for eqn in mapped.eqns if eqn.primitive.name == "scan")
    after_phase = jx.depends(mapped.eqns, phase.outvars)
    gathers = [eqn for eqn in mapped.eqns if PRIMITIVES.get(eqn.primitive.name) == "all-gather"]
    layer = [leaf for leaf in step.layout.leaves if leaf.path.startswith("layers") and leaf.dim is not None]
    assert sum(all(v in after_phase for v in eqn.invars) for eqn in gathers) == len(layer) == 7


def test_pipelines_whose_ticks_run_other_layers_are_refused() -> None:
    for more in ("schedule=gpipe", "schedule=zb-h1", "chunks=2", "stages=cut"):
        with pytest.raises(ValueError, match=r"prefetch=1 in .*; use schedule=1f1b with chunks=1 and stages of layers"):
            step_of(f"pipe=2,fsdp=4,microbatches=2,{more},prefetch=1")


def sent(strategy: str, kind: str) -> int:
    step = step_of(strategy)
    written = Ledger.from_jaxpr(step.trace(tiny_gpt().batch), step.mesh).by("kind", "axes", "dtype", value="count")
    assert written == expected(step, tiny_gpt().batch).by("kind", "axes", "dtype", value="count")
    return sum(n for key, n in written.items() if key[0] == kind)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "gathers", "scatters"),
    [
        ("fsdp=8", 1, 1),
        ("data=2,fsdp=4,microbatches=2", 1, 1),
        ("fsdp=8,zero=2,microbatches=2", 0, 1),
    ],
)
def test_a_step_sends_one_layer_more(strategy: str, gathers: int, scatters: int) -> None:
    """It gathers the first layer of a microbatch that does not come, and reduces zeros before the first gradient."""
    sharded = [leaf for leaf in step_of(strategy).layout.leaves if leaf.path.startswith("layers") and leaf.dim]
    assert len(sharded) == 5
    for kind, layers in ("all-gather", gathers), ("reduce-scatter", scatters):
        prefetching, plain = (sent(f"{strategy},prefetch={n}", kind) for n in (1, 0))
        assert prefetching - plain == layers * len(sharded)


def kinds(eqns: Any) -> set[str]:
    return {PRIMITIVES.get(eqn.primitive.name) or eqn.primitive.name for eqn, _ in visit(eqns)}


def reached(body: Any, first: str, then: str) -> bool:
    """Whether, in a loop's body, an equation of kind `then` depends on one of kind `first`."""
    sources = [v for eqn in body.eqns if first in kinds([eqn]) for v in eqn.outvars]
    marked = jx.depends(body.eqns, sources)
    reads = [v for eqn in body.eqns if then in kinds([eqn]) for v in eqn.invars if not jx.is_literal(v)]
    return any(v in marked for v in reads)


@pytest.mark.parametrize(("prefetch", "waits"), [(0, True), (1, False)])
def test_no_product_waits_for_the_weights_of_its_iteration(prefetch: int, waits: bool) -> None:
    """A reduce-scatter waits for no product of its iteration either: compilers can overlap both."""
    trace = step_of(f"fsdp=8,microbatches=2,prefetch={prefetch}").trace(tiny_gpt().batch)
    scans = [jx.opened(eqn.params["jaxpr"])[0] for eqn, _ in visit(trace.eqns) if eqn.primitive.name == "scan"]
    forward, backward = (
        body for body in scans if "all-gather" in (body_kinds := kinds(body.eqns)) and "scan" not in body_kinds
    )
    assert reached(forward, "all-gather", "dot_general") == waits
    assert reached(backward, "all-gather", "dot_general") == waits
    assert reached(backward, "dot_general", "reduce-scatter") == waits


def test_what_replicas_sum_is_sent_between_other_products() -> None:
    """XLA let an iteration's reduce-scatter and gather wait, and overlapped the all-reduce with more than it needs.

    A step of 8 layers of a 13B model took 0.292 s, and takes 0.254 s in this order.
    """
    trace = step_of("data=2,fsdp=4,prefetch=1").trace(tiny_gpt().batch)
    scans = [jx.opened(eqn.params["jaxpr"])[0] for eqn, _ in visit(trace.eqns) if eqn.primitive.name == "scan"]
    backward = next(body for body in scans if {"all-reduce", "reduce-scatter"} <= kinds(body.eqns))
    one_by_one = ("reduce-scatter", "dot_general", "all-gather", "dot_general", "all-reduce")
    assert all(reached(backward, first, then) for first, then in itertools.pairwise(one_by_one))
    assert not reached(backward, "dot_general", "reduce-scatter")


def test_by_itself_it_is_on_where_what_loops_send_leaves_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxpar.strategy.strategy, "leaves_host", lambda across, axes: across in axes)
    hsdp = "data=2,fsdp=4"
    on = {
        (text, across)
        for text in (
            "fsdp=8",
            "data=2,fsdp=4",
            "data=2,fsdp=4,microbatches=2",
            "data=8",
            "pipe=2,fsdp=4,microbatches=2",
        )
        for across in ("data", "fsdp")
        if across in text and jp.Strategy.parse(text).prefetches(across)
    }
    assert on == {("fsdp=8", "fsdp"), (hsdp, "fsdp"), (hsdp, "data"), (f"{hsdp},microbatches=2", "fsdp")}


def test_explain_says_what_is_held_besides() -> None:
    explanation = step_of("fsdp=8,microbatches=2,prefetch=1").explain(tiny_gpt().batch)
    layer = size(4 * (2 * GPT.dim**2 + 3 * GPT.dim * GPT.ffn))  # key, value and norms are too small to be sharded
    sentence = (
        f"the weights of the next are gathered, {layer} and the gradients of the one before are reduced, {layer};"
    )
    assert any(f"prefetch=1: while a layer runs, {sentence}" in remark for remark in explanation.remarks)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "fsdp=8,prefetch=2",
            "use one of auto, 0 or 1 (two layers ahead overlap no better than one, and take more memory: see",
        ),
        ("fsdp=8,prefetch=true", "prefetch=True is unknown; use one of auto, 0 or 1"),
        (
            "dp,prefetch=1",
            "prefetch=1 with data=-1,server=true: a server has no shards to gather; use prefetch=0, or leave prefetch ",
        ),
    ],
)
def test_strategies_that_cannot_be(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        jp.Strategy.parse(text)
    jp.Strategy.parse(text.partition(",prefetch")[0] + ",prefetch=0")
