"""Weights on their way to the stages that use them, and gradients back.

    at rest         rank 0: a/4 b/4 c/4    rank 1: a/4 b/4 c/4   ...      a stage of its own has no leaf: all have 1/p
    all-to-all      rank 0: a b            rank 1: c             ...      once a step; and of gradients, the way back

So where leaves live at rest is known before any batch has been traced, and is even whatever the stages are. A leaf that
several stages use (a tied embedding) goes to each, and its gradients are summed on their way back. What `fsdp` shards
is moved in shards, and gathered where it is used, in the group of devices that share a stage.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from .... import collectives
from .packing import Buffers, Packing, plain, widest

AXIS = "pipe"


@dataclass(frozen=True)
class Exchange:
    """Which rank uses which leaves, and where they lie in the buffers [pipe, width] in which they move.

    Attributes:
      used: of each rank the leaves, in order.
      packings: of each rank, of one rank's part of each of these.
    """

    used: tuple[tuple[int, ...], ...]
    packings: tuple[Packing, ...]

    @classmethod
    def of(cls, used: Sequence[Sequence[int]], parts: Sequence[jax.ShapeDtypeStruct | None]) -> "Exchange":
        """`parts` are what a rank holds of each leaf; None of those that do not move."""
        moved = [[(i, part) for i in some if (part := parts[i]) is not None] for some in used]
        packings = tuple(Packing.of(part for _, part in some) for some in moved)
        return cls(tuple(tuple(i for i, _ in some) for some in moved), packings)

    @property
    def widths(self) -> dict[str, int]:
        """Of the buffers, the same on all ranks."""
        return widest(self.packings)

    def dispatch(self, parts: Sequence[jax.Array]) -> Buffers:
        """All parts of the leaves that this rank uses, from its part of every leaf."""
        widths = self.widths
        rows = [
            packing.pack([parts[i] for i in some], widths)
            for some, packing in zip(self.used, self.packings, strict=True)
        ]
        return _swapped({name: jnp.stack([row[name] for row in rows]) for name in widths})

    def collect(self, buffers: Buffers, leaves: int) -> list[jax.Array | None]:
        """The reverse: of each leaf this rank's part, summed over all that used it; None of those that nobody did."""
        rows, out = _swapped(buffers), list[jax.Array | None]([None] * leaves)
        for rank, (some, packing) in enumerate(zip(self.used, self.packings, strict=True)):
            for i, x in zip(some, packing.unpack({name: row[rank] for name, row in rows.items()}), strict=True):
                out[i] = x if (was := out[i]) is None else was + x
        return out

    def read(self, buffers: Buffers, rank: int, leaf: int, after: jax.Array) -> jax.Array:
        """A leaf on the rank that uses it, [pipe, ...]; it is not there before `after`, which is 0."""
        room = self.packings[rank].rooms[self.used[rank].index(leaf)]
        flat = buffers[room.dtype]
        x = lax.dynamic_slice(flat, (jnp.int32(0), room.start + after), (flat.shape[0], room.size))
        return x.reshape(flat.shape[0], *room.shape)

    def add(self, buffers: Buffers, rank: int, leaf: int, x: jax.Array, after: jax.Array) -> Buffers:
        """Buffers with `x` added to a leaf."""
        room = self.packings[rank].rooms[self.used[rank].index(leaf)]
        flat, at = buffers[room.dtype], (jnp.int32(0), room.start + after)
        total = lax.dynamic_slice(flat, at, (flat.shape[0], room.size)) + x.reshape(flat.shape[0], -1)
        return buffers | {room.dtype: lax.dynamic_update_slice(flat, total, at)}


def _swapped(buffers: Buffers) -> Buffers:
    return {name: collectives.all_to_all(x, [AXIS]) for name, x in buffers.items() if x.size}


def everywhere(values: Sequence[jax.Array], homes: Sequence[int]) -> list[jax.Array]:
    """Values on every rank, from the rank that has each, in one all-reduce of each dtype."""
    if not values:
        return []
    rank = lax.axis_index(AXIS)
    mine = [jnp.where(rank == home, plain(x), jnp.zeros_like(plain(x))) for x, home in zip(values, homes, strict=True)]
    packing = Packing.of(jax.typeof(x) for x in mine)
    summed = {name: collectives.all_reduce(x, [AXIS]) for name, x in packing.pack(mine, packing.widths).items()}
    keys = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    wrapped = lambda x, old: jax.random.wrap_key_data(x, impl=jax.random.key_impl(old)) if keys(old) else x
    return [wrapped(x, old) for x, old in zip(packing.unpack(summed), values, strict=True)]
