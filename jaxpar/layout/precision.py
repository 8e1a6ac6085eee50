"""Dtypes of a step, dynamic loss scaling for float16, and rounding to float8 with a scale."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from ..strategy import Strategy

_DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16, "fp8": jnp.bfloat16}
F8 = jnp.float8_e4m3fn
_MOST = float(jnp.finfo(F8).max)  # 448
_LEAST = 2.0**-100  # of a row's largest element: the scale and its inverse stay within bfloat16's range
_FIRST_SCALE, _GROWTH, _BACKOFF, _INTERVAL = 2.0**15, 2.0, 0.5, 2000


@dataclass(frozen=True)
class Policy:
    """Which dtype a parameter leaf has where (Micikevicius et al. 2018, section 3).

    Attributes:
      compute: dtype of float32 parameters in the forward and backward pass.
      reduce: dtype in which gradients are reduced and accumulated; None is the dtype of the compute.
      scaled: whether the loss is scaled.
    """

    compute: jnp.dtype
    reduce: jnp.dtype | None
    scaled: bool

    @classmethod
    def of(cls, strategy: Strategy) -> "Policy":
        """The policy that a strategy names."""
        reduce = None if strategy.reduce == "compute" else jnp.dtype(jnp.float32)
        return cls(jnp.dtype(_DTYPES[strategy.precision]), reduce, strategy.precision == "f16")

    def computed(self, declared: jnp.dtype) -> jnp.dtype:
        """Dtype in which the loss sees a leaf; one that the model itself declares low stays as it is."""
        return self.compute if declared == jnp.float32 else declared

    def reduced(self, declared: jnp.dtype) -> jnp.dtype:
        """Dtype of the leaf's gradient while it is reduced and accumulated."""
        return self.computed(declared) if self.reduce is None else jnp.promote_types(declared, self.reduce)

    @staticmethod
    def master(declared: jnp.dtype) -> jnp.dtype:
        """Dtype in which the leaf is stored and updated: float32 or wider; integers as they are."""
        return jnp.promote_types(declared, jnp.float32) if jnp.issubdtype(declared, jnp.floating) else declared

    def stored(self, declared: jnp.dtype, trainable: bool) -> jnp.dtype:
        """Dtype in which the leaf is stored: what is trained as its master, what is frozen as the loss sees it, since
        no small update is ever added to it.
        """
        return self.master(declared) if trainable else self.computed(declared)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["scale", "good", "skipped"], meta_fields=[])
@dataclass(frozen=True)
class LossScale:
    """Dynamic loss scaling: doubled after 2,000 finite steps, halved, and the step skipped, where one is not.

    Attributes: `scale` float32, `good` int32 finite steps since the last change, `skipped` int32 steps skipped so far.
    """

    scale: jax.Array
    good: jax.Array
    skipped: jax.Array

    @classmethod
    def create(cls) -> "LossScale":
        """The first scale, 2^15."""
        return cls(jnp.float32(_FIRST_SCALE), jnp.int32(0), jnp.int32(0))

    def next(self, finite: jax.Array) -> "LossScale":
        """The scale after a step whose gradients were all finite, or not."""
        grow = finite & (self.good + 1 >= _INTERVAL)
        factor = jnp.where(finite, jnp.where(grow, _GROWTH, 1.0), _BACKOFF)
        good = jnp.where(finite & ~grow, self.good + 1, 0)
        return LossScale(jnp.maximum(self.scale * factor, 1.0), good, self.skipped + ~finite)


def all_finite(tree: object) -> jax.Array:
    """Whether every element of every leaf is finite: bool scalar."""
    leaves = [jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]
    return jnp.stack(leaves).all() if leaves else jnp.bool_(True)


def quantised(x: jax.Array, dims: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """float8_e4m3fn of x's shape, and scales of x's dtype with 1 in the place of `dims`: their product is about x.

    A scale is that power of two with which the largest element along `dims` lies in (224, 448]; a row with a NaN or an
    infinity has NaNs.
    """
    most = jnp.max(jnp.abs(x), dims, keepdims=True).astype(jnp.float32)
    bits = lax.bitcast_convert_type(_MOST / jnp.maximum(most, _LEAST), jnp.uint32)
    factor = lax.bitcast_convert_type(bits & jnp.uint32(0xFF80_0000), jnp.float32)  # without its mantissa
    return (x * factor.astype(x.dtype)).astype(F8), (1 / factor).astype(x.dtype)
