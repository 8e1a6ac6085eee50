"""Dtypes of a step, dynamic loss scaling for float16, and quantisation to float8 with scales.

    parameter   float32 master  --cast-->  compute dtype in forward and backward
    gradient    compute dtype   --cast-->  reduce dtype, while it is reduced and accumulated  -->  float32 update

Mixed precision follows Micikevicius et al. 2018 (arXiv:1710.03740).
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from ..strategy import Strategy

# Under fp8, everything except the products of layers computes in bfloat16 (`numerics/fp8/`).
_DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16, "fp8": jnp.bfloat16}
F8 = jnp.float8_e4m3fn
_F8_MAX = float(jnp.finfo(F8).max)  # 448
_MIN_AMAX = 2.0**-100  # floor of a row's largest magnitude: the scale and its inverse stay within bfloat16's range
_FIRST_SCALE, _GROWTH, _BACKOFF, _INTERVAL = 2.0**15, 2.0, 0.5, 2000


@dataclass(frozen=True)
class Policy:
    """The dtypes of a parameter leaf and its gradient (Micikevicius et al. 2018, section 3).

    Attributes:
      compute: dtype of float32 parameters in the forward and backward pass.
      reduce: dtype in which gradients are reduced and accumulated; None means the compute dtype.
      scaled: whether the loss is scaled.
    """

    compute: jnp.dtype
    reduce: jnp.dtype | None
    scaled: bool

    @classmethod
    def of(cls, strategy: Strategy) -> "Policy":
        """Return the policy that a strategy names."""
        reduce = None if strategy.reduce == "compute" else jnp.dtype(jnp.float32)
        return cls(jnp.dtype(_DTYPES[strategy.precision]), reduce, strategy.precision == "f16")

    def computed(self, declared: jnp.dtype) -> jnp.dtype:
        """Return the dtype in which the loss reads a leaf."""
        # Only float32 is lowered: float64 and low dtypes are the model's own choice.
        return self.compute if declared == jnp.float32 else declared

    def reduced(self, declared: jnp.dtype) -> jnp.dtype:
        """Return the dtype of the leaf's gradient while it is reduced and accumulated."""
        return self.computed(declared) if self.reduce is None else jnp.promote_types(declared, self.reduce)

    @staticmethod
    def master(declared: jnp.dtype) -> jnp.dtype:
        """Return the dtype in which a trained leaf is stored and updated: float32 or wider; integers stay."""
        return jnp.promote_types(declared, jnp.float32) if jnp.issubdtype(declared, jnp.floating) else declared

    def stored(self, declared: jnp.dtype, trainable: bool) -> jnp.dtype:
        """Return the dtype in which a leaf is stored: trained leaves as masters, frozen ones in the compute dtype.

        A frozen leaf needs no master, because no small update is ever added to it.
        """
        return self.master(declared) if trainable else self.computed(declared)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["scale", "good", "skipped"], meta_fields=[])
@dataclass(frozen=True)
class LossScale:
    """Dynamic loss scaling (Micikevicius et al. 2018, section 3.2).

    The scale doubles after 2,000 finite steps in a row. A step with gradients that are not finite is skipped, and
    halves it.

    Attributes:
      scale: float32 scalar, the factor of the loss.
      good: int32 scalar, finite steps since the scale changed.
      skipped: int32 scalar, steps skipped so far.
    """

    scale: jax.Array
    good: jax.Array
    skipped: jax.Array

    @classmethod
    def create(cls) -> "LossScale":
        """Return the initial scale, 2^15."""
        return cls(jnp.float32(_FIRST_SCALE), jnp.int32(0), jnp.int32(0))

    def next(self, finite: jax.Array) -> "LossScale":
        """Return the scale after a step; `finite`, a bool scalar, tells whether all its gradients were finite."""
        grow = finite & (self.good + 1 >= _INTERVAL)
        factor = jnp.where(finite, jnp.where(grow, _GROWTH, 1.0), _BACKOFF)
        good = jnp.where(finite & ~grow, self.good + 1, 0)
        # A scale below 1 would scale gradients towards underflow instead of away from it.
        return LossScale(jnp.maximum(self.scale * factor, 1.0), good, self.skipped + ~finite)


def all_finite(tree: object) -> jax.Array:
    """Return whether every element of every leaf is finite, as a bool scalar."""
    leaves = [jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]
    # A tree without leaves is finite; `stack` would refuse it.
    return jnp.stack(leaves).all() if leaves else jnp.bool_(True)


def quantised(x: jax.Array, dims: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """Quantise an array to float8_e4m3fn, with one scale for each slice along `dims`.

    A scale is a power of two: the one that puts the largest magnitude of its slice in (224, 448]. A slice with a NaN or
    an infinity becomes NaN.

    Args:
      x: floating-point array.
      dims: the dims that share a scale.

    Returns:
      float8_e4m3fn of x's shape, and scales of x's dtype, of size 1 along `dims`. Their product approximates x.
    """
    amax = jnp.max(jnp.abs(x), dims, keepdims=True).astype(jnp.float32)
    # An infinity makes the factor 0, and 0 times its inverse is NaN. A NaN makes it infinite: NaN in float8.
    bits = lax.bitcast_convert_type(_F8_MAX / jnp.maximum(amax, _MIN_AMAX), jnp.uint32)
    # Clearing the mantissa rounds the factor down to a power of two.
    factor = lax.bitcast_convert_type(bits & jnp.uint32(0xFF80_0000), jnp.float32)
    return (x * factor.astype(x.dtype)).astype(F8), (1 / factor).astype(x.dtype)
