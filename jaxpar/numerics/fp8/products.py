"""Which products of a program are in FP8: of a layer's weights and what depends on the data."""

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from ...backend.text import few
from ...layout.families import families
from ...parallel.tensor.edges import EDGES
from ...program import jaxpr as jx
from ...program.dims import NOTHING, Followed, Follower, source
from ...program.primitives import PRODUCTS
from ...program.walk import CUSTOM, replaced, visit
from ...strategy import Strategy
from .product import ScaledProduct, product

SMALLEST = 128  # features: a smaller product takes less time than the kernels that quantise its operands
MULTIPLE = 16  # cuBLASLt needs every dim of an FP8 product to be one; XLA fills up with zeros what a rank has of it
_DATA = -2  # the mark of what depends on the batch


def of_blocks(leaves: Sequence[tuple[str, Any]]) -> set[str]:
    """Of a model's leaves, each a path and its shape, those of alike blocks in a row."""
    return {leaves[i][0] for one in families(leaves, lambda path: False) for row in one.members for i in row}


def in_fp8(
    whole: jx.Flat, flat: jx.Flat, leaves: Sequence[tuple[str, bool]], strategy: Strategy, dtype: Any
) -> tuple[jx.Flat, dict[str, str]]:
    """A program with products in FP8; and of each leaf that has products, by path, why they are not, "" where they are.

    Args:
      whole: a loss before any axis has cut it, so that all layouts choose alike.
      flat: its program on one device; of both the first inputs are parameters.
      leaves: of each parameter its path, and whether it is one of alike blocks, as which one of three dims or more that
        a loop scans counts as well.
      dtype: the compute dtype: what the model computes in another stays.

    Raises ValueError where a part of `strategy.fp8_except` is in the path of no leaf that would be in FP8.
    """
    why, made, there = _why_not(whole, leaves, dtype, strategy.fp8_except), {}, set()
    for eqn, side, numbers in _products(flat, len(leaves))[0]:
        path = leaves[numbers[0]][0]
        if why.get(path) == "" and eqn.primitive.name == "dot_general":
            dims: Any = tuple(tuple(tuple(dims) for dims in pair) for pair in eqn.params["dimension_numbers"])
            how = ScaledProduct(dims, eqn.outvars[0].aval.dtype, side, path, strategy.fp8_scaling)
            made[id(eqn)] = _equation(eqn, how)
            there.add(path)
    eqns = tuple(replaced(flat.eqns, lambda eqn: made.get(id(eqn), eqn)))
    lost = "this layout's program has no product of it and the data that could be followed"
    why = {path: one or ("" if path in there else lost) for path, one in why.items()}
    return jx.Flat(flat.constvars, flat.consts, flat.invars, flat.outvars, eqns), why


def _why_not(flat: jx.Flat, leaves: Sequence[tuple[str, bool]], dtype: Any, but: str) -> dict[str, str]:
    found, env = _products(flat, len(leaves))
    loops = [x for eqn in flat.eqns if eqn.primitive.name == "scan" for x in jx.scan_parts(eqn).xs]
    views = [view for x in loops if not jx.is_literal(x) for view in env.get(x, NOTHING).views]
    scanned = {i for i, dims in views if flat.invars[i].aval.ndim > 2 and len(dims[0]) == 1}
    custom = (eqn for eqn, _ in visit(flat.eqns) if eqn.primitive.name in CUSTOM)
    closed = {id(one) for eqn in custom for one, _ in visit([eqn])}
    said: dict[str, str] = {}
    excepted = but.split(":") if but else []
    unmet = dict.fromkeys(excepted)
    for eqn, side, numbers in found:
        path = leaves[numbers[0]][0]
        if not any(leaves[i][1] or i in scanned for i in numbers):
            why = "of no layer of a stack or list"
        elif id(eqn) in closed:
            why = "within a function with its own derivative"
        elif eqn.primitive.name != "dot_general":
            why = f"{eqn.primitive.name} has no FP8 kernel in XLA"
        else:
            why = _unfit(eqn, side, dtype)
        for part in () if why else excepted:
            if part and fnmatchcase(f"/{path}/", f"*/{part}/*"):  # whole names of the path
                unmet.pop(part, None)
                why = f"fp8_except={part}"
        said[path] = said.get(path) or why
    if unmet:
        raise ValueError(
            f"fp8_except={but!r}: {few(list(unmet))} is in the path of no leaf whose products would be in FP8; use a "
            f"part of {few([path for path, one in said.items() if not one]) or 'a path that step.explain names'}"
        )
    return said


class _Weights(Follower):
    """Follows parameters through `tensor`'s edges too: a part of one is still of it."""

    def results(self, eqn: Any, ins: Sequence[Followed]) -> list[Followed]:
        return list(ins) if eqn.primitive.name in EDGES else super().results(eqn, ins)


def _products(flat: jx.Flat, leaves: int) -> tuple[list[tuple[Any, int, list[int]]], dict[Any, Followed]]:
    """The products of what follows from parameters and what depends on the batch: the equation, which operand is the
    first, of which parameters; and what all variables are.
    """
    found: dict[int, tuple[Any, Sequence[Followed]]] = {}

    def note(eqn: Any, ins: Sequence[Followed]) -> frozenset[int]:
        if eqn.primitive.name in PRODUCTS:
            found[id(eqn)] = eqn, ins
        return frozenset()

    env = dict.fromkeys(flat.invars[leaves:], Followed((), frozenset({_DATA})))
    env |= {v: source(i, v.aval.shape) for i, v in enumerate(flat.invars[:leaves])}
    _Weights(note, _DATA).follow(flat.eqns, env)
    products = []
    for eqn, ins in found.values():
        sides = [side for side in (0, 1) if ins[side].views and _DATA not in ins[side].marks]
        if len(sides) == 1 and _DATA in ins[1 - sides[0]].marks:
            products.append((eqn, sides[0], [i for i, _ in ins[sides[0]].views]))
    return products, env


def _unfit(eqn: Any, side: int, dtype: Any) -> str:
    """Why a product is not in FP8; "" where it may be."""
    (sums, batch), w = eqn.params["dimension_numbers"], eqn.invars[side].aval
    kept = [d for d in range(w.ndim) if d not in (*sums[side], *batch[side])]
    k, n = (math.prod(w.shape[d] for d in dims) for dims in (sums[side], kept))
    if wide := [v.aval.dtype.name for v in eqn.invars if v.aval.dtype != dtype]:
        return f"the model computes them in {wide[0]}"
    if min(k, n) < SMALLEST or k % MULTIPLE or n % MULTIPLE:
        return f"{k} x {n} features: FP8 needs multiples of {MULTIPLE}, from {SMALLEST}"
    return ""


def _equation(eqn: Any, how: ScaledProduct) -> Any:
    flat, _ = jx.trace(partial(product, how), *(v.aval for v in eqn.invars))
    (made,) = flat.eqns
    return made.replace(invars=eqn.invars, outvars=eqn.outvars, source_info=eqn.source_info)
