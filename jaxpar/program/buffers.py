"""Where buffers are, in the device's memory or the host's, and hints that keep large ones from existing too early.

XLA orders a program by its data dependencies alone. Zeros depend on nothing. XLA may therefore fill the buffer of a
loop's results, or of a scatter, before earlier loops run, and hold it meanwhile:

    zeros(result)                       zeros_after(x, result)
    zeros | loop 1 ... loop 2           loop 1 ... x | zeros | loop 2

Each function here adds a dependency and changes no value. Their savings were measured on the step of
`experiments/benchmarks/handwritten.py`.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp
from jax import lax

from . import jaxpr as jx

_LARGE = 1 << 20  # elements
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def is_on_host(x: jax.Array) -> bool:
    """Return whether an array of a traced program is in the host's memory."""
    return jax.typeof(x).memory_space == HOST


def on_device(x: jax.Array) -> jax.Array:
    """Return an array of a traced program in the device's memory: a copy, if it is in the host's."""
    return jax.device_put(x, DEVICE) if is_on_host(x) else x


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
