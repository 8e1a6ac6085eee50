"""Work on jaxprs: trace, flatten calls, cut, run, and follow dependencies.

Everything here reads programs that JAX has traced; nothing knows of devices or strategies.
"""

import math
import operator
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jec
import jax.extend.source_info_util as source_info_util
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, Tracer
from jax.interpreters import partial_eval as pe

from . import collectives, kernels, primitives
from .environment import Environment as Environment
from .environment import array_of as array_of
from .environment import bind as bind
from .environment import evaluate as evaluate
from .environment import itself as itself
from .environment import rerun as rerun
from .environment import source_info_of as source_info_of
from .libraries import of_library
from .primitives import PRODUCTS
from .walk import CALLS, CUSTOM, REMATS, called, is_literal, opened, propagate, visit, with_programs
from .walk import Scan as Scan
from .walk import programs as programs
from .walk import scan_parts as scan_parts

REDUCTIONS = ("psum", "psum2", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant")


@dataclass(frozen=True)
class Flat:
    """A traced function without nested `jit`: equations over unique variables.

    Attributes:
      constvars: the variables of the arrays that the trace closed over.
      consts: these arrays.
      invars: the variables of the inputs.
      outvars: the variables or literals of the results.
      eqns: the equations.
    """

    constvars: tuple[Any, ...]
    consts: tuple[Any, ...]
    invars: tuple[Any, ...]
    outvars: tuple[Any, ...]
    eqns: tuple[Any, ...]

    @property
    def jaxpr(self) -> "Flat":
        """The program itself, which `walk.opened` reads like a closed jaxpr."""
        return self


def type_of(atom: Any) -> jax.ShapeDtypeStruct:
    """Return the type of an atom as an abstract argument for a trace."""
    return jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype, weak_type=getattr(atom.aval, "weak_type", False))


def trace(fun: Callable, *args: Any, axes: dict[str, int] | None = None, remats: Any = False) -> tuple[Flat, Any]:
    """Trace a function and flatten it.

    Args:
      args: abstract arguments.
      axes: the mesh axes over which `fun` may reduce, name -> size.
      remats: whether rematerialised calls are inlined too, since the caller sets its own policy; or a function that
        says so for each.

    Returns:
      The program, and the tree of output types.
    """
    closed, out_types = jax.make_jaxpr(fun, axis_env=list((axes or {}).items()), return_shape=True)(*args)
    return flatten(closed, remats=remats), out_types


def flatten(closed: Any, remats: Any = False, calls: Callable[[Any], bool] = lambda eqn: True) -> Flat:
    """Inline nested calls, and remove sharding constraints, except those in custom derivatives.

    Constraints name a mesh of the user's own; where values live is the step's decision.

    Args:
      closed: a jaxpr, open or closed.
      remats: whether all rematerialised calls are inlined, or a function that says so for each. Those that hold a scan,
        which may be a layer stack, are inlined in any case.
      calls: returns whether a nested `jit` is inlined. Kernels (`kernels.py`) stay calls, except in derivatives.
    """
    constvars: list[Any] = []
    consts: list[Any] = []
    eqns: list[Any] = []
    constrained: list[Any] = []  # equations with constraints of the user's own mesh

    def walk(jaxpr: Any, values: Any, inputs: Sequence[Any], site: Any = None, derived: bool = False) -> list[Any]:
        """Append the equations of a jaxpr, and return the variables of its results.

        Args:
          values: the arrays that it closes over.
          inputs: the variables of its inputs.
          site: where the call of it stands; None for the outermost jaxpr.
          derived: whether it is in a derivative, in which kernels are ordinary calls.
        """
        # One jaxpr object may be called twice, so every definition gets a fresh variable.
        env = Environment(zip(jaxpr.invars, inputs, strict=True), itself)
        for var, value in zip(jaxpr.constvars, values, strict=True):
            env[var] = jec.Var(var.aval)
            constvars.append(env[var])
            consts.append(value)
        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            # Inline calls. A kernel stays a call, except in a derivative, where it is another function.
            if (name in CALLS and calls(eqn) and (derived or kernels.of(eqn) is None)) or (
                name in REMATS and ((remats(eqn) if callable(remats) else remats) or _holds_scan(eqn.params["jaxpr"]))
            ):
                inner, inner_consts = opened(called(eqn))
                inner_site, is_derived = _source(eqn, site), derived or kernels.derived(eqn)
                env.store(eqn, walk(inner, inner_consts, env.read(eqn.invars), inner_site, is_derived))
            elif name == "sharding_constraint":
                env.store(eqn, env.read(eqn.invars))
                constrained.append(eqn)
            else:
                ins, source = env.read(eqn.invars), _source(eqn, site)
                # Nothing reads a `DropVar`, and it stays one.
                env.store(eqn, (v if isinstance(v, jec.DropVar) else jec.Var(v.aval) for v in eqn.outvars))
                eqn = eqn.replace(invars=ins, outvars=env.read(eqn.outvars), source_info=source)
                if communicates([eqn], ("sharding_constraint",)):
                    constrained.append(eqn)
                # The types of all later values name the mesh of the constraint.
                eqns.append(_unconstrained(eqn) if constrained else eqn)
        return env.read(jaxpr.outvars)

    jaxpr, values = opened(closed)
    jaxpr = collectives.reduced(jaxpr)
    invars = tuple(jec.Var(v.aval) for v in jaxpr.invars)
    outvars = tuple(walk(jaxpr, values, invars))
    return Flat(tuple(constvars), tuple(consts), invars, outvars, tuple(eqns))


