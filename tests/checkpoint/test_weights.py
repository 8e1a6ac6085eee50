"""Weights alone into a new state, and fresh adapters beside a given base."""

import tracemalloc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar as jp
from jaxpar.models import llama, named
from jaxpar.run.cli.convert import weights_of

LORA = lambda path: "lora" in path


def model(rank: int = 0) -> jp.Model:
    """Three layers in a Python loop, with adapters of a rank."""

    def init(key: jax.Array) -> Any:
        keys = jax.random.split(key, 9)
        layers = [{"w": jax.random.normal(keys[i], (8, 8))} for i in range(3)]
        for i, layer in enumerate(layers if rank else []):
            layer["lora"] = {"a": jax.random.normal(keys[3 + i], (8, rank)), "b": jnp.zeros((rank, 8))}
        return {"layers": layers, "head": jax.random.normal(keys[8], (130, 131))}

    def loss(params: Any, batch: Any, key: jax.Array | None) -> jax.Array:
        x = batch["x"]
        for layer in params["layers"]:
            w = layer["w"] + (layer["lora"]["a"] @ layer["lora"]["b"] if rank else 0)
            x = jnp.tanh(x @ w)
        return ((x @ params["head"][:8]) ** 2).mean()

    return jp.Model(init=init, loss=loss)


def tree(step: Any, state: Any) -> dict[str, np.ndarray]:
    flat = jax.tree_util.tree_leaves_with_path(step.params(state))
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(x) for path, x in flat}


def averaged() -> optax.GradientTransformation:
    """An optimizer whose state begins with the parameters, as that of moving averages does."""
    return optax.GradientTransformation(lambda params: params, lambda updates, state, params=None: (updates, state))


@pytest.mark.slow
def test_weights_begin_a_new_state_and_adapters_may_be_fresh(tmp_path: Path) -> None:
    """Both ended in two dumps of a PyTreeDef."""
    old = jp.make_train_step(model(), optax.adam(1e-2), "fsdp")
    state = old.init(jax.random.key(0))
    old.save(tmp_path, state).wait()
    base = tree(old, state)

    new = jp.make_train_step(model(), averaged(), "ddp")
    begun = new.restore(tmp_path, weights_only=True, key=jax.random.key(5))
    for name, x in tree(new, begun).items():
        np.testing.assert_array_equal(x, base[name])
    for x, y in zip(jax.tree.leaves(begun.optimizer), jax.tree.leaves(begun.params), strict=True):
        np.testing.assert_array_equal(x, y)
    assert int(begun.step) == 0
    # A step that keeps a copy in the compute dtype asked the checkpoint for that dtype, and refused it.
    copying = jp.make_train_step(model(), optax.sgd(1e-2), "zero2,precision=bf16")
    for name, x in tree(copying, copying.restore(tmp_path, weights_only=True)).items():
        np.testing.assert_array_equal(x, base[name])

    lora = jp.make_train_step(model(2), optax.adam(1e-2), "fsdp", trainable=LORA)
    missing = "layers/0/lora/a.* and 3 more"
    with pytest.raises(ValueError, match=f"no weights for {missing}; it has .*; name those that begin .* fresh=lambda"):
        lora.restore(tmp_path, weights_only=True)
    with pytest.raises(ValueError, match=f"params= lacks {missing}; pass .* fresh=lambda"):
        lora.init(jax.random.key(1), params=old.params(state))
    initial_params = tree(lora, lora.init(jax.random.key(1)))
    for begun in (
        lora.restore(tmp_path, weights_only=True, key=jax.random.key(1), fresh=LORA),
        lora.init(jax.random.key(1), params=old.params(state), fresh=LORA),
    ):
        for name, x in tree(lora, begun).items():
            np.testing.assert_array_equal(x, initial_params[name] if LORA(name) else base[name])
    with pytest.raises(ValueError, match=r"params= has layers/0/lora/a.*, and the model has"):
        old.init(jax.random.key(1), params=lora.params(begun))
    wide = {**old.params(state), "head": np.ones((130, 132))}
    with pytest.raises(ValueError, match=r"params= has head of shape \(130, 132\), the model needs \(130, 131\)"):
        old.init(jax.random.key(1), params=wide)


@pytest.mark.parametrize(
    ("saved_strategy", "strategy"), [("fsdp,precision=bf16", "zero2"), ("ddp", "fsdp,precision=bf16")]
)
def test_a_frozen_base_goes_on_in_the_precision_of_the_step(saved_strategy: str, strategy: str, tmp_path: Path) -> None:
    """It is stored in the compute dtype, so that a run may go on under another precision, as with float32 masters."""
    old = jp.make_train_step(model(2), optax.adam(1e-2), saved_strategy, trainable=LORA)
    state, _ = old(old.init(jax.random.key(0)), {"x": jnp.ones((8, 8), jnp.bfloat16)})
    old.save(tmp_path, state).wait()
    new = jp.make_train_step(model(2), optax.adam(1e-2), strategy, trainable=LORA)
    frozen_dtype = jnp.bfloat16 if "bf16" in strategy else jnp.float32
    expected = {n: np.asarray(x if LORA(n) else x.astype(frozen_dtype)) for n, x in tree(old, state).items()}
    for restored in (new.restore(tmp_path), new.restore(tmp_path, weights_only=True, fresh=LORA)):
        actual = tree(new, restored)
        assert {n: x.dtype for n, x in actual.items()} == {n: x.dtype for n, x in expected.items()}
        for name in actual:
            if not LORA(name) or int(restored.step):
                np.testing.assert_array_equal(actual[name], expected[name])


@pytest.mark.slow
def test_a_hugging_face_folder_is_written_tensor_by_tensor(tmp_path: Path) -> None:
    """All parameters used to be in memory at once."""
    tiny = named("llama-tiny", layers=12, dim=64, heads=2, kv_heads=2, ffn=128)
    step = jp.make_train_step(tiny.model, optax.sgd(0.1), "fsdp")
    state = step.init(jax.random.key(0))
    step.save(tmp_path / "run", state).wait()
    saved = jp.Checkpoint(tmp_path / "run")
    tracemalloc.start()
    llama.save_hf(tiny.config, weights_of(saved), tmp_path / "hf", max_shard_size=10**5)
    peak_bytes, model_bytes = tracemalloc.get_traced_memory()[1], 4 * tiny.parameters
    tracemalloc.stop()
    assert model_bytes > 1.6e6
    assert peak_bytes < model_bytes / 3
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 9
    pytest.importorskip("safetensors")
    _, params = llama.from_hf(tmp_path / "hf")
    assert jax.tree.all(jax.tree.map(np.array_equal, params, nnx.to_pure_dict(step.params(state))))

    path = max((tmp_path / "run" / "0" / "state").rglob("d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is not what was written"):
        llama.save_hf(tiny.config, weights_of(jp.Checkpoint(tmp_path / "run")), tmp_path / "damaged")
    assert not (tmp_path / "damaged" / "config.json").exists()
