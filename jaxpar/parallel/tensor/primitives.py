"""Rules of primitives whose equations run on the parts, where some of their inputs are split.

A rule receives the localiser, the equation and its inputs. For each output, it returns the rank's value and the dim
along which that is split (None: whole). It returns None if the inputs have to be gathered. Most rules follow from the
factors of the equation (`program/factors.py`): the dims of inputs and outputs that run over the same index.

    [B, T, D] + [D]     factor D: dim 2 of the first input, dim 0 of the second, dim 2 of the output
    rank's part         [B, T, D/n] + [D/n]  ->  [B, T, D/n]
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
    """Return a decorator that registers a function in a table, as the rule of the primitives that it names."""

    def rule(*names: str) -> Callable[[Any], Any]:
        def register(fun: Any) -> Any:
            rules.update(dict.fromkeys(names, fun))
            return fun

        return register

    return rule


rule = registering(RULES)


def shape_of(eqn: Any) -> tuple[int, ...]:
    """Return the shape of an equation's first output."""
    return eqn.outvars[0].aval.shape


def split_factor(eqn: Any, inputs: Sequence[LocalValue], weights: bool = False) -> Factor | None:
    """Return the factor along which an equation is split; None if no factor has the split dim.

    Where operands are split along several factors, the split of an activation comes before the split of a parameter.
    With `weights`, parameters come first, and larger operands before smaller ones.
    """
    split_inputs = [i for i, x in enumerate(inputs) if x.dim is not None]
    # Among operands of one kind, `-i` prefers the first.
    leading = max(
        split_inputs, key=lambda i: (inputs[i].weight == weights, math.prod(inputs[i].shape) if weights else -i)
    )
    return next((f for f in factors.of(eqn) if f.ins[leading] == inputs[leading].dim), None)


def follow(localiser: Localiser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """Run the equation on the parts; None if it reduces the split dim."""
    factor = split_factor(eqn, inputs)
    return None if factor is None or factor.reduced else on_parts(localiser, eqn, inputs, factor)


@rule(BY_FACTORS)
def _follow_or_sum(localiser: Localiser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """Run the equation on the parts; where it sums over the split dim, all-reduce its results."""
    factor = split_factor(eqn, inputs)
    # Other reductions, a maximum or a product, do not add up over ranks.
    if factor is None or factor.reduced not in ("", "sum"):
        return None
    local_outputs = on_parts(localiser, eqn, inputs, factor)
    if local_outputs is None or not factor.reduced:
        return local_outputs
    return [(localiser.total(value), None) for value, _ in local_outputs]


def on_parts(localiser: Localiser, eqn: Any, inputs: Sequence[LocalValue], factor: Factor) -> Found | None:
    """Run the equation on the parts of inputs that have the factor, and on the other inputs as whole values.

    Returns:
      The local outputs; None if the ranks do not divide the groups of a grouped equation, such as a convolution.
    """
    if factor.grouped and eqn.params[factor.grouped] % localiser.ranks:
        return None
    values = [
        localiser.entered(x) if d is None else localiser.part(x, d) for x, d in zip(inputs, factor.ins, strict=True)
    ]
    # Parameters that name sizes, such as the shape of a broadcast, must name the sizes of the parts.
    changes = factor.params(localiser.local) if factor.params else {}
    return list(zip(jx.bind(eqn, values, **changes), factor.outs, strict=True))


@rule(*having("separate"))
def _separate(localiser: Localiser, eqn: Any, inputs: Sequence[LocalValue]) -> Found:
    """Run an equation that treats every input separately, such as a collective over other axes than `tensor`."""
    return [(value, x.dim) for value, x in zip(jx.bind(eqn, [x.value for x in inputs]), inputs, strict=True)]


@rule("sharding_constraint")
def _constraint(localiser: Localiser, eqn: Any, inputs: Sequence[LocalValue]) -> Found:
    """Drop the constraint: it refers to the model's own mesh, which has no meaning in the program of one rank."""
    (x,) = inputs
    return [(x.value, x.dim)]


@rule("reshape")
def _reshape(localiser: Localiser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """Keep a split dim as the outermost of the dims into which it is divided, or with which it is merged."""
    x, *_ = inputs
    factor, shape = split_factor(eqn, inputs), shape_of(eqn)
    if factor is None:
        return None
    (dim,) = factor.outs
    assert dim is not None  # a reshape sums nothing
    # A split that a rule asked for must give whole heads; any other split is gathered instead.
    # The last dim of an activation is divided in two: [.., H * h] -> [.., H, h].
    divides_heads = x.origin and not x.weight and dim == x.dim == len(x.shape) - 1 == len(shape) - 2
    if shape[dim] % localiser.ranks and divides_heads:
        raise ValueError(
            f"tensor={localiser.ranks} does not divide {shape[dim]}: {list(x.shape)}, whose dim {x.dim} is split "
            f"because of {x.origin}, becomes {list(shape)} at {jx.where(eqn)}, and whole heads (or groups) belong to a "
            f"rank; use a tensor= that divides {shape[dim]}, or leave the leaf whole: rules={{{x.origin!r}: None}}"
        )
    return None if shape[dim] % localiser.ranks else on_parts(localiser, eqn, inputs, factor)
