"""Lower a function for the devices of its arguments, or for the devices of a target that this machine lacks.

For a target, the function is traced once, unchanged. Then every mesh in its jaxpr is replaced by a mesh with the same
axes on the target's devices:

    user's mesh                      target's devices                 mesh of the compiled program
    (fsdp=2, tensor=4), abstract     8 GPUs, host by host       ->    (fsdp=2, tensor=4) on those GPUs

Meshes occur in the shardings of arguments, in sharding constraints, in `shard_map` and in `in_shardings`. Devices keep
their order, so that the last mesh axes stay within a host. Donation and `compiler_options` are unchanged.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jec
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from ...hardware.devices import Target
from ...program.walk import is_literal, opened, replaced, visit

UNNAMED = "devices"  # the axis of a program whose mesh is unknown
_JITS = ("jit", "pjit")


def is_array(x: Any) -> bool:
    """Return whether an argument is an array or an array's shape, rather than a static value."""
    return hasattr(x, "shape") and hasattr(x, "dtype")


def argument_paths(fn: Any, args: Any, arg_positions: Sequence[int] = ()) -> list[str]:
    """Return the path of each leaf of the arguments in JAX's notation, such as "state.params['w']".

    The signature of `fn` names the arguments; without it, or if `fn` is None, they are "args[0]", "args[1]", ... If
    `args` are only some of the arguments, `arg_positions` are their positions in the call.
    """
    try:
        parameters = [*inspect.signature(fn).parameters.values()] if fn is not None else []
    except (TypeError, ValueError):  # a function written in C, for example, has no signature
        parameters = []
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    paths = []
    for (first_key, *inner_keys), _ in jax.tree_util.tree_leaves_with_path(tuple(args)):
        position = arg_positions[first_key.idx] if arg_positions else first_key.idx
        name = names[position] if position < len(names) else f"args[{position}]"
        paths.append(name + jax.tree_util.keystr(tuple(inner_keys)))
    return paths


def lower_for_arguments(fn: Any, args: Any) -> Any:
    """Lower a function for its arguments' devices, which may be compile-only. Raises ValueError if they have none."""
    meshes = [x.sharding.mesh for x in _array_shapes(args) if x.sharding is not None]
    if abstract := next((x for x in meshes if isinstance(x, AbstractMesh)), None):
        raise ValueError(
            f"an argument lies on {abstract}, which has no devices; name some, such as target='{abstract.size}xH100'"
        )
    fn = fn if hasattr(fn, "lower") else jax.jit(fn)
    platforms = {_platform(x.devices.flat[0]) for x in meshes if isinstance(x, Mesh)} - {jax.default_backend()}
    if platforms and hasattr(fn, "trace"):
        # Compile-only devices belong to no backend of this process, so that JAX must be told their platform.
        return fn.trace(*args).lower(lowering_platforms=tuple(platforms))
    return fn.lower(*args)


def find_meshes(fn: Any, args: Any) -> list[Any]:
    """Return the distinct meshes that a function's arguments and its program name."""
    arrays = _array_shapes(args)
    return _distinct_meshes(jax.make_jaxpr(_array_function(fn, args))(*arrays), arrays)


