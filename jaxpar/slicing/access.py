"""The contract by which pieces of a loss fetch parameters and give gradients, and the access that only records them."""

from collections.abc import Callable
from typing import Protocol

import jax


class Access(Protocol):
    """How a strategy moves one parameter leaf: `index` is the leaf, `sliced` whether it is one layer of a stack."""

    def fetch(self, index: int, value: jax.Array, sliced: bool) -> jax.Array:
        """The whole leaf in the compute dtype, from what this device stores of it."""
        ...

    def give(self, index: int, cotangent: jax.Array, sliced: bool) -> jax.Array | None:
        """What this device keeps of the gradient of one use of the leaf; None if nothing."""
        ...


class Sender(Access, Protocol):
    """An `Access` that says what loops may send ahead."""

    def sends(self, index: int, /) -> tuple[bool, bool]:
        """Whether loops fetch a layer of the leaf an iteration early, and give its gradient an iteration late."""
        ...


class WholeAccess:
    """An `Access` to leaves that are whole already: it moves nothing, and may record each use.

    Args:
      sends: as `Sender.sends`; nothing is sent ahead if it is left out.
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
        """The leaf."""
        return self.record(value, what="fetched", index=index, sliced=sliced)

    def give(self, index: int, cotangent: jax.Array, sliced: bool) -> jax.Array | None:
        """Its gradient."""
        return self.record(cotangent, what="given", index=index, sliced=sliced)
