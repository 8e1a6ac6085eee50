"""Rules for calls, branches and collectives: how they pass on rows and sums over rows.

A call is read through its program. A branch joins the values of its cases. A reduction or gather over all mesh axes
that spread rows makes a whole value: all rows have reached it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...model import permutations
from ...program import jaxpr as jx
from ...program import primitives
from ...program.collectives import axes_of
from ...program.filter_primitives import is_error
from .arithmetic import join_values
from .backward import backward_notes
from .labels import Labels, number_elements
from .reader import ALWAYS, Reader, output_shape, rule
from .values import (
    FUNCTION_OF_BLOCK_SIZE,
    RATIO_OF_SUMS,
    RATIO_PER_REPLICA,
    ROUTED_BASE,
    UNKNOWN_POWER,
    UNNAMED_LINE,
    Note,
    Value,
    coupled,
    nonlinear_in_sum,
    notes_of,
    row_groups_note,
)

_NAN_GUARD = (
    "makes all rows of a block NaN if one of them is bad, and a later line tests for NaN; use on_error='raise' "
    "(EQX_ON_ERROR=raise), or check each row by itself"
)


@rule(*jx.CALLS, *jx.REMATS, *jx.CUSTOM, "custom_vmap_call", "composite", table=ALWAYS)
def _call(reader: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Sequence[Value]:
    if (routed := _routed_outputs(eqn, ins)) is not None:
        return routed
    program, twin_program = (None if e is None else jx.called(e) or e.params["call"] for e in (eqn, twin))
    outs = reader.read_program(program, twin_program, ins)
    # Only a custom derivative may differ from the derivative of the function.
    if eqn.primitive.name not in jx.CUSTOM:
        return outs
    notes = backward_notes(reader, eqn, twin, ins, outs)
    return [x.with_notes(*notes) for x in outs]


def _routed_outputs(eqn: Any, ins: Sequence[Value]) -> Sequence[Value] | None:
    """Return the results of a function that permutes tokens, as its author declares them; else None.

    The function's equations do not show which rows its results belong to (`model/permutations.py`).
    """
    if (route := permutations.of(eqn)) is None:
        return None
    x = ins[0]
    rows, token_labels = [y for y in ins if y.kind != "whole"], lambda y: Labels(y.labels.array.ravel())
    # 1. The declaration holds for rows along dim 0 of the first argument, in the same order in all arguments.
    are_plain_rows = all(y.kind == "rows" and not y.has_mean and not y.power for y in rows)
    if not are_plain_rows or x.kind != "rows" or x.is_routed or not x.labels.dims <= {0}:
        return None
    if any(not y.is_routed and token_labels(y) != token_labels(x) for y in rows):
        return None
    # 2. Results are whole, tokens of the first argument, or slots that hold tokens in another order.
    note = [Note.of_eqn(eqn, route.couples, route.certain)] if route.couples else []
    outs = []
    for kind, v in zip(route.outs, eqn.outvars, strict=True):
        shape = v.aval.shape
        if kind == "whole":
            outs.append(Value(varying_dims=frozenset(range(len(shape)))))
            continue
        labels = x.labels.array.reshape(-1, *[1] * (len(shape) - 1))
        if kind == "routed":
            # Each slot is numbered by its place, since the rows in it are not known.
            labels = ROUTED_BASE + number_elements(shape, {0, 1})
        outs.append(x.derive(labels=Labels(labels)).with_notes(*notes_of(ins), *note))
    return outs


@rule("custom_linear_solve", table=ALWAYS)
def _linear_solve(reader: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Sequence[Value]:
    """Return the solution as the solver's program computes it."""
    # Operands are the constants of matvec, vecmat, solve and transposed solve, and then the right-hand sides.
    lengths, jaxprs = eqn.params["const_lengths"], eqn.params["jaxprs"]
    start = lengths.matvec + lengths.vecmat
    right_sides = ins[sum(lengths) :]
    inputs = [*ins[start : start + lengths.solve], *right_sides]
    return reader.read_program(jaxprs.solve, twin and twin.params["jaxprs"].solve, inputs)


