"""Checks of the sizes of every model, which run before a size is used, and the sizes of mixture-of-experts models."""

import dataclasses
from abc import abstractmethod
from numbers import Real
from typing import Any

from ...backend.counts import is_count
from .text import Sizes

_MAX_SIZE = 2**31 - 1  # the largest index of 32 bits
_MAX_FLOAT32 = 3.4e38  # about the largest number of float32
# The type of a field's default -> the values that errors ask for.
_DESCRIPTIONS = {
    int: "a whole number from 1",
    float: "a number from 0",
    bool: "True or False",
    tuple: "whole numbers from 1",
    str: "names",
}


class MixtureSizes(Sizes):
    """Sizes of a mixture-of-experts model: how many parameters it has, and how many of them a token uses."""

    experts: int
    chosen: int

    @property
    def parameters(self) -> int:
        """The exact number of parameters, including the biases of routers that have them."""
        return self._parameters(self.experts)

    @property
    def active_parameters(self) -> int:
        """The number of parameters that one token uses: all except those of the experts that it does not choose."""
        return self._parameters(self.chosen)

    @abstractmethod
    def _parameters(self, experts: int) -> int:
        """Count the parameters with `experts` experts in each mixture; routers count for all `self.experts`."""


def check_sizes(config: Any) -> None:
    """Check every field of a config against the type of its default: number, boolean, text or tuple of integers.

    Raises:
      ValueError: a field does not fit the type of its default, an integer is less than 1 or does not fit into 32 bits,
        another number is negative, not finite or too large for float32, a tuple is empty, or `dropout` is not in
        [0, 1). An integer whose default is 0 may be 0, and a field whose default is a float may be an integer.
    """
    for field in dataclasses.fields(config):
        value, kind = getattr(config, field.name), type(field.default)
        if kind is tuple:
            fits = isinstance(value, tuple) and bool(value) and all(map(_is_size, value))
        elif kind is int:
            # bool is a subclass of int, and 0.0 == 0: neither is a size.
            fits = _is_size(value) or (field.default == 0 and value == 0 and not isinstance(value, bool | float))
        elif kind is str:
            fits = isinstance(value, str)
        else:
            fits = isinstance(value, bool) == (kind is bool) and isinstance(value, Real) and _in_float32(value)
        if not fits:
            values = value if isinstance(value, tuple) else (value,)
            is_too_large = any(isinstance(n, int) and n > _MAX_SIZE for n in values)
            limit = f" to {_MAX_SIZE:,}" if is_too_large else ""
            expected = "a whole number from 0" if kind is int and field.default == 0 else _DESCRIPTIONS[kind]
            raise ValueError(f"{field.name}={value!r}: use {expected}{limit}, such as {field.default}")
    if not 0 <= (dropout := getattr(config, "dropout", 0)) < 1:
        raise ValueError(f"{dropout=} must lie in [0, 1); use 0 to switch it off")


def _in_float32(value: Any) -> bool:
    # A comparison, not float(value): that overflows for large integers. NaN fails it.
    return 0 <= value <= _MAX_FLOAT32


def check_kv_heads(heads: int, kv_heads: int) -> None:
    """Raise ValueError unless the heads of keys and values divide those of queries."""
    if heads % kv_heads:
        divisors = [k for k in range(1, heads + 1) if heads % k == 0]
        raise ValueError(f"{kv_heads=} does not divide {heads=}; use one of {divisors}")


def _is_size(value: Any) -> bool:
    return is_count(value) and value <= _MAX_SIZE
