"""Arrays of many shapes side by side in flat buffers, one for each dtype, so that stages that differ share them.

buffer float32   | x [8, 32]        | skip [8, 64]              | 0 0 0 0 |     message before stage 1
                 | y [8, 128]                  | skip [8, 64]           |     message before stage 2
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Buffers = dict[str, jax.Array]  # by the name of their dtype


def plain(x: Any) -> Any:
    """An array of numbers: of keys, their data."""
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


@dataclass(frozen=True)
class Room:
    """Where an array lies in the buffer of its dtype: `start` and the shape; of keys, their implementation."""

    dtype: str
    start: int
    shape: tuple[int, ...]
    keys: Any = None

    @property
    def size(self) -> int:
        """Its elements."""
        return math.prod(self.shape)

    def of(self, flat: jax.Array) -> jax.Array:
        """The array, from its elements."""
        x = flat.reshape(self.shape)
        return x if self.keys is None else jax.random.wrap_key_data(x, impl=self.keys)


@dataclass(frozen=True)
class Packing:
    """Rooms of some arrays; `widths` is the length of each dtype's buffer."""

    rooms: tuple[Room, ...]
    widths: Mapping[str, int]

    @classmethod
    def of(cls, avals: Iterable[Any]) -> "Packing":
        """One after the other."""
        rooms, widths = [], dict[str, int]()
        for aval in avals:
            keys = aval.dtype._impl.name if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key) else None
            data = aval if keys is None else jax.eval_shape(plain, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
            name = jnp.dtype(data.dtype).name
            room = Room(name, widths.get(name, 0), tuple(data.shape), keys)
            widths[name] = room.start + room.size
            rooms.append(room)
        return cls(tuple(rooms), widths)

    @property
    def bytes(self) -> int:
        """Of all arrays."""
        return sum(n * jnp.dtype(name).itemsize for name, n in self.widths.items())

    def pack(self, values: Sequence[Any], widths: Mapping[str, int]) -> Buffers:
        """The arrays in buffers of these widths, zeros after them, and where one is None."""
        parts: dict[str, list[jax.Array]] = {name: [] for name in widths}
        for room, x in zip(self.rooms, values, strict=True):
            parts[room.dtype].append(jnp.zeros(room.size, room.dtype) if x is None else plain(x).reshape(-1))
        zeros = lambda name: jnp.zeros(widths[name] - self.widths.get(name, 0), name)
        return {name: jnp.concatenate([*some, zeros(name)]) for name, some in parts.items()}

    def unpack(self, buffers: Buffers) -> list[jax.Array]:
        """The reverse of `pack`."""
        return [
            room.of(lax.slice_in_dim(buffers[room.dtype], room.start, room.start + room.size)) for room in self.rooms
        ]

    def put(self, buffers: Buffers, index: jax.Array, values: Sequence[Any]) -> Buffers:
        """Buffers [n, width] with the arrays at `index`, written where they lie."""
        out = dict(buffers)
        for room, x in zip(self.rooms, values, strict=True):
            if room.size:
                out[room.dtype] = lax.dynamic_update_slice(
                    out[room.dtype], plain(x).reshape(1, -1), (index, jnp.int32(room.start))
                )
        return out

    def at(self, buffers: Buffers, index: jax.Array) -> list[jax.Array]:
        """The reverse of `put`."""
        return [
            room.of(lax.dynamic_slice(buffers[room.dtype], (index, jnp.int32(room.start)), (1, room.size)))
            if room.size
            else room.of(jnp.zeros((0,), room.dtype))
            for room in self.rooms
        ]


def widest(packings: Iterable[Packing]) -> dict[str, int]:
    """Widths in which each of some packings has room."""
    out: dict[str, int] = {}
    for packing in packings:
        for name, n in packing.widths.items():
            out[name] = max(out.get(name, 0), n)
    return out


def zeros(widths: Mapping[str, int], *lead: int) -> Buffers:
    """Empty buffers [*lead, width]."""
    return {name: jnp.zeros((*lead, n), name) for name, n in widths.items()}
