"""Access to the parameters of a stack, layer by layer: fetch a layer, and accumulate its gradients.

    leaf, stored        [layers, *shard]   --read-->  shard of a layer   --fetch-->  whole layer, in the compute dtype
    gradient, stored    [layers, *shard]  <--write--  shard of a layer  <--give--    whole cotangent of the layer

`Access` (`access.py`) is the strategy's fetch and give; `Slice` (`slices.py`) reads and writes the layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..program.buffers import is_on_host, on_device, uninitialized, zeros_after
from .access import Access
from .halves import pick
from .slices import Slice


@dataclass(frozen=True)
class LayerAccess:
    """Access to the parameters of one stack.

    Attributes:
      access: how the strategy fetches leaves and accumulates gradients.
      leaves: the stored value of every parameter leaf of the program.
      slices: the layer that an iteration reads, for each weight of the stack.
      length: the number of layers.
      start: the layer of iteration 0, for a stage of a pipeline.
      is_real: bool [layers]; where false, the layer is padding: its outputs are its inputs. None without padding.
    """

    access: Access
    leaves: Sequence[Any]
    slices: tuple[Slice, ...]
    length: int
    start: Any = 0
    is_real: jax.Array | None = None

    # ------------------------------------------------------------------------------------------------------------------
    # Fetches of one layer.

    def fetch(
        self,
        layer: Any,
        reads: Sequence[bool] | None = None,
        prefetched: Sequence[Any] | None = None,
        device_copies: Sequence[Any] | None = None,
    ) -> list[jax.Array]:
        """Return one layer's whole weights.

        Args:
          layer: the number of the layer.
          reads: which weights to return, by slice; None for all.
          prefetched: for each slice, the weight if it is fetched already, else None.
          device_copies: for each slice, the shard that `copy_from_host` returned, else None.
        """
        absent = [None] * len(self.slices)
        reads = [True] * len(self.slices) if reads is None else reads
        triples = zip(self.slices, prefetched or absent, device_copies or absent, strict=True)
        return [
            self._fetch(s, layer, copy) if weight is None else weight for s, weight, copy in pick(reads, list(triples))
        ]

    def _fetch(self, s: Slice, layer: Any, shard: Any) -> jax.Array:
        """Fetch one weight of a layer, from its shard if that has been read already."""
        return self.access.fetch(s.leaf, s.read(self.leaves[s.leaf], layer) if shard is None else shard, True)

    def prefetch(
        self, prefetched: Sequence[Any], layer: Any, again: bool = False, mask: Sequence[bool] | None = None
    ) -> list[Any]:
        """Return `prefetched` with the weights of another layer.

        Args:
          prefetched: one entry for each slice; None for a leaf that is not fetched early.
          layer: the layer to fetch. Beyond an end it is the layer at that end or, `again`, at the other end.
          again: whether the same loop runs next, from its beginning.
          mask: which entries to fetch; None for all.
        """
        is_fetched = [x is not None and (mask is None or mask[i]) for i, x in enumerate(prefetched)]
        # A backward begins with the layer with which the forward ended: clipped, the number is that layer's.
        layer = jnp.mod(layer, self.length) if again else jnp.clip(layer, 0, self.length - 1)
        fetched = iter(self.fetch(layer, is_fetched))
        return [next(fetched) if is_new else x for is_new, x in zip(is_fetched, prefetched, strict=True)]

    @property
    def is_on_host(self) -> bool:
        """Whether any leaf of the stack is on the host."""
        return any(is_on_host(self.leaves[s.leaf]) for s in self.slices)

    def copy_from_host(self, layer: Any) -> list[Any]:
        """Copy this device's shard of a layer to the device, for leaves on the host; None for other leaves.

        Beyond an end, the layer is the one at that end.
        """
        # The layers of a stage, which begin at `start`, never rest on the host (`Strategy.kept_on_device`).
        assert not self.is_on_host or (isinstance(self.start, int) and self.start == 0), self.start
        layer = jnp.clip(layer, 0, self.length - 1)
        copy = lambda s, x: on_device(s.read(x, layer)) if is_on_host(x) else None
        return [copy(s, self.leaves[s.leaf]) for s in self.slices]

    # ------------------------------------------------------------------------------------------------------------------
    # Accumulated gradients.

    def accumulators(self, gradients: Sequence[Any], after: jax.Array) -> tuple[Any, Any]:
        """Return the stacked gradients by leaf, and `accumulate(stacks, cotangents, layer)`.

        A loop carries the stacks and writes them layer by layer. As results of the scan, their reductions would be
        pipelined across its end, with a layer's whole gradients between iterations.

        Args:
          gradients: the accumulated gradient of each slice's leaf; None for zero.
          after: an array before which new zeros do not exist.
        """
        into = {s.leaf: grad for s, grad in zip(self.slices, gradients, strict=True)}
        layers_of = {i: [layer for s in self.slices if s.leaf == i for layer in s.layers(self.length)] for i in into}
        # If no two slices of a new gradient share a layer, each writes its layers instead of adding to them. If they
        # write all layers of the leaf, no zeros are needed.
        overwritten = {i for i, grad in into.items() if grad is None and len({*layers_of[i]}) == len(layers_of[i])}
        totals = {
            s.leaf: self._new_grads(s, after, layers_of[s.leaf] if s.leaf in overwritten else [])
            if into[s.leaf] is None
            else into[s.leaf]
            for s in self.slices
        }
        overwrites = [s.leaf in overwritten for s in self.slices]
        return totals, lambda totals, cotangents, layer: self.accumulate(totals, cotangents, layer, overwrites)

    def accumulate(
        self, totals: Any, cotangents: Sequence[Any], layer: Any, overwrites: Sequence[bool] | None = None
    ) -> Any:
        """Give one layer's gradients, and return the stacks with them.

        Args:
          totals: the stacks, by leaf.
          cotangents: the whole cotangent of each weight; None for a weight without one.
          overwrites: for each slice, whether its gradient replaces the layer in the stack; None to add all.
        """
        totals = totals.copy()
        overwrites = [False] * len(self.slices) if overwrites is None else overwrites
        for s, ct, overwrite in zip(self.slices, cotangents, overwrites, strict=True):
            grad = None if ct is None else self.access.give(s.leaf, ct, True)
            if grad is not None:
                put = s.write if overwrite else s.add
                totals[s.leaf] = put(totals[s.leaf], grad, layer)
        return totals

    def _new_grads(self, layer_slice: Slice, after: jax.Array, written: Sequence[int]) -> jax.Array | None:
        """Return a buffer for the gradients that the layers will give; None if they give none.

        Args:
          layer_slice: any slice of the leaf.
          after: an array before which zeros do not exist.
          written: the layers that are written before they are read; the buffer holds no zeros if these are all.
        """
        shard, leaf, dim = self.leaves[layer_slice.leaf], layer_slice.leaf, layer_slice.dim

        def grad_of_layer(shard: jax.Array) -> jax.Array | None:
            full = self.access.fetch(leaf, shard, True)
            return self.access.give(leaf, full, True) if jnp.issubdtype(full.dtype, jnp.inexact) else None

        # Only the strategy knows the shape and dtype of a given gradient: trace fetch and give for one layer.
        layer_shape = [n for d, n in enumerate(shard.shape) if d != dim]
        grad = jax.eval_shape(grad_of_layer, jax.ShapeDtypeStruct(tuple(layer_shape), shard.dtype))
        if grad is None:
            return None
        stacked = (*grad.shape[:dim], shard.shape[dim], *grad.shape[dim:])
        is_filled = len(written) == shard.shape[dim]
        return uninitialized(stacked, grad.dtype) if is_filled else zeros_after(after, stacked, grad.dtype)


# ----------------------------------------------------------------------------------------------------------------------
# Layers of padding, in a pipeline whose stages have unequal numbers of layers.


def identity_cotangents(ct_carry: Sequence[Any], num_consts: int, num_inputs: int) -> list[Any]:
    """Return the cotangents of an identity layer's inputs: the carry's pass through, the others are zero."""
    return [*([0] * num_consts), *ct_carry, *([0] * (num_inputs - num_consts - len(ct_carry)))]


def select(condition: jax.Array, a: Sequence[Any], b: Sequence[Any]) -> list[Any]:
    """Select `a` or `b` element by element of two lists; None in `a` stays None."""
    return [None if x is None else jnp.where(condition, x, y) for x, y in zip(a, b, strict=True)]
