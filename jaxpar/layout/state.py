"""The state of a training run, a pytree of arrays."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax

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
      step: int32 scalar, steps taken.
      params: the master parameters, float32, as the layout stores them (`step.params(state)` gives the model's tree).
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
