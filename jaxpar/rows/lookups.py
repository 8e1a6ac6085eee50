"""What matmuls, convolutions and lookups make of rows and of sums over rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .elementwise import FROM_ALL, mixed
from .reader import Reader, rule, shape_of, shapes
from .shapes import shape_rule
from .values import GATHER, Note, Pairs, Value, combine, coupled, position, product_power, reasons, reshaped


def _product(eqn: Any, ins: Sequence[Value]) -> Value | None:
    """Of two values whose product is linear in one: what it is where that one is a sum; None to go on."""
    a, b = ins
    if "sum" in (a.kind, b.kind):
        if a.kind == b.kind or "rows" in (a.kind, b.kind):
            return mixed(eqn, ins, "a product with")
        return replace(a if a.kind == "sum" else b, power=product_power(a.power, b.power))
    if a.kind == b.kind == "rows" and (a.plus or b.plus):
        return mixed(eqn, ins, "a product with")
    return None


@shape_rule("dot_general")
def _dot(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Value:
    contracted, batch = eqn.params["dimension_numbers"]
    ndims = [len(s) for s in shapes(eqn)]
    free = [[d for d in range(ndims[i]) if d not in (*contracted[i], *batch[i])] for i in (0, 1)]
    places = [[*batch[0], *free[0]], [*batch[1], *[-1] * len(free[0]), *free[1]]]
    to = [[places[i].index(d) if d in places[i] else None for d in range(ndims[i])] for i in (0, 1)]
    if (found := _product(eqn, ins)) is not None:
        return found
    a, b = ins
    power = product_power(a.power, b.power)
    if a.kind == b.kind == "whole":
        varies = frozenset(n for i, x in enumerate(ins) for d in x.varies if (n := to[i][d]) is not None)
        growth = r.growth(eqn, twin, [(0, d) for d in contracted[0]])
        return Value(varies=varies, power=product_power(power, growth))
    both = a.kind == b.kind == "rows"
    sides = [i for i in (0, 1) if ins[i].kind == "rows"]
    summed = [all(d in contracted[i] for d in ins[i].dims) and ins[i].span > 0 for i in sides]
    if both:
        alike = (a.span, a.outer, a.count, a.first) == (b.span, b.outer, b.count, b.first)
        met = all(
            _role(contracted, batch, 0, d) == _role(contracted, batch, 1, e)
            for d, e in zip(a.dims, b.dims, strict=False)
        )
        if not (alike and met and (all(_role(contracted, batch, 0, d) is not None for d in a.dims) or not a.span)):
            found = coupled(ins, Note.at(eqn, f"a product of rows with other rows; {GATHER}"))
            here, there = (to[i][ins[i].dim] if ins[i].span == 1 == ins[i].outer else None for i in (0, 1))
            if not alike or here is None or there is None:
                return found
            own = replace(a, dim=here, power=power, columns=frozenset(), notes=reasons(ins))
            return replace(found, pairs=Pairs(own, there))
    side = sides[0]
    x, other = ins[side], ins[1 - side]
    if any(summed):
        if x.first is not None and x.first >= 0:
            return coupled(ins, Note.at(eqn, f"a sum over some of the rows; {FROM_ALL}"))
        found = Value("sum", power=power, size=math.prod(shapes(eqn)[0][d] for d in contracted[0]), notes=x.notes)
        if not both and any(other.varies & {contracted[1 - side][contracted[side].index(d)]} for d in x.dims):
            return found.noted(
                Note.at(eqn, "weights rows by their place in the block; put the weights into the batch", False)
            )
        return found
    moved = x.moved(to[side])
    if moved is None:
        return coupled(ins, Note.at(eqn, "a product may tear rows apart", certain=False))
    if not both:  # what the other has along the dims of the rows, if they are dims of both
        theirs = to[1 - side]
        moved = position(eqn, Value(varies=frozenset(n for d in other.varies if (n := theirs[d]) is not None)), moved)
    return replace(moved, power=power, plus=any(v.plus for v in ins))


@rule(*(f"dot_product_attention{kind}_fwd{end}" for kind in ("", "_fp8") for end in ("", "_wrapper")))
def _attention(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Value | None:
    """cuDNN's, of [rows, positions, heads, head_dim] or [rows, heads, ...]."""
    rows = [x for x in ins if x.kind == "rows"]
    alike = all(x.kind == "whole" or (x.place == rows[0].place and not x.plus) for x in ins)
    return replace(rows[0], power=None) if rows and alike and list(rows[0].dims) == [0] else None


