"""Llama in Hugging Face's `transformers`, whose `LlamaForCausalLM` is the same function: Llama 2, 3, 3.1, 3.2, 3.3, and
models of their kind.

Both rotate the pair (i, i + h/2) of a head (`rotate_half` there), so that projections keep their order.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from ..huggingface.architecture import Architecture, Follows, Stored, linear, under
from ..huggingface.files import Tensor, write_file
from ..huggingface.weights import Family, on_host
from .lora import is_adapter, merged
from .model import Config, Llama

ENDS = {
    "embedding": Stored("model.embed_tokens.weight"),
    "norm/scale": Stored("model.norm.weight"),
    "head/kernel": linear("lm_head.weight"),
}
ATTENTION = {
    "attention_norm/scale": Stored("input_layernorm.weight"),
    "attention/query/kernel": linear("self_attn.q_proj.weight"),
    "attention/key/kernel": linear("self_attn.k_proj.weight"),
    "attention/value/kernel": linear("self_attn.v_proj.weight"),
    "attention/out/kernel": linear("self_attn.o_proj.weight"),
    "ffn_norm/scale": Stored("post_attention_layernorm.weight"),
}
SWIGLU = {f"{part}/kernel": linear(f"{part}_proj.weight") for part in ("gate", "up", "down")}
FFN = under("ffn", "mlp", SWIGLU)
# Of mixtures, the experts' tensors one by one.
EXPERTS = {"ffn/router/kernel": linear("mlp.gate.weight")} | {
    f"ffn/experts/{part}": linear(f"mlp.experts.{{expert}}.{part}_proj.weight") for part in ("gate", "up", "down")
}
SIZES = {"vocab": "vocab_size", "dim": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads"}
HEADS = {"kv_heads": ("num_key_value_heads", lambda sizes: sizes["heads"]), "tied": ("tie_word_embeddings", False)}
# One function with two names; no dropout of attention; numbers that are no floats have to be dequantized first.
ALWAYS = {"hidden_act": ("silu", "swish"), "attention_dropout": (0.0,), "quantization_config": ()}

_LLAMA = Architecture(
    "llama",
    "LlamaForCausalLM",
    tensors={**ENDS, **under("layers", "model.layers.{layer}", ATTENTION | FFN)},
    sizes={**SIZES, "ffn": "intermediate_size"},
    defaults={**HEADS, "context": ("max_position_embeddings", 2048), "norm_eps": ("rms_norm_eps", 1e-6)},
    fixed={**ALWAYS, "attention_bias": (False,), "mlp_bias": (False,)},
    follows={
        "head_dim": Follows(
            lambda config: config.head_dim,
            " is not supported: Llama here has hidden_size / num_attention_heads = {c.dim} / {c.heads}",
        )
    },
    # Where Llama 3.1 stops to stretch and starts to; all that Meta has published have these (`apply_scaling`).
    stretch={
        "rope_type": "llama3", "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192
    },
)  # fmt: skip
LLAMA = Family(
    "Llama", "Llama here has", Config, Llama, (_LLAMA,), is_adapter,
    lambda config, params: merged(params, config.lora_alpha / config.lora) if config.lora else params,
)  # fmt: skip
from_hf = LLAMA.from_hf
"""`Family.from_hf` of a `LlamaForCausalLM`."""
to_hf = LLAMA.to_hf
"""`Family.to_hf` of a `LlamaForCausalLM`."""
save_hf = LLAMA.save_hf
"""`Family.save_hf` of a `LlamaForCausalLM`."""


def save_adapters(config: Config, params: Any, path: str | Path, base: str = "") -> None:
    """The adapters alone, in float32, as a folder that `PeftModel.from_pretrained` of the package `peft` loads.

    Args:
      config: the model's sizes, with `lora`.
      params: as for `to_hf`, or for `save_hf`.
      path: a folder to make, or one without adapters in it.
      base: the name or folder of the model that they are for, which is written beside them.

    Raises ValueError where the config has no adapters, or `params` is not of it, and where the folder has some.
    """
    if not config.lora:
        raise ValueError("this model has no adapters; train one that has: dataclasses.replace(config, lora=16)")
    path, weights = Path(path), "adapter_model.safetensors"  # as peft's own checkpoints have it
    if (path / weights).exists():
        raise ValueError(f"{path} already holds {weights}; choose another folder, or remove it")
    adapters: dict[str, Tensor] = {}
    modules: set[str] = set()
    for at, x in LLAMA.by_path(config, params).items():
        if is_adapter(at):
            above, _, end = at.rpartition("/")
            module, stacked = _LLAMA.tensors[f"{above}/kernel"].name.removesuffix(".weight"), on_host(at, x)
            modules.add(module.rpartition(".")[2])
            for layer in range(config.layers):
                part = np.asarray(stacked[layer]).astype(np.float32).T
                name = f"base_model.model.{module.format(layer=layer)}.lora_{end[-1].upper()}.weight"
                adapters[name] = Tensor(part.shape, lambda part=part: part, part.dtype)
    path.mkdir(parents=True, exist_ok=True)
    write_file(path / weights, adapters)
    stated = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.lora,
        "lora_alpha": config.lora_alpha,
        "target_modules": sorted(modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (path / "adapter_config.json").write_text(json.dumps(stated, indent=2) + "\n")
