"""Conversion of `Mixtral` from and to `MixtralForCausalLM` and `Qwen3MoeForCausalLM` of Hugging Face's `transformers`.

The files contain one tensor for each expert, as the published ones do. transformers 5 joins the experts when it loads a
folder and separates them when it saves one: pass a folder to `from_hf`, not a state dict of its modules.
"""

from __future__ import annotations

from ..huggingface import Family
from ..huggingface.architecture import Architecture, DerivedOption, TensorPattern, in_layers, linear
from ..llama.weights import ALWAYS, ATTENTION, ENDS, HEADS, SIZES
from .model import Config, Mixtral

_REQUIRED = {**SIZES, "chosen": "num_experts_per_tok"}
_OPTIONAL = {
    **HEADS,
    "head_dim": ("head_dim", lambda sizes: sizes["dim"] // sizes["heads"]),
    "context": ("max_position_embeddings", 32768),
}
# Mixtral names an expert's matrices w1 (gate), w3 (up) and w2 (down).
_MIXTRAL_MIXTURE = {
    "ffn/router/kernel": linear("block_sparse_moe.gate.weight"),
    "ffn/experts/gate": linear("block_sparse_moe.experts.{expert}.w1.weight"),
    "ffn/experts/up": linear("block_sparse_moe.experts.{expert}.w3.weight"),
    "ffn/experts/down": linear("block_sparse_moe.experts.{expert}.w2.weight"),
}
_QWEN_LAYER = {
    "attention/query_norm/scale": TensorPattern("self_attn.q_norm.weight"),
    "attention/key_norm/scale": TensorPattern("self_attn.k_norm.weight"),
    "ffn/router/kernel": linear("mlp.gate.weight"),
    **{f"ffn/experts/{part}": linear(f"mlp.experts.{{expert}}.{part}_proj.weight") for part in ("gate", "up", "down")},
}
_ARCHITECTURES = (
    Architecture(
        "mixtral",
        "MixtralForCausalLM",
        patterns={**ENDS, **in_layers(ATTENTION | _MIXTRAL_MIXTURE)},
        required={**_REQUIRED, "ffn": "intermediate_size", "experts": "num_local_experts"},
        optional={**_OPTIONAL, "norm_eps": ("rms_norm_eps", 1e-5)},
        fixed=ALWAYS,
        implied={"qk_norm": False, "normalize": True},
        rope_theta=1_000_000.0,
    ),
    Architecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        patterns={**ENDS, **in_layers(ATTENTION | _QWEN_LAYER)},
        required={**_REQUIRED, "ffn": "moe_intermediate_size", "experts": "num_experts"},
        optional={**_OPTIONAL, "norm_eps": ("rms_norm_eps", 1e-6), "normalize": ("norm_topk_prob", False)},
        fixed={**ALWAYS, "attention_bias": (False,), "mlp_only_layers": ([],), "decoder_sparse_step": (1,)},
        derived={"intermediate_size": DerivedOption(lambda config: config.ffn)},  # the width of dense layers; unused
        implied={"qk_norm": True},
        version4_names={"num_local_experts": "num_experts"},
        redundant=("use_qk_norm",),
        rope_theta=1_000_000.0,
    ),
)
MIXTRAL = Family("Mixtral", "mixtures here have", Config, Mixtral, _ARCHITECTURES)
from_hf = MIXTRAL.from_hf
"""`Family.from_hf` of a `MixtralForCausalLM` or `Qwen3MoeForCausalLM`."""
to_hf = MIXTRAL.to_hf
"""`Family.to_hf` of a `MixtralForCausalLM` or `Qwen3MoeForCausalLM`."""
save_hf = MIXTRAL.save_hf
"""`Family.save_hf` of a `MixtralForCausalLM` or `Qwen3MoeForCausalLM`."""
