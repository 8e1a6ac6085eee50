"""The contract by which pieces of a loss fetch parameters and give gradients, and an access that only records them.

    stored shard   --fetch-->   whole parameter or layer   --compute-->   whole cotangent   --give-->   stored gradient

`parallel/data/access.py` implements the contract for every strategy.
"""

from collections.abc import Callable
from typing import Any, Protocol

import jax

# An array, or a tuple of arrays whose sum is the gradient: it is taken where the update reads them. Both accumulate by
# `+`. The types of layers and pipelines, which only have arrays, stay simple with `Any`.
Gradient = Any


class Access(Protocol):
    """How a strategy moves one parameter leaf: `index` is its number, and `sliced` says that the value is one layer."""

    def fetch(self, index: int, value: jax.Array, sliced: bool) -> jax.Array:
        """Return the whole leaf in the compute dtype, from the shard that this device stores."""
        ...

    def give(self, index: int, cotangent: jax.Array, sliced: bool) -> Gradient | None:
        """Return the part of one use's gradient that this device accumulates; None if it accumulates nothing."""
        ...


class Sender(Access, Protocol):
    """An `Access` that tells loops which leaves to communicate for other iterations."""

    def sends(self, index: int, /) -> tuple[bool, bool]:
        """Whether loops fetch a layer of the leaf an iteration early, and give its gradient an iteration late."""
        ...


class WholeAccess:
    """An `Access` to leaves that are stored whole: it moves nothing, and may record each use.

    Args:
      sends: as `Sender.sends`; by default nothing is sent for other iterations.
      record: `record(value, what=, index=, sliced=)` is called at each use of a leaf, where `what` is "fetched" or
        "given", and returns the value.
    """

    def __init__(
        self,
        sends: Callable[[int], tuple[bool, bool]] = lambda index: (False, False),
        record: Callable[..., jax.Array] = lambda value, **use: value,
    ):
        self.sends, self.record = sends, record

    def fetch(self, index: int, value: jax.Array, sliced: bool) -> jax.Array:
        """Return the leaf, after recording the fetch."""
        return self.record(value, what="fetched", index=index, sliced=sliced)

    def give(self, index: int, cotangent: jax.Array, sliced: bool) -> jax.Array | None:
        """Return the gradient, after recording it."""
        return self.record(cotangent, what="given", index=index, sliced=sliced)
