"""A pipeline's schedule drawn before anything runs: in the terminal; `svg.py` draws it as SVG.

    rank 0  F0F1......B0--B1--
    rank 1  ..F0B0--F1B1--....

Cells are as wide as they are long, on the assumption that every chunk takes the same time, its backward twice that of
its forward, and each half of the backward (I, W) as long as the forward. Prologue, epilogue and messages are not drawn.
"""

import itertools
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
from rich.text import Text

from ...backend.text import size as bytes_of
from ...parallel.pipeline.schedules import Column, Schedule
from ...step.pipeline import Piped, rows_of
from ...strategy.schedules.operations import TIME, WORDS, Kind
from ..step_view import StepView as Step
from .svg import INK, kinds_of, tint

_BANDS = 6  # a schedule of more is drawn without its middle
_LABEL = 8  # characters left of a lane
Columns = list[Column]


def draw(schedule: Schedule, width: int = 80, color: bool = False) -> Iterator[Text]:
    """Lines of `width` characters or less: bands of time one under the other, in each a line for every rank.

    With `color` a cell shows its microbatch's number, and its colour the rest; without, `F3` or, with chunks, `F3.1`.
    """
    p, m, v = schedule.ranks, schedule.microbatches, schedule.chunks
    label = 1 + len(str(m - 1)) + (0 if color or v == 1 else 1 + len(str(v - 1)))
    total, room = _time(schedule.columns), width - _LABEL
    unit = max(label, min(label + 2, room // total))
    bands = _bands(schedule, room // unit)
    shown = _BANDS // 2 if len(bands) > _BANDS else len(bands)
    for number, band in enumerate(bands):
        if shown <= number < len(bands) - shown:
            if number == shown:
                last = bands[-shown - 1][-1][0]
                yield Text(
                    f"{'':{_LABEL}}ticks {band[0][0]} to {last} are left out here; --svg has them\n", style="dim"
                )
            continue
        yield Text(f"{'tick':<{_LABEL}}{_ruler(band, unit)}", style="dim")
        for rank in range(p):
            line = Text(f"{f'rank {rank}':<{_LABEL}}")
            for column in band:
                op, cell = schedule.op(column.kinds, rank, column.tick), unit * column.length
                if op is None:
                    line.append("." * cell, style="dim")
                    continue
                own = unit * TIME[op.kind]
                if color:
                    line.append(f"{op.microbatch:<{own}}", style=f"{INK} on {tint(op.kind, op.chunk, v)}")
                else:
                    name = f"{op.kind}{op.microbatch}" + (f".{op.chunk}" if v > 1 else "")
                    line.append(f"{name:{'-' if op.kind == 'B' else ' '}<{own}}")
                line.append("." * (cell - own), style="dim")
            yield line
        yield Text()
    yield from _key(kinds_of(schedule), v, color)
    yield Text()


def _key(kinds: list[Kind], chunks: int, color: bool) -> Iterator[Text]:
    """What cells mean."""
    if not color:
        suffix, of = (".0", ", chunk 0") if chunks > 1 else ("", "")
        *names, last = [f"{kind}1{suffix}" for kind in kinds]
        words = [WORDS[kind] for kind in kinds]
        if len(kinds) == 2:
            yield Text(f"{names[0]} and {last}: {words[0]} and {words[1]} of microbatch 1{of}; a dot is idle")
        else:
            yield Text(f"{', '.join(kinds)}: {', '.join(words)}")
            yield Text(
                f"{' and '.join([', '.join(names), last] if names else [last])}: of microbatch 1{of}; a dot is idle"
            )
        return
    line = Text()
    for kind in kinds:
        line.append(f"{WORDS[kind]} " if chunks > 1 else "")
        for chunk in range(chunks):
            line.append(f" {chunk if chunks > 1 else WORDS[kind]} ", style=f"{INK} on {tint(kind, chunk, chunks)}")
        line.append("  ")
    yield line.append("by chunk" if chunks > 1 else "numbers are microbatches")


def _time(columns: Columns) -> int:
    return sum(column.length for column in columns)


def _bands(schedule: Schedule, room: int) -> list[Columns]:
    """The columns in as few parts as take `room` units of time each, of whole ticks and about the same length."""
    ticks = [list(tick) for _, tick in itertools.groupby(schedule.columns, key=lambda column: column.tick)]

    def bands_of(most: int) -> list[Columns]:
        bands: list[Columns] = [[]]
        for tick in ticks:
            if bands[-1] and _time(bands[-1]) + _time(tick) > most:
                bands.append([])
            bands[-1] += tick
        return bands

    fewest = len(bands_of(room))
    return next(bands for most in itertools.count(1) if len(bands := bands_of(most)) <= fewest)


def _ruler(band: Columns, unit: int) -> str:
    """The numbers of ticks where they begin, as many as fit."""
    line, at, before = "", 0, -1
    for tick, _, length in band:
        if tick != before and len(line) <= max(0, at - 1):
            line = f"{line:<{at}}{tick}"
        at, before = at + unit * length, tick
    return line[:at]


def held(schedule: Schedule, size: int | None = None) -> list[str]:
    """The most activations that each rank holds, with their bytes if the size of one is known."""
    counts = [schedule.in_flight(rank) for rank in range(schedule.ranks)]
    return [f"{count}" + (f" ({bytes_of(count * size, '.3g')})" if size else "") for count in counts]


def summary(schedule: Schedule, size: int | None = None) -> dict[str, str]:
    """The drawing in numbers: time, bubble, activations in flight, with their bytes if that of one is known."""
    v, each = schedule.chunks, held(schedule, size)
    ranks = f"{each[0]} on every rank" if len(set(each)) == 1 else f"{', '.join(each)} on ranks 0 to {len(each) - 1}"
    room = f" = {bytes_of(schedule.slots * size, '.3g')}" if size else ""
    kinds, work = kinds_of(schedule), 3 * schedule.microbatches
    over = {
        Fraction(k * (schedule.ranks - 1), v): f" = 3m + {k if k > 1 else ''}(p-1){'/v' if v > 1 else ''}"
        for k in (3, 1)
    }
    costs = ", ".join(f"{TIME[kind]} for {kind}" for kind in kinds)
    idle = f"{float(schedule.bubble):.1%} of the time"
    if schedule.branches:
        longest = schedule.timed(TIME)[1]
        idle += (
            f"; {float(1 - Fraction(work * v) / longest):.1%} between a rank's first operation and its last, at most"
        )
    return {
        "schedule": f"{schedule.title}: {schedule.ticks} {'slots' if schedule.branches else 'ticks'}",
        "time": f"{float(schedule.time):g}{over.get(schedule.time - work, '')}: a rank's layers take {costs}",
        "bubble": idle,
        "in flight": f"{ranks}, each of one microbatch{' and chunk' if v > 1 else ''}",
        "room": f"for {schedule.slots} on every rank{room}, as all run one program",
    }


def slot_bytes(step: Step, batch: Any) -> int:
    """Bytes of one slot of a pipelined step: what a rank keeps of one microbatch's forward through one chunk.

    `batch` is arrays or `jax.ShapeDtypeStruct`s, [rows, ...]. Nothing is compiled or allocated.
    """
    assert step.schedule is not None
    slots = rows_of(step.schedule).stashes if step.layout.storage.cut else step.schedule.slots
    return _held_bytes(step, batch)[0] // slots


def held_bytes(step: Step, batch: Any) -> int:
    """Bytes of what a rank of a pipelined step has room for, of all slots: from F to B, or to W; and from I to W."""
    return sum(_held_bytes(step, batch))


def _held_bytes(step: Step, batch: Any) -> list[int]:
    """Those of forwards for backwards, and of I for W."""
    schedule = step.schedule
    assert schedule is not None
    state = step.abstract_state()

    def held(stored: Any, variables: Any, batch: Any, key: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
        loss, rows = step.local.bound(stored, variables, batch, key)
        piped = Piped(step.tracing, loss, variables, rows, jax.random.split(key, schedule.microbatches))
        return piped.pipeline(jnp.float32(1)).held()

    step.check(batch)
    stored = state.copy if step.layout.copied else state.params

    def mapped(stored: Any, variables: Any, batch: Any, key: jax.Array) -> Any:
        return step.mapped(held, batch, jax.sharding.PartitionSpec())(jnp.int32(0), stored, variables, key)[0]

    kept = jax.eval_shape(mapped, stored, state.variables, batch, state.key)
    return [sum(x.size * x.dtype.itemsize for x in part) for part in kept]
