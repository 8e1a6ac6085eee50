"""Conversion of Mixtral and Qwen3-MoE from and to Hugging Face: transformers' model computes the same function."""

from pathlib import Path

import jax
import numpy as np
import pytest
from beside_transformers import assert_same_logits, reference
from flax import nnx
from test_huggingface import assert_same

from jaxpar.models.mixtral import Config, Mixtral, from_hf, to_hf
from jaxpar.models.mixtral.weights import MIXTRAL

pytestmark = pytest.mark.xdist_group("torch")
pytest.importorskip("safetensors", reason="needs safetensors: pip install safetensors")

# No two sizes alike, and head_dim is not dim / heads.
SIZES = {"vocab": 61, "dim": 24, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 10, "ffn": 36, "context": 96}
CONFIGS = {
    "mixtral": Config(**SIZES, experts=5, chosen=2, rope_theta=200_000.0),
    "qwen3": Config(**SIZES, experts=6, chosen=3, qk_norm=True, norm_eps=1e-6, tied=True),
    "qwen3, weights as they are": Config(**SIZES, experts=6, chosen=3, qk_norm=True, norm_eps=1e-6, normalize=False),
}
parametrize_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def shapes(config: Config) -> Mixtral:
    """Return a module whose parameters are shapes without values."""
    return nnx.eval_shape(lambda: Mixtral(config, rngs=nnx.Rngs(0)))


@parametrize_config
def test_transformers_computes_the_same(config: Config, tmp_path: Path) -> None:
    model = reference("Qwen3Moe" if config.qk_norm else "Mixtral", MIXTRAL.to_dict(config, "float64"))
    model.save_pretrained(tmp_path)
    read_config, params = from_hf(tmp_path)
    assert {**vars(read_config), "balance": 0, "z": 0} == {**vars(config), "balance": 0, "z": 0}
    assert_same_logits(model, shapes(config), params, config.vocab)


@parametrize_config
def test_weights_come_back_as_they_were(config: Config, tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    tree = nnx.to_pure_dict(nnx.state(shapes(config)))
    params = jax.tree.map(lambda x: random.normal(size=x.shape).astype(np.float32), tree)
    written = to_hf(config, params, tmp_path)
    assert len(written) == (2 if config.tied else 3) + config.layers * (7 + 2 * config.qk_norm + 3 * config.experts)
    read_config, read_params = from_hf(tmp_path)
    assert_same(to_hf(read_config, read_params), written)


def test_what_is_another_model_is_named(tmp_path: Path) -> None:
    options = MIXTRAL.to_dict(CONFIGS["qwen3"], "float32")
    for change, words in (
        ({"model_type": "llama"}, "model_type='llama' is not supported"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\] is not supported"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "mixtures here have 'default'"),
        ({"num_experts": None}, "config lacks num_experts"),
        ({"num_attention_heads": 0}, "num_attention_heads=0 is no size"),  # ZeroDivisionError
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),  # was passed over
    ):
        with pytest.raises(ValueError, match=words):
            from_hf(tmp_path, {**options, **change})
    plain = Config(**SIZES, experts=6, chosen=3, normalize=False)
    with pytest.raises(ValueError, match=r"no form in transformers: needs .'qk_norm': False, 'normalize': True. or"):
        MIXTRAL.to_dict(plain, "float32")
