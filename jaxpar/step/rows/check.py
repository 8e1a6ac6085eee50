"""The check of a traced loss: ValueError for rows that are coupled, a warning for rows that may be.

`check_coupling` does these steps:

1. Trace the loss on two sizes of blocks, the second with twice the rows (`_trace_pair`).
2. Read the pair, and collect the notes that reach each result (`_read`).
3. If the loss would be refused as a sum that is no mean, read it again in larger blocks (`_read_larger`).
4. Raise, warn, or be silent (`_report`).
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from ...model.batches import rows_of
from ...model.model import MAKERS, Mean, is_replicated
from ...program import jaxpr as jx
from .arithmetic import power_name
from .labels import Labels, number_elements
from .reader import Reader
from .unrolled import loops_over_rows
from .values import ADVISE_ALL_ROWS, FUNCTION_OF_BLOCK_SIZE, TAKES_SOME_ROWS, Note, Value, reason_of

Trace = Callable[[Any, Mapping[str, int]], jx.Flat]
TracedPair = tuple[tuple[jx.Flat, jx.Flat], Mapping[str, int]]  # program and twin, and the mesh axes of the program
_MAX_LISTED = 6
_IF_BLOCKWISE = f"If each block is meant to use its own rows alone, pass rows='independent' to {MAKERS}"
_IF_INDEPENDENT = (
    f"step.check_rows(state, batch) runs the loss to find out. If you know that its rows are independent, pass "
    f"rows='independent' to {MAKERS}"
)


def check_coupling(
    flat: jx.Flat, out: Any, rest: Any, trace: Trace, axes: Mapping[str, int], num_microbatches: int
) -> None:
    """Raise ValueError if the loss is not a mean over independent rows; warn if it may not be, or a metric is not.

    Args:
      flat: the traced loss on one block's rows; its last inputs are the leaves of `rest`, (variables, batch, key).
      out: the abstract tree of its outputs, ({name: Mean}, variables).
      rest: abstract; batch leaves are [rows, ...] unless marked as `Replicated`.
      trace: traces the loss on another such `rest`, with given mesh axes.
      axes: the mesh axes over which blocks are spread, name -> size.
      num_microbatches: the number of blocks of each replica.
    """
    num_rows = rows_of(rest[1])
    try:
        pair, pair_axes, rows_per_block = _trace_pair(flat, rest, num_rows, trace, axes)
    except Exception as error:  # this runs the user's code, with a number of rows that it may not accept
        # Without the twin no power is known, so that no note is certain: at most a warning.
        notes_by_result = _read(flat, None, out, rest, num_rows, axes)
        message = (
            f"it cannot be traced with {2 * num_rows} rows, twice as many as a block has, so that its dependence on "
            f"their number is unknown ({reason_of(error)})"
        )
        last_note = Note("the loss", message, False)
        notes_by_result = {
            name: [*(replace(n, is_certain=False) for n in notes), last_note] for name, notes in notes_by_result.items()
        }
    else:
        notes_by_result = _read(*pair, out, rest, rows_per_block, pair_axes)
        certain = [note for note in notes_by_result.get("loss", ()) if note.is_certain]
        # In larger blocks the loss may read as a mean after all.
        if certain and all(note.only_scale for note in certain):
            notes_by_result = _read_larger(out, rest, num_rows, 2 * rows_per_block, trace, axes) or notes_by_result
    _report(notes_by_result, math.prod(axes.values()), num_microbatches, num_rows)


def _trace_pair(
    flat: jx.Flat, rest: Any, num_rows: int, trace: Trace, axes: Mapping[str, int]
) -> tuple[tuple[jx.Flat, jx.Flat], Mapping[str, int], int]:
    """Trace the loss on two sizes of blocks of the same rows, the second twice the first.

    A single replica is read as one of several, so that the reader sees jp.all_rows and BatchNorm. A single row is read
    as one of two, so that its dim can be told from others of size 1.

    Returns:
      The two programs, and the mesh axes and rows per block of the first.
    """
    name, replicas = next(iter(axes.items()), ("data", 0))
    # The usual case saves a trace: half as many replicas of twice the rows have the same batch.
    if num_rows > 1 and replicas and replicas % 2 == 0:
        twin = trace(_with_rows(rest, 2), {**axes, name: replicas // 2})
        if _have_same_primitives(flat, twin):
            return (flat, twin), axes, num_rows
        # The loss looks at its number of rows, and is another program for twice as many.
    rows_per_block = num_rows if num_rows > 1 else 2 * num_rows
    return *_trace_blocks(rest, num_rows, rows_per_block, trace, axes), rows_per_block


def _read_larger(
    out: Any, rest: Any, num_rows: int, rows_per_block: int, trace: Trace, axes: Mapping[str, int]
) -> dict[str, list[Note]] | None:
    """Return the notes on a loss that would be refused as no mean, read in larger blocks; None if it cannot be traced.

    In a block with as many rows as `x.reshape(2, -1)` has groups, each group has one row: a mean over it reads as a
    sum. But so does a loss that is a mean in larger blocks alone, `x.sum() / max(len(x) // 4, 1)`. Hence this gives a
    warning, and never silence.
    """
    try:
        pair, pair_axes = _trace_blocks(rest, num_rows, rows_per_block, trace, axes)
    except Exception:  # this runs the user's code, with a number of rows that it may not accept: keep the first reading
        return None
    message = f"reads as a mean over rows in blocks of {rows_per_block} rows or more, but not in smaller blocks"
    notes_by_result = _read(*pair, out, rest, rows_per_block, pair_axes)
    return {name: [*notes, Note("the loss", message, False)] for name, notes in notes_by_result.items()}


def _trace_blocks(rest: Any, num_rows: int, rows_per_block: int, trace: Trace, axes: Mapping[str, int]) -> TracedPair:
    """Trace the loss on blocks of `rows_per_block` rows on 4 replicas, and of twice as many rows on 2 replicas."""
    name = next(iter(axes), "data")
    # Replicas that are not on the mesh: a trace needs only their number.
    pair_axes, twin_axes = {**axes, name: 4}, {**axes, name: 2}
    pair = (
        trace(_with_rows(rest, rows_per_block // num_rows), pair_axes),
        trace(_with_rows(rest, 2 * rows_per_block // num_rows), twin_axes),
    )
    if not _have_same_primitives(*pair):
        # A loop over rows that cannot be vmapped stays as it is, and is reported as two different programs.
        with contextlib.suppress(NotImplementedError):
            rolled = (
                loops_over_rows(pair[0], rows_per_block, pair_axes),
                loops_over_rows(pair[1], 2 * rows_per_block, twin_axes),
            )
            pair = rolled if _have_same_primitives(*rolled) else pair
    return pair, pair_axes


def _have_same_primitives(a: jx.Flat, b: jx.Flat) -> bool:
    return [e.primitive for e in a.eqns] == [e.primitive for e in b.eqns]


def _with_rows(rest: Any, factor: int) -> Any:
    """Return `rest` with `factor` times the rows in each leaf of the batch that has rows."""
    variables, batch, key = rest

    def scale_rows(x: Any) -> Any:
        return x if is_replicated(x) else jax.ShapeDtypeStruct((x.shape[0] * factor, *x.shape[1:]), x.dtype)

    return variables, jax.tree.map(scale_rows, batch, is_leaf=is_replicated), key


def _read(
    flat: jx.Flat, twin: jx.Flat | None, out: Any, rest: Any, num_rows: int, axes: Mapping[str, int]
) -> dict[str, list[Note]]:
    """Read a traced loss, and return the notes that reach each of its results, by name."""
    # The twin has twice the rows on half of the replicas, so that both read the same batch.
    name, replicas = next(iter(axes.items()), ("data", 0))
    reader = Reader(num_rows, axes, {**axes, name: replicas // 2})
    variables, batch, key = rest

    def whole_values(tree: Any, is_keyed: bool = False) -> list[Value]:
        return [Value(varying_dims=frozenset(range(len(x.shape))), is_keyed=is_keyed) for x in jax.tree.leaves(tree)]

    # Each row has one label in the whole leaf, [rows, 1, ...].
    rows_value = lambda x: Value("rows", Labels(number_elements((num_rows, *x.shape[1:]), {0})))
    batch_values: list[Value] = []
    for x in jax.tree.leaves(batch, is_leaf=is_replicated):
        batch_values += whole_values(x) if is_replicated(x) else [rows_value(x)]
    inputs = [*whole_values(variables), *batch_values, *whole_values(key, is_keyed=True)]
    # The parameters are the inputs before the leaves of `rest`.
    params = whole_values([v.aval for v in flat.invars[: len(flat.invars) - len(inputs)]])
    values = reader.read_program(flat, twin, [*params, *inputs])
    # {name: Mean}, with the index of the output as `total` and `count`
    means = jax.tree.unflatten(jax.tree.structure(out), list(range(len(values))))[0]
    return {name: _result_notes(name, flat, values, mean, twin is not None) for name, mean in means.items()}


def _result_notes(name: str, flat: jx.Flat, values: Sequence[Value], mean: Mean, powers_known: bool) -> list[Note]:
    """Return the notes on one result: those on the way to it, or one on powers of n that do not fit.

    Args:
      values: the values of all outputs.
      mean: the indices of the result's total and count among them.
      powers_known: whether the program was read with a twin.
    """
    total, count = values[mean.total], values[mean.count]  # type: ignore[index]
    line = _output_line(flat, flat.outvars[mean.total])  # type: ignore[call-overload]
    notes = {note for note in (*total.notes, *count.notes) if not note.only_if_nan_tested}
    # A result that is rows, or partial sums, has dropped rows on its way: a sum over all rows has no such dims.
    for x in (total, count):
        if x.kind == "rows" or (x.kind == "sum" and x.varying_dims):
            notes.add(x.pick_note or Note(line, f"{TAKES_SOME_ROWS}; {ADVISE_ALL_ROWS}"))
    if name != "loss":  # metrics are not differentiated
        notes = {n for n in notes if not n.in_backward}
    # As sums over rows: a whole value c is the sum of c / n. A step adds up totals and counts of blocks, whose ratio is
    # right if both are sums times the same power of n.
    powers = [x.power - (x.kind == "whole") for x in (total, count)]
    # A total of zero fits every power, and an unknown power that is noted needs no second note.
    powers_fit = powers[0] == powers[1] or total.is_zero or total.has_noted_power or count.has_noted_power
    has_certain_note = any(n.is_certain for n in notes)
    if powers_fit or not powers_known or has_certain_note or "coupled" in (total.kind, count.kind):
        return sorted(notes, key=lambda n: n.line)
    subject = "the loss" if name == "loss" else f"metric {name!r}"
    if any(map(math.isnan, powers)):
        message = f"{subject} is {FUNCTION_OF_BLOCK_SIZE}"
    elif count.kind == "whole" and count.scalar == 1:
        message = (
            f"{subject} is {_describe(powers[0])}; return a mean (.mean() instead of .sum()), or jp.Mean(total, count)"
        )
    else:
        total_name, count_name = map(_describe, powers)
        message = (
            f"{subject} is jp.Mean(total, count) with {total_name} as total and {count_name} as count; return two sums "
            "over rows"
        )
    return [*notes, Note(line, message, only_scale=True)]


def _describe(power: float) -> str:
    return "a mean over rows (or a value that is the same for all)" if power == -1 else power_name(power)


def _output_line(flat: jx.Flat, atom: Any) -> str:
    """Return the user's line that computes an output, casts aside."""
    producer = {v: eqn for eqn in flat.eqns for v in eqn.outvars}
    while not jx.is_literal(atom) and atom in producer:
        eqn = producer[atom]
        # A cast at the end is often jaxpar's own, to float32.
        operand = eqn.invars[0] if eqn.primitive.name == "convert_element_type" else None
        if operand is None or jx.is_literal(operand) or operand not in producer:
            return jx.where(eqn)
        atom = operand
    return "what the loss returns"


