"""Register the factors of a user's primitive, and prove factors numerically.

A factor claims: if operands are cut into equal parts along it, the equation on the parts computes the parts of its
results, or terms of a sum. The proof computes example equations on full operands and on parts, and compares:

    full       f(x)                      x [4, 6], cut along dim 0
    parts      f(x[:2]), f(x[2:])        concatenated: the same as f(x)?

`tests/program/test_factors.py` proves the table in `factors.py` in the same way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jec
import numpy as np

from . import jaxpr as jx
from .factors import Factor, labelled, shapes
from .primitives import PRIMITIVES, Primitive

# The functions that join two parts of a result, by `Factor.reduced`.
_JOINS = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum, "and": np.bitwise_and,
          "or": np.bitwise_or, "xor": np.bitwise_xor}  # fmt: skip
_INDEX_REDUCTIONS = ("argmax", "argmin")
# The names of the primitives that users registered.
_registered: set[str] = set()


class FactorClaim(NamedTuple):
    """The claim that a factor holds for an example equation on some operands, cut into a number of parts."""

    eqn: Any
    operands: Sequence[np.ndarray]
    factor: Factor
    parts: int

    def cut(self) -> list[list[np.ndarray]]:
        """Return the operands of each part."""
        pairs = list(zip(self.operands, self.factor.ins, strict=True))
        return [[x if d is None else np.split(x, self.parts, d)[i] for x, d in pairs] for i in range(self.parts)]

    def changes(self) -> dict[str, Any]:
        """Return the parameters of a part that differ from those of the full equation."""
        part_shape = lambda shape, dim: tuple(n // self.parts if d == dim else n for d, n in enumerate(shape))
        return self.factor.params(part_shape) if self.factor.params else {}

    def difference(self, full_results: Sequence[np.ndarray], parts: Sequence[Sequence[np.ndarray]]) -> str:
        """Describe how the joined results of the parts differ from the full results; "" if they are equal.

        Args:
          full_results: the results of the full equation. They may have additional dims in front.
          parts: the results of each part.
        """
        for i, (expected, dim, var) in enumerate(zip(full_results, self.factor.outs, self.eqn.outvars, strict=True)):
            # Additional dims in front move the result's dims to the right.
            dim = None if dim is None else dim + expected.ndim - len(var.aval.shape)
            joined = self._joined([part[i] for part in parts], dim)
            if joined is None or (joined.shape, joined.dtype) != (expected.shape, expected.dtype):
                return f"result {i} has another shape"
            # Parts are summed in another order, so that only integers are equal bit by bit.
            tolerance = (
                {"rtol": 1e-4, "atol": 1e-5} if np.issubdtype(joined.dtype, np.inexact) else {"rtol": 0, "atol": 0}
            )
            if not np.allclose(joined, expected, equal_nan=True, **tolerance):
                return f"result {i} has other elements"
        return ""

    def _joined(self, parts: Sequence[np.ndarray], dim: int | None) -> np.ndarray | None:
        """Return a result joined from the parts' results; None if they do not fit together."""
        reduction = self.factor.reduced
        if dim is not None:
            return np.concatenate(parts, dim)
        # Without a dim to join along, the parts are terms of a reduction, or all the same.
        if len({part.shape for part in parts}) > 1:
            return None
        if reduction in _JOINS:
            return functools.reduce(_JOINS[reduction], parts)
        if reduction in _INDEX_REDUCTIONS:
            # An argmax: compare the best elements of the parts; the first part that has the best of all wins.
            (axis,), operands = self.eqn.params["axes"], [part[0] for part in self.cut()]
            best = [np.take_along_axis(x, np.expand_dims(i, axis), axis) for x, i in zip(operands, parts, strict=True)]
            part_index = getattr(np, reduction)(np.concatenate(best, axis), axis)
            index_in_part = np.take_along_axis(np.stack(parts, axis), np.expand_dims(part_index, axis), axis)
            offset = part_index * operands[0].shape[axis]
            return np.squeeze(index_in_part, axis) + offset.astype(index_in_part.dtype)
        return parts[0] if all(np.array_equal(part, parts[0]) for part in parts) else None

    def __str__(self) -> str:
        f = self.factor
        text = f"dims {list(f.ins)} of the operands and {list(f.outs)} of the results go together"
        return text + f", and results are joined by {f.reduced}" * bool(f.reduced)


def equations_of(name: str, closed: Any, values: Sequence[Any]) -> list[tuple[Any, list[np.ndarray]]]:
    """Return the equations of a primitive in a program, each with the values of its operands."""
    equations: list[tuple[Any, list[np.ndarray]]] = []

    def results(eqn: Any, operands: list[Any]) -> list[Any]:
        if eqn.primitive.name == name:
            equations.append((eqn, list(map(np.asarray, operands))))
        return jx.bind(eqn, operands)

    jx.evaluate(jx.flatten(closed), values, results)
    return equations


def claims_of(eqn: Any, operands: Sequence[np.ndarray], factors: Iterable[Factor]) -> list[FactorClaim]:
    """Return the claims about an equation that can be proved.

    A factor can be proved if its dims can be cut into 2 or 3 equal parts; there is a claim for each of these numbers.
    """
    ins, outs = shapes(eqn)
    claims = []
    for f in factors:
        sizes = [s[d] for s, d in zip((*ins, *outs), (*f.ins, *f.outs), strict=True) if d is not None]
        # The number of groups is cut too.
        sizes += [eqn.params[f.grouped]] if f.grouped else []
        claims += [FactorClaim(eqn, operands, f, n) for n in (2, 3) if sizes and not any(size % n for size in sizes)]
    return claims


