"""Loops over layers that communicate for other iterations.

So that no computation waits, an iteration fetches the weights of the next layer, and gives the gradient of the previous
layer. For L layers:

    forward     computes     0     1    ...  L-1     backward    computes   L-1   L-2   ...   0
                fetches      1     2    ...  L-1                 fetches    L-2   L-3   ...   0
                                                                 gives       0*   L-1   ...   1     * microbatch before

The last fetch of each loop is the first layer of the next loop, also across microbatches.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax


@functools.partial(jax.tree_util.register_dataclass, data_fields=["weights", "gradients"], meta_fields=[])
@dataclass(frozen=True)
class InFlight:
    """Weights and gradients that one iteration over layers hands to the next, one entry for each slice of the stack.

    Attributes:
      weights: the whole weights of the layer that is computed next; None for a leaf that each layer fetches itself.
      gradients: the whole gradients of the previous layer, not yet given. Between two microbatches this is the layer
        that runs first forwards; before the first microbatch they are zeros. None for a leaf whose gradient each layer
        gives itself.
    """

    weights: list[Any]
    gradients: list[Any]

    def split(self, cotangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Split a layer's cotangents into those that the next iteration gives, and those that this iteration gives."""
        # The entries that are not None are the slices whose gradients wait.
        is_late = [x is not None for x in self.gradients]
        choose = lambda late: [ct if x is late else None for x, ct in zip(is_late, cotangents, strict=True)]
        return choose(True), choose(False)


Flights = dict[int, InFlight]  # by the number of the piece


@dataclass(frozen=True)
class Lookahead:
    """The communication of a loop for other iterations. The loop covers all layers.

    Attributes:
      flight: the state before the loop.
      again: whether the next loop runs in the same direction, and so begins with the first layer of this one.
    """

    flight: InFlight
    again: bool = False
