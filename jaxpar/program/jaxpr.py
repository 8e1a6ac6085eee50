"""What the rest of jaxpar needs to know about jaxprs: flatten, cut, follow dependencies.

Everything here reads programs that JAX has traced; nothing knows of devices or strategies. The two ends of the
supported range of jax spell some things differently, and only this file and `walk.py` know.
"""

import math
import operator
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jec
import jax.extend.source_info_util as source_info_util
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.interpreters import partial_eval as pe

from . import collectives, kernels
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

    `consts` are the arrays that the trace closed over, one for each of `constvars`.
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
    """An atom as an abstract argument: a trace begins with its shape and dtype."""
    return jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype, weak_type=getattr(atom.aval, "weak_type", False))


def trace(fun: Callable, *args: Any, axes: dict[str, int] | None = None, remats: Any = False) -> tuple[Flat, Any]:
    """Trace `fun` at abstract arguments and flatten it; also the abstract output tree.

    `axes` are the mesh axes (name -> size) that `fun` may reduce over. With `remats`, rematerialised calls are
    inlined as well: all, where the caller sets its own policy, or those of which it says so.
    """
    closed, out = jax.make_jaxpr(fun, axis_env=list((axes or {}).items()), return_shape=True)(*args)
    return flatten(closed, remats=remats), out


def flatten(closed: Any, remats: Any = False, calls: Callable[[Any], bool] = lambda eqn: True) -> Flat:
    """Inline every nested `jit` (or those of which `calls` says so), and every rematerialised call that holds a scan
    (or all of them); leave out constraints of shardings, but for those within loops.
    """
    constvars: list[Any] = []
    consts: list[Any] = []
    eqns: list[Any] = []
    foreign: list[Any] = []  # what has constraints of a mesh of the user's own

    def walk(jaxpr: Any, values: Any, inputs: Sequence[Any], site: Any = None, derived: bool = False) -> list[Any]:
        # One jaxpr object may be called twice, so every definition gets a fresh variable.
        env = Environment(zip(jaxpr.invars, inputs, strict=True), itself)
        for var, value in zip(jaxpr.constvars, values, strict=True):
            env[var] = jec.Var(var.aval)
            constvars.append(env[var])
            consts.append(value)
        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            if (name in CALLS and calls(eqn) and (derived or kernels.of(eqn) is None)) or (
                name in REMATS and ((remats(eqn) if callable(remats) else remats) or _holds_scan(eqn.params["jaxpr"]))
            ):
                inner, inner_consts = opened(called(eqn))
                within = _source(eqn, site), derived or kernels.derived(eqn)
                env.store(eqn, walk(inner, inner_consts, env.read(eqn.invars), *within))
            elif name == "sharding_constraint":  # of a mesh of the user's own: where values live is the step's to say
                env.store(eqn, env.read(eqn.invars))
                foreign.append(eqn)
            else:
                ins, source = env.read(eqn.invars), _source(eqn, site)
                env.store(eqn, (v if isinstance(v, jec.DropVar) else jec.Var(v.aval) for v in eqn.outvars))
                eqn = eqn.replace(invars=ins, outvars=env.read(eqn.outvars), source_info=source)
                if communicates([eqn], ("sharding_constraint",)):
                    foreign.append(eqn)
                # What follows has the mesh of the constraint in its types.
                eqns.append(_unconstrained(eqn) if foreign else eqn)
        return env.read(jaxpr.outvars)

    jaxpr, values = opened(collectives.reduced(closed))
    invars = tuple(jec.Var(v.aval) for v in jaxpr.invars)
    outvars = tuple(walk(jaxpr, values, invars))
    return Flat(tuple(constvars), tuple(consts), invars, outvars, tuple(eqns))


def _unconstrained(eqn: Any) -> Any:
    """An equation without the sharding constraints inside its loops and branches, and without what they told the types
    of a mesh. A function's own derivatives, which are no jaxpr yet, keep theirs.
    """

    def inside(jaxpr: Any) -> Any:
        env = Environment[Any]({}, itself)

        def new(variables: Sequence[Any]) -> list[Any]:
            for var in variables:
                aval = var.aval
                plain = isinstance(aval, ShapedArray)
                if not isinstance(var, jec.DropVar):
                    env[var] = jec.Var(ShapedArray(aval.shape, aval.dtype, aval.weak_type) if plain else aval)
            return env.read(variables)

        outer = {"constvars": new(jaxpr.constvars), "invars": new(jaxpr.invars)}
        eqns = []
        for inner in jaxpr.eqns:
            ins = env.read(inner.invars)
            if inner.primitive.name == "sharding_constraint":
                env.store(inner, ins)
            else:
                eqns.append(_unconstrained(inner.replace(invars=ins, outvars=new(inner.outvars))))
        return jaxpr.replace(**outer, eqns=eqns, outvars=env.read(jaxpr.outvars))

    eqn = with_programs(eqn, inside)
    return eqn.replace(params=eqn.params | {name: None for name in ("sharding", "out_sharding") if name in eqn.params})


