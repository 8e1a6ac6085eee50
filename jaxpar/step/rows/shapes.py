"""Rules for equations that take rows apart, lay them side by side, or number them.

An equation that only moves elements is applied to the row labels. The ordinals of the elements within their rows are
moved alike: if they come out different from row to row, the equation treats rows differently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np

from ...program.primitives import having
from .arithmetic import combine
from .generic import FactorSpace, coupled_along_dim, generic
from .labels import Labels, ordinals_in_row, reshape_groups, reshape_labels, same_in_all_rows
from .reader import Reader, input_shapes, output_shape, rule
from .values import (
    ADVISE_ALL_ROWS,
    TAKES_SOME_ROWS,
    UNKNOWN_POWER,
    Note,
    Value,
    coupled,
    coupled_with_other_rows,
    nonlinear_in_sum,
)

# Primitive -> function from the labels of the operand to the labels of each result. Labels have the operand's shape,
# with size 1 along dims in which they are equal.
_MOVE_LABELS: dict[str, Callable[[Any, np.ndarray], list[np.ndarray]]] = {
    "rev": lambda e, x: [np.flip(x, tuple(d for d in e.params["dimensions"] if x.shape[d] > 1))],
    "slice": lambda e, x: [x[_slice_index(e, x)]],
    "tile": lambda e, x: [np.tile(x, [n if k > 1 else 1 for n, k in zip(e.params["reps"], x.shape, strict=True)])],
    "split": lambda e, x: np.split(x, [*accumulate(e.params["sizes"])][:-1], e.params["axis"]),
    "unstack": lambda e, x: [x.take(i, e.params["axis"]) for i in range(len(e.outvars))],
    "reshape": lambda e, x: [_reshape(e, x)],
}


def _reshape(eqn: Any, labels: np.ndarray) -> np.ndarray:
    operand_shape = input_shapes(eqn)[0]
    dim_order = eqn.params["dimensions"] or range(labels.ndim)  # `vmap` of a convolution transposes within a reshape
    return reshape_labels(labels.transpose(dim_order), tuple(operand_shape[d] for d in dim_order), output_shape(eqn))


def _slice_index(eqn: Any, labels: np.ndarray) -> tuple[slice, ...]:
    p = eqn.params
    bounds = zip(p["start_indices"], p["limit_indices"], p["strides"] or [1] * labels.ndim, labels.shape, strict=True)
    return tuple(slice(None) if n == 1 else slice(*start_limit_stride) for *start_limit_stride, n in bounds)


@rule(*_MOVE_LABELS)
def _move(reader: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> list[Value] | Value:
    (x, *_), name, factor_of_dim = ins, eqn.primitive.name, FactorSpace(eqn).ins[0]
    is_reshape = name == "reshape" and eqn.params["dimensions"] is None
    if x.kind == "whole" and (is_reshape or name == "tile"):
        # In a group of dims that are merged or split, all dims vary if one did. A tile repeats elements, so that
        # each dim varies as before.
        shape = input_shapes(eqn)[0]
        groups = (
            reshape_groups(shape, output_shape(eqn))
            if is_reshape
            else [([d], [d]) for d, n in enumerate(shape) if n > 1]
        )
        varying_dims = frozenset(
            d for old_dims, new_dims in groups if x.varying_dims.intersection(old_dims) for d in new_dims
        )
        return [replace(y, varying_dims=varying_dims) for y in generic(reader, eqn, twin, ins)]
    # Rows along factors, within which the equation moves nothing, are as the generic rule has them.
    if x.kind != "rows" or not (is_reshape or any(factor_of_dim[d] is None for d in x.labels.dims)):
        outs = generic(reader, eqn, twin, ins)
        return [replace(y, number=x.number if x.kind != "whole" else None) for y in outs]
    # The equation itself moves the labels, and then the number of each element within its row.
    labels, ordinals = (_MOVE_LABELS[name](eqn, a) for a in (x.labels.array, ordinals_in_row(x.labels.array)))
    return [rearranged_rows(eqn, x, a, b) for a, b in zip(labels, ordinals, strict=True)]


def rearranged_rows(
    eqn: Any, x: Value, labels: np.ndarray, ordinals: np.ndarray, pick_note: Note | None = None
) -> Value:
    """Return rows after an equation has moved or picked elements.

    Args:
      x: the rows before.
      labels: the row of each element of the result.
      ordinals: for each element of the result, which element of its row it is.
      pick_note: the note to give if the picked rows turn out to be coupled; by default one that names the primitive.
    """
    name, new_labels = eqn.primitive.name, Labels(labels)
    action = {"rev": "reverses the order of rows", "unstack": "takes rows one by one"}.get(name, TAKES_SOME_ROWS)
    # A strided slice often takes one of each pair of rows, and blocks may hold whole pairs.
    is_strided = name == "slice" and max(eqn.params["strides"] or [1]) > 1
    default_note = Note.of_eqn(eqn, f"{action}; {ADVISE_ALL_ROWS}", is_certain=not is_strided)
    pick_note = (x.pick_note if x.num_places else None) or pick_note or default_note
    keeps_order = name == "reshape" or new_labels == x.labels
    result = x.derive(labels=new_labels, pick_note=x.pick_note if keeps_order else pick_note)
    if not labels.size:
        return coupled([x], pick_note)
    if same_in_all_rows(labels, ordinals):
        return result
    message = "takes from each row elements that depend on the row's place in its block"
    return result.with_notes(Note.of_eqn(eqn, message, is_certain=False))


@rule("concatenate", "stack")
def _concatenate(reader: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> list[Value] | Value:
    dim, is_stack = eqn.params.get("dimension", eqn.params.get("axis")), eqn.primitive.name == "stack"
    sizes = [1] * len(ins) if is_stack else [s[dim] for s in input_shapes(eqn)]
    rows = [x for x in ins if x.kind == "rows"]
    if all(x.kind == "whole" for x in ins):
        return generic(reader, eqn, twin, ins)
    # 1. Operands side by side within each row, or sums.
    if any(x.kind == "sum" for x in ins) or (
        len({x.labels for x in rows}) == 1 and (is_stack or dim not in rows[0].labels.dims)
    ):
        return _side_by_side(eqn, ins, sizes, dim)
    if len(rows) < len(ins) or any(x.is_routed for x in rows):
        return coupled_along_dim(eqn, ins)
    # 2. Operands end to end along the dim of rows, as two views of a batch: concatenate the labels.
    labels = [np.expand_dims(x.labels.array, dim) if is_stack else x.labels.array for x in rows]
    other_sizes = np.broadcast_shapes(*(np.delete(a.shape, dim) for a in labels))
    full_labels = [
        np.broadcast_to(a, (*other_sizes[:dim], n, *other_sizes[dim:])) for a, n in zip(labels, sizes, strict=True)
    ]
    # Each operand may be another function of its rows: number the functions with the elements.
    ordinals = [ordinals_in_row(a) * len(rows) + i for i, a in enumerate(full_labels)]
    power = rows[0].power if len({x.power for x in rows}) == 1 else UNKNOWN_POWER
    x = replace(rows[0], power=power, has_mean=any(x.has_mean for x in rows))
    note = Note.of_eqn(eqn, f"puts rows into another order; {ADVISE_ALL_ROWS}")
    result = rearranged_rows(eqn, x, np.concatenate(full_labels, dim), np.concatenate(ordinals, dim), note)
    # 3. If the rows are in the order of the batch again, nothing has been picked.
    row_numbers = np.arange(reader.rows_per_block)
    batch_order = Labels(row_numbers.reshape([-1 if d == dim else 1 for d in range(len(other_sizes) + 1)]))
    return replace(result, pick_note=None) if result.labels == batch_order else result


def _side_by_side(eqn: Any, ins: Sequence[Value], sizes: Sequence[int], dim: int) -> Value:
    """Return values that are laid side by side in each row, or sums.

    In an array of indices, known whole columns are kept apart as `columns`: the lookup decides whether they meet the
    rows that they count.
    """
    is_index_column = eqn.primitive.name == "concatenate" and dim == len(output_shape(eqn)) - 1
    is_index_column = is_index_column and np.issubdtype(eqn.outvars[0].aval.dtype, np.integer)
    is_known = [
        is_index_column and n == 1 and x.kind == "whole" and x.number is not None
        for x, n in zip(ins, sizes, strict=True)
    ]
    # Zeros and known index columns add nothing that depends on rows.
    result = combine(eqn, {k: x for k, x in enumerate(ins) if not (is_known[k] or x.is_zero)})
    offsets = enumerate(accumulate(sizes[:-1], initial=0))
    return replace(result, columns=tuple((offset, ins[k].number) for k, offset in offsets if is_known[k]))


@rule("iota", "rng_uniform")
def _iota(reader: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Value:
    dims = [eqn.params["dimension"]] if "dimension" in eqn.params else range(len(output_shape(eqn)))
    return Value(varying_dims=frozenset(dims))


@rule(*having("draws"))
def _draw(reader: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> list[Value] | Value:
    """Return random numbers or keys.

    Keys that are rows give numbers that are rows. The block's own key gives each row other numbers; a key that all
    blocks share gives all blocks the same numbers, which must not decide about rows.
    """
    rows, ndim = [x for x in ins if x.kind == "rows"], len(output_shape(eqn))
    if any(x.kind == "sum" for x in ins):
        return nonlinear_in_sum(eqn, ins)
    if rows:
        labels = [Labels(x.labels.array.reshape([*x.labels.array.shape, *[1] * ndim][:ndim])) for x in rows]
        return rows[0].derive(labels=labels[0]) if len({*labels}) == 1 else coupled_with_other_rows(eqn, ins)
    # Blocks have different keys, so that their draws need not agree.
    if any(x.is_keyed for x in ins):
        return Value()
    advice = "use the key that the loss gets; evaluate passes None, so read random numbers from the batch there"
    pick_note = Note.of_eqn(eqn, f"draws with a key that is the same in all blocks; {advice}", False)
    return [
        Value(varying_dims=frozenset(range(len(output_shape(eqn, j)))), pick_note=pick_note)
        for j in range(len(eqn.outvars))
    ]
