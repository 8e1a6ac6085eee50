"""What sets one kind of model apart from another where weights come from Hugging Face and go there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flax import nnx


def _all_layers(path: str, config: Any) -> range:
    return range(config.layers)


def _none(name: str, config: Any) -> bool:
    return False


@dataclass(frozen=True)
class Architecture:
    """What `from_hf`, `to_hf` and `save_hf` need to know of a kind of model.

    Attributes:
      title: as errors call it, such as "Llama".
      names: the tensors of each parameter, by its path. Where it is stacked, `{}` is the layer's number, and the next
        `{}` the expert's. `embedding` and `head/kernel` have the names that they have here.
      module: (config, rngs=) -> the NNX module.
      to_config: sizes from what `config.json` holds; raises ValueError.
      to_dict: what `config.json` says of sizes and a dtype.
      layers: (a stacked parameter's path, config) -> the numbers of its layers.
      passed_over: (a tensor's name, config) -> whether it is of a part that the model here does not have.
    """

    title: str
    names: Mapping[str, str]
    module: Callable[..., nnx.Module]
    to_config: Callable[[Any], Any]
    to_dict: Callable[[Any, str], dict[str, Any]]
    layers: Callable[[str, Any], range] = _all_layers
    passed_over: Callable[[str, Any], bool] = _none

    def stacked(self, path: str, config: Any) -> tuple[int, ...]:
        """The sizes of a parameter's leading dims that tensors do not have: layers, experts."""
        return tuple(len(numbers) for numbers in self._numbers(path, config))

    def each_name(self, path: str, config: Any) -> Iterator[str]:
        """The tensors that a parameter is made of, in order."""
        yield from _each(self.names[path], self._numbers(path, config))

    def _numbers(self, path: str, config: Any) -> Sequence[range]:
        return (self.layers(path, config), range(getattr(config, "experts", 1)))[: self.names[path].count("{}")]


def _each(name: str, numbers: Sequence[range]) -> Iterator[str]:
    if not numbers:
        yield name
    for i in numbers[0] if numbers else ():
        yield from _each(name.replace("{}", str(i), 1), numbers[1:])
