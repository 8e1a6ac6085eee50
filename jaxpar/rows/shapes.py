"""What elementwise equations, and those that move dims about, make of rows and of sums over rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from ..localise.rules import ELEMENTWISE
from .reader import WHOLE, Reader, rule, shape_of, shapes
from .values import GATHER, STEP, Note, Value, combine, coupled, position, reshaped, some_rows, spread

_MORE = """
add_any bitcast_convert_type clamp clz log2 mulhi one_minus_square polygamma random_clone random_gamma stop_gradient
""".split()
_SAME = """
device_put from_edtype layout_constraint mesh_cast optimization_barrier pvary random_wrap reduced_vary_cast relayout
reshard sharding_constraint to_edtype with_memory_space_constraint
""".split()
_LINEAR = ("neg", "real", "imag", "conj", "copy", "copy_p", "reduce_precision", "stop_gradient")
_COMPARED = ("eq", "ne", "gt", "lt", "ge", "le", "is_finite")
FROM_ALL = "compute it from jp.all_rows(x)"


# -- elementwise -------------------------------------------------------------------------------------------------------


def mixed(eqn: Any, ins: Sequence[Value], what: str = "") -> Value:
    """A result that is not linear in what was summed over rows."""
    name = eqn.primitive.name
    if any(x.kind == "sum" and x.first == STEP for x in ins):
        return coupled(ins, some_rows(eqn))
    return coupled(ins, Note.at(eqn, f"{what or name + ' of'} a sum or mean over rows; {FROM_ALL}"))


@rule(*ELEMENTWISE, *_MORE, "random_fold_in", "random_seed", "threefry2x32")
def _elementwise(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Value:
    """Not linear: of rows alone, to which no mean over rows was added."""
    if any(x.kind == "sum" for x in ins):
        compared = eqn.primitive.name in _COMPARED and all(x.kind == "sum" or x.scalar == 0 for x in ins)
        if compared or _guards(eqn, ins):
            what = f"{eqn.primitive.name} of a sum over rows, which a block without terms would change"
            note = Note.at(eqn, what + "; jp.Mean needs no guard", certain=False)
            found = Value(power=None) if compared else next(x for x in ins if x.kind == "sum")
            return found.noted(note)
        return mixed(eqn, ins)
    if any(x.plus for x in ins):
        return mixed(eqn, ins, f"{eqn.primitive.name} of rows that hold")
    found = together(eqn, ins)
    power = 0 if not r.exact or all(x.power == 0 or x.zero for x in ins) else None
    return replace(found, power=power) if found.kind == "rows" else found


def _guards(eqn: Any, ins: Sequence[Value]) -> bool:
    """Whether it keeps a sum from zero, as maximum(count, 1) does."""
    known = [x.scalar for x in ins if x.kind != "sum"]
    return eqn.primitive.name == "max" and len(known) == 1 and known[0] is not None and known[0] <= 1


def together(eqn: Any, ins: Sequence[Value]) -> Value:
    """The rows that several values of one shape belong to."""
    rows = [x for x in ins if x.kind == "rows"]
    if len({x.place for x in rows}) > 1:
        return coupled(ins, Note.at(eqn, f"{eqn.primitive.name} of rows with other rows; {GATHER}"))
    found = replace(rows[0], plus=any(x.plus for x in rows), columns=frozenset())
    for x in ins:
        if x.kind == "whole":
            found = position(eqn, x, found)
    return found


@rule(*_LINEAR, "convert_element_type")
def _linear(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Value:
    (x,) = ins
    into = eqn.outvars[0].aval.dtype
    if jnp.issubdtype(into, jnp.inexact) or not jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.inexact):
        return x
    return replace(x, power=None) if x.kind == "rows" and not x.plus else mixed(eqn, ins)


@rule("add", "sub", "add_any")
def _add(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Value:
    return combine(eqn, ins)


@rule("select_n")
def _select(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Value:
    which, *cases = ins
    if which.kind == "sum" or (which.kind == "rows" and any(x.kind == "sum" or x.plus for x in cases)):
        return mixed(eqn, ins, "a choice by row between values, one of which holds")
    found = combine(eqn, cases)
    if which.kind == "rows":
        return together(eqn, [which, *([found] if found.kind == "rows" else cases)])
    return position(eqn, which, found) if found.kind == "rows" else found


@rule("mul")
def _mul(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Value:
    a, b = ins if ins[1].kind == "whole" else ins[::-1]
    if b.kind == "whole":
        return scaled(r, eqn, a, b, 1)
    if "sum" in (a.kind, b.kind) or a.plus or b.plus:
        return mixed(eqn, ins, "a product with")
    found = together(eqn, ins)
    power = None if a.power is None or b.power is None else a.power + b.power
    return replace(found, power=power) if found.kind == "rows" else found


@rule("div")
def _div(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Value:
    a, b = ins
    if b.kind == "whole":
        return scaled(r, eqn, a, b, -1)
    if b.kind == "sum":
        if a.kind == "sum":
            what = "divides one sum over rows by another; return jp.Mean(total, count), or use sums of jp.all_rows(x)"
            return coupled(ins, Note.at(eqn, what))
        return mixed(eqn, ins, "a division by")
    if a.kind == "sum" or a.plus or b.plus:
        return mixed(eqn, ins, "a quotient with")
    return replace(together(eqn, ins), power=0 if not r.exact or (a.power, b.power) == (0, 0) else None)


def scaled(r: Reader, eqn: Any, x: Value, by: Value, sign: int) -> Value:
    """Rows or a sum, times (or, `sign` -1, divided by) what is the same for all rows."""
    power = None if x.power is None or by.power is None else x.power + sign * by.power
    if not r.exact and x.power == 0 and by.scalar:
        factor = by.scalar if sign < 0 else 1 / by.scalar
        usual = (r.rows, x.size) if x.kind == "sum" else (r.rows,)
        power = -1 if any(math.isclose(factor, n, rel_tol=1e-3) for n in usual) else 0
    x = replace(x, power=power)
    if x.kind == "rows" and x.plus and by.varies & set(x.dims):
        return mixed(eqn, [x, by], "a product, row by row, with")
    return position(eqn, by, x) if x.kind == "rows" else x


@rule(*ELEMENTWISE, *_MORE, table=WHOLE)
def _whole(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Value:
    name, scalars = eqn.primitive.name, [x.scalar for x in ins]
    varies = frozenset().union(*(x.varies for x in ins))
    if name == "select_n" and len(ins) == 3 and ins[1].counts is not None:  # what keeps indices from being negative
        return replace(ins[1], notes=frozenset())
    power: float | None = 0 if all(x.power == 0 for x in ins) else None
    if name in ("add", "sub", "max", "min", *_LINEAR, "convert_element_type", "select_n"):
        power = next(iter(found)) if len(found := {x.power for x in ins if not x.zero}) == 1 else power
    elif name in ("mul", "div") and None not in (p := [x.power for x in ins]):
        power = p[0] + p[1] * (1 if name == "mul" else -1)  # type: ignore[operator]
    scalar = _computed(name, [float(c) for c in scalars if c is not None]) if None not in scalars else None
    keeps = name in ("neg", "convert_element_type", "copy", "stop_gradient", "mul", "add", "sub", "select_n")
    data = ins[1:] if name == "select_n" else ins
    zero = keeps and (any if name == "mul" else all)(x.zero for x in data)
    counts = ins[0].counts if name in ("convert_element_type", "copy") else None
    return Value(varies=varies, scalar=scalar, zero=zero, power=power, counts=counts)


def _computed(name: str, given: Sequence[float]) -> float | None:
    """What some elementwise equation makes of known numbers."""
    if name in ("convert_element_type", "copy", "stop_gradient"):
        return given[0]
    if name not in ("add", "sub", "mul", "max", "div") or (name == "div" and not given[1]):
        return None
    a, b = given
    return {"add": a + b, "sub": a - b, "mul": a * b, "max": max(a, b), "div": a / (b or 1.0)}[name]


# -- dims --------------------------------------------------------------------------------------------------------------


def along(eqn: Any, x: Value, to: Sequence[int | None]) -> Value:
    """A value whose dims have other numbers: of the dims that are gone, none has rows."""
    if x.kind == "sum":
        return x
    if x.kind == "whole":
        counts = None if x.counts is None else to[x.counts]
        return replace(x, varies=frozenset(n for d in x.varies if (n := to[d]) is not None), counts=counts)
    if (moved := x.moved(to)) is not None:
        return moved
    if x.first is not None and x.first >= 0:
        return coupled([x], Note.at(eqn, f"takes some of the rows; {FROM_ALL}"))
    return coupled([x], Note.at(eqn, f"{eqn.primitive.name} may tear rows apart", certain=False))


def shape_rule(*names: str) -> Any:
    """Registers a rule for whole values, too."""
    return lambda fun: rule(*names, table=WHOLE)(rule(*names)(fun))


@shape_rule("broadcast_in_dim")
def _broadcast(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Value:
    x, to = ins[0], list(eqn.params["broadcast_dimensions"])
    found = along(eqn, x, to)
    if x.counts is not None and shape_of(eqn)[-1:] == (1,) and to[x.counts] != len(shape_of(eqn)) - 1:
        found = replace(found, columns=frozenset([0]))
    return replace(found, columns=frozenset()) if x.kind == "rows" else found


@shape_rule("reshape")
def _reshape(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Value:
    x, (old, *_), new = ins[0], shapes(eqn), shape_of(eqn)
    if x.kind == "sum":
        return x
    if x.kind == "whole":
        return replace(x, varies=spread(x.varies, old, new), counts=None)
    if not x.span:
        return x
    if eqn.params["dimensions"] is not None or not new:
        return coupled([x], Note.at(eqn, "reshape takes the one row of a block"))
    found = reshaped(x, old, new)
    last = found.dim + found.span
    if r.exact and twin is not None and last < len(new):
        # Where sizes leave it open which of two dims has the rows, it is the one that grows with them.
        grown = [b > a for a, b in zip(new, shape_of(twin), strict=True)]
        found = replace(found, span=found.span + (grown[last] and not any(grown[d] for d in found.dims)))
    return found


@shape_rule("transpose")
def _transpose(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Value:
    order = list(eqn.params["permutation"])
    return along(eqn, ins[0], [order.index(d) for d in range(len(order))])


@shape_rule("squeeze")
def _squeeze(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Value:
    return along(eqn, ins[0], without(len(shapes(eqn)[0]), eqn.params["dimensions"]))


@shape_rule("expand_dims")
def _expand(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Value:
    gone = [d % len(shape_of(eqn)) for d in eqn.params["dimensions"]]
    return along(eqn, ins[0], [d for d in range(len(shape_of(eqn))) if d not in gone])


def without(ndim: int, gone: Sequence[int]) -> list[int | None]:
    """What dims are called when some are gone."""
    return [None if d in gone else d - sum(g < d for g in gone) for d in range(ndim)]


@shape_rule(*_SAME)
def _each(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Sequence[Value]:
    return list(ins)


@shape_rule("random_bits", "random_split", "random_unwrap")
def _random(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Value:
    """Keys of rows give numbers of rows; a key gives numbers that are alike for all."""
    return replace(ins[0], varies=frozenset(), counts=None)


@rule("random_fold_in", "random_seed", "random_gamma", "rng_bit_generator", "threefry2x32", table=WHOLE)
def _random_whole(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Value:
    return Value()


@rule("iota", table=WHOLE)
def _iota(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Value:
    dim = eqn.params["dimension"]
    return Value(varies=frozenset([dim]), counts=dim)


@shape_rule("concatenate", "stack", "pad")
def _concatenate(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Value | None:
    name, dim = eqn.primitive.name, eqn.params.get("dimension", eqn.params.get("axis"))
    sizes = [s[dim] for s in shapes(eqn)] if name == "concatenate" else []
    if name == "stack":
        n = len(shapes(eqn)[0])
        ins = [along(eqn, x, [d + (d >= dim) for d in range(n)]) for x in ins]
    if name == "pad":
        padded = {d for d, config in enumerate(eqn.params["padding_config"]) if tuple(config) != (0, 0, 0)}
        ins = [ins[0], replace(ins[1], varies=frozenset())]
    else:
        padded = {dim}
    rows = [x for x in ins if x.kind == "rows"]
    if all(x.kind == "whole" for x in ins):
        found = combine(eqn, ins)
        last = name == "concatenate" and dim == len(shape_of(eqn)) - 1
        columns = _columns(ins, sizes) if last and 1 in sizes else frozenset()
        counts = next((x.counts for x in ins if 0 in x.columns), None) if columns else None
        return replace(found, varies=found.varies | padded, scalar=None, columns=columns, counts=counts)
    if rows and padded & set(rows[0].dims):
        return _joined(r, eqn, ins, sizes, dim) if name == "concatenate" else None
    if rows and not any(x.kind == "sum" for x in ins):
        # Columns of indices that count rows: the lookup says whether they meet the rows that they count.
        found = together(eqn, [replace(x, varies=frozenset()) if x.columns and x.kind == "whole" else x for x in ins])
        power = found.power if len({x.power for x in ins if not x.zero}) == 1 else None
        last = name == "concatenate" and dim == len(shape_of(eqn)) - 1 and found.kind == "rows"
        columns = _columns(ins, sizes) if last else frozenset()
        return replace(found, columns=columns, power=power)
    return combine(eqn, ins)


def _columns(ins: Sequence[Value], sizes: Sequence[int]) -> frozenset[int]:
    """Which columns of joined indices count."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return frozenset(start + c for x, start in zip(ins, starts, strict=True) for c in x.columns)


def _joined(r: Reader, eqn: Any, ins: Sequence[Value], sizes: Sequence[int], dim: int) -> Value | None:
    """Rows laid after rows: the same ones again, or pieces of them in their order."""
    if any(x.kind != "rows" or x.span != 1 or x.dim != dim or x.plus != ins[0].plus for x in ins):
        return None
    inner = {size // (x.outer * x.count) for x, size in zip(ins, sizes, strict=True)}
    if len(inner) == 1 and len({(x.count, x.first) for x in ins}) == 1:
        return replace(
            ins[0], outer=sum(x.outer for x in ins), power=combine(eqn, [replace(x, outer=1) for x in ins]).power
        )
    firsts = [x.first or 0 for x in ins]
    ends = [f + x.count for f, x in zip(firsts, ins, strict=True)]
    if len(inner) == 1 and all(x.outer == 1 for x in ins) and firsts[1:] == ends[:-1]:
        count = ends[-1] - firsts[0]
        return replace(ins[0], count=count, first=None if count == r.rows else firsts[0])
    return coupled(ins, Note.at(eqn, f"puts rows into another order; {GATHER}"))
