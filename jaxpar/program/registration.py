"""Factors of a primitive from outside jaxpar, and the numerical proof that all factors have.

A factor claims that an equation on equal parts of its operands gives parts of its results, or terms of a sum. The proof
computes example equations on the whole and on parts, and compares. `tests/program/test_factors.py` proves the table in
`factors.py` in the same way.
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

_JOINS = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum, "and": np.bitwise_and,
          "or": np.bitwise_or, "xor": np.bitwise_xor}  # fmt: skip
_PLACES = ("argmax", "argmin")
_registered: set[str] = set()


class FactorClaim(NamedTuple):
    """A factor of an example equation with these operands, to be proved in so many parts."""

    eqn: Any
    operands: Sequence[np.ndarray]
    factor: Factor
    parts: int

    def cut(self) -> list[list[np.ndarray]]:
        """The operands of each part."""
        along = list(zip(self.operands, self.factor.ins, strict=True))
        return [[x if d is None else np.split(x, self.parts, d)[i] for x, d in along] for i in range(self.parts)]

    def changes(self) -> dict[str, Any]:
        """The parameters of a part that differ from those of the whole."""
        part = lambda shape, dim: tuple(n // self.parts if d == dim else n for d, n in enumerate(shape))
        return self.factor.params(part) if self.factor.params else {}

    def difference(self, whole: Sequence[np.ndarray], parts: Sequence[Sequence[np.ndarray]]) -> str:
        """How the joined results of the parts differ from those of the whole; "" where they are equal. Results may
        have more dims in front.
        """
        for i, (expected, dim, var) in enumerate(zip(whole, self.factor.outs, self.eqn.outvars, strict=True)):
            dim = None if dim is None else dim + expected.ndim - len(var.aval.shape)
            found = self._joined([part[i] for part in parts], dim)
            if found is None or (found.shape, found.dtype) != (expected.shape, expected.dtype):
                return f"result {i} has another shape"
            close = {"rtol": 1e-4, "atol": 1e-5} if np.issubdtype(found.dtype, np.inexact) else {"rtol": 0, "atol": 0}
            if not np.allclose(found, expected, equal_nan=True, **close):
                return f"result {i} has other elements"
        return ""

    def _joined(self, parts: Sequence[np.ndarray], dim: int | None) -> np.ndarray | None:
        """A result from those of the parts; None where they are no parts of one."""
        how = self.factor.reduced
        if dim is not None:
            return np.concatenate(parts, dim)
        if len({part.shape for part in parts}) > 1:
            return None
        if how in _JOINS:
            return functools.reduce(_JOINS[how], parts)
        if how in _PLACES:  # of the part whose own best is the best, the first of them
            (at,), operands = self.eqn.params["axes"], [part[0] for part in self.cut()]
            best = [np.take_along_axis(x, np.expand_dims(i, at), at) for x, i in zip(operands, parts, strict=True)]
            which = getattr(np, how)(np.concatenate(best, at), at)
            within = np.take_along_axis(np.stack(parts, at), np.expand_dims(which, at), at)
            return np.squeeze(within, at) + (which * operands[0].shape[at]).astype(within.dtype)
        return parts[0] if all(np.array_equal(part, parts[0]) for part in parts) else None

    def __str__(self) -> str:
        f = self.factor
        said = f"dims {list(f.ins)} of the operands and {list(f.outs)} of the results go together"
        return said + f", and results are joined by {f.reduced}" * bool(f.reduced)


def equations_of(name: str, closed: Any, values: Sequence[Any]) -> list[tuple[Any, list[np.ndarray]]]:
    """The equations of a primitive in a program, each with the values of its operands."""
    found: list[tuple[Any, list[np.ndarray]]] = []

    def results(eqn: Any, operands: list[Any]) -> list[Any]:
        if eqn.primitive.name == name:
            found.append((eqn, list(map(np.asarray, operands))))
        return jx.bind(eqn, operands)

    jx.evaluate(jx.flatten(closed), values, results)
    return found


def claims_of(eqn: Any, operands: Sequence[np.ndarray], factors: Iterable[Factor]) -> list[FactorClaim]:
    """What can be proved of the factors of an equation: those whose dims can be cut into 2 or 3 equal parts."""
    ins, outs = shapes(eqn)
    claims = []
    for f in factors:
        sizes = [s[d] for s, d in zip((*ins, *outs), (*f.ins, *f.outs), strict=True) if d is not None]
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
    if name in PRIMITIVES and name not in _registered:
        raise ValueError(
            f"the primitive {name} has a rule in jaxpar already; a rule from outside has to be for a new primitive; "
            "give yours another name"
        )
    factors = labelled(rule) if isinstance(rule, str) else rule
    given = f"the rule {f'{rule!r} ' if isinstance(rule, str) else ''}of the primitive {name}"
    found = [one for fun, *arrays in examples for one in equations_of(name, jax.make_jaxpr(fun)(*arrays), arrays)]
    if not found:
        raise ValueError(
            f"{given} comes with {len(examples)} examples, and none uses {name}; a rule needs an example that proves "
            f"it; give a tuple (fun, *arrays) where fun(*arrays) calls {name}.bind"
        )
    every = {f[:3]: eqn for eqn, _ in found for f in factors(eqn)}
    if unknown := {how for _, _, how in every} - {"", *_JOINS, *_PLACES}:
        raise ValueError(
            f"{given} has a factor with reduced={min(unknown)!r}; parts have to be joined in a known way; use one of "
            f"{', '.join((*_JOINS, *_PLACES))}, or leave the factor out"
        )
    claims = [claim for eqn, operands in found for claim in claims_of(eqn, operands, factors(eqn))]
    if left := every.keys() - {claim.factor[:3] for claim in claims}:
        ins, outs, _ = min(left, key=str)
        raise ValueError(
            f"{given} joins dims {list(ins)} of the operands and {list(outs)} of the results, and no example has parts "
            "there; a proof needs a size that is a multiple of 2 or 3; give an example with such sizes"
        )
    for claim in claims:
        if why := _refuted(claim):
            raise ValueError(
                f"{given} says that {claim}, and in {claim.parts} parts of operands "
                f"{[list(x.shape) for x in claim.operands]} {why}; each part has to compute its part of the whole; "
                "write _ for a dim whose elements depend on each other"
            )
    PRIMITIVES[name] = Primitive(factors, cheap=cheap)
    _registered.add(name)


def _refuted(claim: FactorClaim) -> str:
    """Why an example refutes a claim; "" where it proves it."""
    bound = lambda operands, **changes: list(map(np.asarray, jx.bind(claim.eqn, operands, **changes)))
    whole = bound(claim.operands)
    try:
        return claim.difference(whole, [bound(part, **claim.changes()) for part in claim.cut()])
    except (TypeError, ValueError) as error:  # shapes that the primitive does not take
        return f"the primitive raises {type(error).__name__}: {error}"
