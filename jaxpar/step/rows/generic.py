"""The rule of every equation that has no other rule, by its factors: the dims of operands and results of one index.

A factor is an index, as a letter of an einsum. `FactorSpace` gives operands and results one dim for each factor:

    ik, kj -> ij      factors i, j, k      labels of operand 0  [i, 1, k]      of operand 1  [1, j, k]

There the row labels of all operands must be equal. Then, for each factor along which rows differ:

- it has a dim in the result: the result is rows, with the labels of that dim;
- it is summed: the result is a sum over rows;
- it is reduced otherwise, or the dim is no factor: the equation mixes rows, and the result is coupled.

Values that are coupled have a rule at the end of this file, since some of them come apart again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...program import factors, primitives
from ...program import jaxpr as jx
from ...program.primitives import PRIMITIVES
from .labels import Labels, move_dims
from .numbers import computed_numbers
from .reader import Reader, input_shapes, output_shape, rule
from .values import (
    ADVISE_ALL_ROWS,
    ADVISE_GATHER,
    FINE_IF_UNDONE,
    FUNCTION_OF_BLOCK_SIZE,
    PICKS_ROWS,
    TAKES_SOME_ROWS,
    UNKNOWN_POWER,
    Note,
    Value,
    coupled,
    coupled_with_other_rows,
    first_pick_note,
    nonlinear_in_sum,
    position_notes,
    row_groups_note,
)

# Primitives that are linear in all operands together, indices aside.
LINEAR = {name for name, record in PRIMITIVES.items() if record.linear not in ("", "each") and name != "div"}
LINEAR |= {"dynamic_update_slice", "scatter", "scatter-add", "stop_gradient"}
# Primitives that are linear in each operand while the others stay fixed.
PRODUCTS = {name for name, record in PRIMITIVES.items() if record.linear == "each"}
# Primitives, other than comparisons, that may do nothing to small integers.
_BOUNDS = {"and", "clamp", "convert_element_type", "div", "floor", "max", "min", "rem", "round", "sign"}
# What messages say that a primitive does, up to the object "over rows"; see `_action`.
_ACTIONS = {"fft": "takes a Fourier transform", "reduce_max": "takes the maximum", "reduce_min": "takes the minimum"}
_ACTIONS |= {"approx_top_k": "applies sort", "reduce_or": "applies any", "reduce_and": "applies all"}
_INVERSE_TRANSFORMS = (jax.lax.FftType.IFFT, jax.lax.FftType.IRFFT)


class FactorSpace:
    """The index space of an equation, with one dim for each of its factors.

    Attributes:
      factors: the factors, in order.
      sizes: the size of each factor.
      ins: for each dim of each operand, the index of its factor; None if the dim is no factor.
      outs: for each result and factor, the dim of that factor in the result; None if it has none.
    """

    def __init__(self, eqn: Any) -> None:
        self.eqn, self.factors = eqn, factors.of(eqn)
        in_shapes, out_shapes = factors.shapes(eqn)
        factor_of_dim = lambda k, d: next((i for i, f in enumerate(self.factors) if f.ins[k] == d), None)
        self.ins = [[factor_of_dim(k, d) for d in range(len(s))] for k, s in enumerate(in_shapes)]
        self.outs = [[f.outs[j] for f in self.factors] for j in range(len(eqn.outvars))]
        # An operand may have size 1 along a factor, to be broadcast.
        dims = lambda f: zip((*in_shapes, *out_shapes), (*f.ins, *f.outs), strict=True)
        size = lambda f: max(shape[d] for shape, d in dims(f) if d is not None)
        self.sizes = [eqn.params[f.grouped] if f.grouped else size(f) for f in self.factors]

    def to_factors(self, k: int, labels: np.ndarray) -> np.ndarray | None:
        """Return the row labels of operand `k` with one dim for each factor.

        Returns None if labels differ along a dim that is no factor, or within one group of a grouped factor.
        """
        for d, i in enumerate(self.ins[k]):
            if (n := labels.shape[d]) > 1:
                if i is None:
                    return None
                # The group size is 1, except in a grouped convolution: there the factor numbers the groups.
                all_labels, group_size = labels, n // self.sizes[i]
                labels = all_labels.take(range(0, n, group_size), d)
                if not np.array_equal(labels.repeat(group_size, d), all_labels):
                    return None
        return move_dims(labels, self.ins[k], len(self.factors))

    def to_result(self, j: int, labels: np.ndarray) -> np.ndarray:
        """Return row labels with one dim for each factor as labels of result `j`."""
        shape = output_shape(self.eqn, j)
        labels = move_dims(labels, self.outs[j], len(shape))
        for d, n in enumerate(shape):
            if labels.shape[d] not in (1, n):  # a dim of groups: each group has one label
                labels = np.repeat(labels, n // labels.shape[d], axis=d)
        return labels

    def whole_operand(self, k: int, x: Value) -> Value:
        """Return whole operand `k` with the dims of the factors; its number stays if the dims are the same."""
        factor_of_dim = self.ins[k]
        has_same_dims = x.scalar is not None or factor_of_dim == [*range(len(self.factors))]
        varying_dims = frozenset(i for d in x.varying_dims if (i := factor_of_dim[d]) is not None)
        return replace(x, varying_dims=varying_dims, number=x.number if has_same_dims else None)

    def result(self, reader: Reader, j: int, x: Value) -> Value:
        """Return rows, with the dims of the factors, as the value of result `j`."""
        name, reduced = self.eqn.primitive.name, [i for i in x.labels.dims if self.outs[j][i] is None]
        reductions = {self.factors[i].reduced for i in reduced}
        if not reduced:
            return replace(x, labels=Labels(self.to_result(j, x.labels.array)))
        if x.is_routed and not x.num_places:
            message = f"applies {name} over the tokens of an expert, which belong to many rows; {ADVISE_ALL_ROWS}"
            return coupled([x], Note.of_eqn(self.eqn, message))
        if reductions != {"sum"}:
            return coupled([x], Note.of_eqn(self.eqn, f"{_action(name)} over rows; {ADVISE_ALL_ROWS}"))
        if not x.covers_equally(reader.rows_per_block):
            # Sums over some rows each may add up to a sum over all: remember which rows this one has.
            partial_sum = coupled([x], x.pick_note or row_groups_note(self.eqn))
            return replace(partial_sum, summed_rows=frozenset() if x.is_routed else frozenset(x.labels.array.flat))
        varying_dims = frozenset(d for i in x.order.dims if (d := self.outs[j][i]) is not None)
        return Value("sum", power=x.power, varying_dims=varying_dims, pick_note=x.pick_note, notes=x.notes)


@rule("")
def generic(reader: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> list[Value]:
    """Return the values of an equation's results by its factors; the rule of primitives without another rule."""
    space, name, results = FactorSpace(eqn), eqn.primitive.name, range(len(eqn.outvars))
    for_all_results = lambda x: [x] * len(results)
    rows = {k: x for k, x in enumerate(ins) if x.kind == "rows"}
    if any(x.kind == "sum" for x in ins):
        return _of_sums(reader, eqn, twin, ins, space)
    if not rows:
        return [_of_whole(reader, eqn, twin, ins, space, j) for j in results]
    has_mean = any(x.has_mean for x in rows.values())
    if has_mean and name not in LINEAR and (name not in PRODUCTS or len(rows) > 1):
        action = "multiplies by" if name in PRODUCTS else f"applies {name} to rows that hold"
        return for_all_results(nonlinear_in_sum(eqn, ins, action))
    # 1. All rows must have the same labels over the factors.
    arrays = {k: space.to_factors(k, x.labels.array) for k, x in rows.items()}
    labels = {k: Labels(array) for k, array in arrays.items() if array is not None}
    if len(labels) < len(rows):
        return for_all_results(coupled_along_dim(eqn, ins))
    if len({*labels.values()}) > 1:
        # An outer product keeps the dims of both rows, so that a diagonal may be taken later.
        is_pairwise = all(space.outs[0][i] is not None for operand in labels.values() for i in operand.dims)
        action = "multiplies" if name in PRODUCTS else ""
        return for_all_results(replace(coupled_with_other_rows(eqn, ins, action), is_pairwise=is_pairwise))
    (k, x), *_ = rows.items()
    x = x.derive(labels=labels[k], has_mean=has_mean, pick_note=first_pick_note(rows.values()))
    # 2. Whole operands must not depend on the row's place in its block.
    is_summed = any(dims[i] is None for dims in space.outs for i in x.labels.dims)
    message = "weights rows by their place in the block; put the weights into the batch" if is_summed else ""
    wholes = [space.whole_operand(k, y) for k, y in enumerate(ins) if y.kind == "whole"]
    place_notes = [note for y in wholes for note in position_notes(eqn, y, x, message)]
    if has_mean and place_notes and name in PRODUCTS:
        return for_all_results(nonlinear_in_sum(eqn, ins, "multiplies, row by row,"))
    # 3. Give each result its power and its dims.
    x = x.with_notes(*place_notes)
    return [space.result(reader, j, result_with_power(reader, twin, ins, space, x, j)) for j in results]


