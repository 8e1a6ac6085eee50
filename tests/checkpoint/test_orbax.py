"""Checkpoints are Orbax checkpoints: Orbax alone reads ours, and a step begins with the weights of anybody's."""

import math
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from flax.traverse_util import unflatten_dict

import jaxpar as jp
from jaxpar.checkpoint.arrays import keys_of, name_of
from jaxpar.run.cli.convert import converted

PLAIN = Path(__file__).parents[2] / ".venv-orbax/bin/python"  # made by `make orbax-env`


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.down = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jnp.tanh(self.up(x)))


class Net(nnx.Module):
    """A net with four layers in a list, and a head whose rows no number of shards divides."""

    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([Block(rngs) for _ in range(4)])
        self.head = nnx.Linear(8, 2053, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for number in range(4):
            x = x + nn.Dense(8, name=f"layer_{number}")(jnp.tanh(x))
        return nn.Dense(5, name="head")(x)


def squares(module: Any, batch: Any) -> jax.Array:
    return (module(batch["x"]) ** 2).mean()


BATCH = {"x": np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)}
NNX = jp.from_nnx(lambda rngs: Net(rngs), squares)
LINEN = jp.from_linen(Dense(), lambda apply, batch: (apply(batch["x"]) ** 2).mean(), example=BATCH)
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def step_of(model: jp.Model, strategy: str, optimizer: Any = OPTIMIZER) -> Any:
    sizes = [int(size) for size in re.findall(r"(?:fsdp|pipe|data|tensor)=(\d)", strategy)]
    return jp.make_train_step(model, optimizer, strategy, mesh=jax.devices()[: math.prod(sizes)])


STRATEGIES = ["fsdp=8", "pipe=2,data=2,chunks=2,microbatches=2", "tensor=2,fsdp=2", "fsdp=8,zero=1"]


@pytest.mark.slow
def test_orbax_alone_reads_what_jaxpar_saved(tmp_path: Path) -> None:
    """Parameters, moments and counters are equal to the bit, in an environment without jaxpar if there is one."""
    for number, strategy in enumerate(STRATEGIES):
        step = step_of(NNX, strategy)
        state, _ = step(step.init(jax.random.key(0)), BATCH)
        step.save(tmp_path / str(number), state).wait()
        params = jax.tree_util.tree_leaves_with_path(step.params(state))
        optimizer = jax.tree.map(np.asarray, step.layout.to_logical(state.optimizer, "optimizer"))
        saved = jp.Checkpoint(tmp_path / str(number))
        arrays = {".".join(saved.about.path(name)): saved.read(name) for name in saved.arrays}
        for path, x in params:
            name = "params." + jax.tree_util.keystr(path, simple=True, separator=".")
            assert arrays[name].tobytes() == np.asarray(x).tobytes()
        assert len(jax.tree.leaves(optimizer)) <= sum(name.startswith("optimizer.") for name in arrays)
        np.savez(tmp_path / f"{number}.npz", **arrays)
    python, more = (str(PLAIN), []) if PLAIN.exists() else (sys.executable, ["--hide"])
    words = [python, str(Path(__file__).with_name("plain_orbax.py")), str(tmp_path), *more]
    environment = {name: x for name, x in os.environ.items() if name != "PYTHONPATH"} | {"JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(words, capture_output=True, text=True, timeout=1800, env=environment)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.split() == ["0", "57", "1", "57", "2", "57", "3", "57"]


def saved_by_flax(kind: str, folder: Path) -> Any:
    """Save weights as the documentation of Flax does, and return them in the tree of `step.params`."""
    if kind == "nnx":
        module = Net(nnx.Rngs(7))
        _, state = nnx.split(module)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder / "state", state)
        return nnx.to_pure_dict(nnx.state(module, nnx.Param))
    variables = Dense().init(jax.random.key(7), BATCH["x"])
    if kind == "linen":
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder / "variables", variables)
    else:
        state = TrainState.create(apply_fn=Dense().apply, params=variables["params"], tx=optax.adam(1e-3))
        with ocp.CheckpointManager(folder / "manager") as manager:
            manager.save(3, args=ocp.args.StandardSave({"model": state, "config": {"width": np.array([8])}}))
    return variables["params"]


