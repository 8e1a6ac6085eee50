"""Compare equations: whether two compute the same, down to the programs and the rules of differentiation inside them.

Layers of a Python loop are found by it: their equations are equal up to the variables. Parameters are compared by
their values, functions by code and closure, and rules of differentiation by the programs that they trace to.
"""

import contextlib
import functools
import types
from typing import Any

import jax
import jax.extend.core as jec
import numpy as np

from . import jaxpr as jx


def same_atom(a: Any, b: Any) -> bool:
    """Return whether two operands are one variable, or equal literals."""
    are_literals = jx.is_literal(a) and jx.is_literal(b)
    return a is b or (are_literals and a.aval.dtype == b.aval.dtype and bool(np.array_equal(a.val, b.val)))


def differing(e: Any, f: Any, rules: bool = True) -> str | None:
    """Return the name of the first parameter in which two equations of one primitive differ; None if all are equal.

    Args:
      e: one equation.
      f: the other equation.
      rules: whether rules of differentiation are compared too.
    """
    if e.primitive.name.startswith("custom_") and "call_jaxpr" in e.params:
        # Every trace makes new functions for the rules, so that only the programs that they trace to can be compared.
        # The rules of a derivative itself are not compared.
        is_equal = _equal(e.params["call_jaxpr"], f.params["call_jaxpr"], rules)
        is_equal = is_equal and (not rules or _equal(_derivative(e), _derivative(f), False))
        return None if is_equal else "call_jaxpr"
    return next((name for name in e.params if not _equal(e.params[name], f.params.get(name), rules)), None)


@functools.lru_cache(64)  # each equation is compared with many
def _derivative(eqn: Any) -> Any:
    """Return the program of an equation's backward: the transpose of its derivative."""
    avals: list[Any] = [a.aval for a in eqn.invars]
    invars = [jec.Var(aval) for aval in avals]
    # A dropped result has no cotangent.
    fun = jx.run([eqn.replace(invars=invars)], invars, [v for v in eqn.outvars if not isinstance(v, jec.DropVar)])
    types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
    return jax.make_jaxpr(lambda *values: jx.pulled(fun, values))(*types)


def short(value: Any) -> str:
    """Return a value as text of less than a line."""
    text = " ".join(str(value).split())
    return text if len(text) < 60 else f"{text[:57]}..."


def _equal(a: Any, b: Any, rules: bool = True, within: frozenset[tuple[int, int]] = frozenset()) -> bool:
    """Return whether two parameters are equal: programs by their equations, functions by code and captured values.

    Args:
      a, b: the parameters.
      rules: as in `differing`.
      within: the identities of the functions whose captured values are being compared: a recursive function captures
        itself.
    """
    if a is b:
        return True
    if isinstance(a, dict | list | tuple):
        if type(a) is not type(b) or len(a) != len(b):
            return False
        # Keys may be of types that cannot be compared; as text they have an order.
        items = (lambda x: sorted(x.items(), key=lambda item: str(item[0]))) if isinstance(a, dict) else list
        return all(_equal(x, y, rules, within) for x, y in zip(items(a), items(b), strict=True))
    if hasattr(jx.opened(a)[0], "eqns"):
        return hasattr(jx.opened(b)[0], "eqns") and same_program(a, b, rules)
    if isinstance(a, np.ndarray | jax.Array):
        return isinstance(b, np.ndarray | jax.Array) and a.shape == b.shape and bool(np.array_equal(a, b))
    if isinstance(a, types.FunctionType):
        # Two traces of one function are different objects with equal code.
        if not isinstance(b, types.FunctionType) or a.__code__ != b.__code__:
            return False
        pair = (id(a), id(b))
        return pair in within or _equal(_captured(a), _captured(b), rules, within | {pair})
    return type(a) is type(b) and bool(a == b)


def _captured(function: types.FunctionType) -> list[Any]:
    """Return the values that a function holds besides its code: those of its closure, and the defaults of arguments."""
    contents = []
    for cell in function.__closure__ or ():
        # A cell is empty if its variable has not been assigned yet, or was deleted.
        with contextlib.suppress(ValueError):
            contents.append(cell.cell_contents)
    return [contents, function.__defaults__, function.__kwdefaults__]


def same_program(a: Any, b: Any, rules: bool = True) -> bool:
    """Return whether two programs, open or closed, are the same equations between variables of the same types."""
    (a, a_consts), (b, b_consts) = jx.opened(a), jx.opened(b)
    counts = lambda j: (len(j.invars), len(j.constvars), len(j.outvars), len(j.eqns))
    if counts(a) != counts(b) or not _equal(list(a_consts), list(b_consts)):
        return False
    # The variable of b for each variable of a, extended by every pair of equations.
    counterpart = dict(zip((*a.invars, *a.constvars), (*b.invars, *b.constvars), strict=True))
    has_same_type = lambda v, w: v.aval.shape == w.aval.shape and v.aval.dtype == w.aval.dtype

    def corresponds(v: Any, w: Any) -> bool:
        return has_same_type(v, w) and (
            same_atom(v, w) if jx.is_literal(v) or jx.is_literal(w) else counterpart.get(v) is w
        )

    # Programs for other shapes may have the same equations.
    if not all(map(has_same_type, counterpart, counterpart.values())):
        return False
    for e, f in zip(a.eqns, b.eqns, strict=True):
        has_same_arity = len(e.invars) == len(f.invars) and len(e.outvars) == len(f.outvars)
        if e.primitive is not f.primitive or not has_same_arity or not all(map(corresponds, e.invars, f.invars)):
            return False
        if differing(e, f, rules) is not None:
            return False
        counterpart.update(zip(e.outvars, f.outvars, strict=True))
    return all(map(corresponds, a.outvars, b.outvars))
