"""A `Mixtral` in Hugging Face's `transformers`, whose `MixtralForCausalLM` and `Qwen3MoeForCausalLM` do the same.

The files hold one tensor for each expert, as the published ones do. transformers 5 joins them when it loads a folder,
and parts them again when it saves one: pass a folder, and no state dict of its modules.
"""

from __future__ import annotations

from ..huggingface import Family
from ..huggingface.architecture import Architecture, Follows, Stored, linear, under
from ..llama.weights import ALWAYS, ATTENTION, ENDS, EXPERTS, HEADS, SIZES
from .model import Config, Mixtral

_SIZES = {**SIZES, "chosen": "num_experts_per_tok"}
_DEFAULTS = {
    **HEADS,
    "head_dim": ("head_dim", lambda sizes: sizes["dim"] // sizes["heads"]),
    "context": ("max_position_embeddings", 32768),
}
_MIXTRAL = {
    "ffn/router/kernel": linear("block_sparse_moe.gate.weight"),
    "ffn/experts/gate": linear("block_sparse_moe.experts.{expert}.w1.weight"),
    "ffn/experts/up": linear("block_sparse_moe.experts.{expert}.w3.weight"),
    "ffn/experts/down": linear("block_sparse_moe.experts.{expert}.w2.weight"),
}
_QWEN = {
    "attention/query_norm/scale": Stored("self_attn.q_norm.weight"),
    "attention/key_norm/scale": Stored("self_attn.k_norm.weight"),
    **EXPERTS,
}
_ARCHITECTURES = (
    Architecture(
        "mixtral",
        "MixtralForCausalLM",
        tensors={**ENDS, **under("layers", "model.layers.{layer}", ATTENTION | _MIXTRAL)},
        sizes={**_SIZES, "ffn": "intermediate_size", "experts": "num_local_experts"},
        defaults={**_DEFAULTS, "norm_eps": ("rms_norm_eps", 1e-5)},
        fixed={**ALWAYS, "sliding_window": ()},
        settings={"qk_norm": False, "normalize": True},
        theta=1_000_000.0,
    ),
    Architecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        tensors={**ENDS, **under("layers", "model.layers.{layer}", ATTENTION | _QWEN)},
        sizes={**_SIZES, "ffn": "moe_intermediate_size", "experts": "num_experts"},
        defaults={**_DEFAULTS, "norm_eps": ("rms_norm_eps", 1e-6), "normalize": ("norm_topk_prob", False)},
        fixed={**ALWAYS, "attention_bias": (False,), "mlp_only_layers": ([],), "decoder_sparse_step": (1,)},
        follows={"intermediate_size": Follows(lambda config: config.ffn)},  # of dense layers, which there are none of
        settings={"qk_norm": True},
        renamed={"num_local_experts": "num_experts"},
        theta=1_000_000.0,
    ),
)
MIXTRAL = Family("Mixtral", "mixtures here have", Config, Mixtral, _ARCHITECTURES)
from_hf = MIXTRAL.from_hf
"""`Family.from_hf` of a `MixtralForCausalLM` or `Qwen3MoeForCausalLM`."""
to_hf = MIXTRAL.to_hf
"""`Family.to_hf` of a `MixtralForCausalLM` or `Qwen3MoeForCausalLM`."""
save_hf = MIXTRAL.save_hf
"""`Family.save_hf` of a `MixtralForCausalLM` or `Qwen3MoeForCausalLM`."""
