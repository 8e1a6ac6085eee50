"""Batches: pytrees of global arrays, or of this host's rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ..strategy import ROWS
from .model import Replicated
from .paths import name_of


def batch_specs(batch: Any) -> Any:
    """The spec of every leaf: rows over the data axes, marked leaves replicated."""

    def spec(x: Any) -> Any:
        if isinstance(x, Replicated):
            return jax.tree.map(lambda _: PartitionSpec(), x)
        return PartitionSpec(ROWS)

    return jax.tree.map(spec, batch, is_leaf=_is_replicated)


def microbatches(batch: Any, count: int) -> Any:
    """Rows [m r, ...] -> [m, r, ...] for m microbatches; marked leaves are repeated."""

    def leaf(x: Any) -> Any:
        if isinstance(x, Replicated):
            return jax.tree.map(lambda v: jnp.broadcast_to(v, (count, *v.shape)), x)
        return x.reshape(count, x.shape[0] // count, *x.shape[1:])

    return jax.tree.map(leaf, batch, is_leaf=_is_replicated)


def one_block(batch: Any, blocks: int) -> Any:
    """Abstract rows of one of the blocks into which a batch is divided; marked leaves are whole."""

    def leaf(x: Any) -> Any:
        if isinstance(x, Replicated):
            return jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype), x)
        return jax.ShapeDtypeStruct((x.shape[0] // blocks, *x.shape[1:]), x.dtype)

    return jax.tree.map(leaf, jax.eval_shape(lambda x: x, batch), is_leaf=_is_replicated)


def batch_shardings(batch: Any, mesh: Mesh) -> Any:
    """Where every leaf of a batch goes: `batch_specs` on a mesh."""
    on_mesh = lambda spec: NamedSharding(mesh, spec)
    return jax.tree.map(on_mesh, batch_specs(batch), is_leaf=lambda x: isinstance(x, PartitionSpec))


def hosts_of_rows(mesh: Mesh) -> int:
    """How many hosts' rows make a batch. Hosts that hold the same rows, stages of one pipeline, count once."""
    if jax.process_count() == 1:  # whatever hosts devices that are not there would have
        return 1
    places: dict[int, set[int]] = {}
    pipe, *rest = mesh.devices.shape
    devices = mesh.devices.reshape(pipe, -1, rest[-1])  # [pipe, rows, tensor]
    for (_, row, _), device in np.ndenumerate(devices):
        places.setdefault(device.process_index, set()).add(row)
    return max(devices.shape[1] // len(rows) for rows in places.values())


def check_rows(batch: Any, replicas: int, microbatches: int, hosts: int) -> None:
    """Raise ValueError unless every leaf has the same number of rows, a multiple of replicas x microbatches; each of
    `hosts` has its own rows unless the batch is global.
    """
    rows: dict[int, str] = {}
    for path, x in jax.tree_util.tree_leaves_with_path(batch, is_leaf=_is_replicated):
        name = name_of(path) or "batch"
        if _is_replicated(x):
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
        rows.setdefault(x.shape[0], name)
    if not rows:
        raise ValueError("the batch has no leaf with rows; pass at least one array [rows, ...]")
    if len(rows) > 1:
        (a, first), (b, second), *_ = rows.items()
        raise ValueError(
            f"batch leaves differ in rows: {first} has {a}, {second} has {b}; mark leaves without rows by "
            "jp.Replicated(...)"
        )
    (count,) = rows
    count *= 1 if _is_global(batch) else hosts
    blocks = replicas * microbatches
    if not count:
        raise ValueError(f"the batch has no rows; give a multiple of {blocks} ({replicas} replicas x {microbatches} "
                         "microbatches)")  # fmt: skip
    if count % blocks:
        drop = f"drop {count % blocks} rows, or " if count > blocks else ""
        raise ValueError(
            f"batch has {count} rows; {replicas} replicas x {microbatches} microbatches need a multiple of {blocks}: "
            f"{drop}pad with jp.pad_rows(batch, {blocks}), whose mask goes into a jp.Mean loss"
        )


def _check_kind(name: str, x: Any) -> None:
    """Raise ValueError unless jit takes this leaf."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return
    try:
        jax.typeof(x)
    except TypeError as error:
        kind = f"{x.dtype}{list(x.shape)}" if isinstance(x, np.ndarray) else f"a {type(x).__name__}"
        raise ValueError(
            f"batch leaf {name} is {kind}; use NumPy or jax arrays of numbers (np.asarray(x), x.astype(...)), and keep "
            "text and dates out of the batch"
        ) from error


def rows_of(batch: Any) -> int:
    """The number of rows of a batch of arrays or `jax.ShapeDtypeStruct`."""
    leaves = jax.tree.leaves(batch, is_leaf=_is_replicated)
    return next(np.shape(x)[0] for x in leaves if not _is_replicated(x))


def globalise(batch: Any, mesh: Mesh) -> Any:
    """This host's rows as global arrays; on one host, and for global arrays, the batch itself, moved if need be."""
    here = jax.process_count() == 1 or _is_global(batch)
    if here and not any(is_array(x) and x.committed for x in jax.tree.leaves(batch)):  # NumPy, as most batches
        return batch
    places = batch_shardings(batch, mesh)
    if here:
        return jax.tree.map(_moved, batch, places)
    hosts = hosts_of_rows(mesh)

    def made(x: Any, place: NamedSharding) -> jax.Array:
        x = np.asarray(x)
        shape = x.shape if place.spec == PartitionSpec() else (x.shape[0] * hosts, *x.shape[1:])
        return jax.make_array_from_process_local_data(place, x, shape)

    return jax.tree.map(made, batch, places)


def _is_global(batch: Any) -> bool:
    return all(is_array(x) and not x.is_fully_addressable for x in jax.tree.leaves(batch))


def _moved(x: Any, wanted: NamedSharding) -> Any:
    """An array as the step wants it, from wherever the user has put it: jit would refuse it."""
    if not is_array(x) or not x.committed or x.sharding == wanted:
        return x
    mesh = getattr(x.sharding, "mesh", None)  # with explicit axes, an array would take them into the step
    automatic = mesh is None or all(kind == AxisType.Auto for kind in mesh.axis_types)
    return x if automatic and x.sharding.is_equivalent_to(wanted, x.ndim) else jax.device_put(x, wanted)


def is_array(x: Any) -> bool:
    """Whether `x` is an array that is somewhere, not one that is being traced."""
    return isinstance(x, jax.Array) and not isinstance(x, Tracer)


def _is_replicated(x: Any) -> bool:
    return isinstance(x, Replicated)
