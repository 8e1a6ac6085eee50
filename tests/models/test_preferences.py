"""The recipe of `docs/recipes/preferences.md`: losses and gradients are those of the paper's equation on one device.

The code is read from the page. The reference here is written by hand, with a Llama that has no adapters.
"""

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxpar as jp
from jaxpar.models import llama

PAGE = Path(__file__).parents[2] / "docs" / "recipes" / "preferences.md"
CONFIG = llama.Config(vocab=61, dim=32, layers=2, heads=4, kv_heads=2, ffn=48, lora=4)
BETA = 0.1


@pytest.fixture(scope="module")
def recipe() -> dict[str, Any]:
    """Return the functions that the page defines."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    code, names = "".join(blocks), {}
    assert len([line for line in code.splitlines() if line.strip()]) <= 60
    exec("".join(blocks[:3:2]).replace("jp.simulate(8)", ""), names)  # the middle block trains
    return names


def pairs() -> dict[str, Any]:
    """Return eight pairs of answers of different lengths to one prompt each."""
    random = np.random.default_rng(0)
    places = np.arange(16)[None, None]
    lengths = random.integers(8, 16, (8, 2, 1))
    mask = ((places >= 5) & (places < lengths)).astype(np.float32)
    return {"tokens": random.integers(61, size=(8, 2, 17)).astype(np.int32), "mask": mask}


def random_params(config: llama.Config, seed: int) -> Any:
    """Return parameters of which none has its initial value: with B at 0, the policy would be its reference."""
    module = nnx.eval_shape(lambda: llama.Llama(config, rngs=nnx.Rngs(0)))
    leaves, tree = jax.tree.flatten(nnx.to_pure_dict(nnx.state(module, nnx.Param)))
    random = np.random.default_rng(seed)
    # Norms around 1, matrices small enough that softmaxes are not saturated.
    arrays = [(x.ndim < 3 and x.shape[-1] == config.dim) + 0.2 * random.normal(size=x.shape) for x in leaves]
    return jax.tree.unflatten(tree, [x.astype(np.float32) for x in arrays])


def log_ratio(config: llama.Config, params: Any, batch: Any) -> jax.Array:
    """Return log p(chosen) - log p(rejected) of each pair, one row and one position at a time."""
    module = nnx.eval_shape(lambda: llama.Llama(config, rngs=nnx.Rngs(0)))
    state = nnx.state(module)
    nnx.replace_by_pure_dict(state, params)
    nnx.update(module, state)
    tokens, answers = batch["tokens"], []
    for i in range(2):
        log_p = jax.nn.log_softmax(module(tokens[:, i, :-1]))
        chosen = jnp.take_along_axis(log_p, tokens[:, i, 1:, None], axis=-1)[..., 0]
        answers.append(jnp.where(batch["mask"][:, i] > 0, chosen, 0).sum(axis=1))
    return answers[0] - answers[1]


def base_of(params: Any) -> Any:
    """Return the parameters without adapters."""
    if not isinstance(params, dict):
        return params
    return {name: base_of(x) for name, x in params.items() if not name.startswith("lora_")}


def assert_equal(found: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    """Assert that losses are equal, and each gradient that is found, to within 1e-5 of its array's largest value."""
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    expected_by_path = {jax.tree_util.keystr(path): x for path, x in jax.tree.leaves_with_path(expected[1])}
    found_by_path = {jax.tree_util.keystr(path): x for path, x in jax.tree.leaves_with_path(found[1])}
    assert found_by_path
    for path, x in found_by_path.items():
        y = np.asarray(expected_by_path[path])
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * np.abs(y).max(), err_msg=path)


def gradients(model: jp.Model, strategy: str, params: Any, trainable: Any) -> tuple[Any, Any]:
    """Return the loss and the gradients of the trained parameters."""
    step = jp.make_train_step(model, None, strategy, mesh=jax.devices()[:4], trainable=trainable)
    state = step.init(jax.random.key(0), params=params)
    return step.value_and_grad(state, pairs())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "tensor=2,fsdp=2"])
def test_adapters_learn_preferences_as_on_one_device(recipe: dict[str, Any], strategy: str) -> None:
    params, batch = random_params(CONFIG, 1), pairs()
    plain = dataclasses.replace(CONFIG, lora=0)

    def equation_7(params: Any) -> jax.Array:
        reference = jax.lax.stop_gradient(log_ratio(plain, base_of(params), batch))
        return -jnp.log(1 / (1 + jnp.exp(-BETA * (log_ratio(CONFIG, params, batch) - reference)))).mean()

    model = jp.from_nnx(lambda rngs: llama.Llama(CONFIG, rngs=rngs), recipe["adapter_loss"])
    expected = jax.jit(jax.value_and_grad(equation_7))(params)
    assert abs(float(expected[0]) - np.log(2)) > 0.01  # the policy is not its reference
    assert_equal(gradients(model, strategy, params, llama.is_adapter), expected)


@pytest.mark.slow
def test_all_weights_learn_preferences_beside_a_frozen_reference(recipe: dict[str, Any]) -> None:
    plain, batch = dataclasses.replace(CONFIG, lora=0), pairs()
    params = {"policy": random_params(plain, 1), "reference": random_params(plain, 2)}

    def equation_7(params: Any) -> jax.Array:
        ratios = [log_ratio(plain, params[name], batch) for name in ("policy", "reference")]
        return -jnp.log(1 / (1 + jnp.exp(-BETA * (ratios[0] - ratios[1])))).mean()

    model = jp.from_nnx(lambda rngs: recipe["Pair"](plain, rngs), recipe["pair_loss"])
    expected = jax.jit(jax.value_and_grad(equation_7))(params)
    assert_equal(gradients(model, "fsdp", params, recipe["is_policy"]), expected)
