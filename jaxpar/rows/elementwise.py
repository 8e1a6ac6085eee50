"""What elementwise equations make of rows and of sums over rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from ..program.factors import ELEMENTWISE
from .reader import WHOLE, Reader, rule
from .values import GATHER, ODD, STEP, Note, Value, combine, coupled, position, product_power, some_rows, sum_power

_MORE = """
add_any bitcast_convert_type clamp clz log2 mulhi one_minus_square polygamma random_clone random_gamma stop_gradient
""".split()
_LINEAR = ("neg", "real", "imag", "conj", "copy", "copy_p", "reduce_precision", "stop_gradient")
_EXPONENTS = {"abs": 1, "square": 2, "sqrt": 0.5, "rsqrt": -0.5, "cbrt": 1 / 3}
_COMPARED = ("eq", "ne", "gt", "lt", "ge", "le", "is_finite")
FROM_ALL = "compute it from jp.all_rows(x)"


def mixed(eqn: Any, ins: Sequence[Value], what: str = "", certain: bool = True) -> Value:
    """A result that is not linear in what was summed over rows."""
    name = eqn.primitive.name
    if any(x.kind == "sum" and x.first == STEP for x in ins):
        return coupled(ins, some_rows(eqn))
    return coupled(ins, Note.at(eqn, f"{what or name + ' of'} a sum or mean over rows; {FROM_ALL}", certain))


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
        found = mixed(eqn, ins)
        return replace(found, root=ins[0]) if eqn.primitive.name == "sqrt" and ins[0].first != STEP else found
    if any(x.plus for x in ins):
        return mixed(eqn, ins, f"{eqn.primitive.name} of rows that hold")
    found = together(eqn, ins)
    if found.kind != "rows":
        return found
    return replace(found, power=_power(eqn, ins) if r.exact else 0, valid=_valid(eqn, ins[0]))


def _power(eqn: Any, ins: Sequence[Value]) -> float | None:
    """The power of what an equation computes of each element."""
    name, terms = eqn.primitive.name, [x.power for x in ins if not x.zero]
    powers = [p for p in terms if p is not None]
    if len(powers) == len(terms) and not any(powers):  # what is odd counts as true
        return 0
    if len(powers) < len(terms) or not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact):
        return None
    exponent = ins[1].scalar if name == "pow" and ins[1].power == 0 else eqn.params.get("y", _EXPONENTS.get(name))
    if exponent is not None:
        return ODD if math.isnan(powers[0]) else powers[0] * exponent
    if name in ("max", "min"):
        known = [x.scalar for x in ins if x.scalar is not None]
        if len(known) == len(ins):  # of maximum(count, 1) the count
            return ins[known.index((max if name == "max" else min)(known))].power
        return powers[0] if len({*powers}) == 1 else None
    return None if any(map(math.isnan, powers)) else ODD


def _valid(eqn: Any, x: Value) -> int | None:
    """What a test for NaN says of numbers."""
    name = eqn.primitive.name
    if name == "ne" and eqn.invars[0] is eqn.invars[1]:
        return 0
    if name == "not" and x.valid is not None and eqn.outvars[0].aval.dtype == bool:
        return 1 - x.valid
    return 1 if name == "is_finite" else None


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
    return replace(found, power=product_power(a.power, b.power)) if found.kind == "rows" else found


@rule("div")
def _div(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Value:
    a, b = ins
    if b.kind == "whole":
        return scaled(r, eqn, a, b, -1)
    if b.kind == "sum":
        if a.kind == "sum" and b.valid == 1:
            what = "divides by how many values are no NaN, of which blocks may have more and less; return jp.Mean"
            count = Value(power=product_power(b.power, 1), scalar=float(b.size))
            return scaled(r, eqn, a, count, -1).noted(Note.at(eqn, what, certain=False))
        if a.kind == "sum":
            what = "divides one sum over rows by another; return jp.Mean(total, count), or use sums of jp.all_rows(x)"
            return coupled(ins, Note.at(eqn, what))
        return mixed(eqn, ins, "a division by")
    if a.kind == "sum" or a.plus or b.plus:
        return mixed(eqn, ins, "a quotient with")
    return replace(together(eqn, ins), power=product_power(a.power, b.power, -1) if r.exact else 0)


def scaled(r: Reader, eqn: Any, x: Value, by: Value, sign: int) -> Value:
    """Rows or a sum, times (or, `sign` -1, divided by) what is the same for all rows."""
    power = product_power(x.power, by.power, sign)
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
    inexact = jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact)
    varies = frozenset().union(*(x.varies for x in ins))
    if name == "select_n" and len(ins) == 3 and ins[0].zero and ins[1].counts is not None:
        return replace(ins[1], notes=frozenset())  # what keeps indices from being negative, which these are not
    if name in ("add", "sub"):
        terms = [x.power for x in ins if not x.zero and not x.small] or [x.power for x in ins]
        power = terms[0] if len(terms) == 1 else sum_power(*terms)
        power = None if power is ODD and not inexact else power
    elif name in (*_LINEAR, "convert_element_type", "select_n"):
        power = next(iter(found)) if len(found := {x.power for x in ins if not x.zero}) == 1 else None
        power = 0 if all(x.power == 0 for x in ins) else power
    elif name in ("mul", "div"):
        power = product_power(ins[0].power, ins[1].power, 1 if name == "mul" else -1)
    else:
        power = _power(eqn, ins)
    scalar = _computed(name, [float(c) for c in scalars if c is not None]) if None not in scalars else None
    keeps = name in ("neg", "convert_element_type", "copy", "stop_gradient", "mul", "add", "sub", "select_n")
    data = ins[1:] if name == "select_n" else ins
    zero = keeps and (any if name == "mul" else all)(x.zero for x in data)
    zero = zero or (name == "lt" and ins[0].counts is not None and ins[1].zero)
    same = name in ("convert_element_type", "copy") or (name in ("add", "sub") and ins[1].zero)
    counts, eye = (ins[0].counts, ins[0].eye) if same else (None, None)
    dims = [x.counts for x in ins if x.counts is not None]
    if name == "eq" and len({*dims}) == 2:
        eye = (dims[0], dims[1])
    return Value(varies=varies, scalar=scalar, zero=zero, power=power, counts=counts, eye=eye)


def _computed(name: str, given: Sequence[float]) -> float | None:
    """What some elementwise equation makes of known numbers."""
    if name in ("convert_element_type", "copy", "stop_gradient"):
        return given[0]
    if name not in ("add", "sub", "mul", "max", "div") or (name == "div" and not given[1]):
        return None
    a, b = given
    return {"add": a + b, "sub": a - b, "mul": a * b, "max": max(a, b), "div": a / (b or 1.0)}[name]
