"""Turn Python loops over rows, `[f(x[i]) for i in range(n)]`, into one computation of all rows.

Such a loop writes out another program for twice the rows, so that the reader cannot pair the two. This module makes a
program that computes the same, except for the order of sums:

    x[0] ... x[n-1]                     x
    f(x[0], w) ... f(x[n-1], w)   -->   vmap(f)(x, w)      equations that are alike for all rows become one
    stack, concatenate, or sum          moveaxis, or sum   so does the equation that collects their results

An equation belongs to row i if its operands are results for row i, and variables that all rows read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...program import jaxpr as jx
from ...program.equal import differing

GroupResult = tuple[int, int]  # (index of a group of alike equations, index of the result)
RowResult = tuple[GroupResult, int]  # a group's result in one row
RowResultOf = Callable[[Any], RowResult | None]  # atom -> the row result that it is, if any
PartialSum = tuple[GroupResult, int, Any]  # see `_partial_sum`


class _Group(NamedTuple):
    """Equations that are alike, one for each row, in order.

    Attributes:
      operands: for each operand a `GroupResult` in the same row, a variable that all rows read, or None for a literal.
        A group without operands takes the rows of an array.
      eqns: the equations of rows 0, 1, ...
    """

    operands: tuple[Any, ...]
    eqns: list[Any]

    def compute(self, env: jx.Environment[Any], stacked_results: Mapping[GroupResult, Any]) -> list[Any]:
        """Return the results of all rows, [rows, ...] each.

        Args:
          env: the values of variables that all rows read.
          stacked_results: the results of other groups, [rows, ...] each.
        """
        first, ins, axes = self.eqns[0], [], []
        if not self.operands:
            # The group takes the rows of an array apart: all rows at once are the array itself.
            x, is_unstack = env[first.invars[0]], first.primitive.name == "unstack"
            # A slice of one row keeps the row's dim, with size 1.
            return [jnp.moveaxis(x, first.params["axis"], 0) if is_unstack else jnp.expand_dims(x, 1)]
        for j, (atom, operand) in enumerate(zip(first.invars, self.operands, strict=True)):
            # Literals may differ from row to row: stack them, unless they are equal.
            if operand is None:
                literals = np.stack([eqn.invars[j].val for eqn in self.eqns]).astype(atom.aval.dtype)
                stacked = None if (literals == literals[0]).all() else literals
            else:
                stacked = stacked_results.get(operand)
            ins.append(env[atom] if stacked is None else stacked)
            axes.append(None if stacked is None else 0)
        return jax.vmap(lambda *ins: jx.bind(first, ins), axes, axis_size=len(self.eqns))(*ins)


class _Grouping(NamedTuple):
    """The written-out loops of a program.

    Attributes:
      groups: the equations that are alike, in the order of their first rows. A group that lacks rows is no loop.
      group_of_eqn: id of an equation -> its group and row.
      row_results: variable -> the result that it is.
      partial_sums: variable -> the sum over rows that it is.
    """

    groups: list[_Group]
    group_of_eqn: dict[int, tuple[int, int]]
    row_results: dict[Any, RowResult]
    partial_sums: dict[Any, PartialSum]

    def row_result_of(self, atom: Any) -> RowResult | None:
        """Return the result that an atom is in one row; None if it is a literal, or a variable that all rows read."""
        return None if jx.is_literal(atom) else self.row_results.get(atom)


def loops_over_rows(flat: jx.Flat, num_rows: int, axes: Mapping[str, int]) -> jx.Flat:
    """Return a program in which each written-out loop over rows is one computation.

    Args:
      flat: the program; it is returned itself if it has no such loop.
      num_rows: the number of rows in a block, and of steps in a loop.
      axes: the mesh axes that the program may name, name -> size.
    """
    grouping = _group_equations(flat, num_rows)
    groups, row_result_of = grouping.groups, grouping.row_result_of
    # A group that lacks a row is no loop over all rows.
    complete_groups = {k for k, group in enumerate(groups) if len(group.eqns) == num_rows}

    # Evaluates the program with each complete group at once, when the equation of its first row comes.
    def evaluate(*values: Any) -> list[Any]:
        stacked_results: dict[GroupResult, Any] = {}  # [rows, ...] each

        def single_row(v: Any) -> Any:
            group_result, i = grouping.row_results[v]
            return stacked_results[group_result][i]

        missing = lambda v: jx.array_of(v) if jx.is_literal(v) else single_row(v)
        env = jx.Environment[Any].of(flat, values, missing)
        for eqn in flat.eqns:
            k, i = grouping.group_of_eqn.get(id(eqn), (-1, 0))
            total, last_row, start = grouping.partial_sums.get(eqn.outvars[0], (None, 0, None))
            with jx.source_info_of(eqn):
                if k in complete_groups:
                    if i == 0:
                        results = groups[k].compute(env, stacked_results)
                        stacked_results |= {(k, j): x for j, x in enumerate(results)}
                elif (group_result := _stacked_group(eqn, row_result_of, num_rows)) in stacked_results:
                    dim = eqn.params.get("dimension", eqn.params.get("axis"))
                    x = jnp.moveaxis(stacked_results[group_result], 0, dim)
                    env[eqn.outvars[0]] = x.reshape(eqn.outvars[0].aval.shape)
                # The last partial sum is the sum of all rows. The others are dead now, unless something reads them.
                elif total in stacked_results and last_row == num_rows - 1:
                    env[eqn.outvars[0]] = stacked_results[total].sum(0) + (0 if start is None else env[start])
                else:
                    env.store(eqn, jx.bind(eqn, env.read(eqn.invars)))
        return env.read(flat.outvars)

    if not complete_groups:
        return flat
    avals = (jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in flat.invars)
    rolled, _ = jx.trace(evaluate, *avals, axes=dict(axes))
    return dataclasses.replace(rolled, eqns=jx.live(rolled.eqns, rolled.outvars))


def _group_equations(flat: jx.Flat, num_rows: int) -> _Grouping:
    """Group the equations of a program that are alike in all rows."""
    grouping = _Grouping([], {}, {}, {})
    groups, group_of_eqn, row_results, partial_sums = grouping
    candidates: dict[Any, list[int]] = {}  # primitive and operands -> indices of groups
    # Equations that no row enters, such as `jnp.zeros(3)`, are written out for each row. The first stands for all.
    representatives: dict[Any, Any] = {}  # variable -> the same variable of the first such equation
    shared_eqns: dict[Any, list[Any]] = {}  # primitive and operands -> equations that differ
    for eqn in flat.eqns:
        # 1. `for row in x` unstacks the array, from jax 0.11 on: one equation for all rows.
        if eqn.primitive.name == "unstack" and len(eqn.outvars) == num_rows:
            group_of_eqn[id(eqn)] = len(groups), 0
            row_results.update({v: ((len(groups), 0), i) for i, v in enumerate(eqn.outvars)})
            groups.append(_Group((), [eqn] * num_rows))
            continue
        if (partial_sum := _partial_sum(eqn, grouping.row_result_of, partial_sums)) is not None:
            partial_sums[eqn.outvars[0]] = partial_sum
        # 2. The row of the equation is the row of its operands, or the row that it slices off.
        ins = list(map(grouping.row_result_of, eqn.invars))
        # An equation on results of several rows belongs to no row.
        row, *more_rows = {x[1] for x in ins if x} or {_sliced_row(eqn, num_rows)}
        if row is None:
            operands = [str(a) if jx.is_literal(a) else representatives.get(a, a) for a in eqn.invars]
            alike_eqns = shared_eqns.setdefault((eqn.primitive, *operands), [])
            first = next((e for e in alike_eqns if not eqn.effects and differing(e, eqn) is None), eqn)
            representatives.update(zip(eqn.outvars, first.outvars, strict=True))
            alike_eqns += [eqn] if first is eqn else []
        if row is None or more_rows:
            continue
        operands = [
            x[0] if x else None if jx.is_literal(a) else representatives.get(a, a)
            for x, a in zip(ins, eqn.invars, strict=True)
        ]
        # Slices of one array have no results of rows as operands: the array itself tells their group.
        operands = tuple(operands) if any(ins) else ()
        indices = candidates.setdefault((eqn.primitive, operands or eqn.invars[0]), [])
        # 3. Row 0 opens a group; a later row joins the first alike group whose next row it is.
        if row == 0:
            indices.append(len(groups))
            groups.append(_Group(operands, []))
        for k in indices:
            is_next_row = len(groups[k].eqns) == row
            if is_next_row and (row == 0 or not operands or differing(groups[k].eqns[0], eqn) is None):
                groups[k].eqns.append(eqn)
                group_of_eqn[id(eqn)] = k, row
                row_results.update({v: ((k, j), row) for j, v in enumerate(eqn.outvars)})
                break
    return grouping


def _sliced_row(eqn: Any, num_rows: int) -> int | None:
    """Return the row that an equation slices off an array of all rows; None for any other equation."""
    if eqn.primitive.name != "slice":
        return None
    start, limit, shape = eqn.params["start_indices"], eqn.params["limit_indices"], eqn.invars[0].aval.shape
    keeps_other_dims = limit[1:] == shape[1:] and not any(start[1:]) and {*(eqn.params["strides"] or ())} <= {1}
    return start[0] if shape[0] == num_rows and keeps_other_dims and limit[0] == start[0] + 1 else None


def _stacked_group(eqn: Any, row_result_of: RowResultOf, num_rows: int) -> GroupResult | None:
    """Return the group result that an equation concatenates or stacks, of all rows in order; None if it does not."""
    parts = list(map(row_result_of, eqn.invars)) if eqn.primitive.name in ("concatenate", "stack") else [None]
    return parts[0][0] if parts[0] and parts == [(parts[0][0], i) for i in range(num_rows)] else None


def _partial_sum(eqn: Any, row_result_of: RowResultOf, partial_sums: Mapping[Any, PartialSum]) -> PartialSum | None:
    """Return the sum over rows 0 to i that an addition makes, from the sum of the rows before.

    Returns:
      The group result that is summed, the last row i, and the atom to which row 0 was added (None if there is none).
    """
    # An addition may have its operands in either order.
    for total, addend in (eqn.invars, eqn.invars[::-1]) if eqn.primitive.name == "add" else ():
        added_row, total_row = row_result_of(addend), row_result_of(total)
        # start + row 0
        if added_row and added_row[1] == 0 and not total_row:
            return added_row[0], 0, total
        # row 0 + row 1, or a longer sum + the next row
        sums = [(*total_row, None)] if total_row and total_row[1] == 0 else []
        sums += [partial_sums[total]] if not jx.is_literal(total) and total in partial_sums else []
        for group_result, i, start in sums if added_row else ():
            if added_row == (group_result, i + 1):
                return group_result, i + 1, start
    return None
