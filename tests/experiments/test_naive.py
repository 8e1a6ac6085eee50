"""`experiments/naive`: each strategy in plain JAX equals one device, and jaxpar's step stores and sends what it does.

jaxpar's collectives are those of its traced step (`tests/inspect/test_known_cost.py` has the compiled ones), the naive
ones those of the compiled program.
"""

import importlib
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import optax
import pytest
from rendezvous import unordered

import jaxpar as jp
from jaxpar.inspect.ledger import Ledger
from jaxpar.inspect.transfers import rehearse

NAIVE = Path(__file__).parents[2] / "experiments" / "naive"
sys.path.insert(0, str(NAIVE))
import compare  # noqa: E402
import model  # noqa: E402

pytestmark = pytest.mark.xdist_group("naive")  # the training on one device is compiled once

STRATEGIES = {
    "ddp": "ddp",
    "zero1": "zero1,microbatches=4",
    "zero2": "zero2,microbatches=4",
    "zero3": "zero3",
    "hsdp": "hsdp",
    "gpipe": "pipe=8,microbatches=32,schedule=gpipe",
    "one_f_one_b": "pipe=8,microbatches=32",
    "tensor": "tensor=8",
}
RULES = {"query": -2, "key": -2, "value": -2, "out": -3, "up": -1, "down": -2, "embed": -2, "head": -1}
# Elements that jaxpar's step sends more than the naive one. The total and the count of the loss, where the naive
# devices keep their parts of it; `tensor` has the same loss everywhere, and
LOSS = 2
MORE = {
    "ddp": {("all-reduce", "data"): LOSS},
    **{name: {("all-reduce", "fsdp"): LOSS} for name in ("zero1", "zero2", "zero3")},
    "hsdp": {("all-reduce", "data+fsdp"): LOSS},
    **{name: {("all-reduce", "pipe"): LOSS} for name in ("gpipe", "one_f_one_b")},
    # gathers the largest logits of the ranks, of which the naive one takes the maximum by an all-reduce of as many
    # elements as it lacks in the backward of `log_softmax`, written by hand there.
    "tensor": {("all-gather", "tensor"): model.N * model.B * model.T},
}


def jaxpar_step(name: str) -> Any:
    ours = jp.Model(init=model.init, loss=lambda params, tokens, key: model.loss(params, tokens))
    optimizer = optax.sgd(model.RATE, model.MOMENTUM)
    return jp.make_train_step(ours, optimizer, STRATEGIES.get(name, name), rules=RULES if name == "tensor" else None)


