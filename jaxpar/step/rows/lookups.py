"""Rules for lookups and updates at indices; where the indices are known, so are the rows that they meet.

A lookup among rows at known indices picks the labels as it picks the elements. At unknown indices it couples rows, with
certainty only if the indices cannot have come with the rows. An update that adds rows up at indices is a sum over rows,
or is rows again if each place gets the elements of one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...program.primitives import PRIMITIVES
from .arithmetic import combine, sum_power
from .generic import FactorSpace, generic
from .labels import Labels, ordinals_in_row, same_in_all_rows
from .reader import Reader, column_notes, input_shapes, rule
from .shapes import rearranged_rows
from .values import (
    ADVISE_ALL_ROWS,
    PICKS_ROWS,
    TAKES_SOME_ROWS,
    Note,
    Value,
    coupled,
    coupled_with_other_rows,
    nonlinear_in_sum,
    position_notes,
    row_groups_note,
)


@rule("gather")
def _gather(reader: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> list[Value] | Value:
    (x, indices), numbers = ins, eqn.params["dimension_numbers"]
    operand_shape, indices_shape = input_shapes(eqn)
    if indices.kind == "sum" or (indices.kind == "rows" and (indices.has_mean or x.kind == "sum")):
        return nonlinear_in_sum(eqn, ins, "looks up at indices that hold")
    if reader.in_loop and x.kind == "sum":
        # A loop may add up at each row's place, and this lookup may take the row's own again.
        return nonlinear_in_sum(eqn, ins, is_certain=False)
    # 1. Lookups that pick no rows: in a table, or within each row.
    picked_dims = x.labels.dims & {*numbers.start_index_map} if x.kind == "rows" else frozenset()
    if not picked_dims:
        notes = column_notes(eqn, indices) if x.kind == "whole" else ()
        return [y.with_notes(*notes) for y in generic(reader, eqn, twin, ins)]
    if x.num_places:
        return coupled(ins, x.pick_note or Note.of_eqn(eqn, PICKS_ROWS))
    # 2. Rows at unknown indices. Indices that come with the rows may point into the block's own rows, as in a batch of
    # graphs that are laid end to end. The indices of a loop may go through all rows.
    columns = {d: column for c, d in enumerate(numbers.start_index_map) if (column := indices.column(c))}
    note = Note.of_eqn(eqn, PICKS_ROWS, is_certain=indices.kind == "whole" and not reader.in_loop)
    takes_slices = any(eqn.params["slice_sizes"][d] != 1 for d in picked_dims)
    if x.labels.dims != picked_dims or not picked_dims <= {*columns} or takes_slices:
        return coupled(ins, note)
    # 3. Rows at known indices: look up the labels, and the ordinals within rows.
    clipped = lambda d: np.broadcast_to(np.clip(columns[d][0], 0, operand_shape[d] - 1), indices_shape[:-1])
    places = tuple(clipped(d) if d in picked_dims else 0 for d in range(len(operand_shape)))
    labels, ordinals = x.labels.array[places], ordinals_in_row(x.labels.array)[places]
    note = Note.of_eqn(eqn, PICKS_ROWS, is_certain=not reader.in_loop)
    # How often each place is picked must not depend on the number of rows.
    repetitions = [_repetitions(eqn, twin, columns[d], d) for d in picked_dims]
    meets_other_rows = indices.kind == "rows" and indices.labels != Labels(labels[..., None])
    if meets_other_rows or any(len(counts) > 1 for counts in repetitions):
        return coupled(ins, note)
    offset_dims = numbers.offset_dims
    result = rearranged_rows(eqn, x, np.expand_dims(labels, offset_dims), np.expand_dims(ordinals, offset_dims), note)
    # 4. Indices along the other dims must be the same for all rows, or come from the row itself.
    is_same = lambda d: (
        same_in_all_rows(labels, *columns[d]) if d in columns else indices.kind == "rows" or not indices.varying_dims
    )
    if all(is_same(d) for d in numbers.start_index_map if d not in picked_dims):
        return result
    message = "looks up at indices that depend on a row's place in its block; put these indices into the batch"
    return result.with_notes(Note.of_eqn(eqn, message, is_certain=False))


@rule("dynamic_slice")
def _dynamic_slice(reader: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> list[Value] | Value:
    (x, *starts), sizes, operand_shape = ins, eqn.params["slice_sizes"], input_shapes(eqn)[0]
    if any(s.kind == "sum" for s in starts):
        return nonlinear_in_sum(eqn, ins, "starts a slice at")
    if x.kind == "rows" and any(sizes[d] != operand_shape[d] for d in x.labels.dims):
        note = Note.of_eqn(eqn, f"{TAKES_SOME_ROWS}; {ADVISE_ALL_ROWS}", is_certain=not reader.in_loop)
        return coupled(ins, note)
    return generic(reader, eqn, twin, ins)


@rule("dynamic_update_slice")
def _dynamic_update_slice(reader: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> list[Value] | Value:
    x, update, *starts = ins
    if "sum" in (x.kind, update.kind):
        if {s.kind for s in starts} != {"whole"}:
            return nonlinear_in_sum(eqn, ins)
        return combine(eqn, {0: x, 1: update})
    space = FactorSpace(eqn)
    if any(y.kind == "rows" and space.to_factors(k, y.labels.array) is None for k, y in enumerate(ins)):
        is_certain = x.kind == "rows" and not reader.in_loop
        return coupled(ins, Note.of_eqn(eqn, f"writes rows to the places of other rows; {ADVISE_ALL_ROWS}", is_certain))
    return generic(reader, eqn, twin, ins)


@rule(*(name for name in PRIMITIVES if name.startswith("scatter")))
def _scatter(reader: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> list[Value] | Value:
    (x, indices, updates), name, space = ins, eqn.primitive.name, FactorSpace(eqn)
    if indices.kind == "sum" or indices.has_mean:
        # `jnp.repeat(experts, counts)` marks where the tokens of each expert begin. What it orders may be put back.
        return nonlinear_in_sum(eqn, ins, "updates at indices that hold", not x.kind == updates.kind == "whole")
    if "sum" in (x.kind, updates.kind):
        if any(y.kind == "rows" for y in ins):
            return nonlinear_in_sum(eqn, ins)
        return combine(eqn, {0: x, 2: updates})
    # 1. Updates within each row.
    if all(space.to_factors(k, y.labels.array) is not None for k, y in enumerate(ins) if y.kind == "rows"):
        notes = column_notes(eqn, indices)
        outs = generic(reader, eqn, twin, ins)
        return [replace(y, power=sum_power(x, updates)).with_notes(*notes) for y in outs]
    # 2. Each place gets elements of one row.
    if (result := _at_own_places(eqn, twin, ins)) is not None:
        return result
    # 3. Each place gets a sum over rows, if no place and no update tells rows apart.
    note = Note.of_eqn(eqn, f"applies {name} to rows at computed indices; {ADVISE_ALL_ROWS}", is_certain=False)
    tells_rows_apart = indices.columns or indices.notes or indices.labels.array.ndim - 1 in indices.labels.dims
    tells_rows_apart = tells_rows_apart or any(y.kind == "whole" and y.varying_dims for y in (indices, updates))
    window_dims = {*eqn.params["dimension_numbers"].update_window_dims}
    rows = updates if updates.kind == "rows" else indices
    if (
        x.kind != "whole"
        or name not in ("scatter-add", "scatter-sub")
        or tells_rows_apart
        or (rows is updates and updates.labels.dims & window_dims)
    ):
        return coupled(ins, note)
    if rows is updates and indices.kind == "rows":
        update_labels = Labels(updates.labels.array.squeeze(tuple(window_dims)))
        if update_labels != Labels(indices.labels.array[..., 0]):
            return coupled_with_other_rows(eqn, ins, "updates")
    if not rows.covers_equally(reader.rows_per_block):
        return coupled(ins, rows.pick_note or row_groups_note(eqn))
    total = Value("sum", power=updates.power, pick_note=updates.pick_note)
    return combine(eqn, {0: x, 2: total}).with_notes(*updates.notes)


def _at_own_places(eqn: Any, twin: Any, ins: Sequence[Value]) -> Value | None:
    """Return rows added up at known places, if each place gets elements of one row; else None.

    An example is `segment_sum` by `repeat(arange(rows), T)`.
    """
    (x, indices, updates), numbers, shape = ins, eqn.params["dimension_numbers"], input_shapes(eqn)[0]
    # 1. The update must add numbers along one dim `d`, at indices that are known here and for twice the rows.
    (*other_dims, d), window_dims = numbers.inserted_window_dims or (0,), numbers.update_window_dims
    kinds, adds = (x.kind, indices.kind, updates.kind), eqn.primitive.name in ("scatter-add", "scatter-sub")
    has_one_dim = numbers.scatter_dims_to_operand_dims == (d,) and not (
        other_dims or numbers.operand_batching_dims or updates.labels.dims & {*window_dims}
    )
    has_one_dim = has_one_dim and not updates.num_places
    columns = indices.column(0) if has_one_dim and adds and kinds == ("whole", "whole", "rows") else []
    if len(columns) < 2 or 0 in (counts := _repetitions(eqn, twin, columns, d)) or len(counts) > 1:
        return None
    # 2. Each place must get elements of one row, and rows must have places in the same order of their elements.
    places, labels = np.broadcast_arrays(columns[0], updates.labels.array.squeeze(window_dims))
    row_of_place = labels.ravel()[np.unique(places, return_index=True)[1]]
    if (row_of_place[places] != labels).any() or not same_in_all_rows(labels, ordinals_in_row(row_of_place)[places]):
        return None
    new_labels = Labels(row_of_place.reshape([-1 if k == d else 1 for k in range(len(shape))]))
    result = updates.derive(labels=new_labels, power=sum_power(x, updates))
    return result.with_notes(*position_notes(eqn, x, result))


def _repetitions(eqn: Any, twin: Any, columns: Sequence[np.ndarray], d: int) -> set[int]:
    """Return how often the indices meet each place of dim `d`, in the program and for twice the rows.

    Returns:
      The set of both numbers. A number is 0 if not all places are met, or not equally often.
    """
    sides = zip(columns, map(input_shapes, (eqn, twin)), strict=False)
    counted = [
        (shape[d], *np.unique(np.broadcast_to(column, indices_shape[:-1]), return_counts=True))
        for column, (shape, indices_shape, *_) in sides
    ]
    return {
        counts[0] if size and np.array_equal(places, range(size)) and (counts == counts[0]).all() else 0
        for size, places, counts in counted
    }
