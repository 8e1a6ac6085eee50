"""Layers of one shape as a stack: built once, with parameters stacked on dim 0, and run by one `nnx.scan`."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx


def stack(make: Callable[[nnx.Rngs], nnx.Module], layers: int, rngs: nnx.Rngs) -> Any:
    """`layers` modules from `make(rngs)`, each of its own random numbers, as one whose leaves are [layers, ...]."""
    return nnx.split_rngs(splits=layers)(nnx.vmap(make))(rngs)


def run(stacked: Any, x: jax.Array, *given: jax.Array) -> jax.Array:
    """`x = layer(x, *given)` for every layer of the stack in turn; `given` is the same for all."""
    return run_with(stacked, x, None, lambda layer, x, _: (layer(x, *given), None))[0]


def run_with(
    stacked: Any, x: jax.Array, each: Any, step: Callable[[Any, jax.Array, Any], Any]
) -> tuple[jax.Array, Any]:
    """`x, new = step(layer, x, own)` for every layer of the stack in turn, `own` being its part of `each` (leaves
    [layers, ...]); returns the last x and what is new, stacked alike.
    """

    @nnx.scan(in_axes=(0, nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def steps(layer: Any, x: jax.Array, own: Any) -> Any:
        return step(layer, x, own)

    return steps(stacked, x, each)
