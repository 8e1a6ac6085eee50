"""What loops make of rows. A scan over rows is read with all its steps at once, as `jax.vmap` makes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.extend.core as jec
import numpy as np

from ..program import jaxpr as jx
from .arithmetic import joined
from .calls import chosen
from .labels import NOWHERE, Labels
from .numbers import Number
from .reader import ALWAYS, Reader, rule
from .values import FROM_ALL, ODD, Note, Value, coupled, mixed

_ROUNDS = 12


def _settled(eqn: Any, carry: Sequence[Value], body: Callable[[list[Value]], list[Value]], join: Any) -> list[Value]:
    """The results of a loop's body, on a carry as it is in any step: that comes first."""
    now, outs = list(carry), list[Value]()
    for step in range(_ROUNDS):
        outs = body(now)
        new = [join(i, old, out) for i, (old, out) in enumerate(zip(now, outs, strict=False))]
        if step and new == now:  # the first step knows what the carry is
            return [*now, *outs]
        now = new
    note = Note.at(eqn, "a loop that jaxpar cannot follow", certain=False)
    return [coupled([x], note) for x in (*now, *outs)]


def _kept(body: Any, first: int, carry: int) -> list[bool]:
    """Which of a loop's carries each step gives on as they are."""
    opened, _ = jx.opened(body)
    return [a is b for a, b in zip(opened.invars[first : first + carry], opened.outvars[:carry], strict=True)]


def _counted(eqn: Any, x: Value) -> Value:
    """What a loop changes in each of as many steps as depend on the rows."""
    return x.plain(power=ODD).noted(Note.at(eqn, "a loop of as many steps as a block has rows, or so", certain=False))


@rule("while", table=ALWAYS)
def _while(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> list[Value]:
    p, q = eqn.params, twin.params if twin is not None else {}
    n, k = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
    kept, inside = _kept(p["body_jaxpr"], k - n, len(ins) - k), replace(r, looped=True)
    body = lambda carry: inside.inner(p["body_jaxpr"], q.get("body_jaxpr"), [*ins[n:k], *carry])
    carry = _settled(eqn, ins[k:], body, lambda i, old, out: old if kept[i] else joined(eqn, old, out))[: len(kept)]
    (on,) = inside.inner(p["cond_jaxpr"], q.get("cond_jaxpr"), [*ins[:n], *carry])
    changed = lambda change: [x if same else change(x) for x, same in zip(carry, kept, strict=True)]
    if on.kind == "extreme":
        note = Note.at(eqn, "a loop that ends when all rows of a block have ended", certain=False)
        return changed(lambda x: x.noted(note))
    if on.kind == "sum":
        return changed(lambda x: mixed(eqn, [on, x], "a loop whose end depends on"))
    if on.kind == "whole" and on.power and not on.keyed:
        return changed(lambda x: _counted(eqn, x).noted(*on.notes))
    return changed(
        lambda x: chosen(eqn, on, x)
    )  # of vmap, it goes on until all rows have ended, and keeps those that have


@rule("scan", table=ALWAYS)
def _scan(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> list[Value]:
    parts, other = jx.scan_parts(eqn), jx.scan_parts(twin) if twin is not None else None
    n, k = len(parts.consts), len(parts.carry)
    kept, inside = _kept(parts.body, n, k), replace(r, looped=True)
    over = any(x.kind in ("rows", "sum") and 0 in x.at.dims for x in ins[n + k :])
    if over or (other is not None and parts.length != other.length):
        return _over_rows(inside, eqn, twin, ins, kept)
    slices = [_step(x) for x in ins[n + k :]]
    body = lambda carry: inside.inner(parts.body, other and other.body, [*ins[:n], *carry, *slices])
    outs = _settled(eqn, ins[n : n + k], body, lambda i, old, out: old if kept[i] else joined(eqn, old, out))
    return [*outs[:k], *(_stacked(x) for x in outs[2 * k :])]


def _step(x: Value) -> Value:
    """A scanned value as one step sees it."""
    at = x.at if x.at is NOWHERE else Labels(x.at.array[0], x.kind == "sum")
    varies = x.varies | (x.at.dims if 0 in x.at.dims else frozenset())  # no step has the numbers of another
    known = x.number if x.scalar is not None else None
    return x.plain(varies=frozenset(d - 1 for d in varies if d), at=NOWHERE if varies != x.varies else at, number=known)


def _stacked(x: Value, differs: bool = True) -> Value:
    """What steps give, or are given; `differs`: from step to step."""
    at = x.at if x.at is NOWHERE else Labels(x.at.array[None], x.kind == "sum")
    return x.plain(varies=frozenset(d + 1 for d in x.varies) | {*range(differs)}, at=at)


def _over_rows(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value], kept: Sequence[bool]) -> list[Value]:
    """A scan over rows, or of as many steps. A carry is what each step gives on as it is; or follows from the steps
    alone, as a counter does, and differs by their place; or is a sum that each step adds to; or goes from row to row.
    """
    parts = jx.scan_parts(eqn)
    n, k = len(parts.consts), len(parts.carry)
    program, other = _at_once(eqn, r.axes), _at_once(twin, r.twin_axes) if twin is not None else None
    consts, start = r.constants(program.consts, other.consts if other is not None else ()), ins[n : n + k]
    counters = [_counter(eqn, twin, i, x) for i, x in enumerate(start)]
    carry = [
        replace(_stacked(x, not same), number=c and c[0]) for x, same, c in zip(start, kept, counters, strict=True)
    ]

    def join(i: int, old: Value, out: Value) -> Value:
        if kept[i] or counters[i] or old.kind == "running":
            return old
        return joined(eqn, old, out) if old.kind == out.kind == "whole" else Value("running")

    outs = _settled(eqn, carry, lambda now: r.run(program, other, consts, [*ins[:n], *now, *ins[n + k :]]), join)
    ends = []
    for i, (x, now, out) in enumerate(zip(start, outs, outs[k:], strict=False)):
        if kept[i]:
            ends.append(x)
        elif (counter := counters[i]) is not None:
            ends.append(r.powered(Value(number=counter[1])))
        elif now.kind == "whole":
            last = _step(now)
            ends.append(last if last.keyed else _counted(eqn, last))
        elif out.kind == "running":
            ends.append(x if out.inner is None else _summed(r, eqn, twin, i, x, out.inner))
        else:
            note = Note.at(eqn, f"carries from row to row, in a loop over them; {FROM_ALL}")
            ends.append(coupled([out], *[note] * (out.kind != "coupled")))
    note = Note.at(eqn, f"a running sum over rows, in a loop over them; {FROM_ALL}")
    return [*ends, *(coupled([x], note) if x.kind == "running" else x for x in outs[2 * k :])]


def _at_once(eqn: Any, axes: Mapping[str, int]) -> jx.Flat:
    """The program of all steps of a scan at once: consts, then carries and scanned values [steps, ...]."""
    parts = jx.scan_parts(eqn)
    n, k = len(parts.consts), len(parts.carry)
    every = [
        v.aval.update(shape=(parts.length, *v.aval.shape)) if i < k else v.aval for i, v in enumerate(eqn.invars[n:])
    ]
    over = jax.vmap(jec.jaxpr_as_fun(parts.body), (*[None] * n, *[0] * len(every)), axis_size=parts.length)
    avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (*(v.aval for v in parts.consts), *every)]
    return jx.trace(over, *avals, axes=dict(axes))[0]


