"""A `DeepSeek` in Hugging Face's `transformers`, whose `DeepseekV3ForCausalLM` does the same.

The files hold one tensor for each expert, as the published ones do. Those are in float8, and in bfloat16 where someone
has dequantized them: what is read here is the latter. Tensors of the head for several tokens at once are passed over.
"""

from __future__ import annotations

from ..huggingface import Family
from ..huggingface.architecture import Architecture, Follows, Stored, linear, under
from ..llama.weights import ALWAYS, ENDS, EXPERTS, FFN, SIZES, SWIGLU
from . import yarn
from .config import Config
from .model import DeepSeek

_ATTENTION = {
    "attention_norm/scale": Stored("input_layernorm.weight"),
    "attention/query_latent/kernel": linear("self_attn.q_a_proj.weight"),
    "attention/query_norm/scale": Stored("self_attn.q_a_layernorm.weight"),
    "attention/query/kernel": linear("self_attn.q_b_proj.weight"),
    "attention/latent/kernel": linear("self_attn.kv_a_proj_with_mqa.weight"),
    "attention/latent_norm/scale": Stored("self_attn.kv_a_layernorm.weight"),
    "attention/key_value/kernel": linear("self_attn.kv_b_proj.weight"),
    "attention/out/kernel": linear("self_attn.o_proj.weight"),
    "ffn_norm/scale": Stored("post_attention_layernorm.weight"),
}
_MIXTURE = {
    **EXPERTS,
    "ffn/bias": Stored("mlp.gate.e_score_correction_bias"),
    **under("ffn/shared", "mlp.shared_experts", SWIGLU),
}
_DEEPSEEK = Architecture(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    tensors={
        **ENDS,
        **under("dense", "model.layers.{dense}", _ATTENTION | FFN),
        **under("layers", "model.layers.{mixture}", _ATTENTION | _MIXTURE),
    },
    numbers={"dense": lambda config: range(config.dense), "mixture": lambda config: range(config.dense, config.layers)},
    sizes={
        **SIZES,
        "dense": "first_k_dense_replace",
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
    },
    defaults={
        "scale": ("routed_scaling_factor", 2.5),
        "normalize": ("norm_topk_prob", True),
        "context": ("max_position_embeddings", yarn.FIRST),
        "norm_eps": ("rms_norm_eps", 1e-6),
    },
    fixed={
        **ALWAYS,
        "attention_bias": (False,),
        "rope_interleave": (True,),
        "tie_word_embeddings": (False,),
        "moe_layer_freq": (1,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
    },
    follows={
        "num_key_value_heads": Follows(lambda config: config.heads, ": needs num_attention_heads, {c.heads}"),
        "num_nextn_predict_layers": Follows(lambda config: 0),  # of the head for several tokens
    },
    renamed={"num_local_experts": "n_routed_experts"},
    stretch={
        "type": "yarn", "original_max_position_embeddings": yarn.FIRST, "beta_fast": yarn.FAST, "beta_slow": yarn.SLOW,
        "mscale": 1, "mscale_all_dim": 1,
    },
    ignored=("model.layers.{layers}.*",),  # that head is kept as one more layer
)  # fmt: skip
DEEPSEEK = Family("DeepSeek", "a DeepSeek here has", Config, DeepSeek, (_DEEPSEEK,))
from_hf = DEEPSEEK.from_hf
"""`Family.from_hf` of a `DeepseekV3ForCausalLM`."""
to_hf = DEEPSEEK.to_hf
"""`Family.to_hf` of a `DeepseekV3ForCausalLM`."""
save_hf = DEEPSEEK.save_hf
"""`Family.save_hf` of a `DeepseekV3ForCausalLM`."""
