"""What is added up, divided and chosen: where sums over rows, rows and whole values come together."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...program import primitives
from .generic import Met, generic, mixes_rows
from .labels import Labels
from .numbers import Number
from .reader import Reader, rule
from .values import ODD, RATIO, SCALES, Note, Value, coupled, mixed, others, position, reasons, some_rows

_ORDER = ("coupled", "whole", "rows", "sum")


@rule(*primitives.SUMS)
def _add(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> list[Value] | Value:
    if all(x.kind == "whole" for x in ins):
        return [replace(x, power=sum_power(*ins)) for x in generic(r, eqn, twin, ins)]
    return combine(eqn, dict(enumerate(ins)))


def combine(eqn: Any, ins: Mapping[int, Value]) -> Value:
    """What is linear in some operands, by number, and adds them up, lays them side by side, or chooses between them."""
    met, values = Met(eqn), []
    for k, x in ins.items():
        if x.kind == "rows":
            if (at := met.to_factors(k, x.at.array)) is None:
                return mixes_rows(eqn, [*ins.values()])
            x = replace(x, at=Labels(at))
        elif x.kind == "sum" and x.varies:
            if None in (dims := [met.ins[k][d] for d in x.varies]):
                return mixed(eqn, [x])
            x = replace(x, varies=frozenset(dims))
        values.append(met.whole(k, x) if x.kind == "whole" else x)
    found = functools.reduce(functools.partial(_pair, eqn), values).plain().noted(*reasons(ins.values()))
    to = met.outs[0]
    if found.kind == "rows":
        return replace(found, at=Labels(met.to_result(0, found.at.array)))
    return replace(found, varies=frozenset(to[i] for i in found.varies))


def _pair(eqn: Any, a: Value, b: Value) -> Value:
    a, b = sorted((a, b), key=lambda x: _ORDER.index(x.kind))
    kinds, power = (a.kind, b.kind), sum_power(a, b)
    if a.kind == "coupled":
        return coupled([a, b])
    if kinds == ("whole", "whole"):
        return Value(power=power, varies=a.varies | b.varies, keyed=a.keyed and b.keyed, pick=a.pick or b.pick)
    if kinds == ("whole", "rows"):
        return b.plain(power=power).noted(*position(eqn, a, b))
    if a.kind == "whole":
        what = "is the same for all rows" if a.power == 0 else "depends on how many rows a block has"
        return b if a.negligible else _added(eqn, b, a.power - 1, a, f"a value that {what}")
    if kinds == ("rows", "rows"):
        if a.at == b.at:
            return a.plain(plus=a.plus or b.plus, power=power, pick=a.pick or b.pick)
        single = not (a.at.dims or b.at.dims or a.routed or b.routed)  # one after another, as a loop over rows does
        return coupled([a, b], some_rows(eqn)) if single else others(eqn, [a, b])
    if a.kind == "rows":
        if b.varies:
            return mixed(eqn, [b])
        mean = _added(eqn, b, a.power - 1, a, "each row")
        return mean if mean.kind == "coupled" else a.plain(plus=True, power=mean.power + 1).noted(*mean.notes)
    return _added(eqn, a, b.power, b, named(b.power)) if a.varies == b.varies else mixed(eqn, [a, b])


def joined(eqn: Any, a: Value, b: Value) -> Value:
    """What is one of two values: by a branch, or after so many steps of a loop."""
    a, b = sorted((a, b), key=lambda x: _ORDER.index(x.kind))
    power, name = sum_power(a, b), eqn.primitive.name
    same = a.at == b.at and (a.kind != "sum" or a.varies == b.varies)
    if a.kind == b.kind == "whole":
        found = replace(_pair(eqn, a, b), number=a.number if a.scalar == b.scalar == 0 else None)
    elif a.zero or (a.kind == "whole" and b.kind == "sum" and a.power - 1 == b.power):
        found, power = b.plain(), b.power
    elif (a.kind == b.kind and same) or (a.kind, b.kind) == ("whole", "rows"):
        found = b.plain(plus=a.plus or b.plus, power=power, pick=a.pick or b.pick)
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
    note = replace(Note.at(eqn, f"adds up {named(total.power)} and {what}; {SCALES}"), scale=other.kind != "rows")
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
    if b.kind != "sum" or b.varies:
        return generic(r, eqn, twin, ins)
    if a.kind == "sum" and b.number is not None:
        what = "divides by how many values are no NaN, of which blocks may have more and less; return jp.Mean"
        found = generic(r, eqn, twin, [a, r.powered(Value(number=b.number))])
        return [x.noted(Note.at(eqn, what, certain=False)) for x in found]
    if a.kind == "sum":
        return coupled(ins, Note.at(eqn, RATIO))
    return mixed(eqn, ins, "a division by")


@rule("select_n")
def _select(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> list[Value] | Value:
    which, *cases = ins
    sums = any(x.kind == "sum" for x in cases)
    if which.kind == "sum" or (which.kind == "rows" and (sums or any(x.plus for x in cases))):
        return mixed(eqn, ins, "a choice by row between values, one of which holds")
    if any(x.kind == "sum" and x.varies for x in cases):
        return mixed(eqn, ins)
    return combine(eqn, dict(enumerate(cases, 1))) if sums else generic(r, eqn, twin, ins)


@rule("ne", "is_finite")
def _tested(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> list[Value]:
    """A test for NaN is known where nothing is NaN."""
    found, finite = generic(r, eqn, twin, ins), eqn.primitive.name == "is_finite"
    if ins[0].kind != "rows" or not (finite or eqn.invars[0] is eqn.invars[1]):
        return found
    return [replace(x, number=Number((finite, finite))) for x in found]
