"""Every state comes back bit by bit under the layout that it was saved in, and under no other."""

import shutil
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar as jp
from jaxpar.train.checkpoint import Checkpoints, layout_of


class Net(nnx.Module):
    """With BatchNorm, dropout's random streams, and a leaf (130 x 127) that no axis divides."""

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
        state, metrics = step(state, batch())  # while it is being written, into the memory that it was in
    after = bits(state)
    with Checkpoints(tmp_path, step, {"seed": 3}) as saves:
        assert saves.latest == 1
        restored = saves.restore()
    assert bits(restored) == expected
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(restored), strict=True):
        assert new.sharding.is_equivalent_to(old.sharding, old.ndim)
    restored, again = step(restored, batch())
    assert bits(restored) == after
    assert float(again["loss"]) == float(metrics["loss"])


def test_the_layout_tells_logical_from_stored_shapes() -> None:
    step = jp.make_train_step(net(), optax.adam(1e-2), "fsdp")
    about = layout_of(step)
    assert about["strategy"] == "fsdp=8"
    assert about["mesh"] == {"fsdp": 8}
    kernels = {name: x for name, x in about["arrays"].items() if name.endswith("outer/kernel")}
    assert len(kernels) == 3  # the parameter and two moments
    for x in kernels.values():
        assert x == {"shape": [130, 127], "stored": [136, 127], "spec": ["fsdp"], "dtype": "float32"}


def test_what_does_not_fit_is_not_restored(tmp_path: Path) -> None:
    def checkpoints(strategy: str = "fsdp", model: jp.Model | None = None, seed: int = 0, tx=optax.adam) -> Checkpoints:  # noqa: ANN001
        return Checkpoints(tmp_path, jp.make_train_step(model or net(), tx(1e-2), strategy), {"seed": seed})

    with checkpoints() as saves:
        with pytest.raises(ValueError, match="holds no complete checkpoint"):
            saves.restore()
        saves.save(2, saves.step.init(jax.random.key(0)))
    wider = jp.from_nnx(lambda rngs: nnx.Linear(12, 24, rngs=rngs), lambda module, batch: module(batch["x"]).mean())
    for other, says in [
        (checkpoints("ddp"), r"layout of fsdp=8 \(mesh fsdp=8\), and this run that of data=8.*strategy 'fsdp=8'"),
        (checkpoints("data=2,fsdp=4"), r"and this run that of data=2,fsdp=4 \(mesh data=2 x fsdp=4\)"),
        (checkpoints(seed=1), "seed 0 there and 1 here"),
        (checkpoints(tx=optax.sgd), "optimizer.* is there and not here"),
        (checkpoints(model=wider), "another model.* is there and not here"),
    ]:
        with other as saves, pytest.raises(ValueError, match=says):
            saves.restore()
    with checkpoints("fsdp=8,microbatches=2") as saves:  # the same layout
        assert int(saves.restore().step) == 0


def test_only_the_last_are_kept_and_half_a_checkpoint_is_none(tmp_path: Path) -> None:
    step = jp.make_train_step(net(), optax.sgd(1e-2), "ddp")
    state = step.init(jax.random.key(0))
    with Checkpoints(tmp_path, step, {}, keep=2) as saves:
        for number in (1, 2, 3):
            saves.save(number, state)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]
    (tmp_path / "3").rename(tmp_path / "3.orbax-checkpoint-tmp")  # as it is until the last byte is written
    with Checkpoints(tmp_path, step, {}) as saves:
        assert [path.name for path in tmp_path.iterdir()] == ["2"]  # at once, not in a thread that outlives the run
        assert saves.latest == 2
        saves.restore()


def test_damaged_checkpoints_are_named_with_the_one_before(tmp_path: Path) -> None:
    """What Orbax, tensorstore and JSON raise of their files was shown as it came."""
    step = jp.make_train_step(net(), optax.sgd(1e-2), "ddp")
    with Checkpoints(tmp_path, step, {}) as saves:
        for number in (1, 2):
            saves.save(number, step.init(jax.random.key(0)))
    (tmp_path / "2" / "state" / "_METADATA").write_bytes(b"\xff")
    with Checkpoints(tmp_path, step, {}) as saves, pytest.raises(ValueError, match=r"2 cannot .* state .* from step 1"):
        saves.restore()
    for about in (tmp_path / "2" / "about").iterdir():
        about.unlink()
    with Checkpoints(tmp_path, step, {}) as saves, pytest.raises(ValueError, match=r"its about is .* from step 1"):
        saves.restore()
    shutil.rmtree(tmp_path / "2")
    shutil.rmtree(tmp_path / "1" / "state")
    with Checkpoints(tmp_path, step, {}) as saves, pytest.raises(ValueError, match=r"its state is .* start a new run"):
        saves.restore()
