"""The options of `config.json` that no architecture here reads: which ones change the function of a model.

    NEUTRAL    "logits_scaling" -> (1,)        refused, unless it has one of these values
    INERT      "use_cache"                     ignored: says nothing about the function
    the rest                                   ignored with a warning that names them

transformers ignores options that a model's class does not know. A config without `model_type`, or with the wrong one,
would thus lose what distinguishes its model from a Llama. `NEUTRAL` has the options of models whose tensors have the
same names as a Llama's: Granite, MiniCPM, SmolLM3, Mistral, Qwen, Gemma, Cohere, OLMo, Phi, GLM, Llama 4 and gpt-oss.
"""

import inspect
import warnings
from collections.abc import Collection, Mapping
from typing import Any

# Options -> the values with which they change nothing; () if there are none. Each element of a list must be such a
# value. null counts as absent. Numbers compare as in Python: 1 is 1.0 and True.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    # Multipliers of activations: Granite, MiniCPM, Cohere, Falcon-H1.
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling", "scale_emb"), (1,)),
    **dict.fromkeys(("logit_scale", "lm_head_multiplier", "key_multiplier", "attention_out_multiplier"), (1,)),
    **dict.fromkeys(("attention_multiplier", "scale_depth", "dim_model_base", "query_pre_attn_scalar"), ()),
    **dict.fromkeys(("scale_embeddings", "scale_embedding", "normalize_embedding"), (False,)),
    # Attention that sees fewer keys, or other scores: Mistral, Qwen, Gemma, OLMo, gpt-oss, Llama 4.
    "sliding_window": (),  # harmless with use_sliding_window=False, or from max_position_embeddings on
    "use_sliding_window": (False,),
    "layer_types": ("full_attention",),
    "is_causal": (True,),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "logits_soft_cap", "clip_qkv"), ()),
    **dict.fromkeys(("attention_chunk_size", "sliding_window_pattern", "sliding_window_size"), ()),
    **dict.fromkeys(("use_qk_norm", "qk_norm", "qk_layernorm", "attn_temperature_tuning"), (False,)),
    # Positions: SmolLM3, Llama 4, GLM, GPT-NeoX, Gemma 3, Falcon.
    "no_rope_layers": (1,),  # 1 marks a layer with rotary embedding
    "no_rope_layer_interval": (0,),  # harmless beside no_rope_layers, which it would compute
    "position_embedding_type": ("rope", "rotary"),
    **dict.fromkeys(("rope_interleaved", "rope_interleave", "use_mrope", "alibi"), (False,)),
    **dict.fromkeys(("rotary_pct", "rotary_percent", "rope_percentage"), (1,)),
    **dict.fromkeys(("rotary_dim", "rope_local_base_freq", "global_rope_theta", "local_rope_theta"), ()),
    # Layers: biases, norms with a mean, activations, branches side by side, experts.
    **dict.fromkeys(("attention_bias", "attention_out_bias", "qkv_bias", "use_qkv_bias"), (False,)),
    **dict.fromkeys(("mlp_bias", "use_bias", "add_cross_attention"), (False,)),
    **dict.fromkeys(("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"), ()),
    **dict.fromkeys(("parallel_attn", "use_parallel_residual", "parallel_residual"), (False,)),
    **dict.fromkeys(("hidden_activation", "activation_function"), ("silu", "swish")),
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "hidden_dropout", "router_jitter_noise"), (0,)),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "shared_expert_intermediate_size"), (0,)),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), (0,)),
    # The whole model.
    "is_encoder_decoder": (False,),
    "pruned_heads": ({},),
    "quantization": (),
}  # fmt: skip
# Options of tokens, caches, initial values, training losses, files and generation. Also those that begin with `_`,
# `output_` or `unsloth_`, and those that end with `_token_id`.
INERT = frozenset(
    "use_cache initializer_range pretraining_tp dtype torch_dtype transformers_version use_bfloat16 torchscript "
    "return_dict return_dict_in_generate chunk_size_feed_forward id2label label2id problem_type tokenizer_class prefix "
    "finetuning_task task_specific_params is_decoder tie_encoder_decoder tf_legacy_loss remove_invalid_values "
    "cache_implementation attn_implementation max_window_layers router_aux_loss_coef is_llama_config "
    "max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k "
    "top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids "
    "num_return_sequences exponential_decay_length_penalty suppress_tokens begin_suppress_tokens "
    "transformers.js_config".split()
)


def check_unread(options: Mapping[str, Any], read: Collection[str], support_phrase: str) -> None:
    """Check the options of `config.json` that an architecture does not read.

    Args:
      options: all options that are not null.
      read: the names of those that the architecture reads.
      support_phrase: how errors begin to say what the model here supports, such as "Llama here has".

    Raises:
      ValueError: some options change the function that the model computes. The error names all of them.

    Warns:
      UserWarning: some options are unknown. The warning names all of them.
    """
    unread = {name: value for name, value in options.items() if name not in read}
    # A window that no layer has, or that is as long as all positions, hides nothing.
    window, context = unread.get("sliding_window"), options.get("max_position_embeddings")
    has_long_window = isinstance(window, int) and isinstance(context, int) and window >= context
    if has_long_window or unread.get("use_sliding_window") is False:
        unread.pop("sliding_window", None)
    if "no_rope_layers" in unread:
        unread.pop("no_rope_layer_interval", None)
    if harmful := {name: value for name, value in unread.items() if name in NEUTRAL and not _is_neutral(name, value)}:
        stated = ", ".join(f"{name}={value!r}" for name, value in harmful.items())
        needed = ", ".join(f"{name}={NEUTRAL[name][0]!r}" if NEUTRAL[name] else f"no {name}" for name in harmful)
        raise ValueError(
            f"config has options that change what a model computes, which are not supported: {stated}. "
            f"{support_phrase} {needed}; write that model in Flax, and pass it to jp.from_nnx"
        )
    if unknown := sorted(name for name in unread if name not in NEUTRAL and not _is_inert(name)):
        warnings.warn(
            f"config has {', '.join(unknown)}, which the model here does not know and ignores. If they change what the "
            "model computes, its results are wrong: compare logits with transformers, then remove them from the config",
            # The line of the user, who may have called `llama.from_hf`, `Family.from_hf` or `Family.to_config`.
            stacklevel=next(
                level
                for level, info in enumerate(inspect.stack(0), 1)
                if not info.frame.f_globals["__name__"].startswith("jaxpar.")
            ),
        )


def _is_inert(name: str) -> bool:
    """Return whether an option says nothing about the function of a model."""
    return name in INERT or name.startswith(("_", "output_", "unsloth_")) or name.endswith("_token_id")


def _is_neutral(name: str, value: Any) -> bool:
    """Return whether a value of an option of `NEUTRAL` changes nothing."""
    values = value if isinstance(value, list | tuple) else [value]
    return all(x in NEUTRAL[name] for x in values)
