"""Make the mesh of a strategy from the devices of a run, attached or simulated.

Every mesh has all six axes, outermost to innermost. An axis that the strategy does not use has size 1.
"""

import collections
import math
import os
import re
import warnings
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from ..backend.counts import is_count
from ..backend.cpu_compiler import set_flag, warn_unset
from ..backend.machines import host_of
from ..strategy import Strategy
from ..strategy.axes import AXES

MOST_SIMULATED = 4096


def enough_threads(devices: int | None = None) -> None:
    """Give XLA's CPU runtime four threads per simulated device, unless the environment sets a number.

    By default XLA starts one thread per device. All of them can end up waiting in a collective for a device whose work
    no thread takes up; XLA then ends the process after 40 s. This happens even if all devices run their collectives in
    the same order (jax 0.10.2, 8 devices on 2 busy cores, programs of `collectives/order.py`: 7 of 9 runs of 200 steps;
    none with 32 threads). XLA reads the number when the backend starts.

    Args:
      devices: the number of simulated devices; None takes it from XLA_FLAGS, if that simulates any.
    """
    flag = re.search(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    if devices is None and flag:
        devices = int(flag[1])
    if devices is not None:
        os.environ.setdefault("PJRT_NPROC", str(4 * devices))


def simulate(devices: int) -> None:
    """Make this process see `devices` CPU devices instead of the attached ones.

    Use it in tests, and to try a strategy on a laptop. Call it before jax starts a backend: before the first array,
    `jax.devices()`, and the like.

    Args:
      devices: the number of devices, from 1 to 4,096.

    Raises:
      ValueError: if the number is out of range.
      RuntimeError: if jax has already started a backend with other devices.
    """
    if not is_count(devices):
        raise ValueError(f"simulate({devices!r}): the number of devices must be a whole number from 1, such as 8")
    if devices > MOST_SIMULATED:
        raise ValueError(f"simulate({devices}): each device has threads of its own; use at most {MOST_SIMULATED:,}")
    set_flag()  # again: XLA_FLAGS may have been set since the import
    try:
        # It raises RuntimeError once a backend has started.
        jax.config.update("jax_num_cpu_devices", int(devices))
        jax.config.update("jax_platforms", "cpu")
        enough_threads(devices)
    except RuntimeError as error:
        # A second call for as many devices is harmless.
        attached = jax.devices()
        if len(attached) != devices or attached[0].platform != "cpu":
            raise RuntimeError(
                f"simulate({devices}) came too late: jax already runs on {len(attached)} {attached[0].platform} "
                "device(s); call it right after `import jaxpar`, before the first array"
            ) from error


def check_context(mesh: Mesh) -> None:
    """Raise ValueError if a step on `mesh` is traced within another mesh, set by `jax.set_mesh` or a `shard_map`."""
    outer_mesh = jax.sharding.get_abstract_mesh()
    # Within the same mesh nothing changes, as in `with jax.set_mesh(step.mesh)`.
    if outer_mesh.empty or (outer_mesh.axis_names, outer_mesh.axis_sizes) == (mesh.axis_names, mesh.axis_sizes):
        return
    outer, own = (
        ",".join(f"{axis}={n}" for axis, n in m.shape.items() if n > 1) or "one device" for m in (outer_mesh, mesh)
    )
    raise ValueError(
        f"the step runs on a mesh of its own, {own}, and is called within another, {outer} (jax.set_mesh, shard_map); "
        "call it outside, or within jax.set_mesh(step.mesh)"
    )


def make_mesh(strategy: Strategy, mesh: Mesh | Sequence[jax.Device] | None = None) -> Mesh:
    """Make the mesh of a strategy.

    Args:
      strategy: it gives the size of each axis.
      mesh: a mesh with some of our axes, whose devices are used in its order; or devices; None means all devices.

    Returns:
      A mesh with all six axes, of type Auto.

    Raises:
      ValueError: if the sizes do not multiply to the number of devices, or `mesh` has other axes or sizes.
    """
    devices = _devices_of(mesh, strategy.single)
    if devices[0].platform == "cpu":
        warn_unset()
    if strategy.single and len(devices) > 1:
        raise ValueError(f"strategy 'single' takes one device and the mesh has {len(devices)}; pass a mesh of one")

    # 1. The sizes of the axes.
    num_hosts = len({host_of(d) for d in devices})
    sizes = strategy.sizes(len(devices), num_hosts)
    if isinstance(mesh, Mesh):
        for axis, size in mesh.shape.items():
            if size != sizes[str(axis)]:
                raise ValueError(
                    f"mesh has {axis}={size} and the strategy {axis}={sizes[str(axis)]}; make the two agree"
                )
    # Hosts may have different numbers of devices. The smallest decides whether `tensor` fits.
    devices_per_host = min(collections.Counter(map(host_of, devices)).values())
    if sizes["tensor"] > 1 and devices_per_host % sizes["tensor"]:
        warnings.warn(
            f"tensor={sizes['tensor']} does not divide the {devices_per_host} devices of a host, so that its "
            f"all-reduces, several for each layer, leave the host; use "
            f"tensor={math.gcd(devices_per_host, sizes['tensor'])}, and fsdp or pipe for the rest",
            stacklevel=2,
        )

    # 2. The mesh, of Auto axes: outside `shard_map`, XLA's partitioner lays out what a program computes.
    shape = tuple(sizes.values())
    assert math.prod(shape) == len(devices)
    return Mesh(np.array(devices).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def devices_text(mesh: Mesh) -> str:
    """Return the number and kind of a mesh's devices: "8 x cpu"."""
    return f"{mesh.size} x {mesh.devices.flat[0].device_kind}"


def _devices_of(mesh: Mesh | Sequence[jax.Device] | None, is_single: bool) -> list[jax.Device]:
    """Return the devices in the order in which they fill a mesh; the arguments are as for `make_mesh`."""
    if isinstance(mesh, Mesh):
        unknown = set(mesh.axis_names) - set(AXES)
        if unknown:
            raise ValueError(f"mesh axes {mesh.axis_names} include {sorted(unknown)}; name them among {AXES}")
        if list(mesh.axis_names) != [a for a in AXES if a in mesh.axis_names]:
            raise ValueError(f"mesh axes {mesh.axis_names} are out of order; outermost to innermost is {AXES}")
        # A mesh keeps the order that its user gave it.
        return list(mesh.devices.flat)
    candidates = jax.devices() if mesh is None else mesh
    if (
        not isinstance(candidates, Sequence | np.ndarray)
        or not len(candidates)
        or not all(isinstance(d, jax.Device) for d in candidates)
    ):
        raise ValueError(f"mesh={candidates!r} is neither a jax.sharding.Mesh nor devices; try mesh=jax.devices()[:4]")
    # Host by host, so that the innermost axes, which communicate most, stay inside a host if they fit.
    devices = sorted(candidates, key=host_of)
    if len(set(devices)) < len(devices):
        raise ValueError(f"mesh={candidates!r} holds a device twice; take each once, as in mesh=jax.devices()[:4]")
    return devices[:1] if is_single else devices