def _report(
    notes_by_result: Mapping[str, Sequence[Note]], num_replicas: int, num_microbatches: int, rows_per_block: int
) -> None:
    """Raise or warn of the notes on each result."""
    num_rows = rows_per_block * num_replicas  # of a microbatch
    counts = ((num_replicas, "replicas"), (num_microbatches, "microbatches"))
    blocks = " x ".join(f"{n} {noun}" for n, noun in counts if n > 1)
    loss_notes = list(notes_by_result.get("loss", ()))
    certain = [n for n in loss_notes if n.is_certain]
    # 1. The loss: an error if a note is certain, else a warning.
    if certain and all(n.only_scale for n in certain):
        raise ValueError(
            f"the loss is not a mean over rows, and each of {blocks} sees only its own rows, so the result would "
            f"differ from one device's:\n{_bullet_list(certain)}"
        )
    if certain:
        raise ValueError(
            f"the loss couples rows, and each of {blocks} sees only its own rows, so the result would differ from "
            f"one device's:\n{_bullet_list(certain)}{_all_rows_advice(certain, num_rows, num_microbatches)}\n"
            f"{_IF_BLOCKWISE}"
        )
    if loss_notes:
        advice = _all_rows_advice(loss_notes, num_rows, num_microbatches)
        warnings.warn(
            f"the loss may couple rows, and each of {blocks} sees only its own rows:\n"
            f"{_bullet_list(loss_notes)}{advice}\n{_IF_INDEPENDENT}",
            stacklevel=2,
        )
    # 2. Metrics. They only inform, so that they give no error, and only a certain coupling is worth a warning.
    for name, notes in notes_by_result.items():
        if name != "loss" and (certain := [n for n in notes if n.is_certain]):
            fault = "is not a mean over rows" if all(n.only_scale for n in certain) else "couples rows"
            warnings.warn(
                f"metric {name!r} {fault}, and each of {blocks} computes it from its own rows alone:\n"
                f"{_bullet_list(certain)}{_all_rows_advice(certain, num_rows, num_microbatches)}",
                stacklevel=2,
            )


def _all_rows_advice(notes: Sequence[Note], num_rows: int, num_microbatches: int) -> str:
    """Return a line that explains `jp.all_rows`, if notes advise it; else "".

    Args:
      num_rows: the number of rows of a microbatch on all replicas together.
    """
    if not any("jp.all_rows" in n.message for n in notes):
        return ""
    meaning = "\njp.all_rows(x) gathers the rows of x from all replicas (docs/recipes/coupled-rows.md)"
    if num_microbatches == 1:
        return meaning
    return (
        f"{meaning}. It returns the rows of one microbatch, {num_rows} of the {num_rows * num_microbatches} rows of "
        f"the batch: use microbatches=1 with it instead of {num_microbatches}"
    )


def _bullet_list(notes: Sequence[Note]) -> str:
    """Return the notes as lines of a list, without duplicates, and a count of those beyond the first few."""
    lines = list(dict.fromkeys(f"- {n.line}: {n.message}" for n in notes))
    more = [f"- and {len(lines) - _MAX_LISTED} more"] if len(lines) > _MAX_LISTED else []
    return "\n".join([*lines[:_MAX_LISTED], *more])
