"""Conversion of Llama from and to Hugging Face.

Both models compute the same function, weights are equal after a round trip, and errors name what does not fit. Tests
that need torch and transformers run after `make hf`.
"""

import dataclasses
import json
import re
import subprocess
import sys
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
from jaxpar.models import llama
from jaxpar.models.llama import Config, Llama, from_hf, to_hf

pytestmark = pytest.mark.xdist_group("torch")  # one worker for all: importing torch takes seconds
pytest.importorskip("safetensors", reason="needs safetensors: pip install safetensors")

# Every config has a feature that the others lack, and no two of its sizes are equal. With this theta, Llama 3.1 leaves
# two of a head's four frequencies unchanged, interpolates one and divides one by the factor.
CONFIGS = {
    "llama2": Config(vocab=61, dim=24, layers=3, heads=3, kv_heads=3, ffn=40, context=96, norm_eps=1e-5),
    "llama3": Config(vocab=53, dim=48, layers=2, heads=6, kv_heads=2, ffn=36, context=64, rope_theta=500_000.0),
    "llama3.1": Config(
        vocab=59, dim=32, layers=2, heads=4, kv_heads=2, ffn=44, context=16384, rope_theta=200_000.0, rope_factor=8.0
    ),
    "llama3.2": Config(
        vocab=47, dim=40, layers=1, heads=5, kv_heads=1, ffn=28, context=32768, rope_theta=200_000.0, rope_factor=32.0,
        tied=True,
    ),
}  # fmt: skip
STRETCH = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
STRETCH |= {"original_max_position_embeddings": 8192}
FILES = [("llama2", False), ("llama3", True), ("llama3.1", False), ("llama3.2", True)]  # (config, sharded)


@pytest.fixture(scope="module")
def hf() -> Any:
    """Return the module `transformers`, or skip the test."""
    reason = "needs torch and transformers: `make hf`"
    pytest.importorskip("torch", reason=reason)
    return pytest.importorskip("transformers", reason=reason)


def reference(hf: Any, config: Config, seed: int = 0) -> Any:
    """Return the model of transformers, with no weight at its initial value."""
    import torch

    scaling = {"rope_scaling": {**STRETCH, "factor": config.rope_factor}} if config.rope_factor != 1 else {}
    hf_config = hf.LlamaConfig(
        vocab_size=config.vocab,
        hidden_size=config.dim,
        intermediate_size=config.ffn,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        max_position_embeddings=config.context,
        rms_norm_eps=config.norm_eps,
        rope_theta=config.rope_theta,
        tie_word_embeddings=config.tied,
        **scaling,
    )
    torch.manual_seed(seed)
    model = hf.LlamaForCausalLM(hf_config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.2 if name.endswith("norm.weight") else parameter.shape[-1] ** -0.5
            parameter.copy_(("norm" in name) + spread * torch.randn(parameter.shape))
    return model


def tokens(config: Config, rows: int = 2, length: int = 90) -> np.ndarray:
    """Return random tokens."""
    return np.random.default_rng(0).integers(0, config.vocab, (rows, length))


def ours(config: Config, params: Any) -> Llama:
    """Return our model with these parameters."""
    model = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0)))
    state = nnx.state(model)
    nnx.replace_by_pure_dict(state, jax.tree.map(jnp.asarray, params))
    nnx.update(model, state)
    return model


def weights(config: Config, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """Return a state dict with random weights, created without torch."""
    random = np.random.default_rng(1)
    params = nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0)))))
    return to_hf(config, jax.tree.map(lambda x: random.normal(size=x.shape).astype(dtype), params))


def assert_close(got: Any, expected: Any, name: str = "") -> None:
    """Assert that all elements are equal to within 1e-4 of the largest expected one."""
    expected = np.asarray(expected)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4 * np.abs(expected).max(), err_msg=name)


def assert_same(got: Any, expected: Any) -> None:
    """Assert that all arrays of two dicts are equal, in values and dtypes."""
    assert got.keys() == expected.keys()
    for name, x in expected.items():
        assert got[name].dtype == x.dtype, name
        np.testing.assert_array_equal(got[name], x, err_msg=name)


def state_of(model: Any) -> dict[str, np.ndarray]:
    """Return the parameters of a torch model as arrays, without a tied head."""
    return {name: x.detach().numpy() for name, x in model.named_parameters()}


