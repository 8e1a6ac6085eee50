"""A softmax over keys, recognised in the spellings of JAX, Flax and by hand, on the way to a product with values.

    exp(s - max) / sum exp(s - max)     `jax.nn.softmax`, also with `where=`; whatever is subtracted from all scores
    exp(s - log sum exp s)              `jax.nn.log_softmax`, `jax.nn.logsumexp`
    a slice of a softmax                over scores and sinks (gpt-oss)

`weights_of` walks back to it from an operand of a product, and `chain_to` further, to the product of queries and keys.
"""

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ....program import jaxpr as jx
from ....program import primitives
from .hidden import Obstacle, Scope, ones_dropped


class Dim(NamedTuple):
    """A named dim of more than one element.

    Attributes:
      name: "t" queries, "s" keys, "h" features, ("b", 0) rows, ("b", 1) heads, ("g", d) groups of query heads.
      size: the number of its elements.
    """

    name: Any
    size: int


Names = tuple[tuple[Dim, ...], ...]  # for each dim of a value, the named dims that it merges; () for one element


@dataclass(frozen=True)
class Weights:
    """A softmax over keys.

    Attributes:
      scores: the variable of the scores that it takes.
      dim: the dim of the scores that it sums.
      result: the variable of its result.
      sinks: scores without a key, which only its sum contains.
      following: the equations from its result to a product, each with the index of the operand that leads back to it.
    """

    scores: Any
    dim: int
    result: Any
    sinks: tuple[Any, ...] = ()
    following: tuple[tuple[Any, int], ...] = ()


def weights_of(atom: Any, scope: Scope) -> Weights | None:
    """Return the softmax from which an operand of a product follows by moves, casts and factors; None without one."""
    eqn = None if jx.is_literal(atom) else scope.producer(atom)
    if eqn is None:
        return None
    weights = _softmax_with_sinks(eqn, scope) if eqn.primitive.name == "slice" else _softmax(eqn, scope)
    scales = eqn.primitive.name in ("mul", "div", "select_n") or scales_along_dims(eqn)
    if weights is not None or not (moves(eqn) or scales):
        return weights
    for i, x in enumerate(eqn.invars):
        # A smaller operand, such as a factor for each head, is not the weights.
        same_size = math.prod(x.aval.shape) == math.prod(atom.aval.shape)
        weights = weights_of(x, scope) if moves(eqn) or same_size else None
        # A factor may be another softmax, such as a gate. That of attention has scores that come from a product.
        if weights is not None and (moves(eqn) or chain_to(weights.scores, scope)):
            return replace(weights, following=(*weights.following, (eqn, i)))
    return None


def scales_along_dims(eqn: Any) -> bool:
    """Whether an equation multiplies each number of an operand by one of the other, which has some of its dims.

    Such a product sums nothing, for example of weights and a number for each head (transformers' `head_mask`).
    """
    if eqn.primitive.name != "dot_general":
        return False
    (summed, _), (shared, _) = eqn.params["dimension_numbers"]
    return not summed and len(shared) in {len(x.aval.shape) for x in eqn.invars}


def _softmax_with_sinks(eqn: Any, scope: Scope) -> Weights | None:
    """Return a softmax of scores and sinks, if a slice leaves the sinks out of its result (gpt-oss; arXiv:2309.17453).

    softmax(concatenate([scores, sinks]))[..., :S]
    """
    softmax_eqn = _producer_behind(eqn.invars[0], scope)
    weights = None if softmax_eqn is None else _softmax(softmax_eqn, scope)
    concatenation = None if weights is None else _producer_behind(weights.scores, scope)
    if weights is None or concatenation is None or concatenation.primitive.name != "concatenate":
        return None
    ends = [0, *itertools.accumulate(x.aval.shape[weights.dim] for x in concatenation.invars)]
    starts, strides = (eqn.params[name] for name in ("start_indices", "strides"))
    start = starts[weights.dim]
    # The slice must be one of the concatenated arrays: begin where it begins, and have its shape.
    if start not in ends[:-1] or concatenation.params["dimension"] != weights.dim or {*(strides or [1])} != {1}:
        return None
    index = ends.index(start)
    scores, sinks = concatenation.invars[index], (*concatenation.invars[:index], *concatenation.invars[index + 1 :])
    has_shape = scores.aval.shape == eqn.outvars[0].aval.shape
    return Weights(scores, weights.dim, eqn.outvars[0], sinks) if has_shape else None


