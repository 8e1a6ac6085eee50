"""`sync="step"`: ZeRO-3 accumulates whole gradients and reduces them once per step."""

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
GPT: Entry = gpt()


@functools.cache
def step_of(strategy: str) -> Any:
    return jp.make_train_step(GPT.model, SGD, strategy)


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
    step = step_of(f"{strategy},sync=step")
    blocks = step.strategy.microbatches * step.replicas
    reference, key = Reference(GPT.model, jp.Strategy(single=True), blocks), jax.random.key(0)
    grads, params = reference.value_and_grad(key, GPT.batch)[1], reference.train(SGD, key, GPT.batch, 2)
    check(step, GPT.model, initial(GPT.model), GPT.batch, 2, grads, params)


def test_two_microbatches_reduce_as_much_as_one_and_gather_twice() -> None:
    def bytes_sent(strategy: str, kind: str) -> int:
        step = step_of(strategy)
        return Ledger.from_jaxpr(step.trace(GPT.batch), step.mesh).total(kind=kind)

    two_microbatches, one_microbatch = "fsdp=8,microbatches=2,sync=step", "fsdp=8"
    assert bytes_sent(two_microbatches, "reduce-scatter") == bytes_sent(one_microbatch, "reduce-scatter")
    assert bytes_sent(two_microbatches, "all-gather") == 2 * bytes_sent(one_microbatch, "all-gather")


@pytest.mark.parametrize("strategy", ["fsdp=8,zero=2", "ddp", "dp"])
def test_whole_gradients_are_of_zero3(strategy: str) -> None:
    with pytest.raises(ValueError, match=r"sync='step' with .*; give fsdp a size and zero=3, or leave it out"):
        jp.Strategy.parse(f"{strategy},sync=step")