# -- the same function -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_logits_loss_and_gradients_are_those_of_transformers(hf: Any, config: Config) -> None:
    import torch

    model, text = reference(hf, config), tokens(config)
    read_config, params = from_hf(model.state_dict(), model.config)
    assert read_config == config

    result = model(input_ids=torch.tensor(text), labels=torch.tensor(text))
    result.loss.backward()
    run = nnx.jit(lambda m, t: m(t))
    logits = run(ours(config, params), text)
    assert_close(logits, result.logits.detach())
    if config.rope_factor != 1:  # the stretch is tested here only if it changes the logits
        unstretched = run(ours(dataclasses.replace(config, rope_factor=1.0), params), text)
        assert np.abs(logits - unstretched).max() > 1e-2 * np.abs(unstretched).max()

    step = jp.make_train_step(jp.from_nnx(lambda rngs: Llama(config, rngs=rngs), llama.loss), optax.sgd(0.1))
    loss, grads = step.value_and_grad(step.init(jax.random.key(0), params=params), {"tokens": text})
    assert_close(loss, result.loss.detach())
    # Gradients have the tree of the parameters, so they are converted alike.
    converted_grads = to_hf(config, grads)
    expected = {name: x.grad.numpy() for name, x in model.named_parameters()}
    assert converted_grads.keys() == expected.keys()
    for name, x in expected.items():
        assert_close(converted_grads[name], x, name)


@pytest.mark.slow
def test_a_step_from_given_weights_is_torchs_step_and_goes_back(hf: Any, tmp_path: Path) -> None:
    import torch

    config = dataclasses.replace(CONFIGS["llama3"], vocab=54, ffn=512)  # large enough to be sharded
    model, text = reference(hf, config), tokens(config, rows=8, length=13)
    model.save_pretrained(tmp_path / "before")
    _, params = from_hf(tmp_path / "before")
    parallel = jp.from_nnx(lambda rngs: Llama(config, rngs=rngs), llama.loss)
    strategy = "pipe=2,fsdp=2,tensor=2,sequence=true,microbatches=2"
    step = jp.make_train_step(parallel, optax.sgd(0.3, momentum=0.9), strategy)
    assert "P('pipe', 'fsdp', 'tensor')" in str(step.layout)
    state = step.init(jax.random.key(0), params=params)
    sgd = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for _ in range(2):
        state, metrics = step(state, {"tokens": text})
        sgd.zero_grad()
        result = model(input_ids=torch.tensor(text), labels=torch.tensor(text))
        result.loss.backward()
        sgd.step()
        assert_close(metrics["loss"], result.loss.detach())

    to_hf(config, step.params(state), tmp_path / "after")
    trained = state_of(hf.AutoModelForCausalLM.from_pretrained(tmp_path / "after"))
    initial = to_hf(config, params)
    for name, x in state_of(model).items():
        assert_close(trained[name] - initial[name], x - initial[name], name)  # the change of the weights


# -- the same numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype"), [("llama2", "float32"), ("llama3.1", "bfloat16"), ("llama3.2", "float16")])
def test_a_state_dict_of_torch_goes_round_trip_exactly(hf: Any, name: str, dtype: str) -> None:
    import torch

    config = CONFIGS[name]
    model = reference(hf, config).to(getattr(torch, dtype))
    _, params = from_hf(model.state_dict(), model.config)
    assert {x.dtype.name for x in jax.tree.leaves(params)} == {dtype}
    written = to_hf(config, params)
    assert {x.dtype.name for x in written.values()} == {dtype}
    state = {name: x.detach().float().numpy() for name, x in model.named_parameters()}
    assert_same({name: x.astype(np.float32) for name, x in written.items()}, state)


@pytest.mark.parametrize(("name", "sharded"), FILES)
def test_a_folder_of_transformers_is_read(hf: Any, name: str, sharded: bool, tmp_path: Path) -> None:
    model = reference(hf, CONFIGS[name])
    model.save_pretrained(tmp_path, max_shard_size="10KB" if sharded else "5GB")
    assert (len(list(tmp_path.glob("*.safetensors"))) > 2) == sharded
    config, params = from_hf(str(tmp_path))
    assert config == CONFIGS[name]
    assert_same(to_hf(config, params), state_of(model))


