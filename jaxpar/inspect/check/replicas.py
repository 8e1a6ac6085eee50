"""Whether replicas are equal: a checksum of every array on every device, and which checksums should be equal.

XLA assumes that a replicated array has the same bits on all its devices. This holds only if every device has computed
the same. Otherwise (a broken device, a collective over the wrong axis, a host with other data) training continues with
several models that all look fine.
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
    """Return a jitted function that computes checksums of arrays with these specs.

    It reads every array once, and all-gathers 4 bytes for each array and device.

    Returns:
      A function from arrays to uint32 [devices of the mesh, arrays], the same on every host. A row depends only on what
      one device stores. A change of one word of at most 4 bytes, such as a float32, always changes the checksum.
    """
    row_per_device, replicated = PartitionSpec(tuple(mesh.axis_names)), NamedSharding(mesh, PartitionSpec())

    def local_checksums(*arrays: jax.Array) -> jax.Array:
        """Return the checksums of this device's shards, [1, arrays]."""
        return jnp.stack([checksum(x) for x in arrays])[None]

    sharded_checksums = jax.shard_map(
        local_checksums, mesh=mesh, in_specs=tuple(specs), out_specs=row_per_device, check_vma=False
    )
    # Keys have no arithmetic: take their bits.
    key_bits = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return jax.jit(lambda arrays: sharded_checksums(*map(key_bits, arrays)), out_shardings=replicated)


def differing(tree: Any, sums: np.ndarray, mesh: Mesh) -> str:
    """Return the arrays that differ between devices which should store equal values, and the devices that differ.

    Devices are named for the first such array: the minority, where there is a majority. The result is "" if all are
    equal.

    Args:
      tree: arrays, or anything with shapes and shardings.
      sums: `checksums` of its leaves, [devices of the mesh, leaves].
    """
    devices, differing_arrays, odd_devices = list(mesh.devices.flat), list[str](), ""
    device_name = lambda device: f"device {device.id} of process {device.process_index}"
    device_names = lambda positions: few([device_name(devices[position]) for position in positions], 4)
    for (path, x), array_sums in zip(jax.tree_util.tree_leaves_with_path(tree), sums.T, strict=True):
        # 1. Group the devices by the part of the array that they store, and by checksum.
        indices_by_device = x.sharding.devices_indices_map(tuple(x.shape))
        positions_by_index: dict[Any, dict[int, list[int]]] = {}  # index -> checksum -> positions of devices
        # Devices with the same index into the array store the same part of it.
        for position, device in enumerate(devices):
            # (start, stop), since slices can be hashed only from Python 3.12 on.
            index = tuple(
                dim_slice.indices(dim_size)[:2]
                for dim_slice, dim_size in zip(indices_by_device[device], x.shape, strict=True)
            )
            positions_by_index.setdefault(index, {}).setdefault(int(array_sums[position]), []).append(position)
        # 2. One part with several checksums is enough for the array to be named.
        if positions_by_sum := next(
            (positions_by_sum for positions_by_sum in positions_by_index.values() if len(positions_by_sum) > 1), None
        ):
            majority, *minorities = sorted(positions_by_sum.values(), key=len, reverse=True)
            minority_positions = [position for positions in minorities for position in positions]
            is_tied = len(minorities[0]) == len(majority)  # no majority
            odd_devices = odd_devices or (
                f"{device_names(majority + minority_positions)} differ"
                if is_tied
                else f"{device_names(minority_positions)} differs from {device_names(majority)}"
            )
            differing_arrays.append(f"{name_of(path)} {list(x.shape)}")
    return f"{few(differing_arrays)}: {odd_devices}" if differing_arrays else ""


def check(tree: Any, sums: np.ndarray, mesh: Mesh, number: int) -> None:
    """Raise ValueError if replicas differ in the state after step `number`; see `differing`."""
    if differences := differing(tree, sums, mesh):
        raise ValueError(
            f"replicas have drifted apart after step {number} in {differences}, and should be equal; continue from an "
            "earlier checkpoint, and if this happens again, check those devices"
        )


def checksum(x: jax.Array) -> jax.Array:
    """Return an array's checksum, a uint32 scalar: sum_i (2 i + 1) w_i modulo 2^32, for the words w_i of its bits.

    The odd factors make every change of a single word visible. An array in host memory comes to the device one block at
    a time.
    """
    if not is_on_host(x):
        return _checksum(x, jnp.uint32(0))
    itemsize = jnp.dtype(x.dtype).itemsize
    # The words of block b are numbered from b times the words per block, as if the array were read at once.
    blocks = Blocks.of(x.shape, itemsize)
    # An element of more than 4 bytes has several words.
    words_per_block = jnp.uint32(math.prod(blocks.block) * itemsize // min(itemsize, 4))
    add_block = lambda block_index, partial_sum: (
        partial_sum + _checksum(blocks.take(x, block_index), words_per_block * block_index.astype(jnp.uint32))
    )
    return jax.lax.fori_loop(0, blocks.count, add_block, jnp.uint32(0))


def _checksum(x: jax.Array, first_word: jax.Array) -> jax.Array:
    """Return the checksum of an array whose words are numbered from `first_word` on."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag])
    itemsize = jnp.dtype(x.dtype).itemsize
    # `bitcast_convert_type` takes neither booleans nor complex numbers.
    words = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else jax.lax.bitcast_convert_type(x, _WORDS[min(itemsize, 4)])
    num_words = math.prod(words.shape)
    # uint32 wraps around, which is the modulus of the sum.
    odd_factors = 2 * (first_word + jax.lax.iota(jnp.uint32, num_words)) + jnp.uint32(1)
    return (words.reshape(-1).astype(jnp.uint32) * odd_factors).sum(dtype=jnp.uint32)


_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
