"""What equations that hold programs, and collectives, make of rows and of sums over rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..ops import permutations
from ..program import jaxpr as jx
from .elementwise import mixed
from .reader import ALWAYS, Reader, rule, shapes
from .values import ROUTED, STEP, Note, Value, combine, coupled, reasons

_ROUNDS = 12


def _param(eqn: Any, *names: str) -> Any:
    return None if eqn is None else next(eqn.params[n] for n in names if n in eqn.params)


@rule(*jx.CALLS, *jx.REMATS, *jx.CUSTOM, "custom_vmap_call", "composite", table=ALWAYS)
def _call(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Sequence[Value]:
    if (found := _routed(eqn, ins)) is not None:
        return found
    names = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call")
    return r.inner(_param(eqn, *names), _param(twin, *names), ins)


def _routed(eqn: Any, ins: Sequence[Value]) -> Sequence[Value] | None:
    """What a function says that it makes of rows (`ops/permutations.py`), which its equations do not show."""
    if (route := permutations.of(eqn)) is None:
        return None
    x = ins[0]
    if x.kind != "rows" or x.dim != 0 or x.span != 1:
        return None
    others = [y for y in ins if y.kind != "whole"]
    if any(y.kind != "rows" or y.plus or (y.place != x.place and y.first != ROUTED) for y in others):
        return None
    note = [Note.at(eqn, route.couples, route.certain)] if route.couples else []
    powers = {y.power for y in ins}
    outs = []
    for kind, v in zip(route.outs, eqn.outvars, strict=True):
        shape = v.aval.shape
        if kind == "whole":
            outs.append(Value(varies=frozenset(range(len(shape)))))
            continue
        routed = Value("rows", span=2, count=shape[0] * shape[1], first=ROUTED) if kind == "routed" else x
        found = replace(routed, power=0 if powers <= {0} else None, columns=frozenset())
        outs.append(found.noted(*reasons(ins), *note))
    return outs


@rule("custom_linear_solve", table=ALWAYS)
def _solve(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Sequence[Value]:
    """The solution that its solver computes."""
    lengths, jaxprs = eqn.params["const_lengths"], eqn.params["jaxprs"]
    before = lengths.matvec + lengths.vecmat
    right = ins[sum(lengths) :]
    return r.inner(jaxprs.solve, twin and twin.params["jaxprs"].solve, [*ins[before : before + lengths.solve], *right])


@rule("cond", table=ALWAYS)
def _cond(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Sequence[Value]:
    index, *operands = ins
    twins = twin.params["branches"] if twin is not None else [None] * len(eqn.params["branches"])
    found = [r.inner(b, t, operands) for b, t in zip(eqn.params["branches"], twins, strict=True)]
    if eqn.params.get("branches_platforms"):  # the same function, and a fused kernel of one platform says nothing
        return min(found, key=lambda outs: len(reasons(outs)))
    outs = [combine(eqn, branch) for branch in zip(*found, strict=True)]
    if index.kind == "whole":
        return [x.noted(*index.notes) for x in outs]
    if index.kind == "sum":
        return [mixed(eqn, [index, *outs], "a branch chosen by")] * len(outs)
    return [coupled([index, *outs])] * len(outs)


@rule("while", table=ALWAYS)
def _while(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Sequence[Value]:
    p, q = eqn.params, twin.params if twin is not None else {}
    n, k = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
    body = lambda carry: replace(r, looped=True).inner(p["body_jaxpr"], q.get("body_jaxpr"), [*ins[n:k], *carry])
    carry, _ = _settled(eqn, list(ins[k:]), body, False)
    (goes_on,) = r.inner(p["cond_jaxpr"], q.get("cond_jaxpr"), [*ins[:n], *carry])
    if goes_on.kind == "rows":  # of vmap: it goes on until all rows have ended, and keeps those that have
        return [replace(goes_on, power=None, notes=x.notes) if x.kind == "whole" else x for x in carry]
    if goes_on.kind == "extreme":
        note = Note.at(eqn, "a loop that ends when all rows of a block have ended", certain=False)
        return [x.noted(note) if x.kind != "whole" else x for x in carry]
    if goes_on.kind == "coupled":  # its notes say by what, and whether that is certain
        return [coupled([goes_on, *carry])] * len(carry)
    if goes_on.kind != "whole":
        return [mixed(eqn, [goes_on, *carry], "a loop whose end depends on")] * len(carry)
    return carry


def _settled(eqn: Any, carry: list[Value], body: Any, over_rows: bool) -> tuple[list[Value], list[Value]]:
    """A loop's carry as it is in any step, and the outputs of the body then."""
    unknown = {"scalar": None, "counts": None, "eye": None, "valid": None, "root": None, "pairs": None}
    carry, outs = [replace(x, **unknown) for x in carry], []
    for _ in range(_ROUNDS):
        outs = body(carry)
        new = [_carried(eqn, old, out, over_rows) for old, out in zip(carry, outs, strict=False)]
        if new == carry:
            return carry, outs
        carry = new
    return [coupled([x], Note.at(eqn, "a loop that jaxpar cannot follow", certain=False)) for x in carry], outs