def _unconstrained(eqn: Any) -> Any:
    """Return an equation without sharding constraints inside its loops and branches, and without meshes in its types.

    Custom derivatives, which are no jaxprs yet, keep theirs.
    """

    def unconstrained_jaxpr(jaxpr: Any) -> Any:
        env = Environment[Any]({}, itself)

        def define(variables: Sequence[Any]) -> list[Any]:
            """Return new variables, whose types do not name a mesh."""
            for var in variables:
                aval = var.aval
                is_array = isinstance(aval, ShapedArray)
                if not isinstance(var, jec.DropVar):
                    env[var] = jec.Var(ShapedArray(aval.shape, aval.dtype, aval.weak_type) if is_array else aval)
            return env.read(variables)

        inputs = {"constvars": define(jaxpr.constvars), "invars": define(jaxpr.invars)}
        eqns = []
        for inner in jaxpr.eqns:
            ins = env.read(inner.invars)
            if inner.primitive.name == "sharding_constraint":
                env.store(inner, ins)
            else:
                eqns.append(_unconstrained(inner.replace(invars=ins, outvars=define(inner.outvars))))
        return jaxpr.replace(**inputs, eqns=eqns, outvars=env.read(jaxpr.outvars))

    eqn = with_programs(eqn, unconstrained_jaxpr)
    # Operations such as `reshape` may name the sharding of their result.
    return eqn.replace(params=eqn.params | {name: None for name in ("sharding", "out_sharding") if name in eqn.params})


def _holds_scan(jaxpr: Any) -> bool:
    """Return whether a jaxpr holds a scan that may be a layer stack; those in custom derivatives are none."""
    eqns = visit(opened(jaxpr)[0].eqns, lambda eqn: eqn.primitive.name not in CUSTOM)
    return any(eqn.primitive.name == "scan" for eqn, _ in eqns)


def build(eqns: Sequence[Any], invars: Sequence[Any], outvars: Sequence[Any]) -> Any:
    """Return a closed jaxpr of some equations, with their effects."""
    info = jec.DebugInfo("jaxpar", "slice", ("",) * len(invars), ("",) * len(outvars))
    effects = frozenset().union(*(eqn.effects for eqn in eqns)) if eqns else frozenset()
    return jec.ClosedJaxpr(jec.Jaxpr([], list(invars), list(outvars), list(eqns), effects, info), ())


def run(eqns: Sequence[Any], invars: Sequence[Any], outvars: Sequence[Any]) -> Callable[..., list[Any]]:
    """Return the function from values of `invars` to values of `outvars` that some equations compute."""
    return jec.jaxpr_as_fun(build(eqns, invars, outvars))


def pulled(fun: Callable[..., Sequence[Any]], values: Sequence[Any]) -> list[Any]:
    """Return a function's cotangents of its floating-point arguments, if those of all results are ones."""
    outs, pull = jax.vjp(fun, *values)
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)
    # To JAX the cotangents of integers have dtype float0.
    unit_cotangents = [jnp.ones_like(y) if is_float(y) else np.zeros(y.shape, jax.dtypes.float0) for y in outs]
    cotangents = pull(unit_cotangents)
    return [ct for x, ct in zip(values, cotangents, strict=True) if is_float(x)]


def live(eqns: Sequence[Any], outvars: Iterable[Any]) -> tuple[Any, ...]:
    """Return the equations that `outvars` need; unused stacked outputs of scans are dropped inside them."""
    outs = list(dict.fromkeys(v for v in outvars if not is_literal(v)))
    invars = free(eqns, outs)
    # `instantiate` keeps unused inputs, so that the equations read the variables of the caller.
    jaxpr, _ = pe.dce_jaxpr(build(eqns, invars, outs).jaxpr, [True] * len(outs), instantiate=True)
    return tuple(jaxpr.eqns)


