"""Rules for sorts over rows: the elements stay the same, but the place of each depends on the other rows too.

    x              3 1 2      rows 0, 1, 2
    sort(x)        1 2 3      places 0, 1, 2, whose rows are unknown

A function of each element alone, summed over all places, is the same sum over rows as without the sort. So sorted rows
are rows whose labels are places. They may not meet unsorted rows, the result of another sort, or values that differ
from place to place. Each line of a matrix is sorted into its own order: one place may hold elements of many rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .generic import generic
from .labels import Labels
from .numbers import MAX_ELEMENTS
from .reader import Reader, input_shapes, output_shape, rule
from .values import ADVISE_ALL_ROWS, FINE_IF_UNDONE, ROUTED_BASE, Note, Value, coupled

# Numbers the sorts that are read. A number for each equation would not do: a function that is called twice has one
# equation for both sorts. 1 is the range of routed tokens.
_sort_numbers = itertools.count(2)


@rule("sort", "top_k")
def _sort(reader: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> list[Value]:
    shape, name = input_shapes(eqn)[0], eqn.primitive.name
    dim = eqn.params["dimension" if name == "sort" else "axis"] % len(shape)
    # A top_k that returns some elements only drops rows.
    returns_all = all(e is not None and output_shape(e) == input_shapes(e)[0] for e in (eqn, twin))
    # Sorting an order along with the rows, as argsort does, may put all rows back: then they are no longer sorted.
    has_other_operand = any(x.kind != "rows" and (x.kind != "whole" or dim in x.varying_dims) for x in ins)
    # Each step of a loop sorts separately, and labels cannot tell the results of different steps apart.
    is_sortable = not (reader.in_loop or has_other_operand) and 0 < math.prod(shape) <= MAX_ELEMENTS
    note = Note.of_eqn(eqn, f"applies sort over rows; {ADVISE_ALL_ROWS}")
    sorted_rows = (
        {x.labels: _sorted_rows(reader, x, dim, shape) for x in ins if x.kind == "rows"}
        if is_sortable and returns_all
        else {}
    )
    if not sorted_rows or None in sorted_rows.values():
        outs = generic(reader, eqn, twin, ins)
        is_full_top_k = name == "top_k" and returns_all and outs[1].kind == "coupled"
        return [coupled(ins, note), _sort_order(eqn, ins)] if is_full_top_k else outs
    outs = list[Value]()
    for x in ins:
        placed = sorted_rows.get(x.labels) if x.kind == "rows" else None
        if placed is not None:
            # Operands with the same labels get the same places: they are sorted together.
            x = x.derive(labels=placed.labels, num_places=placed.num_places, num_lines=placed.num_lines, pick_note=note)
        outs.append(x)
    return [*outs, _sort_order(eqn, ins)] if name == "top_k" else outs


def _sort_order(eqn: Any, ins: Sequence[Value]) -> Value:
    """Return the value of the order that a sort gives: coupled, but rows may be put back by it."""
    return coupled(ins, Note.of_eqn(eqn, f"applies sort over rows, {FINE_IF_UNDONE}", is_certain=False))


def _sorted_rows(reader: Reader, x: Value, dim: int, shape: tuple[int, ...]) -> Value | None:
    """Return rows after a sort of all rows along a dim; None if it sorts some of the rows, or within rows."""
    if (
        dim not in x.labels.dims
        or x.has_mean
        or (x.is_routed and not x.num_places)
        or not x.covers_equally(reader.rows_per_block)
    ):
        return None
    labels = np.moveaxis(x.labels.array, dim, 0).reshape(shape[dim], -1)  # [places, lines]
    num_places, num_lines = shape[dim], math.prod(shape) // shape[dim]
    if not all(replace(x, labels=Labels(line)).covers_equally(reader.rows_per_block) for line in labels.T):
        num_places, num_lines = num_places * num_lines, 1  # only the lines together have all rows
    other_sizes = [n for d, n in enumerate(shape) if d != dim]
    # Every element has its own place, numbered along the sorted dim first.
    element_numbers = np.moveaxis(np.arange(math.prod(shape)).reshape(shape[dim], *other_sizes), 0, dim)
    new_labels = Labels(ROUTED_BASE * next(_sort_numbers) + element_numbers)
    return replace(x, labels=new_labels, num_places=num_places, num_lines=num_lines)
