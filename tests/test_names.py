"""What a shell and a notebook show: names that are for users, one line for each thing, and not a word besides."""

import re
import rlcompleter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxpar as jp
from jaxpar.inspect.check import check

PAGE = (Path(__file__).parents[1] / "docs" / "api" / "step.md").read_text()


@pytest.fixture(scope="module")
def things() -> dict[str, Any]:
    def loss(params: Any, batch: Any, key: Any) -> jax.Array:
        return jax.numpy.square(batch @ params["w"]).mean()

    model, batch = jp.Model(lambda key: {"w": jax.random.normal(key, (8, 8))}, loss), np.ones((8, 8), np.float32)
    step = jp.make_train_step(model, optax.sgd(0.1), "zero2")
    return {
        "jaxpar": jp,
        "collectives": jp.collectives,
        "model": model,
        "step": step,
        "server": jp.make_train_step(model, optax.sgd(0.1), "dp"),
        "state": step.init(jax.random.key(0)),
        "layout": step.layout,
        "explanation": step.explain(batch),
        "report": jp.verify(model, "zero2", batch),
        "proof": check(step, batch),
        "strategy": step.strategy,
    }


def test_shown_in_one_line(things: dict[str, Any]) -> None:
    long = {name: repr(x) for name, x in things.items() if len(repr(x)) > 200 or "\n" in repr(x) or " at 0x" in repr(x)}
    assert not long
    assert repr(things["step"]) == "TrainStep('fsdp=-1,zero=2' on 8 x cpu)"
    assert repr(things["explanation"]) == "Explanation('fsdp=-1,zero=2' on 8 x cpu; print it)"


def test_completion_is_quiet(things: dict[str, Any], capfd: pytest.CaptureFixture) -> None:
    for name, thing in things.items():
        completer = rlcompleter.Completer({name: thing})
        assert completer.complete(f"{name}.", 0)
        repr(thing)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["step", "server"])
def test_a_step_offers_what_its_page_documents(things: dict[str, Any], name: str) -> None:
    members = re.search(r"members: \[init, ([^]]*)\]", PAGE)
    assert members
    documented = {"init", *members[1].split(", ")} - {"__call__"}
    read = {"layout", "mesh", "strategy", "replicas", "schedule"}
    assert {*dir(things[name])} == documented | read
    for attribute in dir(things[name]):
        getattr(things[name], attribute)


def test_collectives_offer_no_files() -> None:
    assert "all_reduce" in dir(jp.collectives)
    assert not [name for name in dir(jp.collectives) if isinstance(getattr(jp.collectives, name), type(jp))]
