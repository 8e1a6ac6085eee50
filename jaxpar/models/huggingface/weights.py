"""Weights and sizes of a model from and to Hugging Face, by the tables of its architecture: one reader, one writer.

What differs there: the names; a matrix, [out, in] (`torch.nn.Linear`) and [in, out] here; and layers and experts, here
stacked on leading dims. Tensors are read and written one by one, and no other is in memory.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import unflatten_dict

from ...backend.files import SAFETENSORS, json_of, local, member
from ...backend.text import few
from ...model.paths import name_of
from .architecture import Architecture, Row
from .files import Tensor, fill, opened, tensor_of, write

_MANY = 1000  # names that are missing: more are not looked for


@dataclass(frozen=True)
class Family:
    """A model here, and the architectures of transformers that are the same function.

    Attributes:
      title: as errors call it: "Llama".
      here: how they begin what it has: "Llama here has".
      config, module: its sizes, and (config, rngs=) -> NNX module.
      architectures: `config.json`, or the settings of a config, choose one.
      apart: whether a parameter, by its path, is in no file of the model.
      folded: (config, parameters by path) -> those of the files.
    """

    title: str
    here: str
    config: type
    module: Callable[..., nnx.Module]
    architectures: tuple[Architecture, ...]
    apart: Callable[[str], bool] = lambda path: False
    folded: Callable[[Any, dict[str, Any]], dict[str, Any]] = lambda config, params: params

    def to_config(self, given: Any) -> Any:
        """Our sizes from a config of ours or of transformers, or its dict, such as what `config.json` holds.

        What is absent has the value that transformers gives it, but for the sizes that no model can do without. Options
        that have no part in the function (token ids, caches, initial values) are passed over.

        Raises ValueError on options that the model here does not have, naming them.
        """
        if isinstance(given, self.config):
            return given
        stated = given.to_dict() if hasattr(given, "to_dict") else given
        if not isinstance(stated, Mapping):
            raise ValueError(
                f"config is a {type(given).__name__}; pass a Config of {self.title}, one of transformers, or its dict"
            )
        options = {name: value for name, value in stated.items() if value is not None}
        kinds = {arch.model_type: arch for arch in self.architectures}
        kind = options.get("model_type", self.architectures[0].model_type if len(kinds) == 1 else None)
        if not isinstance(kind, str) or kind not in kinds:
            raise ValueError(
                f"model_type={kind!r} is not supported: {self.here} {' or '.join(map(repr, kinds))}; write that model "
                "in Flax, and pass it to jp.from_nnx"
            )
        config = self.config(**kinds[kind].read(options, self.here))
        kinds[kind].check(options, config)
        return config

    def to_dict(self, config: Any, dtype: str) -> dict[str, Any]:
        """What `config.json` says of a model of these sizes and its weights of `dtype`, such as "bfloat16"."""
        return self._architecture(config).written(config, dtype)

    def from_hf(
        self, source: str | Path | Mapping[str, Any], config: Any = None, dtype: Any = None
    ) -> tuple[Any, dict[str, Any]]:
        """The sizes and weights of a model of `transformers`.

        Args:
          source: a folder with `config.json` and `model.safetensors` or `pytorch_model.bin`, whole or in several files;
            or a state dict of torch tensors or arrays, named as in files: experts have a tensor each.
          config: a `Config` of this model, a configuration of transformers or its dict. Needed with a state dict; of a
            folder, in place of its `config.json`.
          dtype: of the arrays; as they are stored if None.

        Returns `(config, params)`: nested dicts of NumPy arrays in the model's own tree, for
        `step.init(key, params=params)` of a step on the model of that config; of a config with adapters they are the
        rest, and `fresh=llama.is_adapter` says that these begin anew. Tensors of a folder are read one by one:
        beside `params`, memory holds one of them. Every host reads all. Reading safetensors takes the package
        `safetensors`, a .bin file `torch`; nothing takes `transformers`.

        Raises ValueError on an option of `config` that the model here does not have, and on tensors that are missing,
        unexpected or of another shape, naming them.
        """
        with contextlib.ExitStack() as stack:
            if isinstance(source, Mapping):
                if config is None:
                    raise ValueError("a state dict does not say its config; pass config=model.config, or a Config")
                config, tensors = self.to_config(config), {name: tensor_of(x) for name, x in source.items()}
            else:
                folder = _folder(source)
                config = self.to_config(_stated(folder) if config is None else config)
                tensors = stack.enter_context(opened(folder))
            arch, shapes = self._architecture(config), self._shapes(config)
            rows = arch.rows(config, {path: shape for path, shape in shapes.items() if not self.apart(path)})
            tensors = _tied(arch, tensors) if config.tied else tensors
            self._check(arch, config, rows, tensors)
            params = {row.path: _read(row, tensors, dtype) for row in rows}
        return config, unflatten_dict(params, sep="/")

    def to_hf(
        self, config: Any, params: Any, path: str | Path | None = None, dtype: Any = None,
        max_shard_size: int = 5 * 10**9,
    ) -> dict[str, np.ndarray]:  # fmt: skip
        """The weights as a state dict, and with a path the folder that `from_pretrained` of transformers loads.

        Args:
          config: the model's sizes.
          params: `step.params(state)`, or nested dicts of arrays like it, such as gradients. Arrays that are sharded
            are put together in this host's memory. Adapters are added to what they are beside, in float32.
          path: a folder to make, or one without weights in it: `config.json` and safetensors are written there, which
            takes the package `safetensors`. The tokenizer and `generation_config.json` have to be copied from where the
            model came from.
          dtype: of the tensors; that of `params` if None, which for `step.params(state)` is float32.
          max_shard_size: bytes of a file, when there are several.

        Returns NumPy arrays by name, as in the files: views where nothing had to be copied, and without
        `lm_head.weight` where the embedding is the head.

        Raises ValueError where the tree or a shape is not that of a model of these sizes, where an array lies on
        several hosts, and where the folder holds weights.
        """
        tensors = self._tensors(config, params, dtype)
        if path is not None:
            self._write(config, tensors, local(path, "path"), max_shard_size)
        return {name: x.read() for name, x in tensors.items()}

    def save_hf(
        self, config: Any, params: Any, path: str | Path, dtype: Any = None, max_shard_size: int = 5 * 10**9
    ) -> None:
        """The folder that `to_hf` writes, tensor by tensor: none but the one that is written is in memory.

        Args:
          params: nested dicts of arrays, or of anything with `shape`, `dtype`, `[layer]` and `np.asarray`, such as
            `jaxpar.checkpoint.saved.weights_of` reads from a checkpoint.
        """
        self._write(config, self._tensors(config, params, dtype), local(path, "path"), max_shard_size)

    def by_path(self, config: Any, params: Any) -> dict[str, Any]:
        """Parameters by path. Raises ValueError where they are not those of a model of these sizes."""
        shapes, given = self._shapes(config), _by_path(params)
        if given.keys() != shapes.keys():
            lacking, more = (
                few(sorted(a.keys() - b.keys())) or "nothing" for a, b in ((shapes, given), (given, shapes))
            )
            raise ValueError(
                f"params lacks {lacking} and has {more} beyond a {self.title} of this config; pass "
                "step.params(state), and the config of its model"
            )
        for path, shape in shapes.items():
            if np.shape(given[path]) != shape:
                raise ValueError(
                    f"params has {path} of shape {np.shape(given[path])}, a {self.title} of this config needs {shape}"
                )
        return {path: given[path] for path in shapes}

    def _architecture(self, config: Any) -> Architecture:
        for arch in self.architectures:
            if all(getattr(config, name) == value for name, value in arch.settings.items()):
                return arch
        known = " or ".join(str(dict(arch.settings)) for arch in self.architectures)
        raise ValueError(f"{config} has no form in transformers: needs {known}")

    def _shapes(self, config: Any) -> dict[str, tuple[int, ...]]:
        model = nnx.eval_shape(lambda: self.module(config, rngs=nnx.Rngs(0)))
        return {path: tuple(leaf.shape) for path, leaf in _by_path(nnx.state(model, nnx.Param)).items()}

    def _check(self, arch: Architecture, config: Any, rows: list[Row], tensors: Mapping[str, Tensor]) -> None:
        """Raise ValueError unless the tensors are those of a model of these sizes."""
        # Name by name: a config may speak of 10**9 layers.
        lacking = (name for row in rows for name in row.names() if name not in tensors)
        if missing := list(itertools.islice(lacking, _MANY)):
            head = missing == [arch.tensors["head/kernel"].name]
            hint = "set tie_word_embeddings=True if the embedding is the head" if head else "see its config"
            least = "at least " if len(missing) == _MANY else ""
            raise ValueError(f"the model lacks {least}{few(sorted(missing))}; {hint}")
        needed = {name: row.part for row in rows for name in row.names()}
        # Old files hold the frequencies of rotary embedding, which follow from the config; transformers skips them too.
        ignored = ["*rotary_emb.inv_freq", *(pattern.format(**vars(config)) for pattern in arch.ignored)]
        more = [name for name in tensors.keys() - needed.keys() if not any(fnmatchcase(name, one) for one in ignored)]
        if more:
            raise ValueError(
                f"the model has {few(sorted(more))}, which a {self.title} of {config} has not; see its config"
            )
        for name, shape in needed.items():
            if tensors[name].shape != shape:
                raise ValueError(f"{name} has shape {tensors[name].shape}, a {self.title} of {config} needs {shape}")

    def _tensors(self, config: Any, params: Any, dtype: Any) -> dict[str, Tensor]:
        held = {path: on_host(path, x) for path, x in self.by_path(config, params).items()}
        held, tensors = self.folded(config, held), {}
        for row in self._architecture(config).rows(config, {path: x.shape for path, x in held.items()}):
            x = held[row.path]
            kind = np.dtype(x.dtype if dtype is None else jnp.dtype(dtype))
            if kind.name not in SAFETENSORS:
                raise ValueError(f"{row.path} as {kind} has no form in safetensors; use float32, bfloat16 or float16")
            layer = functools.partial(_layer, x)
            if len(row.counts) > 1:  # a layer is read once for all its experts
                layer = functools.lru_cache(maxsize=1)(layer)
            for index, name in zip(np.ndindex(*map(len, row.counts)), row.names(), strict=True):
                part = functools.partial(_part, layer, index, kind, row.stored.transposed)
                tensors[name] = Tensor(row.part, part, kind)
        return tensors

    def _write(self, config: Any, tensors: Mapping[str, Tensor], path: Path, max_shard_size: int) -> None:
        write(path, tensors, max_shard_size)
        arch = self._architecture(config)
        text = json.dumps(arch.written(config, tensors[arch.tensors["embedding"].name].dtype.name), indent=2)
        (path / "config.json").write_text(text + "\n")  # last, so that a folder which is not complete is no model


def _layer(x: Any, *number: int) -> np.ndarray:
    return np.asarray(x[number[0]] if number else x)


def _part(layer: Callable[..., np.ndarray], index: tuple[int, ...], dtype: np.dtype, transposed: bool) -> np.ndarray:
    array = layer(*index[:1])[index[1:]].astype(dtype, copy=False)
    return array.T if transposed else array


def _folder(source: Any) -> Path:
    if not isinstance(source, str | os.PathLike):
        raise ValueError(f"from_hf({source!r}): needs a folder, or a state dict")
    if not local(source, "source").is_dir():
        raise ValueError(
            f"{source} is not a folder; download the model into one: hf download {source} --local-dir FOLDER"
        )
    return Path(source)


def _stated(folder: Path) -> Any:
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder} has no config.json; download it too, or pass config=")
    return json_of(member(folder, "config.json"))


def _by_path(params: Any) -> dict[str, Any]:
    tree = nnx.to_pure_dict(params) if isinstance(params, nnx.State) else params
    return {name_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _tied(arch: Architecture, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the head, which state dicts and .bin files hold all the same where it is the embedding."""
    embedding, head = (arch.tensors[path].name for path in ("embedding", "head/kernel"))
    if {embedding, head} <= tensors.keys() and not np.array_equal(tensors[embedding].read(), tensors[head].read()):
        raise ValueError(f"tie_word_embeddings=True, but {head} differs from {embedding}; set it to False")
    return {name: tensor for name, tensor in tensors.items() if name != head}


