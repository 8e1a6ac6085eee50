"""Coupled values that come apart again, so that rows know nothing of each other in the end.

- The root of a sum over rows, squared: `jnp.linalg.norm(x) ** 2`.
- Products of each row with each row, of which only the diagonal is used: `jnp.trace(x @ y.T)`.

Until then such a value is coupled, and has in `root` or `pairs` what it may still become.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from ..program.factors import ELEMENTWISE
from .elementwise import scaled
from .reader import APART, RULES, Reader, rule, shape_of, shapes
from .shapes import along, without
from .values import Pairs, Value, coupled, product_power

_SCALES = ("mul", "div", "neg", "convert_element_type", "copy", "stop_gradient")
_SHAPES = ("broadcast_in_dim", "expand_dims", "reshape", "squeeze", "transpose")


@rule(*ELEMENTWISE, *_SCALES, "add", "sub", "square", "select_n", table=APART)
def _elementwise(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Value | None:
    name, held = eqn.primitive.name, [x for x in ins if x.kind != "whole"]
    if _squares(eqn, ins):
        return held[0].root
    if len(held) > 1 or not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact):
        return None
    (x,) = held
    if x.root is not None:
        root, others = x.root, [y for y in ins if y is not x]
        if name not in _SCALES or (name == "div" and ins[0] is not x):
            return None
        for _ in range(2):  # the square of c times a root is c times c times the sum
            root = scaled(r, eqn, root, others[0], -1 if name == "div" else 1) if others else root
        return replace(coupled(ins), root=root)
    assert x.pairs is not None
    own, other, alone = x.pairs
    dims = {own.dim, other}
    if any(set(y.eye or ()) == dims for y in ins):
        on = name == "mul" or (name == "select_n" and ins[0].eye and ins[1].zero and ins[2] is x)
        return replace(coupled(ins), pairs=Pairs(own, other, True)) if on else None
    if any(y.varies & dims for y in ins if y is not x) or name not in RULES or (alone and name not in _SCALES):
        return None
    found = RULES[name](r, eqn, twin, [own if y is x else y for y in ins])
    if not isinstance(found, Value) or found.kind != "rows":
        return None
    return replace(coupled(ins), pairs=Pairs(found, other, alone))


def _squares(eqn: Any, ins: Sequence[Value]) -> bool:
    """Whether it is the square of a root."""
    name, x = eqn.primitive.name, ins[0]
    if x.root is None:
        return False
    if name == "mul":
        return eqn.invars[0] is eqn.invars[1]
    exponent = ins[1].scalar if name == "pow" else eqn.params.get("y")
    return name == "square" or (name in ("integer_pow", "pow") and exponent == 2)


@rule(*_SHAPES, table=APART)
def _shape(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Value | None:
    (x, *_), name = ins, eqn.primitive.name
    if x.root is not None:  # has no rows any more
        return x
    if name != "transpose" or x.pairs is None:
        return None
    order = list(eqn.params["permutation"])
    own = along(eqn, x.pairs.own, [order.index(d) for d in range(len(order))])
    return replace(x, pairs=x.pairs._replace(own=own, other=order.index(x.pairs.other)))


@rule("reduce_sum", table=APART)
def _sum(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Value | None:
    """Over the rows that a diagonal has only zeros beside, or over both."""
    ((x,), (shape,)), axes = (ins, shapes(eqn)), [int(d) for d in eqn.params["axes"]]
    if x.pairs is None or not x.pairs.alone or x.pairs.own.first is not None:
        return None
    own, other, _ = x.pairs
    growth = r.growth(eqn, twin, [(0, d) for d in axes if d not in (own.dim, other)])
    found = replace(own, power=product_power(own.power, growth))
    gone = {own.dim, other} & set(axes)
    if len(gone) == 2:
        size = math.prod(shape[d] for d in axes if d != other)
        return Value("sum", power=found.power, size=size, notes=own.notes)
    if not gone:
        return None
    kept = replace(found, dim=own.dim if other in gone else other)
    return along(eqn, kept, without(len(shape), axes))


@rule("gather", table=APART)
def _gather(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Value | None:
    """At indices that count along both dims."""
    (x, at), numbers = ins, eqn.params["dimension_numbers"]
    if x.pairs is None or at.kind != "whole" or at.counts is None:
        return None
    counted = {d for column, d in enumerate(numbers.start_index_map) if column in at.columns}
    if not {x.pairs.own.dim, x.pairs.other} <= counted & {*numbers.collapsed_slice_dims}:
        return None
    batch = [d for d in range(len(shape_of(eqn))) if d not in numbers.offset_dims]
    own = replace(x.pairs.own, dim=batch[at.counts], columns=frozenset())
    return own if shape_of(eqn)[own.dim] == own.count else None
