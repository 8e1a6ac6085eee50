"""Strategy + devices -> mesh. Every mesh has the six axes, outermost to innermost; unused ones have size 1."""

import collections
import math
import os
import re
import warnings
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from ..backend.cpu_compiler import set_flag, warn_unset
from ..backend.machines import host_of
from ..strategy import Strategy
from ..strategy.axes import AXES

MOST_SIMULATED = 4096


def enough_threads(devices: int | None = None) -> None:
    """Give XLA's CPU runtime four threads for each simulated device, unless the environment has a number.

    By default it has one a device, and all can end up waiting in a collective for a device whose work no thread takes
    up; then XLA ends the process after 40 s. That happens even where collectives are in one order (jax 0.10.2, 8
    devices on 2 busy cores, programs of `collectives/order.py`: 7 of 9 runs of 200 steps; with 32 threads none). The
    number is read when the backend starts. Without `devices`, theirs is that of XLA_FLAGS, if it simulates any.
    """
    flag = re.search(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    if devices is None and flag:
        devices = int(flag[1])
    if devices is not None:
        os.environ.setdefault("PJRT_NPROC", str(4 * devices))


def simulate(devices: int) -> None:
    """Make this process see `devices` CPU devices, in place of whatever is attached.

    For tests and for trying a strategy on a laptop. Must run before jax has started a backend (before the first
    array, `jax.devices()`, ...); raises RuntimeError after that, ValueError for a number below 1.
    """
    if not isinstance(devices, int) or isinstance(devices, bool) or devices < 1:
        raise ValueError(f"simulate({devices!r}): the number of devices must be a whole number from 1, such as 8")
    if devices > MOST_SIMULATED:
        raise ValueError(f"simulate({devices}): each device has threads of its own; use at most {MOST_SIMULATED:,}")
    set_flag()  # again: XLA_FLAGS may have been set since the import
    try:
        jax.config.update("jax_num_cpu_devices", devices)
        jax.config.update("jax_platforms", "cpu")
        enough_threads(devices)
    except RuntimeError as error:
        found = jax.devices()
        if len(found) != devices or found[0].platform != "cpu":
            raise RuntimeError(
                f"simulate({devices}) came too late: jax already runs on {len(found)} {found[0].platform} device(s); "
                "call it right after `import jaxpar`, before the first array"
            ) from error


def check_context(mesh: Mesh) -> None:
    """Raise ValueError where a step on `mesh` is traced within another mesh: of `jax.set_mesh`, or a `shard_map`."""
    around = jax.sharding.get_abstract_mesh()
    if around.empty or (around.axis_names, around.axis_sizes) == (mesh.axis_names, mesh.axis_sizes):
        return
    found, own = (
        ",".join(f"{axis}={n}" for axis, n in m.shape.items() if n > 1) or "one device" for m in (around, mesh)
    )
    raise ValueError(
        f"the step runs on a mesh of its own, {own}, and is called within another, {found} (jax.set_mesh, shard_map); "
        "call it outside, or within jax.set_mesh(step.mesh)"
    )


def make_mesh(strategy: Strategy, mesh: Mesh | Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of a strategy: over `mesh` (a mesh with some of our axes, or devices) or over all devices.

    Raises ValueError where the sizes do not multiply to the number of devices, or a given mesh has other axes.
    """
    if isinstance(mesh, Mesh):
        unknown = set(mesh.axis_names) - set(AXES)
        if unknown:
            raise ValueError(f"mesh axes {mesh.axis_names} include {sorted(unknown)}; name them among {AXES}")
        if list(mesh.axis_names) != [a for a in AXES if a in mesh.axis_names]:
            raise ValueError(f"mesh axes {mesh.axis_names} are out of order; outermost to innermost is {AXES}")
        devices = list(mesh.devices.flat)
    else:
        given = jax.devices() if mesh is None else mesh
        if (
            not isinstance(given, Sequence | np.ndarray)
            or not len(given)
            or not all(isinstance(d, jax.Device) for d in given)
        ):
            raise ValueError(f"mesh={given!r} is neither a jax.sharding.Mesh nor devices; try mesh=jax.devices()[:4]")
        # Host by host, so that the innermost axes stay inside one where they fit.
        devices = sorted(given, key=host_of)
        if len(set(devices)) < len(devices):
            raise ValueError(f"mesh={given!r} holds a device twice; take each once, as in mesh=jax.devices()[:4]")
        if strategy.single:
            devices = devices[:1]
    if devices[0].platform == "cpu":
        warn_unset()
    if strategy.single and len(devices) > 1:
        raise ValueError(f"strategy 'single' takes one device and the mesh has {len(devices)}; pass a mesh of one")
    hosts = len({host_of(d) for d in devices})
    sizes = strategy.sizes(len(devices), hosts)
    if isinstance(mesh, Mesh):
        for axis, size in mesh.shape.items():
            if size != sizes[str(axis)]:
                raise ValueError(
                    f"mesh has {axis}={size} and the strategy {axis}={sizes[str(axis)]}; make the two agree"
                )
    here = min(collections.Counter(map(host_of, devices)).values())
    if sizes["tensor"] > 1 and here % sizes["tensor"]:
        warnings.warn(
            f"tensor={sizes['tensor']} does not divide the {here} devices of a host, so that its all-reduces, "
            f"several for each layer, leave the host; use tensor={math.gcd(here, sizes['tensor'])}, and fsdp or pipe "
            "for the rest",
            stacklevel=2,
        )
    shape = tuple(sizes.values())
    assert math.prod(shape) == len(devices)
    return Mesh(np.array(devices).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))
