"""Counts that users give."""

from numbers import Integral
from typing import Any


def is_count(value: Any) -> bool:
    """Return whether a value is a whole number from 1, of Python or NumPy; True is none."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) > 0
