"""The ranks that a collective runs over: named mesh axes inside `shard_map`, or `on(mesh)` outside.

Ranks count along the axes in the mesh's order, the first axis outermost. Axes of size 1 add no rank.
"""

import functools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ..backend.text import did_you_mean

P = ParamSpec("P")


@dataclass(frozen=True)
class Ranks:
    """The devices along some axes of a mesh, for a collective called outside `shard_map`; see `on`."""

    mesh: Mesh
    axes: tuple[str, ...]

    @property
    def count(self) -> int:
        """Number of ranks."""
        return math.prod(self.mesh.shape[a] for a in self.axes)


Axes = str | Sequence[str] | Ranks


def on(mesh: Mesh, axes: str | Sequence[str] | None = None) -> Ranks:
    """Return the ranks of a mesh, as the `axes` of a collective on global arrays outside `shard_map`.

    The array then stacks every rank's buffer. Its shape is [n, ...], it is NumPy's or sharded in any way, and row i is
    rank i's buffer. The result is [n, ...], sharded over the ranks, and row i is rank i's result. The collective runs
    in a jitted `shard_map`, compiled once for each shape. Along the mesh's other axes everything is replicated.

    Args:
      mesh: a mesh, such as that of `jax.make_mesh` or `step.mesh`.
      axes: the axes whose devices take part, in the mesh's order; all by default.

    Raises:
      ValueError: the mesh lacks an axis, or axes are repeated or out of the mesh's order.
    """
    if not isinstance(mesh, Mesh):
        raise ValueError(f"on({mesh!r}) takes a jax.sharding.Mesh; give one, such as jax.make_mesh((8,), ('data',))")
    names = tuple(mesh.axis_names) if axes is None else _names(axes)
    for name in names:
        if name not in mesh.axis_names:
            raise ValueError(
                f"mesh has no axis {name!r}; use {_quoted(mesh.axis_names)}{did_you_mean(name, mesh.axis_names)}"
            )
    _check_order(names, mesh.axis_names)
    # jax.make_mesh returns explicit axes, on which shard_map refuses an array that is sharded in another way.
    automatic = (AxisType.Auto,) * len(mesh.axis_names)
    return Ranks(Mesh(mesh.devices, mesh.axis_names, axis_types=automatic), names)


def collective(
    inside: Callable[Concatenate[Any, Axes, P], jax.Array],
) -> Callable[Concatenate[Any, Axes, P], jax.Array]:
    """Decorate a function of one device's `x` and of axis names, so that it takes `on(mesh)` as well.

    The function is called with those of the axes that have several devices.
    """

    @functools.wraps(inside)
    def call(x: Any, axes: Axes, *args: P.args, **options: P.kwargs) -> jax.Array:
        x = jnp.asarray(x)
        if not isinstance(axes, Ranks):  # inside `shard_map`
            return inside(x, spanned(axes), *args, **options)
        if x.shape[:1] != (axes.count,):
            raise ValueError(
                f"x {list(x.shape)} must stack the buffers of {axes.count} ranks along {_quoted(axes.axes)}; make it "
                f"[{axes.count}, ...], row i the buffer of rank i"
            )
        # `jax.jit` compiles every new function anew. So the jitted program is cached by the collective and its options.
        key = _hashable(args), tuple((name, _hashable(value)) for name, value in options.items())
        # 1, 1.0 and True are equal. Their types, which `repr` shows, must not share a program.
        return _outside(call, axes, *key, repr(key))(_placed(x, axes))

    return call


@functools.lru_cache(maxsize=1024)
def _outside(call: Callable[..., jax.Array], ranks: Ranks, args: Any, options: Any, _: str) -> Callable[..., jax.Array]:
    """Return the jitted program of a collective on stacked buffers; the last argument is part of the cache's key."""
    spec = PartitionSpec(ranks.axes)
    # Each rank has one row, and the collective takes and returns it without the leading dim.
    run_on_rank = lambda rows: call(rows[0], ranks.axes, *args, **dict(options))[None]
    return jax.jit(jax.shard_map(run_on_rank, mesh=ranks.mesh, in_specs=spec, out_specs=spec, check_vma=False))


