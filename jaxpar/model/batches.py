"""Batches: pytrees of arrays with rows on dim 0; with several hosts, whose rows they are, and how each keeps its own.

Rows are global, the same batch on every host, unless `rows="host"` is said to a step: then every host gives its own,
and a batch is all of them. Arrays that lie on several hosts, and shapes (`jax.ShapeDtypeStruct`), are global always.
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
from .calls import described
from .model import Replicated, is_replicated
from .paths import name_of

GIVEN = ("global", "host")  # whose rows a batch is made of: what `rows=` of a step may be
WHOSE = "rows are global, the same on every host, or with rows='host' each host's own"


def batch_specs(batch: Any) -> Any:
    """The spec of every leaf: rows over the data axes, marked leaves replicated."""
    return _by_leaf(batch, lambda x: PartitionSpec(ROWS), lambda x: PartitionSpec())


def microbatches(batch: Any, count: int) -> Any:
    """Rows [m r, ...] -> [m, r, ...] for m microbatches; marked leaves are repeated."""
    rows = lambda x: x.reshape(count, x.shape[0] // count, *x.shape[1:])
    return _by_leaf(batch, rows, lambda x: jnp.broadcast_to(x, (count, *x.shape)))


def one_block(batch: Any, blocks: int | Fraction) -> Any:
    """Abstract rows of one of the blocks into which a batch is divided, or of a larger block (a fraction);
    marked leaves are whole.
    """
    rows = lambda x: jax.ShapeDtypeStruct((x.shape[0] // blocks, *x.shape[1:]), x.dtype)
    return _by_leaf(jax.eval_shape(lambda x: x, batch), rows)


def dealt(batch: Any, order: Any, whole: Callable[[Any], Any] = lambda x: x) -> Any:
    """The rows of a batch that `order` [rows] numbers; marked leaves as they are. `whole(x)` has all rows of a leaf."""
    return _by_leaf(batch, lambda x: whole(x)[order])


def _by_leaf(batch: Any, rows: Callable[[Any], Any], marked: Callable[[Any], Any] = lambda x: x) -> Any:
    """A batch with `rows(x)` of every leaf that has rows, and `marked(x)` of every array that is marked replicated."""
    leaf = lambda x: jax.tree.map(marked, x) if isinstance(x, Replicated) else rows(x)
    return jax.tree.map(leaf, batch, is_leaf=is_replicated)


def batch_shardings(batch: Any, mesh: Mesh) -> Any:
    """Where every leaf of a batch goes: `batch_specs` on a mesh."""
    on_mesh = lambda spec: NamedSharding(mesh, spec)
    return jax.tree.map(on_mesh, batch_specs(batch), is_leaf=lambda x: isinstance(x, PartitionSpec))


def part_of_rows(mesh: Mesh) -> tuple[int, int]:
    """Which part of a batch's rows this host's devices have, and how many parts there are: (index, count). Hosts that
    have the same rows, stages of one pipeline or positions of one sequence, have the same part.
    """
    if jax.process_count() == 1:  # whatever hosts devices that are not there would have
        return 0, 1
    axes = [mesh.axis_names.index(axis) for axis in ROWS]
    sizes = tuple(mesh.devices.shape[axis] for axis in axes)
    places: dict[int, set[int]] = {}
    for at, device in np.ndenumerate(mesh.devices):
        places.setdefault(device.process_index, set()).add(int(np.ravel_multi_index([at[i] for i in axes], sizes)))
    parts = sorted({tuple(sorted(rows)) for rows in places.values()})
    if len({len(part) for part in parts}) > 1 or sum(map(len, parts)) != math.prod(sizes):
        have = ", ".join(str(list(rows)) for rows in places.values())
        raise ValueError(
            f"rows='host' and hosts share some rows, or have unequal parts: of {math.prod(sizes)} parts of a batch "
            f"they have {have}; give global rows, the same on every host"
        )
    return parts.index(tuple(sorted(places[jax.process_index()]))), len(parts)


def check_rows(batch: Any, replicas: int, microbatches: int, hosts: int = 1) -> None:
    """Raise ValueError unless every leaf has the same number of rows, a multiple of replicas x microbatches.

    `hosts`: 1 where rows are global, else how many hosts' own rows make a batch.
    """
    rows: dict[int, str] = {}
    for path, x in jax.tree_util.tree_leaves_with_path(batch, is_leaf=is_replicated):
        name = name_of(path) or "batch"
        if is_replicated(x):
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
    (each,) = rows
    hosts = 1 if is_global(batch) else hosts
    count, blocks = each * hosts, replicas * microbatches
    own = f" ({each} from each of {hosts} hosts)" if hosts > 1 else ""
    if not count:
        raise ValueError(f"the batch has no rows; give a multiple of {blocks} ({replicas} replicas x {microbatches} "
                         "microbatches)")  # fmt: skip
    if count % blocks:
        drop = f"drop {count % blocks} rows, or " if count > blocks else ""
        rest = each // (replicas // hosts) if replicas % hosts == 0 and each % (replicas // hosts) == 0 else 0
        most = max((m for m in range(2, microbatches) if rest % m == 0), default=1) if rest else 1
        fewer = f"use microbatches={most}, or " if most > 1 else ""
        if hosts > 1 or jax.process_count() > 1:
            drop = f"{WHOSE}; here rows are {'own' if hosts > 1 else 'global'}: {drop}"
        raise ValueError(
            f"batch has {count} rows{own}; {replicas} replicas x {microbatches} microbatches need a multiple of "
            f"{blocks}: {drop}{fewer}pad with jp.pad_rows(batch, {-(-blocks // hosts)}), whose mask goes into a "
            "jp.Mean loss"
        )


def _check_kind(name: str, x: Any) -> None:
    """Raise ValueError unless jit takes this leaf."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return
    try:
        jax.typeof(x)
    except (TypeError, ValueError) as error:  # the second of NumPy's masked arrays
        kind = f"{x.dtype}{list(x.shape)}" if isinstance(x, np.ndarray) else f"a {type(x).__name__}"
        raise ValueError(f"batch leaf {name} is {kind}; {_instead(x)}") from error


