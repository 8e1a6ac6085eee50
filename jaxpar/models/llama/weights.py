"""Weights of a `Llama` from and to Hugging Face's `transformers`, whose `LlamaForCausalLM` is the same function.

Both rotate the pair (i, i + h/2) of a head (`rotate_half` there), so that projections keep their order. What differs:
the names; a matrix, [out, in] there (`torch.nn.Linear`) and [in, out] here; and layers, here stacked on dim 0.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import unflatten_dict

from ...files import SAFETENSORS, json_of, member
from ...model.paths import name_of
from . import model as llama
from .architecture import Architecture
from .hf_config import to_config, to_dict
from .hf_files import Tensor, fill, opened, tensor_of, write
from .lora import is_adapter, merged, write_adapters

# `{}` is the layer's number. Kernels are the matrices to transpose.
_NAMES = {
    "embedding": "model.embed_tokens.weight",
    "layers/attention_norm/scale": "model.layers.{}.input_layernorm.weight",
    "layers/attention/query/kernel": "model.layers.{}.self_attn.q_proj.weight",
    "layers/attention/key/kernel": "model.layers.{}.self_attn.k_proj.weight",
    "layers/attention/value/kernel": "model.layers.{}.self_attn.v_proj.weight",
    "layers/attention/out/kernel": "model.layers.{}.self_attn.o_proj.weight",
    "layers/ffn_norm/scale": "model.layers.{}.post_attention_layernorm.weight",
    "layers/ffn/gate/kernel": "model.layers.{}.mlp.gate_proj.weight",
    "layers/ffn/up/kernel": "model.layers.{}.mlp.up_proj.weight",
    "layers/ffn/down/kernel": "model.layers.{}.mlp.down_proj.weight",
    "norm/scale": "model.norm.weight",
    "head/kernel": "lm_head.weight",
}
_MANY = 1000  # names that are missing: more are not looked for
_EMBEDDING, _HEAD = _NAMES["embedding"], _NAMES["head/kernel"]


LLAMA = Architecture("Llama", _NAMES, llama.Llama, to_config, to_dict)


def from_hf(
    source: str | Path | Mapping[str, Any], config: Any = None, dtype: Any = None, arch: Architecture = LLAMA
) -> tuple[Any, dict[str, Any]]:
    """The sizes and weights of a `LlamaForCausalLM`: Llama 2, 3, 3.1, 3.2, 3.3, and models of their kind.

    Args:
      source: a folder with `config.json` and `model.safetensors` or `pytorch_model.bin`, whole or in several files; or
        a state dict of torch tensors or arrays.
      config: a `Config`, a `transformers.LlamaConfig` or its dict. Needed with a state dict; of a folder, in place of
        its `config.json`.
      dtype: of the arrays; as they are stored if None.
      arch: of another model than `Llama`, whose own `from_hf` gives it.

    Returns `(config, params)`: nested dicts of NumPy arrays in the model's own tree, for
    `step.init(key, params=params)` of a step on `Llama(config, rngs=rngs)`; of a config with adapters they are the
    rest, and `fresh=llama.is_adapter` says that these begin anew. Tensors of a folder are read one by one:
    beside `params`, memory holds one of them. Every host reads all. Reading safetensors takes the package
    `safetensors`, a .bin file `torch`; nothing takes `transformers`.

    Raises ValueError on an option of `config` that `Llama` does not have, and on tensors that are missing, unexpected
    or of another shape, naming them.
    """
    with contextlib.ExitStack() as stack:
        if isinstance(source, Mapping):
            if config is None:
                raise ValueError("a state dict does not say its config; pass config=model.config, or a llama.Config")
            tensors = {name: tensor_of(x) for name, x in source.items()}
        else:
            folder = folder_of(source)
            config = stated(folder) if config is None else config
            tensors = stack.enter_context(opened(folder))
        config = arch.to_config(config)
        shapes = _shapes(arch, config)
        tensors = _tied(tensors) if config.tied else tensors
        _check(arch, tensors, config, shapes)
        params = {path: _read(arch, path, shape, config, tensors, dtype) for path, shape in shapes.items()}
    return config, unflatten_dict(params, sep="/")


def to_hf(
    config: Any,
    params: Any,
    path: str | Path | None = None,
    dtype: Any = None,
    max_shard_size: int = 5 * 10**9,
    arch: Architecture = LLAMA,
) -> dict[str, np.ndarray]:
    """The weights as the state dict of a `LlamaForCausalLM`, and with a path the folder that `from_pretrained` loads.

    Args:
      config: the model's sizes.
      params: `step.params(state)`, or nested dicts of arrays like it, such as gradients. Arrays that are sharded are
        put together in this host's memory. Adapters are added to what they are beside, in float32.
      path: a folder to make, or one without weights in it: `config.json` and safetensors are written there, which
        takes the package `safetensors`. The tokenizer and `generation_config.json` have to be copied from where the
        model came from.
      dtype: of the tensors; that of `params` if None, which for `step.params(state)` is float32.
      max_shard_size: bytes of a file, when there are several.
      arch: as in `from_hf`.

    Returns NumPy arrays by name, as in the files: views where nothing had to be copied, and without `lm_head.weight`
    where the embedding is the head.

    Raises ValueError where the tree or a shape is not that of a `Llama` of these sizes, where an array lies on several
    hosts, and where the folder holds weights.
    """
    tensors = _tensors(arch, config, params, dtype)
    if path is not None:
        _write(arch, config, tensors, Path(path), max_shard_size)
    return {name: x.read() for name, x in tensors.items()}


def save_hf(
    config: Any,
    params: Any,
    path: str | Path,
    dtype: Any = None,
    max_shard_size: int = 5 * 10**9,
    arch: Architecture = LLAMA,
) -> None:
    """The folder that `to_hf` writes, tensor by tensor: none but the one that is written is in memory.

    Args:
      params: nested dicts of arrays, or of anything with `shape`, `dtype`, `[layer]` and `np.asarray`, such as
        `jaxpar.checkpoint.saved.weights_of` reads from a checkpoint.
    """
    _write(arch, config, _tensors(arch, config, params, dtype), Path(path), max_shard_size)


def save_adapters(config: llama.Config, params: Any, path: str | Path, base: str = "") -> None:
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
    given = _given(LLAMA, config, params)
    held = {at: _host(at, x) if isinstance(x, jax.Array) else x for at, x in given.items() if is_adapter(at)}
    write_adapters(Path(path), held, _NAMES, config, base)


def _write(arch: Architecture, config: Any, tensors: Mapping[str, Tensor], path: Path, max_shard_size: int) -> None:
    write(path, tensors, max_shard_size)
    # Last, so that a folder which is not complete is no model.
    text = json.dumps(arch.to_dict(config, tensors[_EMBEDDING].dtype.name), indent=2)
    (path / "config.json").write_text(text + "\n")


def _tensors(arch: Architecture, config: Any, params: Any, dtype: Any) -> dict[str, Tensor]:
    shapes = _shapes(arch, config)
    given = _given(arch, config, params)
    held = {at: _host(at, x) if isinstance(x, jax.Array) else x for at, x in given.items()}
    if config.lora:
        held = merged(held, config.lora_alpha / config.lora)
    tensors: dict[str, Tensor] = {}
    for at, shape in shapes.items():
        x = held[at]
        turned, stacked = -1 if _turned(at) else 1, arch.stacked(at, config)
        kind = np.dtype(x.dtype if dtype is None else jnp.dtype(dtype))
        if kind.name not in SAFETENSORS:
            raise ValueError(f"{at} as {kind} has no form in safetensors; use float32, bfloat16 or float16")
        layer = functools.partial(_layer, x)
        if len(stacked) > 1:  # a layer is read once for all its experts
            layer = functools.lru_cache(maxsize=1)(layer)
        for index, name in zip(np.ndindex(stacked), arch.each_name(at, config), strict=True):
            part = functools.partial(_part, layer, index, kind, turned < 0)
            tensors[name] = Tensor(shape[len(stacked) :][::turned], part, kind)
    return tensors


def _given(arch: Architecture, config: Any, params: Any) -> dict[str, Any]:
    """Parameters by path. Raises ValueError where they are not those of a model of these sizes."""
    shapes, given = _shapes(arch, config, adapters=True), _by_path(params)
    if given.keys() != shapes.keys():
        lacking, more = (_list(a.keys() - b.keys()) for a, b in ((shapes, given), (given, shapes)))
        raise ValueError(
            f"params lacks {lacking} and has {more} beyond a {arch.title} of this config; pass "
            "step.params(state), and the config of its model"
        )
    for at, shape in shapes.items():
        if np.shape(given[at]) != shape:
            raise ValueError(
                f"params has {at} of shape {np.shape(given[at])}, a {arch.title} of this config needs {shape}"
            )
    return given


def _layer(x: Any, *number: int) -> np.ndarray:
    return np.asarray(x[number[0]] if number else x)


def _part(layer: Callable[..., np.ndarray], index: tuple[int, ...], dtype: np.dtype, turned: bool) -> np.ndarray:
    array = layer(*index[:1])[index[1:]].astype(dtype, copy=False)
    return array.T if turned else array


def folder_of(source: Any) -> Path:
    """The folder that a source is. Raises ValueError where it is none."""
    if not isinstance(source, str | os.PathLike):
        raise ValueError(f"from_hf({source!r}): needs a folder, or a state dict")
    if not Path(source).is_dir():
        raise ValueError(
            f"{source} is not a folder; download the model into one: hf download {source} --local-dir FOLDER"
        )
    return Path(source)


def stated(folder: Path) -> Any:
    """What the folder's `config.json` holds."""
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder} has no config.json; download it too, or pass config=")
    return json_of(member(folder, "config.json"))


