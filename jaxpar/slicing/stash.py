"""Where the layers of a stack leave what their backwards read, if that waits among that of other runs of the stack."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@dataclass(frozen=True)
class Stash:
    """One slot of buffers [slots, layers, ...]; a layer is written and read where it lies, without the others."""

    buffers: list[jax.Array]
    slot: jax.Array

    def put(self, buffers: Sequence[jax.Array], layer: jax.Array, values: Sequence[Any]) -> list[jax.Array]:
        """The buffers, as the layers before left them, with what one layer leaves."""
        return [
            lax.dynamic_update_slice(buffer, jnp.asarray(x)[None, None], self._start(buffer, layer))
            for buffer, x in zip(buffers, values, strict=True)
        ]

    def put_layers(self, values: Sequence[jax.Array]) -> list[jax.Array]:
        """The buffers with what all layers leave, [layers, ...]."""
        pairs = zip(self.buffers, values, strict=True)
        return [lax.dynamic_update_index_in_dim(buffer, x, self.slot, axis=0) for buffer, x in pairs]

    def at(self, layer: jax.Array) -> list[jax.Array]:
        """What one layer left."""
        return [
            lax.dynamic_slice(x, self._start(x, layer), (1, 1, *x.shape[2:])).reshape(x.shape[2:]) for x in self.buffers
        ]

    def _start(self, buffer: jax.Array, layer: jax.Array) -> list[Any]:
        # One dtype for all: a plain 0 is an int64 under `jax_enable_x64`.
        return [jnp.asarray(i, jnp.int32) for i in (self.slot, layer, *[0] * (buffer.ndim - 2))]
