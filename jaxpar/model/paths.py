"""Paths of a pytree's leaves as text."""

from __future__ import annotations

from typing import Any

import jax


def name_of(path: Any) -> str:
    """A key path as text, `layers/0/kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")
