"""Rules for addition, division and choice, where sums over rows, rows and whole values meet.

`_add_pair` has the table of additions. By power, a whole value c counts as the sum over rows of c / n:

    whole + whole   whole
    whole + rows    rows, if the whole value does not depend on a row's place
    whole + sum     sum, if the powers agree once the whole value is a sum; else coupled
    rows + rows     rows, if each row meets itself; else coupled
    rows + sum      rows with `has_mean`, if the sum is a mean
    sum + sum       sum, if the powers agree
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...program import primitives
from .generic import FactorSpace, coupled_along_dim, generic
from .labels import Labels
from .numbers import Number
from .reader import Reader, rule
from .values import (
    ADVISE_SAME_SCALE,
    RATIO_OF_SUMS,
    UNKNOWN_POWER,
    Note,
    Value,
    coupled,
    coupled_with_other_rows,
    nonlinear_in_sum,
    notes_of,
    position_notes,
    row_groups_note,
)

_KIND_ORDER = ("coupled", "whole", "rows", "sum")  # pairs of values are sorted so, which halves the cases


@rule(*primitives.SUMS)
def _add(reader: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> list[Value] | Value:
    # The generic rule knows no power for operands of different powers; a negligible one, such as 0, does not count.
    if all(x.kind == "whole" for x in ins):
        return [replace(x, power=sum_power(*ins)) for x in generic(reader, eqn, twin, ins)]
    return combine(eqn, dict(enumerate(ins)))


def combine(eqn: Any, ins: Mapping[int, Value]) -> Value:
    """Return the result of an equation that adds up operands, lays them side by side, or chooses between them.

    Args:
      eqn: an equation with one result that is linear in these operands.
      ins: operand index -> value; other operands, such as indices, have no part in it.
    """
    space, values = FactorSpace(eqn), []
    for k, x in ins.items():
        if x.kind == "rows":
            if (labels := space.to_factors(k, x.labels.array)) is None:
                return coupled_along_dim(eqn, [*ins.values()])
            x = replace(x, labels=Labels(labels))
        elif x.kind == "sum" and x.varying_dims:
            if None in (factor_dims := [space.ins[k][d] for d in x.varying_dims]):
                return nonlinear_in_sum(eqn, [x])
            x = replace(x, varying_dims=frozenset(factor_dims))
        values.append(space.whole_operand(k, x) if x.kind == "whole" else x)
    total = functools.reduce(functools.partial(_add_pair, eqn), values).derive().with_notes(*notes_of(ins.values()))
    dim_of_factor = space.outs[0]
    if total.kind == "rows":
        return replace(total, labels=Labels(space.to_result(0, total.labels.array)))
    return replace(total, varying_dims=frozenset(dim_of_factor[i] for i in total.varying_dims))


def _add_pair(eqn: Any, a: Value, b: Value) -> Value:
    """Return the sum of two values with the dims of the factors; see the table of this module."""
    a, b = sorted((a, b), key=lambda x: _KIND_ORDER.index(x.kind))
    kinds, power = (a.kind, b.kind), sum_power(a, b)
    # "coupled" comes first in the order: whatever it is added to is coupled.
    if a.kind == "coupled":
        return coupled([a, b])
    if kinds == ("whole", "whole"):
        return Value(
            power=power,
            varying_dims=a.varying_dims | b.varying_dims,
            is_keyed=a.is_keyed and b.is_keyed,
            pick_note=a.pick_note or b.pick_note,
        )
    if kinds == ("whole", "rows"):
        return b.derive(power=power).with_notes(*position_notes(eqn, a, b))
    # whole + sum: c is the sum over rows of c / n, so that its power as a sum is one less.
    if a.kind == "whole":
        dependence = "is the same for all rows" if a.power == 0 else "depends on how many rows a block has"
        return b if a.is_negligible else _add_to_sum(eqn, b, a.power - 1, a, f"a value that {dependence}")
    if kinds == ("rows", "rows"):
        if a.labels == b.labels:
            return a.derive(has_mean=a.has_mean or b.has_mean, power=power, pick_note=a.pick_note or b.pick_note)
        # Two single rows: a Python loop over rows adds up one after another.
        are_single_rows = not (a.labels.dims or b.labels.dims or a.is_routed or b.is_routed)
        if are_single_rows:
            return coupled([a, b], row_groups_note(eqn))
        return coupled_with_other_rows(eqn, [a, b])
    # rows + sum: only a mean has the power of a row, and a partial sum would be of some rows only.
    if a.kind == "rows":
        if b.varying_dims:
            return nonlinear_in_sum(eqn, [b])
        mean = _add_to_sum(eqn, b, a.power - 1, a, "each row")
        return mean if mean.kind == "coupled" else a.derive(has_mean=True, power=mean.power + 1).with_notes(*mean.notes)
    if a.varying_dims != b.varying_dims:
        return nonlinear_in_sum(eqn, [a, b])
    return _add_to_sum(eqn, a, b.power, b, power_name(b.power))


def join_values(eqn: Any, a: Value, b: Value) -> Value:
    """Return the value of a result that is one of two: after a branch, or after another number of loop steps."""
    a, b = sorted((a, b), key=lambda x: _KIND_ORDER.index(x.kind))
    power, name = sum_power(a, b), eqn.primitive.name
    have_same_rows = a.labels == b.labels and (a.kind != "sum" or a.varying_dims == b.varying_dims)
    if a.kind == b.kind == "whole":
        joint = replace(_add_pair(eqn, a, b), number=a.number if a.scalar == b.scalar == 0 else None)
    # Zero is a sum over rows too, and so is a whole value whose power as a sum agrees.
    elif a.is_zero or (a.kind == "whole" and b.kind == "sum" and a.power - 1 == b.power):
        joint, power = b.derive(), b.power
    elif (a.kind == b.kind and have_same_rows) or (a.kind, b.kind) == ("whole", "rows"):
        joint = b.derive(has_mean=a.has_mean or b.has_mean, power=power, pick_note=a.pick_note or b.pick_note)
    elif a.kind == b.kind == "rows":
        return coupled_with_other_rows(eqn, [a, b])
    else:
        message = f"returns from {name} a sum over rows in one case, and another kind of value in another"
        return coupled([a, b], Note.of_eqn(eqn, message, is_certain=False))
    # The power is unknown because the two differ, and no note says so yet.
    if math.isnan(power) and not math.isnan(a.power + b.power):
        message = f"returns from {name} a value that depends on how many rows a block has, but not in all cases"
        joint = joint.with_notes(Note.of_eqn(eqn, message, is_certain=False))
    return joint.with_notes(*a.notes, *b.notes)


def sum_power(a: Value, b: Value) -> float:
    """Return the power of n of the sum of two values of the same kind."""
    # A guard such as 1e-6 does not count, whatever its power is.
    if a.is_negligible or b.is_negligible:
        return b.power if a.is_negligible else a.power
    return a.power if a.power == b.power else UNKNOWN_POWER


def _add_to_sum(eqn: Any, total: Value, power: float, addend: Value, description: str) -> Value:
    """Return the sum of a sum over rows and another value; coupled if their powers differ.

    Args:
      total: the sum over rows.
      power: the power of `addend` if it is seen as a sum over rows.
      addend: the other value.
      description: the message's name for `addend`.
    """
    if total.power == power:
        return total.derive()
    # One note is enough: an unknown power that has its note gets no second one.
    if total.has_noted_power or addend.has_noted_power or (math.isnan(total.power) and math.isnan(power)):
        return total.derive(power=UNKNOWN_POWER)
    message = f"adds up {power_name(total.power)} and {description}; {ADVISE_SAME_SCALE}"
    note = replace(Note.of_eqn(eqn, message), only_scale=addend.kind != "rows")
    # If a power is unknown, the two may agree: the result stays a sum, and the note alone reports it.
    if math.isnan(total.power + power):
        return total.derive(power=UNKNOWN_POWER).with_notes(note)
    return coupled([total], note)


def power_name(power: float) -> str:
    """Return the name that messages give to a sum over rows with this power."""
    if math.isnan(power):
        return "a sum over rows times a function of their number"
    usual_names = {0.0: "a sum over rows", -1.0: "a mean over rows"}
    return usual_names.get(power, f"a sum over rows times n^{power:g}, for n rows")


@rule("div")
def _div(reader: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> list[Value] | Value:
    dividend, divisor = ins
    if divisor.kind == "whole" and dividend.kind == "rows" and dividend.has_mean:
        # Division by a whole value is linear, which the generic rule does not know of `div`.
        rows = replace(dividend, has_mean=False)
        return [replace(x, has_mean=True) for x in generic(reader, eqn, twin, [rows, divisor])]
    if divisor.kind != "sum" or divisor.varying_dims:
        return generic(reader, eqn, twin, ins)
    if dividend.kind == "sum" and divisor.number is not None:
        # `jnp.nanmean`: the divisor counts values that are not NaN, and is the number of rows if nothing is NaN.
        message = "divides by the number of values that are not NaN, which may differ between blocks; return jp.Mean"
        count = reader.with_power(Value(number=divisor.number))
        outs = generic(reader, eqn, twin, [dividend, count])
        return [x.with_notes(Note.of_eqn(eqn, message, is_certain=False)) for x in outs]
    if dividend.kind == "sum":
        return coupled(ins, Note.of_eqn(eqn, RATIO_OF_SUMS))
    return nonlinear_in_sum(eqn, ins, "divides by")


@rule("select_n")
def _select(reader: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> list[Value] | Value:
    # A choice by row between sums makes the sums depend on the row, which is a product with a mask.
    selector, *cases = ins
    has_sums = any(x.kind == "sum" for x in cases)
    if selector.kind == "sum" or (selector.kind == "rows" and (has_sums or any(x.has_mean for x in cases))):
        return nonlinear_in_sum(eqn, ins, "chooses, row by row, between values that hold")
    if any(x.kind == "sum" and x.varying_dims for x in cases):
        return nonlinear_in_sum(eqn, ins)
    # Without the selector: a whole one chooses the same for all rows.
    return combine(eqn, dict(enumerate(cases, 1))) if has_sums else generic(reader, eqn, twin, ins)


@rule("ne", "is_finite")
def _test_for_nan(reader: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> list[Value]:
    """Return the result of a comparison; a test of rows for NaN gets the number it has if nothing is NaN."""
    outs, is_finite = generic(reader, eqn, twin, ins), eqn.primitive.name == "is_finite"
    if ins[0].kind != "rows" or not (is_finite or eqn.invars[0] is eqn.invars[1]):
        return outs
    return [replace(x, number=Number((is_finite, is_finite))) for x in outs]
