"""The check of a traced loss: ValueError for rows that are coupled, a warning for those that may be."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from ...model.model import MAKERS, Mean, Replicated
from ...program import jaxpr as jx
from ...strategy import Strategy
from .arithmetic import named
from .labels import Labels, numbered
from .reader import Reader
from .unrolled import loops_over_rows
from .values import FROM_ALL, NUMBER, SOME, Note, Value

Trace = Callable[[Any, Mapping[str, int]], jx.Flat]
_SHOWN = 6
_SILENCE = f"If this is what you mean, give rows='independent' to {MAKERS}"


def check_coupling(
    flat: jx.Flat, out: Any, rest: Any, trace: Trace, axes: Mapping[str, int], strategy: Strategy
) -> None:
    """Raise ValueError where the loss is not a mean over rows that do not know of each other; warn where it may not be.

    Also warns where a metric is not.

    Args:
      flat: the traced loss on one block's rows; its last inputs are the leaves of `rest`, (variables, batch, key).
      out: the abstract tree of its outputs, ({name: Mean}, variables).
      rest: abstract; batch leaves are [rows, ...] unless marked as `Replicated`.
      trace: the loss on another such `rest`, with these mesh axes.
      axes: the mesh axes over which blocks are spread, name -> size.
    """
    rows = next(x.shape[0] for x in jax.tree.leaves(rest[1], is_leaf=_is_replicated) if not _is_replicated(x))
    try:
        pair, over, n = _pair(flat, rest, rows, trace, axes)
    except Exception as error:  # the user's code, at a number of rows that it may not know
        found = _read(flat, None, out, rest, rows, axes)
        why = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:120]}"
        said = f"what it makes of how many rows a block has is not known: it cannot be traced with twice {rows} rows"
        last = Note("the loss", f"{said} ({why})", False)  # and so is nothing that follows from that number
        found = {name: [*(replace(n, certain=False) for n in notes), last] for name, notes in found.items()}
    else:
        found = _read(*pair, out, rest, n, over)
        certain = [note for note in found.get("loss", ()) if note.certain]
        if certain and all(note.scale for note in certain):
            found = _in_larger(out, rest, rows, 2 * n, trace, axes) or found
    _report(found, axes, strategy, rows * math.prod(axes.values()))


def _pair(
    flat: jx.Flat, rest: Any, rows: int, trace: Trace, axes: Mapping[str, int]
) -> tuple[tuple[jx.Flat, jx.Flat], Mapping[str, int], int]:
    """The loss on two sizes of blocks of the same rows, the second twice the first, and the axes and rows of the first.

    A single replica is read as one of several, so that jp.all_rows and BatchNorm are seen, and a single row as one of
    two, whose dim is known.
    """
    name, replicas = next(iter(axes.items()), ("data", 0))
    if rows > 1 and replicas and replicas % 2 == 0:
        large = trace(_with_rows(rest, 2), {**axes, name: replicas // 2})
        if _alike(flat, large):
            return (flat, large), axes, rows
        # The loss looks at its number of rows, and is another program for twice as many.
    n = rows if rows > 1 else 2 * rows
    return *_of_twice(rest, rows, n, trace, axes), n


def _in_larger(
    out: Any, rest: Any, rows: int, n: int, trace: Trace, axes: Mapping[str, int]
) -> dict[str, list[Note]] | None:
    """The notes on a loss that would be refused as no mean, read in blocks of `n` rows; None if they cannot be had.

    In a block that has as many rows as `x.reshape(2, -1)` has groups, each has one row: a mean over it reads as a sum.
    So does what is a mean in larger blocks alone, `x.sum() / max(len(x) // 4, 1)`: hence never silence, but a warning.
    """
    try:
        pair, over = _of_twice(rest, rows, n, trace, axes)
    except Exception:  # the user's code, at a number of rows that it may not know: what has been read stands
        return None
    what = f"reads as a mean over rows in blocks of {n} rows and more, and not in those of fewer"
    found = _read(*pair, out, rest, n, over)
    return {name: [*notes, Note("the loss", what, False)] for name, notes in found.items()}


def _of_twice(
    rest: Any, rows: int, n: int, trace: Trace, axes: Mapping[str, int]
) -> tuple[tuple[jx.Flat, jx.Flat], Mapping[str, int]]:
    """The loss on blocks of `n` rows and of twice as many, and the axes of the first."""
    name = next(iter(axes), "data")
    over, half = {**axes, name: 4}, {**axes, name: 2}
    pair = trace(_with_rows(rest, n // rows), over), trace(_with_rows(rest, 2 * n // rows), half)
    if not _alike(*pair):
        with contextlib.suppress(NotImplementedError):  # in such a loop, what has no rule for vmap: they stay two
            rolled = loops_over_rows(pair[0], n, over), loops_over_rows(pair[1], 2 * n, half)
            pair = rolled if _alike(*rolled) else pair
    return pair, over


def _alike(one: jx.Flat, other: jx.Flat) -> bool:
    return [e.primitive for e in one.eqns] == [e.primitive for e in other.eqns]


def _with_rows(rest: Any, factor: int) -> Any:
    variables, batch, key = rest

    def leaf(x: Any) -> Any:
        return x if _is_replicated(x) else jax.ShapeDtypeStruct((x.shape[0] * factor, *x.shape[1:]), x.dtype)

    return variables, jax.tree.map(leaf, batch, is_leaf=_is_replicated), key


def _is_replicated(x: Any) -> bool:
    return isinstance(x, Replicated)


def _read(
    flat: jx.Flat, twin: jx.Flat | None, out: Any, rest: Any, rows: int, axes: Mapping[str, int]
) -> dict[str, list[Note]]:
    """The notes that reach each result of the loss."""
    name, replicas = next(iter(axes.items()), ("data", 0))
    reader = Reader(rows, axes, {**axes, name: replicas // 2})
    variables, batch, key = rest

    def whole(tree: Any, keyed: bool = False) -> list[Value]:
        return [Value(varies=frozenset(range(len(x.shape))), keyed=keyed) for x in jax.tree.leaves(tree)]

    rowwise = lambda x: Value("rows", Labels(numbered((rows, *x.shape[1:]), {0})))
    fed: list[Value] = []
    for x in jax.tree.leaves(batch, is_leaf=_is_replicated):
        fed += whole(x) if _is_replicated(x) else [rowwise(x)]
    inputs = [*whole(variables), *fed, *whole(key, keyed=True)]
    params = whole([v.aval for v in flat.invars[: len(flat.invars) - len(inputs)]])
    consts = reader.constants(flat.consts, twin.consts if twin is not None else ())
    values = reader.run(flat, twin, consts, [*params, *inputs])
    sums = jax.tree.unflatten(jax.tree.structure(out), list(range(len(values))))[0]
    return {name: _result(name, flat, values, mean, twin is not None) for name, mean in sums.items()}


def _result(name: str, flat: jx.Flat, values: Sequence[Value], mean: Mean, powers_known: bool) -> list[Note]:
    """What is wrong with one result: the notes on its way, or powers of the number of rows that do not fit."""
    total, count = values[mean.total], values[mean.count]  # type: ignore[index]
    line = _line(flat, flat.outvars[mean.total])  # type: ignore[call-overload]
    notes = {note for note in (*total.notes, *count.notes) if not note.of_nan}
    for x in (total, count):
        if x.kind == "rows" or (x.kind == "sum" and x.varies):
            notes.add(x.pick or Note(line, f"{SOME}; {FROM_ALL}"))
    if name != "loss":
        notes = {n for n in notes if not n.backward}
    powers = [x.power - (x.kind == "whole") for x in (total, count)]
    fits = powers[0] == powers[1] or total.zero or total.unknown or count.unknown
    if fits or not powers_known or any(n.certain for n in notes) or "coupled" in (total.kind, count.kind):
        return sorted(notes, key=lambda n: n.line)
    what = "the loss" if name == "loss" else f"metric {name!r}"
    if any(map(math.isnan, powers)):
        said = f"{what} is {NUMBER}"
    elif count.kind == "whole" and count.scalar == 1:
        said = (
            f"{what} is {_kind(powers[0])}; take the mean, .mean() for .sum(), which divides by the number of rows, or "
            "return jp.Mean(total, count)"
        )
    else:
        said = f"{what} is jp.Mean of {' and '.join(map(_kind, powers))}; give two sums over rows"
    return [*notes, Note(line, said, scale=True)]


def _kind(power: float) -> str:
    return "a mean over rows, or the same for all" if power == -1 else named(power)


def _line(flat: jx.Flat, atom: Any) -> str:
    """Where a result is computed, casts aside."""
    by = {v: eqn for eqn in flat.eqns for v in eqn.outvars}
    while not jx.is_literal(atom) and atom in by:
        eqn = by[atom]
        if eqn.primitive.name != "convert_element_type" or jx.is_literal(eqn.invars[0]) or eqn.invars[0] not in by:
            return jx.where(eqn)
        atom = eqn.invars[0]
    return "what the loss returns"


def _report(found: Mapping[str, Sequence[Note]], axes: Mapping[str, int], strategy: Strategy, rows: int) -> None:
    """Raise or warn of what was found; a microbatch has so many rows on all replicas."""
    replicas, m = math.prod(axes.values()), strategy.microbatches
    blocks = " x ".join(f"{n} {what}" for n, what in ((replicas, "replicas"), (m, "microbatches")) if n > 1)
    loss = list(found.get("loss", ()))
    certain = [n for n in loss if n.certain]
    if certain and all(n.scale for n in certain):
        raise ValueError(
            f"the loss is not a mean over rows, and {blocks} see only their own, so the result would not be one "
            f"device's:\n{_listed(certain)}"
        )
    if certain:
        raise ValueError(
            f"the loss couples rows, and {blocks} see only their own, so the result would not be one device's:\n"
            f"{_listed(certain)}{_of_microbatch(certain, rows, m)}\n{_SILENCE}"
        )
    if loss:
        warnings.warn(
            f"the loss may couple rows, which {blocks} spread:\n"
            f"{_listed(loss)}{_of_microbatch(loss, rows, m)}\n{_SILENCE}",
            stacklevel=2,
        )
    for name, notes in found.items():
        if name != "loss" and (certain := [n for n in notes if n.certain]):
            does = "is not a mean over rows" if all(n.scale for n in certain) else "couples rows"
            warnings.warn(
                f"metric {name!r} {does}, and is averaged over {blocks} that see only their own:\n"
                f"{_listed(certain)}{_of_microbatch(certain, rows, m)}",
                stacklevel=2,
            )


def _of_microbatch(notes: Sequence[Note], rows: int, microbatches: int) -> str:
    """Which rows `jp.all_rows` returns, where notes advise it and a batch has several microbatches."""
    if microbatches == 1 or not any("jp.all_rows" in n.what for n in notes):
        return ""
    return (
        f"\njp.all_rows(x) returns the rows of one microbatch, {rows} of the {rows * microbatches} rows of the batch: "
        f"use microbatches=1 with it, in place of {microbatches}"
    )


def _listed(notes: Sequence[Note]) -> str:
    lines = list(dict.fromkeys(f"- {n.line}: {n.what}" for n in notes))
    more = [f"- and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return "\n".join([*lines[:_SHOWN], *more])
