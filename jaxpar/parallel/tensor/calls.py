"""Rules of equations that hold programs: scans, rematerialised calls, rules of differentiation, kernels."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np

from ...program import jaxpr as jx
from ...program import kernels
from ...program.walk import called
from .localiser import Found, Localiser, LocalValue
from .primitives import rule


def _again(x: LocalValue, value: Any) -> LocalValue:
    """Another value in the place of this one, in another program."""
    return LocalValue(value, x.dim, x.shape, x.active, x.weight, x.origin)


def _as(work: Localiser, x: LocalValue, dim: int | None) -> jax.Array:
    return work.whole(x) if dim is None else work.part(x, dim)


@rule("scan")
def _scan(work: Localiser, eqn: Any, inputs: Sequence[LocalValue]) -> Found:
    parts, flat = jx.scan_parts(eqn), jx.flatten(eqn.params["jaxpr"])
    n, k = len(parts.consts), len(parts.carry)
    consts, init, xs = inputs[:n], inputs[n : n + k], inputs[n + k :]

    def slices(x: LocalValue, value: Any) -> LocalValue:
        dim = None if not x.dim else x.dim - 1  # split over the steps: gathered
        return LocalValue(value, dim, x.shape[1:], x.active, x.weight, x.origin)

    def body(carry: Sequence[LocalValue], values: Sequence[Any]) -> list[LocalValue]:
        fixed = [_again(x, x.value) for x in consts]  # edges of its own
        return work.run(flat, [*fixed, *carry, *map(slices, xs, values)])

    each = [jax.ShapeDtypeStruct(x.value.shape[1:], x.value.dtype) for x in xs]
    carried, found = _settled(work, init, parts.carry, body, each)

    def run(values: list[Any], sliced: list[Any]) -> tuple[list[Any], list[Any]]:
        outs = body(list(map(_again, carried, values)), sliced)
        kept = [_as(work, out, x.dim) for x, out in zip(carried, outs[:k], strict=True)]
        return kept, [out.value for out in outs[k:]]

    scanned = [work.whole(x) if x.dim == 0 else x.value for x in xs]
    start = [_as(work, x, into.dim) for x, into in zip(init, carried, strict=True)]
    options = {name: eqn.params[name] for name in ("reverse", "unroll", "_split_transpose") if name in eqn.params}
    carry, ys = jax.lax.scan(run, start, scanned, length=parts.length, **options)
    dims = [x.dim for x in carried] + [None if out.dim is None else out.dim + 1 for out in found[k:]]
    return list(zip([*carry, *ys], dims, strict=True))


def _settled(
    work: Localiser, init: Sequence[LocalValue], atoms: Sequence[Any], body: Callable[..., list[LocalValue]], *more: Any
) -> tuple[list[LocalValue], list[LocalValue]]:
    """What a loop carries, as it is in every iteration, and what `body(carry, *more)` makes of it.

    A value may only become split, active, or different on each rank (monotone), so that the fixpoint ends. `more` is
    abstract.
    """
    carried = [_again(x, x.value) for x in init]
    found: list[LocalValue] = []

    def step(values: Any, *more: Any) -> list[Any]:
        found[:] = body(list(map(_again, carried, values)), *more)
        return [x.value for x in found]

    while True:
        shapes = [work.local(x.shape, x.dim) for x in carried]
        noted = dict(work.gathered)
        values = [jax.ShapeDtypeStruct(shape, v.aval.dtype) for shape, v in zip(shapes, atoms, strict=True)]
        jax.eval_shape(step, values, *more)
        changed = False
        for x, out in zip(carried, found, strict=False):
            if x.dim is None and out.dim is not None:
                x.dim, x.origin, changed = out.dim, out.origin, True
            if out.active and not x.active:
                x.active = changed = True
            if x.weight and not out.weight:
                x.weight, changed = False, True
        if not changed:
            return carried, found
        work.gathered.clear()
        work.gathered.update(noted)


@rule("while")
def _while(work: Localiser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """Carried as by a scan; the condition reads all. None where ranks may end apart, inside its collectives."""
    cond, body = (jx.flatten(eqn.params[name]) for name in ("cond_jaxpr", "body_jaxpr"))
    if cond.outvars[0].aval.shape:
        values = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
        flat, _ = jx.trace(functools.partial(_by_row, eqn), *values)
        return [(x.value, x.dim) for x in work.run(flat, inputs)]
    n, k = eqn.params["cond_nconsts"], eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
    init = inputs[k:]
    goes_on = lambda carry: work.run(cond, [*(_again(x, x.value) for x in inputs[:n]), *carry])
    step = lambda carry: work.run(body, [*(_again(x, x.value) for x in inputs[n:k]), *carry])
    carried, found = _settled(work, init, eqn.invars[k:], lambda carry: [*step(carry), *goes_on(carry)])
    if not work.alike(found[-1]):
        return None
    of = lambda values: list(map(_again, carried, values))
    out = jax.lax.while_loop(
        lambda values: work.whole(*goes_on(of(values))),
        lambda values: [_as(work, y, x.dim) for x, y in zip(carried, step(of(values)), strict=True)],
        [_as(work, x, into.dim) for x, into in zip(init, carried, strict=True)],
    )
    return list(zip(out, (x.dim for x in carried), strict=True))


def _by_row(eqn: Any, *values: jax.Array) -> list[jax.Array]:
    """A loop whose condition `vmap` has made one of each row, as JAX lowers it: until no row goes on, those that do."""
    n, k = eqn.params["cond_nconsts"], eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
    closed = lambda name: jec.ClosedJaxpr(*jx.opened(eqn.params[name]))
    cond, body = (jec.jaxpr_as_fun(closed(name)) for name in ("cond_jaxpr", "body_jaxpr"))

    def step(carry: list[jax.Array]) -> list[jax.Array]:
        (goes,) = cond(*values[:n], *carry)
        rows = lambda x: goes.reshape(*goes.shape, *[1] * (x.ndim - goes.ndim))
        return [jnp.where(rows(x), y, x) for x, y in zip(carry, body(*values[n:k], *carry), strict=True)]

    return jax.lax.while_loop(lambda carry: cond(*values[:n], *carry)[0].any(), step, list(values[k:]))


@rule("custom_linear_solve")
def _linear_solve(work: Localiser, eqn: Any, inputs: Sequence[LocalValue]) -> Found:
    """Right-hand sides and solutions are split alike, as the solver leaves them; its four programs are rewritten."""
    lengths, programs = eqn.params["const_lengths"], eqn.params["jaxprs"]
    at = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    right, sides = inputs[at[-1] :], [_again(x, x.value) for x in inputs[at[-1] :]]

    def run(program: Any, consts: Sequence[LocalValue], values: Sequence[Any]) -> list[LocalValue]:
        return work.run(jx.flatten(program), [*map(_again, consts, values), *map(_again, sides, values[len(consts) :])])

    def solution(*values: Any) -> list[Any]:
        for x, out in zip(sides, run(programs.solve, solver, values), strict=True):
            x.dim, x.active = out.dim if x.dim is None else x.dim, True
        return []

    solver = inputs[at[2] : at[3]]
    jax.eval_shape(solution, *_values([*solver, *right]))
    start = [_as(work, x, side.dim) for x, side in zip(right, sides, strict=True)]

    def rewritten(program: Any, consts: Sequence[LocalValue]) -> Any:
        fun = lambda *values: [_as(work, x, y.dim) for x, y in zip(run(program, consts, values), sides, strict=True)]
        return jax.make_jaxpr(fun)(*_values(consts), *start)

    each = zip(programs, itertools.pairwise(at), strict=True)
    new = [None if program is None else rewritten(program, inputs[i:j]) for program, (i, j) in each]
    out = jx.bind(eqn, [*_values(inputs[: at[-1]]), *start], jaxprs=type(programs)(*new))
    return list(zip(out, (x.dim for x in sides), strict=True))


@rule(*jx.REMATS)
def _remat(work: Localiser, eqn: Any, inputs: Sequence[LocalValue]) -> Found:
    jaxpr, consts = jx.opened(eqn.params["jaxpr"])
    flat = jx.flatten(jec.ClosedJaxpr(jaxpr, consts))
    outs: list[LocalValue] = []

    def fun(*values: Any) -> list[Any]:
        outs[:] = work.run(flat, [_again(x, v) for x, v in zip(inputs, values, strict=True)])
        return [x.value for x in outs]

    options = {name: eqn.params[name] for name in ("policy", "prevent_cse")}
    values = jax.checkpoint(fun, **options)(*(x.value for x in inputs))
    return [(value, out.dim) for value, out in zip(values, outs, strict=True)]


@rule(*jx.CUSTOM)
def _custom(work: Localiser, eqn: Any, inputs: Sequence[LocalValue]) -> Found:
    """A function with its own derivative: forward and backward, traced at whole shapes, are each rewritten."""
    avals = [jax.ShapeDtypeStruct(x.shape, jnp.result_type(x.value)) for x in inputs]
    at = [i for i, x in enumerate(inputs) if x.active]
    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.outvars]
    floats = [jnp.issubdtype(s.dtype, jnp.inexact) for s in shapes]
    call = lambda *values: jx.bind(eqn, values)

    def forward(*values: Any) -> Any:
        def of_active(*active: Any) -> list[Any]:
            mine = dict(zip(at, active, strict=True))
            return call(*(mine.get(i, v) for i, v in enumerate(values)))

        return jax.vjp(of_active, *(values[i] for i in at))

    primal = jx.flatten(called(eqn))
    if not at:
        return [(x.value, x.dim) for x in work.run(primal, inputs)]
    pair, (_, pull) = jx.trace(forward, *avals)
    outs, saved = [], []

    def placed(values: Sequence[Any]) -> list[LocalValue]:
        return [_again(x, v) for x, v in zip(inputs, values, strict=True)]

    def only(*values: Any) -> list[Any]:
        outs[:] = work.run(primal, placed(values))
        return [x.value for x in outs]

    def fwd(*values: Any) -> Any:
        found = work.run(pair, placed(values))
        n = len(eqn.outvars)
        saved[:] = found[n:]
        return [_as(work, x, out.dim) for x, out in zip(found[:n], outs, strict=True)], [x.value for x in saved]

    def bwd(values: Any, cotangents: Any) -> Any:
        leaves, tree = jax.tree.flatten(pull)

        def pulled(leaves: Any, given: Any) -> Any:
            it = iter(given)
            none = lambda s: np.zeros(s.shape, jax.dtypes.float0)
            return jax.tree.unflatten(tree, leaves)(
                [next(it) if on else none(s) for s, on in zip(shapes, floats, strict=True)]
            )

        flat, _ = jx.trace(pulled, leaves, [s for s, on in zip(shapes, floats, strict=True) if on])
        known = [_again(x, v) for x, v in zip(saved, values, strict=True)]
        every = zip(cotangents, outs, shapes, floats, strict=True)
        cts = [work.cotangent(ct, out, s.shape) for ct, out, s, on in every if on]
        found = work.run(flat, [*known, *cts], linear=True)
        given = dict(zip(at, found, strict=True))
        return tuple(work.input_cotangent(given[i], x.dim) if i in given else None for i, x in enumerate(inputs))

    function = jax.custom_vjp(only)
    values = [x.value for x in inputs]
    jax.eval_shape(only, *values)  # where the results are, before any derivative is asked for
    function.defvjp(fwd, bwd)
    return [(value, out.dim) for value, out in zip(function(*values), outs, strict=True)]


@rule("jit", "pjit")
def _kernel(work: Localiser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """A fused kernel, on this rank's heads."""
    kernel = kernels.of(eqn)
    if kernel is None or not any(x.dim is not None and x.dim == d for x, d in zip(inputs, kernel.in_dims, strict=True)):
        return None
    placed = [*zip(eqn.invars, kernel.in_dims, strict=True), *zip(eqn.outvars, kernel.out_dims, strict=True)]
    if any(d is not None and v.aval.shape[d] % work.ranks for v, d in placed):
        return None  # fewer heads of keys than ranks, say
    values = [work.entered(x) if d is None else work.part(x, d) for x, d in zip(inputs, kernel.in_dims, strict=True)]
    outs = jax.tree.leaves(kernel.fun(*values))
    # Each rank has all of a whole result, and so all of its cotangent; `entered` adds up what ranks make of it.
    return [
        (_shared(value, work.ranks) if d is None else value, d) for value, d in zip(outs, kernel.out_dims, strict=True)
    ]


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _shared(x: jax.Array, ranks: int) -> jax.Array:
    """`x`, with a rank's share of its cotangent."""
    return x


