"""Equinox's primitives, which solvers of lineax, optimistix and diffrax consist of, as equations of JAX's own.

They keep the types of what they were given, and compare them when they are differentiated and lowered. Within
`shard_map` every type names the mesh, in a loss that was traced outside none does: "pytree does not match
out_structure". So a device's program, derivatives included, is traced as if there were no mesh; then each such
primitive is replaced by the function that implements it, by which Equinox lowers it as well.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jec
from jax.core import ShapedArray

from . import jaxpr as jx
from .walk import visit

_PACKAGE = "equinox"


def without_filter_primitives(fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun`, which runs inside `shard_map`, without these primitives; itself where Equinox has not been imported."""
    if _PACKAGE not in sys.modules:
        return fun

    def run(*args: Any) -> Any:
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            closed, out = jax.make_jaxpr(fun, return_shape=True)(*jax.tree.map(_of_no_mesh, args))
            closed = _expanded(closed)
        outs = jec.jaxpr_as_fun(closed)(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(out), outs)

    return run


def _of_no_mesh(x: Any) -> ShapedArray:
    aval: Any = getattr(x, "aval", None) or jax.typeof(x)  # of a variable, a literal or a value
    return ShapedArray(aval.shape, aval.dtype, aval.weak_type, memory_space=aval.memory_space)


def _implementation(eqn: Any) -> Callable[..., Any] | None:
    """The function that an equation of Equinox's stands for."""
    own = inner = getattr(eqn.primitive, "impl", None)
    while isinstance(inner, functools.partial):
        inner = inner.func
    of = getattr(inner, "__module__", None) or ""
    return functools.partial(own, **eqn.params) if own and of.partition(".")[0] == _PACKAGE else None


def implemented(eqn: Any) -> Any:
    """The closed jaxpr of that function, which may hold others of them; None of any other equation."""
    own = _implementation(eqn)
    return own and jax.make_jaxpr(own)(*map(_of_no_mesh, eqn.invars))


def is_error(branch: Any) -> bool:
    """Whether a branch, open or closed, is the one that `eqx.error_if` runs to raise its error: it returns nothing."""
    callbacks = (eqn.params.get("callback") for eqn, _ in visit(jx.opened(branch)[0].eqns))
    functions = (getattr(callback, "callback_func", None) for callback in callbacks)
    return any(getattr(function, "__module__", "") == f"{_PACKAGE}._errors" for function in functions)


def _expanded(closed: Any) -> Any:
    """A closed jaxpr without them."""
    jaxpr, _ = jx.opened(closed)
    if not any(_implementation(eqn) for eqn, _ in visit(jaxpr.eqns)):
        return closed

    def of(eqn: Any, ins: Sequence[Any]) -> Sequence[Any]:
        if (own := implemented(eqn)) is not None:
            return jec.jaxpr_as_fun(_expanded(own))(*ins)
        return jx.bind(eqn, ins, **{name: _inside(value) for name, value in eqn.params.items()})

    return jax.make_jaxpr(lambda *values: jx.evaluate(closed, values, of))(*map(_of_no_mesh, jaxpr.invars))


def _inside(value: Any) -> Any:
    """A parameter of an equation, which may hold programs."""
    if isinstance(value, jec.ClosedJaxpr):
        return _expanded(value)
    if isinstance(value, jec.Jaxpr):
        return _expanded(jec.ClosedJaxpr(value, ())).jaxpr
    if isinstance(value, tuple):
        items = map(_inside, value)
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value
