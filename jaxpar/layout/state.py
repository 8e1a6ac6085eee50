"""The state of a training run: a pytree of arrays, as the layout stores them."""

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
    """Everything that a step changes.

    Attributes:
      step: int32 scalar, the number of steps taken. With `trace_nonfinite=True`, a step with a non-finite value sets it
        to minus that step's number, until the host has read it.
      params: the master parameters as the layout stores them: trained ones in float32, frozen ones in the compute
        dtype. `step.params(state)` returns the model's tree.
      copy: a replicated copy in the compute dtype (ZeRO-1 and 2 in low precision), or None.
      optimizer: the optimizer's state, as the layout stores it.
      variables: the model's arrays that are no parameters (BatchNorm statistics, random streams), replicated.
      scale: the loss scale (float16), or None.
      key: the random key from which the keys of all steps and blocks of rows are derived.
    """

    step: jax.Array
    params: Any
    copy: Any
    optimizer: Any
    variables: Any
    scale: LossScale | None
    key: jax.Array

    def __repr__(self) -> str:
        """Return a summary: the step, the number of parameters, and bytes per device. Waits for the step to finish."""
        leaves = jax.tree.leaves(self)
        # The tree may also hold shardings or specs.
        if not all(hasattr(x, "shape") and hasattr(x, "dtype") for x in leaves):
            return f"State({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"
        num_params = sum(math.prod(x.shape) for x in jax.tree.leaves(self.params))
        return f"State(step {_format_step(self.step)}, {num_params:,} parameters as stored, {_format_bytes(leaves)})"


def _format_step(step: Any) -> str:
    """Return the number of the step, or why it has no value."""
    if isinstance(step, Tracer):
        return "traced"
    if isinstance(step, jax.ShapeDtypeStruct):
        return "abstract"
    # A step donates its state, whose arrays are then gone.
    return "donated" if isinstance(step, jax.Array) and step.is_deleted() else str(np.asarray(step))


def _format_bytes(leaves: Sequence[Any]) -> str:
    """Return the bytes of some arrays on each of their devices; in total if they are abstract."""
    size = lambda x, shape: math.prod(shape) * x.dtype.itemsize
    if any(isinstance(x, Tracer) or getattr(x, "sharding", None) is None for x in leaves):
        return f"{sum(size(x, x.shape) for x in leaves):,} bytes"
    devices = frozenset().union(*(x.sharding.device_set for x in leaves))
    # A replicated array counts on each device with all of its bytes.
    local_bytes = sum(size(x, x.sharding.shard_shape(x.shape)) for x in leaves)
    return f"{local_bytes:,} bytes on each of {len(devices)} x {next(iter(devices)).platform}"
