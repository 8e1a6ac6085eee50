"""One product in FP8 with a scale for each row or tensor, and its derivatives."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Dims = tuple[int, ...]
Numbers = tuple[tuple[Dims, Dims], tuple[Dims, Dims]]  # as `lax.dot_general` has `dimension_numbers`
F8 = jnp.float8_e4m3fn
SCOPE = "fp8."  # before the path of the leaf, in the names of operations
_MOST = float(jnp.finfo(F8).max)  # 448
_LEAST = 2.0**-100  # of a row's largest element: the scale and its inverse stay within bfloat16's range


@dataclass(frozen=True)
class ScaledProduct:
    """How two operands are multiplied.

    Attributes:
      numbers: which dims are summed, and which are batch dims.
      dtype: of the result.
      weight: which operand is the weight, 0 or 1.
      path: of the weight.
      scaling: of what an operand has one scale: "row", what is summed; or "tensor", all but batch dims.
    """

    numbers: Numbers
    dtype: Any
    weight: int
    path: str
    scaling: str = "row"


def quantised(x: jax.Array, dims: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """float8_e4m3fn of x's shape, and scales of x's dtype with 1 in the place of `dims`: their product is about x.

    A scale is that power of two with which the largest element along `dims` lies in (224, 448]; a row with a NaN or an
    infinity has NaNs.
    """
    most = jnp.max(jnp.abs(x), dims, keepdims=True).astype(jnp.float32)
    bits = lax.bitcast_convert_type(_MOST / jnp.maximum(most, _LEAST), jnp.uint32)
    factor = lax.bitcast_convert_type(bits & jnp.uint32(0xFF80_0000), jnp.float32)  # without its mantissa
    return (x * factor.astype(x.dtype)).astype(F8), (1 / factor).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(how: ScaledProduct, a: jax.Array, b: jax.Array) -> jax.Array:
    """`lax.dot_general(a, b)` in `how.dtype`, of operands that are rounded to FP8; see the README.

    Keeps both for the backward as they are; communicates nothing.
    """
    return _scaled(how, how.numbers, how.dtype, a, b)


def _forward(how: ScaledProduct, a: jax.Array, b: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _scaled(how, how.numbers, how.dtype, a, b), (a, b)


def _backward(how: ScaledProduct, kept: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, ...]:
    w, x = kept[how.weight], kept[1 - how.weight]
    sums, batch = how.numbers
    free = [_free(v, sums[side], batch[side]) for side, v in enumerate(kept)]
    of_x, of_w = free[1 - how.weight], free[how.weight]
    first = len(batch[0]) + (len(of_x) if how.weight else 0)
    numbers = ((tuple(range(first, first + len(of_w))), of_w), (tuple(range(len(batch[0]))), batch[how.weight]))
    dx = _scaled(how, numbers, x.dtype, g, w)
    pairs = sorted(zip(sums[how.weight], sums[1 - how.weight], strict=True))  # the result's last dims are w's, in order
    order = (*batch[1 - how.weight], *of_x, *(d for _, d in pairs))
    plain = lambda w: _dot((x, w) if how.weight else (w, x), how)
    (dw,) = jax.linear_transpose(plain, w)(g)
    dx = lax.transpose(dx, [int(d) for d in np.argsort(order)])
    return (dx, dw) if how.weight else (dw, dx)


product.defvjp(_forward, _backward)


def _dot(operands: tuple[jax.Array, jax.Array], how: ScaledProduct) -> jax.Array:
    return lax.dot_general(*operands, how.numbers, preferred_element_type=how.dtype)


def _scaled(how: ScaledProduct, numbers: Numbers, dtype: Any, a: jax.Array, b: jax.Array) -> jax.Array:
    """The product of the quantised operands, times the scales. These are powers of two: no factor rounds."""
    with jax.named_scope(SCOPE + how.path.replace("/", ".")):
        sums, batch = numbers
        row = how.scaling == "row"
        spans = sums if row else [[d for d in range(v.ndim) if d not in batch[i]] for i, v in enumerate((a, b))]
        (a8, of_a), (b8, of_b) = (quantised(v, dims) for v, dims in zip((a, b), spans, strict=True))
        y = lax.dot_general(a8, b8, numbers, preferred_element_type=dtype)
        m, n = (len(_free(v, sums[side], batch[side])) for side, v in enumerate((a, b)))
        of_a, of_b = _rows(of_a, sums[0], batch[0], (), n), _rows(of_b, sums[1], batch[1], (1,) * m, 0)
        return y * of_a.astype(dtype) * of_b.astype(dtype)


def _rows(scale: jax.Array, sums: Dims, batch: Dims, before: Dims, after: int) -> jax.Array:
    """Scales by the result's dims: batch dims, those `before`, the operand's free ones, so many `after`."""
    free = _free(scale, sums, batch)
    sizes = [scale.shape[d] for d in (*batch, *free)]
    ordered = lax.transpose(scale, (*batch, *free, *sums))
    return ordered.reshape(*sizes[: len(batch)], *before, *sizes[len(batch) :], *(1,) * after)


def _free(x: jax.Array, sums: Dims, batch: Dims) -> Dims:
    return tuple(d for d in range(x.ndim) if d not in (*sums, *batch))