def _carried(eqn: Any, old: Value, out: Value, over_rows: bool) -> Value:
    if over_rows and out.kind == "rows" and not out.span and old.kind != "coupled":
        # One row in each step: they are added up, or nothing but the last one would be left.
        out = Value("sum", power=out.power, notes=out.notes)
    if old.kind == "rows" and out.kind == "whole" and not out.zero:
        return old.noted(*out.notes)
    joined = combine(eqn, [old, out]) if old.kind != out.kind or old.kind == "whole" else out
    if old.kind == out.kind == "sum":
        joined = replace(old, power=old.power if old.power == out.power else None)
    if old.kind == out.kind == "rows" and (old.place != out.place):
        joined = combine(eqn, [old, out])
    joined = replace(joined, scalar=None, counts=None, columns=frozenset(), eye=None, valid=None, root=None, pairs=None)
    return joined.noted(*old.notes, *out.notes)


@rule("scan", table=ALWAYS)
def _scan(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Sequence[Value]:
    parts, other = jx.scan_parts(eqn), jx.scan_parts(twin) if twin is not None else None
    n, k = len(parts.consts), len(parts.carry)
    consts, init, xs = ins[:n], list(ins[n : n + k]), ins[n + k :]
    over = [x for x in xs if x.kind == "rows" and 0 in x.dims]
    slices = [_step(x, shape[1:]) for x, shape in zip(xs, shapes(eqn)[n + k :], strict=True)]
    body = lambda carry: replace(r, looped=True).inner(
        parts.body, other.body if other else None, [*consts, *carry, *slices]
    )
    carry, outs = _settled(eqn, init, body, bool(over))
    if over:  # its steps have gone through all rows
        carry = [replace(x, first=None) if x.kind == "sum" else x for x in carry]
    return [*carry, *(_stacked(eqn, x, over[0] if over else None) for x in outs[k:])]


def _step(x: Value, shape: Sequence[int]) -> Value:
    """A scanned value as one step sees it."""
    x = replace(x, scalar=None, counts=None, columns=frozenset(), eye=None, valid=None, root=None, pairs=None)
    if x.kind == "whole":
        return replace(x, varies=frozenset(d - 1 for d in x.varies if d))
    if x.kind != "rows":
        return x
    if 0 not in x.dims:
        return replace(x, dim=x.dim - 1)
    if x.span == 1:
        return replace(x, dim=0, span=0, outer=1, first=STEP, count=1)
    count = 1
    for d in range(x.span - 1):
        count *= shape[d]
    return replace(x, dim=0, span=x.span - 1, outer=1, count=count, first=STEP)


def _stacked(eqn: Any, x: Value, over: Value | None) -> Value:
    """What each step gives, stacked; `over` are the rows that the steps go through, if they do."""
    if x.kind == "whole":
        return replace(x, varies=frozenset({0, *(d + 1 for d in x.varies)}), scalar=None, counts=None, eye=None)
    x = replace(x, valid=None, root=None, pairs=None)
    if x.kind != "rows":
        return x
    if x.first != STEP:
        return replace(x, dim=x.dim + 1) if over is None else coupled([x], Note.at(eqn, "rows in a scan over rows"))
    if over is None or x.dim != 0 or x.outer != 1:
        return coupled([x], Note.at(eqn, "a scan over rows that turns them", certain=False))
    return replace(x, span=x.span + 1, outer=over.outer, count=over.count, first=over.first)


# -- collectives -------------------------------------------------------------------------------------------------------


@rule(*jx.REDUCTIONS, "reduce_scatter", "all_to_all", "ppermute", "pbroadcast", table=ALWAYS)
def _collective(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Sequence[Value] | None:
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    over = {axes} if isinstance(axes, str) else set(axes)
    if not over & r.axes:
        return list(ins)
    if eqn.primitive.name not in jx.REDUCTIONS or not r.axes <= over:
        note = Note.at(eqn, f"{eqn.primitive.name} over some of the axes that spread rows", certain=False)
        return [coupled([x], note) for x in ins]
    return [_of_all(x, len(getattr(v.aval, "shape", ()))) for x, v in zip(ins, eqn.outvars, strict=True)]


def _of_all(x: Value, ndim: int) -> Value:
    """What is the same on all replicas: it was reduced over, or gathered from, all rows."""
    notes = frozenset() if x.kind in ("sum", "extreme") else x.notes
    return Value(power=x.power, varies=frozenset(range(ndim)), notes=notes)


@rule("axis_index", table=ALWAYS)
def _axis_index(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Value:
    return Value(power=None)