def stored(tree: Any) -> int:
    """Bytes on the first device."""
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def elements(ledger: Ledger) -> dict[tuple[str, str], int]:
    assert {one.dtype for one in ledger} <= {"float32"}
    return {(kind, "+".join(axes)): n // 4 for (kind, axes), n in ledger.by("kind", "axes").items()}


def equal_to_one_device(naive: Any, **options: Any) -> str:
    """The text of a naive strategy's program, after a training that equals one device's."""
    # Compiled once: for its text and for the training `compare` would compile it twice.
    program = naive.step.lower(*naive.start(compare.first()), compare.data(0)).compile()
    lowered = SimpleNamespace(compile=lambda: program)
    losses, worst, text = compare.compare(naive.start, program, lower=lambda *_: lowered, **options)
    assert worst <= compare.TOLERANCE
    assert all(many == pytest.approx(one, rel=1e-6) for one, many in losses)
    assert losses[-1][0] < losses[0][0]
    assert unordered(text) == []
    return text


@pytest.mark.parametrize("name", STRATEGIES)
def test_equals_one_device_and_costs_what_jaxpar_does(name: str) -> None:
    naive = importlib.import_module(name)
    whole = getattr(naive, "whole", compare.unflatten if name in ("zero2", "zero3", "hsdp") else lambda tree: tree)
    text, step = equal_to_one_device(naive, whole=whole), jaxpar_step(name)
    found = elements(Ledger.from_hlo(text, naive.mesh))
    ours = elements(Ledger.from_jaxpr(step.trace(compare.data(0)), step.mesh))
    assert {key: n - found.get(key, 0) for key, n in ours.items() if n != found.get(key)} == MORE[name]
    assert found.keys() <= ours.keys()
    params, momentum = naive.start(compare.first())
    assert (stored(params), stored(momentum)) == (step.layout.bytes["params"], step.layout.bytes["optimizer"])


def test_the_server_equals_one_device_and_moves_what_jaxpars_does(monkeypatch: pytest.MonkeyPatch) -> None:
    naive = importlib.import_module("server")
    _, worst, text = compare.compare(naive.start, naive.step, lower=naive.lower)
    assert worst <= compare.TOLERANCE
    assert not Ledger.from_hlo(text, naive.mesh)

    moved, put = [], jax.device_put

    def recorded(tree: Any, to: Any) -> Any:
        """Counts the elements that other devices get from the server, or it from them."""
        if to is naive.server:
            others = [s.data.size for x in jax.tree.leaves(tree) for s in x.addressable_shards if s.device != to]
        else:
            others = [(model.N - 1) * math.prod(to.shard_shape(x.shape)) for x in jax.tree.leaves(tree)]
        moved.append(sum(others))
        return put(tree, to)

    state = naive.start(compare.first())
    monkeypatch.setattr(jax, "device_put", recorded)
    naive.step(*state, compare.data(0))
    monkeypatch.undo()
    weights, rows, results = moved
    others = model.N - 1
    ours = {exchange.what: exchange.found // 4 for exchange in rehearse(jaxpar_step("dp"), compare.data(0)).transfers}
    assert ours == {
        "rows of the batch": rows,
        "weights": weights + 3 * others,  # and the step's number, and a key of two words
        "losses": 2 * others,  # totals and counts; a naive replica computes its own part of the loss,
        "gradients of the losses": others,  # so that it needs nothing sent back
        "gradients": results - others,  # with which it sends its part of the loss
    }


# Of a step. jaxpar's send otherwise: gathers beside the ring, slots that may overflow, both ways in every slot.
ALONE = {
    "context": {"collective-permute": 2 * (model.N - 1) * model.L, "all-reduce": 1},
    "expert": {"all-to-all": 4 * model.L, "all-reduce": 1},
    "zero_bubble": {"collective-permute": 2 * (32 + model.N - 1), "all-reduce": 1},
}


@pytest.mark.parametrize("name", ALONE)
def test_equals_one_device_in_so_many_collectives(name: str) -> None:
    naive = importlib.import_module(name)
    text = equal_to_one_device(naive, loss=getattr(naive, "loss", model.loss))
    ledger = Ledger.from_hlo(text, naive.mesh)
    assert {kind: sum(one.count or 0 for one in ledger if one.kind == kind) for kind in ALONE[name]} == ALONE[name]
    assert {one.kind for one in ledger} == ALONE[name].keys()


def test_the_longest_has_60_lines() -> None:
    lines = {path.stem: len(path.read_text().splitlines()) for path in NAIVE.glob("*.py")}
    assert lines.keys() == {*STRATEGIES, *ALONE, "server", "model", "compare"}
    assert max(lines.pop("model"), lines.pop("compare")) <= 100
    assert max(lines.values()) <= 60


@pytest.mark.parametrize("worst", [2e-5, 9e-6, math.nan])
def test_a_script_says_whether_it_equals_one_device(
    worst: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    text = "%psum.1 = f32[2]{0} all-reduce(%a), %x = f32[2]{0} all-reduce(%b), all-reduce=1"
    monkeypatch.setattr(compare, "compare", lambda *strategy: ([(4.5, 4.25)], worst, text))
    with pytest.raises(SystemExit) as end:
        compare.main()
    assert bool(end.value.code) == (worst != 9e-6)
    assert "4.500000  4.250000" in (printed := capsys.readouterr().out)
    assert "{'all-reduce': 2}" in printed
