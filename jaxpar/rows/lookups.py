"""What lookups and updates at indices make of rows: where indices are known, the rows that they meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..program.primitives import PRIMITIVES
from .arithmetic import combine, sum_power
from .generic import Met, generic
from .labels import Labels, alike, ordinals
from .reader import Reader, column_notes, rule, shapes
from .shapes import of_rows
from .values import FROM_ALL, PICKS, Note, Value, coupled, mixed, others, picks, position, some_rows

Outs = list[Value] | Value


def _columns(at: Value, dims: Sequence[int], shape: Sequence[int], side: int = 0) -> dict[int, np.ndarray]:
    """The indices into each dim of an operand that are known, [shape of the indices without the last dim]; `side` 1:
    those of the twin, where they are more than one number.
    """
    if at.kind == "whole" and at.number is not None:
        found = {d: (at.number.pair[side], c) for c, d in enumerate(dims)}
    else:
        known = dict(at.columns)
        found = {d: (known[c].pair[side], 0) for c, d in enumerate(dims) if c in known}
    if side:
        return {d: a[..., c] for d, (a, c) in found.items() if np.ndim(a)}
    return {d: np.broadcast_to(a[..., c] if np.ndim(a) else a, shape[:-1]) for d, (a, c) in found.items()}


def _unlike(eqn: Any, at: Value, of: np.ndarray, into: Sequence[int], dims: Sequence[int]) -> list[Note]:
    """What is to be said of indices `into` dims, some of them `dims` within rows, that are not the same for each row,
    [places] as `of`.
    """
    columns, twins = (_columns(at, into, shapes(eqn)[1], side) for side in (0, 1))
    varied = at.kind == "whole" and bool(at.varies)
    if all(alike(of, columns[d], twins.get(d)) if d in columns else not varied for d in dims):
        return []
    what = f"{eqn.primitive.name} at what depends on a row's place in its block; put it into the batch"
    return [Note.at(eqn, what, certain=False)]


@rule("gather")
def _gather(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Outs:
    (x, at), n, (into, indices) = ins, eqn.params["dimension_numbers"], shapes(eqn)
    if at.kind == "sum" or (at.kind == "rows" and (at.plus or x.kind == "sum")):
        return mixed(eqn, ins, "a lookup at")
    if r.looped and x.kind == "sum":
        return mixed(eqn, ins, certain=False)  # of what a loop adds up at each row's place, it may take the row's
    mapped = x.at.dims & {*n.start_index_map} if x.kind == "rows" else frozenset()
    if not mapped:
        found = generic(r, eqn, twin, ins)
        notes = column_notes(eqn, at) if x.kind == "whole" else ()
        return [y.noted(*notes) for y in found]
    columns, window = _columns(at, n.start_index_map, indices), [eqn.params["slice_sizes"][d] for d in mapped]
    if x.at.dims != mapped or not mapped <= {*columns} or {*window} != {1}:
        # Indices that come with the rows may point into their own, as those of graphs that are laid one after another
        # do. Those of a loop may go through all rows.
        certain = at.kind == "whole" and not r.looped
        return coupled(ins, Note.at(eqn, PICKS, certain))
    places = tuple(np.clip(columns[d], 0, into[d] - 1) if d in mapped else 0 for d in range(len(into)))
    rows, inner = x.at.array[places], ordinals(x.at.array)[places]
    if at.kind == "rows" and at.at != Labels(rows[..., None]):
        return coupled(ins, Note.at(eqn, PICKS))
    widened = lambda array: np.expand_dims(array, n.offset_dims)
    note = Note.at(eqn, PICKS, not r.looped)
    found = of_rows(eqn, x, widened(rows), widened(inner), pick=note)
    rest = [d for d in n.start_index_map if d not in mapped]
    return found.noted(*_unlike(eqn, at, rows, n.start_index_map, rest))


@rule("dynamic_slice")
def _dynamic_slice(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Outs:
    (x, *starts), sizes, into = ins, eqn.params["slice_sizes"], shapes(eqn)[0]
    if any(s.kind == "sum" for s in starts):
        return mixed(eqn, ins, "a slice that starts at")
    cut = [d for d in x.at.dims if sizes[d] != into[d]] if x.kind == "rows" else []
    if any(starts[d].scalar is None for d in cut):
        return coupled(ins, Note.at(eqn, f"takes some of the rows; {FROM_ALL}", certain=not r.looped))
    if not cut:
        return generic(r, eqn, twin, ins)
    first = {d: int(np.clip(starts[d].scalar or 0, 0, into[d] - sizes[d])) for d in cut}
    window = tuple(slice(first[d], first[d] + sizes[d]) if d in cut else slice(None) for d in range(len(into)))
    return of_rows(eqn, x, x.at.array[window], ordinals(x.at.array)[window])


@rule("dynamic_update_slice")
def _dynamic_update_slice(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Outs:
    x, update, *starts = ins
    met, kinds = Met(eqn), {x.kind, update.kind}
    if "sum" in kinds:
        return combine(eqn, {0: x, 1: update}) if {s.kind for s in starts} == {"whole"} else mixed(eqn, ins)
    if any(y.kind == "rows" and met.to_factors(k, y.at.array) is None for k, y in enumerate(ins)):
        certain = x.kind == "rows" and not r.looped
        return coupled(ins, Note.at(eqn, f"writes rows at other places; {FROM_ALL}", certain))
    return generic(r, eqn, twin, ins)


@rule(*(name for name in PRIMITIVES if name.startswith("scatter")))
def _scatter(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Outs:
    (x, at, new), name, met = ins, eqn.primitive.name, Met(eqn)
    if at.kind == "sum" or at.plus:
        # As jnp.repeat(experts, counts) marks where the tokens of each begin. An order may be undone, as by sorting.
        return mixed(eqn, ins, "an update at indices that hold", not x.kind == new.kind == "whole")
    if "sum" in (x.kind, new.kind):
        return mixed(eqn, ins) if any(y.kind == "rows" for y in ins) else combine(eqn, {0: x, 2: new})
    free = all(met.to_factors(k, y.at.array) is not None for k, y in enumerate(ins) if y.kind == "rows")
    if at.kind == "whole" and free:
        found = generic(r, eqn, twin, ins)
        return [replace(y, power=sum_power(x, new)) for y in found]
    if (found := _row_by_row(eqn, x, at, new)) is not None:
        return found
    if x.kind == "whole" and name in ("scatter-add", "scatter-sub"):
        return _added_up(r, eqn, x, at, new)
    certain = x.kind == "rows" and at.kind == "whole" and not r.looped
    return coupled(ins, Note.at(eqn, f"{name} of rows at computed indices; {FROM_ALL}", certain))


def _owners(eqn: Any, at: Value, new: Value) -> tuple[Value, np.ndarray] | None:
    """The rows of updates, or of the indices that say where whole ones go, at each place of the indices; None where
    these are not the same, or are of other dims.
    """
    n, (_, indices, _) = eqn.params["dimension_numbers"], shapes(eqn)
    found = []
    if new.kind == "rows":
        if new.at.dims & {*n.update_window_dims}:
            return None
        found.append((new, new.at.array.squeeze(tuple(n.update_window_dims))))
    if at.kind == "rows":
        found.append((at, at.at.array[..., 0]))
    if len({Labels(rows) for _, rows in found}) > 1:
        return None
    return found[0][0], np.broadcast_to(found[0][1], indices[:-1])


def _row_by_row(eqn: Any, x: Value, at: Value, new: Value) -> Value | None:
    """Row i updated by row i: along a dim of the operand that updates have too (of vmap), or that is met by indices
    that are known.
    """
    n, (into, indices, _) = eqn.params["dimension_numbers"], shapes(eqn)
    if {"rows"} & {at.kind, new.kind} == set() or (found := _owners(eqn, at, new)) is None:
        return None
    first, of = found
    columns = _columns(at, n.scatter_dims_to_operand_dims, indices)
    batch = zip(n.operand_batching_dims, n.scatter_indices_batching_dims, strict=True)
    for d, column in [*columns.items(), *((d, np.indices(of.shape)[i]) for d, i in batch)]:
        if column.size == 0 or column.min() < 0 or column.max() >= into[d]:
            continue
        owners = np.full(into[d], -1)
        owners[column] = of
        labels = Labels(owners.reshape([-1 if e == d else 1 for e in range(len(into))]))
        met = x.kind == "whole" or x.at == labels
        if not met or (owners < 0).any() or (owners[column] != of).any() or not alike(of, np.zeros(1)):
            continue  # another dim may be that of rows
        y = first.plain(at=labels, plus=x.plus or new.plus, pick=picks([x, new]), power=sum_power(x, new))
        inner = [e for e in n.scatter_dims_to_operand_dims if e != d]
        places = position(eqn, x, y, into) if x.kind == "whole" else []
        return y.noted(*places, *_unlike(eqn, at, of, n.scatter_dims_to_operand_dims, inner))
    return None


def _added_up(r: Reader, eqn: Any, x: Value, at: Value, new: Value) -> Value:
    """A sum over rows, each of which is added where its own indices say."""
    if (found := _owners(eqn, at, new)) is None:
        return others(eqn, [x, at, new], "updates by")
    if at.kind == "rows" and at.notes:  # each may have places of its own
        return coupled([x, at, new])
    first, of = found
    places = frozenset(range(of.ndim)) & at.varies
    rows = replace(first, at=Labels(of), power=new.power)
    notes = position(eqn, Value(varies=places), rows, of.shape) if at.kind == "whole" else column_notes(eqn, at)
    _, often = np.unique(of, return_counts=True)
    if len(often) < r.rows or (often != often[0]).any():
        return coupled([x, rows], new.pick or some_rows(eqn))
    return combine(eqn, {0: x, 2: Value("sum", power=new.power, pick=new.pick, notes=rows.notes).noted(*notes)})