def _counter(eqn: Any, twin: Any, i: int, start: Value) -> tuple[Number, Number] | None:
    """Of a carry to which each step adds the same number: what it is in each step, and in the end."""
    parts = jx.scan_parts(eqn)
    opened, _ = jx.opened(parts.body)
    made = next((e for e in opened.eqns if opened.outvars[i] in e.outvars), None)
    if start.scalar is None or parts.carry[i].aval.shape or made is None or made.primitive.name != "add":
        return None
    step, *more = [v.val for v in made.invars if jx.is_literal(v)] or [None]
    if step is None or more or opened.invars[len(parts.consts) + i] not in made.invars:
        return None
    pair = zip((eqn, twin), start.number.pair if start.number else (), strict=True)
    found = [None if e is None else first + step * np.arange(jx.scan_parts(e).length + 1) for e, first in pair]
    order = slice(None, None, -1 if parts.reverse else 1)
    each, end = zip(*((None, None) if x is None else (x[:-1][order], x[-1]) for x in found), strict=True)
    return Number(each), Number(end)


def _summed(r: Reader, eqn: Any, twin: Any, i: int, start: Value, added: Value) -> Value:
    """A carry in the end, of what each step adds, [steps, ...]."""

    def end(e: Any, axes: Mapping[str, int]) -> jx.Flat:
        aval, steps = jx.scan_parts(e).carry[i].aval, jx.scan_parts(e).length
        avals = [jax.ShapeDtypeStruct(s, aval.dtype) for s in (aval.shape, (steps, *aval.shape))]
        with jx.source_info_of(e):
            return jx.trace(lambda x, y: x + y.sum(0), *avals, axes=dict(axes))[0]

    return r.run(end(eqn, r.axes), None if twin is None else end(twin, r.twin_axes), (), [start, added])[0]
