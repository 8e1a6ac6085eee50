"""Compile anything that `jax.jit` lowers, and read the program: its operations, mesh, memory and arguments.

`program_of` accepts a function with its arguments, a `jax.stages.Lowered` or `Compiled`, or the text of a compiled
program. All of these end in `_read_program`, which returns a `JittedProgram`; a text alone lacks memory and arguments.
"""

import functools
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from ...backend.machines import hosts_of
from ...hardware.compiled.compiler_remarks import why_unread
from ...hardware.compiled.kernels import Executable, num_devices_of
from ...hardware.compiled.memory import program_memory
from ...hardware.devices import Target
from ...hardware.devices import target as target_of
from ...inspect.check.resharding import axes_of
from .lowering import UNNAMED, argument_paths, find_meshes, is_array, lower_for_arguments, lower_for_target


@dataclass(frozen=True)
class Argument:
    """An array argument of a program.

    Attributes:
      path: its name in JAX's notation: "state.params['w']".
      shape, dtype, bytes: those of the global array; the dtype as NumPy names it.
      held: bytes of the shard that one device stores.
      copied: the mesh axes of several devices along which the array is replicated. Empty if it is sharded along every
        axis, or if its sharding names no axes.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    held: int
    copied: tuple[str, ...]


@dataclass(frozen=True)
class JittedMemory:
    """The memory that a program uses on one device, in bytes, from `memory_analysis()`.

    Attributes:
      arguments, outputs, temporaries: its parts.
      taken_over: the part of the outputs that reuses the memory of donated arguments.
      total: arguments, outputs and temporaries; reused memory counts once.
    """

    arguments: int
    outputs: int
    temporaries: int
    taken_over: int
    total: int


@dataclass(frozen=True)
class JittedProgram:
    """A compiled program, read.

    Attributes:
      name: the name of the function.
      executable: the program's operations, whose collectives are over axes of `mesh`.
      mesh: the mesh of its devices, in their order. It has the single axis `devices` if no mesh is known.
      hosts: the host of each device, in the order of the mesh. None if the devices are unknown.
      platform: the platform of the devices, "gpu".
      kind: the kind of the devices, "NVIDIA H100 80GB HBM3"; "" if only a text is known.
      memory: the memory that it uses on one device. None for a text.
      arguments: its array arguments, without those that it does not read. None for a text, which has only the shapes of
        their shards.
      target: the target that it was compiled for. None if it was compiled for the arguments' own devices.
      names: the name of an entry parameter in the text -> the argument's path, if the two differ.
      notes: sentences about what is unknown.
    """

    name: str
    executable: Executable
    mesh: Mesh | AbstractMesh
    hosts: tuple[int, ...] | None
    platform: str
    kind: str
    memory: JittedMemory | None
    arguments: tuple[Argument, ...] | None
    target: Target | None
    names: dict[str, str]
    notes: tuple[str, ...]

    @property
    def devices(self) -> str:
        """Return the number and the kind of the devices."""
        return f"{self.mesh.size} x {self.kind or 'unknown devices'}"


def program_of(fn: Any, args: Sequence[Any], target: Target | str | None = None, mesh: Any = None) -> JittedProgram:
    """Compile and read a program; arguments and errors as for `explain`."""
    target = target_of(target) if isinstance(target, str) else target
    while isinstance(fn, functools.partial) and hasattr(fn.func, "lower") and not fn.keywords:
        # Unwrap a partial of a jitted function: tracing it into another `jit` would lose its shardings and donation.
        fn, args = fn.func, (*fn.args, *args)

    # 1. A program that is compiled or lowered already. Flax and Equinox wrap JAX's objects in their own.
    program = getattr(fn, "compiled", getattr(fn, "lowered", fn))
    if isinstance(program, str | jax.stages.Compiled | jax.stages.Lowered):
        if args:
            raise ValueError(
                f"a {type(program).__name__} has its arguments already; leave out the {len(args)} given here"
            )
        compiled = program.compile() if isinstance(program, jax.stages.Lowered) else program
        if isinstance(compiled, str):
            if ", is_scheduled=true" not in compiled.partition("\n")[0]:
                raise ValueError(
                    f"the text is not a compiled program (a scheduled HloModule): it begins {compiled[:40]!r}; "
                    # A text has no mesh and no shardings.
                    "give compiled.as_text(), or the lowered or compiled object itself"
                )
            return _read_program(compiled, None, None, mesh, target, {})
        return _read_program(compiled.as_text() or "", compiled, None, mesh or _mesh_of(compiled), target, {})
    if not callable(fn):
        raise ValueError(
            f"fn is a {type(fn).__name__}; give a function and its arguments, a jax.stages.Lowered or Compiled, or the "
            "text of a compiled program"
        )

    # 2. A function, compiled for a target.
    if target is not None:
        lowered, target_mesh = lower_for_target(fn, args, target)
        compiled = lowered.compile()
        leaves = zip(argument_paths(fn, args), jax.tree.leaves(tuple(args)), strict=True)
        paths = [path for path, x in leaves if is_array(x)]
        # `lower_for_target` calls the program's parameters `arrays[i]`.
        names = {f"arrays[{i}]": path for i, path in enumerate(paths)}
        return _read_program(compiled.as_text() or "", compiled, paths, mesh or target_mesh, target, names)

    # 3. A function, compiled for the devices of its arguments.
    lowered = lower_for_arguments(fn, args)
    compiled = getattr(lowered, "lowered", lowered).compile()
    text, infos = compiled.as_text() or "", compiled.args_info[0]
    # `infos` lacks the static arguments and does not say which they were. The array arguments are named only if one
    # choice of positions alone has the same shapes.
    shapes = lambda tree: [getattr(x, "shape", ()) for x in jax.tree.leaves(tree)]
    array_positions = [
        positions
        for positions in itertools.combinations(range(len(args)), len(infos))
        if all(shapes(args[i]) == shapes(info) for i, info in zip(positions, infos, strict=True))
    ]
    paths = argument_paths(fn, infos, array_positions[0]) if len(array_positions) == 1 else None
    # The outputs and inputs may name no mesh while constraints inside the program do.
    if mesh is None and (mesh := _mesh_of(compiled)) is None and num_devices_of(text) > 1:
        mesh = _widest(find_meshes(fn, args))
    return _read_program(text, compiled, paths, mesh, None, {})


def _read_program(
    text: str, compiled: Any, paths: Sequence[str] | None, mesh: Any, target: Target | None, names: dict[str, str]
) -> JittedProgram:
    """Read a compiled program from its text.

    Args:
      compiled: the `jax.stages.Compiled`. None if only the text is known.
      paths: the path of every argument. None to number them.
      mesh: the mesh that names its axes. None if unknown.
      target: the target that gives its devices. None for the devices of its shardings.
      names: the name of a parameter in the text -> the argument's path, if the two differ.
    """
    # 1. The mesh.
    num_devices, notes = num_devices_of(text), list[str]()
    if target is not None and len(target.devices) != num_devices:
        raise ValueError(
            f"the program is for {num_devices} devices, target={target.name!r} has {len(target.devices)}; name a "
            "target of as many devices, or give the function and its arguments instead of the compiled program"
        )
    if mesh is None:
        mesh = AbstractMesh((num_devices,), (UNNAMED,))
        if num_devices > 1:
            notes.append(
                f"The mesh axes of the collectives are not known, and all devices form one axis here, {UNNAMED}: give "
                "the arguments NamedShardings, or mesh=."
            )

    # 2. The devices of the mesh or the target, else the devices that the program was compiled for. Without a mesh, the
    #    order of several devices is unknown.
    devices = mesh.devices if isinstance(mesh, Mesh) else np.array(target.devices) if target is not None else None
    if compiled is None:
        platform, kind = _platform_of(text), "" if devices is None else devices.flat[0].device_kind
    else:
        shardings = _shardings(compiled)
        # A program without arrays has no shardings: it runs on the default device.
        compiled_for = np.array([*shardings[0].device_set] if shardings else jax.devices()[:1])
        devices = compiled_for if devices is None and num_devices == 1 else devices
        platform, kind = compiled_for[0].platform, compiled_for[0].device_kind
    if why := why_unread(platform):
        raise ValueError(f"{why}; compile it for GPUs, as target='8xH100', or for CPU devices")

    # 3. The rest follows from the text and the compiled object.
    return JittedProgram(
        name=text.partition("HloModule ")[2].partition(",")[0].removeprefix("jit_"),
        executable=Executable(text, mesh),
        mesh=mesh,
        hosts=None if devices is None else tuple(hosts_of(devices).ravel().tolist()),
        platform=platform,
        kind=kind,
        memory=compiled
        and JittedMemory(**program_memory(compiled), taken_over=compiled.memory_analysis().alias_size_in_bytes),
        arguments=None if compiled is None else tuple(_arguments(compiled, paths)),
        target=target,
        names=names,
        notes=tuple(notes),
    )


def _platform_of(text: str) -> str:
    """Return the platform of a compiled text, by a mark of its compiler: tiled arrays (TPU) or kernel queues (GPU)."""
    return "tpu" if re.search(r":T\(\d+", text) else "gpu" if '"operation_queue_id"' in text else "cpu"


def _shardings(compiled: Any) -> list[Any]:
    """Return the shardings of all inputs and outputs of a program."""
    return jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))


def _mesh_of(compiled: Any) -> Mesh | None:
    """Return the mesh of a program's inputs and outputs; None if none has a NamedSharding."""
    return _widest([x.mesh for x in _shardings(compiled) if isinstance(x, NamedSharding)])


