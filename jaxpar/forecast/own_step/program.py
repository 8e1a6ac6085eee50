"""Anything that `jax.jit` lowers, compiled and read: operations, mesh, what a device holds of each argument."""

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
from ...hardware.compiled.compiler_remarks import unread
from ...hardware.compiled.kernels import Executable, devices_of
from ...hardware.compiled.memory import program_memory
from ...hardware.devices import Target
from ...hardware.devices import target as target_of
from ...inspect.check.resharding import axes_of
from .lowering import UNNAMED, as_given, is_array, meshes_of, on_target, paths_of


@dataclass(frozen=True)
class Argument:
    """An array that a program is given.

    Attributes:
      path: as JAX names it: "state.params['w']".
      shape, dtype: of the whole.
      bytes: of the whole; `held`: of what one device has of it.
      copied: the mesh axes of several devices along which all devices have the same of it; () where there are none, and
        where its sharding names no axes.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    held: int
    copied: tuple[str, ...]


@dataclass(frozen=True)
class JittedMemory:
    """What one device holds, in bytes, as `memory_analysis()` has it.

    Attributes:
      arguments, outputs, temporaries: of the program.
      taken_over: of the outputs, what takes over the memory of donated arguments.
      total: arguments, outputs and temporaries, what is taken over counted once.
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
      name: of the function.
      executable: its operations, whose collectives are over axes of `mesh`.
      mesh: of its devices, in its order; one axis, `devices`, where none is known.
      hosts: for each place in the mesh the host of its device; None where it is not known.
      platform, kind: of the devices, "gpu" and "NVIDIA H100 80GB HBM3"; kind "" where only a text is known.
      memory: of one device; None of a text.
      arguments: its arrays, but those that it does not read; None of a text, which has their shards alone.
      target: that was compiled for; None: the arguments' own devices.
      names: an entry parameter's name in the text -> the argument's path, where the two differ.
      notes: what is not known.
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
        """Number and kind."""
        return f"{self.mesh.size} x {self.kind or 'unknown devices'}"


def program_of(fn: Any, args: Sequence[Any], target: Target | str | None = None, mesh: Any = None) -> JittedProgram:
    """Compiles and reads it; arguments and errors as for `explain`."""
    target = target_of(target) if isinstance(target, str) else target
    while isinstance(fn, functools.partial) and hasattr(fn.func, "lower") and not fn.keywords:
        fn, args = fn.func, (*fn.args, *args)  # what is jitted is to be lowered, and not traced into another
    given = getattr(fn, "compiled", getattr(fn, "lowered", fn))  # Flax and Equinox have their own around JAX's
    if isinstance(given, str | jax.stages.Compiled | jax.stages.Lowered):
        if args:
            raise ValueError(f"a {type(given).__name__} has its {len(args)} arguments already; leave them out")
        compiled = given.compile() if isinstance(given, jax.stages.Lowered) else given
        if isinstance(compiled, str):
            if ", is_scheduled=true" not in compiled.partition("\n")[0]:
                raise ValueError(
                    f"the text is no compiled program's, which is a scheduled HloModule: it begins {compiled[:40]!r}; "
                    "give compiled.as_text(), or the lowered or compiled object itself"
                )
            return _read(compiled, None, None, mesh, target, {})
        return _read(compiled.as_text() or "", compiled, None, mesh or _mesh_of(compiled), target, {})
    if not callable(fn):
        raise ValueError(
            f"fn is a {type(fn).__name__}; give a function and its arguments, a jax.stages.Lowered or Compiled, or the "
            "text of a compiled program"
        )
    if target is not None:
        lowered, moved = on_target(fn, args, target)
        compiled = lowered.compile()
        named = zip(paths_of(fn, args), jax.tree.leaves(tuple(args)), strict=True)
        paths = [path for path, x in named if is_array(x)]
        names = {f"given[{at}]": path for at, path in enumerate(paths)}
        return _read(compiled.as_text() or "", compiled, paths, mesh or moved, target, names)
    lowered = as_given(fn, args)
    compiled = getattr(lowered, "lowered", lowered).compile()
    text, infos = compiled.as_text() or "", compiled.args_info[0]  # without static arguments, wherever they were
    shapes = lambda tree: [getattr(x, "shape", ()) for x in jax.tree.leaves(tree)]
    dynamic = [
        places
        for places in itertools.combinations(range(len(args)), len(infos))
        if all(shapes(args[at]) == shapes(info) for at, info in zip(places, infos, strict=True))
    ]
    paths = paths_of(fn, infos, dynamic[0]) if len(dynamic) == 1 else None
    if mesh is None and (mesh := _mesh_of(compiled)) is None and devices_of(text) > 1:
        mesh = _widest(meshes_of(fn, args))
    return _read(text, compiled, paths, mesh, None, {})


