"""One product in FP8 with a scale for each row or tensor, and its derivatives.

    y  = x w        x and w quantised to float8
    dx = g w^T      g and w quantised to float8
    dw = x^T g      unquantised, in bfloat16

A product of quantised operands is `lax.dot_general(x8, w8)`, then times the scales of x and of w. An operand has one
scale for each row along the dims that are summed, so that the scales are constant within each sum. See the README for
the choice of rows.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax

from ...layout.precision import quantised

Dims = tuple[int, ...]
Numbers = tuple[tuple[Dims, Dims], tuple[Dims, Dims]]  # `dimension_numbers` of `lax.dot_general`
SCOPE = "fp8."  # precedes the path of the leaf in the names of operations


@dataclass(frozen=True)
class ScaledProduct:
    """The dims, dtype and scaling of one product of a weight and activations.

    Attributes:
      numbers: which dims are summed, and which are batch dims (`dimension_numbers`).
      dtype: the dtype of the result.
      weight: which operand is the weight, 0 or 1.
      path: the path of the weight.
      scaling: the elements of an operand that share one scale: "row", the elements that are summed; or "tensor",
        all elements of one batch index.
    """

    numbers: Numbers
    dtype: Any
    weight: int
    path: str
    scaling: str = "row"


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(config: ScaledProduct, a: jax.Array, b: jax.Array) -> jax.Array:
    """Return `lax.dot_general(a, b, config.numbers)` of operands quantised to FP8, in `config.dtype`.

    The backward needs both operands unquantised, as residuals. Communicates nothing.
    """
    return _scaled_dot(config, config.numbers, config.dtype, a, b)


def _backward(config: ScaledProduct, residuals: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, ...]:
    """Return the cotangents of both operands, from the cotangent `g` of their product."""
    w, x = residuals[config.weight], residuals[1 - config.weight]
    sums, batch = config.numbers
    free_dims = [_free_dims(v, sums[side], batch[side]) for side, v in enumerate(residuals)]
    free_of_x, free_of_w = free_dims[1 - config.weight], free_dims[config.weight]

    # dx = g w^T sums over the free dims of w, which follow the free dims of x in g if w is the right operand.
    start = len(batch[0]) + (len(free_of_x) if config.weight else 0)
    g_sums, g_batch = tuple(range(start, start + len(free_of_w))), tuple(range(len(batch[0])))
    dx = _scaled_dot(config, ((g_sums, free_of_w), (g_batch, batch[config.weight])), x.dtype, g, w)
    # The last dims of dx are the summed dims of w, in the order of w. Bring all dims into the order of x.
    summed_pairs = sorted(zip(sums[config.weight], sums[1 - config.weight], strict=True))
    dims_of_dx = (*batch[1 - config.weight], *free_of_x, *(d for _, d in summed_pairs))
    # dims_of_dx[i] is the dim of x that dim i of dx belongs to; `argsort` inverts that order.
    dx = lax.transpose(dx, [int(d) for d in np.argsort(dims_of_dx)])

    # dw = x^T g stays unquantised: the transpose of the same product in the compute dtype.
    as_operands = lambda w, x: (x, w) if config.weight else (w, x)
    plain_product = lambda w: lax.dot_general(*as_operands(w, x), config.numbers, preferred_element_type=config.dtype)
    # The product is linear in w, and x is a constant of it.
    (dw,) = jax.linear_transpose(plain_product, w)(g)
    return as_operands(dw, dx)


product.defvjp(lambda config, a, b: (_scaled_dot(config, config.numbers, config.dtype, a, b), (a, b)), _backward)


def _scaled_dot(config: ScaledProduct, numbers: Numbers, dtype: Any, a: jax.Array, b: jax.Array) -> jax.Array:
    """Return the product of the quantised operands, times their scales.

    The scales are powers of two, so that multiplying by them rounds nothing.
    """
    with jax.named_scope(SCOPE + config.path.replace("/", ".")):
        sums, batch = numbers
        by_row = config.scaling == "row"
        scaled_dims = (
            # Each operand's scale has size 1 on the dims that share it.
            sums if by_row else [[d for d in range(v.ndim) if d not in batch[side]] for side, v in enumerate((a, b))]
        )
        (a8, a_scale), (b8, b_scale) = (quantised(v, dims) for v, dims in zip((a, b), scaled_dims, strict=True))
        # The dims of y: batch dims, free dims of a, free dims of b.
        y = lax.dot_general(a8, b8, numbers, preferred_element_type=dtype)
        b_start = y.ndim - len(_free_dims(b, sums[1], batch[1]))
        a_scale = _align_scale(a_scale, sums[0], batch[0], range(b_start, y.ndim))
        b_scale = _align_scale(b_scale, sums[1], batch[1], range(len(batch[0]), b_start))
        return y * a_scale.astype(dtype) * b_scale.astype(dtype)


def _align_scale(scale: jax.Array, sums: Dims, batch: Dims, broadcast_dims: Sequence[int]) -> jax.Array:
    """Reshape an operand's scale to the dims of the result, with size 1 on `broadcast_dims`, the other operand's."""
    ordered = lax.transpose(scale, (*batch, *_free_dims(scale, sums, batch), *sums))
    # The summed dims have size 1: they share a scale.
    return lax.expand_dims(lax.squeeze(ordered, range(ordered.ndim - len(sums), ordered.ndim)), broadcast_dims)


def _free_dims(x: jax.Array, sums: Dims, batch: Dims) -> Dims:
    """Return the dims of an operand that are neither summed nor batch dims."""
    return tuple(d for d in range(x.ndim) if d not in (*sums, *batch))
