"""Paths of a pytree's leaves as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax


def name_of(path: Any) -> str:
    """A key path as text, `layers/0/kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def as_flax_saves(names: Sequence[str]) -> list[str]:
    """Return the paths of a tree that was restored from a checkpoint of Flax as those of the parameters in it: Linen's
    variables have `params/` in front, and Orbax keeps a variable of NNX as a node with one child, `value`.

    >>> as_flax_saves(["params/a/kernel", "params/b"]), as_flax_saves(["a/value", "b/value"])
    (['a/kernel', 'b'], ['a', 'b'])
    """
    while names and all(name.startswith("params/") for name in names):
        names = [name.removeprefix("params/") for name in names]
    is_nnx = all(name.endswith("/value") for name in names)
    return [name.removesuffix("/value") if is_nnx else name for name in names]


def below(path: str, paths: Sequence[str]) -> list[int]:
    """The positions of the `paths` that are this one, or lie below it.

    >>> below("up/1", ["up/0/kernel", "up/1/bias", "up/10/bias", "up/1"])
    [1, 3]
    """
    return [at for at, one in enumerate(paths) if one == path or one.startswith(f"{path}/")]
