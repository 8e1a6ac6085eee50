"""`expert` with the other parts of a run: evaluation, bfloat16, dropout, averages, resuming."""

from pathlib import Path
from typing import Any

import expert_cells as cells
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar as jp

pytestmark = pytest.mark.battery
STRATEGY = "expert=4,fsdp=2"


def build_step(name: str, text: str, tx: Any = None, **options: Any) -> Any:
    devices = 2 if text == "expert=2" else 8
    return jp.make_train_step(
        cells.built(name), tx or optax.sgd(0.1, momentum=0.9), text, mesh=jax.devices()[:devices], **options
    )


def assert_close(got: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """Compare each leaf in units of its largest value."""
    for a, b in zip(jax.tree.leaves(jax.device_get(got)), jax.tree.leaves(jax.device_get(expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(np.abs(b).max(), 1e-30))


def gradients(name: str, text: str, precision: str = "f32") -> Any:
    """Return the loss in evaluation, the loss, and the gradients."""
    step = build_step(name, f"{text},precision={precision}")
    state = step.init(jax.random.key(0))
    found = step.evaluate(state, cells.batch_of())["loss"], *step.value_and_grad(state, cells.batch_of())
    return jax.device_get(found)


@pytest.mark.parametrize("name", ["dropless", "grouped", "einsum"])
def test_evaluation_and_gradients_are_those_of_fsdp(name: str) -> None:
    """Eight replicas either way, of which each routes its own rows."""
    assert_close(gradients(name, STRATEGY), gradients(name, "fsdp=8"))


def test_bfloat16_is_as_near_to_float32_as_under_fsdp() -> None:
    """All experts see all tokens, so that rounding decides nothing; yet gradients differ by a third from float32's."""
    exact = gradients("all_experts", "fsdp=8")
    ours, theirs = (gradients("all_experts", text, "bf16") for text in (STRATEGY, "fsdp=8"))
    error = lambda x, reference: np.abs(x - reference).max() / np.abs(reference).max()
    for reference, x, y in zip(*map(jax.tree.leaves, (exact, ours, theirs)), strict=True):
        assert error(x, reference) <= 1.1 * error(y, reference)


def test_averages_of_parameters_and_resuming_elsewhere(tmp_path: Path) -> None:
    """An average in the optimizer's state goes from layout to layout as if nothing had happened."""
    tx = optax.chain(optax.sgd(0.1, momentum=0.9), optax.ema(0.9))
    staged = "pipe=2,expert=2,fsdp=2,microbatches=2"
    texts = ("expert=2", STRATEGY, f"{staged},zero=1", f"{staged},zero=3", "fsdp=8")
    uninterrupted = build_step("capacity", "fsdp=8", tx)
    state = uninterrupted.init(jax.random.key(0))
    for _ in texts:
        state, _ = uninterrupted(state, cells.batch_of())
    resumed: Any = None
    for number, text in enumerate(texts):
        step = build_step("capacity", text, tx)
        resumed = step.init(jax.random.key(0)) if resumed is None else step.restore(tmp_path / str(number - 1))
        resumed, _ = step(resumed, cells.batch_of())
        step.save(tmp_path / str(number), resumed).wait()
    assert_close(step.params(resumed), uninterrupted.params(state))
    assert_close(resumed.optimizer, state.optimizer)


def test_dropout_in_experts_is_that_of_the_same_rows() -> None:
    """A draw for a slot uses the key of the rank's rows, from before tokens are sent."""

    def dropping(p: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        hidden = jax.nn.relu(x @ p["up"])
        return (hidden * jax.random.bernoulli(key, 0.7, (*hidden.shape[:1], 1))) @ p["down"]

    def loss(params: Any, batch: Any, key: Any) -> jax.Array:
        x = batch["x"]
        gates = jax.nn.softmax(x @ params["router"])
        rows = jnp.einsum("bte,btd->ebtd", gates, x)
        keys = jax.random.split(jax.random.key(0) if key is None else key, 4)
        out = jax.vmap(dropping)(params["experts"], rows.reshape(4, -1, 5), keys)
        return (jnp.square(out.sum(0).reshape(x.shape) - 1).mean((1, 2)) * batch["weight"]).mean()

    def init(key: jax.Array) -> Any:
        draw = lambda i, *shape: jax.random.normal(jax.random.fold_in(key, i), shape)
        return {"router": draw(0, 5, 4), "experts": {"up": draw(1, 4, 5, 7), "down": draw(2, 4, 7, 5)}}

    random = np.random.default_rng(0)
    batch = {
        "x": random.normal(size=(8, 3, 5)).astype("float32"),
        "weight": random.uniform(0.5, 2, 8).astype("float32"),
    }
    model = jp.Model(init=init, loss=loss, rows="independent")
    assert jp.verify(model, STRATEGY, batch).ok
