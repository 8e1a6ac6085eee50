"""DeepSeek-V3's weights from and to Hugging Face: transformers' own model is the same function."""

from pathlib import Path

import jax
import numpy as np
import pytest
from beside_transformers import assert_same_logits, reference
from flax import nnx
from test_huggingface import assert_same

from jaxpar.models.deepseek import Config, DeepSeek, from_hf, to_hf
from jaxpar.models.deepseek.weights import DEEPSEEK

pytestmark = pytest.mark.xdist_group("torch")
pytest.importorskip("safetensors", reason="needs safetensors: pip install safetensors")

# No two sizes alike.
SIZES = {
    "vocab": 61, "dim": 24, "layers": 4, "heads": 3, "query_rank": 20, "rank": 12, "head_dim": 10, "rope_dim": 8,
    "value_dim": 14, "ffn": 36, "expert_ffn": 18, "context": 96,
}  # fmt: skip
CONFIGS = {
    "nodes": Config(**SIZES, dense=2, experts=12, chosen=3, groups=4, group_limit=2, rope_theta=5_000.0),
    "yarn": Config(
        **SIZES, dense=1, experts=6, chosen=2, groups=1, group_limit=1, shared=2, rope_factor=40.0, normalize=False
    ),
}
each = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def shapes(config: Config) -> DeepSeek:
    return nnx.eval_shape(lambda: DeepSeek(config, rngs=nnx.Rngs(0)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "config", [CONFIGS["nodes"], pytest.param(CONFIGS["yarn"], marks=pytest.mark.battery)], ids=CONFIGS
)
def test_transformers_computes_the_same(config: Config, tmp_path: Path) -> None:
    model = reference("DeepseekV3", DEEPSEEK.to_dict(config, "float64"))
    model.save_pretrained(tmp_path)
    found, params = from_hf(tmp_path)
    assert {**vars(found), "balance": 0} == {**vars(config), "balance": 0}
    assert_same_logits(model, shapes(config), params, config.vocab)


@each
def test_weights_come_back_as_they_were(config: Config, tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    tree = nnx.to_pure_dict(nnx.state(shapes(config)))
    params = jax.tree.map(lambda x: random.normal(size=x.shape).astype(np.float32), tree)
    written = to_hf(config, params, tmp_path)
    mixtures = config.layers - config.dense
    assert len(written) == 3 + 9 * config.layers + 3 * config.dense + mixtures * (5 + 3 * config.experts)
    assert "model.layers.0.mlp.gate_proj.weight" in written
    assert f"model.layers.{config.dense}.mlp.gate.e_score_correction_bias" in written
    # The published files have one layer more, of the head for several tokens.
    more = {f"model.layers.{config.layers}.eh_proj.weight": np.ones(1, np.float32)}
    found, back = from_hf(written | more, DEEPSEEK.to_dict(config, "float32"))
    assert_same(to_hf(found, back), written)


def test_what_is_another_model_is_named() -> None:
    stated = DEEPSEEK.to_dict(CONFIGS["yarn"], "float32")
    for change, words in (
        ({"model_type": "deepseek_v2"}, "model_type='deepseek_v2' is not supported"),
        ({"scoring_func": "softmax"}, "scoring_func='softmax' is not supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, "none: dequantize its weights"),
        ({"rope_scaling": {**stated["rope_scaling"], "beta_fast": 8}}, "'yarn' with a factor"),
        ({"num_key_value_heads": 1}, "num_key_value_heads=1: needs num_attention_heads, 3"),
        ({"n_group": None}, "config lacks n_group"),
    ):
        with pytest.raises(ValueError, match=words):
            from_hf({}, {**stated, **change})
