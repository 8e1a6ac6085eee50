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

from ...backend.text import few
from ...model.paths import name_of
from ...program.buffers import is_on_host
from ...step.offload import Blocks


def checksums(mesh: Mesh, specs: Sequence[PartitionSpec]) -> Callable[[Sequence[jax.Array]], jax.Array]:
    """A jitted function of arrays with these specs: uint32 [devices of the mesh, arrays], the same on every host.

    A row is of what one device holds, whatever the others do; a change of one element always changes the sum. It reads
    every array once, and sends 4 bytes for each array and device.
    """
    stacked, everywhere = PartitionSpec(tuple(mesh.axis_names)), NamedSharding(mesh, PartitionSpec())

    def local(*arrays: jax.Array) -> jax.Array:
        return jnp.stack([checksum(x) for x in arrays])[None]

    mapped = jax.shard_map(local, mesh=mesh, in_specs=tuple(specs), out_specs=stacked, check_vma=False)
    raw = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return jax.jit(lambda arrays: mapped(*map(raw, arrays)), out_shardings=everywhere)


def differing(tree: Any, sums: np.ndarray, mesh: Mesh) -> str:
    """The arrays of a tree that are not the same on all devices which should hold the same of them, and of the first
    which devices these are: those that are fewer, where there is a majority; "" where there is none.

    Args:
      tree: arrays, or anything with shapes and shardings.
      sums: `checksums` of its leaves.
    """
    devices, found, odd = list(mesh.devices.flat), list[str](), ""
    name = lambda device: f"device {device.id} of process {device.process_index}"
    named = lambda group: few([name(devices[at]) for at in group], 4)
    for (path, x), row in zip(jax.tree_util.tree_leaves_with_path(tree), sums.T, strict=True):
        parts = x.sharding.devices_indices_map(tuple(x.shape))
        replicas: dict[Any, dict[int, list[int]]] = {}  # of each part the devices by their checksum
        for at, device in enumerate(devices):
            part = tuple(s.indices(n)[:2] for s, n in zip(parts[device], x.shape, strict=True))
            replicas.setdefault(part, {}).setdefault(int(row[at]), []).append(at)
        if held := next((held for held in replicas.values() if len(held) > 1), None):
            most, *others = sorted(held.values(), key=len, reverse=True)
            fewer = [at for group in others for at in group]
            tied = len(others[0]) == len(most)  # nobody is the odd one out
            odd = odd or (f"{named(most + fewer)} differ" if tied else f"{named(fewer)} differs from {named(most)}")
            found.append(f"{name_of(path)} {list(x.shape)}")
    return f"{few(found)}: {odd}" if found else ""


def check(tree: Any, sums: np.ndarray, mesh: Mesh, number: int) -> None:
    """Raise ValueError where `differing` finds something in the state after step `number`."""
    if found := differing(tree, sums, mesh):
        raise ValueError(
            f"replicas have drifted apart after step {number} in {found}, and should be the same; go on from a "
            "checkpoint from before, and where it comes again look at those devices"
        )


def checksum(x: jax.Array) -> jax.Array:
    """uint32: the sum of the words of an array's bits, each times an odd number of its own, modulo 2^32. What is on the
    host comes to the device a block at a time.
    """
    if not is_on_host(x):
        return _checksum(x, jnp.uint32(0))
    size = jnp.dtype(x.dtype).itemsize
    blocks = Blocks.of(x.shape, size)
    words = jnp.uint32(math.prod(blocks.block) * size // min(size, 4))
    add = lambda number, total: total + _checksum(blocks.take(x, number), words * number.astype(jnp.uint32))
    return jax.lax.fori_loop(0, blocks.count, add, jnp.uint32(0))


def _checksum(x: jax.Array, first: jax.Array) -> jax.Array:
    """That of words from number `first` on."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag])
    size = jnp.dtype(x.dtype).itemsize
    words = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else jax.lax.bitcast_convert_type(x, _WORDS[min(size, 4)])
    count = math.prod(words.shape)
    odd = 2 * (first + jax.lax.iota(jnp.uint32, count)) + jnp.uint32(1)
    return (words.reshape(-1).astype(jnp.uint32) * odd).sum(dtype=jnp.uint32)


_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
