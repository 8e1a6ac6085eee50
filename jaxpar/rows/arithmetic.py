"""What is added up, divided and chosen: where sums over rows, rows and whole values come together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .generic import Met, generic
from .labels import NOWHERE, Labels
from .numbers import Number
from .reader import Reader, rule, shape_of
from .values import ODD, SCALES, Note, Value, coupled, mixed, one_row, others, partial, position, reasons

_ORDER = ("coupled", "whole", "rows", "running", "sum", "extreme")


@rule("add", "sub", "add_any")
def _add(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> list[Value] | Value:
    if all(x.kind == "whole" for x in ins):
        return [replace(x, power=sum_power(*ins)) for x in generic(r, eqn, twin, ins)]
    return mixed(eqn, ins) if eqn.primitive.name == "sub" and ins[1].kind == "running" else combine(r, eqn, ins)


def combine(r: Reader, eqn: Any, ins: Sequence[Value]) -> Value:
    """What is linear in several values and adds them up, lays them side by side, or chooses between them."""
    met, values = Met(eqn), []
    for k, x in enumerate(ins):
        at = met.to_factors(k, x.at.array) if x.at is not NOWHERE and x.kind != "whole" else None
        at = None if at is None else Labels(at, at.ndim - len(met.factors))
        values.append(met.whole(k, x) if x.kind == "whole" else x if at is None else replace(x, at=at))
    found = values[0]
    for other in values[1:]:
        found = _pair(r, eqn, found, other)
    return found.noted(*reasons(ins))


def _pair(r: Reader, eqn: Any, a: Value, b: Value) -> Value:
    a, b = sorted((a, b), key=lambda x: _ORDER.index(x.kind))
    kinds, shape, power = (a.kind, b.kind), shape_of(eqn), sum_power(a, b)
    if a.kind == "coupled":
        return coupled([a, b])
    if b.kind == "running":
        if a.kind == "running":
            return mixed(eqn, [a, b])
        return replace(b, inner=_pair(r, eqn, b.inner, a) if b.inner else a)
    if kinds == ("whole", "whole"):
        return _of_wholes(a, b, power)
    if kinds == ("whole", "rows"):
        return b.plain(power=power, term=b.term if a.zero else None).noted(*position(eqn, a, b, shape))
    if a.kind == "whole":
        what = "is the same for all rows" if a.power == 0 else "depends on how many rows a block has"
        return b if a.negligible else _added(eqn, b, a.power - 1, a, f"a value that {what}")
    if kinds == ("rows", "rows") and a.at == b.at:
        return a.plain(plus=a.plus or b.plus, power=power, pick=a.pick or b.pick)
    if a.kind == "rows" and not a.at.dims and not a.routed and not (b.kind == "rows" and (b.at.dims or b.routed)):
        return _pair(r, eqn, one_row(a, r.rows), one_row(b, r.rows) if b.kind == "rows" else b)
    if kinds == ("rows", "sum") and b.at is NOWHERE:
        mean = _added(eqn, b, a.power - 1, a, "each row")
        return mean if mean.kind == "coupled" else a.plain(plus=True, power=mean.power + 1).noted(*mean.notes)
    if a.kind == "rows":
        return others(eqn, [a, b]) if b.kind == "rows" else mixed(eqn, [a, b])
    found = _added(eqn, a, b.power, b, named(b.power))
    if found.kind == "coupled" or NOWHERE in (a.at, b.at):
        return replace(found, at=b.at if a.at is NOWHERE else a.at)
    found = partial(found, a.at.array + b.at.array)
    if a.term == b.term is not None:
        return replace(found, term=a.term)
    what = "sums up rows by different functions, as of a row's place in its block"
    return found.noted(Note.at(eqn, what, certain=False))


def _of_wholes(a: Value, b: Value, power: float) -> Value:
    """One whole value of two: where both number their elements, these are all taken for different ones."""
    at = a.at if b.at in (a.at, NOWHERE) else b.at if a.at is NOWHERE else NOWHERE
    varies = a.varies | b.varies | (a.at.dims | b.at.dims if at is NOWHERE else frozenset())
    keyed, given = a.keyed and b.keyed, a.given and b.given
    return Value("whole", at, power, varies=varies, keyed=keyed, given=given, pick=a.pick or b.pick)


def joined(eqn: Any, a: Value, b: Value) -> Value:
    """What is one of two values: by a branch, or after so many steps of a loop."""
    a, b = sorted((a, b), key=lambda x: _ORDER.index(x.kind))
    power, same, name = sum_power(a, b), a.at == b.at, eqn.primitive.name
    if a.kind == b.kind == "whole":
        found = _of_wholes(a, b, power)
    elif a.zero or (a.kind == "whole" and b.kind == "sum" and a.power - 1 == b.power):
        found, power = b.plain(), b.power
    elif (a.kind == b.kind and same) or (a.kind, b.kind) == ("whole", "rows"):
        found = b.plain(plus=a.plus or b.plus, power=power, given=a.given and b.given, pick=a.pick or b.pick)
    elif a.kind == b.kind == "rows":
        return others(eqn, [a, b])
    else:
        return coupled([a, b], Note.at(eqn, f"{name} gives a sum over rows, or something else", certain=False))
    if math.isnan(power) and not math.isnan(a.power + b.power):
        what = f"{name} gives what depends on how many rows a block has, or not"
        found = found.noted(Note.at(eqn, what, certain=False))
    return found.noted(*a.notes, *b.notes)


def sum_power(a: Value, b: Value) -> float:
    """The power of two values of one kind that are added up."""
    if a.negligible or b.negligible:
        return b.power if a.negligible else a.power
    return a.power if a.power == b.power else ODD


def _added(eqn: Any, total: Value, power: float, other: Value, what: str) -> Value:
    """A sum over rows and something else that, as a sum over rows, has a power."""
    if total.power == power:
        return total.plain()
    if total.unknown or other.unknown or (math.isnan(total.power) and math.isnan(power)):
        return total.plain(power=ODD)
    note = Note.at(eqn, f"adds up {named(total.power)} and {what}; {SCALES}")
    return total.plain(power=ODD).noted(note) if math.isnan(total.power + power) else coupled([total], note)


def named(power: float) -> str:
    """What a sum over rows with this power is called."""
    if math.isnan(power):
        return "a sum over rows times what depends on their number"
    usual = {0.0: "a sum over rows", -1.0: "a mean over rows"}
    return usual.get(power, f"a sum over rows times rows^{power:g}")


@rule("div")
def _div(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> list[Value] | Value:
    a, b = ins
    if b.kind == "whole" and a.kind == "rows" and a.plus:
        return [replace(x, plus=True) for x in generic(r, eqn, twin, [replace(a, plus=False), b])]
    if b.kind != "sum" or b.at is not NOWHERE:
        return generic(r, eqn, twin, ins)
    if a.kind == "sum" and b.number is not None:
        what = "divides by how many values are no NaN, of which blocks may have more and less; return jp.Mean"
        found = generic(r, eqn, twin, [a, r.powered(Value(number=b.number))])
        return [x.noted(Note.at(eqn, what, certain=False)) for x in found]
    if a.kind == "sum":
        what = "divides one sum over rows by another; return jp.Mean(total, count), or use sums of jp.all_rows(x)"
        return coupled(ins, Note.at(eqn, what))
    return mixed(eqn, ins, "a division by")


@rule("select_n")
def _select(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> list[Value] | Value:
    which, *cases = ins
    sums = [x for x in cases if x.kind in ("sum", "running")]
    if len(ins) == 3 and which.zero and cases[0].kind == "whole":
        return cases[0]  # what keeps indices from being negative, which these are not
    if which.kind in ("sum", "running") or (which.kind == "rows" and (sums or any(x.plus for x in cases))):
        return mixed(eqn, ins, "a choice by row between values, one of which holds")
    if any(x.kind == "running" or x.at is not NOWHERE for x in sums):
        return mixed(eqn, ins, "a choice between values, one of which holds")
    return combine(r, eqn, cases) if sums else generic(r, eqn, twin, ins)


@rule("ne", "is_finite")
def _tested(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> list[Value]:
    """A test for NaN is known where nothing is NaN."""
    found, finite = generic(r, eqn, twin, ins), eqn.primitive.name == "is_finite"
    if ins[0].kind != "rows" or not (finite or eqn.invars[0] is eqn.invars[1]):
        return found
    return [replace(x, number=Number((finite, finite))) for x in found]
