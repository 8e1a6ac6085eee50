"""Rules of primitives that reduce over a split dim: reductions, matmuls, lookups.

They communicate over `tensor`:

    reduction      reduce the part, then over ranks              a sum: all-reduce; others: all-gather of the results
    dot_general    column-parallel: a free dim is split          no communication: the output is split
                   row-parallel: a contracted dim is split       all-reduce, or reduce-scatter with `sequence`
                   of experts, [E, C, F/n] and [E, F/n, D]       with `sequence`, reduce-scatter along D
    gather         vocabulary-parallel: table [V/n, D]           zeros for other ranks' rows, then as row-parallel
                   activations [T/n, D]                          all-to-all to [T, D/n]
    all_to_all     of tokens over `expert`                       with `sequence`, of [.., D/n]
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...program import factors
from ...program import jaxpr as jx
from ...program.primitives import having
from . import edges
from .localiser import Found, Localiser, LocalValue
from .primitives import follow, on_parts, rule, shape_of, split_factor


@rule(*having("reduces"))
def _reduce(localiser: Localiser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """Reduce the part, then reduce the ranks' results in the same way."""
    (x,) = inputs
    if x.dim not in eqn.params["axes"]:
        return follow(localiser, eqn, inputs)
    name, part = eqn.primitive.name, localiser.masked_part(x, identity(eqn))
    if name == "reduce_sum":
        return [(localiser.total(jx.bind(eqn, [part])[0]), None)]

    def reduce_over_ranks(part: jax.Array) -> jax.Array:
        return jx.bind(eqn, [localiser.of_all(jx.bind(eqn, [part])[0])], axes=(0,))[0]

    if not (x.active and name in ("reduce_max", "reduce_min")):
        return [(reduce_over_ranks(part), None)]
    extreme = jax.custom_jvp(reduce_over_ranks)

    @extreme.defjvp
    def extreme_jvp(primals: Any, tangents: Any) -> Any:
        # Elements that tie share the gradient equally, whichever ranks they are on. JAX's own derivative would share it
        # first among ranks, then among each rank's elements.
        (part,), (tangent,) = primals, tangents
        best = extreme(part)
        is_best = (part == jnp.expand_dims(best, eqn.params["axes"])).astype(part.dtype)
        total = lambda y: localiser.total(y.sum(eqn.params["axes"]))
        return best, total(is_best * tangent) / total(is_best)

    return [(extreme(part), None)]


