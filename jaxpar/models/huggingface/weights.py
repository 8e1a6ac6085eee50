"""Conversion of a model's weights and sizes from and to Hugging Face, by the tables of its architecture.

    from_hf    config.json -> Config; tensors -> parameters      one reader for all architectures
    to_hf      Config -> config.json; parameters -> tensors      one writer for all architectures

Three things differ in the files: names, the order of a matrix's dims ([out, in] in `torch.nn.Linear`, [in, out] here),
and layers and experts, which are separate tensors there and stacked on leading dims here.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
from .architecture import Architecture, ParameterRow
from .files import Tensor, as_tensor, copy_into, open_tensors, write
from .options import check_unread

_MAX_MISSING = 1000  # the search for missing tensors ends here: a malformed config may claim 10**9 layers


@dataclass(frozen=True)
class Family:
    """A model of jaxpar, and the architectures of transformers that compute the same function.

    Attributes:
      title: its name in errors, such as "Llama".
      support_phrase: how errors begin to say what it supports, such as "Llama here has".
      config: the dataclass of its sizes.
      module: (config, rngs=) -> NNX module.
      architectures: reading chooses one by `model_type` of `config.json`, writing by fields of the config.
      is_unsaved: tells by its path whether the files of the model lack a parameter, as they lack adapters.
      fold: (config, parameters by path) -> the parameters that the files contain.
    """

    title: str
    support_phrase: str
    config: type
    module: Callable[..., nnx.Module]
    architectures: tuple[Architecture, ...]
    is_unsaved: Callable[[str], bool] = lambda path: False
    fold: Callable[[Any, dict[str, Any]], dict[str, Any]] = lambda config, params: params

    def to_config(self, source: Any) -> Any:
        """Return the config of this model from a config of transformers.

        Absent options have transformers' defaults; the required sizes have none. Options that do not change the
        function (token ids, caches, initial values) are ignored, and unknown ones are named in a warning.

        Args:
          source: a config of transformers or its dict, such as the contents of `config.json`. A config of this model is
            returned unchanged.

        Raises:
          ValueError: a size is missing, or the model here does not support an option. The error names it.
        """
        if isinstance(source, self.config):
            return source
        hf_options = source.to_dict() if hasattr(source, "to_dict") else source
        if not isinstance(hf_options, Mapping):
            raise ValueError(
                f"config is a {type(source).__name__}; pass a Config of {self.title}, one of transformers, or its dict"
            )
        # null means that an option is absent.
        options = {name: value for name, value in hf_options.items() if value is not None}
        by_model_type = {arch.model_type: arch for arch in self.architectures}
        model_type = options.get("model_type", self.architectures[0].model_type if len(by_model_type) == 1 else None)
        if not isinstance(model_type, str) or model_type not in by_model_type:
            raise ValueError(
                f"model_type={model_type!r} is not supported: {self.support_phrase} "
                f"{' or '.join(map(repr, by_model_type))}; write that model in Flax, and pass it to jp.from_nnx"
            )
        arch = by_model_type[model_type]
        _check_architectures(arch, options.get("architectures"), self.support_phrase)
        check_unread(options, arch.known_options, self.support_phrase)
        config = self.config(**arch.config_fields(options, self.support_phrase))
        arch.check_derived(options, config)
        return config

    def to_dict(self, config: Any, dtype: str) -> dict[str, Any]:
        """Return the contents of `config.json` for a model of this config with weights of `dtype`, say "bfloat16"."""
        return self._architecture(config).config_json(config, dtype)

    def from_hf(
        self, source: str | Path | Mapping[str, Any], config: Any = None, dtype: Any = None
    ) -> tuple[Any, dict[str, Any]]:
        """Read the sizes and weights of a model of `transformers`.

        Reading safetensors files needs the package `safetensors`, and .bin files need `torch`; `transformers` is never
        needed. Tensors of a folder are read one by one, so that memory holds `params` and one tensor. Every host reads
        all weights.

        Args:
          source: a folder with `config.json` and `model.safetensors` or `pytorch_model.bin`, in one file or several; or
            a state dict of torch tensors or arrays, named as in files, with a tensor for each expert.
          config: a `Config` of this model, a configuration of transformers or its dict. A state dict needs it; for a
            folder it replaces `config.json`.
          dtype: the dtype of the arrays; None keeps the stored dtype.

        Returns:
          `(config, params)`. `params` are nested dicts of NumPy arrays in the model's tree, for
          `step.init(key, params=params)` of a step on the model of that config. They contain no adapters: if the config
          has some, also pass `fresh=llama.is_adapter`, which initializes them.

        Raises:
          ValueError: the model here does not support an option of `config`, or tensors are missing, unexpected or of
            another shape. The error names them.

        Warns:
          UserWarning: `config` has options that the model here does not know. The warning names them.
        """
        with contextlib.ExitStack() as stack:
            # 1. The config, and the tensors by name, not yet read.
            if isinstance(source, Mapping):
                if config is None:
                    raise ValueError("a state dict does not say its config; pass config=model.config, or a Config")
                config, tensors = self.to_config(config), {name: as_tensor(x) for name, x in source.items()}
            else:
                folder = _folder(source)
                config = self.to_config(_read_config(folder) if config is None else config)
                tensors = stack.enter_context(open_tensors(folder))
            # 2. Check the tensors against the parameters of this config.
            arch, shapes = self._architecture(config), self.shapes(config)
            rows = arch.rows({path: shape for path, shape in shapes.items() if not self.is_unsaved(path)})
            # A tied head is no parameter of the model, and would count as an unexpected tensor.
            tensors = _drop_tied_head(arch, tensors) if config.tied else tensors
            self._check_tensors(arch, config, rows, tensors)
            # 3. Read them.
            params = {row.path: _read_parameter(row, tensors, dtype) for row in rows}
        return config, unflatten_dict(params, sep="/")

    def to_hf(
        self, config: Any, params: Any, path: str | Path | None = None, dtype: Any = None,
        max_shard_size: int = 5 * 10**9,
    ) -> dict[str, np.ndarray]:  # fmt: skip
        """Return the weights as a state dict; with a path, also write the folder that transformers loads.

        Args:
          config: the model's sizes.
          params: `step.params(state)`, or nested dicts of arrays like it, such as gradients. Sharded arrays are
            gathered in this host's memory. Adapters are added to their kernels in float32.
          path: a folder to create, or an existing one without weights. `config.json` and safetensors files are written
            there, for `from_pretrained` of transformers. Copy the tokenizer and `generation_config.json` from the
            original model.
          dtype: the dtype of the tensors; None keeps the dtype of `params`. In `step.params(state)` trained parameters
            are float32, and frozen ones have the compute dtype.
          max_shard_size: the largest number of bytes in a file.

        Returns:
          NumPy arrays by name, as in the files. They are views of `params` if possible. A model whose embedding is the
          head has no `lm_head.weight`.

        Raises:
          ValueError: `params` has another tree or other shapes than a model of this config, an array lies on several
            hosts, or the folder contains weights.
        """
        tensors = self._to_tensors(config, params, dtype)
        if path is not None:
            self._write(config, tensors, local(path, "path"), max_shard_size)
        return {name: tensor.read() for name, tensor in tensors.items()}

    def save_hf(
        self, config: Any, params: Any, path: str | Path, dtype: Any = None, max_shard_size: int = 5 * 10**9
    ) -> None:
        """Write the folder that `to_hf` writes, with one tensor at a time in memory.

        `params` may also be dicts of anything with `shape`, `dtype`, `[layer]` and `np.asarray` that reads on demand.
        Everything else is as for `to_hf`.
        """
        self._write(config, self._to_tensors(config, params, dtype), local(path, "path"), max_shard_size)

    def by_path(self, config: Any, params: Any) -> dict[str, Any]:
        """Return the parameters by path, in the model's order.

        Raises:
          ValueError: paths or shapes differ from those of a model of this config.
        """
        shapes, params_by_path = self.shapes(config), _by_path(params)
        if params_by_path.keys() != shapes.keys():
            missing = few(sorted(shapes.keys() - params_by_path.keys())) or "nothing"
            unexpected = few(sorted(params_by_path.keys() - shapes.keys())) or "nothing"
            raise ValueError(
                f"params lacks {missing} and has {unexpected} beyond a {self.title} of this config; pass "
                "step.params(state), and the config of its model"
            )
        for path, shape in shapes.items():
            if np.shape(params_by_path[path]) != shape:
                raise ValueError(
                    f"params has {path} of shape {np.shape(params_by_path[path])}, a {self.title} of this config needs "
                    f"{shape}"
                )
        return {path: params_by_path[path] for path in shapes}

    def _architecture(self, config: Any) -> Architecture:
        """Return the first architecture whose `implied` values this config has."""
        for arch in self.architectures:
            if all(getattr(config, name) == value for name, value in arch.implied.items()):
                return arch
        alternatives = " or ".join(str(dict(arch.implied)) for arch in self.architectures)
        raise ValueError(f"{config} has no form in transformers: needs {alternatives}")

    def shapes(self, config: Any) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter by path; no array is allocated."""
        # `eval_shape` traces the initialization without running it.
        model = nnx.eval_shape(lambda: self.module(config, rngs=nnx.Rngs(0)))
        return {path: tuple(leaf.shape) for path, leaf in _by_path(nnx.state(model, nnx.Param)).items()}

    def _check_tensors(
        self, arch: Architecture, config: Any, rows: list[ParameterRow], tensors: Mapping[str, Tensor]
    ) -> None:
        """Raise ValueError unless names and shapes of the tensors are those of a model of this config."""
        # 1. Missing tensors.
        missing_names = (name for row in rows for name in row.tensor_names() if name not in tensors)
        if missing := list(itertools.islice(missing_names, _MAX_MISSING)):
            lacks_only_head = missing == [arch.patterns["head/kernel"].name]
            hint = "set tie_word_embeddings=True if the embedding is the head" if lacks_only_head else "see its config"
            quantifier = "at least " if len(missing) == _MAX_MISSING else ""
            raise ValueError(f"the model lacks {quantifier}{few(sorted(missing))}; {hint}")
        # 2. Unexpected tensors. Old files contain the frequencies of rotary embedding, which follow from the config;
        # transformers ignores them too.
        needed_shapes = {name: row.tensor_shape for row in rows for name in row.tensor_names()}
        extra_names = tensors.keys() - needed_shapes.keys()
        if unexpected := [name for name in extra_names if not name.endswith("rotary_emb.inv_freq")]:
            raise ValueError(
                f"the model has {few(sorted(unexpected))}, which a {self.title} of {config} has not; see its config"
            )
        # 3. Shapes.
        for name, shape in needed_shapes.items():
            if tensors[name].shape != shape:
                raise ValueError(f"{name} has shape {tensors[name].shape}, a {self.title} of {config} needs {shape}")

    def _to_tensors(self, config: Any, params: Any, dtype: Any) -> dict[str, Tensor]:
        """Return the tensors to write, by name; each is sliced, transposed and cast when it is read."""
        saved_params = {path: on_host(path, x) for path, x in self.by_path(config, params).items()}
        # Adapters, which have no tensors in the files, become part of their kernels.
        saved_params, tensors = self.fold(config, saved_params), {}
        for row in self._architecture(config).rows({path: param.shape for path, param in saved_params.items()}):
            # float32 parameters may be written as bfloat16; the cast is made tensor by tensor, when each is read.
            param = saved_params[row.path]
            tensor_dtype = np.dtype(param.dtype if dtype is None else jnp.dtype(dtype))
            if tensor_dtype.name not in SAFETENSORS:
                raise ValueError(
                    f"{row.path} as {tensor_dtype} has no form in safetensors; use float32, bfloat16 or float16"
                )
            read_layer = functools.partial(_read_layer, param)
            if len(row.leading_dims) > 1:
                # Read a layer from a checkpoint once for all its experts, not once for each.
                read_layer = functools.lru_cache(maxsize=1)(read_layer)
            for index, name in zip(np.ndindex(row.leading_dims), row.tensor_names(), strict=True):
                read = functools.partial(_read_tensor, read_layer, index, tensor_dtype, row.pattern.transposed)
                tensors[name] = Tensor(row.tensor_shape, read, tensor_dtype)
        return tensors

    def _write(self, config: Any, tensors: Mapping[str, Tensor], path: Path, max_shard_size: int) -> None:
        """Write the tensors, then `config.json`."""
        write(path, tensors, max_shard_size)
        arch = self._architecture(config)
        dtype = tensors[arch.patterns["embedding"].name].dtype.name
        text = json.dumps(arch.config_json(config, dtype), indent=2)
        # Last, so that an incomplete folder has no config.json and is not taken for a model.
        (path / "config.json").write_text(text + "\n")


