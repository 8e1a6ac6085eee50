"""Rules of equations that hold programs: loops, branches, rematerialised calls, functions with derivatives, kernels.

Each rule rewrites the inner program with the same `Localiser`, and builds the equation anew around it. A value inside
the inner program is a different tracer from the value outside, so it becomes a new `LocalValue` (`_with_values`) whose
edges are separate. Loops need the layout of their carry before they are built, which `_loop_layouts` finds.
"""

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


def _values(inputs: Sequence[LocalValue]) -> list[Any]:
    """Return the rank's arrays."""
    return [x.value for x in inputs]


def _with_values(inputs: Sequence[LocalValue], values: Sequence[Any]) -> list[LocalValue]:
    """Return values in the layouts of `inputs`, for another program. Edges that those have crossed are not shared."""
    return [LocalValue(v, x.dim, x.shape, x.active, x.weight, x.origin) for x, v in zip(inputs, values, strict=True)]


def _in_layout(localiser: Localiser, inputs: Sequence[LocalValue], dims: Sequence[int | None]) -> list[jax.Array]:
    """Return the rank's arrays of values, each split along its dim of `dims`, or whole if that is None."""
    return [localiser.whole(x) if d is None else localiser.part(x, d) for x, d in zip(inputs, dims, strict=True)]