def lower_for_target(fn: Any, args: Any, target: Target) -> tuple[jax.stages.Lowered, Mesh]:
    """Lower a function for the devices of a target.

    The function may be jitted. Arrays may be `jax.ShapeDtypeStruct` with shardings on any mesh of the target's size.

    Returns:
      The lowered program, and its mesh on the target's devices. The program's parameters are called `arrays[i]`, which
      counts the array leaves of `args`.

    Raises:
      ValueError: neither the arguments nor the program name a mesh of the target's size; or, with jax 0.12 and newer,
        the mesh has explicit axes.
    """
    # 1. Trace the function, and choose its largest mesh as the order of the devices.
    arrays = _array_shapes(args)
    closed = jax.make_jaxpr(_array_function(fn, args))(*arrays)
    mover = _MeshMover(max(_distinct_meshes(closed, arrays), key=lambda mesh: mesh.size, default=None), target)
    if AxisType.Explicit in mover.mesh.axis_types and jax.__version_info__ >= (0, 12):
        raise ValueError(
            f"the step's mesh has explicit axes, and jax {jax.__version__} stores the kind of the devices in every "
            f"array type, so that the step cannot be moved to target={target.name!r}; give the mesh "
            "axis_types=(AxisType.Auto, ...)"
        )

    # 2. If the function is one call of `jit`, compile the jitted program itself, with its shardings and donation:
    #    within a second `jit`, its donation would have no effect.
    jaxpr, consts = opened(closed)
    program, inputs, params = closed, jaxpr.invars, dict[str, Any]()
    if len(jaxpr.eqns) == 1 and jaxpr.eqns[0].primitive.name in _JITS:
        program, inputs, params = jaxpr.eqns[0].params["jaxpr"], jaxpr.eqns[0].invars, jaxpr.eqns[0].params

    # 3. Move its meshes.
    moved_program = mover.move_program(program)
    # The constants of the outer program are inputs of the jitted one. Without a `jit` they are part of the program.
    const_values = dict(zip(jaxpr.constvars, map(_uncommitted, consts), strict=True)) if params else {}

    # The name `arrays` appears in the compiled text, where `program.py` maps `arrays[i]` back to the argument's path.
    def step(*arrays: Any) -> Any:
        values = const_values | dict(zip(jaxpr.invars, arrays, strict=True))
        return jec.jaxpr_as_fun(moved_program)(*(v.val if is_literal(v) else values[v] for v in inputs))

    step.__name__ = params.get("name") or getattr(fn, "__name__", "step")

    # 4. Move the shardings of the arrays. `in_shardings` of the jitted function win over the arrays' own.
    in_shardings = {v: s for v, s in _jit_parameter(inputs, params, "in_shardings") if isinstance(s, NamedSharding)}
    donated = {v for v, is_donated in _jit_parameter(inputs, params, "donated_invars") if is_donated}
    sharded_arrays = zip(jaxpr.invars, arrays, strict=True)
    shapes = [mover.move_array(x, in_shardings.get(v, x.sharding)) for v, x in sharded_arrays]
    out_shardings = [mover(s) if isinstance(s, Sharding) else None for s in params.get("out_shardings", ())]

    # 5. Lower.
    jitted = jax.jit(
        step,
        donate_argnums=[i for i, v in enumerate(jaxpr.invars) if v in donated],
        out_shardings=out_shardings or None,
        compiler_options=dict(params.get("compiler_options_kvs", ())) or None,
    )
    with _moved_context(mover):
        return jitted.trace(*shapes).lower(lowering_platforms=(_platform(target.devices[0]),)), mover.mesh


class _MeshMover:
    """Replaces meshes by meshes of a target's devices, in a sharding, a program, or an equation's parameter.

    Args:
      program_mesh: the mesh of the program, which gives the order of its devices. None if it names no mesh.
      target: the devices.

    Raises:
      ValueError: the mesh and the target differ in size, or there is no mesh for several devices.
    """

    def __init__(self, program_mesh: Any, target: Target) -> None:
        if program_mesh is None and len(target.devices) > 1:
            raise ValueError(
                f"target={target.name!r} has {len(target.devices)} devices, and no argument has a NamedSharding that "
                f"would say how arrays are sharded; give shardings on "
                f"jax.sharding.AbstractMesh(({len(target.devices)},), ('data',)) if the devices are not here, or use a "
                "target of one device"
            )
        program_mesh = program_mesh if program_mesh is not None else AbstractMesh((1,), (UNNAMED,))
        if program_mesh.size != len(target.devices):
            axes = ", ".join(f"{axis}={n}" for axis, n in program_mesh.shape.items())
            raise ValueError(
                f"the mesh of the arguments has {program_mesh.size} devices ({axes}), target={target.name!r} has "
                f"{len(target.devices)}; use target='{program_mesh.size}x{target.kind}', or give the arguments "
                f"shardings on a jax.sharding.AbstractMesh of {len(target.devices)} devices, which need not be here"
            )
        self.devices = target.devices
        self.positions = (
            {device: i for i, device in enumerate(program_mesh.devices.flat)} if isinstance(program_mesh, Mesh) else {}
        )
        self.mesh = self.move_mesh(program_mesh)

    def __call__(self, value: Any) -> Any:
        """Return the value of an equation's parameter, with every mesh in it moved to the target."""
        match value:
            case Mesh() if not value.empty:
                return self.move_mesh(value)
            case AbstractMesh() if not value.empty:
                return self.move_mesh(value).abstract_mesh
            case NamedSharding():
                # None is the target's default kind, which may be called otherwise than "device".
                kind = value.memory_kind
                return NamedSharding(self(value.mesh), value.spec, memory_kind=None if kind == "device" else kind)
            case tuple() if type(value) is tuple:
                return tuple(map(self, value))
        return value

    def move_array(self, x: jax.ShapeDtypeStruct, sharding: NamedSharding | None) -> jax.ShapeDtypeStruct:
        """Return the type of an array with its sharding on the target's devices."""
        # Without any sharding, a program of one device would be compiled for this machine's default device.
        moved = NamedSharding(self.mesh, PartitionSpec()) if self.mesh.size == 1 else None
        if sharding is not None:
            moved = NamedSharding(self.move_mesh(sharding.mesh), sharding.spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=moved)

    def move_program(self, closed: Any) -> Any:
        """Return a closed jaxpr, with the meshes of its equations and of the jaxprs within them moved."""
        jaxpr, consts = opened(closed)
        move_eqn = lambda eqn: eqn.replace(params={name: self(x) for name, x in eqn.params.items()})
        jaxpr = jaxpr.replace(eqns=replaced(jaxpr.eqns, move_eqn, _uncommitted))
        return jec.ClosedJaxpr(jaxpr, list(map(_uncommitted, consts)))

    def move_mesh(self, mesh: Any) -> Mesh:
        """Return a mesh, abstract or concrete, on the target's devices."""
        if mesh.size != len(self.devices):
            raise ValueError(
                f"the step has meshes of {len(self.devices)} and of {mesh.size} devices; a target replaces one mesh, "
                "so give all meshes of the step the same number of devices"
            )
        # A concrete mesh may permute the devices of the program's mesh; an abstract mesh has them in order.
        has_order = isinstance(mesh, Mesh) and self.positions
        order = [self.positions[device] for device in mesh.devices.flat] if has_order else range(mesh.size)
        devices = np.array([self.devices[i] for i in order]).reshape(tuple(mesh.shape.values()))
        return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


