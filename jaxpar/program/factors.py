"""The factors of an equation: which dims of its operands and results share one index, as the letters of an einsum do.

    dot_general   ik, kj -> ij          i, j free;  k is summed
    cumsum        ij -> ij              i free;     j is no factor: to split it takes a special rule
    reshape       (ij)k -> ijk          i free, as the outermost of the merged dims i and j

The factors are as in Shardy's OpShardingRule. A factor can be split over ranks: each rank has a part of every operand
and result with this dim, and runs the same equation on its parts. `params` adjusts the parameters that name sizes. The
rows of the table are at the end of this file, one per primitive, with its other properties (`primitives.py`).

A rule returns the factors of an equation. A dim without a factor is mixed: the elements along it depend on each other.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .primitives import having, primitive
from .primitives import of as primitive_of
from .walk import CUSTOM, REMATS

Shape = tuple[int, ...]
Local = Callable[[Shape, int | None], Shape]  # (full shape, dim that is split) -> the shape of a part


class Factor(NamedTuple):
    """One index of an equation.

    Attributes:
      ins: its dim in each operand; None if the operand does not have it, and all parts read the same operand.
      outs: its dim in each result.
      reduced: how to join the parts of a result without it: "sum", "max", "argmax", ...; "" if all parts are equal.
      params: returns the parameters of a part that differ from those of the full equation.
      grouped: the parameter that holds a number of groups along this dim; each part has full groups.
    """

    ins: tuple[int | None, ...]
    outs: tuple[int | None, ...]
    reduced: str = ""
    params: Callable[[Local], dict[str, Any]] | None = None
    grouped: str = ""


Rule = Callable[[Any], Iterable[Factor]]


def of(eqn: Any) -> list[Factor]:
    """Return the factors of an equation; an unknown primitive has none."""
    rule = primitive_of(eqn).factors
    return list(rule(eqn)) if rule else []


def shapes(eqn: Any) -> tuple[list[Shape], list[Shape]]:
    """Return the shapes of operands and of results."""
    # Tokens and other values without a shape count as scalars.
    ins, outs = ([tuple(getattr(v.aval, "shape", ())) for v in atoms] for atoms in (eqn.invars, eqn.outvars))
    return ins, outs


# ----------------------------------------------------------------------------------------------------------------------
# Rules of several primitives.


def first_operand(eqn: Any, dim: int, out_dim: int | None, **options: Any) -> Factor:
    """Return the factor of a dim that the first operand has and no other operand."""
    return Factor((dim, *[None] * (len(eqn.invars) - 1)), (out_dim,) * len(eqn.outvars), **options)


def aligned(eqn: Any, mixed: Collection[int] = ()) -> Iterable[Factor]:
    """Yield a factor for each dim d that is dim d of all operands and results; operands may be scalars.

    Args:
      mixed: dims without a factor.
    """
    ins, outs = shapes(eqn)
    for d in range(len(outs[0])):
        # An operand of size 1 is broadcast along d, and does not have the factor.
        size = max(s[d] for s in (*ins, *outs) if s)
        dims = [d if s and s[d] == size else None for s in (*ins, *outs)]
        if d not in mixed:
            yield Factor(tuple(dims[: len(ins)]), tuple(dims[len(ins) :]))


def along(*params: str) -> Rule:
    """Return a rule for a primitive that mixes elements along the dims that these parameters name.

    The rule raises ValueError if an equation has none of the parameters: a wrong dim would give wrong results.
    """

    def rule(eqn: Any) -> Iterable[Factor]:
        ndim = len(shapes(eqn)[0][0])
        named_dims = [np.atleast_1d(eqn.params[name]) for name in params if name in eqn.params]
        if not named_dims:
            raise ValueError(
                f"the rule of {eqn.primitive.name} in program/factors.py reads the dims from {' or '.join(params)}, "
                f"and the primitive has the parameters {', '.join(eqn.params) or 'none'}; name one of these in the rule"
            )
        return aligned(eqn, [d % ndim for dims in named_dims for d in dims])

    return rule


def labelled(text: str) -> Rule:
    """Return the rule that letters spell, as in `jnp.einsum`: `"...k,kj->...j"`.

    A letter that no result has is summed over, `_` is a dim that is mixed, and `...` stands for any number of dims.

    The rule raises ValueError if an equation has another number of operands, results or dims.
    """
    in_text, _, out_text = text.replace(" ", "").partition("->")

    def labels(terms: str, atoms: Sequence[Any], atom_shapes: Sequence[Shape]) -> list[list[str]]:
        """Return the label of each dim of each atom; the dims of `...` are numbered from the last one."""
        labels_of_atoms = []
        for term, shape in zip(terms.split(","), atom_shapes, strict=False):
            first, dots, last = term.partition("...")
            num_free = len(shape) - len(first) - len(last) if dots else 0
            labels_of_atoms.append([*first, *(f"...{n}" for n in reversed(range(num_free))), *last])
        if len(terms.split(",")) != len(atoms) or list(map(len, labels_of_atoms)) != list(map(len, atom_shapes)):
            raise ValueError(
                f"the rule {text!r} says {terms!r} where an equation has arrays of shapes "
                f"{list(map(list, atom_shapes))}; a rule needs a term for each array and a letter for each dim; write "
                "... for any number of dims"
            )
        return labels_of_atoms

    def rule(eqn: Any) -> Iterable[Factor]:
        ins, outs = map(labels, (in_text, out_text), (eqn.invars, eqn.outvars), shapes(eqn))
        # A label that a term lacks has no dim there: every part takes this operand as it is.
        dims_of = lambda atoms, label: tuple(names.index(label) if label in names else None for names in atoms)
        for label in dict.fromkeys(label for names in (*ins, *outs) for label in names if label != "_"):
            out_dims = dims_of(outs, label)
            yield Factor(dims_of(ins, label), out_dims, "" if any(d is not None for d in out_dims) else "sum")

    return rule


def neutral_at(param: str, neutral: Any) -> Rule:
    """Return a rule: a dim is mixed if its entry of a parameter is not `neutral`, which leaves the dim unchanged."""
    return lambda eqn: aligned(eqn, [d for d, entry in enumerate(eqn.params[param]) if entry != neutral])


def tiled(*params: str) -> Rule:
    """Return a rule for a collective over another axis, which joins or cuts along the dims that parameters name."""
    # Without `tiled` the collective adds or removes a dim, and the results are not aligned with the operand.
    return lambda eqn: along(*params)(eqn) if eqn.params["tiled"] else ()


def window(eqn: Any) -> Iterable[Factor]:
    """Return the factors of dims whose windows hold one element each: along the others, neighbours are mixed."""
    names = ("window_strides", "base_dilation", "window_dilation", "window_dimensions")
    sizes_of_dims = zip(*(eqn.params[name] for name in names if name in eqn.params), strict=True)
    is_mixed = [{*sizes} != {1} or any(pad) for sizes, pad in zip(sizes_of_dims, eqn.params["padding"], strict=True)]
    return aligned(eqn, [d for d, mixed in enumerate(is_mixed) if mixed])


def batched(inner_dims: int) -> Rule:
    """Return a rule for functions of the last `inner_dims` dims of the first operand, such as matrices.

    The dims before them are free, and come first in all operands and results.
    """

    def rule(eqn: Any) -> Iterable[Factor]:
        batch_dims = range(len(shapes(eqn)[0][0]) - inner_dims)
        return (Factor((d,) * len(eqn.invars), (d,) * len(eqn.outvars)) for d in batch_dims)

    return rule


# ----------------------------------------------------------------------------------------------------------------------
# Rules of one primitive or a few.


def solve(eqn: Any) -> Iterable[Factor]:
    """Yield the factors of linear systems: batch dims, and the dim of right-hand sides.

    There is a system for each column of the last operand, and for each row if the matrices are to its right.
    """
    *matrices, columns = shapes(eqn)[0]
    yield from batched(len(matrices[0]) - len(columns) + 2)(eqn)
    d = len(columns) - 1 if eqn.params.get("left_side", True) else len(columns) - 2
    yield Factor((*[None] * len(matrices), d), (d,))


def bits(eqn: Any) -> Iterable[Factor]:
    """Return the factors of a cast by bits: all dims but the last one that a change of element size adds or removes."""
    (x,), (out,) = shapes(eqn)
    return (Factor((d,), (d,)) for d in range(min(len(x), len(out))))


def broadcast(eqn: Any) -> Iterable[Factor]:
    """Yield the dims of the result; the operand has those that are not broadcast."""
    (x, *sizes), (out,) = shapes(eqn)
    # A dim of size 1 that grows is not cut with the result.
    in_dim = {d: i for i, d in enumerate(eqn.params["broadcast_dimensions"]) if x[i] == out[d]}
    for d in range(len(out)):
        part_params = lambda local, d=d: {"shape": local(out, d)}
        yield Factor((in_dim.get(d), *[None] * len(sizes)), (d,), params=part_params)


def reshape(eqn: Any) -> Iterable[Factor]:
    """Yield dims that stay, and the outermost dim of a merge or a split of dims."""
    (x, *_), (out,) = shapes(eqn)
    if eqn.params["dimensions"] is None:
        # Two dims start at the same place if the dims before them have as many elements together.
        dim_at_offset = {math.prod(out[:d]): d for d, n in enumerate(out) if n > 1}
        for in_dim, n in enumerate(x):
            d = dim_at_offset.get(math.prod(x[:in_dim]))
            if n > 1 and d is not None:
                yield first_operand(eqn, in_dim, d, params=lambda local, d=d: {"new_sizes": local(out, d)})


def transpose(eqn: Any) -> Iterable[Factor]:
    """Return a factor for each dim of the result, which is a dim of the operand."""
    return (Factor((in_dim,), (d,)) for d, in_dim in enumerate(eqn.params["permutation"]))


def dropped(param: str, reduced: str = "") -> Rule:
    """Return a rule for results without the dims that a parameter names.

    Args:
      param: the parameter that names the dims.
      reduced: how parts of a result are joined if a dropped dim is split; "" if dropped dims have no factor.
    """

    def rule(eqn: Any) -> Iterable[Factor]:
        ndim = len(shapes(eqn)[0][0])
        dropped_dims = {int(d) for d in np.atleast_1d(eqn.params[param])}
        out_dims = [d for d in range(ndim) if d not in dropped_dims]
        for d in range(ndim):
            if d in out_dims or reduced:
                out_dim = out_dims.index(d) if d in out_dims else None
                yield first_operand(eqn, d, out_dim, reduced="" if d in out_dims else reduced)

    return rule


def reduce(eqn: Any) -> Iterable[Factor]:
    """Return the free dims of a reduction by the user's function, whose last operands are scalars to start from.

    Reduced dims have no factor: it is unknown how to join the parts.
    """
    # The operands are arrays, and then as many scalars.
    half = len(eqn.invars) // 2
    free_factors = dropped("dimensions")(eqn)
    return (Factor((f.ins[0],) * half + (None,) * half, f.outs) for f in free_factors)


def stack(eqn: Any) -> Iterable[Factor]:
    """Return a factor for all dims but the new one."""
    axis = eqn.params["axis"]
    dims = range(len(shapes(eqn)[0][0]))
    return (Factor((d,) * len(eqn.invars), (d + (d >= axis),)) for d in dims)


def slices(eqn: Any) -> Iterable[Factor]:
    """Yield the dims that are not cut."""
    ((x,), _), p = shapes(eqn), eqn.params
    ends, strides = tuple(p["limit_indices"]), p["strides"] or (1,) * len(x)
    # A slice of the full dim also has its size as a parameter, which a part changes.
    for d, n in enumerate(x):
        if (p["start_indices"][d], ends[d], strides[d]) == (0, n, 1):
            yield Factor((d,), (d,), params=lambda local, d=d: {"limit_indices": local(ends, d)})


def dynamic_slice(eqn: Any) -> Iterable[Factor]:
    """Yield the dims that are not cut."""
    x, sizes = shapes(eqn)[0][0], eqn.params["slice_sizes"]
    for d, n in enumerate(x):
        if sizes[d] == n:
            yield first_operand(eqn, d, d, params=lambda local, d=d: {"slice_sizes": local(sizes, d)})


def dynamic_update_slice(eqn: Any) -> Iterable[Factor]:
    """Return the dims along which the update is as long as the array."""
    x, update, *starts = shapes(eqn)[0]
    return (Factor((d, d, *[None] * len(starts)), (d,)) for d, n in enumerate(x) if update[d] == n)


def dot(eqn: Any) -> Iterable[Factor]:
    """Yield the summed dims, the batch dims, and the dims that one operand alone has."""
    (summed, batch), (ins, _) = eqn.params["dimension_numbers"], shapes(eqn)
    yield from (Factor(pair, (None,), "sum") for pair in zip(*summed, strict=True))
    yield from (Factor(pair, (d,)) for d, pair in enumerate(zip(*batch, strict=True)))
    # The result's dims are the batch dims, then the left operand's free dims, then the right one's.
    out_dim = len(batch[0])
    for side in (0, 1):
        for d in range(len(ins[side])):
            if d not in (*summed[side], *batch[side]):
                yield Factor((d, None) if side == 0 else (None, d), (out_dim,))
                out_dim += 1


def convolution(eqn: Any) -> Iterable[Factor]:
    """Yield rows, input features, which are summed, and output features; spatial dims have no factor.

    In a grouped convolution, a group of input features (or of rows) goes with a group of output features, so that both
    are one factor.
    """
    p, numbers = eqn.params, eqn.params["dimension_numbers"]
    x_rows, x_features, *_ = numbers.lhs_spec
    kernel_outputs, kernel_inputs, *_ = numbers.rhs_spec
    out_rows, out_features, *_ = numbers.out_spec
    group_param = next((name for name in ("feature_group_count", "batch_group_count") if p[name] > 1), "")
    if group_param:
        group_dim = x_rows if group_param == "batch_group_count" else x_features
        # A part has whole groups, so that their number is a size, which is cut too.
        part_params = lambda local: {group_param: local((p[group_param],), 0)[0]}
        yield Factor((group_dim, kernel_outputs), (out_features,), params=part_params, grouped=group_param)
    else:
        yield Factor((None, kernel_outputs), (out_features,))
    if group_param != "batch_group_count":
        yield Factor((x_rows, None), (out_rows,))
    if group_param != "feature_group_count":
        yield Factor((x_features, kernel_inputs), (None,), "sum")


def gather(eqn: Any) -> Iterable[Factor]:
    """Yield the dims of the indices, each with the rows that it looks up; and the table's dims that are not cut."""
    ((table, indices), (out,)), n, sizes = shapes(eqn), eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    row_dims = [d for d in range(len(out)) if d not in n.offset_dims]
    paired = dict(zip(n.start_indices_batching_dims, n.operand_batching_dims, strict=True))
    # The last dim of the indices holds the coordinates of one lookup.
    for d in range(len(indices) - 1):
        table_dim = paired.get(d)
        yield Factor((table_dim, d), (row_dims[d],))
    slice_dims = [d for d in range(len(table)) if d not in (*n.collapsed_slice_dims, *n.operand_batching_dims)]
    for d, out_dim in zip(slice_dims, n.offset_dims, strict=True):
        # A dim that is looked up cannot be split: an index may point into another rank's part.
        if sizes[d] == table[d] and d not in n.start_index_map:
            yield Factor((d, None), (out_dim,), params=lambda local, d=d: {"slice_sizes": local(sizes, d)})