def _of_whole(reader: Reader, eqn: Any, twin: Any, ins: Sequence[Value], space: FactorSpace, j: int) -> Value:
    """Return result `j` of whole operands. Along a dim that is no factor, its elements may always differ."""
    dim_of_factor, result = space.outs[j], Value()
    varying_dims = {d for d in range(len(output_shape(eqn, j))) if d not in dim_of_factor}
    reduced_growth = 0.0
    for k, x in enumerate(ins):
        operand = space.whole_operand(k, x)
        for i in operand.varying_dims:
            if (d := dim_of_factor[i]) is not None:
                varying_dims.add(d)
            else:
                # Reducing numbers that differ, as many as the block has rows, gives no power of that number.
                reduced_growth = reduced_growth or reader.size_power(eqn, twin, [(k, space.ins[k].index(i))])
    result = result_with_power(reader, twin, ins, space, result, j).with_notes(*_bound_notes(eqn, twin, ins))
    power = UNKNOWN_POWER if reduced_growth else result.power
    return replace(result, varying_dims=frozenset(varying_dims), power=power)


def _bound_notes(eqn: Any, twin: Any, ins: Sequence[Value]) -> list[Note]:
    """Return a note if an equation does nothing in blocks as small as these, and may in the whole batch.

    Such are `arange(n) < 64` and `arange(n) % 64` in blocks of 16 and of 32 rows.
    """
    name, out_aval = eqn.primitive.name, eqn.outvars[0].aval
    bounds = primitives.of(eqn).compares or (out_aval.dtype != bool and (name in _BOUNDS or "shift" in name))
    if twin is None or not bounds or out_aval.shape == output_shape(twin) or 0 in out_aval.shape:
        return []
    (number,) = computed_numbers(eqn, twin, [x.number for x in ins])
    if number is None or number.uniform or number.pair[1] is None:
        return []
    # 1. Does the equation do nothing here? Its result is then constant (candidate 0), or one of its operands.
    pairs = [x.number.pair for x in ins if x.number is not None]
    candidates = (number.array.flat[0], *(array for array, _ in pairs))
    unchanged = [k for k, candidate in enumerate(candidates) if (number.array == candidate).all()]
    if not unchanged:
        return []
    # 2. Extrapolate: the operands' ranges in the program and the twin, continued linearly to numbers of 2^30.
    ranges = [[np.real([np.min(a), np.max(a)]).astype(float) for a in pair] for pair in pairs]
    with jax.ensure_compile_time_eval(), np.errstate(all="ignore"):
        far_ranges = [a + np.nan_to_num(b - a) * ((1 << 30) // (1 + np.abs(ranges).max())) for a, b in ranges]
        corners = np.ix_(*(np.clip(np.concatenate(far_ranges), *x) for x in far_ranges))
        points = np.broadcast_arrays(*corners)
        points = [x.astype(v.aval.dtype) for x, v in zip(points, eqn.invars, strict=True)]
        # 3. If the equation does nothing to the extrapolated operands either, it never does.
        expected = [number.array.flat[0], *points][unchanged[0]].astype(out_aval.dtype)
        if (jx.bind(eqn, points)[0] == expected).all():
            return []
    message = (
        f"applies {name} to places in the block, which changes nothing in a block this small, but may in the whole "
        "batch; put the places into the batch"
    )
    return [Note.of_eqn(eqn, message, is_certain=False)]


def result_with_power(
    reader: Reader, twin: Any, ins: Sequence[Value], space: FactorSpace, x: Value, j: int = 0
) -> Value:
    """Return a value with the power of n that result `j` has; note an equation that makes the power unknown.

    `x` is the value of the result with the dims of the factors, its power aside.
    """
    eqn, is_inexact = space.eqn, lambda v: jnp.issubdtype(v.aval.dtype, jnp.inexact)
    name = eqn.primitive.name
    # 1. The powers of the operands that carry numbers: indices have no part in an inexact result, nor have zeros.
    data = [y for y, v in zip(ins, eqn.invars, strict=True) if is_inexact(v) or not is_inexact(eqn.outvars[j])]
    first, *more = [y.power for y in data if not y.is_zero] or [0]
    # 2. The power of the summed sizes, other than those along which rows are summed: these are in the kind.
    row_factors = {"rows": x.labels.dims, "sum": x.varying_dims}.get(x.kind, ())
    summed_factors = [i for i, f in enumerate(space.factors) if f.reduced == "sum" and i not in row_factors]
    operand_dim = lambda i: next((k, d) for k, d in enumerate(space.factors[i].ins) if d is not None)
    growth = reader.size_power(eqn, twin, [operand_dim(i) for i in summed_factors])
    if growth and x.kind != "whole":
        message = "sums over a dim whose size depends on how many rows a block has"
        x = x.with_notes(Note.of_eqn(eqn, message, is_certain=False))
    # 3. How the equation combines them.
    have_same_power = all(p == first for p in more) or (len(ins) > 1 and eqn.invars[0] is eqn.invars[1])
    is_rounded = not is_inexact(eqn.outvars[j]) and any(map(is_inexact, eqn.invars))
    if name in PRODUCTS:
        power = sum(y.power for y in ins) + growth
    elif not any((first, *more)):
        power = growth
    elif name in ("div", "triangular_solve"):
        power = (ins[0].power - ins[1].power) * (1 if name == "div" else -1)
    elif have_same_power and primitives.of(eqn).scaling == "none":
        power = 0
    elif have_same_power and (name in LINEAR or primitives.of(eqn).scaling == "first") and not is_rounded:
        power = first + growth
    elif (
        (name in LINEAR and not is_rounded)
        or any(y.has_noted_power for y in ins)
        or all(y.number is not None for y in ins)
    ):
        # No note: a later nonlinear equation gets it, or an earlier one has it, or the number shows the power.
        power = UNKNOWN_POWER
    else:
        # A comparison of integers is often the check of an index against a size, as in every lookup: a warning only.
        is_certain = not primitives.of(eqn).compares or any(map(is_inexact, eqn.invars))
        message = f"applies {name} to {FUNCTION_OF_BLOCK_SIZE}"
        return replace(x, power=UNKNOWN_POWER).with_notes(Note.of_eqn(eqn, message, is_certain))
    return replace(x, power=power)


def _action(name: str) -> str:
    """Return what messages say that a primitive does, up to the object "over rows"."""
    return _ACTIONS.get(name, f"applies {name}")


def coupled_along_dim(eqn: Any, ins: Sequence[Value]) -> Value:
    """Return the coupled result of an equation that mixes rows along a dim, as a sort does."""
    name = eqn.primitive.name
    if not primitives.of(eqn).factors:
        return coupled(ins, Note.of_eqn(eqn, f"{name} may mix rows: jaxpar has no rule for it", is_certain=False))
    message, is_certain = f"{_action(name)} over rows; {ADVISE_ALL_ROWS}", name not in ("reduce", "pad")
    if name in ("sort", "approx_top_k") and len(ins) > 1:
        # A sort of several operands may be undone later: tokens are sorted by their experts and put back.
        message, is_certain = f"{_action(name)} over rows, {FINE_IF_UNDONE}", False
    return coupled(ins, Note.of_eqn(eqn, message, is_certain))


def _of_sums(reader: Reader, eqn: Any, twin: Any, ins: Sequence[Value], space: FactorSpace) -> list[Value]:
    """Return the results of an equation with a sum among its operands: a sum again, if it is linear in the sum."""
    name, outs = eqn.primitive.name, list[Value]()
    x, *more = [y for y in ins if y.kind == "sum"]
    k = ins.index(x)
    factor_of_dim = {d: space.ins[k][d] for d in x.varying_dims}
    # 1. Is it linear in one sum, with whole values that are the same for all its partial sums?
    wholes = [space.whole_operand(i, y) for i, y in enumerate(ins) if y.kind == "whole"]
    weights_rows = any({*factor_of_dim.values()} & y.varying_dims for y in wholes)
    is_linear = name in LINEAR | PRODUCTS or (name == "div" and k == 0)
    if (
        more
        or any(y.kind == "rows" for y in ins)
        or not is_linear
        or (name == "pad" and not ins[1].is_zero)
        or weights_rows
    ):
        action = "multiplies by" if name in PRODUCTS else ""
        result = _guarded(eqn, ins) or nonlinear_in_sum(eqn, ins, action)
        return [result] * len(eqn.outvars)
    # 2. Follow the dims of partial sums to each result, where they may be summed up, but not taken apart.
    for j in range(len(eqn.outvars)):
        y = result_with_power(reader, twin, ins, space, x.derive(varying_dims=frozenset(factor_of_dim.values())), j)
        result_dims = set[int | None]()
        for d, i in factor_of_dim.items():
            result_dim = None if i is None else space.outs[j][i]
            # A reshape may cut a dim into two.
            is_cut = result_dim is not None and output_shape(eqn, j)[result_dim] < input_shapes(eqn)[k][d]
            if i is None or is_cut or (result_dim is None and space.factors[i].reduced != "sum"):
                y = nonlinear_in_sum(eqn, ins)
            result_dims.add(result_dim)
        outs.append(replace(y, varying_dims=frozenset(result_dims - {None})) if y.kind == "sum" else y)
    return outs


def _guarded(eqn: Any, ins: Sequence[Value]) -> Value | None:
    """Return the result of a guard that keeps a division by a sum over rows from zero; None if it is no guard.

    Guards are `maximum(count, 1)`, and comparisons with 0. The square root of a sum has its result here too.
    """
    name, other_scalars = eqn.primitive.name, [y.scalar for y in ins if y.kind != "sum"]
    x = next((y for y in ins if y.kind == "sum"), ins[0])
    if x.kind != "sum" or x.varying_dims:
        return None
    if name == "sqrt":
        return replace(nonlinear_in_sum(eqn, ins), radicand=x)
    is_compared = primitives.of(eqn).compares and all(y == 0 for y in other_scalars)
    is_maximum = name == "max" and len(other_scalars) == 1 and other_scalars[0] is not None and other_scalars[0] <= 1
    if not is_compared and not is_maximum:
        return None
    message = (
        f"guards a sum over rows against zero ({name}), which gives another result if a block's sum is zero; leave the "
        "guard out, since jp.Mean needs none"
    )
    return (Value() if is_compared else x.derive()).with_notes(Note.of_eqn(eqn, message, is_certain=False))


@rule("coupled")
def _of_coupled(reader: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Value:
    """Return the result of an equation with coupled operands: coupled, unless it undoes the coupling.

    The square of a root is a sum again. Notes on a coupling that the equation may undo are no longer certain.
    """
    name, (x, *more) = eqn.primitive.name, [y for y in ins if y.kind != "whole"]
    # 1. The square of the root of a sum is that sum.
    is_self_product = name == "mul" and eqn.invars[0] is eqn.invars[1]
    if x.radicand is not None and (is_self_product or name == "square" or eqn.params.get("y") == 2):
        return x.radicand
    result, record = coupled(ins), primitives.of(eqn)
    # 2. Sums over some rows and over the remaining rows add up to a sum over all rows, written in chunks.
    if summed_rows := _summed_rows(eqn, ins):
        is_full_sum = len(summed_rows) == reader.rows_per_block
        notes = _doubted(result.notes, TAKES_SOME_ROWS) if is_full_sum else result.notes
        return replace(result, summed_rows=summed_rows, notes=notes)
    if x.radicand is not None and record.view and jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact):
        return replace(result, radicand=x.radicand)
    # 3. A softmax subtracts a maximum, for rounding alone. The reader cannot see whether the result depends on it.
    if name == "stop_gradient" and all("imum over rows" in n.message for n in x.notes):
        notes = _doubted(x.notes, "imum over rows")
        return Value(varying_dims=frozenset(range(len(output_shape(eqn)))), notes=notes)
    # 4. A lookup or update at unknown indices may put rows back to where they were.
    moved = {"gather": ins[0], "scatter": ins[-1]}.get(name, Value())
    if moved.kind == "coupled" and ins[1].number is None and all(y in (moved, ins[1]) for y in (x, *more)):
        return replace(result, notes=_doubted(result.notes, PICKS_ROWS, "sort over rows"))
    # 5. An inverse Fourier transform may undo a transform over rows.
    if name == "fft" and eqn.params["fft_type"] in _INVERSE_TRANSFORMS:
        return replace(result, notes=_doubted(result.notes, _ACTIONS["fft"]))
    # 6. The diagonal of a product of rows with rows holds each row with itself.
    if more or not x.is_pairwise or not (record.elementwise or record.moves):
        return result
    is_diagonal = _is_diagonal(eqn, ins, ins.index(x))
    notes = _doubted(result.notes, ADVISE_GATHER) if is_diagonal else result.notes
    return replace(result, is_pairwise=not is_diagonal, notes=notes)


def _summed_rows(eqn: Any, ins: Sequence[Value]) -> frozenset[int]:
    """Return the rows of a partial sum that is scaled by a number, or added to partial sums over other rows.

    Returns the empty set for any other equation.
    """
    name, row_sets = eqn.primitive.name, [x.summed_rows for x in ins if x.kind != "whole"]
    union = frozenset().union(*row_sets)
    are_disjoint = all(row_sets) and len(union) == sum(map(len, row_sets))
    have_scalars = all(x.scalar is not None for x in ins if x.kind == "whole")
    if len(row_sets) > 1:
        is_linear = name in primitives.SUMS and name != "sub"
    else:
        is_linear = name in LINEAR | PRODUCTS or (name == "div" and ins[0].summed_rows == union)
    return union if are_disjoint and have_scalars and is_linear else frozenset()


def _doubted(notes: Collection[Note], *phrases: str) -> frozenset[Note]:
    """Return the notes; those whose message has any of these phrases are no longer certain."""
    return frozenset(
        replace(n, is_certain=n.is_certain and not any(phrase in n.message for phrase in phrases)) for n in notes
    )


def _is_diagonal(eqn: Any, ins: Sequence[Value], k: int) -> bool:
    """Return whether an equation keeps the diagonal alone of matrix operand `k`, and makes the rest zero.

    It may multiply by a known mask, or choose between the matrix and zeros.
    """
    name = eqn.primitive.name
    makes_zeros = name == "mul" or (name == "select_n" and len(ins) == 3 and k > 0 and ins[3 - k].is_zero)
    mask = ins[1 - k if name == "mul" else 0].number if makes_zeros else None
    if mask is None or mask.array.ndim != 2:
        return False
    nonzero = mask.array != 0
    return np.array_equal(nonzero if name == "mul" or k == 2 else ~nonzero, np.eye(*nonzero.shape, dtype=bool))
