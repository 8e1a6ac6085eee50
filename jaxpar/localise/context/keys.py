"""Which of two split operands of a product has the keys: the one along whose positions the scores are added up first,
by a softmax or by the product with the values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...program import factors
from ...program import jaxpr as jx
from ...program.walk import called

Sides = dict[int, int]  # dim -> which operand's positions it has


def keys_of(eqns: Sequence[Any], product: Any, dims: Sequence[int]) -> int | None:
    """The operand that has the keys, of a product among `eqns` with the positions of either operand at these dims."""
    at = next(i for i, eqn in enumerate(eqns) if eqn is product)
    return _follow(eqns[at + 1 :], {product.outvars[0]: {dims[0]: 0, dims[1]: 1}})[0]


def _follow(eqns: Sequence[Any], known: dict[Any, Sides]) -> tuple[int | None, Mapping[Any, Sides]]:
    for eqn in eqns:
        sides = [{} if jx.is_literal(v) else known.get(v, {}) for v in eqn.invars]
        if not any(sides):
            continue
        if (hit := _summed(eqn, sides)) is not None:
            return hit, known
        inner = called(eqn)
        if inner is not None and eqn.primitive.name != "scan":
            opened, _ = jx.opened(inner)
            hit, within = _follow(opened.eqns, dict(zip(opened.invars, sides, strict=True)))
            if hit is not None:
                return hit, known
            known.update((v, within.get(w, {})) for v, w in zip(eqn.outvars, opened.outvars, strict=True)
                         if not jx.is_literal(w))  # fmt: skip
        else:
            known.update((v, _moved(eqn, v, sides)) for v in eqn.outvars)
    return None, known


def _summed(eqn: Any, sides: Sequence[Sides]) -> int | None:
    mixed = [(i, d) for f in factors.of(eqn) if f.reduced for i, d in enumerate(f.ins) if d is not None]
    mixed += [
        (0, eqn.params[k])
        for k in ("axis", "dimension")
        if eqn.primitive.name.startswith(("cum", "sort")) and k in eqn.params
    ]
    return next((sides[i][d] for i, d in mixed if d in sides[i]), None)


def _moved(eqn: Any, out: Any, sides: Sequence[Sides]) -> Sides:
    """Where the positions are in an output of an equation that leaves them apart."""
    at = list(eqn.outvars).index(out)
    pairs = [(d, f.outs[at], i) for f in factors.of(eqn) for i, d in enumerate(f.ins)]
    return {to: sides[i][d] for d, to, i in pairs if d in sides[i] and to is not None}
