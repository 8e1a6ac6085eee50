"""The operations of reducing collectives, NCCL's ncclRedOp_t, and the dtypes for which each is defined."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..backend.text import did_you_mean
from .ranks import Axes, count

OPS = ("sum", "prod", "min", "max", "avg")
# "avg" is a sum, which `mean` divides at the end.
COMBINE = {"sum": lax.add, "avg": lax.add, "prod": lax.mul, "min": lax.min, "max": lax.max}
DTYPES = (
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "bfloat16"),
    *("float32", "float64", "float8_e4m3fn", "float8_e5m2"),
)


def check_op(op: Any, dtype: jnp.dtype) -> None:
    """Check that `op` is one of `OPS` and is defined for the dtype.

    Raises:
      ValueError: it is not; the message names what to use instead.
    """
    if op not in OPS:
        raise ValueError(f"op={op!r} is unknown; use one of {', '.join(OPS)}{did_you_mean(op, OPS)}")
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    if dtype.name == "bool" and op not in ("min", "max"):
        raise ValueError(f"op={op!r} is not for bool; cast to int32 to count, or use op='max' for any, 'min' for all")
    if is_complex and op in ("min", "max"):
        raise ValueError(f"op={op!r} is not for {dtype}, since complex numbers have no order; reduce jnp.abs(x)")
    if not is_complex and dtype.name not in DTYPES:
        raise ValueError(f"{dtype} cannot be reduced; cast to one of {', '.join(DTYPES)}")


def mean(total: jax.Array, axes: Axes) -> jax.Array:
    """Divide a sum over ranks by their number, in the sum's dtype; integers round towards zero."""
    if not jnp.issubdtype(total.dtype, jnp.integer):
        return total / jnp.asarray(count(axes), total.dtype)
    wide = jnp.int32 if total.dtype.itemsize < 4 else total.dtype  # int8 may not hold the number of ranks
    # `lax.div` makes -1 / 2 to 0. Python's `//` would round it down to -1.
    return lax.div(total.astype(wide), jnp.asarray(count(axes), wide)).astype(total.dtype)
