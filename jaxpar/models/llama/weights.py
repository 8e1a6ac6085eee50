"""Conversion of Llama from and to `LlamaForCausalLM` of Hugging Face's `transformers`, and of its adapters to `peft`.

The two compute the same function: Llama 2, 3, 3.1, 3.2, 3.3 and models with the same architecture. Both rotate the pair
(i, i + h/2) of a head (`rotate_half` in transformers), so the columns of projections need no permutation. The tables
are rows of `huggingface/architecture.py`; `mixtral/weights.py` reuses most of them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from ..huggingface.architecture import Architecture, DerivedOption, TensorPattern, in_layers, linear
from ..huggingface.files import Tensor, write_file
from ..huggingface.weights import Family, on_host
from .lora import is_adapter, merge_adapters
from .model import Config, Llama

# Our path -> the tensors, of everything outside the layers.
ENDS = {
    "embedding": TensorPattern("model.embed_tokens.weight"),
    "norm/scale": TensorPattern("model.norm.weight"),
    "head/kernel": linear("lm_head.weight"),
}
# The same within a layer, except its feed-forward.
ATTENTION = {
    "attention_norm/scale": TensorPattern("input_layernorm.weight"),
    "attention/query/kernel": linear("self_attn.q_proj.weight"),
    "attention/key/kernel": linear("self_attn.k_proj.weight"),
    "attention/value/kernel": linear("self_attn.v_proj.weight"),
    "attention/out/kernel": linear("self_attn.o_proj.weight"),
    "ffn_norm/scale": TensorPattern("post_attention_layernorm.weight"),
}
_FFN = {f"ffn/{part}/kernel": linear(f"mlp.{part}_proj.weight") for part in ("gate", "up", "down")}
# Fields of our config -> options of config.json.
SIZES = {"vocab": "vocab_size", "dim": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads"}
# Fields -> (option, default). Without key/value heads, every head has its own key and value.
HEADS = {"kv_heads": ("num_key_value_heads", lambda sizes: sizes["heads"]), "tied": ("tie_word_embeddings", False)}
# Options -> supported values. "swish" is another name of "silu". Quantized weights must be dequantized before reading.
ALWAYS = {"hidden_act": ("silu", "swish"), "attention_dropout": (0.0,), "quantization_config": ()}

_LLAMA = Architecture(
    "llama",
    "LlamaForCausalLM",
    patterns={**ENDS, **in_layers(ATTENTION | _FFN)},
    required={**SIZES, "ffn": "intermediate_size"},
    optional={**HEADS, "context": ("max_position_embeddings", 2048), "norm_eps": ("rms_norm_eps", 1e-6)},
    fixed={**ALWAYS, "attention_bias": (False,), "mlp_bias": (False,)},
    derived={
        "head_dim": DerivedOption(
            lambda config: config.head_dim,
            " is not supported: Llama here has hidden_size / num_attention_heads = {c.dim} / {c.heads}",
        )
    },
    # The constants of `rope_table`, which all models published by Meta have (`apply_scaling` of its reference code).
    rope_scaling={
        "rope_type": "llama3", "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192
    },
)  # fmt: skip
LLAMA = Family(
    "Llama", "Llama here has", Config, Llama, (_LLAMA,), is_adapter,
    lambda config, params: merge_adapters(params, config.lora_alpha / config.lora) if config.lora else params,
)  # fmt: skip
from_hf = LLAMA.from_hf
"""`Family.from_hf` of a `LlamaForCausalLM`."""
to_hf = LLAMA.to_hf
"""`Family.to_hf` of a `LlamaForCausalLM`."""
save_hf = LLAMA.save_hf
"""`Family.save_hf` of a `LlamaForCausalLM`."""


def save_adapters(config: Config, params: Any, path: str | Path, base: str = "") -> None:
    """Write the adapters, in float32, to a folder that `PeftModel.from_pretrained` of the package `peft` loads.

    Args:
      config, params: as for `to_hf` or `save_hf`.
      path: a folder to create, or an existing one without adapters.
      base: the name or folder of the model that the adapters were trained on, for `adapter_config.json`.

    Raises:
      ValueError: the config has no adapters, `params` has another tree or other shapes than a model of this config, or
        the folder contains adapters.
    """
    if not config.lora:
        raise ValueError("this model has no adapters; train one that has: dataclasses.replace(config, lora=16)")
    path, file_name = Path(path), "adapter_model.safetensors"  # the name in peft's checkpoints
    if (path / file_name).exists():
        raise ValueError(f"{path} already holds {file_name}; choose another folder, or remove it")
    # 1. Name and transpose the adapters: "layers/attention/query/lora_a" [L, in, r] becomes, for each layer,
    #    "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" [r, in].
    adapters: dict[str, Tensor] = {}
    module_names: set[str] = set()
    for param_path, param in LLAMA.by_path(config, params).items():
        if is_adapter(param_path):
            projection, _, leaf = param_path.rpartition("/")
            # The adapter's module has the name of the kernel's tensor in the files.
            module = _LLAMA.patterns[f"{projection}/kernel"].name.removesuffix(".weight")
            stack = on_host(param_path, param)
            module_names.add(module.rpartition(".")[2])
            for layer in range(config.layers):
                matrix = np.asarray(stack[layer]).astype(np.float32).T
                name = f"base_model.model.{module.format(layer=layer)}.lora_{leaf[-1].upper()}.weight"
                adapters[name] = Tensor(matrix.shape, lambda matrix=matrix: matrix, matrix.dtype)
    # 2. Write them, and the options that peft needs.
    path.mkdir(parents=True, exist_ok=True)
    write_file(path / file_name, adapters)
    adapter_config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.lora,
        "lora_alpha": config.lora_alpha,
        "target_modules": sorted(module_names),
        "lora_dropout": 0.0,
        "bias": "none",
        # Our matrices are transposed to torch's order above, so peft must not transpose them again.
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (path / "adapter_config.json").write_text(json.dumps(adapter_config, indent=2) + "\n")