@pytest.mark.parametrize("name", ["llama2", "llama3.2"])
def test_a_folder_of_torch_is_read(hf: Any, name: str, tmp_path: Path) -> None:
    import torch

    model = reference(hf, CONFIGS[name])
    model.config.save_pretrained(tmp_path)
    state = dict(model.state_dict())
    half = [*state][::2]
    torch.save({k: state[k] for k in half}, tmp_path / "a.bin")
    torch.save({k: state[k] for k in state if k not in half}, tmp_path / "b.bin")
    index = {"weight_map": {k: "a.bin" if k in half else "b.bin" for k in state}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert_same(to_hf(*from_hf(tmp_path)), state_of(model))
    # In one file, with the rotary frequencies that old versions wrote.
    torch.save({**state, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, tmp_path / "pytorch_model.bin")
    assert_same(to_hf(*from_hf(tmp_path)), state_of(model))


@pytest.mark.parametrize(("name", "sharded"), FILES)
def test_transformers_loads_what_is_written(hf: Any, name: str, sharded: bool, tmp_path: Path) -> None:
    import torch

    config = CONFIGS[name]
    state = weights(config)
    to_hf(*from_hf(state, config), tmp_path, max_shard_size=10**4 if sharded else 10**9)
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(model) is hf.LlamaForCausalLM
    assert_same(state_of(model), state)
    with torch.no_grad():
        expected = model(input_ids=torch.tensor(tokens(config))).logits
    assert_close(nnx.jit(lambda m, t: m(t))(ours(*from_hf(state, config)), tokens(config)), expected)
    assert model.config.eos_token_id is None  # not Llama 2's, which is another token in Llama 3
    assert from_hf(model.state_dict(), model.config)[0] == config


def test_transformers_loads_bfloat16_as_such(hf: Any, tmp_path: Path) -> None:
    import torch

    config = CONFIGS["llama3.1"]
    to_hf(*from_hf(weights(config), config), tmp_path, dtype="bfloat16")
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert {x.dtype for x in model.parameters()} == {torch.bfloat16}
    rounded = {k: torch.tensor(x).bfloat16() for k, x in weights(config).items()}
    assert all(torch.equal(x, rounded[name]) for name, x in model.named_parameters())


@pytest.mark.parametrize(("name", "sharded"), FILES)
def test_a_folder_goes_round_trip_exactly(name: str, sharded: bool, tmp_path: Path) -> None:
    config = CONFIGS[name]
    state = weights(config, jnp.bfloat16 if name in ("llama3", "llama3.1") else np.float32)
    assert ("lm_head.weight" in state) == (not config.tied)
    _, params = from_hf(state, config)
    assert_same(to_hf(config, params, tmp_path, max_shard_size=5000 if sharded else 10**9), state)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 2) == sharded
    if sharded:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(x.nbytes for x in state.values())
        assert set(index["weight_map"]) == set(state)
    read_config, params = from_hf(tmp_path)
    assert read_config == config
    assert_same(to_hf(read_config, params), state)


def test_dtype_is_that_asked_for(tmp_path: Path) -> None:
    config = CONFIGS["llama2"]
    state = weights(config)
    to_hf(*from_hf(state, config), tmp_path, dtype=jnp.bfloat16)
    _, params = from_hf(tmp_path, dtype=np.float32)
    rounded = {name: x.astype(jnp.bfloat16).astype(np.float32) for name, x in state.items()}
    assert_same(to_hf(config, params), rounded)


def test_what_comes_from_a_step_is_written(tmp_path: Path) -> None:
    """The arrays of a step are sharded, and those of odd sizes are padded."""
    config = dataclasses.replace(CONFIGS["llama2"], vocab=1001, tied=True)
    model = jp.from_nnx(lambda rngs: Llama(config, rngs=rngs), llama.loss)
    step = jp.make_train_step(model, optax.sgd(0.1), "fsdp")
    state = step.init(jax.random.key(0))
    written = to_hf(config, step.params(state), tmp_path)
    embedding = nnx.to_pure_dict(step.params(state))["embedding"]
    np.testing.assert_array_equal(written["model.embed_tokens.weight"], embedding)
    again = step.init(jax.random.key(1), params=from_hf(tmp_path)[1])
    assert_same(to_hf(config, step.params(again)), written)


def test_reading_a_folder_holds_one_tensor_beside_the_model(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIGS["llama2"], layers=24, dim=96)
    to_hf(*from_hf(weights(config), config), tmp_path)
    tracemalloc.start()
    _, params = from_hf(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    size = sum(x.nbytes for x in jax.tree.leaves(params))
    assert size < peak < 1.2 * size


def test_importing_models_imports_none_of_it() -> None:
    """Neither torch nor Orbax is imported; Orbax takes a second and was once imported by `import jaxpar`."""
    slow = {"torch", "transformers", "safetensors", "orbax.checkpoint"}
    code = f"import sys, jaxpar.models, jaxpar.run.cli.commands; print(sorted({slow} & set(sys.modules)))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed == "[]\n"


# -- what config.json says ---------------------------------------------------------------------------------------------

HF_OPTIONS = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "max_position_embeddings": 16384,
}
LLAMA31 = {**STRETCH, "factor": 8.0}


def read(**options: Any) -> Config:
    """Return the config that is read from `HF_OPTIONS` with these options changed."""
    config = Config(vocab=61, dim=24, layers=3, heads=3, kv_heads=3, ffn=40)
    return from_hf(weights(config), {**HF_OPTIONS, **options})[0]


@pytest.mark.parametrize(
    ("options", "theta", "factor"),
    [
        ({}, 10_000.0, 1.0),
        ({"rope_theta": 7.0}, 7.0, 1.0),
        ({"rope_theta": 7, "rope_scaling": None}, 7.0, 1.0),
        ({"rope_theta": 7.0, "rope_scaling": LLAMA31}, 7.0, 8.0),
        ({"rope_theta": 7.0, "rope_scaling": {"type": "llama3", **LLAMA31}}, 7.0, 8.0),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, 7.0, 1.0),
        ({"rope_parameters": {"rope_theta": 7.0, **LLAMA31}}, 7.0, 8.0),
        ({"rope_parameters": {"rope_theta": 7.0, "partial_rotary_factor": 1.0, **LLAMA31}}, 7.0, 8.0),
    ],
)
def test_both_spellings_of_rotary_embedding(options: dict[str, Any], theta: float, factor: float) -> None:
    config = read(**options)
    assert (config.rope_theta, config.rope_factor, config.context) == (theta, factor, 16384)


