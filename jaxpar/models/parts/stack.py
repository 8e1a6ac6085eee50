"""Layers of one shape as a stack: built once, with parameters stacked on dim 0, and run by one `nnx.scan`.

A scan compiles the layer once, however many layers there are, and gives every parameter of the stack a leading dim
[layers, ...], along which pipelines and layerwise strategies split.
"""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx


def stack(make: Callable[[nnx.Rngs], nnx.Module], layers: int, rngs: nnx.Rngs) -> Any:
    """Build `layers` modules by `make(rngs)`, with different random numbers, as one module of leaves [layers, ...]."""
    # Each layer gets a random stream of its own; `vmap` over the streams stacks the layers' leaves.
    return nnx.split_rngs(splits=layers)(nnx.vmap(make))(rngs)


def run(stacked: Any, x: jax.Array, *extras: Any) -> jax.Array:
    """Apply `x = layer(x, *extras)` for every layer of the stack in order; `extras` are the same for all layers."""
    # No layer has an input or a result of its own.
    return run_with(stacked, x, None, lambda layer, x, _: (layer(x, *extras), None))[0]


def run_with(
    stacked: Any, x: jax.Array, layer_inputs: Any, step: Callable[[Any, jax.Array, Any], Any]
) -> tuple[jax.Array, Any]:
    """Apply `x, result = step(layer, x, layer_input)` for every layer of the stack in order.

    Args:
      stacked: the layers, with leaves [layers, ...].
      x: the first layer's input.
      layer_inputs: a pytree with leaves [layers, ...], one slice for each layer; None if the layers have no inputs of
        this kind.
      step: called once for all layers, while `nnx.scan` traces it.

    Returns:
      The last layer's `x`, and the results of all layers, stacked on dim 0.
    """

    @nnx.scan(in_axes=(0, nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def scan_step(layer: Any, x: jax.Array, layer_input: Any) -> Any:
        return step(layer, x, layer_input)

    return scan_step(stacked, x, layer_inputs)
