"""Measure how far one tree of arrays is from another, leaf by leaf, and how far rounding may move it.

    error of a leaf = max |a - b| / scale,   scale = the largest of:   max |b|                   of the leaf
                                                                       max |b| over all leaves   times 1e-3
                                                                       the terms that cancel in the leaf

The error is compared with `TOLERANCE` of the lowest precision that is involved.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax
import numpy as np

from ..model.paths import name_of
from ..strategy import Strategy

# Allowed errors, relative to a leaf's scale; see `Difference`. FP8 has 4 significant bits: where another order of sums
# changes bfloat16's last bit, another FP8 number may be nearest. The gradients of a small Llama differ by up to 0.11 on
# two tensor ranks, and by 3e-6 if all else is computed in float32. int8 is a dtype of communication alone.
TOLERANCE = {"f32": 1e-5, "bf16": 3e-2, "f16": 4e-3, "fp8": 0.25, "int8": 0.1}
# The size of the last bit. FP8 programs compute in bfloat16 outside their products.
EPSILON = {"f32": 2.0**-23, "bf16": 2.0**-7, "f16": 2.0**-10, "fp8": 2.0**-7, "int8": 2.0**-8}
MARGIN = 16  # times the rounding measured in a few runs, which are only a sample
_FLOOR = 1e-3  # of the tree's largest element
# The floor if rounding is not measured. A leaf whose true gradient is zero is rounding alone: measured at up to 9e-8 of
# the tree's largest element, about one float32 epsilon.
_FLOOR_UNMEASURED = 1e-2


def dtypes_of(strategy: Strategy) -> list[str]:
    """Return the precision in which a strategy computes, and the 8-bit dtypes that it sends; keys of `TOLERANCE`."""
    sent = strategy.gather, strategy.reduce
    return [strategy.precision, *(dtype for dtype in sent if dtype in ("fp8", "int8"))]


@dataclass(frozen=True)
class Difference:
    """The difference of one leaf from one device's.

    Attributes:
      kind: "gradient" or "parameter".
      path: the path of the leaf.
      error: max |a - b| / scale.
      ratio: the factor r that minimizes |a - r b|; 1 if the leaves agree.
      hint: the likely cause, if the ratio is a whole number or its inverse.
      scale: the scale that is largest: "leaf", the leaf's largest element; "tree", a thousandth of the largest element
        of all leaves; or "terms", the terms that cancel in the leaf. A gradient that is zero in exact arithmetic, such
        as that of a key's bias or of a bias before BatchNorm, has no other scale than these terms. They are measured
        only if a leaf exceeds the tolerance: one device runs again with initial values that differ in the last bit,
        and a leaf may be off by 16 times the change.
    """

    kind: str
    path: str
    error: float
    ratio: float
    hint: str
    scale: str = "leaf"


def differences(kind: str, tree: Any, reference: Any, terms: Sequence[float] | None = None) -> list[Difference]:
    """Compare two trees: one difference per leaf.

    Args:
      kind: "gradient" or "parameter".
      tree: the arrays to judge.
      reference: one device's arrays, which give the scales.
      terms: for each leaf, the scale of the terms that cancel in it. None: not measured; 1e-2 of the tree's largest
        element is used instead.
    """
    leaves = [
        (name_of(path), _float64(a), _float64(b))
        for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(tree), jax.tree.leaves(reference), strict=True)
    ]
    largest = max((np.abs(b).max(initial=0) for _, _, b in leaves), default=0.0)
    floor = (_FLOOR_UNMEASURED if terms is None else _FLOOR) * largest
    compared = []
    for (path, a, b), cancelling in zip(leaves, terms or [0.0] * len(leaves), strict=True):
        # 1e-30, so that trees of zeros do not give 0 / 0.
        scales = {"leaf": float(np.abs(b).max(initial=0)), "tree": max(floor, 1e-30), "terms": cancelling}
        scale = max(scales, key=lambda name: scales[name])
        with np.errstate(invalid="ignore"):  # inf - inf
            error = float(np.abs(a - b).max(initial=0) / scales[scale])
        # Least squares: r = a.b / b.b.
        ratio = float((a * b).sum() / (b * b).sum()) if (b * b).sum() > 0 else 1.0
        error = error if np.isfinite(error) else float("inf")
        compared.append(Difference(kind, path, error, ratio, _hint(a, b, ratio), scale))
    return compared


@dataclass(frozen=True)
class LargestDifference:
    """The part of a loss and its gradients that differs most from the other side's.

    Attributes:
      what: "the value", or the gradient's name.
      error: how far it differs, relative to its scale.
      allowed: the error that is allowed.
      leaf: the index of the gradient's leaf. None for the value.
    """

    what: str
    error: float
    allowed: float
    leaf: int | None


def largest_difference(
    result: tuple[float, Any],
    reference: tuple[float, Any],
    tolerance: float,
    rounding: Sequence[float] = (0.0,),
    values_only: bool = False,
) -> LargestDifference:
    """Return the largest difference of two losses, or, if these agree, of their gradients.

    If the gradients agree too, it is the losses' difference.

    Args:
      result, reference: a loss and its gradients, each.
      tolerance: the error that is allowed.
      rounding: how far rounding may move the loss, and then the elements of each gradient.
      values_only: compare the losses alone.

    Raises:
      ValueError: neither loss is finite, or no tree of gradients is.
    """
    (loss, grads), (reference_loss, reference_grads) = result, reference
    if not np.isfinite([loss, reference_loss]).any():
        raise ValueError("the loss is not finite on either side, and nothing can be compared; try step.trace_nonfinite")
    magnitude = max(abs(reference_loss), 1e-30)
    allowed = max(tolerance, rounding[0] / magnitude)
    are_finite = np.isfinite([loss, reference_loss]).all()
    error = abs(loss - reference_loss) / magnitude if are_finite else float("inf")
    if error > allowed or values_only:
        return LargestDifference("the value", error, allowed, None)
    if not any(all(np.isfinite(x).all() for x in jax.tree.leaves(tree)) for tree in (grads, reference_grads)):
        raise ValueError("a gradient is not finite on either side, in every cut; try step.trace_nonfinite")
    # Judge every leaf by the more lenient of its two scales: rounding unmeasured, and measured.
    # With rounding / tolerance as its scale, a leaf may be off by exactly this rounding. Number 0 is the loss's.
    terms = [x / tolerance for x in rounding[1:]] or None
    compared = (differences("gradient", grads, reference_grads, scales) for scales in (None, terms))
    lenient = [min(pair, key=lambda d: d.error) for pair in zip(*compared, strict=True)]
    worst_leaf = max(range(len(lenient)), key=lambda leaf: lenient[leaf].error)
    if (worst := lenient[worst_leaf]).error > tolerance:
        return LargestDifference(f"the gradient of {worst.path}", worst.error, tolerance, worst_leaf)
    return LargestDifference("the value", error, allowed, None)


def _float64(x: Any) -> np.ndarray:
    """Return an array as float64. A complex array becomes its real and imaginary parts, stacked."""
    x = np.asarray(x)
    return np.stack([x.real, x.imag]).astype(np.float64) if np.iscomplexobj(x) else x.astype(np.float64)


def _hint(a: np.ndarray, b: np.ndarray, ratio: float) -> str:
    """Return the likely cause of a difference; "" if there is no hint."""
    if not np.isfinite(b).all():
        return "not finite on one device either: the loss has no such gradient there, as a norm has none at zero"
    if not np.isfinite(a).all():
        return "not finite: see the loss, or the loss scale"
    if np.abs(b).max(initial=0) > 0 and not a.any():
        return "zero: the gradient is lost"
    # A factor of n or 1/n means that a mean or a sum over n ranks is wrong. It must fit every element.
    factor = Fraction(ratio).limit_denominator(64) if np.isfinite(ratio) else Fraction(1)
    if factor == 1 or abs(ratio - factor) > 1e-3 * abs(ratio):
        return ""
    if np.abs(a - float(factor) * b).max() > 1e-3 * np.abs(b).max():
        return ""
    if factor.denominator == 1:
        return f"x{factor}: a mean over replicas or microbatches is missing, or a sum is taken twice"
    if factor.numerator == 1:
        return f"x1/{factor.denominator}: a sum over replicas or microbatches is missing, or a mean is taken twice"
    return ""