def register(
    primitive: jec.Primitive,
    rule: str | Callable[[Any], Iterable[Factor]],
    *examples: tuple[Any, ...],
    cheap: bool = False,
) -> None:
    """Register which dims of a primitive's operands and results go together.

    Then every strategy follows split values through the primitive. Under `tensor`, each rank computes an equation on
    its parts, and a sum over a split dim ends in an all-reduce. Without a rule, each rank gathers the operands.

    Args:
      primitive: A primitive of your own, with rules for abstract evaluation, lowering and differentiation.
      rule: Letters as in `jnp.einsum`: `"...k,kj->...j"` names the dims of two operands and of a result. A letter that
        no result has is summed over. `_` is a dim along which elements depend on each other, as in a sort. `...` stands
        for any number of dims. Where the dims depend on parameters, or parameters name sizes, give a function instead.
        It returns the factors of an equation (`jaxpar.program.factors.Factor`).
      examples: Tuples `(fun, *arrays)` by which the rule is proved: `fun(*arrays)` uses the primitive. Some example
        needs a size that is a multiple of 2 or 3 for each letter.
      cheap: Whether a backward computes the primitive again rather than reading a saved result.

    Raises:
      ValueError: The primitive has a rule in jaxpar, no example uses it, the examples leave a factor without proof, or
        an example refutes a factor.

    >>> import jax.extend.core
    >>> from jax.interpreters import mlir
    >>> twice_p = jax.extend.core.Primitive("twice_of")
    >>> twice_p.def_abstract_eval(lambda x: x) and twice_p.def_impl(lambda x: 2 * x) and None
    >>> register(twice_p, "...->...", (twice_p.bind, np.ones((4, 6), np.float32)))
    """
    name = primitive.name
    # A cell of a notebook that runs again registers its primitive again.
    if name in PRIMITIVES and name not in _registered:
        raise ValueError(
            f"the primitive {name} has a rule in jaxpar already; a rule from outside has to be for a new primitive; "
            "give yours another name"
        )
    factors = labelled(rule) if isinstance(rule, str) else rule
    subject = f"the rule {f'{rule!r} ' if isinstance(rule, str) else ''}of the primitive {name}"
    # 1. Collect the primitive's equations in the examples.
    equations = [pair for fun, *arrays in examples for pair in equations_of(name, jax.make_jaxpr(fun)(*arrays), arrays)]
    if not equations:
        raise ValueError(
            f"{subject} comes with {len(examples)} examples, and none uses {name}; a rule needs an example that "
            f"proves it; give a tuple (fun, *arrays) where fun(*arrays) calls {name}.bind"
        )
    # 2. Prove every claim.
    for claim in _provable_claims(subject, equations, factors):
        if reason := _refuted(claim):
            raise ValueError(
                f"{subject} says that {claim}, and in {claim.parts} parts of operands "
                f"{[list(x.shape) for x in claim.operands]} {reason}; each part has to compute its part of the whole; "
                "write _ for a dim whose elements depend on each other"
            )
    # Only now, so that a rule that is refuted serves no program.
    PRIMITIVES[name] = Primitive(factors, cheap=cheap)
    _registered.add(name)


def _provable_claims(
    subject: str, equations: Sequence[tuple[Any, list[np.ndarray]]], factors: Callable[[Any], Iterable[Factor]]
) -> list[FactorClaim]:
    """Return the claims of a rule about some equations.

    Raises:
      ValueError: a factor has an unknown reduction, or no equation can be cut along it.
    """
    # Without `params` and `grouped`: a rule makes new functions for `params` in every call.
    factor_keys = {f[:3]: eqn for eqn, _ in equations for f in factors(eqn)}
    if unknown := {reduction for _, _, reduction in factor_keys} - {"", *_JOINS, *_INDEX_REDUCTIONS}:
        raise ValueError(
            f"{subject} has a factor with reduced={min(unknown)!r}; parts have to be joined in a known way; use one "
            f"of {', '.join((*_JOINS, *_INDEX_REDUCTIONS))}, or leave the factor out"
        )
    claims = [claim for eqn, operands in equations for claim in claims_of(eqn, operands, factors(eqn))]
    if unproved := factor_keys.keys() - {claim.factor[:3] for claim in claims}:
        ins, outs, _ = min(unproved, key=str)
        raise ValueError(
            f"{subject} joins dims {list(ins)} of the operands and {list(outs)} of the results, and no example has "
            "parts there; a proof needs a size that is a multiple of 2 or 3; give an example with such sizes"
        )
    return claims


def _refuted(claim: FactorClaim) -> str:
    """Return how an example refutes a claim; "" if it proves it."""
    results = lambda operands, **changes: list(map(np.asarray, jx.bind(claim.eqn, operands, **changes)))
    # Outside the `try`: an error of the full equation is the user's, and no refutation.
    full_results = results(claim.operands)
    try:
        return claim.difference(full_results, [results(part, **claim.changes()) for part in claim.cut()])
    except (TypeError, ValueError) as error:  # the primitive does not take the shapes of parts
        return f"the primitive raises {type(error).__name__}: {error}"