@pytest.mark.parametrize("strategy", ["fsdp=8", "pipe=2,data=2,microbatches=2"])
@pytest.mark.parametrize("kind", ["nnx", "linen", "train state"])
def test_a_step_begins_with_the_weights_that_flax_saved(kind: str, strategy: str, tmp_path: Path) -> None:
    expected = saved_by_flax(kind, tmp_path)
    step = step_of(NNX if kind == "nnx" else LINEN, strategy)
    folder = next(tmp_path.iterdir())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Orbax warns that it uses the devices of the program that saved
        restored = ocp.PyTreeCheckpointer().restore(folder) if kind != "train state" else None
    for state in (
        step.restore(folder, weights_only=True),
        step.init(jax.random.key(0), params=expected if restored is None else restored),
    ):
        ours = step.params(state)
        ours = nnx.to_pure_dict(ours) if isinstance(ours, nnx.State) else ours
        jax.tree.map(np.testing.assert_array_equal, ours, dict(expected))
    with pytest.raises(ValueError, match=r"has no item `about`: another program wrote it.*weights_only=True"):
        step.restore(folder)
    jp.Checkpoint(folder).verify()


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    saved_by_flax("linen", tmp_path)
    step = step_of(NNX, "fsdp=8")
    with pytest.raises(ValueError, match=r"has no weights for head/bias|has no weights for layers/0"):
        step.restore(tmp_path / "variables", weights_only=True)
    tree = nnx.to_pure_dict(nnx.state(Net(nnx.Rngs(0)), nnx.Param))
    tree["head"]["bias"] = np.zeros(7, np.float32)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "narrow", tree)
    with pytest.raises(ValueError, match=r"head/bias is float32\[7\] there and float32\[2053\] here; make the mod"):
        step.restore(tmp_path / "narrow", weights_only=True)


def test_a_leaf_is_its_key_path(tmp_path: Path) -> None:
    """`{"a/b": x, "a": {"b": y}}` came back with x twice; a state restored with the key "" did not fit its step."""
    keys = {"a/b": 1, "a": {"b": 2}, "": 3, "x": {"": 4, "~": 5, "~1": 6}, "10": 7, "9": 8, "a b": {"ü": 9}}
    keys |= {"layers": [10, [11, 12]], "other": {"0": 13, "1": {"0": 14}}}
    tree = jax.tree.map(lambda x: np.full((8, 8), x, np.float32), keys)
    loss = lambda p, b, key: sum(jnp.square(b["x"] @ x).mean() for x in jax.tree.leaves(p))
    step = step_of(jp.Model(init=lambda key: tree, loss=loss), "fsdp=4,zero=1", optax.adam(1e-2))
    state, _ = step(step.init(jax.random.key(0)), BATCH)
    step.save(tmp_path, state).wait()
    plain, restored = ocp.PyTreeCheckpointer().restore(tmp_path / "1" / "state"), step.restore(tmp_path)
    params = step.params(state)
    for result, expected in (
        (step.params(restored), params),
        (restored.optimizer, state.optimizer),
        (plain["params"], params),
    ):
        jax.tree.map(np.testing.assert_array_equal, result, expected)
    step(restored, BATCH)


def test_a_name_is_of_one_key_path() -> None:
    paths = [("a/b",), ("a", "b"), ("a~1b",), ("a~b",), ("a~0b",), ("a~", "b")]
    assert len({name_of(path) for path in paths}) == len(paths)
    assert [keys_of(name_of(path)) for path in paths] == paths


def test_two_leaves_that_orbax_takes_for_one_are_refused(tmp_path: Path) -> None:
    tree = {"a.b": np.ones((4, 4), np.float32), "a": {"b": np.zeros((4, 4), np.float32)}}
    model = jp.Model(init=lambda key: tree, loss=lambda p, b, key: (p["a.b"] + p["a"]["b"]).mean() + b["x"].mean())
    step = step_of(model, "ddp", optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"params/a/b and params/a.b cannot be saved together.*rename one"):
        step.save(tmp_path, step.init(jax.random.key(0)))


def test_a_checkpoint_in_the_form_before_is_named(tmp_path: Path) -> None:
    """The error says what to do: use its weights, by their paths, to start a new state."""
    safetensors = pytest.importorskip("safetensors.numpy")
    (tmp_path / "3" / "state").mkdir(parents=True)
    (tmp_path / "3" / "state" / "about.json").write_text('{"crc32": 0, "content": {"version": 2}}')
    weights = {f"params/{name}": np.ones((8, 8), np.float32) for name in ("a/w", "b")}
    safetensors.save_file(weights, file := tmp_path / "3" / "state" / "arrays-00000.safetensors")
    model = jp.Model(
        init=lambda key: {"a": {"w": jnp.zeros((8, 8))}, "b": jnp.zeros((8, 8))},
        loss=lambda p, b, key: jnp.square(b["x"] @ p["a"]["w"] @ p["b"]).mean(),
    )
    step = step_of(model, "fsdp=8", optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"by an earlier jaxpar.* convert .*--weights-only.*init\(key, params="):
        step.restore(tmp_path)
    paths = {tuple(name.removeprefix("params/").split("/")): x for name, x in safetensors.load_file(file).items()}
    state = step.init(jax.random.key(0), params=unflatten_dict(paths))
    np.testing.assert_array_equal(step.params(state)["a"]["w"], 1)


def test_weights_of_another_program_are_converted(tmp_path: Path) -> None:
    """The result is a checkpoint of jaxpar, from which a step starts."""
    expected = saved_by_flax("nnx", tmp_path)
    result = converted(jp.Checkpoint(tmp_path), tmp_path / "ours", weights_only=True)
    result.verify()
    assert not result.is_foreign
    step = step_of(NNX, "fsdp=8")
    ours = step.params(step.restore(tmp_path / "ours", weights_only=True))
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(ours), expected)
