"""What equations that take parts of rows, put them in order, or reduce over them make of rows and sums over rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..program import factors
from .elementwise import FROM_ALL, mixed, together
from .reader import WHOLE, Reader, rule, shapes
from .shapes import along, shape_rule, without
from .values import ROUTED, STEP, Note, Value, combine, coupled, product_power, reasons

_MATRICES = """
cholesky eig eigh geqrf householder_product lu lu_pivots_to_permutation qr schur svd triangular_solve tridiagonal
tridiagonal_solve
""".split()
_WINDOWS = """
reduce_window reduce_window_sum reduce_window_max reduce_window_min select_and_gather_add select_and_scatter_add
""".split()
_SAID = {"rev": "reverse order", "approx_top_k": "sort", "fft": "Fourier transform",
         **dict.fromkeys(_WINDOWS, "a window"), **{name: f"{name} of matrices" for name in _MATRICES}}  # fmt: skip
_EXTREMES = {"reduce_max": "maximum", "reduce_min": "minimum", "reduce_or": "any", "reduce_and": "all"}


# -- parts -------------------------------------------------------------------------------------------------------------


def part(r: Reader, eqn: Any, x: Value, size: int, start: int, stop: int, stride: int = 1) -> Value:
    """Rows start to stop of the one dim over which they go, which has a size."""
    if (start, stop, stride) == (0, size, 1):
        return x
    inner, length = size // (x.outer * x.count), len(range(start, stop, stride))
    block = x.count * inner
    if stride == 1 and start % block == stop % block == 0:
        return replace(x, outer=length // block)
    if stride == inner and start < inner and length == x.outer * x.count:
        return x
    if stride == 1 and x.outer == 1 and start % inner == stop % inner == 0:
        return replace(x, count=length // inner, first=max(x.first or 0, 0) + start // inner)
    # Every second row, say: of pairs, which no block may part.
    return coupled([x], Note.at(eqn, f"takes some of the rows; {FROM_ALL}", certain=stride == 1))


@shape_rule("slice")
def _slice(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Value:
    (x,), (shape,) = ins, shapes(eqn)
    if x.kind != "rows":
        return replace(x, counts=None)
    p = eqn.params
    strides = p["strides"] or (1,) * len(shape)
    changed = [d for d in x.dims if (p["start_indices"][d], p["limit_indices"][d], strides[d]) != (0, shape[d], 1)]
    if not changed:
        return replace(x, columns=frozenset())
    if x.span > 1:
        return coupled(ins, Note.at(eqn, f"takes some of the rows; {FROM_ALL}"))
    d = x.dim
    return part(r, eqn, x, shape[d], p["start_indices"][d], p["limit_indices"][d], strides[d])


@shape_rule("split")
def _split(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Sequence[Value]:
    (x,), (shape,) = ins, shapes(eqn)
    axis, sizes = eqn.params["axis"], eqn.params["sizes"]
    if x.kind != "rows" or axis not in x.dims:
        return [replace(x, counts=None, columns=frozenset())] * len(sizes)
    if x.span > 1:
        return [coupled(ins, Note.at(eqn, f"takes some of the rows; {FROM_ALL}"))] * len(sizes)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [part(r, eqn, x, shape[axis], a, a + n) for a, n in zip(starts, sizes, strict=True)]


@shape_rule("tile")
def _tile(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Value | None:
    (x,), reps = ins, eqn.params["reps"]
    if x.kind == "whole":
        return replace(x, counts=None)
    if x.kind != "rows" or all(reps[d] == 1 for d in x.dims):
        return x
    return replace(x, outer=x.outer * reps[x.dim]) if x.span == 1 else None


@shape_rule("dynamic_slice")
def _dynamic_slice(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Value:
    x, *starts = ins
    sizes, (shape, *_) = eqn.params["slice_sizes"], shapes(eqn)
    if any(s.kind != "whole" for s in starts):
        return mixed(eqn, ins, "a slice that starts at")
    if x.kind == "rows" and any(sizes[d] != shape[d] for d in x.dims):
        return coupled(ins, Note.at(eqn, f"takes some of the rows; {FROM_ALL}", certain=not r.looped))
    return replace(x, counts=None, columns=frozenset())


@shape_rule("dynamic_update_slice")
def _dynamic_update_slice(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Value | None:
    x, update, *starts = ins
    into, of, *_ = shapes(eqn)
    if any(s.kind != "whole" for s in starts):
        return None
    if x.kind == update.kind == "whole":
        return Value(varies=x.varies | update.varies | {d for d, n in enumerate(of) if n != into[d]}, power=x.power)
    if x.kind == "sum" or update.kind == "sum":
        return combine(eqn, [x, update])
    rows = x if x.kind == "rows" else update
    if any(into[d] != of[d] for d in rows.dims):
        return coupled(ins, Note.at(eqn, f"writes rows at other places; {FROM_ALL}", certain=x.kind == "rows"))
    return together(eqn, [x, update])


# -- order -------------------------------------------------------------------------------------------------------------


def _over(eqn: Any, ins: Sequence[Value], dims: Sequence[int], linear: bool, what: str) -> Value | None:
    """An equation that mixes elements along `dims`, and leaves the others alone."""
    if all(x.kind == "whole" for x in ins):
        power = ins[0].power if linear and len(ins) == 1 else 0 if all(x.power == 0 for x in ins) else None
        return Value(varies=frozenset(dims).union(*(x.varies for x in ins)), power=power)
    if any(x.kind == "sum" for x in ins):
        return next(x for x in ins if x.kind == "sum") if linear and len(ins) == 1 else mixed(eqn, ins)
    found = together(eqn, ins)
    if found.kind == "rows" and set(dims) & set(found.dims):
        return coupled(ins, Note.at(eqn, f"{what} over rows; {FROM_ALL}"))
    if found.kind == "rows" and found.plus and not linear:
        return mixed(eqn, ins, f"{what} of rows that hold")
    return found


_LINEAR = ("rev", "cumsum", "fft", "reduce_window_sum")


@shape_rule("rev", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "sort", "top_k", "approx_top_k", "fft",
            *_MATRICES, *_WINDOWS)  # fmt: skip
def _mixed(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Sequence[Value] | Value | None:
    """What mixes elements along the dims that are no factor."""
    name = eqn.primitive.name
    known = {f.ins[0] for f in factors.of(eqn)}
    dims = [d for d in range(len(shapes(eqn)[0])) if d not in known]
    data = [x for x, s in zip(ins, shapes(eqn), strict=True) if s]
    found = _over(eqn, data, dims, name in _LINEAR, _SAID.get(name) or name)
    if found is None or name not in _MATRICES:
        if name in ("sort", "approx_top_k") and found is not None and found.kind == "coupled" and len(ins) > 1:
            # An order may be undone, as where tokens are sorted by their experts and then put back.
            said = f", of no effect if results go back to their rows; else {FROM_ALL}"
            notes = (
                replace(n, what=n.what.replace(f"; {FROM_ALL}", said), certain=False)
                for n in found.notes - reasons(ins)
            )
            return coupled(ins, *notes)
        return found
    # Eigenvalues and pivots have a dim less than their matrix.
    return [replace(found, varies=frozenset(d for d in found.varies if d < len(v.aval.shape))) for v in eqn.outvars]


# -- reductions --------------------------------------------------------------------------------------------------------


@rule(
    "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor", "argmax", "argmin"
)
def _reduce(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Value | None:
    (x,), (shape,), name = ins, shapes(eqn), eqn.primitive.name
    axes = [int(d) for d in eqn.params["axes"]]
    if x.kind == "sum":
        return _grown(r, eqn, twin, x, axes) if name == "reduce_sum" else mixed(eqn, ins) if axes else x
    if not set(axes) & set(x.dims):
        if x.plus and name != "reduce_sum":
            return mixed(eqn, ins, f"{name} of rows that hold")
        of_each = x.power if name in ("reduce_max", "reduce_min") or x.power == 0 else None
        grown = _grown(r, eqn, twin, x, axes) if name == "reduce_sum" else replace(x, power=of_each)
        return along(eqn, grown, without(len(shape), axes))
    if x.first == ROUTED:
        return coupled(ins, Note.at(eqn, f"{name} over the tokens of experts, which are of many rows; {FROM_ALL}"))
    if x.first is not None and x.first != STEP:
        last = x.first + x.count - 1
        return coupled(ins, Note.at(eqn, f"{name} over rows {x.first} to {last} of a block; {FROM_ALL}"))
    if name == "reduce_sum":
        rest = _grown(r, eqn, twin, x, [d for d in axes if d not in x.dims])
        some = x.first if set(x.dims) <= set(axes) else STEP
        size = math.prod(shape[d] for d in axes)
        return Value("sum", power=rest.power, size=size, first=some, valid=x.valid, notes=x.notes)
    if name in _EXTREMES:
        note = Note.at(eqn, f"{_EXTREMES[name]} over rows; {FROM_ALL}")
        return Value("extreme", power=None, notes=x.notes | {note})
    return coupled(ins, Note.at(eqn, f"{name} over rows; {FROM_ALL}"))


def _grown(r: Reader, eqn: Any, twin: Any, x: Value, axes: Sequence[int]) -> Value:
    """A value summed over dims that have no rows, whose sizes may grow with the rows."""
    growth = r.growth(eqn, twin, [(0, d) for d in axes]) if axes else 0
    return replace(x, power=product_power(x.power, growth))


@rule("reduce_sum", table=WHOLE)
def _reduce_whole(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Value:
    (x,), (shape,), axes = ins, shapes(eqn), list(eqn.params["axes"])
    scalar = None if x.scalar is None else x.scalar * math.prod(shape[d] for d in axes)
    return replace(along(eqn, _grown(r, eqn, twin, x, axes), without(len(shape), axes)), scalar=scalar, counts=None)


@rule("reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin", table=WHOLE)
def _others_whole(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Value:
    (x,), (shape,) = ins, shapes(eqn)
    found = along(eqn, replace(x, counts=None), without(len(shape), [int(d) for d in eqn.params["axes"]]))
    return replace(found, zero=False, scalar=None, power=0 if x.power == 0 else None)
