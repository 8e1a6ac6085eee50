"""What a sort over rows makes of them: the same elements, each at a place that depends on the other rows too.

    x              3 1 2      rows 0, 1, 2
    sort(x)        1 2 3      places 0, 1, 2, of which nobody knows the rows

What is computed of each element alone, and summed over all places, is the sum over rows that it is without the sort. So
sorted rows are rows whose labels are places: they meet no unsorted rows, no other sort's, and nothing that differs from
place to place. Each line of a matrix has its own order: the elements of one place may be of as many rows.
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
from .numbers import LARGEST
from .reader import Reader, rule, shape_of, shapes
from .values import FROM_ALL, ROUTED, Note, Value, coupled

# A number for each sort that is read. Not one for its equation, which a function that is called twice has once.
_sorts = itertools.count(2)


@rule("sort", "top_k")
def _sort(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> list[Value]:
    shape, name = shapes(eqn)[0], eqn.primitive.name
    dim = eqn.params["dimension" if name == "sort" else "axis"] % len(shape)
    everything = all(e is not None and shape_of(e) == shapes(e)[0] for e in (eqn, twin))  # no top_k of some
    # An order that is sorted along, as argsort does, may put all rows back: then they are no longer sorted.
    moved = any(x.kind != "rows" and (x.kind != "whole" or dim in x.varies) for x in ins)
    # Each step of a loop sorts by itself, and what it gives is not told from what other steps give.
    sortable = not (r.looped or moved) and 0 < math.prod(shape) <= LARGEST
    note = Note.at(eqn, f"sort over rows; {FROM_ALL}")
    found = {x.at: _placed(r, x, dim, shape) for x in ins if x.kind == "rows"} if sortable and everything else {}
    if not found or None in found.values():
        outs = generic(r, eqn, twin, ins)
        sorts = name == "top_k" and everything and outs[1].kind == "coupled"
        return [coupled(ins, note), _order(eqn, ins)] if sorts else outs
    outs = list[Value]()
    for x in ins:
        placed = found.get(x.at) if x.kind == "rows" else None
        if placed is not None:
            x = x.plain(at=placed.at, places=placed.places, lines=placed.lines, pick=note)
        outs.append(x)
    return [*outs, _order(eqn, ins)] if name == "top_k" else outs


def _order(eqn: Any, ins: Sequence[Value]) -> Value:
    """The rows that places are of, by which they may be put back."""
    said = f"sort over rows, of no effect if results go back to their rows; else {FROM_ALL}"
    return coupled(ins, Note.at(eqn, said, certain=False))


def _placed(r: Reader, x: Value, dim: int, shape: tuple[int, ...]) -> Value | None:
    """Rows after a sort of all of them along a dim; None if it is over some of them, or over no rows."""
    if dim not in x.at.dims or x.plus or (x.routed and not x.places) or not x.of_all(r.rows):
        return None
    each = np.moveaxis(x.at.array, dim, 0).reshape(shape[dim], -1)
    places, lines = shape[dim], math.prod(shape) // shape[dim]
    if not all(replace(x, at=Labels(line)).of_all(r.rows) for line in each.T):
        places, lines = places * lines, 1  # rows of several lines make up all rows
    others = [n for d, n in enumerate(shape) if d != dim]
    numbers = np.moveaxis(np.arange(math.prod(shape)).reshape(shape[dim], *others), 0, dim)
    return replace(x, at=Labels(ROUTED * next(_sorts) + numbers), places=places, lines=lines)