def _holds_scan(jaxpr: Any) -> bool:
    """Whether a scan that may be of layers is inside; one of a function with its own derivative is none."""
    followed = visit(opened(jaxpr)[0].eqns, lambda eqn: eqn.primitive.name not in CUSTOM)
    return any(eqn.primitive.name == "scan" for eqn, _ in followed)


def build(eqns: Sequence[Any], invars: Sequence[Any], outvars: Sequence[Any]) -> Any:
    """A closed jaxpr of some equations; effects are those of the equations."""
    info = jec.DebugInfo("jaxpar", "slice", ("",) * len(invars), ("",) * len(outvars))
    effects = frozenset().union(*(e.effects for e in eqns)) if eqns else frozenset()
    return jec.ClosedJaxpr(jec.Jaxpr([], list(invars), list(outvars), list(eqns), effects, info), ())


def run(eqns: Sequence[Any], invars: Sequence[Any], outvars: Sequence[Any]) -> Callable[..., list[Any]]:
    """The function from values of `invars` to values of `outvars` that some equations compute."""
    return jec.jaxpr_as_fun(build(eqns, invars, outvars))


def pulled(fun: Callable[..., Sequence[Any]], values: Sequence[Any]) -> list[Any]:
    """What a function's backward makes of ones, for those of its arguments that are floats."""
    outs, pull = jax.vjp(fun, *values)
    floats = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)
    given = pull([jnp.ones_like(y) if floats(y) else np.zeros(y.shape, jax.dtypes.float0) for y in outs])
    return [ct for x, ct in zip(values, given, strict=True) if floats(x)]


def live(eqns: Sequence[Any], outvars: Iterable[Any]) -> tuple[Any, ...]:
    """The equations that `outvars` need, with unused per-step outputs of scans dropped inside them."""
    outs = list(dict.fromkeys(v for v in outvars if not is_literal(v)))
    invars = free(eqns, outs)
    jaxpr, _ = pe.dce_jaxpr(build(eqns, invars, outs).jaxpr, [True] * len(outs), instantiate=True)
    return tuple(jaxpr.eqns)


def needed(eqns: Sequence[Any], outvars: Iterable[Any], there: Collection[Any] = ()) -> list[Any]:
    """The equations that `outvars` need where some variables are `there`, and unlike `live` none that is kept for its
    effects (prints, callbacks).
    """
    need = {v for v in outvars if not is_literal(v) and v not in there}
    kept = []
    for eqn in reversed(eqns):
        if any(v in need for v in eqn.outvars):
            kept.append(eqn)
            need.update(v for v in eqn.invars if not is_literal(v) and v not in there)
    return kept[::-1]


def free(eqns: Iterable[Any], outvars: Iterable[Any] = ()) -> list[Any]:
    """Variables that some equations (and outputs) read and do not define, in order of first use."""
    seen: dict[Any, None] = {}
    defined: set[Any] = set()
    for eqn in eqns:
        seen.update((v, None) for v in eqn.invars if not is_literal(v) and v not in defined)
        defined.update(eqn.outvars)
    seen.update((v, None) for v in outvars if not is_literal(v) and v not in defined)
    return list(seen)


def nbytes(var: Any) -> int:
    """Bytes of a variable or literal."""
    return var.aval.size * var.aval.dtype.itemsize


def communicates(eqns: Iterable[Any], by: Collection[str] = REDUCTIONS) -> bool:
    """Whether one of the primitives `by` is among some equations, or inside one."""
    return any(eqn.primitive.name in by for eqn, _ in visit(eqns))


_TRACE = os.path.abspath(__file__)  # calls the user's program; further out are lines that call a step


def _user_line(source: Any) -> str:
    """The innermost line that is of no library; "" if there is none."""
    seen, count = 0, 1
    while True:  # most equations need one frame, and few need all
        frames = source_info_util.summarize(source, count).split("\n")[::-1]
        for frame in frames[seen:]:
            if frame.startswith(_TRACE):
                return ""
            if not of_library(frame.partition(":")[0]):
                return frame
        if len(frames) < count:
            return ""
        seen, count = count, 8 * count


