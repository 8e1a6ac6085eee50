"""A rank's part of a whole value from the parts of what it was made of: a causal mask [T, T] from positions [T], so
that no rank has to hold what it needs a part of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ...jaxprs import jaxpr as jx
from ..tensor.localiser import Localiser, Placed
from ..tensor.primitives import ELEMENTWISE
from .split import Split

_SAME = frozenset(ELEMENTWISE)


def pushed(work: Localiser, positions: Callable[[int, Split], jax.Array], x: Placed, dim: Split) -> jax.Array | None:
    """The part of `x` along `dim`; None where it is to be cut out of the whole. `positions(n, dim)` are this rank's of
    n.
    """
    assert x.made is not None
    eqn, inputs = x.made
    name = eqn.primitive.name
    if name in _SAME:
        return jx.bind(eqn, [y.value if alike(y, dim) else work.part(y, dim) for y in inputs])[0]
    if name == "broadcast_in_dim" and len(inputs) == 1:
        dims, shape = eqn.params["broadcast_dimensions"], work.local(x.shape, dim)
        (y,) = inputs
        at = dims.index(dim) if dim in dims else -1
        small = y.value if at < 0 or y.shape[at] == 1 else work.part(y, Split(at, dim.rows, dim.overlap))
        return jax.lax.broadcast_in_dim(small, shape, dims)
    if name == "iota" and not inputs:
        value = jax.lax.broadcasted_iota(eqn.params["dtype"], work.local(x.shape, dim), eqn.params["dimension"])
        if dim != eqn.params["dimension"]:
            return value
        places = positions(x.shape[dim], dim).astype(value.dtype)
        return jnp.broadcast_to(jnp.expand_dims(places, [d for d in range(len(x.shape)) if d != dim]), value.shape)
    return None


def alike(x: Placed, dim: int) -> bool:
    """Whether a whole value is the same for all positions along a dim, where it meets others by broadcasting."""
    return not x.shape or x.shape[dim] == 1


def counts(x: Placed) -> int | None:
    """The dim along which a whole value is 0, 1, 2, ..., whatever else it has; None where it is not known to be."""
    if x.made is None:
        return None
    eqn, inputs = x.made
    name = eqn.primitive.name
    if name == "iota":
        return eqn.params["dimension"]
    if name == "select_n" and len(inputs) == 3 and (sign := inputs[0].made) is not None:
        # An index below 0 counts from the end: none is.
        less, sides = sign
        never = less.primitive.name == "lt" and counts(sides[0]) is not None and _is_zero(sides[1].value)
        return counts(inputs[1]) if never else None
    dim = counts(inputs[0]) if name in ("convert_element_type", "broadcast_in_dim", "copy") else None
    if dim is None or inputs[0].shape[dim] == 1:
        return None
    return eqn.params["broadcast_dimensions"][dim] if name == "broadcast_in_dim" else dim


def _is_zero(value: Any) -> bool:
    return not isinstance(value, Tracer) and bool(np.all(value == 0))
