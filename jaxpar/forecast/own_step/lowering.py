"""A function lowered for the devices of its arguments, or for a target's that are not there.

For a target the function is traced once, as it is, and in its jaxpr every mesh is replaced by one of the same axes on
the target's devices, in their order, so that the last axes stay within a host: the meshes of arguments, of constraints,
of `shard_map`, of `in_shardings`. What is donated and what `compiler_options` say stays.
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

UNNAMED = "devices"  # the axis of a program whose mesh is not known
_JITS = ("jit", "pjit")


def is_array(x: Any) -> bool:
    """Whether an argument is an array or the shape of one, and no static value."""
    return hasattr(x, "shape") and hasattr(x, "dtype")


def paths_of(fn: Any, args: Any, places: Sequence[int] = ()) -> list[str]:
    """Of each leaf of the arguments its path, as JAX has it: "state.params['w']"; "args[0]..." if `fn` is None. Where
    they are not all of the function's, `places` has their numbers.
    """
    try:
        named = [*inspect.signature(fn).parameters.values()] if fn is not None else []
    except (TypeError, ValueError):  # of a function in C, say
        named = []
    plain = [p.name for p in named if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    found = []
    for (first, *rest), _ in jax.tree_util.tree_leaves_with_path(tuple(args)):
        at = places[first.idx] if places else first.idx
        name = plain[at] if at < len(plain) else f"args[{at}]"
        found.append(name + jax.tree_util.keystr(tuple(rest)))
    return found


def as_given(fn: Any, args: Any) -> Any:
    """Lowered for the devices of its arguments, which need not be there."""
    meshes = [x.sharding.mesh for x in _arrays(args) if x.sharding is not None]
    if abstract := next((x for x in meshes if isinstance(x, AbstractMesh)), None):
        raise ValueError(
            f"an argument lies on {abstract}, which has no devices; name some, such as target='{abstract.size}xH100'"
        )
    fn = fn if hasattr(fn, "lower") else jax.jit(fn)
    platforms = {_platform(x.devices.flat[0]) for x in meshes if isinstance(x, Mesh)} - {jax.default_backend()}
    if platforms and hasattr(fn, "trace"):  # of compile-only devices
        return fn.trace(*args).lower(lowering_platforms=tuple(platforms))
    return fn.lower(*args)


def meshes_of(fn: Any, args: Any) -> list[Any]:
    """Those that a function's arguments and its program name."""
    arrays = _arrays(args)
    return _meshes(jax.make_jaxpr(_flat(fn, args))(*arrays), arrays)


def on_target(fn: Any, args: Any, target: Target) -> tuple[jax.stages.Lowered, Mesh]:
    """Lowered for the target, and the mesh there. The program's parameters are `given[i]`, its arrays in their order.

    Raises ValueError where arguments and program name no mesh of as many devices as the target has, and from jax 0.12
    on for a mesh of explicit axes.
    """
    arrays = _arrays(args)
    closed = jax.make_jaxpr(_flat(fn, args))(*arrays)
    to = _Moved(max(_meshes(closed, arrays), key=lambda mesh: mesh.size, default=None), target)
    if AxisType.Explicit in to.mesh.axis_types and jax.__version_info__ >= (0, 12):
        raise ValueError(
            f"the step's mesh has explicit axes, and jax {jax.__version__} has the kind of its devices in every type, "
            f"where target={target.name!r} cannot be put; give the mesh axis_types=(AxisType.Auto, ...)"
        )
    jaxpr, consts = opened(closed)
    program, inputs, params = closed, jaxpr.invars, dict[str, Any]()
    if len(jaxpr.eqns) == 1 and jaxpr.eqns[0].primitive.name in _JITS:  # what is jitted is what is compiled
        program, inputs, params = jaxpr.eqns[0].params["jaxpr"], jaxpr.eqns[0].invars, jaxpr.eqns[0].params
    moved = to.program(program)
    known = dict(zip(jaxpr.constvars, map(_uncommitted, consts), strict=True)) if params else {}

    def step(*given: Any) -> Any:
        values = known | dict(zip(jaxpr.invars, given, strict=True))
        return jec.jaxpr_as_fun(moved)(*(v.val if is_literal(v) else values[v] for v in inputs))

    step.__name__ = params.get("name") or getattr(fn, "__name__", "step")
    asked = {v: s for v, s in _each(inputs, params, "in_shardings") if isinstance(s, NamedSharding)}
    donated = {v for v, yes in _each(inputs, params, "donated_invars") if yes}
    own = {v: x.sharding for v, x in zip(jaxpr.invars, arrays, strict=True) if x.sharding is not None}
    places = {v: NamedSharding(to.placed(s.mesh), s.spec) for v, s in (own | asked).items()}
    alone = NamedSharding(to.mesh, PartitionSpec()) if to.mesh.size == 1 else None  # else nothing says which device
    shapes = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=places.get(v, alone))
        for v, x in zip(jaxpr.invars, arrays, strict=True)
    ]
    results = [to(s) if isinstance(s, Sharding) else None for s in params.get("out_shardings", ())]
    jitted = jax.jit(
        step,
        donate_argnums=[at for at, v in enumerate(jaxpr.invars) if v in donated],
        out_shardings=results or None,
        compiler_options=dict(params.get("compiler_options_kvs", ())) or None,
    )
    with _context(to):
        return jitted.trace(*shapes).lower(lowering_platforms=(_platform(target.devices[0]),)), to.mesh


