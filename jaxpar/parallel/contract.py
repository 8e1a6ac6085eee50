"""What a strategy is: which trees carry `fsdp`, how parameters are fetched, and how gradients are returned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Use:
    """One use of a leaf.

    Attributes:
      dim: the dim that is sharded over `fsdp`, in the array at hand (one layer of a stack has a dim less).
      last: whether this use yields the leaf's whole gradient of the step (one use, in a stack, one microbatch): then
        it is reduced right here, inside the backward loop, and not once more at the end.
      dtype: the dtype in which gradients are reduced and accumulated.
    """

    dim: int
    last: bool
    dtype: jnp.dtype


@dataclass(frozen=True)
class Rule:
    """A strategy along the data axes; its functions run inside `shard_map`.

    Attributes:
      sharded: which of "params", "grads", "optimizer" carry `fsdp` at rest.
      fetch: what is stored -> the whole leaf; at every use, forwards and backwards.
      give: the local gradient of one use -> what is accumulated, in the dtype of the reduction.
      finish: what was accumulated -> the gradient that the update gets; once a step.
      publish: the updated shard, and the dim that is sharded -> what is stored; None where nothing is to be done.
    """

    name: str
    sharded: frozenset[str]
    fetch: Callable[[jax.Array, Use], jax.Array]
    give: Callable[[jax.Array, Use], jax.Array]
    finish: Callable[[jax.Array, Use], jax.Array]
    publish: Callable[[jax.Array, int], jax.Array] | None = None