def user_line(eqn: Any) -> str:
    """The line of the user's program that an equation comes from, as `where` has it; "" where there is none."""
    return _user_line(eqn.source_info)


def where(eqn: Any) -> str:
    """The line of the user's program that an equation comes from; of what a library computes, the one calling it.

    Where there is none, the innermost one that is not of JAX; "" for a function of JAX alone.
    """
    return user_line(eqn) or source_info_util.summarize(eqn.source_info)


def _source(eqn: Any, call: Any) -> Any:
    """Where an equation stands: as it says, or with the `call` that it is in (None: in none), since what a library
    wraps in `jax.jit` is traced once for all callers and knows no line of them.
    """
    return call if call is not None and not _user_line(eqn.source_info) else eqn.source_info


def depends(
    eqns: Iterable[Any],
    sources: Iterable[Any],
    ends: Callable[[Any], bool] = lambda eqn: False,
    followed: Collection[str] = CUSTOM,
    carries: Callable[[Any], bool] = lambda var: True,
) -> set[Any]:
    """All variables that depend on `sources`, other than through an equation that `ends` the dependence, or through a
    variable that does not carry it.

    Calls, loops, branches and functions with derivatives of their own, if `followed`, output by output; others as a
    whole.
    """

    def marked_among(eqns: Iterable[Any], sources: Iterable[Any]) -> set[Any]:
        marked = set(sources)
        for eqn in eqns:
            inputs = [not is_literal(v) and v in marked for v in eqn.invars]
            if any(inputs) and not ends(eqn):
                hits = zip(eqn.outvars, outputs(eqn, inputs), strict=True)
                marked.update(v for v, hit in hits if hit and carries(v))
        return marked

    def inside(jaxpr: Any, inputs: Sequence[bool], decides: bool | None = None) -> list[bool]:
        jaxpr, _ = opened(jaxpr)
        marked = marked_among(jaxpr.eqns, [v for v, hit in zip(jaxpr.invars, inputs, strict=True) if hit])
        return [not is_literal(v) and v in marked for v in jaxpr.outvars]

    def outputs(eqn: Any, inputs: list[bool]) -> list[bool]:
        outs = propagate(eqn, inputs, inside, operator.or_) if eqn.primitive.name in entered else None
        return [True] * len(eqn.outvars) if outs is None else outs

    entered = {"scan", "while", "cond", *CALLS, *REMATS, *followed}
    return marked_among(eqns, sources)


# Of floating point numbers, and constant but for steps: JAX's derivative of them is nought (`ad.defjvp_zero`).
_STEPS = frozenset(("bitcast_convert_type", "ceil", "floor", "round", "sign", "stop_gradient"))


def active(eqns: Iterable[Any], sources: Iterable[Any]) -> set[Any]:
    """All that have a derivative by `sources`, as JAX finds it: none goes through integers or `stop_gradient`."""
    inexact = lambda v: jnp.issubdtype(v.aval.dtype, jnp.inexact)
    stops = lambda eqn: eqn.primitive.name in _STEPS
    return depends(eqns, filter(inexact, sources), stops, (), inexact)


def reduces(axes: frozenset[str]) -> Callable[[Any], bool]:
    """Whether an equation reduces, or gathers, over all these mesh axes: its result is the same along them."""
    return lambda eqn: bool(axes) and eqn.primitive.name in REDUCTIONS and axes <= {*collectives.axes_of(eqn)}


def matmuls(eqns: Iterable[Any]) -> dict[str, tuple[int, str]]:
    """Multiply-adds of products of matrices and convolutions by the dtype of their wider operand, and where the first
    one stands.
    """
    found: dict[str, tuple[int, str]] = {}
    for eqn, runs in visit(eqns):
        name = eqn.primitive.name
        if name in PRODUCTS:
            a, b = (v.aval for v in eqn.invars[:2])
            if name == "conv_general_dilated":
                inner = math.prod(b.shape) / b.shape[eqn.params["dimension_numbers"].rhs_spec[0]]
            else:
                ragged = eqn.params.get("ragged_dot_dimension_numbers")
                numbers = ragged.dot_dimension_numbers if ragged else eqn.params["dimension_numbers"]
                inner = math.prod(a.shape[d] for d in numbers[0][0])
                if ragged and {*ragged.lhs_ragged_dimensions} & {*numbers[0][0]}:  # each group sums its own part
                    inner /= eqn.invars[2].aval.shape[-1]
            dtype = jnp.promote_types(a.dtype, b.dtype).name
            before, place = found.get(dtype, (0, where(eqn)))
            found[dtype] = before + round(math.prod(eqn.outvars[0].aval.shape) * inner) * runs, place
    return found