def _read_layer(param: Any, *layer: int) -> np.ndarray:
    """Return one layer of a stacked parameter, or the whole parameter if no layer is given."""
    return np.asarray(param[layer[0]] if layer else param)


def _read_tensor(
    read_layer: Callable[..., np.ndarray], index: tuple[int, ...], dtype: np.dtype, transposed: bool
) -> np.ndarray:
    """Return the tensor at `index`, (layer, expert) of a parameter, cast and transposed as in the file."""
    # The index is (layer,), (layer, expert), or () for a parameter outside the layers.
    array = read_layer(*index[:1])[index[1:]].astype(dtype, copy=False)
    return array.T if transposed else array


def _folder(source: Any) -> Path:
    """Return the source as the path of an existing folder; raise ValueError if it is none."""
    if not isinstance(source, str | os.PathLike):
        raise ValueError(f"from_hf({source!r}): needs a folder, or a state dict")
    if not local(source, "source").is_dir():
        # A name on the hub is OWNER/NAME.
        is_hub_name = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(source))
        download = f"download the model into one: hf download {source} --local-dir FOLDER"
        raise ValueError(f"{source} is not a folder; {download if is_hub_name else 'give the folder of the model'}")
    return Path(source)


def _read_config(folder: Path) -> Any:
    """Return the contents of a folder's `config.json`."""
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder} has no config.json; download it too, or pass config=")
    return json_of(member(folder, "config.json"))


