"""Rules of what adds up over a split dim: reductions, matmuls, lookups."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...program import jaxpr as jx
from ...program.primitives import having
from . import edges
from .localiser import Found, Localiser, LocalValue
from .primitives import follow, on_parts, rule, shape_of, split_factor


@rule(*having("reduces"))
def _reduce(work: Localiser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    (x,) = inputs
    if x.dim not in eqn.params["axes"]:
        return follow(work, eqn, inputs)
    name, part = eqn.primitive.name, work.kept(x, identity(eqn))
    if name == "reduce_sum":
        return [(work.total(jx.bind(eqn, [part])[0]), None)]

    def over_ranks(part: jax.Array) -> jax.Array:  # the same reduction over the ranks' results
        return jx.bind(eqn, [work.of_all(jx.bind(eqn, [part])[0])], axes=(0,))[0]

    if not (x.active and name in ("reduce_max", "reduce_min")):
        return [(over_ranks(part), None)]
    extreme = jax.custom_jvp(over_ranks)

    @extreme.defjvp
    def shared(primals: Any, tangents: Any) -> Any:  # elements that tie share it, on whatever ranks they are
        (part,), (tangent,) = primals, tangents
        best = extreme(part)
        hit = (part == jnp.expand_dims(best, eqn.params["axes"])).astype(part.dtype)
        total = lambda y: work.total(y.sum(eqn.params["axes"]))
        return best, total(hit * tangent) / total(hit)

    return [(extreme(part), None)]


def identity(eqn: Any) -> Any:
    """The identity element of a reduction or a cumulative one, in the dtype of what it reduces."""
    name, dtype = eqn.primitive.name.removeprefix("reduce_").removeprefix("cum"), eqn.invars[0].aval.dtype
    if name in ("max", "min", "logsumexp"):
        lowest, highest = (-jnp.inf, jnp.inf) if jnp.issubdtype(dtype, jnp.inexact) else (False, True)
        if jnp.issubdtype(dtype, jnp.integer):
            lowest, highest = jnp.iinfo(dtype).min, jnp.iinfo(dtype).max
        return highest if name == "min" else lowest
    if name == "and":
        return np.invert(np.zeros((), dtype))
    return {"sum": 0, "or": 0, "xor": 0, "prod": 1}[name]


@rule("argmax", "argmin")
def _arg(work: Localiser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    (x,) = inputs
    (axis,) = eqn.params["axes"]
    if x.dim != axis:
        return follow(work, eqn, inputs)
    (at,) = jx.bind(eqn, [x.value])
    best = jnp.take_along_axis(x.value, jnp.expand_dims(at, axis), axis).squeeze(axis)
    at = at + (lax.axis_index(edges.AXIS) * (x.shape[axis] // work.ranks)).astype(at.dtype)
    every, places = (edges.all_gather_replicated(y[None], 0, work.ranks) for y in (best, at))
    (rank,) = jx.bind(eqn, [every], axes=(0,))
    return [(jnp.take_along_axis(places, rank[None].astype(jnp.int32), 0)[0], None)]


@rule("dot_general", "conv_general_dilated")
def _product(work: Localiser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """Column-parallel where a free dim is split, row-parallel where a contracted one is. Where both operands are split
    and not alike, a parameter keeps its split, and else what is larger.
    """
    factor = split_factor(eqn, inputs, weights=True)
    if factor is None:
        return None
    found = on_parts(work, eqn, inputs, factor)
    if found is None or not factor.reduced:
        return found
    ((value, _),) = found
    left, right = inputs
    residual = eqn.primitive.name == "dot_general" and left.weight != right.weight
    return [work.summed(value, shape_of(eqn), residual, eqn)]


@rule("gather")
def _gather(work: Localiser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """Rows of a table that is split along the dim that is looked up: each rank gives those that it has, zeros for the
    others (vocabulary-parallel embedding, Shoeybi et al. 2019, section 3).
    """
    table, indices = inputs
    numbers = eqn.params["dimension_numbers"]
    if table.dim is None or table.dim not in numbers.collapsed_slice_dims:
        return follow(work, eqn, inputs)
    mode, modes = eqn.params["mode"], lax.GatherScatterMode
    fills = mode == modes.FILL_OR_DROP  # as jnp.take does with indices that are out of bounds
    if indices.dim is not None or (fills and not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact)):
        return None
    shape = shape_of(eqn)
    batch = [d for d in range(len(shape)) if d not in numbers.offset_dims]
    column = numbers.start_index_map.index(table.dim)
    size, each = table.shape[table.dim], table.shape[table.dim] // work.ranks
    places = indices.value.astype(jnp.promote_types(indices.value.dtype, jnp.int32))  # offsets overflow uint8 ids
    wanted = places[..., column]
    missing = (wanted < 0) | (wanted >= size)
    own = jnp.clip(wanted, 0, size - 1) - (lax.axis_index(edges.AXIS) * each).astype(wanted.dtype)
    mine = (own >= 0) & (own < each) & (~missing if fills else True)
    changed = places.at[..., column].set(jnp.where(mine, own, 0))
    (found,) = jx.bind(eqn, [table.value, changed], indices_are_sorted=False, unique_indices=False)
    spread = lambda x: jnp.broadcast_to(jnp.expand_dims(x, [d for d in range(len(shape)) if d not in batch]), shape)
    found = jnp.where(spread(mine), found, jnp.zeros_like(found))
    if mode == modes.PROMISE_IN_BOUNDS:  # reads are clamped, and gradients of what is out of bounds dropped
        found = jnp.where(spread(missing), lax.stop_gradient(found), found)
    value, dim = work.summed(found, shape, table.weight, eqn)
    if fills:
        gone, fill = LocalValue(spread(missing), None, shape), eqn.params["fill_value"]
        value = jnp.where(gone.value if dim is None else work.part(gone, dim), jnp.nan if fill is None else fill, value)
    return [(value, dim)]
