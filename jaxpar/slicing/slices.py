"""Which layers of stacked parameters a `scan` reads: found by following its inputs back to them.

A scan may read a leaf as it is, or what is computed from it layer by layer: a cast, a part of the layers
(`stack[2:8:2]`), layers that are on another dim than the first (`nn.scan(variable_axes={"params": 1})`).
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
    """Which layer of a stacked leaf an iteration reads: number `start + stride * iteration`, on dim `dim`.

    A loop over blocks that alternate reads several layers of one leaf in an iteration; one that begins in the middle of
    a list starts there.
    """

    leaf: int
    start: int = 0
    stride: int = 1
    dim: int = 0

    def of(self, leaf: jax.Array, number: Any) -> jax.Array:
        """The layer that iteration `number` reads."""
        number = self.start + self.stride * number
        return lax.dynamic_index_in_dim(leaf, number, self.dim, keepdims=False, allow_negative_indices=False)

    def into(self, leaf: jax.Array, layer: jax.Array, number: Any) -> jax.Array:
        """The leaf with that layer replaced."""
        # A number that may count from the end is a choice between two, and XLA's GPU compiler then does not see that it
        # goes through the layers: it moved no gradient's reduce-scatter over the iterations, and each of them waited.
        number = self.start + self.stride * number
        return lax.dynamic_update_index_in_dim(leaf, layer, number, self.dim, allow_negative_indices=False)

    def meets(self, other: "Slice", length: int) -> bool:
        """Whether two slices of one leaf share a layer."""
        mine, theirs = (range(s.start, s.start + s.stride * length, s.stride) for s in (self, other))
        return bool({*mine} & {*theirs})


Chain = tuple[Callable[[jax.Array], jax.Array], ...]


def sliced(eqn: Any, floating: dict[Any, Any], index: dict[Any, int]) -> dict[int, tuple[Slice, Chain]]:
    """The scanned inputs of a `scan` that are layers of parameters: position among xs -> (slice, what becomes of it).

    Args:
      floating: the equations that need parameters alone, by the variables that they define.
      index: the parameters, by variable.
    """
    found = {}
    parts = jx.scan_parts(eqn)
    for position, at in enumerate(parts.xs):
        chain: list[Any] = []
        start, stride, dim = 0, 1, 0  # iteration n reads number `start + stride n` of `at`, on dim `dim`
        while not jx.is_literal(at) and at in floating:
            step = floating[at]
            atoms = [v for v in step.invars if not jx.is_literal(v)]
            if len(atoms) != 1 or any(v.aval.shape for v in step.invars if jx.is_literal(v)):
                break
            if primitives.of(step).elementwise:  # a layer of the result is the result on a layer
                chain.insert(0, _elementwise(step))
            elif step.primitive.name == "slice" and _only(step, dim):
                every = (step.params["strides"] or (1,) * at.aval.ndim)[dim]
                start, stride = step.params["start_indices"][dim] + every * start, every * stride
            elif step.primitive.name == "transpose":
                order = step.params["permutation"]
                rest = [d for d in order if d != order[dim]]
                dim = order[dim]
                if rest != sorted(rest):
                    order = tuple(int(d) for d in np.argsort(np.argsort(rest)))
                    chain.insert(0, functools.partial(lax.transpose, permutation=order))
            else:
                break
            at = atoms[0]
        if not jx.is_literal(at) and at in index and (dim == 0 or parts.length <= LAYERS):
            found[position] = (Slice(index[at], start, stride, dim), tuple(chain))
    return found


def _elementwise(step: Any) -> Callable[[jax.Array], jax.Array]:
    return lambda x: step.primitive.bind(*(a.val if jx.is_literal(a) else x for a in step.invars), **step.params)


def _only(step: Any, dim: int) -> bool:
    """Whether a `slice` takes the whole of every other dim."""
    (x,) = step.invars
    size, params = x.aval.shape, step.params
    strides = params["strides"] or (1,) * len(size)
    return all(
        d == dim or (params["start_indices"][d], params["limit_indices"][d], strides[d]) == (0, n, 1)
        for d, n in enumerate(size)
    )
