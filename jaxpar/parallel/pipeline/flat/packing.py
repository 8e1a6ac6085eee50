"""Pack arrays of different shapes into one flat buffer per dtype, so that stages with different arrays share buffers.

    message before stage 1    float32 | x [8, 32]          | skip [8, 64]             | 0 0 0 0 |
    message before stage 2    float32 | y [8, 128]                    | skip [8, 64]            |

Every message has the width of the largest, since all ranks send buffers of one shape. A stash and a message buffer have
a further dim in front: [slots, width]. An array is written to and read from its field, without a copy of the others.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ....program.buffers import uninitialized

Buffers = dict[str, jax.Array]  # dtype name -> buffer


def key_data(x: Any) -> Any:
    """Return the data of random keys, and other arrays unchanged."""
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


@dataclass(frozen=True)
class Field:
    """The place of an array in the buffer of its dtype, as of a field in a struct.

    Attributes:
      dtype: the name of the dtype; for keys, the dtype of their data.
      start: the first element.
      shape: the shape of the array; for keys, of their data.
      keys: the implementation of random keys; None for other arrays.
    """

    dtype: str
    start: int
    shape: tuple[int, ...]
    keys: Any = None

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    def reshape(self, flat: jax.Array) -> jax.Array:
        """Return the array from its elements."""
        x = flat.reshape(self.shape)
        return x if self.keys is None else jax.random.wrap_key_data(x, impl=self.keys)


@dataclass(frozen=True)
class Packing:
    """Arrays one after the other in the buffers of their dtypes.

    Attributes:
      fields: the field of each array.
      widths: dtype name -> the number of elements of all arrays.
    """

    fields: tuple[Field, ...]
    widths: Mapping[str, int]

    @classmethod
    def of_avals(cls, avals: Iterable[Any]) -> "Packing":
        """Return the packing of abstract arrays, one after the other in the buffer of their dtype."""
        fields, widths = [], dict[str, int]()
        for aval in avals:
            # Random keys have a special dtype; their data are integers, which buffers can hold.
            keys = aval.dtype._impl.name if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key) else None
            data = aval if keys is None else jax.eval_shape(key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
            name = jnp.dtype(data.dtype).name
            field = Field(name, widths.get(name, 0), tuple(data.shape), keys)
            widths[name] = field.start + field.size
            fields.append(field)
        return cls(tuple(fields), widths)

    @property
    def bytes(self) -> int:
        """Return the bytes of all arrays."""
        return sum(n * jnp.dtype(name).itemsize for name, n in self.widths.items())

    def pack(self, values: Sequence[Any], widths: Mapping[str, int]) -> Buffers:
        """Return buffers of `widths` with the arrays, and zeros after them; a value of None packs zeros."""
        # Every dtype of `widths` has a buffer, also if these arrays have none of that dtype.
        parts: dict[str, list[jax.Array]] = {name: [] for name in widths}
        for field, x in zip(self.fields, values, strict=True):
            parts[field.dtype].append(jnp.zeros(field.size, field.dtype) if x is None else key_data(x).reshape(-1))
        # Up to the width of the widest message: ranks send and receive one shape.
        padding = lambda name: jnp.zeros(widths[name] - self.widths.get(name, 0), name)
        return {name: jnp.concatenate([*flats, padding(name)]) for name, flats in parts.items()}

    def unpack(self, buffers: Buffers) -> list[jax.Array]:
        """Return the arrays in buffers [width], as `pack` makes them."""
        return [
            field.reshape(lax.slice_in_dim(buffers[field.dtype], field.start, field.start + field.size))
            for field in self.fields
        ]

    def write(self, buffers: Buffers, index: jax.Array, values: Sequence[Any]) -> Buffers:
        """Return buffers [n, width] with the arrays in row `index`."""
        written = dict(buffers)
        for field, x in zip(self.fields, values, strict=True):
            if field.size:
                # One update per array, rather than per row: XLA writes in place, and packs no row first.
                written[field.dtype] = lax.dynamic_update_slice(
                    written[field.dtype], key_data(x).reshape(1, -1), (index, jnp.int32(field.start))
                )
        return written

    def read(self, buffers: Buffers, index: jax.Array) -> list[jax.Array]:
        """Return the arrays in row `index` of buffers [n, width], as `write` leaves them."""
        # An empty array needs no read.
        return [
            field.reshape(lax.dynamic_slice(buffers[field.dtype], (index, jnp.int32(field.start)), (1, field.size)))
            if field.size
            else field.reshape(jnp.zeros((0,), field.dtype))
            for field in self.fields
        ]


def widest(packings: Iterable[Packing]) -> dict[str, int]:
    """Return the widths of buffers in which each packing fits."""
    widths: dict[str, int] = {}
    for packing in packings:
        for name, n in packing.widths.items():
            widths[name] = max(widths.get(name, 0), n)
    return widths


def zeros(widths: Mapping[str, int], *lead: int) -> Buffers:
    """Return buffers [*lead, width] of zeros."""
    return {name: jnp.zeros((*lead, n), name) for name, n in widths.items()}


def empty(widths: Mapping[str, int], *lead: int) -> Buffers:
    """Return buffers [*lead, width], not filled: read only fields that `Packing.write` has written."""
    return {name: uninitialized((*lead, n), name) for name, n in widths.items()}
