"""What calls, branches and collectives make of rows and of sums over rows."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...model import permutations
from ...program import jaxpr as jx
from ...program import primitives
from ...program.filter_primitives import is_error
from .arithmetic import joined
from .backward import backward_notes
from .labels import Labels, numbered
from .reader import ALWAYS, Reader, rule
from .values import ODD, RATIO, RATIOS, ROUTED, UNNAMED, Note, Value, coupled, mixed, reasons, some_rows

_NAN = (
    "makes a block's rows NaN where one of them is bad, and not all rows, and a later line tells NaN from numbers; use "
    "on_error='raise' (EQX_ON_ERROR=raise), or decide by each row alone"
)


@rule(*jx.CALLS, *jx.REMATS, *jx.CUSTOM, "custom_vmap_call", "composite", table=ALWAYS)
def _call(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Sequence[Value]:
    if (found := _routed(eqn, ins)) is not None:
        return found
    program, other = (None if e is None else jx.called(e) or e.params["call"] for e in (eqn, twin))
    outs = r.inner(program, other, ins)
    if eqn.primitive.name not in jx.CUSTOM:
        return outs
    notes = backward_notes(r, eqn, twin, ins, outs)
    return [x.noted(*notes) for x in outs]


def _routed(eqn: Any, ins: Sequence[Value]) -> Sequence[Value] | None:
    """What a function says that it makes of rows (`model/permutations.py`), which its equations do not show."""
    if (route := permutations.of(eqn)) is None:
        return None
    x = ins[0]
    rows, tokens = [y for y in ins if y.kind != "whole"], lambda y: Labels(y.at.array.ravel())
    if any(y.kind != "rows" or y.plus or y.power for y in rows) or x.kind != "rows" or x.routed or not x.at.dims <= {0}:
        return None
    if any(not y.routed and tokens(y) != tokens(x) for y in rows):
        return None
    note = [Note.at(eqn, route.couples, route.certain)] if route.couples else []
    outs = []
    for kind, v in zip(route.outs, eqn.outvars, strict=True):
        shape = v.aval.shape
        if kind == "whole":
            outs.append(Value(varies=frozenset(range(len(shape)))))
            continue
        at = x.at.array.reshape(-1, *[1] * (len(shape) - 1))
        if kind == "routed":
            at = ROUTED + numbered(shape, {0, 1})
        outs.append(x.plain(at=Labels(at)).noted(*reasons(ins), *note))
    return outs


@rule("custom_linear_solve", table=ALWAYS)
def _solve(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Sequence[Value]:
    """The solution that its solver computes."""
    lengths, jaxprs = eqn.params["const_lengths"], eqn.params["jaxprs"]
    before = lengths.matvec + lengths.vecmat
    right = ins[sum(lengths) :]
    return r.inner(jaxprs.solve, twin and twin.params["jaxprs"].solve, [*ins[before : before + lengths.solve], *right])


@rule("cond", table=ALWAYS)
def _cond(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> list[Value]:
    index, *operands = ins
    twins = twin.params["branches"] if twin is not None else [None] * len(eqn.params["branches"])
    pairs = list(zip(eqn.params["branches"], twins, strict=True))
    # A guard that raises decides whether there is a result, and not which: each block may run it on its own rows.
    returning = [pair for pair in pairs if not is_error(pair[0])] or pairs
    found = [r.inner(b, t, operands) for b, t in returning]
    if len(found) == 1 < len(pairs):
        return found[0]
    if eqn.params.get("branches_platforms"):  # the same function, and a fused kernel of one platform says nothing
        return min(found, key=lambda outs: (len(reasons(outs)), [x.kind for x in outs].count("coupled")))
    return [_of_branches(eqn, index, outs) for outs in zip(*found, strict=True)]


def _of_branches(eqn: Any, index: Value, outs: Sequence[Value]) -> Value:
    """A result of a choice among branches.

    A branch that returns nothing but NaN is a guard too, that of `eqx.error_if` with `on_error="nan"`. One block's NaN
    makes the loss of all rows NaN, on every rank, as one device has it, unless a later line tells NaN from numbers.
    """
    numbers = [x for x in outs if x.scalar is None or not math.isnan(x.scalar)]
    if len(numbers) == 1 < len(outs) and index.kind != "whole":
        return numbers[0].noted(Note(jx.user_line(eqn) or UNNAMED, _NAN, of_nan=True))
    return chosen(eqn, index, functools.reduce(functools.partial(joined, eqn), outs))


def chosen(eqn: Any, by: Value, x: Value) -> Value:
    """A value that is what it is by a condition (or an index)."""
    if by.kind == "whole" or x.kind == "coupled":
        return x.noted(*by.notes)
    if by.kind == "rows" and x.kind in ("whole", "rows"):
        ndim = max(x.at.array.ndim, by.at.array.ndim)
        at = Labels(by.at.array.reshape(by.at.array.shape + (1,) * (ndim - by.at.array.ndim)))
        return joined(eqn, by.plain(at=at, power=x.power), x)
    return coupled([by, x]) if by.kind == "coupled" else mixed(eqn, [by, x], "a choice by")


@rule(*jx.REDUCTIONS, "reduce_scatter", "all_to_all", "ppermute", "pbroadcast", table=ALWAYS)
def _collective(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Sequence[Value]:
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    over = {axes} if isinstance(axes, str) else set(axes)
    if not over & {*r.axes}:
        return list(ins)
    if eqn.primitive.name not in jx.REDUCTIONS or not {*r.axes} <= over:
        note = Note.at(eqn, f"{eqn.primitive.name} over some of the axes that spread rows", certain=False)
        return [coupled([x], note) for x in ins]
    notes = [_misplaced(r, eqn, twin, k, x) if eqn.params.get("tiled") else [] for k, x in enumerate(ins)]
    ins = [x.noted(*some) for x, some in zip(ins, notes, strict=True)]
    return [_of_all(r, eqn, x, len(getattr(v.aval, "shape", ()))) for x, v in zip(ins, eqn.outvars, strict=True)]


def _misplaced(r: Reader, eqn: Any, twin: Any, k: int, x: Value) -> list[Note]:
    """What is to be said of blocks that, laid one after another, are not what one device has of all rows."""
    dim = eqn.params["all_gather_dimension"]
    if x.kind == "rows" and not x.routed:
        order = x.at.array.ravel()
        if not x.at.equally(r.rows) or not x.at.dims <= {dim}:
            what = "jp.all_rows needs all rows of the block along dim 0, one after another; give it rows as they come"
        elif (order[1:] < order[:-1]).any():
            what = (
                "jp.all_rows of rows in another order than the batch's, as of two views that are laid end to end, in "
                "which blocks take turns; gather first, jnp.concatenate([jp.all_rows(a), jp.all_rows(b)])"
            )
        else:
            return []
        return [Note.at(eqn, what)]
    if x.kind == "whole" and dim in x.varies and not x.keyed and r.growth(eqn, twin, [(k, dim)]):
        return [Note.at(eqn, "jp.all_rows of a row's place in its block, the same in each; put it into the batch")]
    return []


def _of_all(r: Reader, eqn: Any, x: Value, ndim: int) -> Value:
    """What is the same on all replicas: it was reduced over, or gathered from, all rows."""
    if x.kind == "sum" and x.varies:
        return coupled([x], some_rows(eqn))
    notes = frozenset() if x.kind == "sum" else x.notes
    if x.kind == "rows" and x.pick is not None and (x.places or not x.of_all(r.rows)):
        notes |= {x.pick}  # each block has sorted its own rows, or picked some of them
    if eqn.primitive.name.startswith("psum"):
        notes = frozenset(replace(note, what=RATIOS) if note.what == RATIO else note for note in notes)
    return Value(power=x.power, varies=frozenset(range(ndim)), notes=notes)


@rule(*primitives.having("identity"), table=ALWAYS)
def _as_they_are(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Sequence[Value]:
    return ins


@rule("axis_index", table=ALWAYS)
def _axis_index(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Value:
    return Value(power=ODD).noted(Note.at(eqn, "depends on which replica has the rows", certain=False))