def _placed(x: jax.Array, ranks: Ranks) -> jax.Array:
    """Return stacked buffers on `ranks.mesh`; only those on a mesh with explicit axes are moved."""
    mesh = None if isinstance(x, Tracer) else getattr(x.sharding, "mesh", None)
    if mesh is None or all(kind == AxisType.Auto for kind in mesh.axis_types):
        return x
    return jax.device_put(x, NamedSharding(ranks.mesh, PartitionSpec(ranks.axes)))


def _hashable(value: Any) -> Any:
    """Return an option of a collective as part of a cache's key. Raises ValueError for traced or unhashable values."""
    if isinstance(value, Tracer):
        raise ValueError(
            "root, dim, op and pairs must be known when the program is traced; give Python values, not traced arrays"
        )
    if isinstance(value, np.ndarray | jax.Array):
        value = np.asarray(value).tolist()  # such as root=jnp.int32(2)
    # `pairs` is usually a list, which no key of a cache may contain.
    if isinstance(value, list | tuple):
        return tuple(_hashable(v) for v in value)
    try:
        hash(value)
    except TypeError as error:
        raise ValueError(
            f"{value!r} is a {type(value).__name__}; root, dim, op and pairs are numbers, a text, and pairs of numbers"
        ) from error
    return value


def spanned(axes: Axes) -> tuple[str, ...]:
    """Return those of some mesh axes that have more than one device.

    Raises:
      ValueError: an axis does not belong to the enclosing `shard_map`, or is repeated or out of order.
    """
    names = _names(axes)
    # First the sizes: they raise for unknown names, which `_check_order` passes over.
    sizes = [_size(name) for name in names]
    _check_order(names, jax.sharding.get_abstract_mesh().axis_names)
    return tuple(name for name, size in zip(names, sizes, strict=True) if size > 1)


def count(axes: Axes) -> int:
    """Return the number of ranks along some axes, inside `shard_map`."""
    return math.prod(lax.axis_size(a) for a in spanned(axes))


def index(axes: Axes) -> jax.Array | int:
    """Return this device's rank along some axes, as an int32 scalar."""
    axes = spanned(axes)
    return lax.axis_index(axes) if axes else 0


def check_rank(rank: Any, axes: Axes, name: str) -> int:
    """Return `rank` as an int. Raises ValueError, with the argument's name, unless it is a rank along the axes."""
    n = count(axes)
    try:
        value = -1 if isinstance(rank, bool) else operator.index(rank)  # True would be rank 1
    except TypeError:
        value = -1
    if not 0 <= value < n:
        raise ValueError(f"{name}={rank!r} is not a rank; give one from 0 to {n - 1}")
    return value


def _names(axes: Any) -> tuple[str, ...]:
    """Return the names of axes as a tuple. Raises ValueError if they are no names."""
    if isinstance(axes, Mesh):
        raise ValueError(
            f"axes is a mesh; give on(mesh) outside shard_map, and inside names of {_quoted(axes.axis_names)}"
        )
    names = (axes,) if isinstance(axes, str) else axes
    if not isinstance(names, Iterable) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"axes={axes!r} names no mesh axes; give 'data', ('data', 'fsdp'), or on(mesh)")
    return tuple(names)


def _size(axis: str) -> int:
    """Return the number of devices along an axis of the enclosing `shard_map`. Raises ValueError without one."""
    try:
        # JAX's NameError does not say which axes are bound.
        return lax.axis_size(axis)
    except NameError:
        manual_axes = jax.sharding.get_abstract_mesh().manual_axes
        hint = (
            f"use {_quoted(manual_axes)}{did_you_mean(axis, manual_axes)}"
            if manual_axes
            else "call it in a jax.shard_map, or with on(mesh)"
        )
        raise ValueError(f"no shard_map around this call runs over the axis {axis!r}; {hint}") from None


def _check_order(names: Sequence[str], mesh_axes: Sequence[Any]) -> None:
    """Check that names are in the mesh's order, without repetitions. Raises ValueError."""
    # JAX numbers ranks in the order of the names. With one order for all calls, a device has one rank.
    positions = [mesh_axes.index(name) for name in names if name in mesh_axes]
    if positions != sorted(set(positions)):
        ordered = [mesh_axes[i] for i in sorted(set(positions))]
        raise ValueError(f"axes {_quoted(names)} are repeated or out of the mesh's order; use {_quoted(ordered)}")


def _quoted(names: Iterable[Any]) -> str:
    """Return names in quotes, with commas between them."""
    return ", ".join(map(repr, names))
