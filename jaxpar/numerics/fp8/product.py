"""One product in FP8 with a scale for each row or tensor, and its derivatives."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax

from ...layout.precision import quantised

Dims = tuple[int, ...]
Numbers = tuple[tuple[Dims, Dims], tuple[Dims, Dims]]  # as `lax.dot_general` has `dimension_numbers`
SCOPE = "fp8."  # before the path of the leaf, in the names of operations


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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(how: ScaledProduct, a: jax.Array, b: jax.Array) -> jax.Array:
    """`lax.dot_general(a, b)` in `how.dtype`, of operands that are rounded to FP8; see the README.

    Keeps both for the backward as they are; communicates nothing.
    """
    return _scaled(how, how.numbers, how.dtype, a, b)


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
    in_order = lambda w, x: (x, w) if how.weight else (w, x)
    plain = lambda w: lax.dot_general(*in_order(w, x), how.numbers, preferred_element_type=how.dtype)
    (dw,) = jax.linear_transpose(plain, w)(g)
    return in_order(dw, lax.transpose(dx, [int(d) for d in np.argsort(order)]))


product.defvjp(lambda how, a, b: (_scaled(how, how.numbers, how.dtype, a, b), (a, b)), _backward)


def _scaled(how: ScaledProduct, numbers: Numbers, dtype: Any, a: jax.Array, b: jax.Array) -> jax.Array:
    """The product of the quantised operands, times the scales. These are powers of two: no factor rounds."""
    with jax.named_scope(SCOPE + how.path.replace("/", ".")):
        sums, batch = numbers
        row = how.scaling == "row"
        spans = sums if row else [[d for d in range(v.ndim) if d not in batch[i]] for i, v in enumerate((a, b))]
        (a8, of_a), (b8, of_b) = (quantised(v, dims) for v, dims in zip((a, b), spans, strict=True))
        y = lax.dot_general(a8, b8, numbers, preferred_element_type=dtype)
        ends = y.ndim - len(_free(b, sums[1], batch[1]))  # of the dims that are of a
        of_a = _rows(of_a, sums[0], batch[0], range(ends, y.ndim))
        of_b = _rows(of_b, sums[1], batch[1], range(len(batch[0]), ends))
        return y * of_a.astype(dtype) * of_b.astype(dtype)


def _rows(scale: jax.Array, sums: Dims, batch: Dims, other: Sequence[int]) -> jax.Array:
    """Scales by the result's dims, with 1 in the place of the `other` operand's."""
    ordered = lax.transpose(scale, (*batch, *_free(scale, sums, batch), *sums))
    return lax.expand_dims(lax.squeeze(ordered, range(ordered.ndim - len(sums), ordered.ndim)), other)


def _free(x: jax.Array, sums: Dims, batch: Dims) -> Dims:
    return tuple(d for d in range(x.ndim) if d not in (*sums, *batch))
