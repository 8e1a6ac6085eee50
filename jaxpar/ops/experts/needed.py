"""Work of a mixture that only some batches need: by name, for whoever reads the program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from ...inspect.compiled import shares


def where_needed(needed: jax.Array, compute: Callable[[Any], Any], carry: Any) -> Any:
    """`compute(carry)` where `needed`, bool [], else `carry`: what finds no slot in experts' buffers."""
    with jax.named_scope(shares.OVERFLOW):
        return jax.lax.cond(needed, compute, lambda carry: carry, carry)