def _instead(x: Any) -> str:
    """What to give in place of a leaf that jit does not take."""
    if isinstance(x, np.ma.MaskedArray):
        return "fill what is masked, x.filled(0), and give the mask as a leaf of its own, ~np.ma.getmaskarray(x)"
    words = "keep text, dates and records out of the batch, or give numbers, as x.astype('int64') makes of dates"
    if not isinstance(x, np.ndarray):
        return words if isinstance(x, str | bytes) else "give it as a NumPy array of numbers, np.asarray(x)"
    if x.dtype.kind in "iufc":  # in the byte order of other machines, or of more bits than jax has
        known = {"f": np.float32, "c": np.complex64}.get(x.dtype.kind, x.dtype.newbyteorder("="))
        why = "jax has no such numbers" if x.dtype.isnative else "its bytes are in the order of other machines"
        return f"{why}, convert it by x.astype({np.dtype(known).name!r})"
    if x.dtype.kind == "O":
        return "make one array of numbers of it, x.astype('float32'), or np.stack(x) where its items are arrays"
    return words


def rows_of(batch: Any) -> int:
    """The number of rows of a batch of arrays or `jax.ShapeDtypeStruct`."""
    leaves = jax.tree.leaves(batch, is_leaf=is_replicated)
    return next(np.shape(x)[0] for x in leaves if not is_replicated(x))


def global_shapes(batch: Any, hosts: int) -> Any:
    """The abstract global batch that `batch` is, or is this host's part of; `hosts` as for `check_rows`."""
    shapes = jax.eval_shape(lambda x: x, batch)
    if hosts == 1 or is_global(batch):
        return shapes
    return _by_leaf(shapes, lambda x: jax.ShapeDtypeStruct((x.shape[0] * hosts, *x.shape[1:]), x.dtype))


def globalise(batch: Any, mesh: Mesh, hosts: int = 1) -> Any:
    """A batch as global arrays; on one host, and for global arrays, the batch itself, moved if need be.

    Nothing is sent between hosts: each keeps what its devices need of a batch that is the same on all (`hosts` is 1),
    or puts its own rows there.
    """
    here = jax.process_count() == 1 or is_global(batch)
    if here and not any(is_array(x) and x.committed for x in jax.tree.leaves(batch)):  # NumPy, as most batches
        return batch
    places = batch_shardings(batch, mesh)
    if here:
        return jax.tree.map(_moved, batch, places)

    def made(x: Any, place: NamedSharding) -> jax.Array:
        x = np.asarray(x)
        if hosts == 1 or place.spec == PartitionSpec():
            return jax.make_array_from_callback(x.shape, place, lambda index: x[index])
        return jax.make_array_from_process_local_data(place, x, (x.shape[0] * hosts, *x.shape[1:]))

    return jax.tree.map(made, batch, places)


def as_array(x: Any) -> Any:
    """Tensors of other libraries as NumPy's arrays, which share their memory."""
    known = isinstance(x, np.ndarray | np.generic | jax.Array)
    return np.asarray(x) if not known and hasattr(x, "__array__") else x


def narrowed(batch: Any) -> Any:
    """NumPy's integers of 64 bits in the 32 that jax has for them, unless they have been enabled.

    Raises ValueError for a value that these cannot hold, naming leaf and row: jax would leave out its upper bits.
    """

    def leaf(path: Any, x: Any) -> Any:
        if not isinstance(x, np.ndarray) or x.dtype.kind not in "iu" or x.dtype.itemsize < 8:
            return x
        kind = np.dtype(jax.dtypes.canonicalize_dtype(x.dtype))
        if kind == x.dtype or not x.size:
            return x
        limits = np.iinfo(kind)
        if x.min() < limits.min or x.max() > limits.max:
            wrong = (x < limits.min) | (x > limits.max)
            place = np.unravel_index(int(np.argmax(wrong)), x.shape)
            raise ValueError(
                f"batch leaf {name_of(path) or 'batch'} holds {x[place]} in row {place[0]}, and as {kind} would be "
                f"{x[place].astype(kind)}; see where it comes from, or enable jax_enable_x64"
            )
        return x.astype(kind)

    return jax.tree_util.tree_map_with_path(leaf, batch)


def example_shapes(example: Any, what: str) -> Any:
    """The shapes of a batch that a user gives as an example, in the argument `what`, for the error if it is none."""
    if isinstance(example, Iterator):
        raise ValueError(f"{what} is a {type(example).__name__}; give one of its batches, next(loader)")
    try:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x := as_array(x)), jnp.result_type(x)), example)
    except TypeError as error:
        for path, x in jax.tree_util.tree_leaves_with_path(example):
            if isinstance(x, np.ndarray):  # whose values the error would hold
                _check_kind(f"{name_of(path)} of {what}".lstrip(), x)
        raise ValueError(
            f"{what} is {described(example)}; needs a batch of arrays or jax.ShapeDtypeStruct: {error}"
        ) from error


def is_global(batch: Any) -> bool:
    """Whether a batch says itself that it is global: it lies on several hosts, or is traced or abstract."""
    there = (jax.ShapeDtypeStruct, Tracer)
    return all(isinstance(x, there) or (is_array(x) and not x.is_fully_addressable) for x in jax.tree.leaves(batch))


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
