"""Batches: pytrees of arrays with rows on dim 0.

This module checks the leaves of a batch, divides its rows into blocks, and places them on a mesh, over several hosts
too.

Rows are global by default: every host passes the same batch to a step. With `rows="host"` every host passes its own
rows, and the batch is all of them. Arrays that lie on several hosts, and shapes (`jax.ShapeDtypeStruct`), are always
global. A leaf without rows is marked by `Replicated`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ..strategy.axes import ROWS
from .calls import describe
from .model import Replicated, is_replicated
from .paths import name_of

GIVEN = ("global", "host")  # the values of a step's `rows=`: whether a host passes all rows, or its own
WHOSE = "rows='global' takes the same rows on every host, rows='host' each host's own"  # a hint in errors


def batch_specs(batch: Any) -> Any:
    """Return the spec of every leaf: rows over the data axes, marked leaves replicated."""
    return map_rows(batch, lambda x: PartitionSpec(ROWS), lambda x: PartitionSpec())


def microbatches(batch: Any, count: int) -> Any:
    """Reshape rows [m r, ...] -> [m, r, ...] for m microbatches, and repeat marked leaves."""
    split_rows = lambda x: x.reshape(count, x.shape[0] // count, *x.shape[1:])
    return map_rows(batch, split_rows, lambda x: jnp.broadcast_to(x, (count, *x.shape)))


def one_block(batch: Any, blocks: int | Fraction) -> Any:
    """Return the abstract rows of one of `blocks` equal blocks; marked leaves are whole.

    `blocks` may be a fraction, for a block that is larger than the batch.
    """
    # An int divided by a `Fraction` with // is an int, as a dim must be.
    block_of_rows = lambda x: jax.ShapeDtypeStruct((x.shape[0] // blocks, *x.shape[1:]), x.dtype)
    return map_rows(jax.eval_shape(lambda x: x, batch), block_of_rows)


def dealt(batch: Any, order: Any, gather_rows: Callable[[Any], Any] = lambda x: x) -> Any:
    """Return a batch with its rows in another order; marked leaves are unchanged.

    Args:
      batch: the batch, or one rank's rows.
      order: the indices of the rows to return, [rows].
      gather_rows: returns all rows of a leaf, which `order` indexes; called on every leaf with rows.
    """
    return map_rows(batch, lambda x: gather_rows(x)[order])


def map_rows(batch: Any, fun: Callable[[Any], Any], fun_of_marked: Callable[[Any], Any] = lambda x: x) -> Any:
    """Apply `fun` to every leaf that has rows, and `fun_of_marked` to every array marked as replicated."""
    convert = lambda x: jax.tree.map(fun_of_marked, x) if isinstance(x, Replicated) else fun(x)
    return jax.tree.map(convert, batch, is_leaf=is_replicated)


def batch_shardings(batch: Any, mesh: Mesh) -> Any:
    """Return the sharding of every leaf of a batch: `batch_specs` on a mesh."""
    on_mesh = lambda spec: NamedSharding(mesh, spec)
    return jax.tree.map(on_mesh, batch_specs(batch), is_leaf=lambda x: isinstance(x, PartitionSpec))


def part_of_rows(mesh: Mesh) -> tuple[int, int]:
    """Return which part of a batch's rows this host's devices have, as (index, number of parts).

    Hosts that have the same rows, such as stages of one pipeline or positions of one sequence, have the same part.

    Raises:
      ValueError: hosts share only some rows, or have parts of unequal size.
    """
    if jax.process_count() == 1:  # the devices of a target may name hosts that do not run
        return 0, 1
    # Along the axes of rows, device (i, j, ...) has the block of rows that the flat index of (i, j, ...) numbers.
    axes = [mesh.axis_names.index(axis) for axis in ROWS]
    sizes = tuple(mesh.devices.shape[axis] for axis in axes)
    blocks_of_host: dict[int, set[int]] = {}  # process index -> the blocks of rows that its devices have
    for place, device in np.ndenumerate(mesh.devices):
        blocks_of_host.setdefault(device.process_index, set()).add(
            int(np.ravel_multi_index([place[i] for i in axes], sizes))
        )
    # Hosts with the same blocks have one part. Sorted, so that all hosts number the parts alike.
    parts = sorted({tuple(sorted(rows)) for rows in blocks_of_host.values()})
    # Different parts must be disjoint, of one size, and together all blocks.
    if len({len(part) for part in parts}) > 1 or sum(map(len, parts)) != math.prod(sizes):
        owned = ", ".join(str(list(rows)) for rows in blocks_of_host.values())
        raise ValueError(
            f"rows='host' needs hosts with equal parts of the rows that do not overlap, and of {math.prod(sizes)} "
            f"blocks of a batch the hosts have {owned}; use rows='global', and give the same rows on every host"
        )
    return parts.index(tuple(sorted(blocks_of_host[jax.process_index()]))), len(parts)


def check_rows(batch: Any, replicas: int, microbatches: int, hosts: int = 1) -> None:
    """Raise ValueError unless every leaf has the same number of rows, a multiple of replicas x microbatches.

    Args:
      replicas: the number of replicas that share the rows.
      microbatches: the blocks into which each replica divides its rows.
      hosts: 1 if rows are global; else the number of hosts whose rows make the batch.
    """
    # 1. Every leaf is an array with rows, or is marked.
    leaf_by_row_count: dict[int, str] = {}  # number of rows -> the first leaf with this number
    for path, x in jax.tree_util.tree_leaves_with_path(batch, is_leaf=is_replicated):
        name = name_of(path) or "batch"
        if is_replicated(x):
            # A marked subtree may have any shapes, but only values that `jit` takes.
            for below, value in jax.tree_util.tree_leaves_with_path(x.value):
                _check_kind(name_of((*path, *below)) or "batch", value)
            continue
        if not hasattr(x, "shape"):
            raise ValueError(
                f"batch leaf {name} is a {type(x).__name__}; use arrays with a row dim, or jp.Replicated(np.asarray(x))"
            )
        if not x.shape:
            raise ValueError(f"batch leaf {name} is a scalar without a row dim; mark it with jp.Replicated(...)")
        _check_kind(name, x)
        leaf_by_row_count.setdefault(x.shape[0], name)
    if not leaf_by_row_count:
        raise ValueError("the batch has no leaf with rows; pass at least one array [rows, ...]")
    # 2. All leaves have the same number of rows.
    if len(leaf_by_row_count) > 1:
        (a, first), (b, second), *_ = leaf_by_row_count.items()
        raise ValueError(
            f"batch leaves differ in rows: {first} has {a}, {second} has {b}; mark leaves without rows by "
            "jp.Replicated(...)"
        )
    # 3. They divide into blocks. Else propose fewer microbatches that fit, rows to drop, or padding.
    (rows_per_host,) = leaf_by_row_count
    hosts = 1 if is_global(batch) else hosts
    num_rows, num_blocks = rows_per_host * hosts, replicas * microbatches
    per_host = f" ({rows_per_host} from each of {hosts} hosts)" if hosts > 1 else ""
    if not num_rows:
        raise ValueError(
            f"the batch has no rows; give a multiple of {num_blocks} ({replicas} replicas x {microbatches} "
            "microbatches)"
        )
    if num_rows % num_blocks:
        # With fewer rows than blocks, no row would be left.
        drop = f"drop {num_rows % num_blocks} rows, or " if num_rows > num_blocks else ""
        # 0 if the rows do not divide among the replicas: then no number of microbatches is proposed.
        rows_divide = replicas % hosts == 0 and rows_per_host % (replicas // hosts) == 0
        rows_per_replica = rows_per_host // (replicas // hosts) if rows_divide else 0
        divisors = [m for m in range(2, microbatches) if rows_per_replica and rows_per_replica % m == 0]
        most_microbatches = max(divisors, default=1)
        fewer = f"use microbatches={most_microbatches}, or " if most_microbatches > 1 else ""
        if hosts > 1 or jax.process_count() > 1:
            drop = f"{WHOSE}; here rows={GIVEN[hosts > 1]!r}: {drop}"
        raise ValueError(
            f"batch has {num_rows} rows{per_host}; {replicas} replicas x {microbatches} microbatches need a multiple "
            f"of {num_blocks}: {drop}{fewer}pad with jp.pad_rows(batch, {-(-num_blocks // hosts)}), whose mask goes "
            "into a jp.Mean loss"
        )


def _check_kind(name: str, x: Any) -> None:
    """Raise ValueError unless `jax.jit` accepts this leaf."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return
    try:
        jax.typeof(x)
    except (TypeError, ValueError) as error:  # masked arrays raise ValueError
        kind = f"{x.dtype}{list(x.shape)}" if isinstance(x, np.ndarray) else f"a {type(x).__name__}"
        raise ValueError(f"batch leaf {name} is {kind}; {_advice(x)}") from error


