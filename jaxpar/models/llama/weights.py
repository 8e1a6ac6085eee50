"""Conversion of Llama from and to `LlamaForCausalLM` of Hugging Face's `transformers`, and of its adapters to `peft`.

The two compute the same function: Llama 2, 3, 3.1, 3.2, 3.3 and models with the same architecture. Both rotate the pair
(i, i + h/2) of a head (`rotate_half` in transformers), so the columns of projections need no permutation.
`huggingface/architecture.py` explains the tables; `mixtral/weights.py` reuses most of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...backend.files import local, member
from ...backend.text import few
from ..huggingface.architecture import Architecture, DerivedOption, TensorPattern, in_layers, linear
from ..huggingface.files import Tensor, open_file, write_file
from ..huggingface.weights import Family, on_host
from .lora import PROJECTIONS, PeftConfig, is_adapter, merge_adapters
from .model import Config, Llama

_ADAPTERS = "adapter_model.safetensors"  # the name in peft's checkpoints
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
# Fields -> (option, default). If `config.json` has no number of key/value heads, each query head has its own.
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
to_hf = LLAMA.to_hf
"""`Family.to_hf` of a `LlamaForCausalLM`."""
save_hf = LLAMA.save_hf
"""`Family.save_hf` of a `LlamaForCausalLM`."""


def from_hf(
    source: str | Path | Mapping[str, Any], config: Any = None, dtype: Any = None, adapter: str | Path | None = None
) -> tuple[Config, dict[str, Any]]:
    """Read the sizes and weights of a `LlamaForCausalLM`, and adapters that `peft` or `save_adapters` wrote.

    Args:
      source, config, dtype: see `Family.from_hf`. The source may also be a folder of adapters whose
        `adapter_config.json` names the folder of their base.
      adapter: a folder with `adapter_config.json` and `adapter_model.safetensors`.

    Returns:
      `(config, params)`, as `Family.from_hf`. With adapters, the config has their rank, scale and targets, and `params`
      contains them: `step.init(key, params=params)` without `fresh=` goes on with them, and `to_hf` merges them.

    Raises:
      ValueError: as `Family.from_hf`; or the adapters compute another function than those of `Llama`, do not fit the
        base, or name a base that is no folder.
    """
    if adapter is None and isinstance(source, str | Path) and (Path(source) / "adapter_config.json").exists():
        source, adapter = PeftConfig.read(Path(source)).base, source
        if not Path(source).is_dir() or not source:
            raise ValueError(
                f"{adapter} has adapters of {source or 'an unnamed model'!r}, which is no folder here; download that "
                f"model, and name its folder: from_hf(FOLDER, adapter={str(adapter)!r})"
            )
    config, params = LLAMA.from_hf(source, config, dtype)
    if adapter is None:
        return config, params
    with contextlib.ExitStack() as stack:
        config, tensors = _open_adapters(config, local(adapter, "adapter"), stack)
        for path, names in _adapter_names(config.layers).items():
            *keys, leaf = path.split("/")
            if keys[-1] in config.adapted_projections:
                # [r, in] or [out, r] in the file.
                matrices = [np.asarray(tensors[name].read()).T for name in names]
                module = functools.reduce(lambda tree, key: tree[key], keys, params)
                module[leaf] = np.stack(matrices).astype(matrices[0].dtype if dtype is None else jnp.dtype(dtype))
    return config, params


def with_adapters(config: Config, folder: Path) -> Config:
    """Return the config of a base with the adapters in a folder; raise ValueError if they do not fit the base."""
    with contextlib.ExitStack() as stack:
        return _open_adapters(config, folder, stack)[0]


def _open_adapters(config: Config, folder: Path, stack: contextlib.ExitStack) -> tuple[Config, dict[str, Tensor]]:
    """Return the config as `with_adapters`, and the tensors of the folder, which can be read until `stack` closes."""
    options, names = PeftConfig.read(folder), _adapter_names(config.layers)
    if not (folder / _ADAPTERS).exists():
        raise ValueError(f"{folder} has no {_ADAPTERS}; write it in peft: model.save_pretrained(FOLDER)")
    tensors = open_file(member(folder, _ADAPTERS), stack)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    # 1. The targets are the projections with a tensor, whatever pattern chose them.
    path_of = {name: path for path, tensor_names in names.items() for name in tensor_names}
    if unexpected := sorted(shapes.keys() - path_of.keys()):
        raise ValueError(f"{folder} has {few(unexpected)}, and a Llama of {config.layers} layers has no such projection"
                         "; give the base that the adapters were trained on")  # fmt: skip
    targets = [x for x in PROJECTIONS if any(path.split("/")[-2] == x for path in map(path_of.get, shapes) if path)]
    config = dataclasses.replace(config, lora=options.rank, lora_alpha=options.alpha, lora_targets="+".join(targets))
    # 2. Each target has both matrices in every layer. A stack [L, in, r] here is L matrices [r, in] in the file.
    for path, shape in LLAMA.shapes(config).items():
        for name in names[path] if is_adapter(path) else ():
            if shapes.get(name) != (needed := shape[:0:-1]):
                stored = list(shapes[name]) if name in shapes else "absent"
                raise ValueError(
                    f"{folder}: {name} is {stored}, needs {list(needed)} on this base; give the base that the adapters "
                    f"were trained on ({options.base or 'not stated'})"
                )
    # 3. A module that has no tensor would silently have no adapter.
    module_names = {name.split(".")[-3] for name in shapes}
    if options.modules is not None and options.modules != module_names:
        raise ValueError(f"{folder}: target_modules are {sorted(options.modules)}, and the file has tensors of "
                         f"{sorted(module_names)}; fetch the adapters once more")  # fmt: skip
    return config, tensors


def _adapter_names(layers: int) -> dict[str, list[str]]:
    """Return the names of the tensors, one for each layer, of every adapter matrix that a Llama may have, by path."""
    modules = {path.removesuffix("/kernel"): pattern.name for path, pattern in _LLAMA.patterns.items()}
    return {
        f"{path}/lora_{matrix.lower()}": [
            f"base_model.model.{name.removesuffix('.weight').format(layer=layer)}.lora_{matrix}.weight"
            for layer in range(layers)
        ]
        for path, name in modules.items()
        if path.rpartition("/")[2] in PROJECTIONS
        for matrix in "AB"
    }


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
    path = Path(path)
    if (path / _ADAPTERS).exists():
        raise ValueError(f"{path} already holds {_ADAPTERS}; choose another folder, or remove it")
    # 1. Name and transpose the adapters: "layers/attention/query/lora_a" [L, in, r] becomes, for each layer,
    #    "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" [r, in].
    adapters: dict[str, Tensor] = {}
    names = _adapter_names(config.layers)
    for param_path, param in LLAMA.by_path(config, params).items():
        if is_adapter(param_path):
            stack = on_host(param_path, param)
            for layer, name in enumerate(names[param_path]):
                matrix = np.asarray(stack[layer]).astype(np.float32).T
                adapters[name] = Tensor(matrix.shape, lambda matrix=matrix: matrix, matrix.dtype)
    # 2. Write them, and the options that peft needs.
    path.mkdir(parents=True, exist_ok=True)
    write_file(path / _ADAPTERS, adapters)
    adapter_config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.lora,
        "lora_alpha": config.lora_alpha,
        "target_modules": sorted({name.split(".")[-3] for name in adapters}),
        "lora_dropout": 0.0,
        "bias": "none",
        # Our matrices are transposed to torch's order above, so peft must not transpose them again.
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (path / "adapter_config.json").write_text(json.dumps(adapter_config, indent=2) + "\n")