def _shapes(arch: Architecture, config: Any, adapters: bool = False) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter, by its path; those of Hugging Face's files without adapters."""
    if not adapters and config.lora:
        config = dataclasses.replace(config, lora=0)
    model = nnx.eval_shape(lambda: arch.module(config, rngs=nnx.Rngs(0)))
    return {path: tuple(leaf.shape) for path, leaf in _by_path(nnx.state(model, nnx.Param)).items()}


def _by_path(params: Any) -> dict[str, Any]:
    tree = nnx.to_pure_dict(params) if isinstance(params, nnx.State) else params
    return {name_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _turned(path: str) -> bool:
    """Whether its tensors are [out, in]."""
    return path.endswith("kernel") or "/experts/" in path


def _tied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the head, which state dicts and .bin files hold all the same where it is the embedding."""
    if {_EMBEDDING, _HEAD} <= tensors.keys() and not np.array_equal(tensors[_EMBEDDING].read(), tensors[_HEAD].read()):
        raise ValueError(f"tie_word_embeddings=True, but {_HEAD} differs from {_EMBEDDING}; set it to False")
    return {name: tensor for name, tensor in tensors.items() if name != _HEAD}


def _check(
    arch: Architecture, tensors: Mapping[str, Tensor], config: Any, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise ValueError unless the tensors are those of a model of these sizes."""
    # Name by name: a config may speak of 10**9 layers.
    names = lambda path: arch.each_name(path, config)
    lacking = (name for path in shapes for name in names(path) if name not in tensors)
    if missing := list(itertools.islice(lacking, _MANY)):
        hint = "set tie_word_embeddings=True if the embedding is the head" if missing == [_HEAD] else "see its config"
        least = "at least " if len(missing) == _MANY else ""
        raise ValueError(f"the model lacks {least}{_list(missing)}; {hint}")
    needed = {name: path for path in shapes for name in names(path)}
    # Old files hold the frequencies of rotary embedding, which follow from the config; transformers skips them too.
    passed = lambda name: name.endswith("rotary_emb.inv_freq") or arch.passed_over(name, config)
    unexpected = [name for name in tensors if name not in needed and not passed(name)]
    if unexpected:
        raise ValueError(f"the model has {_list(unexpected)}, which a {arch.title} of {config} has not; see its config")
    for name, path in needed.items():
        shape = shapes[path][len(arch.stacked(path, config)) :][:: -1 if _turned(path) else 1]
        if tensors[name].shape != shape:
            raise ValueError(f"{name} has shape {tensors[name].shape}, a {arch.title} of {config} needs {shape}")


def _read(
    arch: Architecture, path: str, shape: tuple[int, ...], config: Any, tensors: Mapping[str, Tensor], dtype: Any
) -> np.ndarray:
    """A parameter, filled tensor by tensor, so that beside it one of them is in memory."""
    stacked = arch.stacked(path, config)
    names = list(arch.each_name(path, config))
    filled = None
    for i, name in enumerate(names):
        x = tensors[name].read()
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(
                f"{name} is {x.dtype}, needs a floating-point dtype; load and dequantize it in transformers"
            )
        if filled is None:
            filled = np.empty((len(names), *shape[len(stacked) :]), x.dtype if dtype is None else jnp.dtype(dtype))
        if dtype is None and x.dtype != filled.dtype:
            raise ValueError(f"{name} is {x.dtype} and {names[0]} {filled.dtype}; say dtype= of both")
        fill(filled[i], x.T if _turned(path) else x)
    assert filled is not None
    return filled.reshape(shape)


def _host(path: str, x: jax.Array) -> np.ndarray:
    if not x.is_fully_addressable:
        raise ValueError(
            f"{path} lies on several hosts; gather on all of them, and let one write: "
            "jax.experimental.multihost_utils.process_allgather(params, tiled=True)"
        )
    return np.asarray(x)


def _list(names: Collection[str]) -> str:
    """The first few of many names."""
    first = sorted(names)[:3]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(first) + more if names else "nothing"
