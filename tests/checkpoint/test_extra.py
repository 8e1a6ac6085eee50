"""Trees that are saved with a state (averages, a second model) restore into another layout and a resumed run."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar as jp

MODEL = jp.Model(
    init=lambda key: {"embedding": jax.random.normal(key, (17, 8)), "shift": jnp.zeros(8)},
    loss=lambda params, batch, key: ((batch["x"] @ params["embedding"] + params["shift"]) ** 2).mean(),
)
BATCH = {"x": np.random.default_rng(0).normal(size=(8, 17)).astype(np.float32)}


def step_of(strategy: str, count: int = 8) -> Any:
    return jp.make_train_step(MODEL, optax.sgd(0.1), strategy, mesh=jax.devices()[:count])


def test_into_another_layout(tmp_path: Path) -> None:
    step = step_of("fsdp")
    state = step.init(jax.random.key(0))
    ema = jax.tree.map(lambda x: 2 * x, step.params(state))
    extra = {"ema": ema, "critic": [np.arange(6, dtype=np.int32), jax.random.key(3)]}
    step.save(tmp_path, state, extra=extra)

    other_step = step_of("zero1", 4)
    restored = other_step.restore(tmp_path)  # waits for the save: it once found no complete checkpoint
    for a, b in zip(jax.tree.leaves(other_step.params(restored)), jax.tree.leaves(step.params(state)), strict=True):
        np.testing.assert_array_equal(a, b)
    like = {"ema": other_step.params(restored)}
    restored_extra = other_step.restore_extra(tmp_path, like)
    jax.tree.map(np.testing.assert_array_equal, restored_extra["ema"], ema)
    for a, b in zip(jax.tree.leaves(restored_extra), jax.tree.leaves(like), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
    numbers, key = other_step.restore_extra(tmp_path, {"critic": [np.zeros(6, np.int32), jax.random.key(0)]})["critic"]
    assert numbers.tolist() == [*range(6)]
    assert jax.random.key_data(key).tolist() == jax.random.key_data(jax.random.key(3)).tolist()
    jp.Checkpoint(tmp_path).verify()

    for wrong_like, message in (
        ({"average": like["ema"]}, r"has no average/embedding, .* beside its state; it has critic/0"),
        ({"critic": [np.zeros(5, np.int32), jax.random.key(0)]}, r"extra/critic/0 is int32\[6\] there and int32\[5\]"),
        ([1], "pass a dict of trees by name"),
    ):
        with pytest.raises(ValueError, match=message):
            other_step.restore_extra(tmp_path, wrong_like)
    assert jnp.isfinite(other_step.evaluate(restored, BATCH)["loss"])


def test_a_trainer_goes_on_with_them(tmp_path: Path) -> None:
    """A hook averages the parameters: a resumed run ends with the average of an uninterrupted one."""

    def run(steps: int, folder: Path, resume: bool = False) -> Any:
        def average(trainer: Any, metrics: Any) -> None:
            params = trainer.step.params(trainer.state)
            trainer.extra["ema"] = jax.tree.map(lambda a, b: 0.5 * a + 0.5 * b, trainer.extra["ema"], params)

        loop = jp.Loop(steps=steps, out=folder, evaluate_every=2, save_every=2, resume=resume, quiet=True)
        begin = lambda trainer: {"ema": trainer.step.params(trainer.state)}
        options = {"held_out": [BATCH], "hooks": [jp.Hook(on_evaluate=average)], "extra": begin}
        trainer = jp.Trainer(MODEL, optax.sgd(0.1), lambda start: iter([BATCH] * 9), "single", loop, **options)
        trainer.run()
        return trainer.extra["ema"]

    uninterrupted = run(4, tmp_path / "uninterrupted")
    run(2, tmp_path / "resumed")
    resumed = run(4, tmp_path / "resumed", resume=True)
    jax.tree.map(np.testing.assert_array_equal, resumed, uninterrupted)