def _advice(x: Any) -> str:
    """Return the advice for a leaf that `jax.jit` does not accept."""
    # A masked array is an ndarray too: it comes first.
    if isinstance(x, np.ma.MaskedArray):
        return "fill masked values, x.filled(0), and give the mask as another leaf, ~np.ma.getmaskarray(x)"
    advice = "keep text, dates and records out of the batch, or convert them to numbers, dates by x.astype('int64')"
    if not isinstance(x, np.ndarray):
        return advice if isinstance(x, str | bytes) else "give it as a NumPy array of numbers, np.asarray(x)"
    if x.dtype.kind in "iufc":  # with another byte order, or with more bits than JAX has, such as float128
        closest_dtype = {"f": np.float32, "c": np.complex64}.get(x.dtype.kind, x.dtype.newbyteorder("="))
        reason = "jax has no such numbers" if x.dtype.isnative else "its bytes are in the order of other machines"
        return f"{reason}, convert it by x.astype({np.dtype(closest_dtype).name!r})"
    if x.dtype.kind == "O":
        return "convert it to one array of numbers, x.astype('float32'), or np.stack(x) if its items are arrays"
    return advice


def rows_of(batch: Any) -> int:
    """Return the number of rows of a batch of arrays or `jax.ShapeDtypeStruct`."""
    leaves = jax.tree.leaves(batch, is_leaf=is_replicated)
    return next(np.shape(x)[0] for x in leaves if not is_replicated(x))


