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
      dim: the dim that is sharded, in the array at hand (one layer of a stack has a dim less).
      shard: the mesh axes that it is sharded over: `fsdp`, and `pipe` too for a leaf that is no stage's own.
      rest: the other axes along which devices use the same values, over which gradients are summed as well.
      last: whether this use yields the leaf's whole gradient of the step (one use, in a stack, one microbatch): then
        it is reduced right here, inside the backward loop, and not once more at the end.
      dtype: the dtype in which gradients are reduced and accumulated.
    """

    dim: int
    shard: tuple[str, ...]
    rest: tuple[str, ...]
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
      published: whether updated shards are all-gathered to what is stored.
    """

    name: str
    sharded: frozenset[str]
    fetch: Callable[[jax.Array, Use], jax.Array]
    give: Callable[[jax.Array, Use], jax.Array]
    finish: Callable[[jax.Array, Use], jax.Array]
    published: bool = False
