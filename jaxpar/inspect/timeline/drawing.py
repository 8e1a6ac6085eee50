"""A pipeline's schedule drawn in the terminal, before anything runs; `svg.py` draws it as SVG.

    rank 0  F0F1......B0--B1--
    rank 1  ..F0B0--F1B1--....

The width of a cell is proportional to its time. Every chunk is assumed to take the same time, its backward twice the
time of its forward, and each half of the backward (I, W) the time of the forward. Prologue, epilogue and messages are
not drawn.
"""

import itertools
from collections.abc import Iterator
from fractions import Fraction

from rich.text import Text

from ...backend.text import size as bytes_of
from ...parallel.pipeline.schedules import Column, Schedule
from ...strategy.schedules.operations import TIME, WORDS, Kind
from .svg import INK, kinds_of, tint

_MAX_BANDS = 6  # a schedule with more bands is drawn without its middle
_LABEL_WIDTH = 8  # characters to the left of a rank's cells
Columns = list[Column]


def draw(schedule: Schedule, width: int = 80, color: bool = False) -> Iterator[Text]:
    """Yield lines of at most `width` characters: bands of time below each other, each with a line for every rank.

    With `color`, a cell shows the number of its microbatch, and its colour shows kind and chunk. Without, a cell reads
    `F3`, or `F3.1` if there are chunks.
    """
    num_ranks, num_microbatches, num_chunks = schedule.ranks, schedule.microbatches, schedule.chunks
    # A letter and the microbatch's number; without colours also a dot and the chunk's number.
    cell_width = 1 + len(str(num_microbatches - 1)) + (0 if color or num_chunks == 1 else 1 + len(str(num_chunks - 1)))
    total_time, characters_available = _total_time(schedule.columns), width - _LABEL_WIDTH
    # Cells are wide enough for their text, and up to two characters wider if the schedule fits into one band.
    characters_per_unit = max(cell_width, min(cell_width + 2, characters_available // total_time))
    bands = _split_into_bands(schedule, characters_available // characters_per_unit)
    num_shown = _MAX_BANDS // 2 if len(bands) > _MAX_BANDS else len(bands)
    for band_index, band in enumerate(bands):
        # A long schedule repeats itself in the middle.
        if num_shown <= band_index < len(bands) - num_shown:
            if band_index == num_shown:
                last_tick = bands[-num_shown - 1][-1][0]
                yield Text(
                    f"{'':{_LABEL_WIDTH}}ticks {band[0][0]} to {last_tick} are left out here; --svg has them\n",
                    style="dim",
                )
            continue
        yield Text(f"{'tick':<{_LABEL_WIDTH}}{_tick_ruler(band, characters_per_unit)}", style="dim")
        for rank in range(num_ranks):
            line = Text(f"{f'rank {rank}':<{_LABEL_WIDTH}}")
            for column in band:
                op, cell_characters = schedule.op(column.kinds, rank, column.tick), characters_per_unit * column.length
                if op is None:
                    line.append("." * cell_characters, style="dim")
                    continue
                op_characters = characters_per_unit * TIME[op.kind]
                if color:
                    line.append(
                        f"{op.microbatch:<{op_characters}}", style=f"{INK} on {tint(op.kind, op.chunk, num_chunks)}"
                    )
                else:
                    # Dashes fill the cell of a backward, which is twice as wide.
                    name = f"{op.kind}{op.microbatch}" + (f".{op.chunk}" if num_chunks > 1 else "")
                    line.append(f"{name:{'-' if op.kind == 'B' else ' '}<{op_characters}}")
                line.append("." * (cell_characters - op_characters), style="dim")
            yield line
        yield Text()
    yield from _legend(kinds_of(schedule), num_chunks, color)
    yield Text()


def _legend(kinds: list[Kind], chunks: int, color: bool) -> Iterator[Text]:
    """Yield the legend."""
    if not color:
        suffix, chunk_text = (".0", ", chunk 0") if chunks > 1 else ("", "")
        *names, last_name = [f"{kind}1{suffix}" for kind in kinds]
        words = [WORDS[kind] for kind in kinds]
        if len(kinds) == 2:
            yield Text(
                f"{names[0]} and {last_name}: {words[0]} and {words[1]} of microbatch 1{chunk_text}; a dot is idle"
            )
        else:
            yield Text(f"{', '.join(kinds)}: {', '.join(words)}")
            examples = " and ".join([", ".join(names), last_name] if names else [last_name])
            yield Text(f"{examples}: of microbatch 1{chunk_text}; a dot is idle")
        return
    line = Text()
    for kind in kinds:
        line.append(f"{WORDS[kind]} " if chunks > 1 else "")
        for chunk in range(chunks):
            line.append(f" {chunk if chunks > 1 else WORDS[kind]} ", style=f"{INK} on {tint(kind, chunk, chunks)}")
        line.append("  ")
    yield line.append("by chunk" if chunks > 1 else "numbers are microbatches")


def _total_time(columns: Columns) -> int:
    """Return the time of some columns, in forwards of one chunk."""
    return sum(column.length for column in columns)


def _split_into_bands(schedule: Schedule, max_time: int) -> list[Columns]:
    """Split the columns at ticks into the fewest bands of at most `max_time` units, of about the same length."""
    # Bands break between ticks only, so that a tick's columns stay together.
    ticks = [list(tick) for _, tick in itertools.groupby(schedule.columns, key=lambda column: column.tick)]

    def bands_up_to(limit: int) -> list[Columns]:
        bands: list[Columns] = [[]]
        for tick in ticks:
            if bands[-1] and _total_time(bands[-1]) + _total_time(tick) > limit:
                bands.append([])
            bands[-1] += tick
        return bands

    num_bands = len(bands_up_to(max_time))
    # The smallest limit with the same number of bands makes them about equally long.
    return next(bands for limit in itertools.count(1) if len(bands := bands_up_to(limit)) <= num_bands)


def _tick_ruler(band: Columns, characters_per_unit: int) -> str:
    """Return a line with the numbers of ticks where they begin, as many as fit."""
    line, position, previous_tick = "", 0, -1
    for tick, _, length in band:
        # A number needs a blank in front of it, or it is left out.
        if tick != previous_tick and len(line) <= max(0, position - 1):
            line = f"{line:<{position}}{tick}"
        position, previous_tick = position + characters_per_unit * length, tick
    return line[:position]


def activations_in_flight(schedule: Schedule, size: int | None = None) -> list[str]:
    """Return the most activations that each rank stores, as text; `size` is the bytes of one, if known."""
    counts = [schedule.in_flight(rank) for rank in range(schedule.ranks)]
    return [f"{count}" + (f" ({bytes_of(count * size, '.3g')})" if size else "") for count in counts]


def summary(schedule: Schedule, size: int | None = None) -> dict[str, str]:
    """Return the drawing in numbers: time, bubble and activations in flight; `size` is the bytes of one, if known."""
    num_chunks, stored_by_rank = schedule.chunks, activations_in_flight(schedule, size)
    in_flight_text = (
        f"{stored_by_rank[0]} on every rank"
        if len(set(stored_by_rank)) == 1
        else f"{', '.join(stored_by_rank)} on ranks 0 to {len(stored_by_rank) - 1}"
    )
    room_text = f" = {bytes_of(schedule.slots * size, '.3g')}" if size else ""
    # A microbatch takes 1 for its forward and 2 for its backward.
    kinds, useful_time = kinds_of(schedule), 3 * schedule.microbatches
    # A bubble of one of these lengths is printed as a formula: k (p - 1) / v for k of 3 and 1.
    bubble_formulas = {
        Fraction(
            factor * (schedule.ranks - 1), num_chunks
        ): f" = 3m + {factor if factor > 1 else ''}(p-1){'/v' if num_chunks > 1 else ''}"
        for factor in (3, 1)
    }
    formula = bubble_formulas.get(schedule.time - useful_time, "")
    cost_text = ", ".join(f"{TIME[kind]} for {kind}" for kind in kinds)
    idle_text = f"{float(schedule.bubble):.1%} of the time"
    if schedule.branches:
        longest_span = schedule.timed(TIME)[1]
        idle_share = float(1 - Fraction(useful_time * num_chunks) / longest_span)
        idle_text += f"; {idle_share:.1%} between a rank's first operation and its last, at most"
    return {
        "schedule": f"{schedule.title}: {schedule.ticks} {'slots' if schedule.branches else 'ticks'}",
        "time": f"{float(schedule.time):g}{formula}: a rank's layers take {cost_text}",
        "bubble": idle_text,
        "in flight": f"{in_flight_text}, each of one microbatch{' and chunk' if num_chunks > 1 else ''}",
        "room": f"for {schedule.slots} on every rank{room_text}, as all run one program",
    }
