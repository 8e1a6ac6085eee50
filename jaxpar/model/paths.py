"""Paths of a pytree's leaves as text: one leaf, a checkpoint of Flax, a subtree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax


def name_of(path: Any) -> str:
    """Return a key path as text, `layers/0/kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def keys_of(path: Any) -> tuple[Any, ...]:
    """Return the keys of a key path: names of attributes, keys of items, indices of children."""
    return tuple(next(getattr(entry, x) for x in ("name", "key", "idx") if hasattr(entry, x)) for entry in path)


def as_flax_saves(names: Sequence[str]) -> list[str]:
    """Return the paths of the parameters in a tree that was restored from a checkpoint of Flax.

    Linen's variables have `params/` in front, and Orbax stores a variable of NNX as a node with one child, `value`.

    >>> as_flax_saves(["params/a/kernel", "params/b"]), as_flax_saves(["a/value", "b/value"])
    (['a/kernel', 'b'], ['a', 'b'])
    """
    # Variables that were saved as {"params": variables} have the prefix twice.
    while names and all(name.startswith("params/") for name in names):
        names = [name.removeprefix("params/") for name in names]
    is_nnx = all(name.endswith("/value") for name in names)
    return [name.removesuffix("/value") if is_nnx else name for name in names]


def below(path: str, paths: Sequence[str]) -> list[int]:
    """Return the positions of `path` and of everything under it in `paths`.

    >>> below("up/1", ["up/0/kernel", "up/1/bias", "up/10/bias", "up/1"])
    [1, 3]
    """
    return [i for i, candidate in enumerate(paths) if candidate == path or candidate.startswith(f"{path}/")]
