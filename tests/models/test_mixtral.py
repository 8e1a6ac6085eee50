"""Mixtral and Qwen3's mixtures: parity under strategies, and the load of each expert."""

from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxpar as jp
from jaxpar.models import named

NARROW = {"vocab": 61, "dim": 24, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 40}


@pytest.mark.parametrize(("name", "active"), [("mixtral-8x7b", 12.9e9), ("qwen3-30b-a3b", 3.3e9)])
def test_parameters_that_a_token_meets_are_as_published(name: str, active: float) -> None:
    config = named(name).config
    assert config.active_parameters == pytest.approx(active, rel=0.02)
    unchosen = config.layers * 3 * config.dim * config.ffn * (config.experts - config.chosen)
    assert named(name).parameters - config.active_parameters == unchosen


def batch(masked: bool = False) -> dict[str, Any]:
    """Return 16 rows of 12 tokens, optionally with a random mask."""
    random = np.random.default_rng(0)
    tokens: dict[str, Any] = {"tokens": random.integers(61, size=(16, 12)).astype(np.int32)}
    if masked:
        tokens["mask"] = (random.uniform(size=(16, 11)) < 0.6).astype(np.float32)
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "sizes"),
    [
        ("fsdp=2,tensor=2,remat=layer", {"qk_norm": True, "z": 0.001}),
        pytest.param("pipe=2,fsdp=2,zero=1,microbatches=4", {"capacity": 0.8}, marks=pytest.mark.battery),
    ],
)
def test_strategies_train_it_as_one_device_does(strategy: str, sizes: dict[str, Any]) -> None:
    report = jp.verify(
        named("mixtral-tiny", **NARROW, **sizes).model, strategy, batch(masked=True), mesh=jax.devices()[:4]
    )
    assert report.ok, report


@pytest.mark.battery
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("strategy", ["pipe=2,expert=4,microbatches=2", "expert=2,fsdp=4"])
def test_the_load_of_each_expert_is_that_of_one_device(strategy: str, masked: bool) -> None:
    loads = {}
    for text in ("single", strategy):
        model = named("mixtral-tiny", **NARROW).model
        step = jp.make_train_step(model, optax.sgd(0.1), text, mesh=jax.devices()[: 1 if text == "single" else None])
        _, metrics = step(step.init(jax.random.key(0)), batch(masked))
        loads[text] = [float(metrics[f"load_{e}"]) for e in range(8)]
    assert sum(loads["single"]) == pytest.approx(8, rel=1e-5)
    assert len({round(load, 3) for load in loads["single"]}) > 4
    np.testing.assert_allclose(loads[strategy], loads["single"], rtol=1e-5)


@pytest.mark.slow
def test_a_rematerialised_layer_with_a_loop_inside_is_traced() -> None:
    """A loop inside a layer once made jaxpar inline the layer and take attention's derivative for its kernel."""
    step = jp.make_train_step(named("mixtral-tiny", **NARROW).model, optax.sgd(0.1), "zero3,remat=layer")
    step.trace(batch())