def _softmax(eqn: Any, scope: Scope) -> Weights | None:
    """Return the softmax that an equation completes: exp(s - shift) / sum exp(s - shift); None if it is another one.

    The shift may be any value that is the same for all scores of a query: a softmax does not depend on it.
    """
    if eqn.primitive.name == "exp":
        return _softmax_by_logarithm(eqn, scope)
    if eqn.primitive.name != "div":
        return None
    exp_eqn, sum_eqn = (_producer_behind(x, scope) for x in eqn.invars)
    if exp_eqn is None or sum_eqn is None or exp_eqn.primitive.name != "exp" or sum_eqn.primitive.name != "reduce_sum":
        return None
    (dim, *more_dims), shift_eqn = sum_eqn.params["axes"], scope.producer(exp_eqn.invars[0])
    if more_dims or shift_eqn is None or shift_eqn.primitive.name != "sub":
        return None
    # It is the softmax of the unshifted scores.
    scores, shift = shift_eqn.invars
    if _varies_along(shift, dim, scope) or jx.is_literal(scores) or scores.aval.shape != eqn.outvars[0].aval.shape:
        return None
    # The sum must be over the same exponentials.
    summed_eqn = _producer_behind(sum_eqn.invars[0], scope)
    is_same = summed_eqn in (exp_eqn, _masked_sum(scores, exp_eqn, scope, summed_eqn))
    return Weights(scores, int(dim), eqn.outvars[0]) if is_same else None


def _masked_sum(scores: Any, exp_eqn: Any, scope: Scope, summed_eqn: Any) -> Any:
    """Return `summed_eqn` if it masks the exponentials redundantly, as `jax.nn.softmax(where=)` does; else None.

    It then is where(mask, exp, 0), and the scores are where(mask, scores, -inf): masked exponentials are 0 anyway.
    """
    mask_eqn = scope.producer(scores)
    if mask_eqn is None or summed_eqn is None or {mask_eqn.primitive.name, summed_eqn.primitive.name} != {"select_n"}:
        return None
    # The operands of `select_n` are the condition, the case for False and the case for True.
    (score_mask, low, _), (sum_mask, zero, unmasked) = mask_eqn.invars, summed_eqn.invars
    is_same = _base(score_mask, scope) is _base(sum_mask, scope) and _producer_behind(unmasked, scope) is exp_eqn
    numbers = [getattr(_base(x, scope), "val", None) for x in (low, zero)]
    return summed_eqn if is_same and numbers == [-math.inf, 0] else None


def _softmax_by_logarithm(eqn: Any, scope: Scope) -> Weights | None:
    """Return the softmax exp(s - log sum exp s) that an `exp` completes, as of `jax.nn.log_softmax`; else None.

    JAX subtracts a shift before the sum, in one of two ways:

        log_softmax    x = s - shift,   exp(x - log sum exp x)
        logsumexp      exp(s - (log |sum exp(s - shift)| + shift))
    """
    producer_if = lambda atom, name: (
        producer if (producer := _producer_behind(atom, scope)) and producer.primitive.name == name else None
    )
    # Walk back from the subtraction through each equation that the spelling has or may have.
    sub_eqn = producer_if(eqn.invars[0], "sub")
    add_eqn = sub_eqn and producer_if(sub_eqn.invars[1], "add")  # of the logarithm and the shift
    log_eqn = sub_eqn and producer_if(add_eqn.invars[0] if add_eqn else sub_eqn.invars[1], "log")
    abs_eqn = log_eqn and producer_if(log_eqn.invars[0], "abs")
    sum_eqn = log_eqn and producer_if(abs_eqn.invars[0] if abs_eqn else log_eqn.invars[0], "reduce_sum")
    exp_eqn = sum_eqn and producer_if(sum_eqn.invars[0], "exp")
    if sub_eqn is None or sum_eqn is None or exp_eqn is None or len(sum_eqn.params["axes"]) > 1:
        return None
    # Either the scores are the unshifted ones, with the shift added to the logarithm, or both contain the shift.
    (dim,), scores = map(int, sum_eqn.params["axes"]), sub_eqn.invars[0]
    shift_eqn = producer_if(exp_eqn.invars[0], "sub")
    if scores.aval.shape != eqn.outvars[0].aval.shape or _varies_along(sub_eqn.invars[1], dim, scope):
        return None
    if shift_eqn and _varies_along(shift_eqn.invars[1], dim, scope):
        return None
    if add_eqn:
        is_same = (
            shift_eqn
            and shift_eqn.invars[0] is scores
            and _base(shift_eqn.invars[1], scope) is _base(add_eqn.invars[1], scope)
        )
        return Weights(scores, dim, eqn.outvars[0]) if is_same else None
    is_same = exp_eqn.invars[0] is scores
    return Weights(shift_eqn.invars[0] if shift_eqn else scores, dim, eqn.outvars[0]) if is_same else None


def weighs_by_exp(atom: Any, scope: Scope) -> bool:
    """Whether an operand of a product is made, element by element, of the exponential of a product.

    It then looks like attention whose softmax has an unknown form.
    """
    eqn = None if jx.is_literal(atom) else scope.producer(atom)
    if eqn is None:
        return False
    if eqn.primitive.name == "exp":
        chain = chain_to(eqn.invars[0], scope)
        # The product of a layer, unlike a product of queries and keys, shares no dim of rows or heads.
        return chain is not None and bool(chain[0].params["dimension_numbers"][1][0])
    same_size = [x for x in eqn.invars if math.prod(x.aval.shape) == math.prod(atom.aval.shape)]
    return (primitives.of(eqn).elementwise or moves(eqn)) and any(weighs_by_exp(x, scope) for x in same_size)


