"""Which dims of an equation's operands and results have one index: its factors, the letters of an einsum.

    dot_general   ik, kj -> ij          i, j free;  k is summed
    cumsum        ij -> ij              i free;     j is no factor: whoever splits it needs a rule of its own
    reshape       (ij)k -> ijk          i free, as the outermost of what j is merged with

As in Shardy's OpShardingRule. A factor that is split over ranks is split in each operand and result that has it, and
the equation is the same on the parts; `params` says which parameters name sizes. One table for all who follow dims.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

# Elementwise, of operands of one shape, or with 1 in its place, or scalars.
ELEMENTWISE = """
abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex conj
convert_element_type copy cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a
igammac imag integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min mul mulhi name ne neg
nextafter not one_minus_square or polygamma population_count pow real reduce_precision regularized_incomplete_beta rem
round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub
tan tanh xor zeta
""".split()

Shape = tuple[int, ...]
Local = Callable[[Shape, int | None], Shape]  # the shape of a part, from that of the whole and the dim that is split


class Factor(NamedTuple):
    """One index: its dim in each operand and result (None where that has none), what becomes of it in a result that
    lacks it ("sum", "max", ...; "" for no such thing), how parameters name sizes of parts, and which parameter says
    into how many groups it is cut (each part has whole ones).
    """

    ins: tuple[int | None, ...]
    outs: tuple[int | None, ...]
    reduced: str = ""
    params: Callable[[Local], dict[str, Any]] | None = None
    grouped: str = ""


Rule = Callable[[Any], Iterator[Factor]]
FACTORS: dict[str, Rule] = {}


def of(eqn: Any) -> list[Factor]:
    """The factors of an equation; none of a primitive that is not known."""
    found = FACTORS.get(eqn.primitive.name)
    return list(found(eqn)) if found else []


def factor(*names: str) -> Callable[[Rule], Rule]:
    """Registers the factors of some primitives."""
    return lambda fun: FACTORS.update(dict.fromkeys(names, fun)) or fun


def shapes(eqn: Any) -> tuple[list[Shape], list[Shape]]:
    """Those of operands and results."""
    of = lambda atoms: [tuple(getattr(v.aval, "shape", ())) for v in atoms]
    return of(eqn.invars), of(eqn.outvars)


def _same(eqn: Any, but: Sequence[int] = (), **params: Any) -> Iterator[Factor]:
    """All operands and results of one rank, and scalars: each dim by itself, `but` those that are mixed."""
    ins, outs = shapes(eqn)
    sizes = [max(s[d] for s in (*ins, *outs) if s) for d in range(len(outs[0]))]
    has = lambda s, d: d if s and (s[d] != 1 or sizes[d] == 1) else None
    for d in range(len(outs[0])):
        if d not in but:
            yield Factor(tuple(has(s, d) for s in ins), tuple(has(s, d) for s in outs), **params)


factor(*ELEMENTWISE, "sharding_constraint")(_same)


@factor("bitcast_convert_type")
def _bits(eqn: Any) -> Iterator[Factor]:
    """All dims but the one that an element of another size becomes, or is made of."""
    (x,), (out,) = shapes(eqn)
    return (Factor((d,), (d,)) for d in range(min(len(x), len(out))))


factor("concatenate")(lambda e: _same(e, [e.params["dimension"]]))
factor("tile")(lambda e: _same(e, [d for d, n in enumerate(e.params["reps"]) if n != 1]))
factor("pad")(lambda e: _same(e, [d for d, c in enumerate(e.params["padding_config"]) if tuple(c) != (0, 0, 0)]))
factor("rev")(lambda e: _same(e, e.params["dimensions"]))
factor("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "split")(lambda e: _same(e, [e.params["axis"]]))
factor("sort")(lambda e: _same(e, [e.params["dimension"]]))
factor("top_k")(lambda e: _same(e, [e.params.get("axis", e.invars[0].aval.ndim - 1) % e.invars[0].aval.ndim]))


@factor("fft", "cholesky", "eig", "eigh", "geqrf", "householder_product", "lu", "lu_pivots_to_permutation", "qr",
        "schur", "svd", "triangular_solve", "tridiagonal", "tridiagonal_solve")  # fmt: skip
def _matrices(eqn: Any) -> Iterator[Factor]:
    """The last dims are those of a transform or a matrix; those before them are free, in results of fewer dims too."""
    p, name, ndim = eqn.params, eqn.primitive.name, eqn.invars[0].aval.ndim
    inside = len(p["fft_lengths"]) if name == "fft" else 1 if name == "lu_pivots_to_permutation" else 2
    for d in range(ndim - inside):
        yield Factor((d,) * len(eqn.invars), (d,) * len(eqn.outvars))


factor("approx_top_k")(lambda e: _same(e, [e.params["reduction_dimension"] % e.invars[0].aval.ndim]))


@factor("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min", "select_and_scatter_add",
        "select_and_gather_add")  # fmt: skip
def _window(eqn: Any) -> Iterator[Factor]:
    p = eqn.params
    stretched = [s for k in ("window_strides", "base_dilation", "window_dilation") if (s := p.get(k))]
    sizes = zip(p["window_dimensions"], p["padding"], *stretched, strict=True)
    return _same(
        eqn, [d for d, (n, pad, *steps) in enumerate(sizes) if n != 1 or tuple(pad) != (0, 0) or {*steps} - {1}]
    )


@factor("all_gather", "reduce_scatter", "all_to_all")
def _collective(eqn: Any) -> Iterator[Factor]:
    names = ("all_gather_dimension", "scatter_dimension", "split_axis", "concat_axis")
    return _same(eqn, [eqn.params[k] for k in names if k in eqn.params]) if eqn.params["tiled"] else iter(())


# -- shape -------------------------------------------------------------------------------------------------------------


@factor("broadcast_in_dim")
def _broadcast(eqn: Any) -> Iterator[Factor]:
    (x, *more), (out,) = shapes(eqn)
    dims = eqn.params["broadcast_dimensions"]
    for d, n in enumerate(out):
        at = dims.index(d) if d in dims else None
        at = None if at is not None and x[at] != n else at
        yield Factor((at, *[None] * len(more)), (d,), params=lambda local, d=d: {"shape": local(out, d)})


@factor("reshape")
def _reshape(eqn: Any) -> Iterator[Factor]:
    (x, *more), (out,) = shapes(eqn)
    if eqn.params["dimensions"] is None:
        for at, n in enumerate(x):
            same = [d for d, m in enumerate(out) if m > 1 and math.prod(out[:d]) == math.prod(x[:at])]
            if n > 1 and len(same) == 1:
                (d,) = same
                yield Factor((at, *[None] * len(more)), (d,), params=lambda local, d=d: {"new_sizes": local(out, d)})


@factor("transpose")
def _transpose(eqn: Any) -> Iterator[Factor]:
    return (Factor((at,), (d,)) for d, at in enumerate(eqn.params["permutation"]))


def _without(eqn: Any, gone: Sequence[int], reduced: str = "") -> Iterator[Factor]:
    """One operand, results without some of its dims."""
    left = iter(range(len(shapes(eqn)[0][0])))
    for d in range(len(shapes(eqn)[0][0])):
        if d not in gone:
            yield Factor((d,), (next(left),) * len(eqn.outvars))
        elif reduced:
            yield Factor((d,), (None,) * len(eqn.outvars), reduced)


factor("squeeze")(lambda e: _without(e, e.params["dimensions"]))
factor("unstack")(lambda e: _without(e, [e.params["axis"]]))
factor("argmax", "argmin")(lambda e: _without(e, e.params["axes"], e.primitive.name))
factor(*(f"reduce_{how}" for how in ("sum", "max", "min", "prod", "and", "or", "xor")))(
    lambda e: _without(e, e.params["axes"], e.primitive.name.removeprefix("reduce_"))
)


@factor("stack")
def _stack(eqn: Any) -> Iterator[Factor]:
    ins, axis = shapes(eqn)[0], eqn.params["axis"]
    return (Factor((d,) * len(ins), (d + (d >= axis),)) for d in range(len(ins[0])))


@factor("slice")
def _slice(eqn: Any) -> Iterator[Factor]:
    ((x,), _), p = shapes(eqn), eqn.params
    cut = zip(p["start_indices"], p["limit_indices"], p["strides"] or (1,) * len(x), x, strict=True)
    every = [d for d, (start, end, stride, n) in enumerate(cut) if (start, end, stride) == (0, n, 1)]
    ends = lambda part: tuple(part[d] if d in every else n for d, n in enumerate(p["limit_indices"]))
    return (Factor((d,), (d,), params=lambda local, d=d: {"limit_indices": ends(local(x, d))}) for d in every)


@factor("dynamic_slice")
def _dynamic_slice(eqn: Any) -> Iterator[Factor]:
    (x, *starts), _ = shapes(eqn)
    sizes = eqn.params["slice_sizes"]
    for d, n in enumerate(x):
        if sizes[d] == n:
            yield Factor((d, *[None] * len(starts)), (d,), params=lambda local, d=d: {"slice_sizes": local(sizes, d)})


@factor("dynamic_update_slice")
def _dynamic_update_slice(eqn: Any) -> Iterator[Factor]:
    x, update, *starts = shapes(eqn)[0]
    return (Factor((d, d, *[None] * len(starts)), (d,)) for d, n in enumerate(x) if update[d] == n)


# -- sums --------------------------------------------------------------------------------------------------------------


@factor("dot_general")
def _dot(eqn: Any) -> Iterator[Factor]:
    (summed, batch), (ins, _) = eqn.params["dimension_numbers"], shapes(eqn)
    yield from (Factor(pair, (None,), "sum") for pair in zip(*summed, strict=True))
    yield from (Factor(pair, (d,)) for d, pair in enumerate(zip(*batch, strict=True)))
    at = len(batch[0])
    for side in (0, 1):
        for d in range(len(ins[side])):
            if d not in (*summed[side], *batch[side]):
                yield Factor((d, None) if side == 0 else (None, d), (at,))
                at += 1


@factor("conv_general_dilated")
def _convolution(eqn: Any) -> Iterator[Factor]:
    p, (rows, features, *_), (outputs, inputs, *_) = (n := eqn.params["dimension_numbers"]) and (
        eqn.params,
        n.lhs_spec,
        n.rhs_spec,
    )
    to = n.out_spec
    by = next((k for k in ("feature_group_count", "batch_group_count") if p[k] > 1), "")
    if by:
        new = lambda local: {by: local((p[by],), 0)[0]}
        yield Factor((rows if by == "batch_group_count" else features, outputs), (to[1],), params=new, grouped=by)
    else:
        yield Factor((None, outputs), (to[1],))
    if by != "batch_group_count":
        yield Factor((rows, None), (to[0],))
    if by != "feature_group_count":
        yield Factor((features, inputs), (None,), "sum")


@factor("gather")
def _gather(eqn: Any) -> Iterator[Factor]:
    ((table, at), (out,)), n, sizes = shapes(eqn), eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    batch = [d for d in range(len(out)) if d not in n.offset_dims]
    paired = dict(zip(n.start_indices_batching_dims, n.operand_batching_dims, strict=True))
    new = lambda local, d: {"slice_sizes": local(sizes, d)}
    for d in range(len(at) - 1):  # a row of indices, and of what is looked up in its own part of the table
        yield Factor((paired.get(d), d), (batch[d],))
    whole = [d for d in range(len(table)) if d not in (*n.collapsed_slice_dims, *n.operand_batching_dims)]
    for d, to in zip(whole, n.offset_dims, strict=True):
        if sizes[d] == table[d] and d not in n.start_index_map:
            yield Factor((d, None), (to,), params=lambda local, d=d: new(local, d))


@factor("scatter", *(f"scatter-{how}" for how in ("add", "sub", "mul", "min", "max")))
def _scatter(eqn: Any) -> Iterator[Factor]:
    (x, _, new), n = shapes(eqn)[0], eqn.params["dimension_numbers"]
    kept = [d for d in range(len(x)) if d not in (*n.inserted_window_dims, *n.operand_batching_dims)]
    for d, at in zip(kept, n.update_window_dims, strict=True):
        if d not in n.scatter_dims_to_operand_dims and x[d] == new[at]:
            yield Factor((d, None, at), (d,))
