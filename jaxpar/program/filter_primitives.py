"""Replace Equinox's primitives, on which lineax, optimistix and diffrax are built, by equations of JAX's own.

These primitives remember the types of their arguments, and compare them when they are differentiated and lowered.
Within `shard_map` every type names the mesh; in a loss that was traced outside, none does. The comparison then fails:
"pytree does not match out_structure".

A device's program, derivatives included, is therefore traced as if there were no mesh. Then each such primitive is
replaced by the function that implements it, through which Equinox lowers it as well.
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
    """Return `fun`, which runs inside `shard_map`, without Equinox's primitives; itself if Equinox is not imported."""
    if _PACKAGE not in sys.modules:
        return fun

    def run(*args: Any) -> Any:
        # Trace without a mesh, then run the program on the arguments, whose types name one.
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            closed, out = jax.make_jaxpr(fun, return_shape=True)(*jax.tree.map(_type_without_mesh, args))
            closed = _expanded(closed)
        outs = jec.jaxpr_as_fun(closed)(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(out), outs)

    return run


def _type_without_mesh(x: Any) -> ShapedArray:
    """Return the type of a variable, literal or value, without the mesh."""
    aval: Any = getattr(x, "aval", None) or jax.typeof(x)
    return ShapedArray(aval.shape, aval.dtype, aval.weak_type, memory_space=aval.memory_space)


def _implementation(eqn: Any) -> Callable[..., Any] | None:
    """Return the function that implements an equation of Equinox's; None for other equations."""
    # Equinox binds options to implementations by `partial`.
    impl = function = getattr(eqn.primitive, "impl", None)
    while isinstance(function, functools.partial):
        function = function.func
    module = getattr(function, "__module__", None) or ""
    return functools.partial(impl, **eqn.params) if impl and module.partition(".")[0] == _PACKAGE else None


def implemented(eqn: Any) -> Any:
    """Return the closed jaxpr of the function that implements an equation of Equinox's; None for other equations.

    It may hold other equations of Equinox's.
    """
    implementation = _implementation(eqn)
    return implementation and jax.make_jaxpr(implementation)(*map(_type_without_mesh, eqn.invars))


def is_error(branch: Any) -> bool:
    """Return whether a branch, open or closed, is the one in which `eqx.error_if` raises its error.

    Such a branch never returns, so that its results can be ignored.
    """
    # `error_if` raises in a host callback, whose function is in Equinox's module of errors.
    callbacks = (eqn.params.get("callback") for eqn, _ in visit(jx.opened(branch)[0].eqns))
    functions = (getattr(callback, "callback_func", None) for callback in callbacks)
    return any(getattr(function, "__module__", "") == f"{_PACKAGE}._errors" for function in functions)


def _expanded(closed: Any) -> Any:
    """Return a closed jaxpr without Equinox's primitives, in the programs inside it as well."""
    jaxpr, _ = jx.opened(closed)
    # Most programs have none of them, and need no second trace.
    if not any(_implementation(eqn) for eqn, _ in visit(jaxpr.eqns)):
        return closed

    def results(eqn: Any, ins: Sequence[Any]) -> Sequence[Any]:
        if (implementation := implemented(eqn)) is not None:
            return jec.jaxpr_as_fun(_expanded(implementation))(*ins)
        return jx.bind(eqn, ins, **{name: _expanded_param(value) for name, value in eqn.params.items()})

    return jax.make_jaxpr(lambda *values: jx.evaluate(closed, values, results))(*map(_type_without_mesh, jaxpr.invars))


def _expanded_param(value: Any) -> Any:
    """Return a parameter of an equation, with the programs in it expanded."""
    if isinstance(value, jec.ClosedJaxpr):
        return _expanded(value)
    if isinstance(value, jec.Jaxpr):
        return _expanded(jec.ClosedJaxpr(value, ())).jaxpr
    # A named tuple takes its fields by position.
    if isinstance(value, tuple):
        items = map(_expanded_param, value)
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value
