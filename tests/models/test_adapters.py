"""Adapters in the format of `peft`: read beside their base, trained further, merged and written again."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar as jp
from jaxpar.models import llama

safetensors = pytest.importorskip("safetensors.numpy")
BASE = llama.Config(vocab=61, dim=16, layers=2, heads=2, kv_heads=1, ffn=24)
TOKENS = np.random.default_rng(0).integers(0, 61, (8, 13)).astype(np.int32)


def module_of(config: llama.Config, params: Any) -> llama.Llama:
    model = llama.Llama(config, rngs=nnx.Rngs(0))
    nnx.update(model, jax.tree.map(lambda x: x.astype(np.float32), params))
    return model


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    params, _ = jp.from_nnx(lambda rngs: llama.Llama(BASE, rngs=rngs), llama.loss).create(jax.random.key(1))
    llama.to_hf(BASE, params, folder := tmp_path_factory.mktemp("base"))
    return folder


@pytest.fixture
def folder(base: Path, tmp_path: Path) -> Path:
    """Adapters of rank 3 on queries and values, as `peft` would write them, with random values."""
    (path := tmp_path / "adapters").mkdir()
    rng, tensors = np.random.default_rng(1), {}
    for layer in range(BASE.layers):
        for name, width in (("q", 16), ("v", 8)):
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}_proj"
            tensors[f"{module}.lora_A.weight"] = rng.normal(size=(3, 16)).astype(np.float32)
            tensors[f"{module}.lora_B.weight"] = rng.normal(0, 0.1, size=(width, 3)).astype(np.float32)
    safetensors.save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": ["v_proj", "q_proj"], "bias": "none"}
    write(path, config | {"base_model_name_or_path": str(base), "lora_dropout": 0.1, "megatron_core": "megatron.core"})
    return path


def write(folder: Path, config: dict[str, Any]) -> None:
    (folder / "adapter_config.json").write_text(json.dumps(config))


def change(folder: Path, **options: Any) -> None:
    write(folder, json.loads((folder / "adapter_config.json").read_text()) | options)


@pytest.mark.parametrize(("options", "scale"), [({}, 2.0), ({"use_rslora": True}, 6 / 3**0.5)])
def test_adapters_add_their_product_to_the_kernels(
    base: Path, folder: Path, options: dict[str, Any], scale: float
) -> None:
    """W + scale B A by hand, and the logits of the adapted and the merged model."""
    change(folder, **options)
    config, params = llama.from_hf(base, adapter=folder)
    assert (config.lora, config.lora_targets) == (3, "query+value")
    assert config.lora_alpha / config.lora == pytest.approx(scale)
    assert config.parameters == sum(x.size for x in jax.tree.leaves(params))
    merged = llama.to_hf(config, params)
    stored = safetensors.load_file(folder / "adapter_model.safetensors")
    original = llama.to_hf(BASE, llama.from_hf(base)[1])
    for name, weight in original.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        update = 0.0
        if f"{module}.lora_A.weight" in stored:
            update = scale * stored[f"{module}.lora_B.weight"] @ stored[f"{module}.lora_A.weight"]
        np.testing.assert_allclose(merged[name], weight + update, atol=1e-6 * np.abs(weight + update).max())
    plain = llama.from_hf(merged, BASE)[1]
    expected = module_of(BASE, plain)(TOKENS)
    np.testing.assert_allclose(module_of(config, params)(TOKENS), expected, atol=2e-5 * float(abs(expected).max()))


def test_the_folder_names_its_base(base: Path, folder: Path) -> None:
    """Otherwise the error says how to name it, and that works."""
    config, params = llama.from_hf(folder)
    change(folder, base_model_name_or_path="meta-llama/Llama-3.2-1B")
    with pytest.raises(ValueError, match=r"adapters of 'meta-llama/Llama-3.2-1B', which is no folder here; .*adapter="):
        llama.from_hf(folder)
    again, again_params = llama.from_hf(base, adapter=folder)
    assert again == config
    jax.tree.map(np.testing.assert_array_equal, again_params, params)


@pytest.mark.slow
def test_training_goes_on_under_a_strategy_and_is_written_again(base: Path, folder: Path, tmp_path: Path) -> None:
    """Its step is that of one device, the frozen base stays, and what is written has the targets that were read."""
    config, params = llama.from_hf(folder)
    model = jp.from_nnx(lambda rngs: llama.Llama(config, rngs=rngs), llama.loss, llama.RULES)
    results = []
    for strategy in ("single", "fsdp=4,tensor=2"):
        step = jp.make_train_step(model, optax.sgd(0.1, momentum=0.9), strategy, trainable=llama.is_adapter)
        state = step.init(jax.random.key(0), params=params)
        for _ in range(2):
            state, _ = step(state, {"tokens": TOKENS})
        results.append(nnx.to_pure_dict(step.params(state)))
    for one, many in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(many, one, atol=1e-5 * float(abs(np.asarray(one)).max()))
    trained = results[1]
    np.testing.assert_array_equal(trained["layers"]["ffn"]["up"]["kernel"], params["layers"]["ffn"]["up"]["kernel"])
    query = trained["layers"]["attention"]["query"]
    assert np.abs(query["lora_a"] - params["layers"]["attention"]["query"]["lora_a"]).max() > 1e-4
    llama.save_adapters(config, trained, tmp_path / "again", str(base))
    written = json.loads((tmp_path / "again" / "adapter_config.json").read_text())
    assert written["target_modules"] == ["q_proj", "v_proj"]
    again, again_params = llama.from_hf(tmp_path / "again")
    assert again == config
    np.testing.assert_array_equal(again_params["layers"]["attention"]["query"]["lora_b"], query["lora_b"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3' is not supported: Llama here has 'LORA'"),
        ({"use_dora": True}, r"use_dora=True is not supported; merge the adapters in peft, .*merge_and_unload"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern="),
        ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern="),
        ({"bias": "all"}, "bias='all'"),
        ({"lora_bias": True}, "lora_bias=True"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\]"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out=True"),
        ({"layers_to_transform": [0]}, r"layers_to_transform=\[0\]"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"an_option_of_later": 1}, "an_option_of_later=1"),
        ({"r": 0}, "r=0, .* needs a whole number from 1"),
        ({"lora_alpha": "x"}, "lora_alpha='x'"),
        ({"r": 4}, r"q_proj.lora_A.weight is \[3, 16\], needs \[4, 16\] on this base"),
        ({"target_modules": ["q_proj", "v_proj", "k_proj"]}, "target_modules are .*'k_proj'.* has tensors of"),
    ],
)
def test_adapters_of_another_function_are_refused(
    base: Path, folder: Path, options: dict[str, Any], message: str
) -> None:
    change(folder, **options)
    with pytest.raises(ValueError, match=message):
        llama.from_hf(base, adapter=folder)


def test_adapters_of_another_base_are_refused(base: Path, folder: Path) -> None:
    sizes = dataclasses.replace(BASE, layers=1)
    with pytest.raises(ValueError, match=r"layers.1.*a Llama of 1 layers has no such projection; give the base"):
        llama.with_adapters(sizes, folder)
    with pytest.raises(ValueError, match=r"is \[3, 16\], needs \[3, 32\] on this base; give the base .*base0\)"):
        llama.with_adapters(dataclasses.replace(BASE, dim=32), folder)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has no adapter_model.safetensors; write it in peft"):
        llama.from_hf(folder)


def test_targets_are_projections() -> None:
    with pytest.raises(ValueError, match=r"lora_targets='query\+q_proj' names q_proj; join some of these by \+: query"):
        dataclasses.replace(BASE, lora=2, lora_targets="query+q_proj")
    with pytest.raises(ValueError, match="lora_targets=3: use names, such as query"):
        dataclasses.replace(BASE, lora_targets=3)
    once, twice = (dataclasses.replace(BASE, lora=2, lora_targets=targets) for targets in ("query", "query+query"))
    assert twice.parameters == once.parameters  # a name given twice was counted twice


# peft reads a property of transformers that this version of transformers calls deprecated.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("rslora", [False, True])
def test_peft_computes_the_same(base: Path, tmp_path: Path, rslora: bool) -> None:
    """Both ways: adapters that peft wrote, read here; and those, changed and written here, read by peft."""
    peft = pytest.importorskip("peft", reason="needs peft, torch and transformers")
    torch, hf = pytest.importorskip("torch"), pytest.importorskip("transformers")

    def logits(model: Any) -> np.ndarray:
        with torch.no_grad():
            return model(torch.tensor(TOKENS, dtype=torch.long)).logits.numpy()

    torch.manual_seed(0)
    options = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "down_proj"], use_rslora=rslora,
                              lora_dropout=0.1, init_lora_weights=False, task_type="CAUSAL_LM")  # fmt: skip
    theirs = peft.get_peft_model(hf.AutoModelForCausalLM.from_pretrained(base), options).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    config, params = llama.from_hf(tmp_path / "theirs")
    assert config.lora_targets == "query+down"
    expected, scale = logits(theirs), np.abs(logits(theirs)).max()
    assert np.abs(expected - np.asarray(module_of(BASE, llama.from_hf(base)[1])(TOKENS))).max() > 0.01 * scale
    np.testing.assert_allclose(module_of(config, params)(TOKENS), expected, atol=1e-5 * scale)

    down = params["layers"]["ffn"]["down"]
    down["lora_b"] = 2 * down["lora_b"]
    llama.save_adapters(config, params, tmp_path / "ours", str(base))
    shutil.copytree(tmp_path / "ours", tmp_path / "copy")
    base_model = hf.AutoModelForCausalLM.from_pretrained(base)
    read = peft.PeftModel.from_pretrained(base_model, tmp_path / "copy").eval()
    np.testing.assert_allclose(logits(read), module_of(config, params)(TOKENS), atol=1e-5 * scale)
