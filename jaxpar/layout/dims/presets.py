"""Names that common transformers give to parameters and to their dims, and what of them is over `tensor`."""

from __future__ import annotations

import re

# Kernels are [in, out], perhaps stacked: -1 is column-parallel, -2 row-parallel. The first rule that matches counts.
PRESETS: dict[str, int | None] = {
    # Attention: ours; Llama, Qwen, Gemma and their kin as Hugging Face names them; T5; Llama as Meta does; GPT-2;
    # Diffusers.
    "(query|key|value|(query|key|value|[qkv])_proj|[qkv]|w[qkv]|to_[qkv])/(kernel|w)": -1,
    "(out|o_proj|out_proj|output_proj|o|wo|to_out|to_out_0|(attn|attention)/c_proj)/(kernel|w)": -2,
    # Feed-forward: ours; Hugging Face; GPT-2; OPT and ViT; GPT-J; T5; Meta; BERT; Flax's examples.
    "(gate|up|gate_proj|up_proj|c_fc|fc1|fc_in|wi|wi_[01]|w1|w3|intermediate/dense)/(kernel|w)": -1,
    "(down|down_proj|mlp/c_proj|fc2|fc_out|w2|output/dense)/(kernel|w)": -2,
    "MlpBlock_[0-9]+/Dense_0/kernel": -1,
    "MlpBlock_[0-9]+/Dense_1/kernel": -2,
    # Gemma of Flax's examples, with heads N: [N, D, h], [2, N, D, h], [3, N, D, h] and [N, h, D].
    "(q|kv|qkv|attn_vec)_einsum/w": -3,
}
# Where a model begins and ends: they say nothing of what is between.
ENDS: dict[str, int | None] = {
    "(head|lm_head)/(kernel|w)": -1,
    "(wpe|[^/]*(pos|type)[^/]*)/embedding": None,
    "embedding|input_embedding": -2,
}

# Attention's where heads have a dim of their own, [D, H, h] and [H, h, D]: `MultiHeadAttention` of Flax NNX,
# `MultiHeadDotProductAttention` of Linen, Tunix's models.
HEADS: dict[str, int | None] = {
    "(query|key|value|[qkv]_proj|[qkv]|w[qkv])/(kernel|w)": -2,
    "(out|o_proj|out_proj|o|wo)/(kernel|w)": -3,
}
PAIRS = (("query", "out"), ("q_proj", "o_proj"), ("q_proj", "out_proj"), ("q", "o"), ("wq", "wo"))

# Kernels that are two or three side by side.
FUSED = re.compile(
    "(.*/)?(c_attn|[Ww]?qkv|to_qkv|qkv_proj|query_key_value|in_proj|to_kv|kv_proj|gate_up_proj)/(kernel|w)"
)

# Names that annotations give to dims. Logical ones: `standard_logical_axis_rules` of T5X and `logical_axis_rules` of
# MaxText, neither of which splits "embed", "kv" (the features of one head) or "layers" over this axis. Mesh axes: ours
# and MaxText's; Tunix's; T5X's and the Flax documentation's; EasyLM's.
DIMS: dict[str, str | None] = dict.fromkeys(
    ("vocab", "mlp", "mlp_no_fsdp", "heads", "q_heads", "kv_heads", "joined_kv", "tensor", "tp", "model", "mp"),
    "tensor",
)
# A norm works on the residual stream, which is whole; yet Tunix annotates its scale with the axis.
NORM = re.compile(r"(.*/)?[^/]*norm[^/]*/[^/]+", re.IGNORECASE)