def scatter(eqn: Any) -> Iterable[Factor]:
    """Yield the dims that updates cover, and the batch dims: rows of indices that write into their own rows."""
    (x, _, updates), n = shapes(eqn)[0], eqn.params["dimension_numbers"]
    window_dims = [d for d in range(len(x)) if d not in (*n.inserted_window_dims, *n.operand_batching_dims)]
    for d, update_dim in zip(window_dims, n.update_window_dims, strict=True):
        if d not in n.scatter_dims_to_operand_dims and x[d] == updates[update_dim]:
            yield Factor((d, None, update_dim), (d,))
    row_dims = [d for d in range(len(updates)) if d not in n.update_window_dims]
    for d, index_dim in zip(n.operand_batching_dims, n.scatter_indices_batching_dims, strict=True):
        yield Factor((d, index_dim, row_dims[index_dim]), (d,))


# ----------------------------------------------------------------------------------------------------------------------
# The table.


def elementwise(names: str, **properties: Any) -> None:
    """Add the rows of elementwise primitives, whose names are separated by spaces."""
    primitive(names, aligned, elementwise=True, **properties)


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

# Elements move, and no value changes.
primitive("broadcast_in_dim", broadcast, moves=True, cheap=True, view=True, linear="all")
primitive("reshape", reshape, moves=True, cheap=True, view=True, linear="all")
primitive("squeeze", dropped("dimensions"), moves=True, cheap=True, view=True, linear="all")
primitive("transpose", transpose, moves=True, cheap=True, linear="all")
primitive("slice", slices, moves=True, cheap=True, linear="all")
primitive("rev", along("dimensions"), moves=True, cheap=True, linear="all")
primitive("concatenate", along("dimension"), moves=True, cheap=True, linear="all")
primitive("split", along("axis"), moves=True, linear="all")
primitive("stack", stack, moves=True, linear="all")
primitive("unstack", dropped("axis"), moves=True, linear="all")
primitive("tile", neutral_at("reps", 1), moves=True, linear="all")
primitive("pad", neutral_at("padding_config", (0, 0, 0)), linear="all")
primitive("bitcast_convert_type", bits)
primitive("sharding_constraint", aligned, linear="all", identity=True)
primitive(
    "device_put layout_constraint mesh_cast pvary reduced_vary_cast reshard with_memory_space_constraint", identity=True
)
primitive("iota", cheap=True)

