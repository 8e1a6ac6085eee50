"""What no stage owns (embedding, head, final norm) is fetched before the first tick, and its gradient given behind the
last, once a step; what stages own, in every tick.

    per rank     these leaves whole, in the compute dtype, and their accumulated gradients
    sent         of each of them what the rule sends for one use, in place of one for every microbatch
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ...slicing.access import Sender
from ...slicing.program import Program


def unstaged(program: Program) -> frozenset[int]:
    """The leaves that are used, and in no layer stack."""
    return frozenset(i for i, sliced in enumerate(program.uses) if sliced and not any(sliced))


@dataclass(frozen=True)
class UnstagedParams:
    """Access of the ticks. `access` is the strategy's, `which` the leaves that its ticks find whole."""

    access: Sender
    which: frozenset[int]

    def ahead(self, stored: Sequence[jax.Array]) -> list[jax.Array]:
        """What ticks have in place of what is stored."""
        return [self.access.fetch(i, x, False) if i in self.which else x for i, x in enumerate(stored)]

    def sends(self, index: int) -> tuple[bool, bool]:
        """As `Sender.sends`."""
        return (False, False) if index in self.which else self.access.sends(index)

    def fetch(self, index: int, value: jax.Array, sliced: bool) -> jax.Array:
        """As `Access.fetch`."""
        return value if index in self.which else self.access.fetch(index, value, sliced)

    def give(self, index: int, cotangent: jax.Array, sliced: bool) -> jax.Array | None:
        """As `Access.give`, of which the dtype is here already."""
        if index not in self.which:
            return self.access.give(index, cotangent, sliced)
        given = jax.eval_shape(lambda x: self.access.give(index, x, sliced), cotangent)
        return None if given is None else cotangent.astype(given.dtype)

    def after(self, grads: Sequence[Any]) -> list[Any]:
        """The gradients of all ticks, as accumulated by a strategy without a pipeline."""
        return [self.access.give(i, x, False) if i in self.which and x is not None else x for i, x in enumerate(grads)]
