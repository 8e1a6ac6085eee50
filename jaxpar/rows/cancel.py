"""Coupling that cancels, so that rows know nothing of each other in the end.

- The root of a sum over rows, squared: `jnp.linalg.norm(x) ** 2`.
- Rows with rows of which only the diagonal is used: `jnp.trace(x @ y.T)`.

Until then such a value is coupled, and has in `root` or `pairs` what it may still become.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..program import primitives
from .generic import LINEAR, exponent
from .labels import Labels
from .reader import CANCEL, RULES, PrimitiveRule, Reader, rule, shapes
from .values import PICKS, Pairs, Value, coupled


@rule("", table=CANCEL)
def _cancelled(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Sequence[Value] | Value:
    name, held = eqn.primitive.name, [x for x in ins if x.kind != "whole"]
    x, *more = held
    if name == "gather" and x is ins[0] and not more and ins[1].number is None:  # they may go back to where they were
        notes = {replace(n, certain=False) if n.what == PICKS else n for n in x.notes}
        return replace(coupled(ins), notes=ins[1].notes.union(notes))
    if x.inner is not None:
        if name == "square" or exponent(eqn, ins) == 2 or (name == "mul" and eqn.invars[0] is eqn.invars[1]):
            return x.inner
        if more or not _scales(eqn) or (name == "div" and ins[0] is not x):
            return coupled(ins)
        root = x.inner
        for _ in range(2):  # the square of c times a root is c times c times the sum
            root = _only(_rule(name)(r, eqn, twin, [root if y is x else y for y in ins]))
        return replace(coupled(ins), inner=root)
    if more or x.pairs is None or len(eqn.outvars) > 1:
        return coupled(ins)
    own, other, alone = x.pairs
    if alone and name == "reduce_sum":
        return _of_diagonal(r, eqn, twin, x)
    if alone and name not in LINEAR | {"mul", "div"}:
        return coupled(ins)
    mask = _mask(eqn, ins, ins.index(x))
    if mask is not None and not mask[np.broadcast_to(own.at.array != other.array, mask.shape)].any():
        return replace(coupled(ins), pairs=Pairs(own, other, True))
    rows = [replace(own, at=own.at), replace(own, at=other)]
    one, two = (_only(_rule(name)(r, eqn, twin, [y if z is x else z for z in ins])) for y in rows)
    if (one.kind, two.kind) != ("rows", "rows"):
        return coupled(ins)
    return one.noted(*two.notes) if one.at == two.at else replace(coupled(ins), pairs=Pairs(one, two.at, alone))


def _scales(eqn: Any) -> bool:
    """Whether an equation multiplies its first operand by numbers, or moves its elements."""
    known = primitives.of(eqn)
    alone = known.moves or known.view or (known.elementwise and known.linear == "all")
    return alone if len(eqn.invars) == 1 else known.elementwise and known.linear in ("each", "first")


def _rule(name: str) -> PrimitiveRule:
    return RULES.get(name, RULES[""])


def _only(outs: Sequence[Value] | Value) -> Value:
    return outs if isinstance(outs, Value) else outs[0]


def _mask(eqn: Any, ins: Sequence[Value], at: int) -> np.ndarray | None:
    """What a product with known numbers, or a choice between it and zeros, keeps of an operand."""
    name, shape = eqn.primitive.name, shapes(eqn)[at]
    if name == "mul" and (number := ins[1 - at].number) is not None:
        return np.broadcast_to(number.array, shape) != 0
    if name == "select_n" and (number := ins[0].number) is not None:
        zero = all(y.zero for i, y in enumerate(ins[1:], 1) if i != at)
        return np.broadcast_to(number.array, shape).astype(int) == at - 1 if zero else None
    return None


def _of_diagonal(r: Reader, eqn: Any, twin: Any, x: Value) -> Value:
    """The sum of what is 0 but for rows with themselves: over the dim that others have, over both, or over neither."""
    assert x.pairs is not None
    own, other, _ = x.pairs
    axes = {*eqn.params["axes"]}
    growth = r.growth(eqn, twin, [(0, d) for d in axes - own.at.dims - other.dims])
    own = replace(own, power=own.power + growth)
    keep = lambda array: array.squeeze(tuple(axes)) if all(array.shape[d] == 1 for d in axes) else None
    for labels, gone in ((own.at, other.dims), (other, own.at.dims)):
        if not labels.dims & axes and gone <= axes and (at := keep(labels.array)) is not None:
            return replace(own, at=Labels(at))
    if own.at.dims | other.dims <= axes:
        return Value("sum", power=own.power, notes=own.notes)
    return coupled([x])
