"""Whether two equations do the same, down to the programs and the rules of differentiation inside them."""

import functools
import types
from typing import Any

import jax
import jax.extend.core as jec
import numpy as np

from . import jaxpr as jx


def same_atom(a: Any, b: Any) -> bool:
    """Whether two operands are one variable, or equal literals."""
    literals = jx.is_literal(a) and jx.is_literal(b)
    return a is b or (literals and a.aval.dtype == b.aval.dtype and bool(np.array_equal(a.val, b.val)))


def differing(e: Any, f: Any, rules: bool = True) -> str | None:
    """The first parameter in which two equations of one primitive differ; `rules` of differentiation count as one."""
    if e.primitive.name.startswith("custom_") and "call_jaxpr" in e.params:
        # Rules are functions made anew in every trace: what counts is what they do (a derivative's own rules do not).
        same = _equal(e.params["call_jaxpr"], f.params["call_jaxpr"], rules)
        same = same and (not rules or _equal(_derivative(e), _derivative(f), False))
        return None if same else "call_jaxpr"
    return next((name for name in e.params if not _equal(e.params[name], f.params.get(name), rules)), None)


@functools.lru_cache(64)  # each equation is compared with many
def _derivative(eqn: Any) -> Any:
    """The transpose of an equation's derivative, as a program."""
    avals: list[Any] = [a.aval for a in eqn.invars]
    invars = [jec.Var(aval) for aval in avals]
    fun = jx.run([eqn.replace(invars=invars)], invars, [v for v in eqn.outvars if not isinstance(v, jec.DropVar)])
    types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
    return jax.make_jaxpr(lambda *values: jx.pulled(fun, values))(*types)


def short(value: Any) -> str:
    """A value on less than a line."""
    text = " ".join(str(value).split())
    return text if len(text) < 60 else f"{text[:57]}..."


def _equal(a: Any, b: Any, rules: bool = True) -> bool:
    """Whether parameters of two equations say the same: programs by their equations, functions by code and closure."""
    if a is b:
        return True
    if isinstance(a, dict | list | tuple):
        if type(a) is not type(b) or len(a) != len(b):
            return False
        items = (lambda x: sorted(x.items(), key=lambda i: str(i[0]))) if isinstance(a, dict) else list
        return all(_equal(x, y, rules) for x, y in zip(items(a), items(b), strict=True))
    if hasattr(jx.opened(a)[0], "eqns"):
        return hasattr(jx.opened(b)[0], "eqns") and same_program(a, b, rules)
    if isinstance(a, np.ndarray | jax.Array):
        return isinstance(b, np.ndarray | jax.Array) and a.shape == b.shape and bool(np.array_equal(a, b))
    if isinstance(a, types.FunctionType):
        cells = lambda f: [cell.cell_contents for cell in f.__closure__ or ()]
        return isinstance(b, types.FunctionType) and a.__code__ == b.__code__ and _equal(cells(a), cells(b))
    return type(a) is type(b) and bool(a == b)


def same_program(a: Any, b: Any, rules: bool = True) -> bool:
    """Whether two programs, open or closed, are the same equations between variables of the same types."""
    (a, consts), (b, others) = jx.opened(a), jx.opened(b)
    counts = lambda j: (len(j.invars), len(j.constvars), len(j.outvars), len(j.eqns))
    if counts(a) != counts(b) or not _equal(list(consts), list(others)):
        return False
    same = dict(zip((*a.invars, *a.constvars), (*b.invars, *b.constvars), strict=True))
    typed = lambda v, w: v.aval.shape == w.aval.shape and v.aval.dtype == w.aval.dtype

    def alike(v: Any, w: Any) -> bool:
        return typed(v, w) and (same_atom(v, w) if jx.is_literal(v) or jx.is_literal(w) else same.get(v) is w)

    if not all(map(typed, same, same.values())):
        return False
    for e, f in zip(a.eqns, b.eqns, strict=True):
        shape = len(e.invars) == len(f.invars) and len(e.outvars) == len(f.outvars)
        if e.primitive is not f.primitive or not shape or not all(map(alike, e.invars, f.invars)):
            return False
        if differing(e, f, rules) is not None:
            return False
        same.update(zip(e.outvars, f.outvars, strict=True))
    return all(map(alike, a.outvars, b.outvars))
