"""Put the collectives of a program on CPU devices in one order.

XLA's CPU runtime runs a program as a graph of kernels, each as soon as its operands exist. Devices may begin two
independent collectives in different orders. Collectives from `shard_map` share one channel, hence one rendezvous: a
device that arrives for the second collective meets devices that wait in the first. The process then aborts, or hangs.
This happens under ZeRO-3, whose gathers depend on parameters alone: a gather written after a layer stack runs at the
same time as the loop (jax 0.10.2 and 0.12.0.1: a small decoder under ZeRO-3 aborted in 15 of 15 processes).

On CPU devices, therefore, a scalar that is always zero, the token, runs through the program:

    token -> collective -> token' -> loop over layers (carried) -> token'' -> collective -> ...

Each collective's operand depends on the token, and the next token depends on the collective's result. The token is an
integer that no compiler can prove to be zero. It selects between a value and zeros instead of being added, so that
NaN and the sign of a zero do not change. Other platforms order collectives by streams: their programs are unchanged.
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
    """Return whether programs for a mesh must be put in order: those for several CPU devices."""
    return mesh.devices.flat[0].platform == "cpu" and mesh.size > 1


def token_after(x: jax.Array) -> Token:
    """Return a token that cannot exist before an array does; the array has elements, of any dtype."""
    # One element is enough: a collective's result exists as a whole or not at all.
    first = lax.squeeze(lax.slice(x, (0,) * x.ndim, (1,) * x.ndim), range(x.ndim))
    if jnp.issubdtype(first.dtype, jnp.complexfloating):
        first = lax.real(first)
    if first.dtype == jnp.bool_:
        first = first.astype(jnp.uint8)
    # Bits rather than the value, which may be NaN, and which a compiler might simplify.
    bits = lax.bitcast_convert_type(first, jnp.dtype(f"uint{8 * first.dtype.itemsize}"))
    # At most 64 bits are set, and 64 >> 7 is 0. Compilers do not follow the number of bits.
    return lax.shift_right_logical(lax.population_count(bits), jnp.asarray(7, bits.dtype)).astype(jnp.int32)


def is_token(eqn: Any) -> bool:
    """Return whether an equation makes a token. A value that follows from a token alone depends on no data."""
    return eqn.primitive.name == "population_count"


def after(token: Token, x: jax.Array) -> jax.Array:
    """Return `x`, which now waits for the token."""
    return lax.select(token != 0, jnp.zeros_like(x), x)


def first_token(x: jax.Array, mesh: Mesh) -> Token | None:
    """Return the token after `x`; None if no order is needed."""
    return token_after(x) if needed(mesh) else None


def behind(token: Token | None, tree: Any) -> Any:
    """Return a tree of arrays that wait for the token; random keys and arrays without elements are unchanged."""
    return tree if token is None else jax.tree.map(lambda x: after(token, x) if _has_numbers(x) else x, tree)


def in_order(fun: Callable[..., Any], mesh: Mesh) -> Callable[..., tuple[Any, Token | None]]:
    """Return `fun`, which runs inside `shard_map` over `mesh`, with its collectives one after another.

    Returns:
      A function `(token, *args) -> (result of fun, token)`. If no order is needed both tokens are None, and the program
      is that of `fun`.
    """
    if not needed(mesh):
        return lambda token, *args: (fun(*args), token)

    def ordered_fun(token: Token, *args: Any) -> tuple[Any, Token]:
        # The order is that of the equations in the trace, hence the same on all devices.
        closed, out_types = jax.make_jaxpr(fun, return_shape=True)(*args)
        token, outs = _run_in_order(closed, jax.tree.leaves(args), token)
        return jax.tree.unflatten(jax.tree.structure(out_types), outs), token

    return ordered_fun


def _run_in_order(closed: Any, values: Sequence[Any], token: Token) -> tuple[Token, list[Any]]:
    """Run a program with its collectives in order; return the token after it, and its outputs."""
    jaxpr, _ = jx.opened(closed)

    def results(eqn: Any, values: Sequence[Any]) -> list[Any]:
        nonlocal token
        # Kernels without collectives may run in any order, and stay free of the token.
        if not jx.communicates([eqn], PRIMITIVES):
            return jx.bind(eqn, values)
        # Loops and calls take the token in, so that the collectives inside them keep the order too.
        is_entered = eqn.primitive.name in _ENTERED
        token, outs = jx.rerun(eqn, values, _run_in_order, token) if is_entered else _collective(eqn, values, token)
        return outs

    env = jx.Environment.of(closed, values)
    # The token would keep a collective alive whose result nothing reads.
    for eqn in jx.live(jaxpr.eqns, jaxpr.outvars):
        env.compute(eqn, results)
    return token, env.read(jaxpr.outvars)


def _collective(eqn: Any, values: Sequence[Any], token: Token) -> tuple[Token, list[Any]]:
    """Run a collective, or a call that contains one and cannot be entered; return the next token and the results."""
    # XLA makes one all-reduce per operand, so that each of them needs its place in the order.
    if PRIMITIVES.get(eqn.primitive.name) == "all-reduce" and len(values) > 1:
        outs = []
        for value in values:
            token, (out,) = _collective(eqn, [value], token)
            outs.append(out)
        return token, outs
    outs = jx.bind(eqn, [after(token, x) if _has_numbers(x) else x for x in map(jnp.asarray, values)])
    first_result = next(filter(_has_numbers, outs), None)
    return (token if first_result is None else token_after(first_result)), outs


def _has_numbers(x: jax.Array) -> bool:
    """Return whether an array has elements, and these are numbers; the arguments of a call may be random keys."""
    return bool(x.size) and not jnp.issubdtype(x.dtype, jax.dtypes.extended)


# Equations whose programs are put in order too. Custom derivatives are lost, and no longer needed: the program is
# differentiated already.
_ENTERED = ("scan", "while", "cond", *jx.CALLS, *jx.REMATS, *jx.CUSTOM)


class _LastCall(threading.local):
    """The last call of a step within a caller's `jit`.

    Attributes:
      trace: the trace in which it happened.
      result: returns one of the call's results, None if it does not exist any more.
    """

    trace: Any = None
    result: Callable[[], Tracer | None] = staticmethod(lambda: None)


_last_call = _LastCall()


def follow(x: jax.Array) -> jax.Array:
    """Return `x`, an argument of a call within a caller's `jit`, which now waits for the last call in that trace.

    A step waits for the previous step through its state. Two evaluations of one state would not wait for each other.
    """
    last_result = _last_call.result() if jec.get_opaque_trace_state() == _last_call.trace else None
    return x if last_result is None else after(token_after(last_result), x)


def leave(result: Tracer) -> None:
    """Note a result of a call within a caller's `jit`, which exists only after all collectives of the call."""
    _last_call.trace = jec.get_opaque_trace_state()
    # JAX's search for leaks reports a tracer that outlives its trace. A weak reference lets it go.
    _last_call.result = weakref.ref(result) if jax.config.values["jax_check_tracer_leaks"] else lambda: result
