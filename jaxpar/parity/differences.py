"""How far one tree of arrays is from another, leaf by leaf, and how far rounding may take it."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax
import numpy as np

from ..model.paths import name_of
from ..strategy import Strategy

# Relative to a leaf's scale; see `Difference`. Where another order of sums changes bfloat16's last bit, another FP8
# number of 4 bits may be nearest: a small Llama's gradients differ by up to 0.11 on two tensor ranks, of which 3e-6 are
# left where all else is computed in float32.
TOLERANCE = {"f32": 1e-5, "bf16": 3e-2, "f16": 4e-3, "fp8": 0.25, "int8": 0.1}  # int8: of what is sent
EPSILON = {"f32": 2.0**-23, "bf16": 2.0**-7, "f16": 2.0**-10, "fp8": 2.0**-7, "int8": 2.0**-8}
MARGIN = 16  # times the rounding that some runs show: theirs is a sample
_FLOOR = 1e-3  # of the tree's largest element
# Without a measure of rounding. A leaf whose true gradient is zero is rounding alone: measured at up to 9e-8 of the
# tree's largest element, about one float32 epsilon.
_UNMEASURED = 1e-2


def dtypes_of(strategy: Strategy) -> list[str]:
    """Those in which a strategy multiplies, and sends in 8 bits, as `TOLERANCE` has them."""
    sent = strategy.gather, strategy.reduce
    return [strategy.precision, *(how for how in sent if how in ("fp8", "int8"))]


@dataclass(frozen=True)
class Difference:
    """How far one leaf is from one device's.

    Attributes:
      kind: "gradient" or "parameter".
      path: of the leaf.
      error: max |a - b| over the scale.
      ratio: the best factor between the two (1 where they agree).
      hint: what a whole ratio suggests.
      scale: what the error is relative to, the largest of: "leaf", the leaf's largest element; "tree", a thousandth
        of the largest element of all leaves; "terms", the terms that cancel in it, by the rounding that is left of
        them: the gradient of a key's bias, or of a bias before BatchNorm, is zero and has no other scale. Such terms
        are looked for where a leaf exceeds the tolerance: one device runs again, its initial values changed in the
        last bit, and a leaf may be off by 16 times what that changes.
    """

    kind: str
    path: str
    error: float
    ratio: float
    hint: str
    scale: str = "leaf"


def differences(kind: str, ours: Any, theirs: Any, terms: Sequence[float] | None = None) -> list[Difference]:
    """Leaf by leaf, how far one tree is from the other.

    `terms` is for each leaf the scale of the terms that cancel in it; where it is not measured, 1e-2 of the tree's
    largest element stands for it.
    """
    pairs = [
        (name_of(path), _real(a), _real(b))
        for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True)
    ]
    largest = max((np.abs(b).max(initial=0) for _, _, b in pairs), default=0.0)
    floor = (_UNMEASURED if terms is None else _FLOOR) * largest
    found = []
    for (path, a, b), cancelling in zip(pairs, terms or [0.0] * len(pairs), strict=True):
        scales = {"leaf": float(np.abs(b).max(initial=0)), "tree": max(floor, 1e-30), "terms": cancelling}
        of = max(scales, key=lambda name: scales[name])
        with np.errstate(invalid="ignore"):  # infinities
            error = float(np.abs(a - b).max(initial=0) / scales[of])
        ratio = float((a * b).sum() / (b * b).sum()) if (b * b).sum() > 0 else 1.0
        error = error if np.isfinite(error) else float("inf")
        found.append(Difference(kind, path, error, ratio, _hint(a, b, ratio), of))
    return found


@dataclass(frozen=True)
class Furthest:
    """What of a loss and its gradients is furthest from another's: the value, or the gradient of the `leaf` of this
    number; how far, and how far it may be.
    """

    what: str
    error: float
    allowed: float
    leaf: int | None


def furthest(
    ours: tuple[float, Any],
    theirs: tuple[float, Any],
    tolerance: float,
    rounding: Sequence[float] = (0.0,),
    values_only: bool = False,
) -> Furthest:
    """Compares losses, and where these agree gradients; `rounding` may move the loss and each of these so far.

    Raises ValueError where neither is finite.
    """
    (loss, grads), (other, others) = ours, theirs
    if not np.isfinite([loss, other]).any():
        raise ValueError("the loss is not finite on either side, so that nothing differs; try step.trace_nonfinite")
    allowed = max(tolerance, rounding[0] / max(abs(other), 1e-30))
    error = abs(loss - other) / max(abs(other), 1e-30) if np.isfinite([loss, other]).all() else float("inf")
    if error > allowed or values_only:
        return Furthest("the value", error, allowed, None)
    if not any(all(np.isfinite(x).all() for x in jax.tree.leaves(tree)) for tree in (grads, others)):
        raise ValueError("a gradient is not finite on either side, in every cut; try step.trace_nonfinite")
    terms = [x / tolerance for x in rounding[1:]] or None
    leaves = zip(*(differences("gradient", grads, others, one) for one in (None, terms)), strict=True)
    nearest = [min(pair, key=lambda d: d.error) for pair in leaves]
    worst = max(range(len(nearest)), key=lambda leaf: nearest[leaf].error)
    if (far := nearest[worst]).error > tolerance:
        return Furthest(f"the gradient of {far.path}", far.error, tolerance, worst)
    return Furthest("the value", error, allowed, None)


def _real(x: Any) -> np.ndarray:
    """float64; of complex numbers, real and imaginary parts."""
    x = np.asarray(x)
    return np.stack([x.real, x.imag]).astype(np.float64) if np.iscomplexobj(x) else x.astype(np.float64)


def _hint(a: np.ndarray, b: np.ndarray, ratio: float) -> str:
    if not np.isfinite(b).all():
        return "not finite on one device either: the loss has no such gradient there, as a norm has none at zero"
    if not np.isfinite(a).all():
        return "not finite: see the loss, or the loss scale"
    if np.abs(b).max(initial=0) > 0 and not a.any():
        return "zero: the gradient is lost"
    near = Fraction(ratio).limit_denominator(64) if np.isfinite(ratio) else Fraction(1)
    if near == 1 or abs(ratio - near) > 1e-3 * abs(ratio) or np.abs(a - float(near) * b).max() > 1e-3 * np.abs(b).max():
        return ""
    if near.denominator == 1:
        return f"x{near}: a mean over replicas or microbatches is missing, or a sum is taken twice"
    if near.numerator == 1:
        return f"x1/{near.denominator}: a sum over replicas or microbatches is missing, or a mean is taken twice"
    return ""
