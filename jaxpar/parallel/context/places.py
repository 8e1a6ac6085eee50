"""Positions that go to other places, which are known before the program runs: whatever slices, joins, pads, reverses,
picks or writes them.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from ...program import jaxpr as jx
from ..tensor.localiser import Found, LocalValue, place
from .attention_mode import AXIS
from .localiser import ContextLocaliser
from .ops import rearranged, rounds_of
from .split import Split


def placed(
    work: ContextLocaliser,
    eqn: Any,
    inputs: Sequence[LocalValue],
    dim: int,
    at: np.ndarray,
    fill: jax.Array | None = None,
    out: Split | None = None,
) -> Found | None:
    """The positions `at` of values one after the other along a dim, split as `out` says, or in chunks of their own; -1:
    `fill`, or zeros. None where a value is split along another dim.

    Raises ValueError where ranks that are not in one layer at one time would have to meet, unless all may be gathered.
    """
    if any(x.dim not in (None, dim) for x in inputs):
        return None
    out, first, held = out or Split(dim), 0, []
    for x in inputs:
        n = x.shape[dim]
        here = np.tile(np.arange(n), (work.ranks, 1)) if x.dim is None else work.held(n, work.split(x.dim))
        held.append(np.where(here < 0, -1, here + first))
        first += n
    every, wanted = np.concatenate(held, 1), at[work.held(len(at), out, beyond=len(at) - 1)]
    slots, there = np.arange(every.size).reshape(every.shape), every >= 0
    known = np.zeros(first, int)
    known[every[there]] = slots[there]
    source = np.empty_like(wanted)
    for rank, own in enumerate(there):
        nearest = known.copy()
        nearest[every[rank][own]] = slots[rank][own]  # what a rank has itself is not sent
        source[rank] = np.where(wanted[rank] < 0, -1, nearest[wanted[rank]])
    if not work.together and any(rounds_of(source, every.shape[1])):
        if all(math.prod(x.shape) <= work.cheap for x in inputs):
            return None
        raise ValueError(
            f"context={work.ranks} has positions go to other ranks at {place(eqn)}, and under this schedule ranks are "
            "not in one layer at one time, as that needs; use schedule='1f1b', or data, fsdp or tensor for context"
        )
    value = rearranged(jnp.concatenate([x.value for x in inputs], dim), source, AXIS, dim)
    return [(value if fill is None else jnp.where(mine(value, wanted >= 0, dim), value, fill), out)]


def laid(work: ContextLocaliser, eqn: Any, x: LocalValue, dim: Split) -> LocalValue:
    """The same, split in this way."""
    if x.dim is not None and work.split(x.dim).how == dim.how:
        return x
    found = placed(work, eqn, [x], int(dim), np.arange(x.shape[dim]), out=dim) if x.dim is not None else None
    return LocalValue(*found[0], x.shape) if found else LocalValue(work.part(x, dim), dim, x.shape)


def mine(value: jax.Array, mask: np.ndarray, dim: int) -> jax.Array:
    """This rank's row of a mask of positions, to be used beside a value that has them along a dim."""
    return jnp.expand_dims(jnp.asarray(mask)[lax.axis_index(AXIS)], [d for d in range(value.ndim) if d != dim])


def written(
    work: ContextLocaliser,
    eqn: Any,
    x: LocalValue,
    y: LocalValue,
    dim: int,
    at: np.ndarray,
    join: Callable[[jax.Array, jax.Array], jax.Array],
) -> Found | None:
    """`join` of x and of the position of y that `at` has for each of its own; x as it is where that is -1."""
    value = laid(work, eqn, x, Split(dim)).value
    if (found := placed(work, eqn, [y], dim, at)) is None:
        return None
    ((more, out),) = found
    here = mine(value, at[work.held(len(at), Split(dim), beyond=len(at) - 1)] >= 0, dim)
    return [(jnp.where(here, join(value, more), value), out)]


def constant(x: LocalValue) -> np.ndarray | None:
    """A value that the program makes of numbers and counts alone; None where it is another."""
    if not isinstance(x.value, Tracer):
        return np.asarray(x.value)
    if x.made is None or len(x.made[0].outvars) != 1:
        return None
    eqn, inputs = x.made
    known = [constant(y) for y in inputs]
    if any(y is None for y in known):
        return None
    with jax.ensure_compile_time_eval():
        return np.asarray(jx.bind(eqn, [jnp.asarray(y) for y in known])[0])
