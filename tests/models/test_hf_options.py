"""Options of public `config.json` files: each model is read as what it is, or refused by the name of an option.

The options are those of the published files, without the sizes. The small models have the same options, random weights,
and the classes of transformers.
"""

from typing import Any

import pytest
from beside_transformers import assert_same_logits, reference
from flax import nnx

from jaxpar.models import llama, mixtral
from jaxpar.models.llama import Config, Llama
from jaxpar.models.llama.weights import LLAMA
from jaxpar.models.mixtral.weights import MIXTRAL

pytestmark = pytest.mark.xdist_group("torch")

SIZES = {
    "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3,
    "num_key_value_heads": 3, "max_position_embeddings": 96, "rms_norm_eps": 1e-5,
}  # fmt: skip
COMMON = {
    "hidden_act": "silu", "initializer_range": 0.02, "bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 0,
    "torch_dtype": "bfloat16", "transformers_version": "4.47.0", "use_cache": True, "attention_dropout": 0.0,
}  # fmt: skip
LOADED = {
    "Llama-3-8B": {"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1, "rope_theta": 500_000.0},
    "SmolLM2-360M": {"is_llama_config": True, "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100_000},
    "a fine-tuned Llama": {"unsloth_fixed": True, "_name_or_path": ".", "output_hidden_states": False},
    "an early conversion": {"architectures": ["LLaMAForCausalLM"], "max_sequence_length": None},
}
# Their options, the words of the error with the published `model_type`, and with neither that nor the class.
REFUSED = {
    "granite-3.1-8b": (
        {"model_type": "granite", "architectures": ["GraniteForCausalLM"], "attention_multiplier": 0.0078125,
         "embedding_multiplier": 12.0, "logits_scaling": 16.0, "residual_multiplier": 0.22},
        "attention_multiplier=0.0078125, embedding_multiplier=12.0, logits_scaling=16.0, residual_multiplier=0.22.*"
        "no attention_multiplier, embedding_multiplier=1",
    ),
    "SmolLM3-3B": (
        {"model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"], "layer_types": ["full_attention"] * 2,
         "no_rope_layer_interval": 4, "no_rope_layers": [1, 0], "use_sliding_window": False, "max_window_layers": 28},
        r"no_rope_layers=\[1, 0\]",
    ),
    "Mistral-7B-v0.1": (
        {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 64},
        "sliding_window=64",
    ),
    "gemma-2-2b": (
        {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": 50.0,
         "final_logit_softcapping": 30.0, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256},
        "attn_logit_softcapping=50.0, final_logit_softcapping=30.0, hidden_activation='gelu_pytorch_tanh', query_pre",
    ),
    "gemma-3 and others with two kinds of layers": (
        {"model_type": "gemma3_text", "layer_types": ["sliding_attention", "full_attention"]},
        r"layer_types=\['sliding_attention', 'full_attention'\]",
    ),
    "Phi-3-mini-128k": (
        {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "resid_pdrop": 0.0, "sliding_window": 262144,
         "original_max_position_embeddings": 32, "rope_scaling": {"type": "longrope", "long_factor": [1.07]}},
        "rope_scaling.*'longrope'",
    ),
    "OLMo-1B-0724": (
        {"model_type": "olmo", "architectures": ["OlmoForCausalLM"], "clip_qkv": 8.0}, "clip_qkv=8.0",
    ),
    "MiniCPM-2B": (  # the published file has no model_type
        {"architectures": ["MiniCPMForCausalLM"], "scale_depth": 1.4, "scale_emb": 12}, "scale_depth=1.4, scale_emb=12",
    ),
    "a mixture": ({"model_type": "granitemoe", "num_local_experts": 32}, "num_local_experts=32"),
}  # fmt: skip
# Classes whose options alone do not show that their models are no Llamas, and the name of a tensor that does.
TENSORS = {
    "Qwen2": ({"use_sliding_window": False, "max_window_layers": 28, "sliding_window": 32768}, "q_proj.bias"),
    "Qwen3": ({"head_dim": 8, "use_sliding_window": False, "attention_bias": False}, "q_norm.weight"),
    "Olmo2": ({"attention_bias": False}, "input_layernorm.weight"),
    "Phi3": ({"resid_pdrop": 0.0, "rope_scaling": None}, "gate_proj.weight"),
}


def read(options: dict[str, Any]) -> Config:
    """Return the config that is read from these options; a warning is an error."""
    return LLAMA.to_config({**SIZES, **COMMON, **options})


@pytest.mark.parametrize("options", LOADED.values(), ids=LOADED)
def test_llamas_are_read_without_a_warning(options: dict[str, Any]) -> None:
    configs = [read({"model_type": "llama", **options}), read({"architectures": ["LlamaForCausalLM"], **options})]
    assert configs[0] == configs[1]
    assert (configs[0].vocab, configs[0].rope_theta) == (61, options.get("rope_theta", 10_000.0))


@pytest.mark.parametrize(("options", "words"), REFUSED.values(), ids=REFUSED)
def test_other_models_are_refused_by_name(options: dict[str, Any], words: str) -> None:
    """Without `model_type`, a Granite was read as a Llama: its multipliers were passed over, and its logits wrong."""
    if model_type := options.get("model_type"):
        with pytest.raises(ValueError, match=f"model_type='{model_type}' is not supported"):
            read(options)
    without_type = {name: value for name, value in options.items() if name != "model_type"}
    if classes := options.get("architectures"):
        with pytest.raises(ValueError, match=f"'{classes[0]}'.*'LlamaForCausalLM'.*remove architectures"):
            read(without_type)
    for model_type in ({}, {"model_type": "llama"}):
        with pytest.raises(ValueError, match=words):
            read({**without_type, **model_type, "architectures": None})  # the advice, if it computed the same


def test_values_that_change_nothing_are_taken() -> None:
    neutral = {
        "embedding_multiplier": 1.0, "residual_multiplier": 1, "logits_scaling": 1.0, "no_rope_layers": [1, 1],
        "no_rope_layer_interval": 4, "layer_types": ["full_attention"] * 2, "sliding_window": 96, "pruned_heads": {},
        "use_qk_norm": False, "clip_qkv": None, "use_mrope": False, "is_encoder_decoder": False, "embd_pdrop": 0.0,
    }  # fmt: skip
    assert read(neutral) == read({})
    assert read({"use_sliding_window": False, "sliding_window": 4}) == read({})
    with pytest.raises(ValueError, match="use_sliding_window=True, sliding_window=4"):
        read({"use_sliding_window": True, "sliding_window": 4})


def test_unknown_options_are_named_once() -> None:
    with pytest.warns(UserWarning, match="config has mup_denominator, ngram_order, which the model here does not know"):
        config = read({"mup_denominator": 32, "ngram_order": 2})
    assert config == read({})  # the advice: without them


@pytest.mark.parametrize("family", [llama, mixtral, LLAMA], ids=["llama", "mixtral", "Family"])
def test_the_warning_of_unknown_options_points_at_the_users_line(family: Any) -> None:
    """`llama.from_hf` calls `Family.from_hf`, and the warning pointed into jaxpar."""
    options = {**SIZES, **COMMON, "mup_denominator": 32, "model_type": "llama"}
    if family is mixtral:
        options |= {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    with pytest.warns(UserWarning, match="mup") as warnings, pytest.raises(ValueError, match="the model lacks"):
        family.from_hf({}, options)
    assert [warning.filename for warning in warnings] == [__file__]


def test_qwen3_mixtures_with_a_window_are_refused() -> None:
    """`use_sliding_window` was passed over: only `sliding_window` of a Mixtral was read."""
    qwen = {"model_type": "qwen3_moe", "moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2}
    qwen |= {"use_qk_norm": True, "qkv_bias": False, "norm_topk_prob": True, "decoder_sparse_step": 1, **SIZES}
    assert MIXTRAL.to_config(qwen).experts == 4
    with pytest.raises(ValueError, match=r"use_sliding_window=True.*mixtures here have use_sliding_window=False"):
        MIXTRAL.to_config(qwen | {"use_sliding_window": True, "sliding_window": 64})
    with pytest.raises(ValueError, match="shared_expert_intermediate_size=16"):
        MIXTRAL.to_config(qwen | {"shared_expert_intermediate_size": 16})


@pytest.mark.parametrize("family", ["Llama", "Mistral"])
def test_models_that_compute_as_llama_give_the_logits_of_transformers(family: str) -> None:
    options = {"sliding_window": None} if family == "Mistral" else LOADED["SmolLM2-360M"]
    model = reference(family, {**SIZES, **options, "hidden_act": "silu", "tie_word_embeddings": True})
    # Without its type, it is what its options and its tensors say.
    found = {name: value for name, value in model.config.to_dict().items() if name not in ("model_type", "dtype")}
    config, params = llama.from_hf(model.state_dict(), found)
    assert_same_logits(model, nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))), params, config.vocab)


@pytest.mark.parametrize("family", TENSORS)
def test_models_whose_options_are_those_of_a_llama_are_refused_by_their_tensors(family: str) -> None:
    options, tensor = TENSORS[family]
    model = reference(family, {**SIZES, **COMMON, **options})
    tied = {"tie_word_embeddings": model.config.tie_word_embeddings}
    with pytest.raises(ValueError, match=tensor.replace(".", r"\.")):
        llama.from_hf(model.state_dict(), {**SIZES, **COMMON, **options, **tied})
