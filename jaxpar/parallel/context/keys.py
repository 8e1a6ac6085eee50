"""Which of two split operands of a product has the keys: the one along whose positions the scores are added up first,
by a softmax or by the product with the values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ...jaxprs import jaxpr as jx
from ..tensor.primitives import ELEMENTWISE

Sides = dict[int, int]  # dim -> which operand's positions it has
_SAME = frozenset((*ELEMENTWISE, "optimization_barrier", "reduce_precision"))


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
        inner = next((eqn.params[k] for k in ("jaxpr", "call_jaxpr", "fun_jaxpr") if k in eqn.params), None)
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
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
        contracted, _ = params["dimension_numbers"]
        mixed = [(i, d) for i, dims in enumerate(contracted) for d in dims]
    elif name.startswith(("reduce_", "arg")) and "axes" in params:
        mixed = [(0, d) for d in params["axes"]]
    else:
        mixed = [(0, params[k]) for k in ("axis", "dimension") if name.startswith(("cum", "sort")) and k in params]
    return next((sides[i][d] for i, d in mixed if d in sides[i]), None)


def _moved(eqn: Any, out: Any, sides: Sequence[Sides]) -> Sides:
    """Where the positions are in an output of an equation that leaves them apart."""
    name, params, first = eqn.primitive.name, eqn.params, sides[0]
    shape = getattr(out.aval, "shape", ())
    if name in _SAME:
        found: Sides = {}
        for v, x in zip(eqn.invars, sides, strict=True):
            found.update((d, side) for d, side in x.items() if d < len(shape) and v.aval.shape[d] == shape[d])
        return found
    if name == "transpose":
        return {params["permutation"].index(d): side for d, side in first.items()}
    if name == "broadcast_in_dim":
        return {params["broadcast_dimensions"][d]: side for d, side in first.items()}
    if name in ("squeeze", "reshape"):
        before = eqn.invars[0].aval.shape
        place = lambda d: next(
            (k for k, n in enumerate(shape) if n == before[d] and math.prod(shape[:k]) == math.prod(before[:d])), None
        )
        return {k: side for d, side in first.items() if (k := place(d)) is not None}
    if name.startswith("reduce_") and "axes" in params:
        return {d - sum(a < d for a in params["axes"]): side for d, side in first.items()}
    return {}
