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
    """Return the loss after each pass that applies, with the name of the pass."""
    losses = []

    def recorded(loss_pass: LossPass) -> LossPass:
        def rewrite(setting: Setting, loss: PlacedLoss, notes: Notes) -> PlacedLoss:
            losses.append((loss_pass.name, loss_pass.rewrite(setting, loss, notes)))
            return losses[-1][1]

        return LossPass(loss_pass.name, loss_pass.applies, rewrite)

    monkeypatch.setattr(passes, "PASSES", tuple(map(recorded, passes.PASSES)))
    jp.make_train_step(named(name).model, optax.sgd(0.1), strategy, jax.devices()[:count]).traced(BATCH)
    return losses


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
    """A later pass finds the split dims by the placements: if they are not the program's, it splits another dim."""
    losses = traced(monkeypatch, name, strategy, 2 if strategy.startswith("data") else 4)
    assert {pass_name for pass_name, _ in losses} == applied
    for pass_name, loss in losses:
        shapes = [v.aval.shape for v in loss.flat.invars[: len(loss.placements)]]
        assert shapes == [leaf.logical for leaf in loss.placements], pass_name
    assert [leaf.logical for leaf in loss.placements] == [leaf.local.logical for leaf in losses[0][1].placements]