def _jit_parameter(inputs: Any, params: dict[str, Any], name: str) -> Iterator[tuple[Any, Any]]:
    """Yield each input variable of a jitted function with its value of a parameter of `jit`; literals are skipped."""
    pairs = zip(inputs, params[name], strict=True) if params else ()
    return ((v, x) for v, x in pairs if not is_literal(v))


def _array_shapes(args: Any) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes of all array arguments, each with its sharding if that is a NamedSharding."""
    named = lambda x: s if isinstance(s := getattr(x, "sharding", None), NamedSharding) else None
    return [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=named(x)) for x in jax.tree.leaves(args) if is_array(x)]


def _array_function(fn: Any, args: Any) -> Callable[..., Any]:
    """Return the function of its array arguments alone; static arguments are closed over."""
    leaves, tree = jax.tree.flatten(tuple(args))

    def call(*arrays: Any) -> Any:
        remaining = iter(arrays)
        return fn(*jax.tree.unflatten(tree, [next(remaining) if is_array(x) else x for x in leaves]))

    return call


def _distinct_meshes(closed: Any, arrays: Any) -> list[Any]:
    """Return each mesh that occurs in the arguments' shardings or in the program, once."""
    meshes: dict[Any, None] = {x.sharding.mesh: None for x in arrays if x.sharding is not None}  # an ordered set

    # Parameters such as `in_shardings` are tuples of shardings.
    def collect(value: Any) -> None:
        for x in value if isinstance(value, tuple) else (value,):
            mesh = x.mesh if isinstance(x, NamedSharding) else x
            if isinstance(mesh, Mesh | AbstractMesh) and not mesh.empty:
                meshes[mesh] = None

    for eqn, _ in visit(opened(closed)[0].eqns):
        for value in eqn.params.values():
            collect(value)
    return list(meshes)


def _platform(device: jax.Device) -> str:
    """Return the platform of a device by the name that lowering accepts."""
    return "cuda" if device.platform == "gpu" else device.platform


def _uncommitted(x: Any) -> Any:
    """Return a constant that is bound to no device: an array committed to devices here would refuse the target."""
    return np.asarray(x) if isinstance(x, jax.Array) and getattr(x, "committed", False) else x


def _moved_context(mover: _MeshMover) -> Any:
    """Return a context that sets the mesh of `jax.set_mesh`, moved to the target; an empty one if no mesh is set."""
    mesh = jax.sharding.get_mesh()
    return contextlib.nullcontext() if mesh.empty else jax.set_mesh(mover(mesh))
