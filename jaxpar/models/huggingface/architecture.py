"""An architecture of `transformers` as tables: one for its tensors and several for its `config.json`.

The same rows serve reading and writing. A row of tensors connects one of our parameters with its tensors in the files;
a row of `config.json` connects a field of our config with an option:

    required    vocab -> "vocab_size"                      must be present
    optional    norm_eps -> ("rms_norm_eps", 1e-6)         has transformers' default if absent
    fixed       "hidden_act" -> ("silu", "swish")          must be one of these if present
    derived     "head_dim" -> DerivedOption(...)           follows from our config

`options.py` has the options that no architecture reads.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...backend.counts import is_count

_PLACEHOLDER = re.compile(r"{(\w+)}")
_ROPE_OPTIONS = {
    "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "original_max_position_embeddings"
}  # fmt: skip


class TensorPattern(NamedTuple):
    """The tensors that make up one parameter.

    Attributes:
      name: the name of a tensor. Each placeholder, such as {layer}, counts along a leading dim of the parameter, in
        order.
      transposed: the tensors are [out, in] (`torch.nn.Linear`) and the parameter is [..., in, out].
    """

    name: str
    transposed: bool = False


def linear(name: str) -> TensorPattern:
    """Return the pattern of the matrices of a `torch.nn.Linear`."""
    return TensorPattern(name, transposed=True)


def in_layers(patterns: Mapping[str, TensorPattern]) -> dict[str, TensorPattern]:
    """Return the patterns of a layer as patterns of the model, whose layers are stacked here and numbered there."""
    return {f"layers/{path}": x._replace(name=f"model.layers.{{layer}}.{x.name}") for path, x in patterns.items()}


class ParameterRow(NamedTuple):
    """A parameter of one model: its path, its shape and its tensors."""

    path: str
    shape: tuple[int, ...]
    pattern: TensorPattern

    @property
    def leading_dims(self) -> tuple[int, ...]:
        """The sizes of the dims along which the placeholders count, such as (layers, experts)."""
        return self.shape[: len(_PLACEHOLDER.findall(self.pattern.name))]

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape of each of its tensors, as stored in the file."""
        # Reversed, [in, out] here is [out, in] in the file.
        return self.shape[len(self.leading_dims) :][:: -1 if self.pattern.transposed else 1]

    def tensor_names(self) -> Iterator[str]:
        """Yield the names of its tensors in the order of the leading dims.

        This is a generator because a malformed config may claim 10**9 layers.
        """

        def fill_placeholders(name: str, sizes: tuple[int, ...]) -> Iterator[str]:
            if not sizes:
                yield name
                return
            for number in range(sizes[0]):
                yield from fill_placeholders(_PLACEHOLDER.sub(str(number), name, count=1), sizes[1:])

        return fill_placeholders(self.pattern.name, self.leading_dims)


class DerivedOption(NamedTuple):
    """An option of `config.json` that is no field of our config but follows from it.

    Attributes:
      value: computes the option from our config.
      refusal: the end of the error if `config.json` has another value, with {c.FIELD} for fields of our config; "" if
        another value does no harm.
    """

    value: Callable[[Any], Any]
    refusal: str = ""