def global_shapes(batch: Any, hosts: int) -> Any:
    """Return the shapes of the global batch, from the batch or this host's part of it; `hosts` as in `check_rows`."""
    shapes = jax.eval_shape(lambda x: x, batch)
    if hosts == 1 or is_global(batch):
        return shapes
    # With rows="host" all hosts pass the same number of rows.
    return map_rows(shapes, lambda x: jax.ShapeDtypeStruct((x.shape[0] * hosts, *x.shape[1:]), x.dtype))


def globalise(batch: Any, mesh: Mesh, hosts: int = 1) -> Any:
    """Return a batch as global arrays, placed on a mesh.

    On one host, and for global arrays, this is the batch itself, moved to its devices if the user has placed it
    elsewhere. Hosts send each other nothing: each host copies its devices' part of a batch that is the same on all
    hosts (`hosts` is 1), or its own rows.
    """
    is_local = jax.process_count() == 1 or is_global(batch)
    # Most batches are NumPy arrays, which jit places.
    if is_local and not any(is_array(x) and x.committed for x in jax.tree.leaves(batch)):
        return batch
    shardings = batch_shardings(batch, mesh)
    if is_local:
        return jax.tree.map(_move, batch, shardings)

    def placed(x: Any, sharding: NamedSharding) -> jax.Array:
        x = np.asarray(x)
        # Every host has the complete array, as always for marked leaves: it copies the index ranges of its devices.
        if hosts == 1 or sharding.spec == PartitionSpec():
            return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])
        return jax.make_array_from_process_local_data(sharding, x, (x.shape[0] * hosts, *x.shape[1:]))

    return jax.tree.map(placed, batch, shardings)


