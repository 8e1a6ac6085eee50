"""Weights of a `Mixtral` from and to Hugging Face: its `MixtralForCausalLM` and `Qwen3MoeForCausalLM` do the same.

The files hold one tensor for each expert, as the published ones do. transformers 5 joins them when it loads a folder,
and parts them again when it saves one: pass a folder, and no state dict of its modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..llama import weights as llama
from ..llama.architecture import Architecture
from ..llama.hf_config import options_of, sizes_of
from .model import Config, Mixtral

_SIZES = {
    "vocab": "vocab_size",
    "dim": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "chosen": "num_experts_per_tok",
}
# By what `config.json` calls the model: what its sizes are called there, and what it must say of the rest.
_KINDS: dict[str, tuple[dict[str, str], dict[str, tuple[Any, ...]]]] = {
    "mixtral": ({**_SIZES, "ffn": "intermediate_size", "experts": "num_local_experts"}, {"sliding_window": ()}),
    "qwen3_moe": (
        {**_SIZES, "ffn": "moe_intermediate_size", "experts": "num_experts"},
        {"attention_bias": (False,), "mlp_only_layers": ([],), "decoder_sparse_step": (1,)},
    ),
}
_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_dropout": (0,),
    "quantization_config": (),
}
_ATTENTION = {path: name for path, name in llama.LLAMA.names.items() if "/ffn/" not in path}
_MIXTRAL = {
    **_ATTENTION,
    "layers/ffn/router/kernel": "model.layers.{}.block_sparse_moe.gate.weight",
    "layers/ffn/experts/gate": "model.layers.{}.block_sparse_moe.experts.{}.w1.weight",
    "layers/ffn/experts/up": "model.layers.{}.block_sparse_moe.experts.{}.w3.weight",
    "layers/ffn/experts/down": "model.layers.{}.block_sparse_moe.experts.{}.w2.weight",
}
_QWEN = {
    **_ATTENTION,
    "layers/attention/query_norm/scale": "model.layers.{}.self_attn.q_norm.weight",
    "layers/attention/key_norm/scale": "model.layers.{}.self_attn.k_norm.weight",
    "layers/ffn/router/kernel": "model.layers.{}.mlp.gate.weight",
    "layers/ffn/experts/gate": "model.layers.{}.mlp.experts.{}.gate_proj.weight",
    "layers/ffn/experts/up": "model.layers.{}.mlp.experts.{}.up_proj.weight",
    "layers/ffn/experts/down": "model.layers.{}.mlp.experts.{}.down_proj.weight",
}


def to_config(given: Any) -> Config:
    """Sizes of a `Mixtral` from a `Config`, a `transformers.MixtralConfig` or `Qwen3MoeConfig`, or its dict.

    Raises ValueError on options that the model here does not have, naming them.
    """
    if isinstance(given, Config):
        return given
    options = options_of(given, "a mixtral.Config, or what config.json holds")
    kind = options.get("model_type")
    if kind not in _KINDS:
        raise ValueError(f"model_type={kind!r} is not supported: mixtures here are of {', '.join(_KINDS)}")
    if kind == "qwen3_moe" and "num_local_experts" in options:  # as transformers 5 writes it
        options.setdefault("num_experts", options["num_local_experts"])
    names, only = _KINDS[kind]
    sizes = sizes_of(options, names)
    for name, known in {**_ONLY, **only}.items():
        if name in options and options[name] not in known:
            raise ValueError(
                f"{name}={options[name]!r} is not supported: a {kind} here has {known[0] if known else 'none'!r}"
            )
    rope = options.get("rope_parameters") or options.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise ValueError(f"rope_parameters={dict(rope)} is not supported: mixtures here have 'default'")
    qwen = kind == "qwen3_moe"
    return Config(
        **sizes,
        kv_heads=options.get("num_key_value_heads", sizes["heads"]),
        head_dim=options.get("head_dim", sizes["dim"] // sizes["heads"]),
        context=options.get("max_position_embeddings", 32768),
        rope_theta=float(rope.get("rope_theta", options.get("rope_theta", 1_000_000.0))),
        norm_eps=options.get("rms_norm_eps", 1e-6 if qwen else 1e-5),
        tied=options.get("tie_word_embeddings", False),
        qk_norm=qwen,
        normalize=bool(options.get("norm_topk_prob", False)) if qwen else True,
    )


def to_dict(config: Config, dtype: str) -> dict[str, Any]:
    """What `config.json` says of a `Mixtral` of these sizes: a Qwen3-MoE with `qk_norm`, a Mixtral without."""
    kind = "qwen3_moe" if config.qk_norm else "mixtral"
    if not (config.qk_norm or config.normalize):
        raise ValueError("normalize=False without qk_norm has no form in transformers: Mixtral's weights sum to 1")
    more = {"norm_topk_prob": config.normalize, "intermediate_size": config.ffn} if config.qk_norm else {}
    return {
        "architectures": ["Qwen3MoeForCausalLM" if config.qk_norm else "MixtralForCausalLM"],
        "model_type": kind,
        **more,
        **{theirs: getattr(config, ours) for ours, theirs in _KINDS[kind][0].items()},
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": dtype,
    }


def _architecture(config: Config) -> Architecture:
    names = _QWEN if config.qk_norm else _MIXTRAL
    return Architecture("Mixtral", names, Mixtral, to_config, to_dict)


def from_hf(source: str | Path, config: Any = None, dtype: Any = None) -> tuple[Config, dict[str, Any]]:
    """The sizes and weights of a `MixtralForCausalLM` or `Qwen3MoeForCausalLM`: as `llama.from_hf`, of a folder.

    A state dict is taken as well where its tensors are named as in the files, one for each expert.
    """
    if config is None and not isinstance(source, Mapping):
        config = llama.stated(llama.folder_of(source))
    config = to_config(config)
    return llama.from_hf(source, config, dtype, _architecture(config))


def to_hf(
    config: Config, params: Any, path: str | Path | None = None, dtype: Any = None, max_shard_size: int = 5 * 10**9
) -> dict[str, np.ndarray]:
    """The weights by their names in published files, and with a path the folder that `from_pretrained` loads: as
    `llama.to_hf`.
    """
    return llama.to_hf(config, params, path, dtype, max_shard_size, _architecture(config))


def save_hf(config: Config, params: Any, path: str | Path, dtype: Any = None, max_shard_size: int = 5 * 10**9) -> None:
    """The folder that `to_hf` writes, tensor by tensor."""
    llama.save_hf(config, params, path, dtype, max_shard_size, _architecture(config))
