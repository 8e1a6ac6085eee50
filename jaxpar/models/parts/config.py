"""What every model's sizes must be, before any of them is multiplied."""

import dataclasses
from abc import abstractmethod
from numbers import Integral, Real
from typing import Any

from .text import Sizes

_LARGEST = 2**31 - 1  # what an index of 32 bits reaches
_MOST = 3.4e38  # about the largest number of float32
_WORDS = {int: "a whole number from 1", float: "a number from 0", bool: "True or False", tuple: "whole numbers from 1"}


class MixtureSizes(Sizes):
    """Sizes of a model of mixtures: how many parameters it has, and how many of them a token meets."""

    experts: int
    chosen: int

    @property
    def parameters(self) -> int:
        """The exact number of parameters; where routers have biases, with them."""
        return self._parameters(self.experts)

    @property
    def active_parameters(self) -> int:
        """Those that one token meets: all but the experts that it does not choose."""
        return self._parameters(self.chosen)

    @abstractmethod
    def _parameters(self, experts: int) -> int:
        """With so many experts in each mixture, and routers of all of them."""


def check_sizes(config: Any) -> None:
    """Raise ValueError where a field of a config is not of the type of its default, an integer is less than 1, another
    number is negative or not finite, or `dropout` is no probability.
    """
    for field in dataclasses.fields(config):
        value, kind = getattr(config, field.name), type(field.default)
        if kind is tuple:
            fits = isinstance(value, tuple) and bool(value) and all(map(_is_size, value))
        elif kind is int:
            fits = _is_size(value) or (field.default == 0 and value == 0 and not isinstance(value, bool | float))
        else:
            fits = isinstance(value, bool) == (kind is bool) and isinstance(value, Real) and _in_float32(value)
        if not fits:
            large = any(isinstance(n, int) and n > _LARGEST for n in (value if isinstance(value, tuple) else (value,)))
            most = f" to {_LARGEST:,}" if large else ""
            words = "a whole number from 0" if kind is int and field.default == 0 else _WORDS[kind]
            raise ValueError(f"{field.name}={value!r}: use {words}{most}, such as {field.default}")
    if not 0 <= (dropout := getattr(config, "dropout", 0)) < 1:
        raise ValueError(f"{dropout=} must lie in [0, 1); use 0 to switch it off")


def _in_float32(value: Any) -> bool:
    return 0 <= value <= _MOST  # also of integers too large for a float


def _is_size(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and 0 < int(value) <= _LARGEST
