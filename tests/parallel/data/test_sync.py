"""`sync="step"`: ZeRO-3 accumulates whole gradients and reduces them once per step."""

import jax
import pytest
from cells import check
from test_hpz import SGD, STEPS, batch, model, one_device, trained
from zoo import gpt

import jaxpar as jp
from jaxpar.inspect.ledger import Ledger


@pytest.mark.parametrize(
    ("strategy", "devices"),
    [
        ("data=2,fsdp=2,microbatches=2", 4),
        pytest.param("fsdp=4,microbatches=2,prefetch=1,remat=layer", 4, marks=pytest.mark.battery),
        pytest.param("pipe=2,fsdp=4,microbatches=2", 8, marks=pytest.mark.battery),
        pytest.param("pipe=2,fsdp=4,microbatches=2,stages=cut", 8, marks=pytest.mark.battery),
    ],
)
def test_it_is_as_on_one_device(strategy: str, devices: int) -> None:
    step = jp.make_train_step(model(), SGD, f"{strategy},sync=step", mesh=jax.devices()[:devices])
    check(step, model(), one_device().first, batch(), STEPS, *trained())


def test_two_microbatches_reduce_as_much_as_one_and_gather_twice() -> None:
    untied = gpt()

    def bytes_sent(strategy: str, kind: str) -> int:
        step = jp.make_train_step(untied.model, SGD, strategy)
        return Ledger.from_jaxpr(step.trace(untied.batch), step.mesh).total(kind=kind)

    two_microbatches, one_microbatch = "fsdp=8,microbatches=2,sync=step", "fsdp=8"
    assert bytes_sent(two_microbatches, "reduce-scatter") == bytes_sent(one_microbatch, "reduce-scatter") > 0
    assert bytes_sent(two_microbatches, "all-gather") == 2 * bytes_sent(one_microbatch, "all-gather") > 0


@pytest.mark.parametrize("strategy", ["fsdp=8,zero=2", "ddp", "dp"])
def test_whole_gradients_are_of_zero3(strategy: str) -> None:
    with pytest.raises(ValueError, match=r"sync='step' with .*; give fsdp a size and zero=3, or leave sync out"):
        jp.Strategy.parse(f"{strategy},sync=step")
