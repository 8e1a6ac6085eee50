"""Parameters that no stage owns (embedding, head, final norm): fetched once per step, instead of once per microbatch.

    before the first tick   fetch these leaves               `ahead`
    in a tick               use the whole leaves; accumulate their whole gradients
    after the last tick     give the accumulated gradients   `after`

    memory per rank   these leaves whole, in the compute dtype, and their whole accumulated gradients
    communication     for each of these leaves, one fetch and one gradient per step

Leaves that stages own are fetched and given in every tick.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ...slicing.access import Sender
from ...slicing.program import Program


def unstaged(program: Program) -> frozenset[int]:
    """Return the leaves that are used, but in no stack of layers."""
    return frozenset(i for i, sliced in enumerate(program.uses) if sliced and not any(sliced))


@dataclass(frozen=True)
class UnstagedParams:
    """The access to parameters in ticks.

    Attributes:
      access: the strategy's access.
      which: the leaves that are whole in all ticks.
    """

    access: Sender
    which: frozenset[int]

    def ahead(self, stored: Sequence[jax.Array]) -> list[jax.Array]:
        """Fetch the unstaged leaves before the first tick; return all leaves: these whole, the others as stored."""
        return [self.access.fetch(i, x, False) if i in self.which else x for i, x in enumerate(stored)]

    def sends(self, index: int) -> tuple[bool, bool]:
        """Return whether loops send the leaf ahead, as `Sender.sends`."""
        return (False, False) if index in self.which else self.access.sends(index)

    def fetch(self, index: int, value: jax.Array, sliced: bool) -> jax.Array:
        """Return the whole leaf, as `Access.fetch`."""
        return value if index in self.which else self.access.fetch(index, value, sliced)

    def give(self, index: int, cotangent: jax.Array, sliced: bool) -> jax.Array | None:
        """Return what one use adds to the accumulator, as `Access.give`; whole for an unstaged leaf."""
        if index not in self.which:
            return self.access.give(index, cotangent, sliced)
        # The gradient stays whole: `after` gives the sum of all ticks. Only the dtype is the strategy's, so that ticks
        # accumulate in its precision.
        grad = jax.eval_shape(lambda x: self.access.give(index, x, sliced), cotangent)
        return None if grad is None else cotangent.astype(grad.dtype)

    def after(self, grads: Sequence[Any]) -> list[Any]:
        """Give the accumulated gradients of unstaged leaves after the last tick.

        Returns:
          All gradients as a strategy without a pipeline accumulates them; None for a leaf without one.
        """
        return [self.access.give(i, x, False) if i in self.which and x is not None else x for i, x in enumerate(grads)]
