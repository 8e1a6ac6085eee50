"""Where buffers are, in the device's memory or the host's; whether they are filled; and from when on they exist.

XLA orders a program by its data dependencies alone. Zeros depend on nothing. XLA may therefore fill the buffer of a
loop's results, or of a scatter, before earlier loops run, and hold it meanwhile:

    zeros(result)                       zeros_after(x, result)
    zeros | loop 1 ... loop 2           loop 1 ... x | zeros | loop 2

`zero_after`, `zeros_after` and `anchor` add a dependency and change no value. Their savings were measured on the step
of `experiments/benchmarks/handwritten.py`.

A buffer that a loop writes whole needs no zeros (`uninitialized`), which are 9 GB of each step of Llama-3.2-1B.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp
from jax import lax

from . import jaxpr as jx
from .savings import saving

_LARGE = 1 << 20  # elements
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def is_on_host(x: jax.Array) -> bool:
    """Return whether an array of a traced program is in the host's memory."""
    return jax.typeof(x).memory_space == HOST


def on_device(x: jax.Array) -> jax.Array:
    """Return an array of a traced program in the device's memory: a copy, if it is in the host's."""
    return jax.device_put(x, DEVICE) if is_on_host(x) else x


def uninitialized(shape: Sequence[int], dtype: Any) -> jax.Array:
    """Return a buffer that is allocated and not filled.

    Invariant: every element is written before it is read. A buffer that is added to needs zeros. So does one that idle
    ranks read before it is written, also if a select drops their results: NaN times 0 is NaN, and a kernel that takes
    its sizes from such memory may write anywhere.

    On GPUs and TPUs the elements are whatever the memory holds. On CPUs they are zeros, so that a program that breaks
    the invariant fails in the same way in every run.
    """
    buffer = jax.ShapeDtypeStruct(shape, dtype)
    with saving("buffers", buffer.size * buffer.dtype.itemsize):
        return lax.empty(tuple(shape), dtype)


def scan(body: Callable[[Any, Any], tuple[Any, Any]], init: Any, xs: Any, length: int, reverse: bool = False) -> Any:
    """Run `lax.scan`, which fills the buffers of stacked results with zeros first, without filling them.

    Each iteration writes its y into `uninitialized` buffers that the loop carries. Results in the host's memory are
    left to `lax.scan`, and weakly typed ones too, since a buffer has a dtype.

    Args:
      body: `body(carry, x)` returns the carry and a y.
      init, xs, length, reverse: as for `lax.scan`; no array of `xs` may be empty.

    Returns:
      The last carry, and the ys of all iterations, [length, ...].
    """
    # 1. Trace an iteration for the shapes of its y. The loop runs these equations, so that no body is traced twice.
    first_x = jax.tree.map(lambda x: lax.index_in_dim(x, 0, keepdims=False), xs)
    traced, shapes = jax.make_jaxpr(body, return_shape=True)(init, first_x)
    run, (carry_tree, y_tree) = jec.jaxpr_as_fun(traced), map(jax.tree.structure, shapes)
    n = carry_tree.num_leaves
    # An index that may be negative becomes a `select`, which would hide from XLA that the loop fills the buffer.
    write = functools.partial(lax.dynamic_update_index_in_dim, axis=0, allow_negative_indices=False)

    def allocate(aval: Any) -> jax.Array | None:
        """Return the buffer of a result; None if `lax.scan` stacks it."""
        is_carried = not aval.weak_type and aval.memory_space == DEVICE
        return uninitialized((length, *aval.shape), aval.dtype) if is_carried else None

    # 2. Run the loop. The number of an iteration is read from an array. If it were counted, XLA's collective pipeliner
    # would see that iterations write layer after layer, and move collectives that are meant for this iteration to the
    # next one.
    def fill(state: Any, scanned: Any) -> Any:
        (carry, buffers), (number, x) = state, scanned
        results = run(*jax.tree.leaves((carry, x)))
        pairs = list(zip(buffers, results[n:], strict=True))
        filled = [None if buffer is None else write(buffer, y, number) for buffer, y in pairs]
        stacked = [y if buffer is None else None for buffer, y in pairs]
        return (jax.tree.unflatten(carry_tree, results[:n]), filled), stacked

    state, scanned = (init, [allocate(aval) for aval in traced.out_avals[n:]]), (jnp.arange(length), xs)
    (carry, filled), stacked = lax.scan(fill, state, scanned, length=length, reverse=reverse)
    ys = [y if buffer is None else buffer for buffer, y in zip(filled, stacked, strict=True)]
    return carry, jax.tree.unflatten(y_tree, ys)


def zero_after(x: jax.Array, dtype: Any) -> jax.Array:
    """Return a scalar 0 that cannot exist before `x` does.

    Args:
      x: a floating-point array with elements. If its first element is NaN, so is the result.
      dtype: the dtype of the result.
    """
    first = lax.squeeze(lax.slice(x, (0,) * x.ndim, (1,) * x.ndim), range(x.ndim))
    # XLA does not know that the smaller of |x| and 0 is 0, and keeps the dependency.
    return jnp.minimum(jnp.abs(first.astype(jnp.float32)), 0).astype(dtype)


def zeros_after(x: jax.Array, shape: Sequence[int], dtype: Any) -> jax.Array:
    """Return zeros that cannot exist before `x` does."""
    return jnp.full(shape, zero_after(x, dtype))


def anchor(eqns: Sequence[Any], earlier: jax.Array) -> tuple[list[Any], dict[Any, jax.Array]]:
    """Make the large constant buffers of some equations wait for an array.

    Args:
      earlier: the array (floating-point), before which no large constant may exist.

    Returns:
      The equations, which read a new variable instead of each constant, and the values of these variables.
    """
    values: dict[Any, jax.Array] = {}
    anchored_eqns = []
    for eqn in eqns:
        is_constant = eqn.primitive.name == "broadcast_in_dim" and jx.is_literal(eqn.invars[0])
        # Small buffers are not worth a dependency.
        if is_constant and math.prod(eqn.outvars[0].aval.shape) >= _LARGE:
            literal = eqn.invars[0]
            var = jec.Var(literal.aval)
            values[var] = literal.val + zero_after(earlier, literal.aval.dtype)
            eqn = eqn.replace(invars=[var])
        anchored_eqns.append(eqn)
    return anchored_eqns, values