@rule("cond", table=ALWAYS)
def _cond(reader: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> list[Value]:
    index, *operands = ins
    branches = eqn.params["branches"]
    twins = list(twin.params["branches"]) if twin is not None else [None]
    if twin is not None and len(twins) != len(branches):
        # A `switch` may have a branch for each row of a block, and then has more of them for twice the rows.
        message = f"chooses among as many branches as {FUNCTION_OF_BLOCK_SIZE}"
        index = index.with_notes(Note.of_eqn(eqn, message, is_certain=False))
    # Without a twin of its own, a branch is compared with the last one.
    pairs = [(branch, twins[min(i, len(twins) - 1)]) for i, branch in enumerate(branches)]
    # A guard that raises an error decides whether there is a result, and not which result. So each block may check its
    # own rows.
    returning_pairs = [pair for pair in pairs if not is_error(pair[0])] or pairs
    branch_outs = [reader.read_program(branch, branch_twin, operands) for branch, branch_twin in returning_pairs]
    # Only one branch returns, so that its values are those of the `cond`.
    if len(branch_outs) == 1 < len(pairs):
        return branch_outs[0]
    if eqn.params.get("branches_platforms"):
        # The branches compute the same on different platforms. Take the one that the reader understands best: it
        # cannot see into a fused kernel.
        return min(branch_outs, key=lambda outs: (len(notes_of(outs)), [x.kind for x in outs].count("coupled")))
    return [_join_branches(eqn, index, outs) for outs in zip(*branch_outs, strict=True)]


def _join_branches(eqn: Any, index: Value, outs: Sequence[Value]) -> Value:
    """Return a result of a `cond` from its values in all branches.

    A branch that returns nothing but NaN is a guard too: `eqx.error_if` with `on_error="nan"`. NaN in one block makes
    the loss of all rows NaN on every rank, as on one device, unless a later line tells NaN from numbers.
    """
    non_nan = [x for x in outs if x.scalar is None or not math.isnan(x.scalar)]
    # A branch that returns NaN alone stands for an error.
    if len(non_nan) == 1 < len(outs) and index.kind != "whole":
        note = Note(jx.user_line(eqn) or UNNAMED_LINE, _NAN_GUARD, only_if_nan_tested=True)
        return non_nan[0].with_notes(note)
    return choose_by(eqn, index, functools.reduce(functools.partial(join_values, eqn), outs))


def choose_by(eqn: Any, selector: Value, x: Value) -> Value:
    """Return a value that a condition or an index has selected.

    Args:
      x: the joined value of all candidates.
    """
    if selector.kind == "whole" or x.kind == "coupled":
        return x.with_notes(*selector.notes)
    if selector.kind == "rows" and x.kind in ("whole", "rows"):
        # A condition for each row gives each row its own choice.
        labels = selector.labels.array
        ndim = max(x.labels.array.ndim, labels.ndim)
        labels = Labels(labels.reshape(labels.shape + (1,) * (ndim - labels.ndim)))
        return join_values(eqn, selector.derive(labels=labels, power=x.power), x)
    if selector.kind == "coupled":
        return coupled([selector, x])
    return nonlinear_in_sum(eqn, [selector, x], "chooses by")


@rule(*jx.REDUCTIONS, "reduce_scatter", "all_to_all", "ppermute", "pbroadcast", table=ALWAYS)
def _collective(reader: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Sequence[Value]:
    eqn_axes = {*axes_of(eqn)}
    # No rows are spread over these axes.
    if not eqn_axes & {*reader.axes}:
        return list(ins)
    if eqn.primitive.name not in jx.REDUCTIONS or not {*reader.axes} <= eqn_axes:
        message = f"calls {eqn.primitive.name} over some, but not all, of the mesh axes over which rows are spread"
        note = Note.of_eqn(eqn, message, is_certain=False)
        return [coupled([x], note) for x in ins]
    # `tiled` marks a gather: its blocks must be laid end to end along the dim of rows.
    notes = [_gather_notes(reader, eqn, twin, k, x) if eqn.params.get("tiled") else [] for k, x in enumerate(ins)]
    ins = [x.with_notes(*operand_notes) for x, operand_notes in zip(ins, notes, strict=True)]
    return [_from_all_replicas(reader, eqn, x, len(output_shape(eqn, k))) for k, x in enumerate(ins)]


def _gather_notes(reader: Reader, eqn: Any, twin: Any, k: int, x: Value) -> list[Note]:
    """Return a note if operand `k` of a gather, laid end to end from all blocks, differs from one device's array."""
    dim = eqn.params["all_gather_dimension"]
    if x.kind == "rows" and not x.is_routed:
        order = x.labels.array.ravel()
        if not x.labels.covers_equally(reader.rows_per_block) or not x.labels.dims <= {dim}:
            message = (
                "passes to jp.all_rows an array without all rows of the block along dim 0, one after another; pass "
                "rows as the batch has them"
            )
        elif (order[1:] < order[:-1]).any():
            message = (
                "passes rows to jp.all_rows in another order than the batch's, such as two views end to end, which "
                "then alternate block by block; gather first: jnp.concatenate([jp.all_rows(a), jp.all_rows(b)])"
            )
        else:
            return []
        return [Note.of_eqn(eqn, message)]
    if x.kind == "whole" and dim in x.varying_dims and not x.is_keyed and reader.size_power(eqn, twin, [(k, dim)]):
        message = "passes to jp.all_rows a row's place in its block, the same in each block; put it into the batch"
        return [Note.of_eqn(eqn, message)]
    return []


def _from_all_replicas(reader: Reader, eqn: Any, x: Value, ndim: int) -> Value:
    """Return the whole value that a reduction or gather over all rows makes, the same on all replicas."""
    if x.kind == "sum" and x.varying_dims:
        return coupled([x], row_groups_note(eqn))
    notes = frozenset() if x.kind == "sum" else x.notes
    # Each block has sorted its own rows, or picked some of them: a sort or pick of all rows gives other rows.
    if x.kind == "rows" and x.pick_note is not None and (x.num_places or not x.covers_equally(reader.rows_per_block)):
        notes |= {x.pick_note}
    if eqn.primitive.name.startswith("psum"):
        notes = frozenset(
            replace(note, message=RATIO_PER_REPLICA) if note.message == RATIO_OF_SUMS else note for note in notes
        )
    return Value(power=x.power, varying_dims=frozenset(range(ndim)), notes=notes)


@rule(*primitives.having("identity"), table=ALWAYS)
def _identity(reader: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Sequence[Value]:
    return ins


@rule("axis_index", table=ALWAYS)
def _axis_index(reader: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Value:
    note = Note.of_eqn(eqn, "depends on which replica has the rows", is_certain=False)
    return Value(power=UNKNOWN_POWER).with_notes(note)
