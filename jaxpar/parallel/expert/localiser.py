"""Rewrite a traced loss into the program of one expert rank, which stores some of the experts and has its own rows.

A value of this program is in one of three layouts (E experts, e ranks, C slots of an expert for one rank's tokens):

    whole        a complete parameter, or an activation of this rank's rows, such as buffers [E, C, D]
    split        a leaf of experts, [E/e, ..], or a value computed from leaves alone. `dim` is its dim of experts
    slotwise     the slots of all ranks for this rank's experts, [E/e, e C, D]. `dim` is a `SlotDims`

               all-to-all                        all-to-all
    [E, C, D]  ---------->  [E/e, e C, D]  ...  ---------->  [E, C, D]

The exchange begins at a matmul of split leaves with whole buffers [E, C, D]: an all-to-all sends each rank the tokens
of all ranks for its experts (GShard: Lepikhin et al. 2020, arXiv:2006.16668, section 3.3). Equations that compute each
slot independently keep a value slotwise (`rules.py`). Any other equation gets whole values, by the inverse all-to-all,
which is exact for every equation. Split leaves that meet no such matmul are gathered, as ZeRO-3 gathers a layer. This
is exact too, and noted in `gathered`, because it sends more.

Each rank's loss is its part of the sum over rows, as on `data`, so that JAX's own transposes of collectives are right.
The gradient of split leaves already contains the tokens of all ranks: a strategy's rule does not sum it over `expert`.
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
    """The dims of a slotwise value.

    Attributes:
      dim: the dim of experts; each rank has a part of them.
      slots: the dim of slots; each rank has the slots of all ranks.
    """

    dim: int
    slots: int

    def __add__(self, n: int) -> "SlotDims":
        """Return the dims of a value that has `n` more dims in front."""
        return SlotDims(self.dim + n, self.slots + n)

    def map_dims(self, to: Callable[[int], int]) -> "SlotDims":
        """Return the dims after `to` has mapped each of them to a dim of another value."""
        return SlotDims(to(self.dim), to(self.slots))

    def __contains__(self, dim: int) -> bool:
        """Whether a dim is either of the two."""
        return dim in (self.dim, self.slots)


@dataclass
class ExpertLocaliser(Localiser):
    """Rewrites one program for an expert rank.

    A value's `dim` is None (whole), the dim of experts of a split leaf, or a `SlotDims`. Its `weight` says that it is
    equal on all ranks, as are values that come from parameters and constants alone.

    Attributes:
      all_tokens: place -> (bytes of tokens, bytes of buffers), where ranks gather all tokens instead of exchanging
        buffers, which are more bytes.
      always: the primitives whose rule runs even if no input is split.
    """

    all_tokens: dict[str, tuple[int, int]] = field(default_factory=dict)
    always = jx.CUSTOM  # dispatch may gather tokens, and it comes before tokens meet any split leaf

    def whole(self, x: LocalValue) -> jax.Array:
        """Return a value in the layout of the model: all experts, and the slots of this rank's rows."""
        dim: Any = x.dim
        if dim is None:
            return x.value
        # `once` runs the collective a single time, for all equations that read the whole value.
        if isinstance(dim, SlotDims):
            return x.once("whole", lambda: lax.all_to_all(x.value, AXIS, dim.slots, dim.dim, tiled=True))
        return x.once("whole", lambda: self._gather(x, dim))

    def _gather(self, x: LocalValue, dim: int) -> jax.Array:
        """All-gather a split leaf. For a broadcast, gather only the value that was broadcast."""
        if x.broadcast is not None:
            operand, dims = x.broadcast
            return lax.broadcast_in_dim(self.whole(operand), x.shape, dims)
        return lax.all_gather(x.value, AXIS, axis=dim, tiled=True)

    def entered(self, x: LocalValue) -> jax.Array:
        """Return the whole value.

        Unlike on `tensor`, nothing is all-reduced in the backward: each rank's loss is its part of the sum over rows.
        """
        return self.whole(x)

    def part(self, x: LocalValue, dim: Any) -> jax.Array:
        """Return this rank's experts of a value that is equal on all ranks; for `SlotDims`, the value slotwise."""
        if x.dim == dim:
            return x.value
        return x.once(
            ("part", dim), lambda: self._to_slotwise(x, dim) if isinstance(dim, SlotDims) else self.take(x, dim)
        )

    def take(self, value: Any, dim: int) -> jax.Array:
        """Return this rank's experts of a value that every rank has whole."""
        value = self.whole(value) if isinstance(value, LocalValue) else value
        size = value.shape[dim] // self.ranks
        return lax.dynamic_slice_in_dim(value, lax.axis_index(AXIS) * size, size, dim)

    def _to_slotwise(self, x: LocalValue, to: SlotDims) -> jax.Array:
        """Return a value slotwise, with experts and slots on the dims `to`.

        Equal values are repeated for the slots of all ranks, and broadcasts are made in the new shape; both send
        nothing. Any other value goes through an all-to-all.
        """
        # 1. A value that is equal on all ranks, or this rank's experts of one: repeat it for the slots of every rank.
        if x.weight and x.dim in (None, to.dim):
            if x.broadcast is not None and x.dim is None and not {to.dim, to.slots} & {*x.broadcast[1]}:
                operand, dims = x.broadcast
                return lax.broadcast_in_dim(self.whole(operand), self.local(x.shape, to), dims)
            local_experts = self.take(x, to.dim) if x.dim is None else x.value
            return jnp.concatenate([local_experts] * self.ranks, axis=to.slots)
        if x.broadcast is not None and x.dim is None:
            operand, dims = x.broadcast
            # 2. A broadcast of a value that has both dims: exchange the smaller value, and broadcast the result.
            if to.dim in dims and to.slots in dims:
                operand_dims = to.map_dims(dims.index)
                if all(
                    operand.shape[i] == x.shape[j]
                    for i, j in ((operand_dims.dim, to.dim), (operand_dims.slots, to.slots))
                ):
                    return lax.broadcast_in_dim(self.part(operand, operand_dims), self.local(x.shape, to), dims)
        # 3. Send each rank the slots of its experts: [E, C, ..] -> [E/e, e C, ..].
        return lax.all_to_all(self.whole(x), AXIS, to.dim, to.slots, tiled=True)

    def is_equal_on_ranks(self, x: LocalValue) -> bool:
        """Whether a value is the same on all ranks: one that comes from a rank's rows is not."""
        return x.weight

    def input_cotangent(self, x: LocalValue, dim: Any) -> jax.Array:
        """Return the cotangent of an input, from a function with its own derivative, in the layout of the input."""
        assert dim is None or isinstance(dim, SlotDims), dim
        return self.whole(x) if dim is None else self.part(x, dim)

    def local(self, shape: Sequence[int], dim: Any) -> tuple[int, ...]:
        """Return the shape of a rank's part of a value."""
        if not isinstance(dim, SlotDims):
            return super().local(shape, dim)
        # A rank has 1/e of the experts, and the slots of all e ranks.
        sizes = {dim.dim: lambda n: n // self.ranks, dim.slots: lambda n: n * self.ranks}
        return tuple(sizes.get(d, lambda n: n)(n) for d, n in enumerate(shape))

    def constant(self, value: Any) -> LocalValue:
        """Return a constant as a whole value. Like parameters, it is equal on all ranks."""
        return LocalValue(value, None, jnp.shape(value), weight=True)

    def equation(self, eqn: Any, inputs: Sequence[LocalValue]) -> list[LocalValue]:
        """Rewrite one equation, and say which of its results are equal on all ranks."""
        outputs = super().equation(eqn, inputs)
        # `axis_index` has no inputs, and differs between ranks.
        is_equal = all(x.weight for x in inputs) and not jx.communicates([eqn], ("axis_index",))
        for x in outputs:
            # `overflow` takes leaves with tokens and returns them: such a result is still a split leaf.
            x.weight = is_equal or isinstance(x.dim, int)
        # A broadcast remembers its operand: moving that is cheaper than moving the result.
        if eqn.primitive.name == "broadcast_in_dim":
            outputs[0].broadcast = inputs[0], eqn.params["broadcast_dimensions"]
        return outputs

    def note(self, eqn: Any, x: LocalValue) -> None:
        """Note that split leaves are gathered. A slotwise value that goes back to whole is no gather."""
        if isinstance(x.dim, int):
            super().note(eqn, x)
