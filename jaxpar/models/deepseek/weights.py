"""Weights of a `DeepSeek` from and to Hugging Face: its `DeepseekV3ForCausalLM` does the same.

The files hold one tensor for each expert, as the published ones do. Those are in float8, and in bfloat16 where someone
has dequantized them: what is read here is the latter. Tensors of the head for several tokens at once are passed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..llama import weights as llama
from ..llama.architecture import Architecture
from ..llama.hf_config import options_of, sizes_of
from . import yarn
from .config import Config
from .model import DeepSeek

_SIZES = {
    "vocab": "vocab_size",
    "dim": "hidden_size",
    "layers": "num_hidden_layers",
    "dense": "first_k_dense_replace",
    "heads": "num_attention_heads",
    "query_rank": "q_lora_rank",
    "rank": "kv_lora_rank",
    "head_dim": "qk_nope_head_dim",
    "rope_dim": "qk_rope_head_dim",
    "value_dim": "v_head_dim",
    "ffn": "intermediate_size",
    "expert_ffn": "moe_intermediate_size",
    "experts": "n_routed_experts",
    "chosen": "num_experts_per_tok",
    "shared": "n_shared_experts",
    "groups": "n_group",
    "group_limit": "topk_group",
}
# What the model here computes; an option that is absent or null has this value too.
_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "attention_dropout": (0,),
    "rope_interleave": (True,),
    "tie_word_embeddings": (False,),
    "moe_layer_freq": (1,),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "quantization_config": (),
}
_YARN = {"original_max_position_embeddings": yarn.FIRST, "beta_fast": yarn.FAST, "beta_slow": yarn.SLOW,
         "mscale": 1, "mscale_all_dim": 1}  # fmt: skip
_LAYER = {
    "attention_norm/scale": "input_layernorm.weight",
    "attention/query_latent/kernel": "self_attn.q_a_proj.weight",
    "attention/query_norm/scale": "self_attn.q_a_layernorm.weight",
    "attention/query/kernel": "self_attn.q_b_proj.weight",
    "attention/latent/kernel": "self_attn.kv_a_proj_with_mqa.weight",
    "attention/latent_norm/scale": "self_attn.kv_a_layernorm.weight",
    "attention/key_value/kernel": "self_attn.kv_b_proj.weight",
    "attention/out/kernel": "self_attn.o_proj.weight",
    "ffn_norm/scale": "post_attention_layernorm.weight",
}
_FFN = {f"{name}/kernel": f"{name}_proj.weight" for name in ("gate", "up", "down")}
_MIXTURE = {
    "router/kernel": "gate.weight",
    "bias": "gate.e_score_correction_bias",
    **{f"shared/{ours}": f"shared_experts.{theirs}" for ours, theirs in _FFN.items()},
    **{f"experts/{name}": f"experts.{{}}.{name}_proj.weight" for name in ("gate", "up", "down")},
}
_NAMES = {
    "embedding": "model.embed_tokens.weight",
    "norm/scale": "model.norm.weight",
    "head/kernel": "lm_head.weight",
    **{
        f"{stack}/{ours}": f"model.layers.{{}}.{name}" for stack in ("dense", "layers") for ours, name in _LAYER.items()
    },
    **{f"dense/ffn/{ours}": f"model.layers.{{}}.mlp.{theirs}" for ours, theirs in _FFN.items()},
    **{f"layers/ffn/{ours}": f"model.layers.{{}}.mlp.{theirs}" for ours, theirs in _MIXTURE.items()},
}


def to_config(given: Any) -> Config:
    """Sizes of a `DeepSeek` from a `Config`, a `transformers.DeepseekV3Config`, or its dict.

    Raises ValueError on options that the model here does not have, naming them.
    """
    if isinstance(given, Config):
        return given
    options = options_of(given, "a deepseek.Config, or what config.json holds")
    if (kind := options.get("model_type")) != "deepseek_v3":
        raise ValueError(f"model_type={kind!r} is not supported: a DeepSeek here is a 'deepseek_v3'")
    if "num_local_experts" in options:  # as transformers 5 writes it
        options.setdefault("n_routed_experts", options["num_local_experts"])
    sizes = sizes_of(options, _SIZES)
    for name, known in _ONLY.items():
        if name in options and options[name] not in known:
            needed = repr(known[0]) if known else "none: dequantize its weights, and remove it"
            raise ValueError(f"{name}={options[name]!r} is not supported: a DeepSeek here has {needed}")
    if (keys := options.get("num_key_value_heads", options["num_attention_heads"])) != options["num_attention_heads"]:
        raise ValueError(f"num_key_value_heads={keys}: needs num_attention_heads, {options['num_attention_heads']}")
    return Config(
        **sizes,
        **_rope(options),
        scale=float(options.get("routed_scaling_factor", 2.5)),
        normalize=bool(options.get("norm_topk_prob", True)),
        context=options.get("max_position_embeddings", yarn.FIRST),
        norm_eps=options.get("rms_norm_eps", 1e-6),
    )


def _rope(options: Mapping[str, Any]) -> dict[str, Any]:
    rope = options.get("rope_parameters") or options.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    differs = [name for name, value in _YARN.items() if kind == "yarn" and rope.get(name) != value]
    if kind not in ("default", "yarn") or differs or (kind == "yarn" and "factor" not in rope):
        raise ValueError(
            f"rope_scaling (rope_parameters) is {dict(rope)}; a DeepSeek here has 'default', or 'yarn' with a factor "
            f"and {_YARN}"
        )
    factor = rope["factor"] if kind == "yarn" else 1
    return {
        "rope_theta": float(rope.get("rope_theta", options.get("rope_theta", 10_000.0))),
        "rope_factor": float(factor),
    }


def to_dict(config: Config, dtype: str) -> dict[str, Any]:
    """What `config.json` says of a `DeepSeek` of these sizes and its weights of `dtype`, such as "bfloat16"."""
    stretched = {"type": "yarn", "factor": config.rope_factor, **_YARN} if config.rope_factor != 1 else None
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **{theirs: getattr(config, ours) for ours, theirs in _SIZES.items()},
        "num_key_value_heads": config.heads,
        "routed_scaling_factor": config.scale,
        "norm_topk_prob": config.normalize,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
        "hidden_act": "silu",
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": stretched,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": dtype,
    }


def _layers(path: str, config: Config) -> range:
    return range(config.dense) if path.startswith("dense/") else range(config.dense, config.layers)


def _of_several_tokens(name: str, config: Config) -> bool:
    """Whether a tensor is of the head for several tokens at once, which is kept as one more layer."""
    return name.startswith(f"model.layers.{config.layers}.")


_ARCHITECTURE = Architecture("DeepSeek", _NAMES, DeepSeek, to_config, to_dict, _layers, _of_several_tokens)


def from_hf(source: str | Path, config: Any = None, dtype: Any = None) -> tuple[Config, dict[str, Any]]:
    """The sizes and weights of a `DeepseekV3ForCausalLM`: as `llama.from_hf`, of a folder.

    A state dict is taken as well where its tensors are named as in the files, one for each expert.
    """
    return llama.from_hf(source, config, dtype, _ARCHITECTURE)


def to_hf(
    config: Config, params: Any, path: str | Path | None = None, dtype: Any = None, max_shard_size: int = 5 * 10**9
) -> dict[str, np.ndarray]:
    """The weights by their names in published files, and with a path the folder that `from_pretrained` loads: as
    `llama.to_hf`.
    """
    return llama.to_hf(config, params, path, dtype, max_shard_size, _ARCHITECTURE)


def save_hf(config: Config, params: Any, path: str | Path, dtype: Any = None, max_shard_size: int = 5 * 10**9) -> None:
    """The folder that `to_hf` writes, tensor by tensor."""
    llama.save_hf(config, params, path, dtype, max_shard_size, _ARCHITECTURE)
