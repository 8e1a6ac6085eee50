"""A softmax over keys, in the spellings of JAX, Flax and by hand, on the way to a product with values."""

import itertools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...program import jaxpr as jx
from ...program import primitives
from .hidden import Hindered, Scope, ones_dropped


class Dim(NamedTuple):
    """A dim of more than one element: "t", "s" and "h" as above, ("b", n) of rows and heads, ("g", d) of groups."""

    name: Any
    size: int


Names = tuple[tuple[Dim, ...], ...]  # of each dim of a value: those that it is, merged; none of one element


@dataclass(frozen=True)
class Weights:
    """A softmax: of which scores, along which of their dims, and the equations from its result to a product; `sinks`
    are scores of no key, which are in the sum alone.
    """

    scores: Any
    dim: int
    after: tuple[Any, ...]
    sinks: tuple[Any, ...] = ()


def weights_of(atom: Any, scope: Scope) -> Weights | None:
    """The softmax that an operand of a product is, moved and cast; None where it is none. Raises Hindered."""
    after: list[Any] = []
    while (eqn := scope.made(atom)) is not None and moves(eqn):
        after.append(eqn)
        atom = eqn.invars[0]
    if eqn is None:
        return None
    if eqn.primitive.name == "slice":
        return _beside_sinks(eqn, tuple(reversed(after)), scope)
    if (found := _softmax(eqn, scope)) is not None:
        return Weights(*found, tuple(reversed(after)))
    if eqn.primitive.name in ("mul", "div", "select_n"):
        wide = [x for x in eqn.invars if not jx.is_literal(x) and x.aval.shape == eqn.outvars[0].aval.shape]
        if any((found := weights_of(x, scope)) and chain_to(found.scores, scope) for x in wide):
            raise Hindered(eqn, f"computes {eqn.primitive.name} of weights, as dropout does")
    return None


def _beside_sinks(cut: Any, after: tuple[Any, ...], scope: Scope) -> Weights | None:
    """A softmax of scores and of more, which a slice leaves out of its result (gpt-oss; arXiv:2309.17453)."""
    divided = _behind(cut.invars[0], scope)
    found = None if divided is None else _softmax(divided, scope)
    joined = None if found is None else _behind(found[0], scope)
    if (
        found is None
        or joined is None
        or joined.primitive.name != "concatenate"
        or found[1] != joined.params["dimension"]
    ):
        return None
    ends = [*itertools.accumulate(x.aval.shape[found[1]] for x in joined.invars)]
    kept = cut.params["start_indices"][found[1]], cut.params["limit_indices"][found[1]]
    if kept not in (pairs := [*itertools.pairwise([0, *ends])]) or {*(cut.params["strides"] or [1])} != {1}:
        return None
    at = pairs.index(kept)
    scores, sinks = joined.invars[at], (*joined.invars[:at], *joined.invars[at + 1 :])
    return None if scores.aval.shape != cut.outvars[0].aval.shape else Weights(scores, found[1], after, sinks)


def _softmax(eqn: Any, scope: Scope) -> tuple[Any, int] | None:
    """The scores, and the dim, of which an equation computes a softmax; None where it computes something else."""
    if eqn.primitive.name != "div":
        return None
    over, total = (_behind(x, scope) for x in eqn.invars)
    if over is None or total is None or over.primitive.name != "exp" or total.primitive.name != "reduce_sum":
        return None
    (dim, *others), shifted = total.params["axes"], scope.made(over.invars[0])
    if others or _behind(total.invars[0], scope) is not over or shifted is None or shifted.primitive.name != "sub":
        return None
    scores, shift = shifted.invars
    varies = _along(shift, dim, scope)  # a softmax is the same whatever is taken from all scores of a query
    if varies or jx.is_literal(scores) or scores.aval.shape != eqn.outvars[0].aval.shape:
        return None
    return scores, int(dim)


def _casts(eqn: Any) -> bool:
    """Whether a result is its operand, in another dtype or under a name; gradients pass."""
    known, name = primitives.of(eqn), eqn.primitive.name
    return name == "name" or (known.elementwise and known.view and name != "stop_gradient")


def _reshapes(eqn: Any) -> bool:
    """Whether an equation only brings, takes, merges or splits dims, or repeats along new ones."""
    known = primitives.of(eqn)
    return known.moves and known.view


def _behind(atom: Any, scope: Scope) -> Any:
    """The equation of a value behind casts, and behind what only brings dims of one element or repeats along them."""
    while (eqn := scope.made(atom)) is not None:
        same = ones_dropped(eqn.invars[0].aval.shape) == ones_dropped(eqn.outvars[0].aval.shape)
        if not _casts(eqn) and not (_reshapes(eqn) and (same or eqn.primitive.name == "broadcast_in_dim")):
            return eqn
        atom = eqn.invars[0]
    return None


def _along(atom: Any, dim: int, scope: Scope) -> bool:
    """Whether a value may vary along a dim of the scores."""
    while not jx.is_literal(atom) and atom.aval.shape and atom.aval.shape[dim] != 1:
        eqn = scope.made(atom)
        if eqn is None or not (_casts(eqn) or eqn.primitive.name in ("stop_gradient", "broadcast_in_dim")):
            return True
        if eqn.primitive.name == "broadcast_in_dim":
            dims, shape = [int(d) for d in eqn.params["broadcast_dimensions"]], eqn.invars[0].aval.shape
            return dim in dims and shape[dims.index(dim)] != 1
        atom = eqn.invars[0]
    return False


def moves(eqn: Any) -> bool:
    """Whether an equation only casts a value, or moves, merges and splits its dims."""
    if (name := eqn.primitive.name) == "broadcast_in_dim":
        dims = [*map(int, eqn.params["broadcast_dimensions"])]
        same = ones_dropped(eqn.invars[0].aval.shape) == ones_dropped(eqn.outvars[0].aval.shape)
        return bool(dims) and same and dims == sorted(dims)
    return name == "transpose" or _casts(eqn) or _reshapes(eqn)


def moved(eqn: Any, names: Names) -> Names:
    """The names of the dims of such an equation's result, from its operand's. Raises Hindered."""
    if eqn.primitive.name == "transpose":
        return tuple(names[int(d)] for d in eqn.params["permutation"])
    if _casts(eqn):
        return names
    rest, moved = [dim for dims in names for dim in dims], list[tuple[Dim, ...]]()
    for n in eqn.outvars[0].aval.shape:
        taken = []
        while math.prod(dim.size for dim in taken) < n and rest:
            taken.append(rest.pop(0))
        if math.prod(dim.size for dim in taken) != n:
            raise Hindered(eqn, "cuts dims of scores elsewhere than they were")
        moved.append(tuple(taken))
    return tuple(moved)


def chain_to(atom: Any, scope: Scope) -> tuple[Any, list[tuple[Any, int]]] | None:
    """The product of queries and keys behind scores, and the equations from it to them, each with its operand."""
    if jx.is_literal(atom) or (eqn := scope.made(atom)) is None:
        return None
    name = eqn.primitive.name
    if name == "dot_general":
        return eqn, []
    operands = {"mul": (0, 1), "div": (0,), "add": (0, 1), "sub": (0,), "select_n": (1, 2)}.get(name, (0,))
    for i in operands if len(eqn.invars) > max(operands) else ():
        x = eqn.invars[i]
        small = jx.is_literal(x) or math.prod(x.aval.shape) != math.prod(atom.aval.shape)
        if not small and (behind := chain_to(x, scope)) is not None:
            return behind[0], [*behind[1], (eqn, i)]
    return None
