"""A softmax over keys, in the spellings of JAX, Flax and by hand, on the way to a product with values."""

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ....program import jaxpr as jx
from ....program import primitives
from .hidden import Hindered, Scope, ones_dropped


class Dim(NamedTuple):
    """A dim of more than one element: "t", "s" and "h" as above, ("b", n) of rows and heads, ("g", d) of groups."""

    name: Any
    size: int


Names = tuple[tuple[Dim, ...], ...]  # of each dim of a value: those that it is, merged; none of one element


@dataclass(frozen=True)
class Weights:
    """A softmax over keys.

    Attributes:
      scores: what it is of.
      dim: along which of their dims.
      result: its result.
      sinks: scores of no key, which are in its sum alone.
      after: the equations from its result to a product, each with its operand.
    """

    scores: Any
    dim: int
    result: Any
    sinks: tuple[Any, ...] = ()
    after: tuple[tuple[Any, int], ...] = ()


def weights_of(atom: Any, scope: Scope) -> Weights | None:
    """The softmax that an operand of a product is, moved, cast and multiplied; None where it is none."""
    eqn = None if jx.is_literal(atom) else scope.made(atom)
    if eqn is None:
        return None
    found = _beside_sinks(eqn, scope) if eqn.primitive.name == "slice" else _softmax(eqn, scope)
    scales = eqn.primitive.name in ("mul", "div", "select_n") or scaled_by_dims(eqn)
    if found is not None or not (moves(eqn) or scales):
        return found
    for i, x in enumerate(eqn.invars):
        same = math.prod(x.aval.shape) == math.prod(atom.aval.shape)
        found = weights_of(x, scope) if moves(eqn) or same else None
        if found is not None and (moves(eqn) or chain_to(found.scores, scope)):
            return replace(found, after=(*found.after, (eqn, i)))
    return None


def scaled_by_dims(eqn: Any) -> bool:
    """Whether an equation multiplies each number of an operand by one of the other, which has some of its dims: a
    product that sums nothing, as of weights and a number for each head (transformers' `head_mask`).
    """
    if eqn.primitive.name != "dot_general":
        return False
    (summed, _), (shared, _) = eqn.params["dimension_numbers"]
    return not summed and len(shared) in {len(x.aval.shape) for x in eqn.invars}


def _beside_sinks(eqn: Any, scope: Scope) -> Weights | None:
    """A softmax of scores and of more, which a slice leaves out of its result (gpt-oss; arXiv:2309.17453)."""
    made = _behind(eqn.invars[0], scope)
    found = None if made is None else _softmax(made, scope)
    joined = None if found is None else _behind(found.scores, scope)
    if found is None or joined is None or joined.primitive.name != "concatenate":
        return None
    ends = [0, *itertools.accumulate(x.aval.shape[found.dim] for x in joined.invars)]
    kept, strides = (eqn.params[name] for name in ("start_indices", "strides"))
    if kept[found.dim] not in ends[:-1] or joined.params["dimension"] != found.dim or {*(strides or [1])} != {1}:
        return None
    scores, at = joined.invars[ends.index(kept[found.dim])], ends.index(kept[found.dim])
    sinks = (*joined.invars[:at], *joined.invars[at + 1 :])
    return Weights(scores, found.dim, eqn.outvars[0], sinks) if scores.aval.shape == eqn.outvars[0].aval.shape else None


def _softmax(eqn: Any, scope: Scope) -> Weights | None:
    """Of an equation that computes a softmax; None where it computes something else. A softmax is the same whatever is
    taken from all scores of a query.
    """
    if eqn.primitive.name == "exp":
        return _by_logarithm(eqn, scope)
    if eqn.primitive.name != "div":
        return None
    over, total = (_behind(x, scope) for x in eqn.invars)
    if over is None or total is None or over.primitive.name != "exp" or total.primitive.name != "reduce_sum":
        return None
    (dim, *others), shifted = total.params["axes"], scope.made(over.invars[0])
    if others or shifted is None or shifted.primitive.name != "sub":
        return None
    scores, shift = shifted.invars
    if _along(shift, dim, scope) or jx.is_literal(scores) or scores.aval.shape != eqn.outvars[0].aval.shape:
        return None
    summed = _behind(total.invars[0], scope)
    return Weights(scores, int(dim), eqn.outvars[0]) if summed in (over, _seen(scores, over, scope, summed)) else None


def _seen(scores: Any, over: Any, scope: Scope, summed: Any) -> Any:
    """What is summed, if it is `over` where a mask says so and 0 elsewhere, where the scores are -inf by the same mask
    (`jax.nn.softmax(where=)`); else None.
    """
    hides = scope.made(scores)
    if hides is None or summed is None or {hides.primitive.name, summed.primitive.name} != {"select_n"}:
        return None
    (by, low, _), (mask, nought, kept) = hides.invars, summed.invars
    same = _base(by, scope) is _base(mask, scope) and _behind(kept, scope) is over
    numbers = [getattr(_base(x, scope), "val", None) for x in (low, nought)]
    return summed if same and numbers == [-math.inf, 0] else None


def _by_logarithm(eqn: Any, scope: Scope) -> Weights | None:
    """exp(s - log sum exp s), as of `jax.nn.log_softmax` and `jax.nn.logsumexp`, which take a shift from s first."""
    named = lambda atom, name: made if (made := _behind(atom, scope)) and made.primitive.name == name else None
    less = named(eqn.invars[0], "sub")
    plus = less and named(less.invars[1], "add")  # of the logarithm and the shift
    log = less and named(plus.invars[0] if plus else less.invars[1], "log")
    size = log and named(log.invars[0], "abs")
    total = log and named(size.invars[0] if size else log.invars[0], "reduce_sum")
    over = total and named(total.invars[0], "exp")
    if less is None or total is None or over is None or len(total.params["axes"]) > 1:
        return None
    (dim,), scores, shifted = map(int, total.params["axes"]), less.invars[0], named(over.invars[0], "sub")
    if scores.aval.shape != eqn.outvars[0].aval.shape or _along(less.invars[1], dim, scope):
        return None
    if shifted and _along(shifted.invars[1], dim, scope):
        return None
    if plus:
        same = (
            shifted and shifted.invars[0] is scores and _base(shifted.invars[1], scope) is _base(plus.invars[1], scope)
        )
        return Weights(scores, dim, eqn.outvars[0]) if same else None
    same = over.invars[0] is scores
    return Weights(shifted.invars[0] if shifted else scores, dim, eqn.outvars[0]) if same else None


def weighs_by_exp(atom: Any, scope: Scope) -> bool:
    """Whether an operand of a product is made, element by element, of the exponential of a product of two."""
    eqn = None if jx.is_literal(atom) else scope.made(atom)
    if eqn is None:
        return False
    if eqn.primitive.name == "exp":
        behind = chain_to(eqn.invars[0], scope)
        return behind is not None and bool(behind[0].params["dimension_numbers"][1][0])  # of rows or heads, no layer
    alike = [x for x in eqn.invars if math.prod(x.aval.shape) == math.prod(atom.aval.shape)]
    return (primitives.of(eqn).elementwise or moves(eqn)) and any(weighs_by_exp(x, scope) for x in alike)


def _base(atom: Any, scope: Scope) -> Any:
    """A value before it was cast and brought to other dims."""
    while not jx.is_literal(atom) and (eqn := scope.made(atom)) is not None:
        if not (_casts(eqn) or eqn.primitive.name in ("stop_gradient", "broadcast_in_dim")):
            break
        atom = eqn.invars[0]
    return atom


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