def _role(contracted: Any, batch: Any, side: int, dim: int) -> tuple[str, int] | None:
    """What a dim of one operand is to the product; None if it stays a dim of the operand alone."""
    if dim in contracted[side]:
        return "contracted", list(contracted[side]).index(dim)
    return ("batch", list(batch[side]).index(dim)) if dim in batch[side] else None


@rule("conv_general_dilated")
def _convolution(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Value | None:
    if (found := _product(eqn, ins)) is not None:
        return found
    (a, b), numbers = ins, eqn.params["dimension_numbers"]
    power = product_power(a.power, b.power)
    rows, features = numbers.lhs_spec[:2]
    if b.kind == "whole" and list(a.dims) == [rows] and eqn.params["batch_group_count"] == 1:
        return replace(a, dim=numbers.out_spec[0], power=power)
    # A kernel for each row: vmap makes groups of features of them.
    own = a.kind == b.kind == "rows" and list(a.dims) == [features] and list(b.dims) == [numbers.rhs_spec[0]]
    if own and a.outer == b.outer == 1 and a.count == b.count and eqn.params["feature_group_count"] % a.count == 0:
        return replace(a, dim=numbers.out_spec[1], power=power)
    return None


# -- lookups -----------------------------------------------------------------------------------------------------------


def _offsets(shape: Sequence[int], gone: Sequence[int], dims: Sequence[int]) -> list[int | None]:
    """For each dim of the operand, the dim of the slices (or updates) that it is."""
    kept = [d for d in range(len(shape)) if d not in gone]
    return [int(dims[kept.index(d)]) if d in kept else None for d in range(len(shape))]


@shape_rule("gather")
def _gather(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Value:
    (table, at), numbers = ins, eqn.params["dimension_numbers"]
    into, out = shapes(eqn)[0], shape_of(eqn)
    batch = [d for d in range(len(out)) if d not in numbers.offset_dims]
    to = _offsets(into, (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims), numbers.offset_dims)
    if table.kind == at.kind == "whole":
        varies = {batch[d] for d in at.varies if d < len(batch)} | {n for d in table.varies if (n := to[d]) is not None}
        pairs = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
        varies |= {batch[e] for d, e in pairs if d in table.varies}
        return Value(varies=frozenset(varies), power=table.power, zero=table.zero)
    if table.kind == "sum":
        return table if at.kind == "whole" else mixed(eqn, ins, "a lookup, by row, in")
    if at.kind == "sum":
        return mixed(eqn, ins, "a lookup at")
    if at.plus:
        return mixed(eqn, ins, "a lookup at rows that hold")
    if table.kind == "whole":
        moved = at.moved([batch[d] if d < len(batch) else None for d in range(len(shapes(eqn)[1]))])
        if moved is None:
            return coupled(ins, Note.at(eqn, "a lookup whose indices are rows", certain=False))
        place = Note.at(eqn, "a lookup by a row's place in its block; put the place into the batch", certain=False)
        return replace(moved, power=table.power).noted(*[place] * bool(at.columns))
    return _of_rows(r, eqn, table, at, batch, to, _sizes(eqn, into))


def _sizes(eqn: Any, into: Sequence[int]) -> list[int]:
    """Dims of the operand that slices have whole."""
    return [d for d, n in enumerate(eqn.params["slice_sizes"]) if n == into[d]]


def _of_rows(
    r: Reader, eqn: Any, x: Value, at: Value, batch: Sequence[int], to: Sequence[int | None], whole: Sequence[int]
) -> Value:
    """What is looked up in rows."""
    numbers = eqn.params["dimension_numbers"]
    if at.kind == "whole" and all(d in whole and to[d] is not None for d in x.dims):
        return x.moved(to) or coupled([x, at], Note.at(eqn, "a lookup may tear rows apart", certain=False))
    found = _met(x, at, numbers.operand_batching_dims, numbers.start_indices_batching_dims, numbers.start_index_map)
    alike = at.kind == "whole" or at.outer == x.outer  # where rows are merged with what is within them, too
    if found is not None and x.span == 1 and alike and shape_of(eqn)[batch[found]] == shapes(eqn)[0][x.dim]:
        return replace(x, dim=batch[found], columns=frozenset())
    if x.count == 1 and at.kind == "rows" and all(to[d] is not None for d in x.dims) and (moved := x.moved(to)):
        return moved  # a single row, which take_along_axis has whole
    if at.kind == "whole" and (places := _own_places(r, eqn, x)) is not None and (moved := places.moved(batch)):
        return moved
    # Indices that come with the rows may point into their own, as those of graphs that are laid one after another do.
    # Those of a loop may go through all rows.
    certain = at.kind == "whole" and not r.looped
    return coupled([x, at], Note.at(eqn, f"picks rows by computed indices; {FROM_ALL}", certain))


def _own_places(r: Reader, eqn: Any, x: Value) -> Value | None:
    """Rows along the dims of indices that are known to be row 0 some times, then row 1 as often, and so on, wherever
    in a row: `x[np.repeat(np.arange(n), k), i, j]`, as of the pairs of DLRM's features.
    """
    numbers, (operand, indices) = eqn.params["dimension_numbers"], shapes(eqn)
    mapped, times = list(numbers.start_index_map), math.prod(indices[:-1]) // max(x.count, 1)
    if x.span != 1 or x.outer != 1 or x.first is not None or x.dim not in mapped or times * x.count == 0:
        return None
    if x.dim not in numbers.collapsed_slice_dims or times * x.count != math.prod(indices[:-1]):
        return None
    if (values := r.numbers(eqn.invars[1])) is None:
        return None
    rows = values[..., mapped.index(x.dim)].reshape(-1) // (operand[x.dim] // x.count)
    if not np.array_equal(rows, np.repeat(np.arange(x.count), times)):
        return None
    return reshaped(replace(x, dim=0), (x.count, times), indices[:-1])


def _met(x: Value, at: Value, batching: Sequence[int], of_indices: Sequence[int], mapped: Sequence[int]) -> int | None:
    """The dim of the indices that goes with the rows of an operand: row i is looked up at indices i."""
    if x.dim in batching:
        dim = of_indices[list(batching).index(x.dim)]
        return dim if at.kind == "whole" or at.dim == dim else None
    if x.dim in mapped and list(mapped).index(x.dim) in at.columns:
        dim = at.counts if at.kind == "whole" else at.dim
        return dim
    return None


@shape_rule(*(f"scatter{sign}{kind}" for sign in "-_" for kind in ("add", "sub", "mul", "min", "max")), "scatter")
def _scatter(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Value | None:
    (x, at, new), numbers = ins, eqn.params["dimension_numbers"]
    adds = eqn.primitive.name.replace("-", "_") in ("scatter_add", "scatter_sub")
    into, _, given = shapes(eqn)
    if at.kind == "sum" or at.plus:
        # As jnp.repeat(experts, counts) marks where the tokens of each begin. An order may be undone, as in `_sort`.
        certain = not x.kind == new.kind == "whole"
        return mixed(eqn, ins, "an update at indices that hold", certain)
    batch = [d for d in range(len(given)) if d not in numbers.update_window_dims]
    gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    to = _offsets(into, gone, numbers.update_window_dims)
    if x.kind == at.kind == new.kind == "whole":
        varies = {d for d, n in enumerate(to) if n in new.varies} | set(numbers.scatter_dims_to_operand_dims)
        power = x.power if x.power == new.power or new.zero else new.power if x.zero else None
        return Value(varies=x.varies | varies | set(numbers.operand_batching_dims), power=power)
    if "sum" in (x.kind, new.kind):
        return combine(eqn, [x, new]) if at.kind == "whole" and "rows" not in (x.kind, new.kind) else mixed(eqn, ins)
    rows = [v for v in (x, new) if v.kind == "rows"]
    window = next((d for d in range(len(into)) if new.kind == "rows" and new.span == 1 and to[d] == new.dim), None)
    own = to[x.dim] if x.kind == "rows" and x.span == 1 else None
    if at.kind == "whole" and own is not None and given[own] == into[x.dim]:
        return x if new.kind == "whole" or window == x.dim else None  # all rows, at the same place in each
    if at.kind == "whole" and x.kind == "whole" and window is not None and given[new.dim] == into[window]:
        return replace(new, dim=window)
    # Row i is updated at indices i.
    paired = [*zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)]
    steered = numbers.scatter_dims_to_operand_dims
    lead = at.counts if at.kind == "whole" else at.dim
    paired += [(steered[c], lead) for c in at.columns if lead is not None]
    for operand, dim in paired:
        mine = Value("rows", dim=operand, outer=(v := (rows or [at])[0]).outer, count=v.count, first=v.first)
        fits = x.kind == "whole" or x.place == mine.place
        if fits and (at.kind == "whole" or at.dim == dim) and (new.kind == "whole" or new.dim == batch[dim]):
            power = combine(eqn, [replace(v, dim=0) for v in (x, new)]).power
            return replace(mine, plus=any(v.plus for v in rows), power=power)
    by_index = at.kind == "rows" or (new.kind == "rows" and new.dim in batch)
    if adds and x.kind == "whole" and by_index:  # rows are added up where their indices say
        return combine(eqn, [x, Value("sum", power=new.power)])
    certain = x.kind == "rows" and at.kind == "whole" and not r.looped
    return coupled(ins, Note.at(eqn, f"{eqn.primitive.name} of rows at computed indices; {FROM_ALL}", certain))
