"""Training a Hugging Face folder, with and without adapters, and a user's function; exports and profiles."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_cli import fails

import jaxpar as jp
from jaxpar.models import llama
from jaxpar.run.cli import main
from jaxpar.run.train.recorder import read

safetensors = pytest.importorskip("safetensors")
CONFIG = llama.Config(vocab=300, dim=16, layers=2, heads=2, kv_heads=1, ffn=16, tied=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model in three files of bfloat16, with a tokenizer, beside a file of token ids."""
    model = jp.from_nnx(lambda rngs: llama.Llama(CONFIG, rngs=rngs), llama.loss)
    params, _ = model.create(jax.random.key(3))
    base = tmp_path / "base"
    llama.to_hf(CONFIG, params, base, dtype="bfloat16", max_shard_size=4000)
    assert len(list(base.glob("*.safetensors"))) > 2
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"bos_token_id": 1, "eos_token_id": [2, 7]}))
    (base / "tokenizer.json").write_text("{}")
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(0, 300, 4000).astype("uint16"))
    return base


@pytest.mark.slow
def test_a_folder_is_tuned_and_written_again(folder: Path, capsys: pytest.CaptureFixture) -> None:
    out, tuned = folder.parent / "run", folder.parent / "tuned"
    words = f"train --model {folder} --data {folder.parent}/ids.npy --length 16 --steps 4 --lr 1e-9".split()
    words += f"--strategy fsdp,precision=bf16 --out {out} --export {tuned} --evaluate-batches 1".split()
    main([*words, "--profile", "2"])
    shown = capsys.readouterr().out
    assert f"exported: {tuned}, {CONFIG.parameters:,} parameters of {folder} after step 4" in shown
    assert "a sample" not in shown  # the tokens of a folder are not bytes

    # At this learning rate no bfloat16 value changes: the export equals the source.
    (base_config, base), (tuned_config, tuned_params) = llama.from_hf(folder), llama.from_hf(tuned)
    assert base_config == tuned_config == CONFIG
    jax.tree.map(np.testing.assert_array_equal, base, tuned_params)
    config = json.loads((tuned / "config.json").read_text())
    assert (config["torch_dtype"], config["bos_token_id"], config["eos_token_id"]) == ("bfloat16", 1, [2, 7])
    assert (tuned / "tokenizer.json").exists()
    assert f"{tuned} already holds model.safetensors" in fails([*words, "--overwrite"], 2, capsys)

    assert "steps 3 to 4 are traced in" in shown
    profile = out / "profile" / "rank-0"
    assert (profile / "memory.prof").exists()
    (trace,) = profile.rglob("*.xplane.pb")
    profile_data = jax.profiler.ProfileData.from_file(str(trace))
    names = {event.name for plane in profile_data.planes for line in plane.lines for event in line.events}
    assert any("all_gather" in name or "all-gather" in name for name in names)


@pytest.mark.slow
def test_adapters_are_trained_beside_a_folder_that_stays(folder: Path, capsys: pytest.CaptureFixture) -> None:
    """The export has the base with its adapters, the folder for peft the adapters alone. The frozen base stays bfloat16
    in the state.
    """
    out, tuned, adapters = (folder.parent / name for name in ("run", "tuned", "adapters"))
    model = f"{folder},lora=2,lora_alpha=6.0"
    words = f"train --model {model} --data {folder.parent}/ids.npy --length 16 --lr 0.01 --warmup 0".split()
    words += ["--strategy", "fsdp,precision=bf16", "--evaluate-batches", "1"]
    main([*words, "--steps", "2", "--out", str(out), "--export", str(tuned), "--export-dtype", "float32"])
    main(["convert", str(out), str(adapters), "--to", "peft"])
    assert f"{CONFIG.parameters:,} parameters of {model} after step 2" in capsys.readouterr().out
    saved = jp.Checkpoint(out / "checkpoints").arrays
    kernel = "params/layers/ffn/up/kernel"
    assert (saved[kernel][1], saved["params/layers/ffn/up/lora_a"][1]) == ("bfloat16", "float32")
    assert not [name for name in saved if name.startswith("optimizer") and name.endswith("kernel")]

    (_, base), (_, tuned_params) = llama.from_hf(folder), llama.from_hf(tuned)
    np.testing.assert_array_equal(base["embedding"].astype("float32"), tuned_params["embedding"])
    with safetensors.safe_open(adapters / "adapter_model.safetensors", framework="np") as file:
        factors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # the file is not a dict
    assert len(factors) == 2 * 2 * 7
    name_format = "base_model.model.model.layers.1.mlp.up_proj.lora_{}.weight"
    update = 6.0 / 2 * (factors[name_format.format("B")] @ factors[name_format.format("A")]).T
    assert np.abs(update).max() > 0.001
    up = base["layers"]["ffn"]["up"]["kernel"][1].astype("float32")
    np.testing.assert_allclose(tuned_params["layers"]["ffn"]["up"]["kernel"][1], up + update, atol=1e-6)
    config = json.loads((adapters / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], len(config["target_modules"])) == (2, 6.0, 7)
    assert config["base_model_name_or_path"] == str(folder)

    from_scratch = ["train", "--model", "llama-tiny,lora=2", "--out", str(folder.parent / "no")]
    assert "adapters need the weights of a folder; give one" in fails(from_scratch, 2, capsys)
    changed = ["explain", "--model", f"{folder},layers=1"]
    assert "layers cannot be changed, because the folder's weights depend on it" in fails(changed, 2, capsys)
    without_adapters = ["convert", str(out), str(folder.parent / "no"), "--to", "peft", "--model", str(folder)]
    assert "has no adapters" in fails(without_adapters, 2, capsys)


