"""The generator of programs: what it makes are programs, and it finds faults that are planted, and makes them small."""

import random
import warnings
from typing import Any

import jax
import optax
import pytest

import jaxpar as jp
from fuzz import coupled, generate, losses, parity
from fuzz.couplings import COUPLED_ENDS
from fuzz.minimise import minimal
from fuzz.parity import STRATEGIES
from fuzz.printed import runnable
from fuzz.programs import Block, Draw, Program, Recipe, Sizes
from fuzz.registry import FEATURES, INNOCENT, spelled
from jaxpar.program.primitives import PRIMITIVES
from jaxpar.step import tracing

SIZES = Sizes(8, 8, 8, 8)


@pytest.mark.slow
def test_what_is_drawn_are_programs() -> None:
    """They trace and differentiate; the same seed and number are the same program, another number is another."""
    drawn = set()
    for number in range(12):
        recipe, strategies = generate.program(1, number)
        assert generate.program(1, number) == (recipe, strategies)
        assert {*strategies} <= {*STRATEGIES}
        for program in (recipe.program(), generate.loss(1, number)[0].program()):
            loss = program.loss()
            grads = jax.eval_shape(
                jax.grad(lambda p, b, loss=loss: parity.value(loss, p, b)), program.params(), program.batch()
            )
            assert {name: x.shape for name, x in grads.items()} == program.shapes
            drawn.add(program.source)
    assert len(drawn) == 24


def test_every_strategy_is_one() -> None:
    for strategy, devices in STRATEGIES:
        model = Program(('return (b["x"] @ p["w"]).mean()',), {"w": (8, 8)}, SIZES, 0, {"w": -1}, {"w": -2}).model()
        with warnings.catch_warnings(action="ignore"):
            step = jp.make_train_step(model, optax.sgd(0.1), strategy, mesh=jax.devices()[:devices])
        assert step.mesh.size == devices
        assert parity.family(strategy)


def reversing() -> Recipe:
    """Features by a split matrix, in reverse order, after another block."""
    g = Draw(random.Random(0), SIZES)
    reverse = Block("reverse", ("y = lax.rev(x, (2,))", "x = x + jnp.tanh(y)"))
    end = Block("end", ('return (x * b["y"]).mean()',))
    blocks = spelled(g, FEATURES, "dense"), reverse
    return Recipe(losses.plain_start(SIZES), blocks, end, SIZES, 0, tensor={"enter": -1})


@pytest.mark.slow
def test_a_wrong_rule_is_found_and_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = reversing()
    assert parity.outcome(recipe.program(), "tensor=2", 2).kind == parity.EQUAL
    monkeypatch.setitem(PRIMITIVES, "rev", PRIMITIVES["neg"])  # as if a rank could reverse its own features

    def fails(program: Program) -> bool:
        try:
            return parity.outcome(program, "tensor=2", 2).kind == parity.WRONG
        except parity.Invalid:
            return False

    assert fails(recipe.program())
    small = minimal(recipe, fails, 300)
    assert fails(small)
    assert "rev" in small.source
    assert len(small.lines) <= 4
    assert small.shapes.keys() == {"enter"}
    assert "lax.rev" in runnable(small, "wrong", "tensor=2", 2)


@pytest.mark.slow
def test_a_coupling_in_silence_is_found_and_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    g = Draw(random.Random(1), SIZES)
    blocks = spelled(g, INNOCENT, "alone"), Block("coupling", ("x = x - x.mean(0)",))
    recipe = Recipe(losses.plain_start(SIZES), blocks, Block("end", ("return jnp.square(x).mean()",)), SIZES, 0)
    couples, said = coupled.verdict(recipe.program(), "data=2", 2)
    assert couples
    assert said.kind == parity.REFUSED
    monkeypatch.setattr(tracing, "check_coupling", lambda *args: None)

    def fails(program: Program) -> bool:
        try:
            return coupled.said(program, "data=2", 2).kind == coupled.SILENT and coupled.couples(program)
        except parity.Invalid:
            return False

    small = minimal(recipe, fails, 300)
    assert "x.mean(0)" in small.source
    assert len(small.lines) <= 3


def test_rows_that_are_alone_are_not_taken_for_coupled() -> None:
    """A mean of blocks' means, and sums over counts of blocks, are the whole's."""
    for lines in (('return (x * b["y"]).mean()',), ('return jp.Mean((x * b["y"]).sum(), b["mask"].sum())',)):
        assert not coupled.couples(Program(('x = b["x"] @ p["w"]', *lines), {"w": (8, 8)}, SIZES, 0))
    coupling = ('h = b["x"].mean(1) @ p["w"]', *COUPLED_ENDS["function of a mean"][0].splitlines())
    assert coupled.couples(Program(coupling, {"w": (8, 8)}, SIZES, 0))


@pytest.mark.parametrize(
    ("lines", "kind"),
    [
        (('x = jnp.sort(b["x"] @ p["w"], axis=1)', "return jnp.square(x).mean()"), parity.REFUSED),
        (('return jnp.square(b["x"] @ p["w"]).mean()',), parity.EQUAL),
    ],
)
def test_outcomes(lines: tuple[str, ...], kind: str) -> None:
    assert parity.outcome(Program(lines, {"w": (8, 8)}, SIZES, 0), "context=2", 2).kind == kind


def test_a_raw_error_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ValueError from JAX or Python that jaxpar passes on is a crash."""

    def broken(*args: Any) -> None:
        int("no number")

    monkeypatch.setattr(tracing, "check_coupling", broken)
    program = Program(('return jnp.square(b["x"] @ p["w"]).mean()',), {"w": (8, 8)}, SIZES, 0)
    assert parity.outcome(program, "data=2", 2).kind == parity.CRASHED


def test_messages_alike_are_counted_together() -> None:
    one, two = (
        "context=2 splits dim 1 of f32[8,8] at <program 0a>:7:3 (loss)",
        "context=4 splits dim 2 of f32[4] at <program ff>:9:3 (f)",
    )
    assert parity.category(one) == parity.category(two)