def test_what_config_json_leaves_out_is_as_in_transformers() -> None:
    config = read(max_position_embeddings=None)
    assert config == Config(vocab=61, dim=24, layers=3, heads=3, kv_heads=3, ffn=40, context=2048, norm_eps=1e-6)


def test_defaults_are_those_of_transformers(hf: Any) -> None:
    sizes = {name: value for name, value in HF_OPTIONS.items() if name not in ("model_type", "max_position_embeddings")}
    config = Config(vocab=61, dim=24, layers=3, heads=3, kv_heads=3, ffn=40)
    assert from_hf(weights(config), hf.LlamaConfig(**sizes))[0] == from_hf(weights(config), sizes)[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_bias": True}, "attention_bias=True is not supported: Llama here has False"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported: Llama here has 'silu'"),
        ({"head_dim": 16}, "head_dim=16 is not supported.*24 / 3"),
        ({"model_type": "mistral"}, "model_type='mistral'"),
        ({"model_type": ["llama"]}, r"model_type=\['llama'\] is not supported: Llama here has 'llama'"),  # unhashable
        ({"rms_norm_eps": float("nan")}, "norm_eps=nan: use a number from 0"),  # all was NaN; JSON's NaN is one
        ({"rms_norm_eps": 10**400}, "norm_eps=10+: use a number from 0"),
        ({"quantization_config": {"bits": 4}}, "quantization_config=.*has none"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.*'linear'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}}, "rope_parameters.*'yarn'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters.*full_attention"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"rope_scaling": {**LLAMA31, "low_freq_factor": 2.0}}, "'low_freq_factor': 2.0.*needs"),
        ({"rope_scaling": {**LLAMA31, "original_max_position_embeddings": 4096}}, "embeddings': 4096.*needs"),
        ({"rope_scaling": {**LLAMA31, "original_max_position_embeddings": None}}, "embeddings': 16384.*needs"),
        ({"rope_scaling": {**LLAMA31, "factor": None}}, "lacks factor"),
        ({"vocab_size": None, "hidden_size": None}, "config lacks vocab_size, hidden_size"),
    ],
)
def test_options_that_llama_does_not_have_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(**options)


# -- what does not fit -------------------------------------------------------------------------------------------------

CONFIG = CONFIGS["llama2"]


def without(*names: str) -> dict[str, np.ndarray]:
    return {name: x for name, x in weights(CONFIG).items() if not any(map(name.__contains__, names))}


