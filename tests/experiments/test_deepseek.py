"""DeepSeek-V3: sizes, parity under strategies, and biases that balance its experts."""

from typing import Any

import deepseek
import jax
import numpy as np
import optax
import pytest
from deepseek import named

import jaxpar as jp

NARROW = {
    "vocab": 61, "dim": 24, "layers": 3, "heads": 4, "query_rank": 20, "rank": 12, "head_dim": 8, "rope_dim": 4,
    "value_dim": 6, "ffn": 40, "expert_ffn": 16, "experts": 8, "chosen": 3,
}  # fmt: skip


@pytest.mark.parametrize("name", deepseek.SIZES)
def test_active_parameters_lack_the_experts_that_are_not_chosen(name: str) -> None:
    config = deepseek.SIZES[name]
    layer = 3 * config.dim * config.expert_ffn * (config.experts - config.chosen)
    assert config.parameters - config.active_parameters == (config.layers - config.dense) * layer
    if name == "deepseek-v3":
        assert config.active_parameters == pytest.approx(37e9, rel=0.02)  # the paper, section 4.2
        assert config.parameters == 671_026_419_200  # 671 B in the paper; the sum over the shapes of its config.json
    params, _ = jax.eval_shape(named(name).model.create, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == config.parameters


def batch(length: int = 12) -> dict[str, Any]:
    random = np.random.default_rng(0)
    return {
        "tokens": random.integers(61, size=(16, length + 1)).astype(np.int32),
        "mask": (random.uniform(size=(16, length)) < 0.6).astype(np.float32),
    }


CELLS = {
    "fsdp": 8,
    "expert=2,fsdp=2,tensor=2": 8,
    "pipe=2,expert=2,fsdp=2,microbatches=2": 8,
    "pipe=2,tensor=2,microbatches=2,schedule=zb-h1": 4,
    "context=2,fsdp=2": 4,
    "zero2,microbatches=2,remat=layer": 8,
}


@pytest.mark.battery
@pytest.mark.parametrize(("strategy", "devices"), CELLS.items(), ids=lambda x: str(x).replace(",", "-"))
def test_strategies_train_it_as_one_device_does(strategy: str, devices: int) -> None:
    """The routers' biases too, whose gradient is their load."""
    model = named("deepseek-tiny", **NARROW).model
    found = jp.verify(model, strategy, batch(), mesh=jax.devices()[:devices])
    assert found.ok, found


def test_biases_move_against_the_load_and_weights_by_the_optimizer() -> None:
    tx = deepseek.balanced(optax.sgd(0.1), rate=0.25)
    params = {"layers": {"ffn": {"bias": np.zeros((1, 4)), "router": {"kernel": np.ones((1, 2, 4))}}}}
    load = np.array([[0.1, -0.1, 0.0, 0.02]])  # above the mean
    grads = {"layers": {"ffn": {"bias": load, "router": {"kernel": np.ones((1, 2, 4))}}}}
    updates, _ = tx.update(grads, tx.init(params), params)
    np.testing.assert_allclose(updates["layers"]["ffn"]["bias"], [[-0.25, 0.25, 0, -0.25]])
    np.testing.assert_allclose(updates["layers"]["ffn"]["router"]["kernel"], -0.1)


@pytest.mark.slow
def test_a_step_leaves_the_biases_to_the_model_whatever_the_optimizer() -> None:
    """AdamW moved them by its learning rate, and decayed them, without a word."""
    step = jp.make_train_step(named("deepseek-tiny", **NARROW).model, optax.adamw(0.1, weight_decay=0.9), "fsdp")
    shape = jax.eval_shape(step.init, jax.random.key(0)).params
    params = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), shape)
    update = jax.jit(lambda x: step.optimizer.update(x, step.optimizer.init(x), x, value=0.0)[0])
    updates = update(params)
    moved = {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(updates)}
    biases = {path: x for path, x in moved.items() if "bias" in path}
    assert biases
    for path, x in moved.items():
        np.testing.assert_allclose(x, -0.001 if path in biases else -0.19, rtol=1e-3)


def test_sizes_that_do_not_fit_are_named() -> None:
    for change, words in (
        ({"dense": 5}, "dense=5 of layers=5 leave no mixture"),
        ({"rope_dim": 7}, "rope_dim=7 is odd"),
        ({"value_dim": 64}, "value_dim=64 is more than head_dim"),
        ({"groups": 3}, "groups=3, group_limit=2 of experts=16"),
        ({"chosen": 9}, "chosen=9 of the 8 experts"),
        ({"balance": -1.0}, "balance=-1.0"),
    ):
        with pytest.raises(ValueError, match=words):
            named("deepseek-tiny", **change)
