"""Scatters of a backward that write one element of each row, by selects.

    y[n] = x[n, i[n]]                          forward: a gather, such as that of the labels' logits in a cross-entropy
    d x[n, v] = dy[n] if v = i[n] else 0       backward: one compare and one select, fused into whatever reads it

JAX transposes a gather into a scatter. XLA fuses no scatter: it writes all elements of d x, in the logits' float32,
adds dy to one element of each row, and reads them all again for the rest of the backward. In the compiled step of GPT-2
(16,384 tokens, 50,257 words, bfloat16, one H200, jax 0.10.2) this moves 9.9 GB, and a select 3.3 GB.

A select compares every element, and so pays only if each row has one index: k indices would take k compares for each
element, where a scatter writes k elements. A scatter therefore becomes a select if it adds to zeros, and

- its rows have more than one element; and
- each row is written once: the other dims are batch dims of the scatter (`jnp.take_along_axis`, `jax.vmap`), or their
  indices count 0, 1, 2, ... (`logits[jnp.arange(n), labels]`).

Then the select's bytes are never more than the scatter's. Its results are equal, also for indices out of range, which
JAX clips, or drops.
"""

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..program import jaxpr as jx
from ..program.lookups import counting_dim
from ..program.savings import marked
from ..program.walk import with_programs


def by_selects(eqns: Sequence[Any], consts: Mapping[Any, Any]) -> list[Any]:
    """Return the equations of a backward with selects instead of scatters, where that saves bytes.

    It also replaces scatters inside loops, branches and checkpoints, if the indices of rows are computed in there too.
    `consts` has the arrays that are known, by variable.
    """
    producers = {v: eqn for eqn in eqns for v in eqn.outvars}
    new_eqns: list[Any] = []
    for eqn in eqns:
        scatter = _one_per_row(eqn, eqns, producers, consts) if eqn.primitive.name == "scatter-add" else None
        new_eqns += [with_programs(eqn, _with_inner_selects)] if scatter is None else _select(eqn, *scatter)
    return new_eqns


def _with_inner_selects(jaxpr: Any) -> Any:
    """Return a jaxpr inside an equation with selects; itself if it has no such scatter."""
    eqns = by_selects(jaxpr.eqns, {})
    return jaxpr if all(map(operator.is_, eqns, jaxpr.eqns)) else jaxpr.replace(eqns=eqns)


def _one_per_row(
    eqn: Any, eqns: Sequence[Any], producers: Mapping[Any, Any], consts: Mapping[Any, Any]
) -> tuple[int, int, list[int]] | None:
    """Return how a scatter adds one element to each row of zeros; None if it does not.

    Returns:
      dim: the dim of the operand along which the element lies.
      column: the coordinate of the index vectors that gives its position.
      order: the batch dims of the indices in the order of the operand's other dims; dims of size 1 that belong to none
        come first.
    """
    (operand, indices, updates), numbers = eqn.invars, eqn.params["dimension_numbers"]
    shape, batch = operand.aval.shape, indices.aval.shape[:-1]
    if not _is_zeros(operand, producers) or updates.aval.size != math.prod(batch):
        return None
    # 1. Find the dims of the operand whose index is the number of the row, and the batch dim of each.
    batch_dim_of = dict(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True))
    indexed_dims = []
    for column, d in enumerate(numbers.scatter_dims_to_operand_dims):
        array, column_in_array = _column(indices, column, producers)
        values = jx.constant(eqns, array, consts)
        batch_dim = None if values is None else counting_dim(values[..., column_in_array])
        if batch_dim is not None and batch[batch_dim] == shape[d] and batch_dim not in batch_dim_of.values():
            batch_dim_of[d] = batch_dim
        else:
            indexed_dims.append((d, column))
    # 2. These must be all dims but one, so that each row is written once. `jnp.take_along_axis` gives no index to a dim
    # of size 1.
    unit_dims = [batch_dim for batch_dim in range(len(batch)) if batch_dim not in batch_dim_of.values()]
    if len(indexed_dims) != 1 or any(batch[batch_dim] != 1 for batch_dim in unit_dims):
        return None
    ((dim, column),) = indexed_dims
    other_dims = [d for d in range(len(shape)) if d != dim]
    if shape[dim] == 1 or any(d not in batch_dim_of and shape[d] != 1 for d in other_dims):
        return None
    return dim, column, [*unit_dims, *(batch_dim_of[d] for d in other_dims if d in batch_dim_of)]


def _is_zeros(atom: Any, producers: Mapping[Any, Any]) -> bool:
    """Return whether an array was filled with zeros."""
    if jx.is_literal(atom) or (fill := producers.get(atom)) is None or fill.primitive.name != "broadcast_in_dim":
        return False
    return jx.is_literal(fill.invars[0]) and not np.any(fill.invars[0].val)


def _column(atom: Any, column: int, producers: Mapping[Any, Any]) -> tuple[Any, int]:
    """Return the array from which a coordinate of index vectors comes, and the number of the coordinate in it."""
    eqn = None if jx.is_literal(atom) else producers.get(atom)
    if eqn is None or not eqn.invars:
        return atom, column
    name, operand, shape = eqn.primitive.name, eqn.invars[0], atom.aval.shape
    if name == "concatenate" and eqn.params["dimension"] == len(shape) - 1:
        ends = np.cumsum([x.aval.shape[-1] for x in eqn.invars])
        i = int(np.searchsorted(ends, column, side="right"))
        return _column(eqn.invars[i], column - int(ends[i - 1] if i else 0), producers)
    if name == "slice" and operand.aval.shape[:-1] == shape[:-1] and set(eqn.params["strides"] or (1,)) == {1}:
        return _column(operand, column + eqn.params["start_indices"][-1], producers)
    if name == "convert_element_type" and np.can_cast(operand.aval.dtype, atom.aval.dtype):
        return _column(operand, column, producers)
    return atom, column


def _select(eqn: Any, dim: int, column: int, order: list[int]) -> list[Any]:
    """Return the equations of the select that replaces a scatter; other arguments from `_one_per_row`."""
    shape, mode = eqn.outvars[0].aval.shape, eqn.params["mode"]
    row_shape, last_position = (*shape[:dim], 1, *shape[dim + 1 :]), shape[dim] - 1

    def select(zeros: jax.Array, indices: jax.Array, updates: jax.Array) -> jax.Array:
        index = lax.index_in_dim(indices, column, indices.ndim - 1, keepdims=False)
        # A uint8 cannot count 300 positions; a wider type holds all its values.
        index = index if jnp.iinfo(index.dtype).max >= last_position else index.astype(jnp.int32)
        # In other modes, an index out of range equals no position, and so writes nothing.
        index = jnp.clip(index, 0, last_position) if mode == lax.GatherScatterMode.CLIP else index
        by_row = lambda x: x.reshape(index.shape).transpose(order).reshape(row_shape)
        is_written = lax.broadcasted_iota(index.dtype, shape, dim) == by_row(index)
        return lax.select(is_written, jnp.broadcast_to(by_row(updates), shape), zeros)

    *eqns, last = jx.instead_of(eqn, select)
    # The scatter would write all elements into memory, and another kernel would read them.
    return [*eqns, marked(last, "lookups", 2 * jx.nbytes(eqn.outvars[0]))]