def needed(eqns: Sequence[Any], outvars: Iterable[Any], known_vars: Collection[Any] = ()) -> list[Any]:
    """Return the equations that `outvars` need if some variables are known.

    Unlike `live`, it keeps no equation for its effects (prints, callbacks).

    Args:
      outvars: the variables to compute.
      known_vars: the variables that have values already.
    """
    needed_vars = {v for v in outvars if not is_literal(v) and v not in known_vars}
    needed_eqns = []
    # From last to first, since an equation is needed if a later one reads its result.
    for eqn in reversed(eqns):
        if any(v in needed_vars for v in eqn.outvars):
            needed_eqns.append(eqn)
            needed_vars.update(v for v in eqn.invars if not is_literal(v) and v not in known_vars)
    return needed_eqns[::-1]


def free(eqns: Iterable[Any], outvars: Iterable[Any] = ()) -> list[Any]:
    """Return the variables that some equations (and outputs) read and do not define, in order of first use."""
    free_vars: dict[Any, None] = {}
    defined: set[Any] = set()
    for eqn in eqns:
        free_vars.update((v, None) for v in eqn.invars if not is_literal(v) and v not in defined)
        defined.update(eqn.outvars)
    free_vars.update((v, None) for v in outvars if not is_literal(v) and v not in defined)
    return list(free_vars)


def nbytes(var: Any) -> int:
    """Return the size of a variable or literal in bytes."""
    return var.aval.size * var.aval.dtype.itemsize


def instead_of(eqn: Any, fun: Callable[..., Any]) -> list[Any]:
    """Return the equations of `fun(*operands)` that replace an equation: they define its results."""
    flat, _ = trace(fun, *map(type_of, eqn.invars))
    names = Environment(zip((*flat.invars, *flat.outvars), (*eqn.invars, *eqn.outvars), strict=True), itself)
    names_of, source = names.read, eqn.source_info
    return [e.replace(invars=names_of(e.invars), outvars=names_of(e.outvars), source_info=source) for e in flat.eqns]


def constant(eqns: Sequence[Any], var: Any, consts: Mapping[Any, Any]) -> np.ndarray | None:
    """Return the value of a variable that cheap equations compute from `consts`, variable -> array; None for others."""
    needed_eqns = needed(eqns, [var], consts)
    inputs = free(needed_eqns, [var])
    # Tracers and arrays that are spread over hosts have no numbers here. Equations with effects may name an axis.
    is_known = lambda x: x is not None and not isinstance(x, Tracer) and getattr(x, "is_fully_addressable", True)
    is_cheap = lambda eqn: primitives.of(eqn).cheap and not eqn.effects
    if not (all(is_known(consts.get(v)) for v in inputs) and all(map(is_cheap, needed_eqns))):
        return None
    # A program may be being traced here, so the equations must be evaluated eagerly.
    with jax.ensure_compile_time_eval():
        return np.asarray(run(needed_eqns, inputs, [var])(*(np.asarray(consts[v]) for v in inputs))[0])


def readers(eqns: Iterable[Any], outvars: Iterable[Any] = ()) -> dict[Any, list[Any]]:
    """Return the equations that read each variable; the first is None for `outvars`, which the caller reads."""
    readers_by_var: dict[Any, list[Any]] = {v: [None] for v in outvars if not is_literal(v)}
    for eqn in eqns:
        for v in dict.fromkeys(v for v in eqn.invars if not is_literal(v)):
            readers_by_var.setdefault(v, []).append(eqn)
    return readers_by_var


def communicates(eqns: Iterable[Any], primitives: Collection[str] = REDUCTIONS) -> bool:
    """Return whether one of some primitives, by default reductions, is among some equations or inside one."""
    return any(eqn.primitive.name in primitives for eqn, _ in visit(eqns))


# This file calls the user's program. Frames further out are lines that call a step.
_TRACE = os.path.abspath(__file__)


def user_line(eqn: Any) -> str:
    """Return the line of the user's program from which an equation comes; "" if there is none."""
    # Most equations need one frame, and few need all: a summary of all frames takes longest.
    num_checked, num_frames = 0, 1
    while True:
        frames = source_info_util.summarize(eqn.source_info, num_frames).split("\n")[::-1]
        for frame in frames[num_checked:]:
            if frame.startswith(_TRACE):
                return ""
            # A frame is written as "file:line (function)".
            if not of_library(frame.partition(":")[0]):
                return frame
        # There are no more frames.
        if len(frames) < num_frames:
            return ""
        num_checked, num_frames = num_frames, 8 * num_frames


def where(eqn: Any) -> str:
    """Return the line of the user's program from which an equation comes.

    For an equation of a library this is the line that calls the library. If there is none, the innermost line outside
    JAX is returned; "" for a function of JAX alone.
    """
    return user_line(eqn) or source_info_util.summarize(eqn.source_info)