def _check_architectures(arch: Architecture, class_names: Any, support_phrase: str) -> None:
    """Raise ValueError if `config.json` names the classes of its model, and that of the architecture is not among them.

    A config without `model_type` may be that of any model, and a repository's own class may compute anything.
    """
    listed = [class_names] if isinstance(class_names, str) else list(class_names or ())
    # Early conversions of Llama have the class LLaMAForCausalLM.
    if listed and arch.class_name.lower() not in (str(name).lower() for name in listed):
        raise ValueError(
            f"architectures={class_names!r} is not supported: {support_phrase} {arch.class_name!r}; write that model "
            "in Flax, and pass it to jp.from_nnx; or, if it computes the same, remove architectures from the config"
        )


def _by_path(params: Any) -> dict[str, Any]:
    """Flatten parameters to a dict by path, such as "layers/attention/query/kernel"."""
    tree = nnx.to_pure_dict(params) if isinstance(params, nnx.State) else params
    return {name_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _drop_tied_head(arch: Architecture, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors without the head, which state dicts and .bin files contain even if it is the embedding.

    Raises:
      ValueError: the head differs from the embedding.
    """
    embedding, head = (arch.patterns[path].name for path in ("embedding", "head/kernel"))
    if {embedding, head} <= tensors.keys() and not np.array_equal(tensors[embedding].read(), tensors[head].read()):
        raise ValueError(f"tie_word_embeddings=True, but {head} differs from {embedding}; set it to False")
    return {name: tensor for name, tensor in tensors.items() if name != head}


def _read_parameter(row: ParameterRow, tensors: Mapping[str, Tensor], dtype: Any) -> np.ndarray:
    """Return a parameter, filled tensor by tensor: memory holds one tensor in addition to it."""
    param: Any = None
    for i, name in enumerate(row.tensor_names()):
        tensor = tensors[name].read()
        if not jnp.issubdtype(tensor.dtype, jnp.floating):
            raise ValueError(
                f"{name} is {tensor.dtype}, needs a floating-point dtype; load and dequantize it in transformers"
            )
        tensor = tensor.T if row.pattern.transposed else tensor
        if param is None:
            param_dtype = tensor.dtype if dtype is None else jnp.dtype(dtype)
            # [number of tensors, *shape of one]: layers and experts are one dim until the reshape below.
            param = np.empty((math.prod(row.leading_dims), *tensor.shape), param_dtype)
        # The parameter has the dtype of its first tensor: a cast of others must be asked for.
        if dtype is None and tensor.dtype != param.dtype:
            raise ValueError(
                f"{name} is {tensor.dtype} and {next(row.tensor_names())} {param.dtype}; say dtype= of both"
            )
        copy_into(param[i], tensor)
    return param.reshape(row.shape)


def on_host(path: str, param: Any) -> Any:
    """Return a parameter in this host's memory; raise ValueError if parts of it are on other hosts."""
    if not isinstance(param, jax.Array):
        return param
    if not param.is_fully_addressable:
        raise ValueError(
            f"{path} lies on several hosts; gather on all of them, and let one write: "
            "jax.experimental.multihost_utils.process_allgather(params, tiled=True)"
        )
    return np.asarray(param)