@rule("scan")
def _scan(localiser: Localiser, eqn: Any, inputs: Sequence[LocalValue]) -> Found:
    """Rewrite the body; the carry keeps one layout over all iterations."""
    parts, flat = jx.scan_parts(eqn), jx.flatten(eqn.params["jaxpr"])
    n, k = len(parts.consts), len(parts.carry)
    consts, init, xs = inputs[:n], inputs[n : n + k], inputs[n + k :]

    def slice_of(x: LocalValue, value: Any) -> LocalValue:
        # A slice of one step lacks dim 0. An input that is split over the steps is gathered before the loop.
        dim = None if not x.dim else x.dim - 1
        return LocalValue(value, dim, x.shape[1:], x.active, x.weight, x.origin)

    def body(carry: Sequence[LocalValue], slices: Sequence[Any]) -> list[LocalValue]:
        return localiser.run(flat, [*_with_values(consts, _values(consts)), *carry, *map(slice_of, xs, slices)])

    # 1. Find the layout of the carry.
    slice_avals = [jax.ShapeDtypeStruct(x.value.shape[1:], x.value.dtype) for x in xs]
    carried, body_outputs = _loop_layouts(localiser, init, parts.carry, body, slice_avals)
    dims = [x.dim for x in carried]

    # 2. Run the loop on the parts. The next carry must have the layout of the carry.
    def step(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        outs = body(_with_values(carried, carry), slices)
        return _in_layout(localiser, outs[:k], dims), _values(outs[k:])

    scanned = [localiser.whole(x) if x.dim == 0 else x.value for x in xs]
    options = {name: eqn.params[name] for name in ("reverse", "unroll", "_split_transpose") if name in eqn.params}
    carry, ys = jax.lax.scan(step, _in_layout(localiser, init, dims), scanned, length=parts.length, **options)
    stacked_dims = [None if out.dim is None else out.dim + 1 for out in body_outputs[k:]]
    return list(zip([*carry, *ys], [*dims, *stacked_dims], strict=True))


def _loop_layouts(
    localiser: Localiser,
    init: Sequence[LocalValue],
    atoms: Sequence[Any],
    body: Callable[..., list[LocalValue]],
    *step_inputs: Any,
) -> tuple[list[LocalValue], list[LocalValue]]:
    """Find the layout of a loop's carry that holds in every iteration.

    Args:
      init: the carry before the first iteration.
      atoms: the carry's variables in the loop's equation, for dtypes.
      body: maps the carry and `step_inputs` to the body's outputs, the next carry first.
      step_inputs: further inputs of the body, as abstract values.

    Returns:
      The carry in the layout of every iteration, and the outputs of the body for it.
    """
    carried = _with_values(init, _values(init))
    body_outputs: list[LocalValue] = []

    def trace_step(carry: Any, *step_inputs: Any) -> list[Any]:
        body_outputs[:] = body(_with_values(carried, carry), *step_inputs)
        return _values(body_outputs)

    while True:
        shapes = [localiser.local(x.shape, x.dim) for x in carried]
        recorded = dict(localiser.gathered)
        values = [jax.ShapeDtypeStruct(shape, v.aval.dtype) for shape, v in zip(shapes, atoms, strict=True)]
        jax.eval_shape(trace_step, values, *step_inputs)
        # A value may only become split, become active, or stop being a weight. Each can happen once, so the loop ends.
        changed = False
        # The outputs end with the stacked results of a scan, or the condition of a `while`, which are not carried.
        for x, out in zip(carried, body_outputs, strict=False):
            if x.dim is None and out.dim is not None:
                x.dim, x.origin, changed = out.dim, out.origin, True
            if out.active and not x.active:
                x.active = changed = True
            if x.weight and not out.weight:
                x.weight, changed = False, True
        if not changed:
            return carried, body_outputs
        # Forget the gathers of a trace in a layout that did not hold.
        localiser.gathered.clear()
        localiser.gathered.update(recorded)


@rule("while")
def _while(localiser: Localiser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """Rewrite condition and body, with the carry as in a scan; the condition is whole on every rank.

    Returns:
      The local outputs; None if the condition may differ between ranks. Some ranks would then leave the loop, while
      others wait for them in a collective.
    """
    cond, body = (jx.flatten(eqn.params[name]) for name in ("cond_jaxpr", "body_jaxpr"))
    if cond.outvars[0].aval.shape:
        # `vmap` has made one condition per row. Rewrite the loop as JAX would lower it.
        values = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
        flat, _ = jx.trace(functools.partial(_batched_while, eqn), *values)
        return [(x.value, x.dim) for x in localiser.run(flat, inputs)]
    n, k = eqn.params["cond_nconsts"], eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
    init = inputs[k:]
    condition = lambda carry: localiser.run(cond, [*_with_values(inputs[:n], _values(inputs[:n])), *carry])
    step = lambda carry: localiser.run(body, [*_with_values(inputs[n:k], _values(inputs[n:k])), *carry])
    # The condition is traced as a last output of the body, so that the carry's layout serves both.
    carried, body_outputs = _loop_layouts(
        localiser, init, eqn.invars[k:], lambda carry: [*step(carry), *condition(carry)]
    )
    if not localiser.is_equal_on_ranks(body_outputs[-1]):
        return None
    dims = [x.dim for x in carried]
    final_carry = jax.lax.while_loop(
        lambda values: localiser.whole(*condition(_with_values(carried, values))),
        lambda values: _in_layout(localiser, step(_with_values(carried, values)), dims),
        _in_layout(localiser, init, dims),
    )
    return list(zip(final_carry, dims, strict=True))


def _batched_while(eqn: Any, *values: jax.Array) -> list[jax.Array]:
    """Run a loop with one condition per row: loop until all rows have ended, and update only rows that go on."""
    n, k = eqn.params["cond_nconsts"], eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
    closed = lambda name: jec.ClosedJaxpr(*jx.opened(eqn.params[name]))
    cond, body = (jec.jaxpr_as_fun(closed(name)) for name in ("cond_jaxpr", "body_jaxpr"))

    def step(carry: list[jax.Array]) -> list[jax.Array]:
        (goes_on,) = cond(*values[:n], *carry)
        row_mask = lambda x: goes_on.reshape(*goes_on.shape, *[1] * (x.ndim - goes_on.ndim))
        return [jnp.where(row_mask(x), y, x) for x, y in zip(carry, body(*values[n:k], *carry), strict=True)]

    return jax.lax.while_loop(lambda carry: cond(*values[:n], *carry)[0].any(), step, list(values[k:]))


@rule("custom_linear_solve")
def _linear_solve(localiser: Localiser, eqn: Any, inputs: Sequence[LocalValue]) -> Found:
    """Rewrite the four programs of a linear solve (matvec, its transpose, solve, its transpose).

    Right-hand sides and solutions have the same layout: the one in which the solver returns its solutions.
    """
    lengths, programs = eqn.params["const_lengths"], eqn.params["jaxprs"]
    offsets = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    right = inputs[offsets[-1] :]
    sides = _with_values(right, _values(right))

    def run_program(program: Any, consts: Sequence[LocalValue], values: Sequence[Any]) -> list[LocalValue]:
        return localiser.run(jx.flatten(program), _with_values([*consts, *sides], values))

    # 1. Find the layout of the solutions, and give it to the right-hand sides.
    def solve(*values: Any) -> list[Any]:
        for x, out in zip(sides, run_program(programs.solve, solver_consts, values), strict=True):
            x.dim, x.active = out.dim if x.dim is None else x.dim, True
        return []

    # `const_lengths` has the order matvec, vecmat, solve, transpose_solve.
    solver_consts = inputs[offsets[2] : offsets[3]]
    jax.eval_shape(solve, *_values([*solver_consts, *right]))
    dims = [x.dim for x in sides]
    start = _in_layout(localiser, right, dims)

    # 2. Rewrite each program in this layout.
    def rewritten(program: Any, consts: Sequence[LocalValue]) -> Any:
        fun = lambda *values: _in_layout(localiser, run_program(program, consts, values), dims)
        return jax.make_jaxpr(fun)(*_values(consts), *start)

    program_ranges = zip(programs, itertools.pairwise(offsets), strict=True)
    local_programs = [
        None if program is None else rewritten(program, inputs[i:j]) for program, (i, j) in program_ranges
    ]
    solutions = jx.bind(eqn, [*_values(inputs[: offsets[-1]]), *start], jaxprs=type(programs)(*local_programs))
    return list(zip(solutions, dims, strict=True))


@rule(*jx.REMATS)
def _remat(localiser: Localiser, eqn: Any, inputs: Sequence[LocalValue]) -> Found:
    """Rewrite a rematerialised call, under the same policy."""
    jaxpr, consts = jx.opened(eqn.params["jaxpr"])
    flat = jx.flatten(jec.ClosedJaxpr(jaxpr, consts))
    outs: list[LocalValue] = []

    def local_fun(*values: Any) -> list[Any]:
        # The trace of `checkpoint` fills `outs`, whose layouts are read below.
        outs[:] = localiser.run(flat, _with_values(inputs, values))
        return _values(outs)

    options = {name: eqn.params[name] for name in ("policy", "prevent_cse")}
    values = jax.checkpoint(local_fun, **options)(*_values(inputs))
    return [(value, out.dim) for value, out in zip(values, outs, strict=True)]


def _traced_vjp(vjp_fun: Any, avals: Sequence[Any], is_float: Sequence[bool]) -> jx.Flat:
    """Trace a vjp function as a program of its residuals and the cotangents of the outputs that are `is_float`."""
    leaves, tree = jax.tree.flatten(vjp_fun)

    def backward(leaves: Any, float_cotangents: Any) -> Any:
        cotangent_iterator = iter(float_cotangents)
        float0_zeros = lambda s: np.zeros(s.shape, jax.dtypes.float0)  # the cotangent type of integers
        return jax.tree.unflatten(tree, leaves)(
            [next(cotangent_iterator) if on else float0_zeros(s) for s, on in zip(avals, is_float, strict=True)]
        )

    return jx.trace(backward, leaves, [s for s, on in zip(avals, is_float, strict=True) if on])[0]


@rule(*jx.CUSTOM)
def _custom(localiser: Localiser, eqn: Any, inputs: Sequence[LocalValue]) -> Found:
    """Rewrite a function with its own derivative as a `custom_vjp` of local programs.

    The model's forward and backward are traced at whole shapes, and each is rewritten for one rank. The residuals keep
    the layout in which the rewritten forward computes them.
    """
    avals = [jax.ShapeDtypeStruct(x.shape, jnp.result_type(x.value)) for x in inputs]
    active_indices = [i for i, x in enumerate(inputs) if x.active]
    call = lambda *values: jx.bind(eqn, values)

    # 1. Trace the forward with its residuals. Without active inputs, the primal function is enough.
    def forward(*values: Any) -> Any:
        def call_of_active(*active_values: Any) -> list[Any]:
            active = dict(zip(active_indices, active_values, strict=True))
            return call(*(active.get(i, v) for i, v in enumerate(values)))

        return jax.vjp(call_of_active, *(values[i] for i in active_indices))

    primal = jx.flatten(called(eqn))
    if not active_indices:
        return [(x.value, x.dim) for x in localiser.run(primal, inputs)]
    primal_with_residuals, (_, vjp_fun) = jx.trace(forward, *avals)
    outs, residuals = [], []

    # 2. Rewrite primal, forward and backward.
    def local_primal(*values: Any) -> list[Any]:
        outs[:] = localiser.run(primal, _with_values(inputs, values))
        return _values(outs)

    def local_forward(*values: Any) -> Any:
        results = localiser.run(primal_with_residuals, _with_values(inputs, values))
        n = len(eqn.outvars)
        residuals[:] = results[n:]
        # `custom_vjp` wants the same outputs of the forward as of the primal function.
        return _in_layout(localiser, results[:n], [out.dim for out in outs]), _values(residuals)

    def local_backward(residual_values: Any, cotangents: Any) -> Any:
        out_avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.outvars]
        is_float = [jnp.issubdtype(s.dtype, jnp.inexact) for s in out_avals]
        flat = _traced_vjp(vjp_fun, out_avals, is_float)
        outputs = zip(cotangents, outs, out_avals, is_float, strict=True)
        cts = [localiser.cotangent(ct, out, s.shape) for ct, out, s, on in outputs if on]
        input_cts = localiser.run(flat, [*_with_values(residuals, residual_values), *cts], linear=True)
        active_cts = dict(zip(active_indices, input_cts, strict=True))
        return tuple(
            localiser.input_cotangent(active_cts[i], x.dim) if i in active_cts else None for i, x in enumerate(inputs)
        )

    # 3. Bind them. The layout of the outputs must be known before JAX asks for any derivative.
    local_fun = jax.custom_vjp(local_primal)
    jax.eval_shape(local_primal, *_values(inputs))
    local_fun.defvjp(local_forward, local_backward)
    return [(value, out.dim) for value, out in zip(local_fun(*_values(inputs)), outs, strict=True)]


@rule("jit", "pjit")
def _kernel(localiser: Localiser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """Run a fused kernel on this rank's parts, such as its heads.

    Returns:
      The local outputs; None for an ordinary `jit`, if no input is split along a dim that the kernel names, or if the
      ranks do not divide such a dim, for instance with fewer key heads than ranks.
    """
    kernel = kernels.of(eqn)
    if kernel is None or not any(x.dim is not None and x.dim == d for x, d in zip(inputs, kernel.in_dims, strict=True)):
        return None
    atoms_and_dims = [*zip(eqn.invars, kernel.in_dims, strict=True), *zip(eqn.outvars, kernel.out_dims, strict=True)]
    if any(d is not None and v.aval.shape[d] % localiser.ranks for v, d in atoms_and_dims):
        return None
    values = [
        localiser.entered(x) if d is None else localiser.part(x, d) for x, d in zip(inputs, kernel.in_dims, strict=True)
    ]
    outs = jax.tree.leaves(kernel.fun(*values))
    # Every rank computes all of a whole result and receives all of its cotangent. `entered` sums the ranks' input
    # cotangents, so each rank must use only its share.
    return [
        (_share_cotangent(value, localiser.ranks) if d is None else value, d)
        for value, d in zip(outs, kernel.out_dims, strict=True)
    ]


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _share_cotangent(x: jax.Array, ranks: int) -> jax.Array:
    """Return `x` unchanged; its derivative divides the cotangent by the number of ranks."""
    return x


@_share_cotangent.defjvp
def _share_cotangent_jvp(ranks: int, primals: Any, tangents: Any) -> Any:
    return primals[0], (tangents[0] / ranks if jnp.issubdtype(primals[0].dtype, jnp.inexact) else tangents[0])


@rule("cond")
def _cond(localiser: Localiser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """Rewrite each branch, and bring their outputs into one layout.

    An output is split if all branches that split it agree on the dim: branches that return it whole then take their
    part. It is whole if branches disagree about the dim.

    Returns:
      The local outputs; None if ranks may take different branches, and so wait for each other in their collectives.
    """
    index, *operands = inputs
    if not localiser.is_equal_on_ranks(index):
        return None
    branches = [jx.flatten(branch) for branch in eqn.params["branches"]]
    branch_outputs: list[list[LocalValue]] = []

    # 1. Find the layout of each branch's outputs, and choose a common one.
    for flat in branches:
        jax.eval_shape(
            lambda *values, flat=flat: branch_outputs.append(localiser.run(flat, _with_values(operands, values))),
            *_values(operands),
        )
    split_dims = [{x.dim for x in outs} - {None} for outs in zip(*branch_outputs, strict=True)]
    dims = [next(iter(candidates)) if len(candidates) == 1 else None for candidates in split_dims]

    # 2. Run the branches in this layout.
    def local_branch(flat: jx.Flat) -> Callable[..., list[Any]]:
        return lambda *values: _in_layout(localiser, localiser.run(flat, _with_values(operands, values)), dims)

    values = jax.lax.switch(localiser.whole(index), [local_branch(flat) for flat in branches], *_values(operands))
    return list(zip(values, dims, strict=True))