# Lookups and writes at indices.
primitive("dynamic_slice", dynamic_slice, kernel=True, linear="first")
primitive("dynamic_update_slice", dynamic_update_slice, kernel=True)
primitive("gather", gather, kernel=True, linear="first")
primitive("scatter scatter-add scatter-sub scatter-mul scatter-min scatter-max", scatter, kernel=True)

# Reductions, scans along a dim, sorts and windows.
primitive("reduce_sum", dropped("axes", "sum"), linear="all", reduces=True)
for _name in ("max", "min"):
    primitive(f"reduce_{_name}", dropped("axes", _name), reduces=True, scaling="first")
    primitive(f"arg{_name}", dropped("axes", f"arg{_name}"), reduces=True, scaling="none")
for _name in ("prod", "and", "or", "xor"):
    primitive(f"reduce_{_name}", dropped("axes", _name), reduces=True)
primitive("reduce", reduce)
primitive("cumsum", along("axis"), kernel=True, linear="all")
primitive("cummax cummin top_k", along("axis"), kernel=True, scaling="first")
primitive("cumprod cumlogsumexp", along("axis"), kernel=True)
primitive("sort", along("dimension"), kernel=True, scaling="first")
primitive("approx_top_k", along("reduction_dimension"), kernel=True)
primitive("reduce_window_sum", window, kernel=True, linear="all")
primitive("reduce_window reduce_window_max reduce_window_min", window, kernel=True)
primitive("select_and_scatter_add select_and_gather_add", window, kernel=True)

# Products and factorisations of matrices.
primitive("dot_general", dot, kernel=True, linear="each")
primitive("conv_general_dilated", convolution, kernel=True, linear="each")
primitive("fft", lambda eqn: batched(len(eqn.params["fft_lengths"]))(eqn), kernel=True, linear="all")
primitive("triangular_solve tridiagonal_solve", solve, kernel=True, factorises=True)
primitive("cholesky eig eigh geqp3 geqrf hessenberg householder_product lu ormqr qr schur svd symmetric_product "
          "tridiagonal", batched(2), kernel=True, factorises=True)  # fmt: skip
primitive("lu_pivots_to_permutation", batched(1), kernel=True)

# Collectives, random numbers, and programs within equations.
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