def _read(
    text: str, compiled: Any, paths: Sequence[str] | None, mesh: Any, target: Target | None, names: dict[str, str]
) -> JittedProgram:
    count, notes = devices_of(text), list[str]()
    if target is not None and len(target.devices) != count:
        raise ValueError(
            f"the program is for {count} devices, target={target.name!r} has {len(target.devices)}; name as many, or "
            "give the function and its arguments in place of what was compiled"
        )
    if mesh is None:
        mesh = AbstractMesh((count,), (UNNAMED,))
        if count > 1:
            notes.append(
                f"Of which axes a collective is, is not known, and all devices are one axis here, {UNNAMED}: give the "
                "arguments NamedShardings, or mesh=."
            )
    devices = mesh.devices if isinstance(mesh, Mesh) else np.array(target.devices) if target is not None else None
    if compiled is None:
        platform, kind = _platform_of(text), "" if devices is None else devices.flat[0].device_kind
    else:
        shardings = _shardings(compiled)
        own = np.array([*shardings[0].device_set] if shardings else jax.devices()[:1])
        devices = own if devices is None and count == 1 else devices
        platform, kind = own[0].platform, own[0].device_kind
    if why := unread(platform):
        raise ValueError(f"{why}; compile it for GPUs, as target='8xH100', or for CPU devices")
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
    """Of whose compiler a text is, by what only its programs have: arrays in tiles, or kernels in queues."""
    return "tpu" if re.search(r":T\(\d+", text) else "gpu" if '"operation_queue_id"' in text else "cpu"


def _shardings(compiled: Any) -> list[Any]:
    return jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))


def _mesh_of(compiled: Any) -> Mesh | None:
    return _widest([x.mesh for x in _shardings(compiled) if isinstance(x, NamedSharding)])


def _widest(meshes: Sequence[Any]) -> Any:
    """Of all devices, and of these the one with most axes."""
    wide = lambda mesh: (mesh.size, sum(n > 1 for n in mesh.shape.values()))
    return max(meshes, key=wide, default=None)


def _arguments(compiled: Any, paths: Sequence[str] | None) -> list[Argument]:
    both = (jax.tree.leaves(x, is_leaf=lambda x: x is None) for x in (compiled.args_info, compiled.input_shardings))
    # Of what is not read the sharding is None, and of a None among the arguments both are.
    pairs = [(info, sharding) for info, sharding in zip(*both, strict=True) if info is not None]
    paths = paths if paths is not None else paths_of(None, (*compiled.args_info[0], compiled.args_info[1]))
    every = zip(paths, pairs, strict=True)
    return [_argument(path, info, sharding) for path, (info, sharding) in every if sharding is not None]


def _argument(path: str, info: Any, sharding: Any) -> Argument:
    copied: tuple[str, ...] = ()
    if isinstance(sharding, NamedSharding):
        split = {axis for entry in sharding.spec for axis in axes_of(entry)}
        copied = tuple(axis for axis, n in sharding.mesh.shape.items() if n > 1 and axis not in split)
    shape, each = tuple(info.shape), info.dtype.itemsize
    held = math.prod(sharding.shard_shape(shape)) * each
    return Argument(path, shape, str(info.dtype), math.prod(shape) * each, held, copied)
