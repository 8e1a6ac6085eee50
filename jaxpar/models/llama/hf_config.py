"""Llama's sizes as the `config.json` of Hugging Face's `transformers` says them, in the words of version 4 and of 5."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral
from typing import Any

from . import model as llama

# What the model here computes; an option that is absent or null has this value too.
_ONLY: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama",),
    "hidden_act": ("silu", "swish"),  # one function with two names
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0,),
    "partial_rotary_factor": (1,),
    "quantization_config": (),
}
_SIZES = {
    "vocab": "vocab_size",
    "dim": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "ffn": "intermediate_size",
}
# Where Llama 3.1 stops to stretch and starts to; all that Meta has published have these (`apply_scaling`).
_STRETCH = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}


def options_of(given: Any, needed: str) -> dict[str, Any]:
    """What a configuration of transformers, or its dict, says, but for nulls. Raises ValueError on anything else."""
    given = given.to_dict() if hasattr(given, "to_dict") else given
    if not isinstance(given, Mapping):
        raise ValueError(f"config is a {type(given).__name__}; pass {needed}")
    return {name: value for name, value in given.items() if value is not None}


def sizes_of(options: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Our sizes by their names there. Raises ValueError where one is missing."""
    if missing := [name for name in names.values() if name not in options]:
        raise ValueError(f"config lacks {', '.join(missing)}; pass all that the model's config.json holds")
    return {ours: options[theirs] for ours, theirs in names.items()}


def to_config(given: Any) -> llama.Config:
    """Sizes of a `Llama` from a `Config`, a `transformers.LlamaConfig`, or its dict, such as what `config.json` holds.

    Version 4 says `rope_theta` and `rope_scaling`, version 5 `rope_parameters`. What is absent has the value that
    `LlamaConfig` gives it, but for the five sizes that no model can do without. Options that have no part in the
    function (token ids, caches, initial values) are passed over.

    Raises ValueError on options that the model here does not have, naming them.
    """
    if isinstance(given, llama.Config):
        return given
    options = options_of(given, "a llama.Config, a transformers.LlamaConfig or its dict")
    sizes = sizes_of(options, _SIZES)
    for ours, theirs in _SIZES.items():
        if not isinstance(sizes[ours], Integral) or isinstance(sizes[ours], bool) or sizes[ours] < 1:
            raise ValueError(f"{theirs}={sizes[ours]!r} is no size; needs a whole number from 1, as the model's own "
                             "config.json has it")  # fmt: skip
    _check(options)
    head_dim = sizes["dim"] / sizes["heads"]
    if options.get("head_dim", head_dim) != head_dim:
        raise ValueError(
            f"head_dim={options['head_dim']} is not supported: Llama here has hidden_size / num_attention_heads = "
            f"{sizes['dim']} / {sizes['heads']}"
        )
    context = options.get("max_position_embeddings", 2048)
    return llama.Config(
        **sizes,
        **_rope(options, context),
        kv_heads=options.get("num_key_value_heads", sizes["heads"]),
        context=context,
        norm_eps=options.get("rms_norm_eps", 1e-6),
        tied=options.get("tie_word_embeddings", False),
    )


def to_dict(config: llama.Config, dtype: str) -> dict[str, Any]:
    """What `config.json` says of a `Llama` of these sizes and its weights of `dtype`, such as "bfloat16".

    In the words of version 4, which 5 understands. Dropout, which is of training, has no word there. The ids of the
    tokens that begin and end a text are the tokenizer's: null here, since what is absent would be Llama 2's.
    """
    scaling = {"rope_type": "llama3", "factor": config.rope_factor, **_STRETCH} if config.rope_factor != 1 else None
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{theirs: getattr(config, ours) for ours, theirs in _SIZES.items()},
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": config.tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": dtype,
    }


def _check(options: Mapping[str, Any]) -> None:
    for name, known in _ONLY.items():
        if name in options and options[name] not in known:
            needed = f"{known[0]!r}" if known else "none"
            hint = "; write that model in Flax, and pass it to jp.from_nnx" if name == "model_type" else ""
            raise ValueError(f"{name}={options[name]!r} is not supported: Llama here has {needed}{hint}")


def _rope(options: Mapping[str, Any], context: int) -> dict[str, Any]:
    """`rope_theta` and `rope_factor` of a `Config`."""
    rope = {k: v for k, v in _rope_options(options).items() if v is not None}
    theta = rope.pop("rope_theta", options.get("rope_theta", 10_000.0))
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)  # the older name, beside the newer
    for name, value in (("rope_theta", theta), ("factor", rope.get("factor", 1))):
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ValueError(
                f"{name}={value!r} of rotary embedding is no positive number; Llama 3 has 500000.0 and 8.0"
            )
    _check(rope)
    rope.pop("partial_rotary_factor", None)
    if kind == "default" and not rope:
        return {"rope_theta": float(theta), "rope_factor": 1.0}
    if kind != "llama3":
        raise ValueError(
            f"rope_scaling (rope_parameters) of type {kind!r} with {rope} is not supported: Llama here has 'default', "
            "which takes nothing, and 'llama3'"
        )
    if (factor := rope.pop("factor", None)) is None:
        raise ValueError("rope_scaling (rope_parameters) of type 'llama3' lacks factor; Llama 3.1 has 8, Llama 3.2 32")
    # As in transformers: without a word on it, the first training had the length that the model has now.
    first = options.get("original_max_position_embeddings", context)
    stretch = {"original_max_position_embeddings": first, **rope}
    if stretch != _STRETCH:
        raise ValueError(f"rope_scaling (rope_parameters) of type 'llama3' with {stretch}: needs {_STRETCH}")
    return {"rope_theta": float(theta), "rope_factor": float(factor)}


def _rope_options(options: Mapping[str, Any]) -> Mapping[str, Any]:
    found = options.get("rope_scaling") or options.get("rope_parameters") or {}
    if not isinstance(found, Mapping):
        raise ValueError(
            f"rope_scaling (rope_parameters) is {found!r}; needs a dict such as {{'rope_type': 'llama3', ...}}"
        )
    return found
