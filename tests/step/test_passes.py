"""The passes over a traced loss."""

import jax
import optax
import pytest

import jaxpar as jp
from jaxpar.models import named
from jaxpar.step import passes
from jaxpar.step.passes import LossPass, Notes, PlacedLoss, Setting

BATCH = {"tokens": jax.ShapeDtypeStruct((8, 33), "int32")}


def traced(monkeypatch: pytest.MonkeyPatch, name: str, strategy: str, count: int) -> list[tuple[str, PlacedLoss]]:
    """The losses after each pass that applies, with its name."""
    seen = []

    def noted(one: LossPass) -> LossPass:
        def rewrite(how: Setting, loss: PlacedLoss, notes: Notes) -> PlacedLoss:
            seen.append((one.name, one.rewrite(how, loss, notes)))
            return seen[-1][1]

        return LossPass(one.name, one.applies, rewrite)

    monkeypatch.setattr(passes, "PASSES", tuple(map(noted, passes.PASSES)))
    jp.make_train_step(named(name).model, optax.sgd(0.1), strategy, jax.devices()[:count]).traced(BATCH)
    return seen


@pytest.mark.parametrize(
    ("name", "strategy", "applied"),
    [
        ("llama-tiny", "data=2", {"take attention", "roll", "chunk"}),
        ("llama-tiny", "context=2,tensor=2", {"take attention", "roll", "split", "localise", "chunk"}),
        ("mixtral-tiny", "expert=2,tensor=2", {"take attention", "roll", "exchange", "localise", "chunk"}),
        (
            "llama-tiny",
            "data=2,microbatches=2,concurrent=2,precision=fp8",
            {"take attention", "roll", "chunk", "double", "quantise"},
        ),
    ],
)
def test_a_pass_reads_the_parts_that_its_placements_say(
    monkeypatch: pytest.MonkeyPatch, name: str, strategy: str, applied: set[str]
) -> None:
    """A later pass finds the split dims by the placements: where they are not the program's, it splits another dim."""
    seen = traced(monkeypatch, name, strategy, 2 if strategy.startswith("data") else 4)
    assert {each for each, _ in seen} == applied
    for each, loss in seen:
        shapes = [v.aval.shape for v in loss.flat.invars[: len(loss.placements)]]
        assert shapes == [leaf.logical for leaf in loss.placements], each
    assert [leaf.logical for leaf in loss.placements] == [leaf.local.logical for leaf in seen[0][1].placements]
