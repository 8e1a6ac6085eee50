"""Every state comes back bit by bit, under the layout that it was saved in and under any other."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar as jp
from jaxpar.checkpoint.checkpoints import Checkpoints


class Net(nnx.Module):
    """A net with BatchNorm, dropout's random streams, and a leaf (130 x 127) that no axis divides."""

    def __init__(self, rngs: nnx.Rngs):
        self.inner = nnx.Linear(12, 130, rngs=rngs)
        self.norm = nnx.BatchNorm(130, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.outer = nnx.Linear(130, 127, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        low = self.inner.kernel.dtype
        x = self.drop(nnx.relu(self.norm(self.inner(x.astype(low)))))
        return self.outer(x.astype(low)).astype(np.float32)


def net() -> jp.Model:
    return jp.from_nnx(lambda rngs: Net(rngs), lambda module, batch: (module(batch["x"]) ** 2).mean())


def batch() -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(0).normal(size=(16, 12)).astype(np.float32)}


def bits(state: object) -> list[bytes]:
    return [
        np.asarray(jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x).tobytes()
        for x in jax.tree.leaves(state)
    ]


@pytest.mark.parametrize("strategy", ["single", "dp", "zero1,precision=bf16", "fsdp,precision=f16"])
def test_a_state_comes_back_bit_by_bit(strategy: str, tmp_path: Path) -> None:
    step = jp.make_train_step(net(), optax.chain(optax.clip(1.0), optax.adamw(1e-2)), strategy)
    state, _ = step(step.init(jax.random.key(3)), batch())
    with Checkpoints(tmp_path, step, {"seed": 3}) as saves:
        assert saves.latest is None
        saves.save(1, state)
        expected = bits(state)
        state, metrics = step(state, batch())  # while the state is being written, a step reuses its memory
    trained_bits = bits(state)
    with Checkpoints(tmp_path, step, {"seed": 3}) as saves:
        assert saves.latest == 1
        restored = saves.restore()
    assert bits(restored) == expected
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(restored), strict=True):
        assert new.sharding.is_equivalent_to(old.sharding, old.ndim)
    restored, again = step(restored, batch())
    assert bits(restored) == trained_bits
    assert float(again["loss"]) == float(metrics["loss"])


def test_what_is_still_being_saved_is_waited_for(tmp_path: Path) -> None:
    """It was called no complete checkpoint, where another step of the program had begun to save it."""
    saving, restoring = (jp.make_train_step(net(), optax.sgd(0.1), text) for text in ("ddp", "fsdp"))
    state = saving.init(jax.random.key(3))
    saving.save(tmp_path, state)
    restored = restoring.restore(tmp_path)
    assert all(
        np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(saving.params(state)), jax.tree.leaves(restoring.params(restored)), strict=True)
    )


def test_arrays_are_saved_as_the_model_has_them(tmp_path: Path) -> None:
    step = jp.make_train_step(net(), optax.adam(1e-2), "fsdp")
    state = step.init(jax.random.key(0))
    step.save(tmp_path, state, {"batches": 0}).wait()
    saved = jp.Checkpoint(tmp_path)
    assert (saved.step, saved.strategy, saved.data) == (0, "fsdp=8", {"batches": 0})
    kernels = {name: x for name, x in saved.arrays.items() if name.endswith("outer/kernel")}
    assert len(kernels) == 3  # the parameter and two moments
    assert {*kernels.values()} == {((130, 127), np.dtype("float32"))}  # stored as [136, 127]
    ours = nnx.to_pure_dict(step.params(state))["outer"]["kernel"]
    np.testing.assert_array_equal(saved.read("params/outer/kernel"), ours)


def test_what_does_not_fit_is_not_restored(tmp_path: Path) -> None:
    def checkpoints(
        strategy: str = "fsdp", model: jp.Model | None = None, seed: int = 0, tx: Any = None
    ) -> Checkpoints:
        step = jp.make_train_step(model or net(), tx or optax.adam(1e-2), strategy)
        return Checkpoints(tmp_path, step, {"seed": seed})

    with checkpoints() as saves:
        with pytest.raises(ValueError, match="holds no complete checkpoint"):
            saves.restore()
        state = saves.step.init(jax.random.key(0))
        with pytest.raises(ValueError, match="the state is of step 0, and number=2; save it with its step"):
            saves.save(2, state)
        saves.save(0, state)
    wider = jp.from_nnx(lambda rngs: nnx.Linear(12, 24, rngs=rngs), lambda module, batch: module(batch["x"]).mean())
    for other_saves, says in [
        (checkpoints(seed=1), "seed 0 there and 1 here"),
        (checkpoints(tx=optax.sgd(1e-2)), "optimizer.* is there and not here.*weights_only=True"),
        # It was cast in silence.
        (
            checkpoints(tx=optax.adam(1e-2, mu_dtype="bfloat16")),
            r"mu.* float32\[.*there and bfloat16\[.*nothing is cast",
        ),
        (checkpoints(model=wider), "another model.* is here and not there"),
    ]:
        with other_saves as saves, pytest.raises(ValueError, match=says):
            saves.restore()
    with checkpoints("ddp") as saves:
        assert int(saves.restore().step) == 0
        assert "saved under fsdp=8, and goes on under data=8" in saves.notes[0]
        saves.save(0, state)  # is there
    with checkpoints() as saves, pytest.raises(ValueError, match="0 already exists, from another run; name another"):
        saves.save(0, state)
    with pytest.raises(ValueError, match="is not a folder"):
        jp.Checkpoint(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="are for weights_only"):
        saves.step.restore(tmp_path, key=jax.random.key(0))


def test_only_the_last_are_kept_and_half_a_checkpoint_is_none(tmp_path: Path) -> None:
    step = jp.make_train_step(net(), optax.sgd(1e-2), "ddp")
    state = step.init(jax.random.key(0))
    with Checkpoints(tmp_path, step, {}, keep=2) as saves:
        for number in (0, 1, 2):
            saves.save(number, state)
            state, _ = step(state, batch())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]
    (tmp_path / "2").rename(tmp_path / "2.orbax-checkpoint-tmp")  # as it is until the last byte is written
    with Checkpoints(tmp_path, step, {}) as saves:
        assert [path.name for path in tmp_path.iterdir()] == ["1"]  # at once, not in a thread that outlives the run
        assert saves.latest == 1
        saves.restore()