def _widest(meshes: Sequence[Any]) -> Any:
    """Return the mesh with the most devices, and among equals the one with the most axes of several devices."""
    width = lambda mesh: (mesh.size, sum(n > 1 for n in mesh.shape.values()))
    return max(meshes, key=width, default=None)


def _arguments(compiled: Any, paths: Sequence[str] | None) -> list[Argument]:
    """Return the array arguments that a program reads; `paths` names all of them, None numbers them."""
    columns = (jax.tree.leaves(x, is_leaf=lambda x: x is None) for x in (compiled.args_info, compiled.input_shardings))
    # An argument that the program does not read has no sharding. A None among the arguments has no info either.
    pairs = [(info, sharding) for info, sharding in zip(*columns, strict=True) if info is not None]
    paths = paths if paths is not None else argument_paths(None, (*compiled.args_info[0], compiled.args_info[1]))
    arguments = zip(paths, pairs, strict=True)
    return [_argument(path, info, sharding) for path, (info, sharding) in arguments if sharding is not None]


def _argument(path: str, info: Any, sharding: Any) -> Argument:
    """Return the record of one argument, from its `args_info` and its sharding."""
    replicated: tuple[str, ...] = ()
    if isinstance(sharding, NamedSharding):
        sharded = {axis for entry in sharding.spec for axis in axes_of(entry)}
        replicated = tuple(axis for axis, n in sharding.mesh.shape.items() if n > 1 and axis not in sharded)
    shape, itemsize = tuple(info.shape), info.dtype.itemsize
    shard_bytes = math.prod(sharding.shard_shape(shape)) * itemsize
    return Argument(path, shape, str(info.dtype), math.prod(shape) * itemsize, shard_bytes, replicated)
