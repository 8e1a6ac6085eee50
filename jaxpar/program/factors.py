"""Which dims of an equation's operands and results have one index: its factors, the letters of an einsum.

    dot_general   ik, kj -> ij          i, j free;  k is summed
    cumsum        ij -> ij              i free;     j is no factor: whoever splits it needs a rule of its own
    reshape       (ij)k -> ijk          i free, as the outermost of what j is merged with

As in Shardy's OpShardingRule. A factor that is split over ranks is split in each operand and result that has it, and
the equation is the same on the parts; `params` says which parameters name sizes. One table for all who follow dims: the
rows are at the end, one for each primitive, with what else is known of it (`primitives.py`).
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .primitives import having, primitive
from .primitives import of as primitive_of
from .walk import CUSTOM, REMATS

Shape = tuple[int, ...]
Local = Callable[[Shape, int | None], Shape]  # the shape of a part, from that of the whole and the dim that is split


class Factor(NamedTuple):
    """One index.

    Attributes:
      ins: its dim in each operand; None where that has none, and is the same for all parts.
      outs: its dim in each result.
      reduced: what joins the parts of a result without it: "sum", "max", "argmax", ...; "" where they are the same.
      params: the parameters of a part that differ from those of the whole.
      grouped: the parameter that says into how many groups it is cut; each part has whole ones.
    """

    ins: tuple[int | None, ...]
    outs: tuple[int | None, ...]
    reduced: str = ""
    params: Callable[[Local], dict[str, Any]] | None = None
    grouped: str = ""


Rule = Callable[[Any], Iterable[Factor]]


def of(eqn: Any) -> list[Factor]:
    """The factors of an equation; none of a primitive that is not known."""
    rule = primitive_of(eqn).factors
    return list(rule(eqn)) if rule else []


def shapes(eqn: Any) -> tuple[list[Shape], list[Shape]]:
    """Those of operands and results."""
    ins, outs = ([tuple(getattr(v.aval, "shape", ())) for v in atoms] for atoms in (eqn.invars, eqn.outvars))
    return ins, outs


def operand(eqn: Any, dim: int, out: int | None, **options: Any) -> Factor:
    """A dim of the first operand, which no other has."""
    return Factor((dim, *[None] * (len(eqn.invars) - 1)), (out,) * len(eqn.outvars), **options)


def same(eqn: Any, but: Collection[int] = ()) -> Iterable[Factor]:
    """All operands and results of one rank, and scalars: each dim is free, `but` those that are mixed."""
    ins, outs = shapes(eqn)
    for d in range(len(outs[0])):
        size = max(s[d] for s in (*ins, *outs) if s)
        dims = [d if s and s[d] == size else None for s in (*ins, *outs)]
        if d not in but:
            yield Factor(tuple(dims[: len(ins)]), tuple(dims[len(ins) :]))


def along(*params: str) -> Rule:
    """Return a rule: the primitive mixes elements along the dims that these parameters name.

    The rule raises ValueError where an equation has none of the parameters, since another dim would be a wrong result.
    """

    def rule(eqn: Any) -> Iterable[Factor]:
        ndim = len(shapes(eqn)[0][0])
        named = [np.atleast_1d(eqn.params[name]) for name in params if name in eqn.params]
        if not named:
            raise ValueError(
                f"the rule of {eqn.primitive.name} in program/factors.py reads the dims from {' or '.join(params)}, "
                f"and the primitive has the parameters {', '.join(eqn.params) or 'none'}; name one of these in the rule"
            )
        return same(eqn, [d % ndim for dims in named for d in dims])

    return rule


def labelled(text: str) -> Rule:
    """Return a rule that letters spell, as in `jnp.einsum`: `"...k,kj->...j"`. A letter that no result has is summed
    over, `_` is a dim that is mixed, and `...` stands for any number of dims.

    The rule raises ValueError where an equation has another number of operands, results or dims.
    """
    before, _, after = text.replace(" ", "").partition("->")

    def labels(terms: str, atoms: Sequence[Any], dims: Sequence[Shape]) -> list[list[str]]:
        found = []
        for term, shape in zip(terms.split(","), dims, strict=False):
            first, dots, last = term.partition("...")
            free = len(shape) - len(first) - len(last) if dots else 0
            found.append([*first, *(f"...{n}" for n in reversed(range(free))), *last])
        if len(terms.split(",")) != len(atoms) or list(map(len, found)) != list(map(len, dims)):
            raise ValueError(
                f"the rule {text!r} says {terms!r}, and an equation has {len(atoms)} there, of shapes "
                f"{list(map(list, dims))}; a rule needs a term for each and a letter for each dim; write ... for any "
                "number of dims"
            )
        return found

    def rule(eqn: Any) -> Iterable[Factor]:
        ins, outs = map(labels, (before, after), (eqn.invars, eqn.outvars), shapes(eqn))
        at = lambda every, label: tuple(one.index(label) if label in one else None for one in every)
        for label in dict.fromkeys(label for one in (*ins, *outs) for label in one if label != "_"):
            made = at(outs, label)
            yield Factor(at(ins, label), made, "" if any(d is not None for d in made) else "sum")

    return rule


def where(param: str, none: Any) -> Rule:
    """Mixed along the dims where a parameter, which has an entry for each, says something else than `none`."""
    return lambda eqn: same(eqn, [d for d, entry in enumerate(eqn.params[param]) if entry != none])


def tiled(*params: str) -> Rule:
    """Collectives over another axis, which join or cut along the dims that parameters name."""
    return lambda eqn: along(*params)(eqn) if eqn.params["tiled"] else ()


def window(eqn: Any) -> Iterable[Factor]:
    """Windows of one element, one after another, along dims that are free."""
    every = ("window_strides", "base_dilation", "window_dilation", "window_dimensions")
    steps = zip(*(eqn.params[name] for name in every if name in eqn.params), strict=True)
    mixed = [{*step} != {1} or any(pad) for step, pad in zip(steps, eqn.params["padding"], strict=True)]
    return same(eqn, [d for d, yes in enumerate(mixed) if yes])


def rows(inside: int) -> Rule:
    """Matrices and other dims inside, which are the first operand's last ones: those before them are free, and first in
    all operands and results.
    """

    def rule(eqn: Any) -> Iterable[Factor]:
        before = range(len(shapes(eqn)[0][0]) - inside)
        return (Factor((d,) * len(eqn.invars), (d,) * len(eqn.outvars)) for d in before)

    return rule


def solve(eqn: Any) -> Iterable[Factor]:
    """One system of equations for each column of the last operand; for each row, where matrices are to its right."""
    *matrices, columns = shapes(eqn)[0]
    yield from rows(len(matrices[0]) - len(columns) + 2)(eqn)
    d = len(columns) - 1 if eqn.params.get("left_side", True) else len(columns) - 2
    yield Factor((*[None] * len(matrices), d), (d,))


def bits(eqn: Any) -> Iterable[Factor]:
    """All dims but the last one that elements of another size become, or are made of."""
    (x,), (out,) = shapes(eqn)
    return (Factor((d,), (d,)) for d in range(min(len(x), len(out))))


def broadcast(eqn: Any) -> Iterable[Factor]:
    """Dims of the result, which the operand has or has not."""
    (x, *more), (out,) = shapes(eqn)
    at = {d: i for i, d in enumerate(eqn.params["broadcast_dimensions"]) if x[i] == out[d]}
    for d in range(len(out)):
        new = lambda local, d=d: {"shape": local(out, d)}
        yield Factor((at.get(d), *[None] * len(more)), (d,), params=new)


def reshape(eqn: Any) -> Iterable[Factor]:
    """The outermost of dims that are merged, or that one becomes."""
    (x, *_), (out,) = shapes(eqn)
    if eqn.params["dimensions"] is None:
        to = {math.prod(out[:d]): d for d, n in enumerate(out) if n > 1}
        for at, n in enumerate(x):
            d = to.get(math.prod(x[:at]))
            if n > 1 and d is not None:
                yield operand(eqn, at, d, params=lambda local, d=d: {"new_sizes": local(out, d)})


def transpose(eqn: Any) -> Iterable[Factor]:
    """Each dim of the result is one of the operand."""
    return (Factor((at,), (d,)) for d, at in enumerate(eqn.params["permutation"]))


def without(param: str, reduced: str = "") -> Rule:
    """Results have not the dims that a parameter names, which are `reduced`, or no factors."""

    def rule(eqn: Any) -> Iterable[Factor]:
        ndim = len(shapes(eqn)[0][0])
        gone = {int(d) for d in np.atleast_1d(eqn.params[param])}
        left = [d for d in range(ndim) if d not in gone]
        for d in range(ndim):
            if d in left or reduced:
                yield operand(eqn, d, left.index(d) if d in left else None, reduced="" if d in left else reduced)

    return rule


def reduce(eqn: Any) -> Iterable[Factor]:
    """Arrays by a function of their own, which start with scalars: what it reduces are no factors."""
    half = len(eqn.invars) // 2
    free = without("dimensions")(eqn)
    return (Factor((f.ins[0],) * half + (None,) * half, f.outs) for f in free)


def stack(eqn: Any) -> Iterable[Factor]:
    """All but the new dim."""
    axis = eqn.params["axis"]
    dims = range(len(shapes(eqn)[0][0]))
    return (Factor((d,) * len(eqn.invars), (d + (d >= axis),)) for d in dims)


def slices(eqn: Any) -> Iterable[Factor]:
    """Dims of which all is taken."""
    ((x,), _), p = shapes(eqn), eqn.params
    ends, strides = tuple(p["limit_indices"]), p["strides"] or (1,) * len(x)
    for d, n in enumerate(x):
        if (p["start_indices"][d], ends[d], strides[d]) == (0, n, 1):
            yield Factor((d,), (d,), params=lambda local, d=d: {"limit_indices": local(ends, d)})


def dynamic_slice(eqn: Any) -> Iterable[Factor]:
    """Dims of which all is taken."""
    x, sizes = shapes(eqn)[0][0], eqn.params["slice_sizes"]
    for d, n in enumerate(x):
        if sizes[d] == n:
            yield operand(eqn, d, d, params=lambda local, d=d: {"slice_sizes": local(sizes, d)})


def dynamic_update_slice(eqn: Any) -> Iterable[Factor]:
    """Dims of which all is written."""
    x, update, *starts = shapes(eqn)[0]
    return (Factor((d, d, *[None] * len(starts)), (d,)) for d, n in enumerate(x) if update[d] == n)


def dot(eqn: Any) -> Iterable[Factor]:
    """Batch dims, those of either operand alone, in this order in the result; and those that are summed."""
    (summed, batch), (ins, _) = eqn.params["dimension_numbers"], shapes(eqn)
    yield from (Factor(pair, (None,), "sum") for pair in zip(*summed, strict=True))
    yield from (Factor(pair, (d,)) for d, pair in enumerate(zip(*batch, strict=True)))
    at = len(batch[0])
    for side in (0, 1):
        for d in range(len(ins[side])):
            if d not in (*summed[side], *batch[side]):
                yield Factor((d, None) if side == 0 else (None, d), (at,))
                at += 1


def convolution(eqn: Any) -> Iterable[Factor]:
    """Rows, features in (summed) and features out; in groups, features or rows go with those out that are theirs."""
    p, numbers = eqn.params, eqn.params["dimension_numbers"]
    of_rows, features, *_ = numbers.lhs_spec
    outputs, inputs, *_ = numbers.rhs_spec
    to_rows, to_features, *_ = numbers.out_spec
    by = next((name for name in ("feature_group_count", "batch_group_count") if p[name] > 1), "")
    if by:
        groups = of_rows if by == "batch_group_count" else features
        new = lambda local: {by: local((p[by],), 0)[0]}
        yield Factor((groups, outputs), (to_features,), params=new, grouped=by)
    else:
        yield Factor((None, outputs), (to_features,))
    if by != "batch_group_count":
        yield Factor((of_rows, None), (to_rows,))
    if by != "feature_group_count":
        yield Factor((features, inputs), (None,), "sum")


def gather(eqn: Any) -> Iterable[Factor]:
    """Rows of indices, each with what it looks up; and dims of the table that are taken whole."""
    ((table, at), (out,)), n, sizes = shapes(eqn), eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    of_rows = [d for d in range(len(out)) if d not in n.offset_dims]
    paired = dict(zip(n.start_indices_batching_dims, n.operand_batching_dims, strict=True))
    for d in range(len(at) - 1):
        own = paired.get(d)
        yield Factor((own, d), (of_rows[d],))
    whole = [d for d in range(len(table)) if d not in (*n.collapsed_slice_dims, *n.operand_batching_dims)]
    for d, to in zip(whole, n.offset_dims, strict=True):
        if sizes[d] == table[d] and d not in n.start_index_map:
            yield Factor((d, None), (to,), params=lambda local, d=d: {"slice_sizes": local(sizes, d)})


def scatter(eqn: Any) -> Iterable[Factor]:
    """Dims that are written whole, and rows of indices that write into rows of their own."""
    (x, _, new), n = shapes(eqn)[0], eqn.params["dimension_numbers"]
    kept = [d for d in range(len(x)) if d not in (*n.inserted_window_dims, *n.operand_batching_dims)]
    for d, at in zip(kept, n.update_window_dims, strict=True):
        if d not in n.scatter_dims_to_operand_dims and x[d] == new[at]:
            yield Factor((d, None, at), (d,))
    of_rows = [d for d in range(len(new)) if d not in n.update_window_dims]
    for d, at in zip(n.operand_batching_dims, n.scatter_indices_batching_dims, strict=True):
        yield Factor((d, at, of_rows[at]), (d,))


def elementwise(names: str, **known: Any) -> None:
    """Rows of elementwise primitives."""
    primitive(names, same, elementwise=True, **known)


elementwise("add add_any sub neg reduce_precision", cheap=True, linear="all", zero=True)
elementwise("convert_element_type copy", cheap=True, view=True, linear="all", zero=True)
elementwise("mul", cheap=True, linear="each", zero=True)
elementwise("div", cheap=True, linear="first")
elementwise("select_n", cheap=True, linear="cases", zero=True)
elementwise("stop_gradient", cheap=True, view=True, zero=True)
elementwise("conj imag real", cheap=True, linear="all", zero=True)
elementwise("complex", linear="all", zero=True)
elementwise("gt lt ne", cheap=True, zero=True, compares=True, scaling="none")
elementwise("eq ge is_finite le", cheap=True, compares=True, scaling="none")
elementwise("abs max min", cheap=True, zero=True, scaling="first")
elementwise("rem", cheap=True, scaling="first")
elementwise("sign", cheap=True, zero=True, scaling="none")
elementwise("atan2", zero=True, scaling="none")
elementwise("and ceil clamp erf expm1 floor log1p or round sin sqrt square tan tanh xor", cheap=True, zero=True)
elementwise("cos erfc exp exp2 integer_pow log logistic not one_minus_square pow rsqrt", cheap=True)
elementwise("asin asinh atan atanh bessel_i1e cbrt erf_inv lt_to mulhi name nextafter polynomial "
            "population_count shift_left shift_right_arithmetic shift_right_logical sinh", zero=True)  # fmt: skip
elementwise("acos acosh bessel_i0e clz cosh digamma eq_to igamma igamma_grad_a igammac le_to lgamma log2 polygamma "
            "regularized_incomplete_beta zeta")  # fmt: skip

primitive("broadcast_in_dim", broadcast, moves=True, cheap=True, view=True, linear="all")
primitive("reshape", reshape, moves=True, cheap=True, view=True, linear="all")
primitive("squeeze", without("dimensions"), moves=True, cheap=True, view=True, linear="all")
primitive("transpose", transpose, moves=True, cheap=True, linear="all")
primitive("slice", slices, moves=True, cheap=True, linear="all")
primitive("rev", along("dimensions"), moves=True, cheap=True, linear="all")
primitive("concatenate", along("dimension"), moves=True, cheap=True, linear="all")
primitive("split", along("axis"), moves=True, linear="all")
primitive("stack", stack, moves=True, linear="all")
primitive("unstack", without("axis"), moves=True, linear="all")
primitive("tile", where("reps", 1), moves=True, linear="all")
primitive("pad", where("padding_config", (0, 0, 0)), linear="all")
primitive("bitcast_convert_type", bits)
primitive("sharding_constraint", same, linear="all", identity=True)
primitive(
    "device_put layout_constraint mesh_cast pvary reduced_vary_cast reshard with_memory_space_constraint", identity=True
)
primitive("iota", cheap=True)

primitive("dynamic_slice", dynamic_slice, kernel=True, linear="first")
primitive("dynamic_update_slice", dynamic_update_slice, kernel=True)
primitive("gather", gather, kernel=True, linear="first")
primitive("scatter scatter-add scatter-sub scatter-mul scatter-min scatter-max", scatter, kernel=True)

primitive("reduce_sum", without("axes", "sum"), linear="all", reduces=True)
for _name in ("max", "min"):
    primitive(f"reduce_{_name}", without("axes", _name), reduces=True, scaling="first")
    primitive(f"arg{_name}", without("axes", f"arg{_name}"), reduces=True, scaling="none")
for _name in ("prod", "and", "or", "xor"):
    primitive(f"reduce_{_name}", without("axes", _name), reduces=True)
primitive("reduce", reduce)
primitive("cumsum", along("axis"), kernel=True, linear="all")
primitive("cummax cummin top_k", along("axis"), kernel=True, scaling="first")
primitive("cumprod cumlogsumexp", along("axis"), kernel=True)
primitive("sort", along("dimension"), kernel=True, scaling="first")
primitive("approx_top_k", along("reduction_dimension"), kernel=True)
primitive("reduce_window_sum", window, kernel=True, linear="all")
primitive("reduce_window reduce_window_max reduce_window_min", window, kernel=True)
primitive("select_and_scatter_add select_and_gather_add", window, kernel=True)

primitive("dot_general", dot, kernel=True, linear="each")
primitive("conv_general_dilated", convolution, kernel=True, linear="each")
primitive("fft", lambda eqn: rows(len(eqn.params["fft_lengths"]))(eqn), kernel=True, linear="all")
primitive("triangular_solve tridiagonal_solve", solve, kernel=True, factorises=True)
primitive("cholesky eig eigh geqp3 geqrf hessenberg householder_product lu ormqr qr schur svd symmetric_product "
          "tridiagonal", rows(2), kernel=True, factorises=True)  # fmt: skip
primitive("lu_pivots_to_permutation", rows(1), kernel=True)

primitive("all_gather", tiled("all_gather_dimension"), kernel=True)
primitive("reduce_scatter", tiled("scatter_dimension"), kernel=True)
primitive("all_to_all", tiled("split_axis", "concat_axis"), kernel=True)
primitive("ragged_dot_general", kernel=True)
primitive("random_bits", kernel=True, draws="numbers")
primitive("random_gamma rng_bit_generator threefry2x32", draws="numbers")
primitive("random_clone random_fold_in random_seed random_split random_unwrap random_wrap", draws="keys")
primitive("optimization_barrier", separate=True, identity=True)
primitive("psum pmax pmin ppermute pbroadcast", separate=True)
primitive("scan while cond", kernel=True, nested=True)
primitive(" ".join(("custom_linear_solve", *REMATS, *CUSTOM)), nested=True)

FACTORS = having("factors")
ELEMENTWISE = having("elementwise")