def _source(eqn: Any, call: Any) -> Any:
    """Return the source info of an equation, or of the call that contains it.

    The function that a library wraps in `jax.jit` is traced once for all callers, and knows no line of theirs.

    Args:
      call: the source info of the call that contains it; None if no call does.
    """
    return call if call is not None and not user_line(eqn) else eqn.source_info


def depends(
    eqns: Iterable[Any],
    sources: Iterable[Any],
    ends: Callable[[Any], bool] = lambda eqn: False,
    followed: Collection[str] = CUSTOM,
    carries: Callable[[Any], bool] = lambda var: True,
) -> set[Any]:
    """Return all variables that depend on some others.

    Calls, loops and branches are followed output by output, other equations that hold programs as a whole.

    Args:
      sources: the variables on which others may depend.
      ends: returns whether an equation ends the dependence.
      followed: the names of custom derivatives that are followed output by output, too.
      carries: returns whether a variable passes the dependence on.
    """

    def dependents(eqns: Iterable[Any], sources: Iterable[Any]) -> set[Any]:
        marked = set(sources)
        for eqn in eqns:
            inputs = [not is_literal(v) and v in marked for v in eqn.invars]
            if any(inputs) and not ends(eqn):
                outputs = zip(eqn.outvars, outputs_of(eqn, inputs), strict=True)
                marked.update(v for v, is_marked in outputs if is_marked and carries(v))
        return marked

    def outputs_of_program(jaxpr: Any, inputs: Sequence[bool], decides: bool | None = None) -> list[bool]:
        jaxpr, _ = opened(jaxpr)
        invars = [v for v, is_marked in zip(jaxpr.invars, inputs, strict=True) if is_marked]
        marked = dependents(jaxpr.eqns, invars)
        return [not is_literal(v) and v in marked for v in jaxpr.outvars]

    def outputs_of(eqn: Any, inputs: list[bool]) -> list[bool]:
        is_entered = eqn.primitive.name in entered
        outs = propagate(eqn, inputs, outputs_of_program, operator.or_) if is_entered else None
        # All results of an equation that is not entered depend on all of its operands.
        return [True] * len(eqn.outvars) if outs is None else outs

    entered = {"scan", "while", "cond", *CALLS, *REMATS, *followed}
    return dependents(eqns, sources)


# Functions of floating-point numbers that are constant between jumps: JAX's derivative of them is zero
# (`ad.defjvp_zero`).
_STEPS = frozenset(("bitcast_convert_type", "ceil", "floor", "round", "sign", "stop_gradient"))


def active(eqns: Iterable[Any], sources: Iterable[Any]) -> set[Any]:
    """Return the variables with a derivative by `sources`, as in JAX: none through integers or `stop_gradient`."""
    is_float = lambda v: jnp.issubdtype(v.aval.dtype, jnp.inexact)
    has_zero_derivative = lambda eqn: eqn.primitive.name in _STEPS
    return depends(eqns, filter(is_float, sources), has_zero_derivative, (), is_float)


def reduces(axes: frozenset[str]) -> Callable[[Any], bool]:
    """Return a function: whether an equation reduces or gathers over all these mesh axes.

    The result of such an equation is the same along them.
    """
    return lambda eqn: bool(axes) and eqn.primitive.name in REDUCTIONS and axes <= {*collectives.axes_of(eqn)}


def matmuls(eqns: Iterable[Any]) -> dict[str, tuple[int, str]]:
    """Count the multiply-adds of matrix products and convolutions.

    Returns:
      For each dtype, of the wider operand, the multiply-adds and the line of the first product.
    """
    totals: dict[str, tuple[int, str]] = {}
    for eqn, num_runs in visit(eqns):
        name = eqn.primitive.name
        if name in PRODUCTS:
            a, b = (v.aval for v in eqn.invars[:2])
            # `inner` is the number of multiply-adds for each element of the result.
            # An element of a convolution reads the kernel of one output feature, of a product the summed dims.
            if name == "conv_general_dilated":
                inner = math.prod(b.shape) / b.shape[eqn.params["dimension_numbers"].rhs_spec[0]]
            else:
                ragged = eqn.params.get("ragged_dot_dimension_numbers")
                numbers = ragged.dot_dimension_numbers if ragged else eqn.params["dimension_numbers"]
                inner = math.prod(a.shape[d] for d in numbers[0][0])
                if ragged and {*ragged.lhs_ragged_dimensions} & {*numbers[0][0]}:
                    # The summed dim is ragged: each group sums its part, on average.
                    inner /= eqn.invars[2].aval.shape[-1]
            dtype = jnp.promote_types(a.dtype, b.dtype).name
            total, line = totals.get(dtype, (0, where(eqn)))
            totals[dtype] = total + round(math.prod(eqn.outvars[0].aval.shape) * inner) * num_runs, line
    return totals