def _base(atom: Any, scope: Scope) -> Any:
    """Return a value before it was cast and broadcast, so that two copies of it can be compared."""
    while not jx.is_literal(atom) and (eqn := scope.producer(atom)) is not None:
        if not (_casts(eqn) or eqn.primitive.name in ("stop_gradient", "broadcast_in_dim")):
            break
        atom = eqn.invars[0]
    return atom


def _casts(eqn: Any) -> bool:
    """Whether a result is its operand, in another dtype or under a name; gradients pass."""
    primitive, name = primitives.of(eqn), eqn.primitive.name
    return name == "name" or (primitive.elementwise and primitive.view and name != "stop_gradient")


def _reshapes(eqn: Any) -> bool:
    """Whether an equation only adds, removes, merges or splits dims, or repeats along new ones."""
    primitive = primitives.of(eqn)
    return primitive.moves and primitive.view


def _producer_behind(atom: Any, scope: Scope) -> Any:
    """Return the equation that computes a value, before casts, dims of one element and repetition along dims."""
    while (eqn := scope.producer(atom)) is not None:
        same_shape = ones_dropped(eqn.invars[0].aval.shape) == ones_dropped(eqn.outvars[0].aval.shape)
        if not _casts(eqn) and not (_reshapes(eqn) and (same_shape or eqn.primitive.name == "broadcast_in_dim")):
            return eqn
        atom = eqn.invars[0]
    return None


def _varies_along(atom: Any, dim: int, scope: Scope) -> bool:
    """Whether a value may vary along a dim of the scores."""
    while not jx.is_literal(atom) and atom.aval.shape and atom.aval.shape[dim] != 1:
        eqn = scope.producer(atom)
        if eqn is None or not (_casts(eqn) or eqn.primitive.name in ("stop_gradient", "broadcast_in_dim")):
            return True
        if eqn.primitive.name == "broadcast_in_dim":
            # It varies only if the dim comes from a dim of the operand with more than one element.
            dims, shape = [int(d) for d in eqn.params["broadcast_dimensions"]], eqn.invars[0].aval.shape
            return dim in dims and shape[dims.index(dim)] != 1
        atom = eqn.invars[0]
    return False


def moves(eqn: Any) -> bool:
    """Whether an equation only casts a value, or moves, merges and splits its dims."""
    if (name := eqn.primitive.name) == "broadcast_in_dim":
        # One that repeats nothing and keeps the order of dims is a reshape.
        dims = [*map(int, eqn.params["broadcast_dimensions"])]
        same_shape = ones_dropped(eqn.invars[0].aval.shape) == ones_dropped(eqn.outvars[0].aval.shape)
        return bool(dims) and same_shape and dims == sorted(dims)
    return name == "transpose" or _casts(eqn) or _reshapes(eqn)


def names_after(eqn: Any, names: Names) -> Names:
    """Return the names of a result's dims from the names of its operand's dims, for an equation that `moves`.

    Raises:
      Obstacle: a reshape cuts through a named dim.
    """
    if eqn.primitive.name == "transpose":
        return tuple(names[int(d)] for d in eqn.params["permutation"])
    if _casts(eqn):
        return names
    # A reshape keeps the order of named dims: deal them out to the new dims until each is full.
    remaining, result = [dim for dims in names for dim in dims], list[tuple[Dim, ...]]()
    for n in eqn.outvars[0].aval.shape:
        merged = []
        while math.prod(dim.size for dim in merged) < n and remaining:
            merged.append(remaining.pop(0))
        if math.prod(dim.size for dim in merged) != n:
            raise Obstacle(eqn, "reshapes scores so that their dims are cut")
        result.append(tuple(merged))
    return tuple(result)


def chain_to(atom: Any, scope: Scope) -> tuple[Any, list[tuple[Any, int]]] | None:
    """Walk back from scores to the product of queries and keys.

    Returns:
      The product, and the equations from it to the scores, each with the index of the operand that leads back to the
      product; None if there is no product.
    """
    if jx.is_literal(atom) or (eqn := scope.producer(atom)) is None:
        return None
    name = eqn.primitive.name
    if name == "dot_general":
        return eqn, []
    # The operands that may be scores: not a divisor, a subtrahend or a mask.
    operands = {"mul": (0, 1), "div": (0,), "add": (0, 1), "sub": (0,), "select_n": (1, 2)}.get(name, (0,))
    for i in operands if len(eqn.invars) > max(operands) else ():
        x = eqn.invars[i]
        is_smaller = jx.is_literal(x) or math.prod(x.aval.shape) != math.prod(atom.aval.shape)
        if not is_smaller and (chain := chain_to(x, scope)) is not None:
            return chain[0], [*chain[1], (eqn, i)]
    return None
