"""A pipeline's schedule as SVG: a lane for each rank, cells as wide as they take time, for white and black pages."""

from collections.abc import Iterator

from ...parallel.pipeline.schedules import Schedule
from ...strategy.schedules.operations import KINDS, TIME, WORDS, Kind

INK = "#10151c"  # the colour of numbers, legible on all tints
_TINTS = {
    "F": (0x4C8DD6, 0xC2DAF6),
    "B": (0xD9822B, 0xF8DBB8),
    "I": (0xB46BC8, 0xE9CFF2),
    "W": (0x3C9D5D, 0xBCE5C8),
}  # kind -> colours of the first and of the last chunk
_LEFT, _TOP, _LANE, _GAP, _RIGHT = 64, 84, 26, 6, 96
_STYLE = (
    "text{fill:#1f2328;font:13px system-ui,sans-serif}.soft{fill:#59636e}.idle{fill:#818b98;fill-opacity:.14}"
    ".axis{stroke:#818b98;stroke-opacity:.5}.name{font-weight:600}.mid{text-anchor:middle}.end{text-anchor:end}"
    f"rect.op{{stroke:#fff;stroke-width:1}}text.op{{fill:{INK};font-size:11px;text-anchor:middle}}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.soft{fill:#9198a1}rect.op{stroke:#0d1117}}"
)


def tint(kind: str, chunk: int, chunks: int) -> str:
    """Return the colour of a chunk's operations, lighter from chunk to chunk: F blue, B orange, I violet, W green."""
    first, last = (value.to_bytes(3, "big") for value in _TINTS[kind])
    share = chunk / max(1, chunks - 1)
    # Red, green and blue are mixed one by one.
    return "#" + bytes(round(a + (b - a) * share) for a, b in zip(first, last, strict=True)).hex()


def kinds_of(schedule: Schedule) -> list[Kind]:
    """Return the kinds of operations that a schedule has."""
    kinds = {op.kind for column in schedule.table() for ops in column for op in ops}
    return [kind for kind in KINDS if kind in kinds]


def svg(schedule: Schedule, in_flight_texts: list[str]) -> str:
    """Return the picture as SVG text.

    Args:
      in_flight_texts: for each rank, the text to the right of its lane: the activations that it stores.
    """
    num_ranks, num_chunks, columns = schedule.ranks, schedule.chunks, schedule.columns
    total_time = sum(column.length for column in columns)
    digits = len(str(schedule.microbatches - 1))
    # About 860 units in all, but at least as wide as the numbers in the cells.
    time_width = max(min(26.0, 860 / total_time), 6.5 * digits + 6)
    legend, legend_right = _legend(kinds_of(schedule), num_chunks)
    # The captions need a minimum width, however short the schedule is.
    width, bottom = max(_LEFT + total_time * time_width + _RIGHT, legend_right, 640), _TOP + num_ranks * (_LANE + _GAP)
    title = f"{schedule.title}: bubble {float(schedule.bubble):.1%}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {bottom + 46:g}" role="img">',
        f'<title>{title}</title><style>{_STYLE}</style><text class="name" x="{_LEFT}" y="22">{title}</text>',
        *legend,
        f'<text class="soft" x="{_LEFT + total_time * time_width + 10:g}" y="{_TOP - 10}">in flight</text>',
    ]
    for rank in range(num_ranks):
        y = _TOP + rank * (_LANE + _GAP)
        lines += [
            f'<text class="end" x="{_LEFT - 10}" y="{y + 18}">rank {rank}</text>',
            f'<rect class="idle" x="{_LEFT}" y="{y}" width="{total_time * time_width:g}" height="{_LANE}"/>',
            *_lane(schedule, rank, time_width, y),
            f'<text x="{_LEFT + total_time * time_width + 10:g}" y="{y + 18}">{in_flight_texts[rank]}</text>',
        ]
    return "\n".join([*lines, *_axis(total_time, time_width, bottom, num_chunks), "</svg>"]) + "\n"


def _lane(schedule: Schedule, rank: int, time_width: float, y: int) -> Iterator[str]:
    """Yield the cells of one rank."""
    x = float(_LEFT)
    for tick, kinds, length in schedule.columns:
        if op := schedule.op(kinds, rank, tick):
            width = TIME[op.kind] * time_width
            stage, fill = schedule.stage(rank, op.chunk), tint(op.kind, op.chunk, schedule.chunks)
            yield (
                f"<g><title>{op.kind}{op.microbatch}, stage {stage}, tick {tick}</title>"
                f'<rect class="op" x="{x:g}" y="{y}" width="{width:g}" height="{_LANE}" rx="3" fill="{fill}"/>'
                f'<text class="op" x="{x + width / 2:g}" y="{y + 17}">{op.microbatch}</text></g>'
            )
        # Idle time too takes its width.
        x += length * time_width


def _legend(kinds: list[Kind], chunks: int) -> tuple[list[str], float]:
    """Return the legend, and its right edge."""
    lines, x = [], _LEFT
    for kind in kinds:
        for chunk in range(chunks):
            fill = tint(kind, chunk, chunks)
            lines.append(f'<rect class="op" x="{x}" y="38" width="16" height="16" rx="3" fill="{fill}"/>')
            x += 16
        word = WORDS[kind] + (", twice as long" if TIME[kind] == 2 else "")
        word += f", chunks 0 to {chunks - 1}" if chunks > 1 else ""
        lines.append(f'<text x="{x + 6}" y="51">{word}</text>')
        x += 28 + 7 * len(word)  # SVG has no text metrics: a character is about 7 units wide
    lines.append(f'<rect class="idle" x="{x}" y="38" width="16" height="16"/><text x="{x + 22}" y="51">idle</text>')
    return lines, x + 60


def _axis(total_time: int, time_width: float, y: int, chunks: int) -> Iterator[str]:
    """Yield the axis of time, with round numbers at least 48 units apart."""
    tick_spacing = next(
        step for base in (1, 10, 100, 1000) for step in (base, 2 * base, 5 * base) if step * time_width >= 48
    )
    yield f'<path class="axis" d="M{_LEFT} {y}H{_LEFT + total_time * time_width:g}"/>'
    for time in range(0, total_time + 1, tick_spacing):
        yield f'<text class="soft mid" x="{_LEFT + time * time_width:g}" y="{y + 16}">{time}</text>'
    caption = "time, in forwards of one " + ("chunk" if chunks > 1 else "rank") + " and microbatch"
    yield f'<text class="soft" x="{_LEFT - 4}" y="{y + 36}">{caption}</text>'