def _read(row: Row, tensors: Mapping[str, Tensor], dtype: Any) -> np.ndarray:
    """A parameter, filled tensor by tensor, so that beside it one of them is in memory."""
    filled: Any = None
    for i, name in enumerate(row.names()):
        x = tensors[name].read()
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(
                f"{name} is {x.dtype}, needs a floating-point dtype; load and dequantize it in transformers"
            )
        x = x.T if row.stored.transposed else x
        if filled is None:
            kind = x.dtype if dtype is None else jnp.dtype(dtype)
            filled = np.empty((math.prod(map(len, row.counts)), *x.shape), kind)
        if dtype is None and x.dtype != filled.dtype:
            raise ValueError(f"{name} is {x.dtype} and {next(row.names())} {filled.dtype}; say dtype= of both")
        fill(filled[i], x)
    return filled.reshape(row.shape)


def on_host(path: str, x: Any) -> Any:
    """A parameter in this host's memory. Raises ValueError where parts of it are on others."""
    if not isinstance(x, jax.Array):
        return x
    if not x.is_fully_addressable:
        raise ValueError(
            f"{path} lies on several hosts; gather on all of them, and let one write: "
            "jax.experimental.multihost_utils.process_allgather(params, tiled=True)"
        )
    return np.asarray(x)