def as_array(x: Any) -> Any:
    """Return a tensor of another library as a NumPy array that shares its memory; anything else unchanged."""
    is_native = isinstance(x, np.ndarray | np.generic | jax.Array)
    return np.asarray(x) if not is_native and hasattr(x, "__array__") else x


def narrowed(batch: Any) -> Any:
    """Return a batch with NumPy's 64-bit integers as the 32-bit integers that JAX uses unless 64 bits are enabled.

    Raises:
      ValueError: a value does not fit into 32 bits, naming leaf and row. JAX would drop its upper bits silently.
    """

    def narrow(path: Any, x: Any) -> Any:
        if not isinstance(x, np.ndarray) or x.dtype.kind not in "iu" or x.dtype.itemsize < 8:
            return x
        # int32 or uint32, or the array's own dtype if 64 bits are enabled.
        dtype = np.dtype(jax.dtypes.canonicalize_dtype(x.dtype))
        if dtype == x.dtype or not x.size:
            return x
        # The extremes need no memory. The mask is as large as the batch, and made for the error alone.
        limits = np.iinfo(dtype)
        if x.min() < limits.min or x.max() > limits.max:
            does_not_fit = (x < limits.min) | (x > limits.max)
            indices = np.unravel_index(int(np.argmax(does_not_fit)), x.shape)
            raise ValueError(
                f"batch leaf {name_of(path) or 'batch'} holds {x[indices]} in row {indices[0]}, and as {dtype} would "
                f"be {x[indices].astype(dtype)}; correct the value, or enable jax_enable_x64"
            )
        return x.astype(dtype)

    return jax.tree_util.tree_map_with_path(narrow, batch)


def example_shapes(example: Any, argument: str) -> Any:
    """Return the shapes of a batch that a user passes as an example.

    Args:
      example: arrays or `jax.ShapeDtypeStruct`, of any number of rows.
      argument: the name of the argument, for errors.

    Raises:
      ValueError: it is no batch of arrays.
    """
    if isinstance(example, Iterator):
        raise ValueError(f"{argument} is a {type(example).__name__}; give one of its batches, next(loader)")
    try:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x := as_array(x)), jnp.result_type(x)), example)
    except TypeError as error:
        for path, x in jax.tree_util.tree_leaves_with_path(example):
            if isinstance(x, np.ndarray):  # strings, say: JAX's error would print all their values
                _check_kind(f"{name_of(path)} of {argument}".lstrip(), x)
        raise ValueError(
            f"{argument} is {describe(example)}; needs a batch of arrays or jax.ShapeDtypeStruct: {error}"
        ) from error


def is_global(batch: Any) -> bool:
    """Whether a batch is global whatever `rows=` says: it lies on several hosts, or is traced or abstract."""
    abstract = (jax.ShapeDtypeStruct, Tracer)
    return all(isinstance(x, abstract) or (is_array(x) and not x.is_fully_addressable) for x in jax.tree.leaves(batch))


def _move(x: Any, sharding: NamedSharding) -> Any:
    """Return an array in the sharding that the step needs. Where a user has placed it elsewhere, `jit` would raise."""
    if not is_array(x) or not x.committed or x.sharding == sharding:
        return x
    # An array on a mesh with explicit axes would bring these into the step. Move it even if it lies in the right place.
    mesh = getattr(x.sharding, "mesh", None)
    has_auto_axes = mesh is None or all(kind == AxisType.Auto for kind in mesh.axis_types)
    return x if has_auto_axes and x.sharding.is_equivalent_to(sharding, x.ndim) else jax.device_put(x, sharding)


def is_array(x: Any) -> bool:
    """Whether `x` is an array with values, rather than one that is being traced."""
    return isinstance(x, jax.Array) and not isinstance(x, Tracer)
