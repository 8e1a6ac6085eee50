"""Find which layers of stacked parameters a `scan` reads, by following its inputs back to the parameters.

A scan may read a parameter itself, or a value that is computed from it layer by layer: a cast, a part of the layers
(`stack[2:8:2]`), or layers along another dim than the first (`nn.scan(variable_axes={"params": 1})`). A `Slice` is the
layer that an iteration reads; a `Chain` is the remaining computation, which is applied to that one layer:

    leaf  --transpose-->  --slice 2:8:2-->  --cast-->  scan        becomes        leaf  --Slice-->  layer  --cast-->
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax

from ..layout.leaves import LAYERS
from ..program import jaxpr as jx
from ..program import primitives


@dataclass(frozen=True)
class Slice:
    """The layer of a stacked leaf that an iteration reads: number `start + stride * iteration` along `dim`.

    A loop over blocks that alternate reads several layers of a leaf in one iteration, so that its stride is larger
    than 1. A loop that begins in the middle of a list has a start.
    """

    leaf: int
    start: int = 0
    stride: int = 1
    dim: int = 0

    def read(self, leaf: jax.Array, iteration: Any) -> jax.Array:
        """Return the layer that an iteration reads."""
        layer_index = self.start + self.stride * iteration
        return lax.dynamic_index_in_dim(leaf, layer_index, self.dim, keepdims=False, allow_negative_indices=False)

    def write(self, leaf: jax.Array, layer: jax.Array, iteration: Any) -> jax.Array:
        """Return the leaf with that layer replaced."""
        # An index that may be negative becomes a `select`. XLA's GPU compiler then does not recognise that the loop
        # goes through the layers, and does not pipeline the gradients' reduce-scatters: each iteration waits for them.
        layer_index = self.start + self.stride * iteration
        return lax.dynamic_update_index_in_dim(leaf, layer, layer_index, self.dim, allow_negative_indices=False)

    def add(self, leaf: jax.Array, layer: jax.Array, iteration: Any) -> jax.Array:
        """Return the leaf with an array added to that layer."""
        # XLA's GPU compiler adds in place only if the read and the write have one shape and one instruction as index.
        # Hence the sum keeps the dim of layers, and the barrier keeps a looked-up index from being fused into each.
        # Otherwise the sum is written to another buffer first, and copied.
        layer_index = lax.optimization_barrier(self.start + self.stride * iteration)
        old = lax.dynamic_slice_in_dim(leaf, layer_index, 1, self.dim, allow_negative_indices=False)
        total = old + lax.expand_dims(layer, (self.dim,))
        return lax.dynamic_update_slice_in_dim(leaf, total, layer_index, self.dim, allow_negative_indices=False)

    def layers(self, length: int) -> range:
        """Return the layers that a loop of `length` iterations reads."""
        return range(self.start, self.start + self.stride * length, self.stride)


Chain = tuple[Callable[[jax.Array], jax.Array], ...]


def find_reads(eqn: Any, floating: dict[Any, Any], index: dict[Any, int]) -> dict[int, tuple[Slice, Chain]]:
    """Find the scanned inputs of a `scan` that are layers of parameters.

    Args:
      floating: the equations that depend on parameters alone, by the variables that they define.
      index: the number of each parameter, by variable.

    Returns:
      By position among the scanned inputs: the slice, and the functions to apply to the layer.
    """
    slices_by_position = {}
    parts = jx.scan_parts(eqn)
    for position, var in enumerate(parts.xs):
        chain: list[Any] = []
        start, stride, dim = 0, 1, 0  # iteration n reads number `start + stride n` of `var`, along `dim`
        # Walk from the scan back to the parameter. Each step either moves the slice to the operand, or joins the chain.
        while not jx.is_literal(var) and var in floating:
            step = floating[var]
            atoms = [v for v in step.invars if not jx.is_literal(v)]
            # Only functions of one array, and of scalar literals, can be followed.
            if len(atoms) != 1 or any(v.aval.shape for v in step.invars if jx.is_literal(v)):
                break
            if primitives.of(step).elementwise:  # commutes with taking a layer
                chain.insert(0, _elementwise(step))
            elif step.primitive.name == "slice" and _slices_only(step, dim):
                step_stride = (step.params["strides"] or (1,) * var.aval.ndim)[dim]
                start, stride = step.params["start_indices"][dim] + step_stride * start, step_stride * stride
            elif step.primitive.name == "transpose":
                # Number n along `dim` of the transpose is number n along `order[dim]` of the operand.
                order = step.params["permutation"]
                layer_dims = [d for d in order if d != order[dim]]
                dim = order[dim]
                if layer_dims != sorted(layer_dims):  # the layer's own dims are permuted too
                    order = tuple(int(d) for d in np.argsort(np.argsort(layer_dims)))
                    chain.insert(0, functools.partial(lax.transpose, permutation=order))
            else:
                break
            var = atoms[0]
        # Along a later dim, only a stack of at most `LAYERS` is taken for one of layers.
        if not jx.is_literal(var) and var in index and (dim == 0 or parts.length <= LAYERS):
            slices_by_position[position] = (Slice(index[var], start, stride, dim), tuple(chain))
    return slices_by_position


def _elementwise(step: Any) -> Callable[[jax.Array], jax.Array]:
    """Return an elementwise equation with one array operand as a function of that operand."""
    return lambda x: step.primitive.bind(*(a.val if jx.is_literal(a) else x for a in step.invars), **step.params)


def _slices_only(step: Any, dim: int) -> bool:
    """Whether a `slice` takes every other dim completely."""
    (x,) = step.invars
    size, params = x.aval.shape, step.params
    strides = params["strides"] or (1,) * len(size)
    return all(
        d == dim or (params["start_indices"][d], params["limit_indices"][d], strides[d]) == (0, n, 1)
        for d, n in enumerate(size)
    )
