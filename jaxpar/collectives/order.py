"""One order for the collectives of a program on CPU devices.

XLA's CPU runtime runs a program as a graph of kernels, each as soon as its operands are there. Devices may take up two
collectives that do not depend on each other in different orders, and those that come from `shard_map` share one
channel, hence one rendezvous: a device that arrives for the second meets those that wait in the first. The process
then aborts, or hangs. Gathers of ZeRO-3 depend on parameters alone, so one that stands after a layer stack runs
beside the loop (jax 0.10.2 and 0.12.0.1: a small decoder under ZeRO-3 aborted in 15 of 15 processes).

So on CPU devices a scalar that is always zero, the token, runs through the program:

    token -> collective -> token' -> loop over layers (carried) -> token'' -> collective -> ...

Each collective's operand depends on the token, and the next token on the collective's result. The token is an
integer, made so that no compiler sees that it is zero, and it chooses between a value and zeros instead of being
added to it: neither NaN nor the sign of a zero changes. Other platforms order collectives by streams, and get the
program as it is.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.sharding import Mesh

from ..program import jaxpr as jx
from ..program.collectives import PRIMITIVES

Token = jax.Array  # int32 scalar, always 0


def needed(mesh: Mesh) -> bool:
    """Whether programs for a mesh have to be put in order: those for CPU devices."""
    return mesh.devices.flat[0].platform == "cpu" and mesh.size > 1


def token_after(x: jax.Array) -> Token:
    """The token after an array, of any dtype, that has elements."""
    first = lax.squeeze(lax.slice(x, (0,) * x.ndim, (1,) * x.ndim), range(x.ndim))
    if jnp.issubdtype(first.dtype, jnp.complexfloating):
        first = lax.real(first)
    if first.dtype == jnp.bool_:
        first = first.astype(jnp.uint8)
    bits = lax.bitcast_convert_type(first, jnp.dtype(f"uint{8 * first.dtype.itemsize}"))
    # At most 64 bits are set, so that nothing is left of their number.
    return lax.shift_right_logical(lax.population_count(bits), jnp.asarray(7, bits.dtype)).astype(jnp.int32)


def is_token(eqn: Any) -> bool:
    """Whether an equation of a program makes a token: what follows from it alone depends on nothing."""
    return eqn.primitive.name == "population_count"


def after(token: Token, x: jax.Array) -> jax.Array:
    """`x`, made to wait for the token."""
    return lax.select(token != 0, jnp.zeros_like(x), x)


def first_token(x: jax.Array, mesh: Mesh) -> Token | None:
    """The token after `x`, where an order is needed."""
    return token_after(x) if needed(mesh) else None


def behind(token: Token | None, tree: Any) -> Any:
    """A tree of arrays, each made to wait for the token; random keys and arrays without elements stay as they are."""
    return tree if token is None else jax.tree.map(lambda x: after(token, x) if _is_full(x) else x, tree)


def in_order(fun: Callable[..., Any], mesh: Mesh) -> Callable[..., tuple[Any, Token | None]]:
    """`fun`, which runs inside `shard_map` over `mesh`, with its collectives one after the other.

    Returns a function `(token, *args) -> (what fun returns, token)`. Where no order is needed both tokens are None,
    and the program is that of `fun`.
    """
    if not needed(mesh):
        return lambda token, *args: (fun(*args), token)

    def run(token: Token, *args: Any) -> tuple[Any, Token]:
        closed, out = jax.make_jaxpr(fun, return_shape=True)(*args)
        token, outs = _run(closed, jax.tree.leaves(args), token)
        return jax.tree.unflatten(jax.tree.structure(out), outs), token

    return run


def _run(closed: Any, values: Sequence[Any], token: Token) -> tuple[Token, list[Any]]:
    """The token after a program, and its outputs."""
    jaxpr, _ = jx.opened(closed)

    def results(eqn: Any, values: Sequence[Any]) -> list[Any]:
        nonlocal token
        if not jx.communicates([eqn], PRIMITIVES):
            return jx.bind(eqn, values)
        within = eqn.primitive.name in _INSIDE
        token, outs = jx.rerun(eqn, values, _run, token) if within else _collective(eqn, values, token)
        return outs

    env = jx.Environment.of(closed, values)
    # What nobody reads would be kept alive by the token.
    for eqn in jx.live(jaxpr.eqns, jaxpr.outvars):
        env.compute(eqn, results)
    return token, env.read(jaxpr.outvars)


def _collective(eqn: Any, values: Sequence[Any], token: Token) -> tuple[Token, list[Any]]:
    """A collective, or a call of one that cannot be looked into. One of several operands is several for XLA."""
    if PRIMITIVES.get(eqn.primitive.name) == "all-reduce" and len(values) > 1:
        outs = []
        for value in values:
            token, (out,) = _collective(eqn, [value], token)
            outs.append(out)
        return token, outs
    outs = jx.bind(eqn, [after(token, x) if _is_full(x) else x for x in map(jnp.asarray, values)])
    full = next(filter(_is_full, outs), None)
    return (token if full is None else token_after(full)), outs


def _is_full(x: jax.Array) -> bool:
    """Whether an array has elements that are numbers: a call's may be keys."""
    return bool(x.size) and not jnp.issubdtype(x.dtype, jax.dtypes.extended)


# What is gone into; of functions with derivatives of their own these have been taken.
_INSIDE = ("scan", "while", "cond", *jx.CALLS, *jx.REMATS, *jx.CUSTOM)


class _Last(threading.local):
    """The trace that a caller is in, and something that the last call of a step returned there."""

    trace: Any = None
    result: Callable[[], Tracer | None] = staticmethod(lambda: None)


_last = _Last()


def follow(x: jax.Array) -> jax.Array:
    """`x`, an argument of a call within a caller's `jit`, made to wait for the results of the last call in that trace.

    A step waits for the one before it by its state. Two evaluations of one state would not wait for each other.
    """
    before = _last.result() if jec.get_opaque_trace_state() == _last.trace else None
    return x if before is None else after(token_after(before), x)


def leave(result: Tracer) -> None:
    """Note a result of a call within a caller's `jit` that comes after all that the call does."""
    _last.trace = jec.get_opaque_trace_state()
    # A tracer that outlives its trace is what JAX's search for leaks looks for.
    _last.result = weakref.ref(result) if jax.config.values["jax_check_tracer_leaks"] else lambda: result
