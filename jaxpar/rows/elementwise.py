"""What elementwise equations make of rows and of sums over rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from ..parallel.tensor.primitives import ELEMENTWISE
from .reader import WHOLE, Reader, rule
from .values import GATHER, STEP, Note, Value, combine, coupled, position, some_rows

_MORE = """
add_any bitcast_convert_type clamp clz log2 mulhi one_minus_square polygamma random_clone random_gamma stop_gradient
""".split()
_LINEAR = ("neg", "real", "imag", "conj", "copy", "copy_p", "reduce_precision", "stop_gradient")
_COMPARED = ("eq", "ne", "gt", "lt", "ge", "le", "is_finite")
FROM_ALL = "compute it from jp.all_rows(x)"


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
        near = lambda n: math.isclose(factor, n, rel_tol=1e-3)
        power = -1 if any(map(near, usual)) else int(near(1 / r.rows))
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