@dataclass(frozen=True)
class Architecture:
    """One architecture of transformers: the tables of its tensors and of its `config.json`.

    Attributes:
      model_type: its name in `config.json`, such as "llama".
      class_name: the name of its class in `config.json`, such as "LlamaForCausalLM".
      patterns: the tensors of each parameter, by the parameter's path. The paths `embedding` and `head/kernel` must be
        among them.
      required: fields of our config -> options that `config.json` must have.
      optional: fields of our config -> (option, its value if absent, or a function of the required fields).
      fixed: options -> the values that our model computes, if any; the first one is written.
      derived: options that follow from our config: they are written, and checked when `config.json` is read.
      implied: fields of our config that have one value in this architecture.
      version4_names: option names of version 5 of transformers -> their names in version 4. Both are read, and those of
        version 4 are written.
      rope_theta: the base of rotary embedding if `config.json` has none.
      rope_scaling: everything that `rope_scaling` may contain except its factor; None if the model scales nothing.
      redundant: options that only say what the architecture is, whatever their value.
    """

    model_type: str
    class_name: str
    patterns: Mapping[str, TensorPattern]
    required: Mapping[str, str]
    optional: Mapping[str, tuple[str, Any]]
    fixed: Mapping[str, tuple[Any, ...]]
    derived: Mapping[str, DerivedOption] = field(default_factory=dict)
    implied: Mapping[str, Any] = field(default_factory=dict)
    version4_names: Mapping[str, str] = field(default_factory=dict)
    rope_theta: float = 10_000.0
    rope_scaling: Mapping[str, Any] | None = None
    redundant: Collection[str] = ()

    @property
    def known_options(self) -> set[str]:
        """The names of all options that the tables of this architecture account for."""
        optional_names = (name for name, _ in self.optional.values())
        names = {*self.required.values(), *optional_names, *self.fixed, *self.derived, *self.version4_names}
        return names | set(self.redundant) | _ROPE_OPTIONS | {"model_type", "architectures"}

    def rows(self, shapes: Mapping[str, tuple[int, ...]]) -> list[ParameterRow]:
        """Return a row for each parameter of a model, from the parameters' shapes by path."""
        return [ParameterRow(path, shape, self.patterns[path]) for path, shape in shapes.items()]

    def config_fields(self, options: Mapping[str, Any], support_phrase: str) -> dict[str, Any]:
        """Return the fields of our config from the options of `config.json`.

        Args:
          options: the options that are not null.
          support_phrase: how errors begin to say what our model supports: "Llama here has".

        Raises:
          ValueError: options are missing, or our model does not support one. The error names them.
        """
        # 1. Accept the option names of versions 4 and 5. If both are present, version 4's wins.
        options = {self.version4_names.get(name, name): value for name, value in options.items()} | dict(options)
        # 2. Read the required sizes.
        if missing := [name for name in self.required.values() if name not in options]:
            raise ValueError(f"config lacks {', '.join(missing)}; pass all that the model's config.json holds")
        fields = {config_field: options[name] for config_field, name in self.required.items()}
        for config_field, size in fields.items():
            if not is_count(size):
                raise ValueError(
                    f"{self.required[config_field]}={size!r} is no size; needs a whole number from 1, as the model's "
                    "own config.json has it"
                )
        # 3. Refuse functions that our model does not compute.
        for name, supported in self.fixed.items():
            if name in options and options[name] not in supported:
                needed = repr(supported[0]) if supported else "none"
                hint = ": dequantize its weights, and remove it" if name == "quantization_config" else ""
                raise ValueError(f"{name}={options[name]!r} is not supported: {support_phrase} {needed}{hint}")
        # 4. Read the optional fields; defaults may depend on the sizes.
        for config_field, (name, default) in self.optional.items():
            fields[config_field] = options.get(name, default(fields) if callable(default) else default)
        return {**fields, **self.implied, **self._rope_fields(options, fields["context"], support_phrase)}

    def _rope_fields(self, options: Mapping[str, Any], context: int, support_phrase: str) -> dict[str, Any]:
        """Return `rope_theta` of our config, and `rope_factor` if the architecture can scale frequencies.

        Version 4 of transformers writes `rope_theta` and `rope_scaling`, version 5 `rope_parameters`.
        """
        # 1. Merge the two spellings into one dict without its type, `rope`.
        parameters = options.get("rope_scaling") or options.get("rope_parameters") or {}
        if not isinstance(parameters, Mapping):
            raise ValueError(
                f"rope_scaling (rope_parameters) is {parameters!r}; needs a dict such as {{'rope_type': 'llama3', ...}}"
            )
        # Older configs call the type "type", newer ones "rope_type", and some have both: the newer name counts.
        rope = {"type": "default"} | {name: value for name, value in parameters.items() if value is not None}
        legacy_type = rope.pop("type")
        rope_type = rope.pop("rope_type", legacy_type)
        theta = rope.pop("rope_theta", options.get("rope_theta", self.rope_theta))
        for name, value in (("rope_theta", theta), ("factor", rope.get("factor", 1))):
            if not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(
                    f"{name}={value!r} of rotary embedding is no positive number; Llama 3 has 500000.0 and 8.0"
                )
        if (rotated_part := rope.pop("partial_rotary_factor", options.get("partial_rotary_factor", 1))) != 1:
            raise ValueError(f"partial_rotary_factor={rotated_part!r} is not supported: {support_phrase} 1")
        factor = rope.pop("factor", None)

        # 2. Without scaling, nothing may remain in `rope`.
        if rope_type == "default" and not rope and factor is None:
            return {"rope_theta": float(theta)} | ({} if self.rope_scaling is None else {"rope_factor": 1.0})

        # 3. With scaling, all except the factor must be as our model computes it.
        needed = dict(self.rope_scaling or {})
        supported_type = needed.pop("rope_type", needed.pop("type", None))
        if rope_type == supported_type:
            if factor is None:
                raise ValueError(
                    f"rope_scaling (rope_parameters) of type {rope_type!r} lacks factor; Llama 3.1 has 8, Llama 3.2 32"
                )
            # As in transformers: without this option, the first training had the length that the model has now.
            rope.setdefault(
                "original_max_position_embeddings", options.get("original_max_position_embeddings", context)
            )
        if rope_type != supported_type or rope != needed:
            stated = rope if factor is None else {"factor": factor, **rope}
            alternative = f", and {supported_type!r} with a factor, which needs {needed}" if supported_type else ""
            raise ValueError(
                f"rope_scaling (rope_parameters) of type {rope_type!r} with {stated} is not supported: "
                f"{support_phrase} 'default', which takes nothing{alternative}"
            )
        return {"rope_theta": float(theta), "rope_factor": float(factor)}

    def check_derived(self, options: Mapping[str, Any], config: Any) -> None:
        """Raise ValueError if `config.json` has another value for an option that follows from our config."""
        for name, (value, refusal) in self.derived.items():
            # An option that config.json lacks follows from the others, as it does in transformers.
            if refusal and options.get(name, value(config)) != value(config):
                raise ValueError(f"{name}={options[name]!r}{refusal.format(c=config)}")

    def config_json(self, config: Any, dtype: str) -> dict[str, Any]:
        """Return the contents of `config.json` for a model of this config with weights of `dtype`, such as "bfloat16".

        Options have their names of version 4, which version 5 understands. Dropout is an option of training and is not
        written. The ids of the tokens that begin and end a text belong to the tokenizer. They are written as null,
        because an absent option would get Llama 2's ids.
        """
        names = {**self.required, **{config_field: name for config_field, (name, _) in self.optional.items()}}
        is_scaled = self.rope_scaling is not None and config.rope_factor != 1
        return {
            "architectures": [self.class_name],
            "model_type": self.model_type,
            **{name: getattr(config, config_field) for config_field, name in names.items()},
            **{name: supported[0] for name, supported in self.fixed.items() if supported},
            **{name: value(config) for name, (value, _) in self.derived.items()},
            "rope_theta": config.rope_theta,
            "rope_scaling": {**(self.rope_scaling or {}), "factor": config.rope_factor} if is_scaled else None,
            "bos_token_id": None,
            "eos_token_id": None,
            "torch_dtype": dtype,
        }
