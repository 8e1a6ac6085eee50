"""The state of a training run, a pytree of arrays."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from .precision import LossScale


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["step", "params", "copy", "optimizer", "variables", "scale", "key"],
    meta_fields=[],
)
@dataclass(frozen=True)
class State:
    """Everything a step changes.

    Attributes:
      step: int32 scalar, steps taken; with `trace_nonfinite=True`, after a step that was not finite, minus its number,
        until the host has seen it.
      params: the master parameters, float32 where they are trained and in the compute dtype where they are frozen, as
        the layout stores them (`step.params(state)` gives the model's tree).
      copy: a replicated copy in the compute dtype (ZeRO-1 and 2 in low precision), or None.
      optimizer: the optimizer's state, as the layout stores it.
      variables: what is not a parameter (BatchNorm statistics, random streams), replicated.
      scale: the loss scale (float16), or None.
      key: the key from which those of all steps and blocks of rows are derived.
    """

    step: jax.Array
    params: Any
    copy: Any
    optimizer: Any
    variables: Any
    scale: LossScale | None
    key: jax.Array

    def __repr__(self) -> str:
        """A summary: the number of the step, which is waited for, of parameters, and of bytes on each device."""
        leaves = jax.tree.leaves(self)
        if not all(hasattr(x, "shape") and hasattr(x, "dtype") for x in leaves):  # a tree of shardings, of specs, ...
            return f"State({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"
        count = sum(math.prod(x.shape) for x in jax.tree.leaves(self.params))
        return f"State(step {_number(self.step)}, {count:,} parameters as stored, {_held(leaves)})"


def _number(step: Any) -> str:
    if isinstance(step, Tracer):
        return "traced"
    if isinstance(step, jax.ShapeDtypeStruct):
        return "abstract"
    return "donated" if isinstance(step, jax.Array) and step.is_deleted() else str(np.asarray(step))


def _held(leaves: Sequence[Any]) -> str:
    """The bytes of some arrays on each of their devices; of all together where they have none."""
    size = lambda x, shape: math.prod(shape) * x.dtype.itemsize
    if any(isinstance(x, Tracer) or getattr(x, "sharding", None) is None for x in leaves):
        return f"{sum(size(x, x.shape) for x in leaves):,} bytes"
    devices = frozenset().union(*(x.sharding.device_set for x in leaves))
    held = sum(size(x, x.sharding.shard_shape(x.shape)) for x in leaves)
    return f"{held:,} bytes on each of {len(devices)} x {next(iter(devices)).platform}"
