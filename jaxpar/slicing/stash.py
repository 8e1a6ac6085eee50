"""Buffers in which the layers of a stack save values for their backwards, for several runs of the stack at once.

A pipeline runs the forwards of several microbatches before the first backward. Their saved values share buffers
[slots, layers, ...]; each microbatch has a slot:

    slot 0    layer 0 | layer 1 | layer 2        microbatch 4
    slot 1    layer 0 | layer 1 | layer 2        microbatch 3
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@dataclass(frozen=True)
class Stash:
    """One slot of buffers [slots, layers, ...]. Layers are read and written in the buffers, without a copy of the slot.

    Attributes:
      buffers: one buffer for each saved value.
      slot: the slot of this run of the stack, int32.
      record: a `Saved` or `WeightGradResiduals`, for what it has besides values. None for plain values.
    """

    buffers: list[jax.Array]
    slot: jax.Array
    record: Any = None

    def put(self, buffers: Sequence[jax.Array], layer: jax.Array, values: Sequence[Any]) -> list[jax.Array]:
        """Write one layer's values, one for each buffer, into the slot of buffers that the previous layer returned."""
        # Each value becomes a block [1, 1, ...] of one slot and one layer.
        return [
            lax.dynamic_update_slice(buffer, jnp.asarray(x)[None, None], self._start(buffer, layer))
            for buffer, x in zip(buffers, values, strict=True)
        ]

    def put_layers(self, values: Sequence[jax.Array]) -> list[jax.Array]:
        """Write the values of all layers, [layers, ...], into the slot."""
        pairs = zip(self.buffers, values, strict=True)
        return [lax.dynamic_update_index_in_dim(buffer, x, self.slot, axis=0) for buffer, x in pairs]

    def at(self, layer: jax.Array) -> Any:
        """Return one layer's values from the slot, in the record."""
        values = [
            lax.dynamic_slice(x, self._start(x, layer), (1, 1, *x.shape[2:])).reshape(x.shape[2:]) for x in self.buffers
        ]
        return values if self.record is None else dataclasses.replace(self.record, values=values)

    def _start(self, buffer: jax.Array, layer: jax.Array) -> list[Any]:
        """Return the indices at which a layer begins in a buffer."""
        # XLA wants one dtype for all indices, and a plain 0 is an int64 under `jax_enable_x64`.
        return [jnp.asarray(i, jnp.int32) for i in (self.slot, layer, *[0] * (buffer.ndim - 2))]