def identity(eqn: Any) -> Any:
    """Return the identity element of a (cumulative) reduction, in the dtype of its operand."""
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
def _arg(localiser: Localiser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """Find the best index of each rank's part, then the rank whose value is best."""
    (x,) = inputs
    (axis,) = eqn.params["axes"]
    if x.dim != axis:
        return follow(localiser, eqn, inputs)
    (index,) = jx.bind(eqn, [x.value])
    best = jnp.take_along_axis(x.value, jnp.expand_dims(index, axis), axis).squeeze(axis)
    # Turn the index in the part into an index in the whole array.
    index = index + (lax.axis_index(edges.AXIS) * (x.shape[axis] // localiser.ranks)).astype(index.dtype)
    values, indices = (edges.all_gather_replicated(y[None], 0, localiser.ranks) for y in (best, index))
    # Of equal values the first rank's wins, so that the index is the first one, as in the whole array.
    (rank,) = jx.bind(eqn, [values], axes=(0,))
    return [(jnp.take_along_axis(indices, rank[None].astype(jnp.int32), 0)[0], None)]


@rule("dot_general", "conv_general_dilated")
def _product(localiser: Localiser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """Multiply the parts: column-parallel if a free dim is split, row-parallel if a contracted one is.

    Where both operands are split, along different factors, a parameter keeps its split; of two operands of one kind,
    the larger does.
    """
    factor = split_factor(eqn, inputs, weights=True)
    if factor is None:
        return None
    local_outputs = on_parts(localiser, eqn, inputs, factor)
    if local_outputs is None or not factor.reduced:
        return local_outputs
    ((value, _),) = local_outputs
    left, right = inputs
    # Only a product with a parameter ends a block, and joins the residual stream. Scores of attention do not.
    is_residual = eqn.primitive.name == "dot_general" and left.weight != right.weight
    shape = shape_of(eqn)
    if is_residual and localiser.sequence and (num_batch_dims := len(eqn.params["dimension_numbers"][1][0])):
        # A product of experts: its dim 1 is their slots, which tokens look up next. Split the features instead.
        features = len(shape) - 1 if right.weight else num_batch_dims
        if shape[features] % localiser.ranks == 0:
            return [(edges.reduce_scatter(value, features, localiser.ranks), features)]
    return [localiser.summed(value, shape, is_residual, eqn)]


@rule("gather")
def _lookup(localiser: Localiser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """Look up rows of a table that is split along the looked-up dim (vocabulary-parallel embedding).

    Each rank returns the rows that it stores, and zeros for the others; the sum over ranks is the result.

    Source: Shoeybi et al. 2019, section 3.
    """
    table, indices = inputs
    numbers = eqn.params["dimension_numbers"]
    if table.dim is None or table.dim not in numbers.collapsed_slice_dims:
        return follow(localiser, eqn, inputs)
    mode, modes = eqn.params["mode"], lax.GatherScatterMode
    fills = mode == modes.FILL_OR_DROP  # `jnp.take` does so with indices that are out of bounds
    if indices.dim is not None or (fills and not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact)):
        return None
    shape = shape_of(eqn)
    if not table.weight and (features := _lookup_of_features(localiser, eqn, inputs)):
        return features
    batch_dims = [d for d in range(len(shape)) if d not in numbers.offset_dims]
    column = numbers.start_index_map.index(table.dim)
    size, local_size = table.shape[table.dim], table.shape[table.dim] // localiser.ranks

    # 1. Shift the indices to this rank's rows, and mask those of other ranks.
    start_indices = indices.value.astype(jnp.promote_types(indices.value.dtype, jnp.int32))  # offsets overflow uint8
    rows = start_indices[..., column]
    is_out_of_bounds = (rows < 0) | (rows >= size)
    local_rows = jnp.clip(rows, 0, size - 1) - (lax.axis_index(edges.AXIS) * local_size).astype(rows.dtype)
    is_local = (local_rows >= 0) & (local_rows < local_size) & (~is_out_of_bounds if fills else True)

    # 2. Look up: rows of other ranks read row 0, and are zeroed.
    local_indices = with_column(start_indices, column, jnp.where(is_local, local_rows, 0))
    (features,) = jx.bind(eqn, [table.value, local_indices], indices_are_sorted=False, unique_indices=False)
    spread = lambda x: jnp.broadcast_to(
        jnp.expand_dims(x, [d for d in range(len(shape)) if d not in batch_dims]), shape
    )
    features = jnp.where(spread(is_local), features, jnp.zeros_like(features))
    if mode == modes.PROMISE_IN_BOUNDS:  # reads are clamped, and gradients of rows out of bounds dropped
        features = jnp.where(spread(is_out_of_bounds), lax.stop_gradient(features), features)

    # 3. Sum over ranks, then fill in, since a fill value must not be summed.
    value, dim = localiser.summed(features, shape, table.weight, eqn)
    if fills:
        filled, fill = LocalValue(spread(is_out_of_bounds), None, shape), eqn.params["fill_value"]
        is_filled = filled.value if dim is None else localiser.part(filled, dim)
        value = jnp.where(is_filled, jnp.nan if fill is None else fill, value)
    return [(value, dim)]


def _features(localiser: Localiser, eqn: Any, inputs: Sequence[LocalValue]) -> factors.Factor | None:
    """Return the last factor that only the first input has, and that the ranks divide; None without one."""
    x, *other_inputs = inputs
    own_factors = [f for f in factors.of(eqn) if f.ins[0] is not None and f.ins[1:] == (None,) * len(other_inputs)]
    return next((f for f in own_factors[::-1] if x.shape[f.ins[0]] % localiser.ranks == 0), None)  # type: ignore[index]


def _lookup_of_features(localiser: Localiser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """Look up activations whose positions are split, as the dispatch of experts does: split features instead.

    Returns:
      The result, split along its features; None if they do not divide, or if the result is so small that its sum over
      ranks sends less than an exchange of the table.
    """
    table, shape = inputs[0], shape_of(eqn)
    factor = _features(localiser, eqn, inputs)
    if factor is None or math.prod(table.shape) > 2 * math.prod(shape):
        return None
    return on_parts(localiser, eqn, inputs, factor)


@rule("all_to_all")
def _all_to_all(localiser: Localiser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """Exchange each rank's part of the features of tokens. With whole values, all ranks would send the same bytes.

    This also holds for values that are whole. The ranks of `tensor`, which gather the features where a product reads
    them, are closer to one another than the ranks of `expert`.
    """
    (x,) = inputs
    if x.dim is not None and (results := follow(localiser, eqn, inputs)):
        return results
    factor = _features(localiser, eqn, inputs)
    if localiser.sequence and factor is not None and eqn.params["axis_name"] == "expert":
        return on_parts(localiser, eqn, inputs, factor)
    return [(jx.bind(eqn, [x.value])[0], None)] if x.dim is None else None


def with_column(indices: jax.Array, column: int, values: jax.Array) -> jax.Array:
    """Return index vectors [..., coordinates] with other values [...] of one coordinate.

    It concatenates columns, so that `slicing/scatters.py` can follow each. An update in place would hide them.
    """
    columns = lambda start, end: lax.slice_in_dim(indices, start, end, axis=-1)
    new_column = values[..., None].astype(indices.dtype)
    return jnp.concatenate([columns(0, column), new_column, columns(column + 1, None)], -1)
