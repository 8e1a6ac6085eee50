"""Paths of a pytree's leaves as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax


def name_of(path: Any) -> str:
    """A key path as text, `layers/0/kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def below(path: str, paths: Sequence[str]) -> list[int]:
    """The positions of the `paths` that are this one, or lie below it.

    >>> below("up/1", ["up/0/kernel", "up/1/bias", "up/10/bias", "up/1"])
    [1, 3]
    """
    return [at for at, one in enumerate(paths) if one == path or one.startswith(f"{path}/")]
