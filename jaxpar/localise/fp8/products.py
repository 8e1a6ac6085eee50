"""Which products of a program are in FP8: of a layer's weights and what depends on the data."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.extend.core as jec

from ...layout.families import families
from ...program import jaxpr as jx
from ...program.dims import NOTHING, Followed, Follower, source
from ...program.primitives import PRODUCTS
from ...program.walk import CUSTOM, programs, visit
from .product import ScaledProduct, product

SMALLEST = 128  # features: a smaller product takes less time than the kernels that quantise its operands
MULTIPLE = 16  # of which cuBLASLt needs every dim of an FP8 product; XLA fills up with zeros what a rank has of it
_DATA = -2  # the mark of what depends on the batch


@dataclass(frozen=True)
class Fp8Products:
    """The products of one leaf: `count` of them in the program, a layer's body counting once; `why` they are not in
    FP8, "" where they are.
    """

    count: int
    why: str


def of_blocks(leaves: Sequence[tuple[str, Any]]) -> set[str]:
    """Of a model's leaves, each a path and its shape, those of alike blocks in a row."""
    return {leaves[i][0] for one in families(leaves, lambda path: False) for row in one.members for i in row}


def in_fp8(
    flat: jx.Flat,
    leaves: Sequence[tuple[str, bool]],
    split: Collection[tuple[int, int]],
    ranks: int,
    dtype: Any,
    axes: Mapping[str, int],
) -> tuple[jx.Flat, dict[str, Fp8Products]]:
    """A program with the products of its layers in FP8, and what became of those of each leaf, by path.

    Args:
      flat: the program of one device, whose first inputs are parameters.
      leaves: of each parameter its path, and whether it is one of alike blocks, as which one of three dims or more that
        a loop scans counts as well.
      split: (parameter, dim) that `tensor` splits, over so many `ranks`.
      dtype: the compute dtype: what the model computes in another stays.
      axes: mesh axes that the program may name.
    """
    found: dict[int, tuple[Any, Sequence[Followed]]] = {}

    def note(eqn: Any, ins: Sequence[Followed]) -> frozenset[int]:
        if eqn.primitive.name in PRODUCTS:
            found[id(eqn)] = eqn, ins
        return frozenset()

    data = Followed((), frozenset({_DATA}))
    env = dict.fromkeys(flat.invars[len(leaves) :], data)
    env |= {v: source(i, v.aval.shape) for i, v in enumerate(flat.invars[: len(leaves)])}
    Follower(note, _DATA).follow(flat.eqns, env)
    loops = [x for eqn in flat.eqns if eqn.primitive.name == "scan" for x in jx.scan_parts(eqn).xs]
    views = [view for x in loops if not jx.is_literal(x) for view in env.get(x, NOTHING).views]
    scanned = {i for i, dims in views if flat.invars[i].aval.ndim > 2 and len(dims[0]) == 1}
    closed = {id(eqn) for eqn in _within_custom(flat.eqns)}

    chosen: dict[int, ScaledProduct] = {}
    counts: dict[tuple[str, str], int] = {}
    for key, (eqn, ins) in found.items():
        sides = [side for side in (0, 1) if ins[side].views and _DATA not in ins[side].marks]
        if len(sides) != 1 or _DATA not in ins[1 - sides[0]].marks:
            continue  # attention's own, and what follows from parameters alone
        (side,) = sides
        path, how, why = leaves[ins[side].views[0][0]][0], None, ""
        if not any(leaves[i][1] or i in scanned for i, _ in ins[side].views):
            why = "of no layer of a stack or list"
        elif key in closed:
            why = "within a function with its own derivative"
        elif eqn.primitive.name != "dot_general":
            why = f"{eqn.primitive.name} has no FP8 kernel in XLA"
        else:
            how, why = _product(eqn, ins[side], side, split, ranks, dtype, path)
        if how is not None:
            chosen[key] = how
        counts[path, why] = counts.get((path, why), 0) + 1
    made = {key: _equation(found[key][0], how, axes) for key, how in chosen.items()}
    eqns = tuple(_replaced(eqn, made) for eqn in flat.eqns)
    said = {path: Fp8Products(n, why) for (path, why), n in sorted(counts.items(), key=lambda one: bool(one[0][1]))}
    return jx.Flat(flat.constvars, flat.consts, flat.invars, flat.outvars, eqns), said


def _within_custom(eqns: Sequence[Any], inside: bool = False) -> Iterator[Any]:
    for eqn in eqns:
        if inside:
            yield eqn
        for jaxpr in programs(eqn):
            yield from _within_custom(jaxpr.eqns, inside or eqn.primitive.name in CUSTOM)


def _product(
    eqn: Any, weight: Followed, side: int, split: Collection[tuple[int, int]], ranks: int, dtype: Any, path: str
) -> tuple[ScaledProduct | None, str]:
    """How an equation is in FP8, or why it is not."""
    numbers: Any = tuple(tuple(tuple(dims) for dims in pair) for pair in eqn.params["dimension_numbers"])
    sums, batch = numbers[0][side], numbers[1][side]
    w = eqn.invars[side].aval
    kept = [d for d in range(w.ndim) if d not in (*sums, *batch)]
    over = lambda dims: any((p.source, p.dim) in split for _, rows in weight.views for d in dims for p in rows[d])
    parts = over(sums), over(kept)
    k, n = (
        math.prod(w.shape[d] for d in dims) * (ranks if cut else 1)
        for dims, cut in zip((sums, kept), parts, strict=True)
    )
    if wide := [v.aval.dtype.name for v in eqn.invars if v.aval.dtype != dtype]:
        return None, f"the model computes them in {wide[0]}"
    if min(k, n) < SMALLEST or k % MULTIPLE or n % MULTIPLE:
        return None, f"{k} x {n} features: FP8 needs multiples of {MULTIPLE}, from {SMALLEST}"
    return ScaledProduct(numbers, eqn.outvars[0].aval.dtype, side, *parts, path), ""


def _equation(eqn: Any, how: ScaledProduct, axes: Mapping[str, int]) -> Any:
    flat, _ = jx.trace(partial(product, how), *(v.aval for v in eqn.invars), axes=dict(axes))
    (made,) = flat.eqns
    return made.replace(invars=eqn.invars, outvars=eqn.outvars, source_info=eqn.source_info)


def _replaced(eqn: Any, made: Mapping[int, Any]) -> Any:
    """An equation with those inside it that are `made` anew, by their ids."""
    if id(eqn) in made:
        return made[id(eqn)]
    if not any(id(one) in made for one, _ in visit([eqn])):
        return eqn
    effects = set(eqn.effects)

    def inside(value: Any) -> Any:
        if type(value) is tuple:  # of branches, and no record
            return tuple(map(inside, value))
        if not isinstance(value, jec.Jaxpr | jec.ClosedJaxpr):
            return value
        jaxpr, consts = jx.opened(value)
        eqns = [_replaced(one, made) for one in jaxpr.eqns]
        within = jaxpr.effects.union(*(one.effects for one in eqns))
        effects.update(within)
        jaxpr = jaxpr.replace(eqns=eqns, effects=within)
        return jec.ClosedJaxpr(jaxpr, consts) if hasattr(value, "consts") else jaxpr

    params = {name: inside(x) for name, x in eqn.params.items()}
    return eqn.replace(params=params, effects=frozenset(effects))
