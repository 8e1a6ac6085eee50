"""Whether replicas are: a checksum of every array on every device, and which of them should be the same.

XLA takes it for granted that a replicated array has the same bits on all its devices. Nothing makes it so but that
every device has done the same; where one has not (a broken device, a collective over the wrong axis, a host with other
data), training goes on with several models, each of which looks fine.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ...model.paths import name_of


def checksums(mesh: Mesh, specs: Sequence[PartitionSpec]) -> Callable[[Sequence[jax.Array]], jax.Array]:
    """A jitted function of arrays with these specs: uint32 [devices of the mesh, arrays], the same on every host.

    A row is of what one device holds, whatever the others do; a change of one element always changes the sum. It reads
    every array once, and sends 4 bytes for each array and device.
    """
    stacked, everywhere = PartitionSpec(tuple(mesh.axis_names)), NamedSharding(mesh, PartitionSpec())

    def local(*arrays: jax.Array) -> jax.Array:
        return jnp.stack([_checksum(x) for x in arrays])[None]

    mapped = jax.shard_map(local, mesh=mesh, in_specs=tuple(specs), out_specs=stacked, check_vma=False)
    raw = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return jax.jit(lambda arrays: mapped(*map(raw, arrays)), out_shardings=everywhere)


def differing(tree: Any, sums: np.ndarray, mesh: Mesh) -> str:
    """The first array of a tree that is not the same on two devices which should hold the same of it, and which they
    are; "" where there is none.

    Args:
      tree: arrays, or anything with shapes and shardings.
      sums: `checksums` of its leaves.
    """
    devices = list(mesh.devices.flat)
    for (path, x), row in zip(jax.tree_util.tree_leaves_with_path(tree), sums.T, strict=True):
        parts = x.sharding.devices_indices_map(tuple(x.shape))
        first: dict[Any, int] = {}
        for at, device in enumerate(devices):
            part = tuple(s.indices(n)[:2] for s, n in zip(parts[device], x.shape, strict=True))
            other = first.setdefault(part, at)
            if row[at] != row[other]:
                return f"{name_of(path)} {list(x.shape)}, {_of(device)} and {_of(devices[other])}"
    return ""


def _of(device: Any) -> str:
    return f"device {device.id} of process {device.process_index}"


def _checksum(x: jax.Array) -> jax.Array:
    """uint32: the sum of the words of an array's bits, each times an odd number of its own, modulo 2^32. Of an array on
    the host its rows come to the device one by one.
    """
    if jax.typeof(x).memory_space != jax.memory.Space.Device:
        row = lambda n: jax.device_put(jax.lax.dynamic_index_in_dim(x, n, keepdims=False), jax.memory.Space.Device)
        return jax.lax.fori_loop(0, len(x), lambda n, total: 3 * total + _checksum(row(n)), jnp.uint32(0))
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag])
    size = jnp.dtype(x.dtype).itemsize
    words = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else jax.lax.bitcast_convert_type(x, _WORDS[min(size, 4)])
    count = math.prod(words.shape)
    odd = 2 * jax.lax.iota(jnp.uint32, count) + jnp.uint32(1)
    return (words.reshape(-1).astype(jnp.uint32) * odd).sum(dtype=jnp.uint32)


_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
