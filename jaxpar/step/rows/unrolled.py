"""Python loops over rows, `[f(x[i]) for i in range(n)]`, as one computation of all rows.

What such a loop writes out is another program for twice the rows, and the two cannot be read side by side. The program
that is made of it here computes the same, but for the order of sums: equations that are the same in all rows, of what
is the row's own and of what all rows read, become one under `vmap`, and so does what stacks or adds up their results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...program import jaxpr as jx
from ...program.equal import differing

Result = tuple[int, int]  # which equations are alike, and which of their results
Own = Callable[[Any], tuple[Result, int] | None]  # of an atom: the result that it is, and of which row


class _Alike(NamedTuple):
    """Equations that are alike, of each row in order. An operand is a `Result` in the same row, a variable that all
    rows read, or None for literals. Equations without operands take the rows of an array.
    """

    operands: tuple[Any, ...]
    eqns: list[Any]

    def run(self, env: jx.Environment[Any], whole: Mapping[Any, Any]) -> list[Any]:
        """Their results [rows, ...], of those of others and what all read."""
        first, ins, axes = self.eqns[0], [], []
        if not self.operands:
            x, unstacked = env[first.invars[0]], first.primitive.name == "unstack"
            return [jnp.moveaxis(x, first.params["axis"], 0) if unstacked else jnp.expand_dims(x, 1)]
        for j, (atom, at) in enumerate(zip(first.invars, self.operands, strict=True)):
            own = np.stack([eqn.invars[j].val for eqn in self.eqns]).astype(atom.aval.dtype) if at is None else None
            own = whole.get(at) if own is None or (own == own[0]).all() else own
            ins.append(env[atom] if own is None else own)
            axes.append(None if own is None else 0)
        return jax.vmap(lambda *ins: jx.bind(first, ins), axes, axis_size=len(self.eqns))(*ins)


def loops_over_rows(flat: jx.Flat, rows: int, axes: Mapping[str, int]) -> jx.Flat:
    """A program in which what a loop over so many rows writes out is one computation. It may name these mesh axes."""
    alike: list[_Alike] = []
    groups: dict[Any, list[int]] = {}  # those with the same primitive and operands
    place: dict[int, tuple[int, int]] = {}  # the id of an equation -> which are alike, and its row
    member: dict[Any, tuple[Result, int]] = {}
    sums: dict[Any, tuple[Result, int, Any]] = {}  # variable -> as `_added` says
    once: dict[Any, Any] = {}  # what no row enters, as `jnp.zeros(3)`, is made again for each: variable -> the first
    makers: dict[Any, list[Any]] = {}
    own: Own = lambda atom: None if jx.is_literal(atom) else member.get(atom)
    for eqn in flat.eqns:
        if eqn.primitive.name == "unstack" and len(eqn.outvars) == rows:  # `for row in x`, from jax 0.11 on
            place[id(eqn)] = len(alike), 0
            member |= {v: ((len(alike), 0), i) for i, v in enumerate(eqn.outvars)}
            alike.append(_Alike((), [eqn] * rows))
            continue
        if (added := _added(eqn, own, sums)) is not None:
            sums[eqn.outvars[0]] = added
        ins = list(map(own, eqn.invars))
        i, *others = {x[1] for x in ins if x} or {_row(eqn, rows)}
        if i is None:
            reads = [str(a) if jx.is_literal(a) else once.get(a, a) for a in eqn.invars]
            known = makers.setdefault((eqn.primitive, *reads), [])
            first = next((e for e in known if not eqn.effects and differing(e, eqn) is None), eqn)
            once.update(zip(eqn.outvars, first.outvars, strict=True))
            known += [eqn] if first is eqn else []
        if i is None or others:
            continue
        operands = [
            x[0] if x else None if jx.is_literal(a) else once.get(a, a) for x, a in zip(ins, eqn.invars, strict=True)
        ]
        operands = tuple(operands) if any(ins) else ()
        same = groups.setdefault((eqn.primitive, operands or eqn.invars[0]), [])
        if i == 0:
            same.append(len(alike))
            alike.append(_Alike(operands, []))
        for k in same:
            if len(alike[k].eqns) == i and (i == 0 or not operands or differing(alike[k].eqns[0], eqn) is None):
                alike[k].eqns.append(eqn)
                place[id(eqn)] = k, i
                member.update({v: ((k, j), i) for j, v in enumerate(eqn.outvars)})
                break
    complete = {k for k, one in enumerate(alike) if len(one.eqns) == rows}

    def fun(*values: Any) -> list[Any]:
        whole: dict[Any, Any] = {}  # the results of those that are complete, [rows, ...]
        row = lambda v: whole[member[v][0]][member[v][1]]
        env = jx.Environment[Any].of(flat, values, lambda v: jx.array_of(v) if jx.is_literal(v) else row(v))
        for eqn in flat.eqns:
            k, i = place.get(id(eqn), (-1, 0))
            total, last, start = sums.get(eqn.outvars[0], (None, 0, None))
            with jx.source_info_of(eqn):
                if k in complete:
                    whole |= {(k, j): x for j, x in enumerate(alike[k].run(env, whole))} if i == 0 else {}
                elif (parts := _stacked(eqn, own, rows)) in whole:
                    at = eqn.params.get("dimension", eqn.params.get("axis"))
                    env[eqn.outvars[0]] = jnp.moveaxis(whole[parts], 0, at).reshape(eqn.outvars[0].aval.shape)
                elif total in whole and last == rows - 1:
                    env[eqn.outvars[0]] = whole[total].sum(0) + (0 if start is None else env[start])
                else:
                    env.store(eqn, jx.bind(eqn, env.read(eqn.invars)))
        return env.read(flat.outvars)

    if not complete:
        return flat
    made, _ = jx.trace(fun, *(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in flat.invars), axes=dict(axes))
    return dataclasses.replace(made, eqns=jx.live(made.eqns, made.outvars))


def _row(eqn: Any, rows: int) -> int | None:
    """Which row of an array a slice is."""
    if eqn.primitive.name != "slice":
        return None
    start, limit, shape = eqn.params["start_indices"], eqn.params["limit_indices"], eqn.invars[0].aval.shape
    whole = (
        shape[0] == rows and limit[1:] == shape[1:] and not any(start[1:]) and {*(eqn.params["strides"] or ())} <= {1}
    )
    return start[0] if whole and limit[0] == start[0] + 1 else None


def _stacked(eqn: Any, own: Own, rows: int) -> Any:
    """Whose results an equation puts together, those of all rows in order."""
    parts = list(map(own, eqn.invars)) if eqn.primitive.name in ("concatenate", "stack") else [None]
    return parts[0][0] if parts[0] and parts == [(parts[0][0], i) for i in range(rows)] else None


def _added(eqn: Any, own: Own, sums: Mapping[Any, tuple[Any, int, Any]]) -> tuple[Any, int, Any] | None:
    """Of an addition of a row's result to those before it: whose, which row's, and what the first was added to."""
    for before, atom in (eqn.invars, eqn.invars[::-1]) if eqn.primitive.name == "add" else ():
        here, last = own(atom), own(before)
        if here and here[1] == 0 and not last:
            return here[0], 0, before
        known = [(*last, None)] if last and last[1] == 0 else []
        known += [sums[before]] if not jx.is_literal(before) and before in sums else []
        for whose, i, start in known if here else ():
            if here == (whose, i + 1):
                return whose, i + 1, start
    return None
