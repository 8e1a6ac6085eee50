"""What the equation of each primitive becomes for one tensor rank, where some of its inputs are split.

A rule gets the rewriting, the equation and its inputs, and returns for each output the rank's value and the dim along
which that is split (None: whole). It returns None where it knows no better than to gather its inputs. Most follow from
the factors of the equation (`program/factors.py`).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from ...program import factors
from ...program import jaxpr as jx
from ...program.factors import ELEMENTWISE as ELEMENTWISE
from ...program.factors import Factor
from ...program.primitives import having
from .localiser import BY_FACTORS, Found, Localiser, LocalValue, PrimitiveRule

RULES: dict[str, PrimitiveRule] = {}


def registering(rules: dict[str, Any]) -> Callable[..., Callable[[Any], Any]]:
    """A decorator that puts a function into a table as the rule of some primitives, which it names."""

    def rule(*names: str) -> Callable[[Any], Any]:
        def register(fun: Any) -> Any:
            rules.update(dict.fromkeys(names, fun))
            return fun

        return register

    return rule


rule = registering(RULES)


def shape_of(eqn: Any) -> tuple[int, ...]:
    """The shape of its first output."""
    return eqn.outvars[0].aval.shape


def split_factor(eqn: Any, inputs: Sequence[LocalValue], weights: bool = False) -> Factor | None:
    """The factor along which an equation is split, where operands may be along several: that of an activation before
    that of a parameter; with `weights` the reverse.
    """
    split = [i for i, x in enumerate(inputs) if x.dim is not None]
    first = max(split, key=lambda i: (inputs[i].weight == weights, math.prod(inputs[i].shape) if weights else -i))
    return next((f for f in factors.of(eqn) if f.ins[first] == inputs[first].dim), None)


def follow(work: Localiser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """The equation on the parts."""
    factor = split_factor(eqn, inputs)
    return None if factor is None or factor.reduced else on_parts(work, eqn, inputs, factor)


@rule(BY_FACTORS)
def _follow_or_add(work: Localiser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """The equation on the parts; where it sums over them, its results are added up over ranks."""
    factor = split_factor(eqn, inputs)
    if factor is None or factor.reduced not in ("", "sum"):
        return None
    found = on_parts(work, eqn, inputs, factor)
    return [(work.total(value), None) for value, _ in found] if found and factor.reduced else found


def on_parts(work: Localiser, eqn: Any, inputs: Sequence[LocalValue], factor: Factor) -> Found | None:
    """The equation on the parts of what has a factor, and all of what has not."""
    if factor.grouped and eqn.params[factor.grouped] % work.ranks:
        return None
    values = [work.entered(x) if d is None else work.part(x, d) for x, d in zip(inputs, factor.ins, strict=True)]
    changes = factor.params(work.local) if factor.params else {}
    return list(zip(jx.bind(eqn, values, **changes), factor.outs, strict=True))


@rule(*having("separate"))
def _each(work: Localiser, eqn: Any, inputs: Sequence[LocalValue]) -> Found:
    """Every input by itself; over other axes than `tensor`."""
    return [(value, x.dim) for value, x in zip(jx.bind(eqn, [x.value for x in inputs]), inputs, strict=True)]


@rule("sharding_constraint")
def _constraint(work: Localiser, eqn: Any, inputs: Sequence[LocalValue]) -> Found:
    """What a model asks of a mesh of its own says nothing here."""
    (x,) = inputs
    return [(x.value, x.dim)]


@rule("reshape")
def _reshape(work: Localiser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """A split dim stays split as the outermost of the dims that it becomes, or that it is merged with."""
    x, *_ = inputs
    factor, shape = split_factor(eqn, inputs), shape_of(eqn)
    if factor is None:
        return None
    (dim,) = factor.outs
    assert dim is not None  # a reshape sums nothing
    heads = x.origin and not x.weight and dim == x.dim == len(x.shape) - 1 == len(shape) - 2
    if shape[dim] % work.ranks and heads:
        raise ValueError(
            f"tensor={work.ranks} does not divide {shape[dim]}: {list(x.shape)}, whose dim {x.dim} is split because of "
            f"{x.origin}, becomes {list(shape)} at {jx.where(eqn)}, and whole heads (or groups) belong to a rank; use "
            f"a tensor= that divides {shape[dim]}, or leave the leaf whole: rules={{{x.origin!r}: None}}"
        )
    return None if shape[dim] % work.ranks else on_parts(work, eqn, inputs, factor)
