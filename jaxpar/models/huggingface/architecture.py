"""An architecture of `transformers` as tables: its tensors and its `config.json`, read and written by the same rows."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, NamedTuple

_PLACEHOLDER = re.compile(r"{(\w+)}")


class Stored(NamedTuple):
    """The tensors that make up one parameter.

    Attributes:
      name: of a tensor. Each placeholder, such as {layer}, counts along a leading dim of the parameter, in order.
      transposed: whether they are [out, in] (`torch.nn.Linear`), where the parameter is [..., in, out].
    """

    name: str
    transposed: bool = False


def linear(name: str) -> Stored:
    """The matrices of a `torch.nn.Linear`."""
    return Stored(name, transposed=True)


def under(path: str, name: str, rows: Mapping[str, Stored]) -> dict[str, Stored]:
    """The rows of a part, as those of the whole: paths below `path`, tensors below `name`."""
    return {f"{path}/{ours}": stored._replace(name=f"{name}.{stored.name}") for ours, stored in rows.items()}


class Row(NamedTuple):
    """A parameter of one model: its path, its shape, its tensors, and what each of their placeholders counts."""

    path: str
    shape: tuple[int, ...]
    stored: Stored
    counts: tuple[range, ...]

    @property
    def part(self) -> tuple[int, ...]:
        """The shape of a tensor."""
        return self.shape[len(self.counts) :][:: -1 if self.stored.transposed else 1]

    def names(self) -> Iterator[str]:
        """The tensors in order, one by one: a config may speak of 10**9 layers."""

        def each(name: str, counts: tuple[range, ...]) -> Iterator[str]:
            if not counts:
                yield name
                return
            for number in counts[0]:
                yield from each(_PLACEHOLDER.sub(str(number), name, count=1), counts[1:])

        return each(self.stored.name, self.counts)


class Follows(NamedTuple):
    """An option that is no field of our config, and follows from it.

    Attributes:
      value: what is written, from our config.
      refusal: how the error goes on where `config.json` states another value, with {c.FIELD} for fields of our config;
        "" where that does not matter.
    """

    value: Callable[[Any], Any]
    refusal: str = ""


@dataclass(frozen=True)
class Architecture:
    """One of the architectures of transformers.

    Attributes:
      model_type, title: as `config.json` calls it: "llama", "LlamaForCausalLM".
      tensors: what each parameter is made of, by its path. `embedding` and `head/kernel` have these names.
      sizes: what `config.json` must say, by the names that our config has for it.
      defaults: what it may say: its name there and the value where it is absent, or a function of our sizes.
      fixed: what it must say if anything: the values that our model computes; the first is written.
      follows: what else is written.
      settings: fields of our config that this architecture has no choice of.
      renamed: options by the names that version 5 of transformers gives them.
      theta: of rotary embedding where `config.json` has none.
      stretch: all that `rope_scaling` may say beside its factor; None where nothing is stretched.
      numbers: what each placeholder counts, from our config.
      ignored: patterns of tensors that the model here has no use for, with {FIELD} for fields of our config.
    """

    model_type: str
    title: str
    tensors: Mapping[str, Stored]
    sizes: Mapping[str, str]
    defaults: Mapping[str, tuple[str, Any]]
    fixed: Mapping[str, tuple[Any, ...]]
    follows: Mapping[str, Follows] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    theta: float = 10_000.0
    stretch: Mapping[str, Any] | None = None
    numbers: Mapping[str, Callable[[Any], range]] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    def rows(self, config: Any, shapes: Mapping[str, tuple[int, ...]]) -> list[Row]:
        """The parameters of a model, given their shapes by path, and the tensors that they are made of."""
        count = lambda key: self.numbers[key](config) if key in self.numbers else range(getattr(config, f"{key}s"))
        counted = {path: tuple(map(count, _PLACEHOLDER.findall(self.tensors[path].name))) for path in shapes}
        return [Row(path, shape, self.tensors[path], counted[path]) for path, shape in shapes.items()]

    def read(self, options: Mapping[str, Any], here: str) -> dict[str, Any]:
        """The fields of our config. `here` begins the sentences that say what our model has.

        Raises ValueError on options that are missing, and on those that our model does not have, naming them.
        """
        options = {self.renamed.get(name, name): value for name, value in options.items()} | dict(options)
        if missing := [name for name in self.sizes.values() if name not in options]:
            raise ValueError(f"config lacks {', '.join(missing)}; pass all that the model's config.json holds")
        fields = {ours: options[name] for ours, name in self.sizes.items()}
        for ours, size in fields.items():
            if not isinstance(size, Integral) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{self.sizes[ours]}={size!r} is no size; needs a whole number from 1, as the model's "
                                 "own config.json has it")  # fmt: skip
        for name, known in self.fixed.items():
            if name in options and options[name] not in known:
                needed = repr(known[0]) if known else "none"
                more = ": dequantize its weights, and remove it" if name == "quantization_config" else ""
                raise ValueError(f"{name}={options[name]!r} is not supported: {here} {needed}{more}")
        for ours, (name, default) in self.defaults.items():
            fields[ours] = options.get(name, default(fields) if callable(default) else default)
        return {**fields, **self.settings, **self._rope(options, fields["context"], here)}

    def _rope(self, options: Mapping[str, Any], context: int, here: str) -> dict[str, Any]:
        """`rope_theta` of our config, and `rope_factor` where it may be stretched.

        Version 4 says `rope_theta` and `rope_scaling`, version 5 `rope_parameters`.
        """
        found = options.get("rope_scaling") or options.get("rope_parameters") or {}
        if not isinstance(found, Mapping):
            raise ValueError(
                f"rope_scaling (rope_parameters) is {found!r}; needs a dict such as {{'rope_type': 'llama3', ...}}"
            )
        rope = {"type": "default"} | {name: value for name, value in found.items() if value is not None}
        older = rope.pop("type")
        kind = rope.pop("rope_type", older)
        theta = rope.pop("rope_theta", options.get("rope_theta", self.theta))
        for name, value in (("rope_theta", theta), ("factor", rope.get("factor", 1))):
            if not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(
                    f"{name}={value!r} of rotary embedding is no positive number; Llama 3 has 500000.0 and 8.0"
                )
        if (part := rope.pop("partial_rotary_factor", options.get("partial_rotary_factor", 1))) != 1:
            raise ValueError(f"partial_rotary_factor={part!r} is not supported: {here} 1")
        factor = rope.pop("factor", None)
        if kind == "default" and not rope and factor is None:
            return {"rope_theta": float(theta)} | ({} if self.stretch is None else {"rope_factor": 1.0})
        needed = dict(self.stretch or {})
        known = needed.pop("rope_type", needed.pop("type", None))
        if kind == known:
            if factor is None:
                raise ValueError(
                    f"rope_scaling (rope_parameters) of type {kind!r} lacks factor; Llama 3.1 has 8, Llama 3.2 32"
                )
            # As in transformers: without a word on it, the first training had the length that the model has now.
            rope.setdefault(
                "original_max_position_embeddings", options.get("original_max_position_embeddings", context)
            )
        if kind != known or rope != needed:
            given = rope if factor is None else {"factor": factor, **rope}
            more = f", and {known!r} with a factor, which needs {needed}" if known else ""
            raise ValueError(f"rope_scaling (rope_parameters) of type {kind!r} with {given} is not supported: {here} "
                             f"'default', which takes nothing{more}")  # fmt: skip
        return {"rope_theta": float(theta), "rope_factor": float(factor)}

    def check(self, options: Mapping[str, Any], config: Any) -> None:
        """Raise ValueError where `config.json` states another value of what follows from our config."""
        for name, (value, refusal) in self.follows.items():
            if refusal and options.get(name, value(config)) != value(config):
                raise ValueError(f"{name}={options[name]!r}{refusal.format(c=config)}")

    def written(self, config: Any, dtype: str) -> dict[str, Any]:
        """What `config.json` says of a model of these sizes and its weights of `dtype`, such as "bfloat16".

        In the words of version 4, which 5 understands. Dropout, which is of training, has no word there. The ids of the
        tokens that begin and end a text are the tokenizer's: null here, since what is absent would be Llama 2's.
        """
        names = {**self.sizes, **{ours: name for ours, (name, _) in self.defaults.items()}}
        stretched = self.stretch is not None and config.rope_factor != 1
        return {
            "architectures": [self.title],
            "model_type": self.model_type,
            **{name: getattr(config, ours) for ours, name in names.items()},
            **{name: known[0] for name, known in self.fixed.items() if known},
            **{name: value(config) for name, (value, _) in self.follows.items()},
            "rope_theta": config.rope_theta,
            "rope_scaling": {**(self.stretch or {}), "factor": config.rope_factor} if stretched else None,
            "bos_token_id": None,
            "eos_token_id": None,
            "torch_dtype": dtype,
        }
