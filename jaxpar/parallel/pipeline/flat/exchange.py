"""Exchange weights and gradients between the ranks that store them and the ranks whose stages use them.

    3 leaves a, b, c on 4 ranks; stages on rank 0 use a and b, a stage on rank 1 uses c

    stored          rank 0: a/4 b/4 c/4    rank 1: a/4 b/4 c/4   ...     every rank stores 1/p of each leaf
    all-to-all      rank 0: a   b          rank 1: c             ...     weights to their users, once per step
    all-to-all      rank 0: a/4 b/4 c/4    rank 1: a/4 b/4 c/4   ...     gradients back, summed over their users

The layout is known before any batch was traced, and is even whatever the stages are. A leaf that several stages use (a
tied embedding) goes to each of them. Leaves that `fsdp` shards move as shards; the devices that run a stage gather them
when it uses them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from .... import collectives
from .packing import Buffers, Packing, key_data, widest

AXIS = "pipe"


@dataclass(frozen=True)
class Exchange:
    """The exchange of leaves in buffers [pipe, width]: row r has rank r's parts of the leaves that this rank uses.

    Attributes:
      used: for each rank, the leaves that its stages use, in order.
      packings: for each rank, the packing of one rank's parts of these leaves.
    """

    used: tuple[tuple[int, ...], ...]
    packings: tuple[Packing, ...]

    @classmethod
    def of_parts(cls, used: Sequence[Sequence[int]], parts: Sequence[jax.ShapeDtypeStruct | None]) -> "Exchange":
        """Return the exchange of leaves.

        Args:
          used: for each rank, the leaves that its stages use.
          parts: one rank's part of each leaf; None for a leaf that does not move.
        """
        moved = [[(i, part) for i in leaves if (part := parts[i]) is not None] for leaves in used]
        packings = tuple(Packing.of_avals(part for _, part in leaves) for leaves in moved)
        return cls(tuple(tuple(i for i, _ in leaves) for leaves in moved), packings)

    @property
    def widths(self) -> dict[str, int]:
        """Return the widths of the buffers, the same on all ranks."""
        return widest(self.packings)

    def dispatch(self, parts: Sequence[jax.Array]) -> Buffers:
        """Send this rank's part of every leaf to the ranks that use it; communicates an all-to-all.

        Returns:
          Buffers [pipe, width] with all parts of the leaves that this rank uses.
        """
        # Row r goes to rank r, with its parts in the order of its stages. Rows have one width: the widest rank's.
        widths = self.widths
        rows = [
            packing.pack([parts[i] for i in leaves], widths)
            for leaves, packing in zip(self.used, self.packings, strict=True)
        ]
        return _all_to_all({name: jnp.stack([row[name] for row in rows]) for name in widths})

    def collect(self, buffers: Buffers, leaves: int) -> list[jax.Array | None]:
        """Send gradients back to the ranks that store them, the inverse of `dispatch`; communicates an all-to-all.

        Args:
          buffers: [pipe, width], the gradients of the leaves that this rank uses.
          leaves: the number of leaves of the model.

        Returns:
          This rank's part of each leaf's gradient, summed over the ranks that used it; None for a leaf that no rank
          used.
        """
        rows, parts = _all_to_all(buffers), list[jax.Array | None]([None] * leaves)
        for rank, (leaf_numbers, packing) in enumerate(zip(self.used, self.packings, strict=True)):
            for i, x in zip(leaf_numbers, packing.unpack({name: row[rank] for name, row in rows.items()}), strict=True):
                # A leaf that several ranks use, such as a tied embedding, has a gradient from each.
                parts[i] = x if (total := parts[i]) is None else total + x
        return parts

    def read(self, buffers: Buffers, rank: int, leaf: int, zero: jax.Array) -> jax.Array:
        """Return a leaf [pipe, *part] on a rank that uses it.

        Args:
          buffers: [pipe, width].
          zero: a 0 that the start of the read depends on, so that XLA cannot move it out of its loop (`engine.py`).
        """
        field = self.packings[rank].fields[self.used[rank].index(leaf)]
        flat = buffers[field.dtype]
        # A column of all rows: one part from each rank.
        x = lax.dynamic_slice(flat, (jnp.int32(0), field.start + zero), (flat.shape[0], field.size))
        return x.reshape(flat.shape[0], *field.shape)

    def add(self, buffers: Buffers, rank: int, leaf: int, x: jax.Array, zero: jax.Array) -> Buffers:
        """Return the buffers with `x`, [pipe, *part], added to a leaf; `zero` as for `read`."""
        field = self.packings[rank].fields[self.used[rank].index(leaf)]
        flat, start = buffers[field.dtype], (jnp.int32(0), field.start + zero)
        total = lax.dynamic_slice(flat, start, (flat.shape[0], field.size)) + x.reshape(flat.shape[0], -1)
        return buffers | {field.dtype: lax.dynamic_update_slice(flat, total, start)}


def _all_to_all(buffers: Buffers) -> Buffers:
    # Leave out an all-to-all without elements.
    return {name: collectives.all_to_all(x, [AXIS]) for name, x in buffers.items() if x.size}


def broadcast(values: Sequence[jax.Array], owners: Sequence[int]) -> list[jax.Array]:
    """Return values on every rank, each from its owner's rank; communicates an all-reduce per dtype."""
    if not values:
        return []
    rank = lax.axis_index(AXIS)
    # The other ranks add zeros: their values are not up to date.
    addends = [
        jnp.where(rank == owner, key_data(x), jnp.zeros_like(key_data(x)))
        for x, owner in zip(values, owners, strict=True)
    ]
    # One buffer per dtype, so that the number of collectives does not grow with the number of values.
    packing = Packing.of_avals(jax.typeof(x) for x in addends)
    summed = {name: collectives.all_reduce(x, [AXIS]) for name, x in packing.pack(addends, packing.widths).items()}
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    wrap = lambda x, value: jax.random.wrap_key_data(x, impl=jax.random.key_impl(value)) if is_key(value) else x
    return [wrap(x, value) for x, value in zip(packing.unpack(summed), values, strict=True)]