class _Moved:
    """Replaces meshes by those of a target's devices, in a sharding, a program, or an equation's parameter.

    Args:
      whole: the mesh of the program, which gives the order of its devices; None where it names none.
      target: the devices.
    """

    def __init__(self, whole: Any, target: Target) -> None:
        if whole is None and len(target.devices) > 1:
            raise ValueError(
                f"target={target.name!r} has {len(target.devices)} devices, and no argument has a NamedSharding that "
                f"would say what lies where; give some, on jax.sharding.AbstractMesh(({len(target.devices)},), "
                "('data',)) if the devices are not here, or a target of one device"
            )
        whole = whole if whole is not None else AbstractMesh((1,), (UNNAMED,))
        if whole.size != len(target.devices):
            axes = ", ".join(f"{axis}={n}" for axis, n in whole.shape.items())
            raise ValueError(
                f"the mesh of the arguments has {whole.size} devices ({axes}), target={target.name!r} has "
                f"{len(target.devices)}; use target='{whole.size}x{target.kind}', or give the arguments shardings on a "
                f"jax.sharding.AbstractMesh of {len(target.devices)} devices, which need not be here"
            )
        self.devices = target.devices
        self.places = {device: at for at, device in enumerate(whole.devices.flat)} if isinstance(whole, Mesh) else {}
        self.mesh = self.placed(whole)

    def __call__(self, value: Any) -> Any:
        match value:
            case Mesh() if not value.empty:
                return self.placed(value)
            case AbstractMesh() if not value.empty:
                return self.placed(value).abstract_mesh
            case NamedSharding():
                kind = value.memory_kind
                return NamedSharding(self(value.mesh), value.spec, memory_kind=None if kind == "device" else kind)
            case tuple() if type(value) is tuple:
                return tuple(map(self, value))
        return value

    def program(self, closed: Any) -> Any:
        """A closed program, and those that it holds."""
        jaxpr, consts = opened(closed)
        moved = lambda eqn: eqn.replace(params={name: self(x) for name, x in eqn.params.items()})
        jaxpr = jaxpr.replace(eqns=replaced(jaxpr.eqns, moved, _uncommitted))
        return jec.ClosedJaxpr(jaxpr, list(map(_uncommitted, consts)))

    def placed(self, mesh: Any) -> Mesh:
        """A mesh, abstract or not, on the target's devices."""
        if mesh.size != len(self.devices):
            raise ValueError(
                f"the step has meshes of {len(self.devices)} and of {mesh.size} devices; a target is one mesh"
            )
        known = isinstance(mesh, Mesh) and self.places
        order = [self.places[device] for device in mesh.devices.flat] if known else range(mesh.size)
        devices = np.array([self.devices[at] for at in order]).reshape(tuple(mesh.shape.values()))
        return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


def _each(inputs: Any, params: dict[str, Any], name: str) -> Iterator[tuple[Any, Any]]:
    """Of a jitted function's arrays what a parameter says, literals left out."""
    pairs = zip(inputs, params[name], strict=True) if params else ()
    return ((v, x) for v, x in pairs if not is_literal(v))


def _arrays(args: Any) -> list[jax.ShapeDtypeStruct]:
    """The shapes of arguments, with what NamedShardings they have."""
    named = lambda x: s if isinstance(s := getattr(x, "sharding", None), NamedSharding) else None
    return [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=named(x)) for x in jax.tree.leaves(args) if is_array(x)]


def _flat(fn: Any, args: Any) -> Callable[..., Any]:
    """The function of its arrays alone; what else it is given is part of it."""
    leaves, tree = jax.tree.flatten(tuple(args))

    def flat(*given: Any) -> Any:
        arrays = iter(given)
        return fn(*jax.tree.unflatten(tree, [next(arrays) if is_array(x) else x for x in leaves]))

    return flat


def _meshes(closed: Any, arrays: Any) -> list[Any]:
    """Every mesh of arguments and program, each once."""
    found: dict[Any, None] = {x.sharding.mesh: None for x in arrays if x.sharding is not None}

    def look(value: Any) -> None:
        for x in value if isinstance(value, tuple) else (value,):
            mesh = x.mesh if isinstance(x, NamedSharding) else x
            if isinstance(mesh, Mesh | AbstractMesh) and not mesh.empty:
                found[mesh] = None

    for eqn, _ in visit(opened(closed)[0].eqns):
        for value in eqn.params.values():
            look(value)
    return list(found)


def _platform(device: jax.Device) -> str:
    return "cuda" if device.platform == "gpu" else device.platform


def _uncommitted(x: Any) -> Any:
    """A constant that is bound to no device."""
    return np.asarray(x) if isinstance(x, jax.Array) and getattr(x, "committed", False) else x


def _context(to: _Moved) -> Any:
    """The mesh of `jax.set_mesh`, moved."""
    mesh = jax.sharding.get_mesh()
    return contextlib.nullcontext() if mesh.empty else jax.set_mesh(to(mesh))
