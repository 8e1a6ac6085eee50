"""What partial sums go through as they are: equations that are linear in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ...jaxprs import jaxpr as jx
from ..tensor.localiser import Found, Placed

PARTIAL = -1  # in the place of the dim along which a value is split: it is a partial sum
_ONE = ("neg", "copy", "copy_p", "reshape", "squeeze", "transpose", "broadcast_in_dim", "reduce_sum")


def linear(eqn: Any, inputs: Sequence[Placed]) -> Found | None:
    """An equation, some of whose inputs are partial sums, where its output is one: a loss's total, say, divided by the
    number of tokens. None where it is not linear in them.
    """
    name, partial = eqn.primitive.name, [x.partial for x in inputs]
    inexact = jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact)
    others = all(x.dim is None for x in inputs)
    if (
        name in _ONE
        or (name == "convert_element_type" and inexact)
        or (name in ("add", "sub", "add_any") and all(partial))
        or (name == "mul" and sum(partial) == 1 and others)
        or (name == "div" and inexact and partial == [True, False] and others)
    ):
        return [(value, PARTIAL) for value in jx.bind(eqn, [x.value for x in inputs])]
    return None
