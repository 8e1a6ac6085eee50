"""What lookups and updates at indices make of rows: where indices are known, the rows that they meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...program.primitives import PRIMITIVES
from .arithmetic import combine, sum_power
from .generic import Met, generic
from .labels import Labels, alike, ordinals
from .reader import Reader, column_notes, rule, shapes
from .shapes import of_rows
from .values import FROM_ALL, PICKS, SOME, Note, Value, coupled, mixed, others, position, some_rows


@rule("gather")
def _gather(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> list[Value] | Value:
    (x, at), n, (into, indices) = ins, eqn.params["dimension_numbers"], shapes(eqn)
    if at.kind == "sum" or (at.kind == "rows" and (at.plus or x.kind == "sum")):
        return mixed(eqn, ins, "a lookup at")
    if r.looped and x.kind == "sum":
        return mixed(eqn, ins, certain=False)  # of what a loop adds up at each row's place, it may take the row's
    mapped = x.at.dims & {*n.start_index_map} if x.kind == "rows" else frozenset()
    if not mapped:
        return [y.noted(*column_notes(eqn, at) if x.kind == "whole" else ()) for y in generic(r, eqn, twin, ins)]
    if x.places:
        return coupled(ins, x.pick or Note.at(eqn, PICKS))
    columns = {d: column for c, d in enumerate(n.start_index_map) if (column := at.column(c))}
    # Indices that come with the rows may point into their own, as those of graphs that are laid one after another do.
    # Those of a loop may go through all rows.
    note = Note.at(eqn, PICKS, certain=at.kind == "whole" and not r.looped)
    if x.at.dims != mapped or not mapped <= {*columns} or any(eqn.params["slice_sizes"][d] != 1 for d in mapped):
        return coupled(ins, note)
    picked = lambda d: np.broadcast_to(np.clip(columns[d][0], 0, into[d] - 1), indices[:-1])
    places = tuple(picked(d) if d in mapped else 0 for d in range(len(into)))
    rows, inner = x.at.array[places], ordinals(x.at.array)[places]
    note = Note.at(eqn, PICKS, certain=not r.looped)
    often = [_often(eqn, twin, columns[d], d) for d in mapped]
    if (at.kind == "rows" and at.at != Labels(rows[..., None])) or any(len(x) > 1 for x in often):
        return coupled(ins, note)
    found = of_rows(eqn, x, np.expand_dims(rows, n.offset_dims), np.expand_dims(inner, n.offset_dims), note)
    same = lambda d: alike(rows, *columns[d]) if d in columns else at.kind == "rows" or not at.varies
    if all(same(d) for d in n.start_index_map if d not in mapped):
        return found
    return found.noted(Note.at(eqn, "gather at what depends on a row's place in its block", certain=False))


@rule("dynamic_slice")
def _dynamic_slice(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> list[Value] | Value:
    (x, *starts), sizes, into = ins, eqn.params["slice_sizes"], shapes(eqn)[0]
    if any(s.kind == "sum" for s in starts):
        return mixed(eqn, ins, "a slice that starts at")
    if x.kind == "rows" and any(sizes[d] != into[d] for d in x.at.dims):
        return coupled(ins, Note.at(eqn, f"{SOME}; {FROM_ALL}", certain=not r.looped))
    return generic(r, eqn, twin, ins)


@rule("dynamic_update_slice")
def _dynamic_update_slice(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> list[Value] | Value:
    x, update, *starts = ins
    if "sum" in (x.kind, update.kind):
        return combine(eqn, {0: x, 1: update}) if {s.kind for s in starts} == {"whole"} else mixed(eqn, ins)
    if any(y.kind == "rows" and Met(eqn).to_factors(k, y.at.array) is None for k, y in enumerate(ins)):
        certain = x.kind == "rows" and not r.looped
        return coupled(ins, Note.at(eqn, f"writes rows at other places; {FROM_ALL}", certain))
    return generic(r, eqn, twin, ins)


@rule(*(name for name in PRIMITIVES if name.startswith("scatter")))
def _scatter(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> list[Value] | Value:
    (x, at, new), name, met = ins, eqn.primitive.name, Met(eqn)
    if at.kind == "sum" or at.plus:
        # As jnp.repeat(experts, counts) marks where the tokens of each begin. An order may be undone, as by sorting.
        return mixed(eqn, ins, "an update at indices that hold", not x.kind == new.kind == "whole")
    if "sum" in (x.kind, new.kind):
        return mixed(eqn, ins) if any(y.kind == "rows" for y in ins) else combine(eqn, {0: x, 2: new})
    free = all(met.to_factors(k, y.at.array) is not None for k, y in enumerate(ins) if y.kind == "rows")
    if free:
        notes = column_notes(eqn, at)
        return [replace(y, power=sum_power(x, new)).noted(*notes) for y in generic(r, eqn, twin, ins)]
    if (found := _at_own_places(eqn, twin, ins)) is not None:
        return found
    note = Note.at(eqn, f"{name} of rows at computed indices; {FROM_ALL}", certain=False)
    own = at.columns or at.notes or at.at.array.ndim - 1 in at.at.dims  # places that are a row's own
    own = own or any(y.kind == "whole" and y.varies for y in (at, new))
    inside, of = {*eqn.params["dimension_numbers"].update_window_dims}, new if new.kind == "rows" else at
    if x.kind != "whole" or name not in ("scatter-add", "scatter-sub") or own or (of is new and new.at.dims & inside):
        return coupled(ins, note)
    if of is new and at.kind == "rows" and Labels(new.at.array.squeeze(tuple(inside))) != Labels(at.at.array[..., 0]):
        return others(eqn, ins, "updates by")
    if not of.of_all(r.rows):
        return coupled(ins, of.pick or some_rows(eqn))
    return combine(eqn, {0: x, 2: Value("sum", power=new.power, pick=new.pick)}).noted(*new.notes)


def _at_own_places(eqn: Any, twin: Any, ins: Sequence[Value]) -> Value | None:
    """Rows added up at known places, each place those of one row, as `segment_sum` by `repeat(arange(rows), T)`."""
    (x, at, new), n, size = ins, eqn.params["dimension_numbers"], shapes(eqn)[0]
    (*to, d), inside = n.inserted_window_dims or (0,), n.update_window_dims
    kinds, adds = (x.kind, at.kind, new.kind), eqn.primitive.name in ("scatter-add", "scatter-sub")
    plain = n.scatter_dims_to_operand_dims == (d,) and not (to or n.operand_batching_dims or new.at.dims & {*inside})
    plain = plain and not new.places
    columns = at.column(0) if plain and adds and kinds == ("whole", "whole", "rows") else []
    if len(columns) < 2 or 0 in (often := _often(eqn, twin, columns, d)) or len(often) > 1:
        return None
    places, rows = np.broadcast_arrays(columns[0], new.at.array.squeeze(inside))
    of = rows.ravel()[np.unique(places, return_index=True)[1]]
    if (of[places] != rows).any() or not alike(rows, ordinals(of)[places]):
        return None
    found = new.plain(at=Labels(of.reshape([-1 if k == d else 1 for k in range(len(size))])), power=sum_power(x, new))
    return found.noted(*position(eqn, x, found))


def _often(eqn: Any, twin: Any, columns: Sequence[np.ndarray], d: int) -> set[int]:
    """How many of the indices, here and for twice the rows, are each place in dim d; 0 where these are not as many."""
    sides = zip(columns, map(shapes, (eqn, twin)), strict=False)
    each = [(size[d], *np.unique(np.broadcast_to(c, s[:-1]), return_counts=True)) for c, (size, s, *_) in sides]
    return {n[0] if size and np.array_equal(at, range(size)) and (n == n[0]).all() else 0 for size, at, n in each}