def changed(name: str, *shape: int, dtype: Any = float) -> dict[str, np.ndarray]:
    return weights(CONFIG) | {f"model.{name}": np.ones(shape, dtype)}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (without("1.mlp.up"), r"lacks model\.layers\.1\.mlp\.up_proj\.weight; see"),
        (without("layers"), r"lacks model\.layers\.0\.input_layernorm\.weight, .* and 24 more"),
        (without("lm_head"), r"lacks lm_head\.weight; set tie_word_embeddings=True"),
        (changed("layers.0.self_attn.q_proj.bias", 24), r"has model\.layers\.0\.self_attn\.q_proj\.bias, which"),
        (changed("norm.weight", 25), r"model\.norm\.weight has shape \(25,\), .* needs \(24,\)"),
        (changed("layers.2.mlp.down_proj.weight", 40, 24), r"down_proj.* has shape \(40, 24\), .* needs \(24, 40\)"),
        (changed("norm.weight", 24, dtype=int), r"model\.norm\.weight is int64, needs a floating"),
        (changed("layers.1.mlp.up_proj.weight", 40, 24), r"s\.1\..* is float64 and .*s\.0\..* float32; say dtype="),
    ],
)
def test_tensors_that_do_not_fit_are_named(state: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_hf(state, CONFIG)


def test_each_tensor_is_the_parameter_of_its_name() -> None:
    """Queries and keys of one shape must not be exchanged. The test needs no torch."""
    state, layer = weights(CONFIG), 1
    params = from_hf(state, CONFIG)[1]
    of_layer = params["layers"]
    projections = {
        f"self_attn.{x[0]}_proj": of_layer["attention"][x]["kernel"] for x in ("query", "key", "value", "out")
    }
    projections |= {f"mlp.{x}_proj": of_layer["ffn"][x]["kernel"] for x in ("gate", "up", "down")}
    for name, kernel in projections.items():
        np.testing.assert_array_equal(kernel[layer].T, state[f"model.layers.{layer}.{name}.weight"], err_msg=name)
    norms = {"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm"}
    for name, norm in norms.items():
        np.testing.assert_array_equal(of_layer[norm]["scale"][layer], state[f"model.layers.{layer}.{name}.weight"])
    np.testing.assert_array_equal(params["embedding"], state["model.embed_tokens.weight"])
    np.testing.assert_array_equal(params["head"]["kernel"].T, state["lm_head.weight"])


def test_a_tied_head_may_be_there_and_must_be_the_embedding() -> None:
    config = CONFIGS["llama3.2"]
    state = weights(config)
    embedding = state["model.embed_tokens.weight"]
    assert_same(to_hf(*from_hf({**state, "lm_head.weight": embedding}, config)), state)
    with pytest.raises(ValueError, match=r"tie_word_embeddings=True, but lm_head\.weight differs"):
        from_hf({**state, "lm_head.weight": embedding + 1}, config)


def test_sources_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="state dict does not say its config"):
        from_hf(weights(CONFIG))
    with pytest.raises(ValueError, match="config is a int"):
        from_hf(weights(CONFIG), 7)
    with pytest.raises(ValueError, match=r"meta-llama/Llama-3.2-1B is not a folder.*hf download meta-llama"):
        from_hf("meta-llama/Llama-3.2-1B")
    with pytest.raises(ValueError, match=r"has no config\.json"):
        from_hf(tmp_path)
    with pytest.raises(ValueError, match=r"holds no model: neither model\.safetensors nor pytorch_model\.bin"):
        from_hf(tmp_path, CONFIG)


def test_a_folder_that_lacks_a_file_says_which(tmp_path: Path) -> None:
    to_hf(*from_hf(weights(CONFIG), CONFIG), tmp_path, max_shard_size=5000)
    lost = sorted(tmp_path.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(ValueError, match=f"lacks {lost.name}, which model.safetensors.index.json names"):
        from_hf(tmp_path)


def test_weights_are_not_written_over(tmp_path: Path) -> None:
    _, params = from_hf(weights(CONFIG), CONFIG)
    to_hf(CONFIG, params, tmp_path)
    contents = (tmp_path / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match=r"already holds model\.safetensors; choose another folder"):
        to_hf(CONFIG, jax.tree.map(np.zeros_like, params), tmp_path, max_shard_size=5000)
    assert (tmp_path / "model.safetensors").read_bytes() == contents


def test_a_tree_of_another_model_is_not_written() -> None:
    _, params = from_hf(weights(CONFIG), CONFIG)
    message = "params lacks nothing and has head/kernel beyond a Llama of this config"
    with pytest.raises(ValueError, match=message):
        to_hf(dataclasses.replace(CONFIG, tied=True), params)
    with pytest.raises(ValueError, match=re.escape("has embedding of shape (61, 24), a Llama of this config needs")):
        to_hf(dataclasses.replace(CONFIG, vocab=62), params)
    with pytest.raises(ValueError, match=r"params lacks embedding, head/kernel, .* and 9 more"):
        to_hf(CONFIG, {})


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    to_hf(*from_hf(weights(CONFIG), CONFIG), tmp_path)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ValueError, match=r"need safetensors.*pip install safetensors"):
        from_hf(tmp_path)
    monkeypatch.setitem(sys.modules, "torch", None)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"need torch.*pip install torch"):
        from_hf(tmp_path)
