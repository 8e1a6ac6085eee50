"""Every state comes back bit by bit, under the layout that it was saved in and under any other."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from layouts import bits

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


def test_what_does_not_fit_is_not_restored(tmp_path: Path) -> None:
    def checkpoints(strategy: str = "fsdp", model: Any = None, seed: int = 0, tx: Any = None) -> Checkpoints:
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
        (checkpoints(tx=optax.sgd(1e-2)), "optimizer.* which the step lacks.*weights_only=True"),
        # It was cast in silence.
        (
            checkpoints(tx=optax.adam(1e-2, mu_dtype="bfloat16")),
            r"mu.* float32\[.*there and bfloat16\[.*nothing is cast",
        ),
        (checkpoints(model=wider), "another model.*: it lacks "),
    ]:
        with other_saves as saves, pytest.raises(ValueError, match=says):
            saves.restore()
    with checkpoints("ddp") as saves:
        assert int(saves.restore().step) == 0
        assert "saved under fsdp=8, and goes on under data=8" in saves.notes[0]
        saves.save(0, state)  # is there
    with (
        checkpoints() as saves,
        pytest.raises(ValueError, match="0 already exists, from another or an earlier run; name another"),
    ):
        saves.save(0, state)
    # A loop that starts anew without a checkpoint catches this, and not a damaged checkpoint (test_damage.py).
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        jp.Checkpoint(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="holds no complete checkpoint"):
        saves.step.restore(tmp_path / "empty")
    with pytest.raises(ValueError, match="need weights_only=True"):
        saves.step.restore(tmp_path, key=jax.random.key(0))
