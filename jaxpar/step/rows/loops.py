"""What loops make of rows. A scan over rows is read with all its steps at once, as `jax.vmap` makes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.extend.core as jec

from ...program import jaxpr as jx
from .arithmetic import joined
from .calls import chosen
from .labels import NOWHERE, Labels
from .numbers import Number
from .reader import ALWAYS, Reader, rule
from .values import FROM_ALL, ODD, Note, Value, coupled

_ROUNDS = 12
_ZERO = Number((0, 0))


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

    def ended(x: Value) -> Value:
        if on.kind in ("coupled", "sum"):
            notes = [replace(note, certain=False) for note in on.notes]
            return coupled([x], *notes, Note.at(eqn, "a loop that ends when all rows of a block have ended", False))
        if on.kind == "whole" and on.power and not on.keyed:
            return _counted(eqn, x).noted(*on.notes)
        return chosen(eqn, on, x)  # of vmap, it goes on until all rows have ended, and keeps those that have

    return [x if same else ended(x) for x, same in zip(carry, kept, strict=True)]


@rule("scan", table=ALWAYS)
def _scan(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> list[Value]:
    parts, other = jx.scan_parts(eqn), jx.scan_parts(twin) if twin is not None else None
    n, k = len(parts.consts), len(parts.carry)
    kept, inside = _kept(parts.body, n, k), replace(r, looped=True)
    over = any(0 in (x.at.dims if x.kind == "rows" else x.varies) for x in ins[n + k :] if x.kind in ("rows", "sum"))
    if over or (other is not None and parts.length != other.length):
        return _over_rows(inside, eqn, twin, ins, kept)
    body = lambda carry: inside.inner(parts.body, other and other.body, [*ins[:n], *carry, *map(_step, ins[n + k :])])
    outs = _settled(eqn, ins[n : n + k], body, lambda i, old, out: old if kept[i] else joined(eqn, old, out))
    return [*outs[:k], *map(_stacked, outs[2 * k :])]


def _step(x: Value) -> Value:
    """A scanned value as one step sees it."""
    at = x.at if x.at is NOWHERE else Labels(x.at.array[0])
    known = x.number if x.scalar is not None else None
    return x.plain(varies=frozenset(d - 1 for d in x.varies if d), at=at, number=known)


def _stacked(x: Value, differs: bool = True) -> Value:
    """What steps give, or are given; `differs`: what no row reaches is another from step to step."""
    at = x.at if x.at is NOWHERE else Labels(x.at.array[None])
    return x.plain(varies=frozenset(d + 1 for d in x.varies) | {*range(differs and x.kind == "whole")}, at=at)


def _over_rows(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value], kept: Sequence[bool]) -> list[Value]:
    """A scan over rows, or of as many steps. A carry is what each step gives on as it is; or what each adds to, and
    nothing else reads, of which the steps are read as if it were 0; or no row reaches it; or it goes from row to row.
    """
    parts = jx.scan_parts(eqn)
    n, k, (body, _) = len(parts.consts), len(parts.carry), jx.opened(parts.body)
    both = lambda: (_at_once(eqn, r.axes), _at_once(twin, r.twin_axes) if twin is not None else None)
    try:
        program, other = r.once(("at once", id(eqn), id(twin)), (eqn, twin), both)
    except NotImplementedError as error:  # of what has no rule for vmap, as a ragged_dot whose groups differ
        note = Note.at(eqn, f"a loop over rows that jax cannot run for all of them at once: {error}", False)
        return [coupled(ins, note)] * len(eqn.outvars)
    consts, start = r.constants(program.consts, other.consts if other is not None else ()), ins[n : n + k]
    made = [next((e for e in body.eqns if v in e.outvars), eqn) for v in body.outvars[:k]]
    added = [_adds(body, v, e) for v, e in zip(body.invars[n:], made, strict=False)]
    carry = [replace(_stacked(x, not same), number=None) for x, same in zip(start, kept, strict=True)]
    carry = [Value(number=_ZERO) if adds else x for x, adds in zip(carry, added, strict=True)]

    def join(i: int, old: Value, out: Value) -> Value:
        if kept[i] or added[i]:
            return old
        if old.kind == out.kind == "whole":
            return joined(eqn, old, out)
        if out.kind == "coupled":
            return coupled([out])
        return coupled([out], Note.at(made[i], f"carries from row to row, in a loop over them; {FROM_ALL}"))

    outs = _settled(eqn, carry, lambda now: r.run(program, other, consts, [*ins[:n], *now, *ins[n + k :]]), join)
    ends = []
    for i, (x, same, adds, now, out) in enumerate(zip(start, kept, added, outs, outs[k:], strict=False)):
        if adds:
            ends.append(_summed(r, eqn, twin, i, x, out))
        elif now.kind == "whole" and not same:
            ends.append(_step(now) if now.keyed else _counted(eqn, _step(now)))
        else:
            ends.append(x if same else now)
    return [*ends, *outs[2 * k :]]


def _adds(body: Any, carry: Any, made: Any) -> bool:
    """Whether the equation that has made a carry adds something to it, and nothing else reads either, casts aside."""
    readers = lambda v: (
        [e for e in body.eqns if any(a is v for a in e.invars)] + [None for out in body.outvars if out is v]
    )
    while len(by := readers(carry)) == 1 and by[0] is not None and by[0].primitive.name == "convert_element_type":
        carry = by[0].outvars[0]
    once = by == [made] and sum(v is carry for v in made.invars) == 1 and readers(made.outvars[0]) == [None]
    return once and made.primitive.name == "add"


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


def _summed(r: Reader, eqn: Any, twin: Any, i: int, start: Value, added: Value) -> Value:
    """Carry i in the end, of what each step adds, [steps, ...]."""

    def end(e: Any, axes: Mapping[str, int]) -> jx.Flat:
        aval, steps = jx.scan_parts(e).carry[i].aval, jx.scan_parts(e).length
        avals = [jax.ShapeDtypeStruct(s, aval.dtype) for s in (aval.shape, (steps, *aval.shape))]
        with jx.source_info_of(e):
            return jx.trace(lambda x, y: x + y.sum(0), *avals, axes=dict(axes))[0]

    return r.run(end(eqn, r.axes), None if twin is None else end(twin, r.twin_axes), (), [start, added])[0]
