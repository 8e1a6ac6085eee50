"""`sync="step"`: ZeRO-3 that accumulates whole gradients and reduces them once a step."""

import functools
from typing import Any

import jax
import optax
import pytest
from cells import check, initial
from zoo import Entry, gpt

import jaxpar as jp
from jaxpar.inspect.ledger import Ledger
from jaxpar.parity.parity import Reference

SGD = optax.sgd(0.05, momentum=0.9)
IT: Entry = gpt()


@functools.cache
def step_of(strategy: str) -> Any:
    return jp.make_train_step(IT.model, SGD, strategy)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        "data=2,fsdp=4,microbatches=2",
        pytest.param("fsdp=8,microbatches=2,prefetch=1,remat=layer", marks=pytest.mark.battery),
        pytest.param("pipe=2,fsdp=4,microbatches=2", marks=pytest.mark.battery),
        pytest.param("pipe=2,fsdp=4,microbatches=2,stages=cut", marks=pytest.mark.battery),
    ],
)
@pytest.mark.filterwarnings("ignore:.*layers in 2 x 1 chunks")
def test_it_is_as_on_one_device(strategy: str) -> None:
    once = step_of(f"{strategy},sync=step")
    blocks = once.strategy.microbatches * once.replicas
    one, key = Reference(IT.model, jp.Strategy(single=True), blocks), jax.random.key(0)
    grads, params = one.value_and_grad(key, IT.batch)[1], one.train(SGD, key, IT.batch, 2)
    check(once, IT.model, initial(IT.model), IT.batch, 2, grads, params)


def test_two_microbatches_reduce_as_much_as_one_and_gather_twice() -> None:
    def sent(strategy: str, kind: str) -> int:
        step = step_of(strategy)
        return Ledger.from_jaxpr(step.trace(IT.batch), step.mesh).total(kind=kind)

    two, one = "fsdp=8,microbatches=2,sync=step", "fsdp=8"
    assert sent(two, "reduce-scatter") == sent(one, "reduce-scatter")
    assert sent(two, "all-gather") == 2 * sent(one, "all-gather")


@pytest.mark.parametrize("strategy", ["fsdp=8,zero=2", "ddp", "dp"])
def test_whole_gradients_are_of_zero3(strategy: str) -> None:
    with pytest.raises(ValueError, match=r"sync='step' with .*; give fsdp a size and zero=3, or leave it out"):
        jp.Strategy.parse(f"{strategy},sync=step")
