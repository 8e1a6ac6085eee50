"""Rewrite a traced loss into the program of one expert rank, which has some of the experts and rows of its own.

Every rank runs the loss on its rows. Leaves of experts are split along the dim of experts, E; all else of the
parameters is whole, and all that comes of rows is this rank's. Where a product has split experts on one side and the
tokens of its own rows for all experts on the other, [E, C, D], the ranks exchange them by an all-to-all: each gets the
tokens of all ranks for its experts, [E/e, e C, D] (GShard: Lepikhin et al. 2020, arXiv:2006.16668, section 3.3). Such
a value is slotwise: what computes each slot for itself keeps it so. Any equation that is not known to do that gets it
back as it was, [E, C, D], by the reverse, which is exact whatever comes next. Experts that meet no such product are
gathered, as ZeRO-3 gathers a layer, which is exact as well, and noted.

Each rank's loss is its own part of the sum over rows, as on `data`, so that the derivative of each collective is JAX's
own. The gradient of experts is that of all tokens that they got: a strategy's rule does not sum it over `expert`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ...program import jaxpr as jx
from ..tensor.localiser import Localiser, LocalValue
from .dims import AXIS


@dataclass(frozen=True)
class SlotDims:
    """Where a slotwise value has experts (a rank's part of them), and where slots (those of all ranks)."""

    dim: int
    slots: int

    def __add__(self, n: int) -> "SlotDims":
        return SlotDims(self.dim + n, self.slots + n)

    def moved(self, to: Callable[[int], int]) -> "SlotDims":
        """Where they are in another value."""
        return SlotDims(to(self.dim), to(self.slots))

    def __contains__(self, dim: int) -> bool:
        return dim in (self.dim, self.slots)


@dataclass
class ExpertLocaliser(Localiser):
    """One rewriting. A value's `dim` is that of a split leaf, or `SlotDims`; `weight` says that it is equal on all
    ranks, as what comes of parameters and constants alone. `all_tokens` has where ranks gather each other's tokens,
    and the bytes of those, and of the buffers that they would send.
    """

    all_tokens: dict[str, tuple[int, int]] = field(default_factory=dict)
    always = jx.CUSTOM  # a route may gather tokens where nothing is split yet

    def whole(self, x: LocalValue) -> jax.Array:
        """As the model has it: all experts, and of slots those of this rank's rows."""
        dim: Any = x.dim
        if dim is None:
            return x.value
        if isinstance(dim, SlotDims):
            return x.once("whole", lambda: lax.all_to_all(x.value, AXIS, dim.slots, dim.dim, tiled=True))
        return x.once("whole", lambda: self._gathered(x, dim))

    def _gathered(self, x: LocalValue, dim: int) -> jax.Array:
        if x.broadcast is not None:
            inner, dims = x.broadcast
            return lax.broadcast_in_dim(self.whole(inner), x.shape, dims)
        return lax.all_gather(x.value, AXIS, axis=dim, tiled=True)

    def entered(self, x: LocalValue) -> jax.Array:
        """The same: no edge is needed where each rank's loss is a part of the sum."""
        return self.whole(x)

    def part(self, x: LocalValue, dim: Any) -> jax.Array:
        """This rank's experts of a value that is equal on all; or the value slotwise."""
        if x.dim == dim:
            return x.value
        return x.once(("part", dim), lambda: self._slotwise(x, dim) if isinstance(dim, SlotDims) else self.take(x, dim))

    def take(self, value: Any, dim: int) -> jax.Array:
        """This rank's experts of what every rank has."""
        value = self.whole(value) if isinstance(value, LocalValue) else value
        size = value.shape[dim] // self.ranks
        return lax.dynamic_slice_in_dim(value, lax.axis_index(AXIS) * size, size, dim)

    def _slotwise(self, x: LocalValue, to: SlotDims) -> jax.Array:
        if x.weight and x.dim in (None, to.dim):  # each rank has the slots of all
            mine = x.value if x.dim is not None else None
            if x.broadcast is not None and mine is None and not {to.dim, to.slots} & {*x.broadcast[1]}:
                inner, dims = x.broadcast
                return lax.broadcast_in_dim(self.whole(inner), self.local(x.shape, to), dims)
            mine = self.take(x, to.dim) if mine is None else mine
            return jnp.concatenate([mine] * self.ranks, axis=to.slots)
        if x.broadcast is not None and x.dim is None:
            inner, dims = x.broadcast
            if to.dim in dims and to.slots in dims:
                at = to.moved(dims.index)
                if all(inner.shape[a] == x.shape[b] for a, b in ((at.dim, to.dim), (at.slots, to.slots))):
                    return lax.broadcast_in_dim(self.part(inner, at), self.local(x.shape, to), dims)
        return lax.all_to_all(self.whole(x), AXIS, to.dim, to.slots, tiled=True)

    def alike(self, x: LocalValue) -> bool:
        """Not what comes of a rank's rows."""
        return x.weight

    def input_cotangent(self, x: LocalValue, dim: Any) -> jax.Array:
        """What a function's own derivative returns for an input."""
        assert dim is None or isinstance(dim, SlotDims), dim
        return self.whole(x) if dim is None else self.part(x, dim)

    def local(self, shape: Sequence[int], dim: Any) -> tuple[int, ...]:
        """The shape of what a rank has of a value."""
        if not isinstance(dim, SlotDims):
            return super().local(shape, dim)
        each = {dim.dim: lambda n: n // self.ranks, dim.slots: lambda n: n * self.ranks}
        return tuple(each.get(d, lambda n: n)(n) for d, n in enumerate(shape))

    def constant(self, value: Any) -> LocalValue:
        """Equal on all ranks, as parameters are."""
        return LocalValue(value, None, jnp.shape(value), weight=True)

    def equation(self, eqn: Any, inputs: Sequence[LocalValue]) -> list[LocalValue]:
        """What becomes of one equation."""
        outs = super().equation(eqn, inputs)
        alike = all(x.weight for x in inputs) and not jx.communicates([eqn], ("axis_index",))  # each rank's own
        for x in outs:
            # A split leaf stays one beside tokens, where what overflows its experts' slots passes it on.
            x.weight = alike or isinstance(x.dim, int)
        if eqn.primitive.name == "broadcast_in_dim":
            outs[0].broadcast = inputs[0], eqn.params["broadcast_dimensions"]
        return outs

    def note(self, eqn: Any, x: LocalValue) -> None:
        """Experts that are gathered: slots are not, they go back."""
        if isinstance(x.dim, int):
            super().note(eqn, x)
