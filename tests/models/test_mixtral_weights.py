"""Mixtral's and Qwen3-MoE's weights from and to Hugging Face: transformers' own model is the same function."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_huggingface import assert_same

from jaxpar.models.mixtral import Config, Mixtral, from_hf, to_hf
from jaxpar.models.mixtral.weights import to_dict

pytestmark = pytest.mark.xdist_group("torch")
pytest.importorskip("safetensors", reason='needs safetensors: pip install "jaxpar[hf]"')

# No two sizes alike, and head_dim is not dim / heads.
SIZES = {"vocab": 61, "dim": 24, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 10, "ffn": 36, "context": 96}
CONFIGS = {
    "mixtral": Config(**SIZES, experts=5, chosen=2, rope_theta=200_000.0),
    "qwen3": Config(**SIZES, experts=6, chosen=3, qk_norm=True, norm_eps=1e-6, tied=True),
    "qwen3, weights as they are": Config(**SIZES, experts=6, chosen=3, qk_norm=True, norm_eps=1e-6, normalize=False),
}
each = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def reference(config: Config) -> Any:
    """transformers' own model in float64, with weights of which none is at its initial value."""
    torch = pytest.importorskip("torch", reason="needs torch and transformers: `make hf`")
    hf = pytest.importorskip("transformers", reason="needs torch and transformers: `make hf`")
    stated = to_dict(config, "float64")
    kind = (hf.Qwen3MoeConfig, hf.Qwen3MoeForCausalLM) if config.qk_norm else (hf.MixtralConfig, hf.MixtralForCausalLM)
    stated = {name: x for name, x in stated.items() if name not in ("architectures", "torch_dtype", "model_type")}
    torch.manual_seed(0)
    settings = kind[0](**stated)
    settings._experts_implementation = "eager"  # its grouped matmul is not there in float64
    model = kind[1](settings).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.2 if "norm" in name else parameter.shape[-1] ** -0.5
            parameter.copy_(("norm" in name) + spread * torch.randn(parameter.shape, dtype=torch.float64))
    return model.eval()


def ours(config: Config, params: Any) -> Mixtral:
    model = nnx.eval_shape(lambda: Mixtral(config, rngs=nnx.Rngs(0)))
    state = nnx.state(model)
    nnx.replace_by_pure_dict(state, params)
    nnx.update(model, state)
    return model


@each
def test_transformers_computes_the_same(config: Config, tmp_path: Path) -> None:
    """Its norms and router compute in float32, as ours do: that is the difference that is left."""
    torch = pytest.importorskip("torch", reason="needs torch and transformers: `make hf`")

    model = reference(config)
    model.save_pretrained(tmp_path)
    found, params = from_hf(tmp_path)
    assert {**vars(found), "balance": 0, "z": 0} == {**vars(config), "balance": 0, "z": 0}
    tokens = np.random.default_rng(0).integers(0, config.vocab, (2, 31))
    with torch.no_grad():
        wanted = model(torch.tensor(tokens)).logits.float().numpy()
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), params)
        got = np.asarray(ours(config, params)(jnp.asarray(tokens, jnp.int32)), np.float32)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


@each
def test_weights_come_back_as_they_were(config: Config, tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    tree = nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: Mixtral(config, rngs=nnx.Rngs(0)))))
    params = jax.tree.map(lambda x: random.normal(size=x.shape).astype(np.float32), tree)
    written = to_hf(config, params, tmp_path)
    assert len(written) == (2 if config.tied else 3) + config.layers * (7 + 2 * config.qk_norm + 3 * config.experts)
    found, back = from_hf(tmp_path)
    assert_same(to_hf(found, back), written)


def test_what_is_another_model_is_named(tmp_path: Path) -> None:
    stated = to_dict(CONFIGS["qwen3"], "float32")
    for change, words in (
        ({"model_type": "llama"}, "model_type='llama' is not supported"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\] is not supported"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "mixtures here have 'default'"),
        ({"num_experts": None}, "config lacks num_experts"),
    ):
        with pytest.raises(ValueError, match=words):
            from_hf(tmp_path, {**stated, **change})
