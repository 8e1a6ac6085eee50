"""Which values a forward saves for its backward: products and sums are kept, elementwise values rematerialised.

JAX's derivatives save every operand that they read. Of `silu(x W) * (x V)` that is six arrays, all of which follow,
element by element, from the two products; of a norm it is the input, three times. They are most of a layer's
activations, and to write and read them takes longer than to compute them again, since compilers fuse such operations
with what reads them. What operators with backwards of their own save is counted by Korthikanti et al. 2022,
arXiv:2205.05198, section 4.1.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from . import jaxpr as jx
from . import primitives


def cheap(eqn: Any) -> bool:
    """Whether it is elementwise or moves elements: no sum, no product of matrices, no random numbers."""
    return primitives.of(eqn).cheap


def residuals_to_save(
    eqns: Sequence[Any],
    residuals: Iterable[Any],
    known: Collection[Any],
    barred: Collection[Any],
    cheap: Callable[[Any], bool] = cheap,
) -> tuple[list[Any], list[Any]]:
    """Of the variables that a backward reads, those to keep; and the equations that make the others of these.

    `known` variables are there anyway. Where a value follows from others that are smaller together, these are kept in
    its place (the bfloat16 of which it is the float32, and a mean), unless one is `barred`. `cheap` equations may
    run again.
    """
    known, barred = set(known), set(barred)
    made = {v: eqn for eqn in eqns if cheap(eqn) and not eqn.effects for v in eqn.outvars}
    residuals = list(residuals)
    keep = dict.fromkeys(v for v in residuals if not jx.is_literal(v) and v not in known)
    for eqn in reversed(eqns):
        for result in (v for v in eqn.outvars if v in keep and v in made):
            needed = _instead(result, made, lambda v: v in known or v in keep, barred)
            if needed is not None:
                del keep[result]
                keep.update(needed)
    return list(keep), jx.needed(eqns, residuals, {*keep, *known})


def _instead(
    result: Any, made: dict[Any, Any], there: Callable[[Any], bool], barred: Collection[Any]
) -> dict[Any, None] | None:
    """What to keep in place of `result`, beside what is `there`, for it to be computed again: its operands, or theirs,
    and so on, whichever are smallest; None where none are smaller.
    """
    operands = lambda var: {v: None for v in made[var].invars if not jx.is_literal(v) and not there(v)}
    best, least = None, _bytes(result)
    cut = operands(result)
    while True:
        size = sum(map(_bytes, cut))
        if size < least and not any(v in barred for v in cut):
            best, least = cut, size
        if not any(v in made for v in cut):
            return best
        cut = {w: None for v in cut for w in (operands(v) if v in made else (v,))}


def _bytes(var: Any) -> int:
    return var.aval.size * var.aval.dtype.itemsize