@pytest.mark.slow
def test_own_models_are_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "mine_to_train.py").write_text(
        "import jax, numpy as np, jaxpar as jp\n"
        "from flax import nnx\n"
        "def data(start):\n"
        "    for i in range(start, 99):\n"
        "        yield {'x': np.random.default_rng(i).normal(size=(16, 4)).astype('float32')}\n"
        "def make():\n"
        "    loss = lambda net, batch: ((net(batch['x']) - batch['x'][:, :1]) ** 2).mean()\n"
        "    return jp.from_nnx(lambda rngs: nnx.Linear(4, 1, rngs=rngs), loss), data, [next(data(98))]\n"
    )
    monkeypatch.chdir(tmp_path)
    words = ["--model", "mine_to_train:make", "--out", str(tmp_path / "run")]
    main(["train", *words, "--strategy", "zero1", "--steps", "30", "--lr", "0.1"])
    lines = read(tmp_path / "run" / "metrics.jsonl")
    assert lines[-1]["held_out_loss"] < 0.1 * lines[0]["loss"]
    main(["explain", "--model", "mine_to_train:make", "--rows", "8", "--strategy", "ddp"])
    assert "all-reduce" in capsys.readouterr().out
    words = ["train", *words, "--overwrite", "--export", str(tmp_path / "hf")]
    assert "mine_to_train:make cannot be written for Hugging Face's transformers; Llamas can" in fails(words, 2, capsys)
    convert = ["convert", str(tmp_path / "run"), str(tmp_path / "other")]
    assert "convert --weights-only makes a checkpoint" in fails([*convert, "--to", "huggingface"], 2, capsys)
    assert "mine_to_train:make has no adapters" in fails([*convert, "--to", "peft"], 2, capsys)  # "there is no model"
    main([*convert, "--weights-only"])


def test_a_run_begins_with_given_parameters_and_goes_on_bit_by_bit(tmp_path: Path) -> None:
    """The frozen weights beside its adapters are bfloat16 in the state and in its checkpoints."""
    is_adapter = lambda name: "lora" in name
    initial = {"kernel": np.full((8, 8), 2.0, np.float32)}

    def init(key: jax.Array) -> Any:
        return {"kernel": jnp.ones((8, 8)), "lora": {"a": jax.random.normal(key, (8, 2)), "b": jnp.zeros((2, 8))}}

    def loss(params: Any, batch: Any, key: Any) -> jax.Array:
        return ((batch["x"] @ (params["kernel"] + params["lora"]["a"] @ params["lora"]["b"])) ** 2).mean()

    def data(start: int) -> Iterator[Any]:
        return ({"x": np.full((8, 8), 1 + number, np.float32)} for number in range(start, 9))

    def run(steps: int, name: str, params: Any, resume: bool = False) -> tuple[list[float], list[np.ndarray]]:
        loop = jp.Loop(steps=steps, save_every=2, out=tmp_path / name, quiet=True, resume=resume)
        options = {"trainable": is_adapter, "params": params, "fresh": is_adapter}
        trainer = jp.Trainer(jp.Model(init, loss), optax.adamw(0.03), data, "fsdp,precision=bf16", loop, **options)
        params = trainer.step.params(trainer.run())
        losses = [line["loss"] for line in read(tmp_path / name / "metrics.jsonl") if "loss" in line]
        return losses, [np.asarray(x) for x in jax.tree.leaves(params)]

    losses, (kernel, a, b) = run(4, "unbroken", initial)
    assert losses[0] == 256
    assert kernel.dtype == jnp.bfloat16
    assert (kernel == 2).all()
    assert min(np.abs(a).max(), np.abs(b).max()) > 0
    run(2, "broken", lambda: initial)
    again, params = run(4, "broken", lambda: pytest.fail("a resumed run restores its parameters"), resume=True)
    assert again == losses
    jax.tree.map(np.testing.assert_array_equal, params, [kernel, a, b])