@_shared.defjvp
def _shared_jvp(ranks: int, primals: Any, tangents: Any) -> Any:
    return primals[0], (tangents[0] / ranks if jnp.issubdtype(primals[0].dtype, jnp.inexact) else tangents[0])


@rule("cond")
def _cond(work: Localiser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """Each branch is rewritten. An output that some have whole, and others split along one dim, is split: of what is
    whole each rank takes its part. Whole outputs where branches disagree about the dim. None where ranks may take
    several branches, and would wait for each other in their collectives.
    """
    index, *operands = inputs
    if not work.alike(index):
        return None
    branches = [jx.flatten(branch) for branch in eqn.params["branches"]]
    found: list[list[LocalValue]] = []

    def placed(values: Sequence[Any]) -> list[LocalValue]:
        return [_again(x, v) for x, v in zip(operands, values, strict=True)]

    for flat in branches:
        jax.eval_shape(lambda *values, flat=flat: found.append(work.run(flat, placed(values))), *_values(operands))
    split = [{x.dim for x in outs} - {None} for outs in zip(*found, strict=True)]
    dims = [next(iter(some)) if len(some) == 1 else None for some in split]

    def branch(flat: jx.Flat) -> Callable[..., list[Any]]:
        return lambda *values: [_as(work, x, d) for x, d in zip(work.run(flat, placed(values)), dims, strict=True)]

    values = jax.lax.switch(work.whole(index), [branch(flat) for flat in branches], *_values(operands))
    return list(zip(values, dims, strict=True))


def _values(inputs: Sequence[LocalValue]) -> list[Any]:
    return [x.value for x in inputs]
