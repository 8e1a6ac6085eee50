"""In which memory buffers are, and hints that keep large ones from being created long before they are used.

XLA orders a program by its data dependencies alone. Zeros depend on nothing, so it may fill the buffer of a loop's
results, or of a scatter, before the loops that run first, and hold it all the while. Each function here adds a
dependency and changes no value. What they save was measured on the step in `experiments/benchmarks/handwritten.py`.
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
    """Whether an array of a traced program is in the host's memory."""
    return jax.typeof(x).memory_space == HOST


def on_device(x: jax.Array) -> jax.Array:
    """An array of a traced program in the device's memory: a copy, if it is in the host's."""
    return jax.device_put(x, DEVICE) if is_on_host(x) else x


def zero_after(x: jax.Array, dtype: Any) -> jax.Array:
    """The scalar 0 that cannot exist before `x` (floating-point) does; NaN if the first element of `x` is."""
    first = lax.squeeze(lax.slice(x, (0,) * x.ndim, (1,) * x.ndim), range(x.ndim))
    return jnp.minimum(jnp.abs(first.astype(jnp.float32)), 0).astype(dtype)


def zeros_after(x: jax.Array, shape: Sequence[int], dtype: Any) -> jax.Array:
    """Zeros that cannot exist before `x` does."""
    return jnp.full(shape, zero_after(x, dtype))


def anchor(eqns: Sequence[Any], after: jax.Array) -> tuple[list[Any], dict[Any, jax.Array]]:
    """Equations whose large constant buffers cannot exist before `after` does, and values of the variables added."""
    values: dict[Any, jax.Array] = {}
    out = []
    for eqn in eqns:
        constant = eqn.primitive.name == "broadcast_in_dim" and jx.is_literal(eqn.invars[0])
        if constant and math.prod(eqn.outvars[0].aval.shape) >= _LARGE:
            literal = eqn.invars[0]
            var = jec.Var(literal.aval)
            values[var] = literal.val + zero_after(after, literal.aval.dtype)
            eqn = eqn.replace(invars=[var])
        out.append(eqn)
    return out, values
