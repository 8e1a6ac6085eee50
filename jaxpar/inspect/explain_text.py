"""Numbers and tables as text, and what `explain` prints."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from .ledger import Collective

if TYPE_CHECKING:
    from .explain import Explanation

WIDTH = 80
MOVED = 6  # moves that are listed


def size(n: float) -> str:
    """Bytes as text: "512 B", "3.41 MB" (decimal units)."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(n) >= scale:
            return f"{n / scale:.2f} {unit}"
    return f"{n:.0f} B"


def number(n: float) -> str:
    """A number with a decimal prefix: "3.41 G"."""
    for unit, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(n) >= scale:
            return f"{n / scale:.2f} {unit}"
    return f"{n:.0f} "


def heading(strategy: str, rest: str) -> str:
    """A strategy and more, in one line where it fits."""
    line = f"{strategy}: {rest}"
    if len(line) <= WIDTH:
        return line
    return textwrap.fill(f"{strategy.replace(',', ', ')}: {rest}", WIDTH, subsequent_indent="  ")


def table(rows: Sequence[Sequence[str]], align: str, whole: int | None = None) -> str:
    """Rows in columns, aligned by "<" and ">"; the column `whole` gives way where a row would be too long, by dots."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if whole is not None:
        widths[whole] = min(widths[whole], WIDTH - sum(widths) + widths[whole] - 2 * (len(widths) - 1))
    return "\n".join(
        "  ".join(f"{_cut(cell, w):{a}{w}}" for cell, a, w in zip(row, align, widths, strict=True)).rstrip()
        for row in rows
    )


def _cut(cell: str, width: int) -> str:
    return cell if len(cell) <= width else "..." + cell[3 - width :]


# -- explain -----------------------------------------------------------------------------------------------------------

_MEMORY = {
    "params": "parameters",
    "grads": "gradients",
    "optimizer": "optimizer state",
    "saved": "saved activations",
    "program": "program",
    "arguments": "  arguments",
    "outputs": "  outputs",
    "temporaries": "  temporaries",
    "total": "  total",
}


def text(found: Explanation) -> str:
    """What `explain` found, in 80 columns."""
    axes = ", ".join(f"{axis}={n}" for axis, n in found.axes.items()) or "no axes"
    hosts = f" on {found.hosts} hosts" if found.hosts > 1 else ""
    parts = [
        heading(found.strategy, f"{found.devices}{hosts} ({axes}), {found.parameters:,} parameters"),
        _memory(found),
    ]
    if found.flops:
        flops = ", ".join(f"{number(n)}FLOP in {dtype}" for dtype, n in found.flops.items())
        parts.append(f"matrix products of a device and step: {flops}")
    if found.transfers:
        parts.append(_transfers(found))
    parts += [_ledger(found), _checks(found)] if found.ledger or found.checks else ["collectives: none"]
    listed = {
        "not sharded, or padded": found.notes,
        "gathered by tensor ranks for want of a rule": {at: size(n) for at, n in found.gathered.items()},
        "layers": found.loops,
        "moved by the compiler for the update": _moves(found),
    }
    parts += ["\n".join([title, *_wrapped(lines)]) for title, lines in listed.items() if lines]
    parts += [textwrap.fill(remark, WIDTH, subsequent_indent="  ", break_on_hyphens=False) for remark in found.remarks]
    return "\n\n".join("\n".join(line.rstrip() for line in part.splitlines()) for part in parts)


def _memory(found: Explanation) -> str:
    rows = [["memory", *found.memory]]
    for name, label in _MEMORY.items():
        values = (getattr(m, name) for m in found.memory.values())
        rows.append([label, *(value if isinstance(value, str) else size(value) for value in values)])
    return table(rows, "<" + ">" * len(found.memory))


def _moves(found: Explanation) -> dict[str, str]:
    """The largest, by what is moved."""
    lines = {str(move): move.message.removeprefix(f"{move}: ") for move in found.moves[:MOVED]}
    more = len(found.moves) - MOVED
    return lines | ({f"and {more} more": "see .moves, or .json()"} if more > 0 else {})


def _transfers(found: Explanation) -> str:
    rows = [["exchange", "of", "arrays", "closed form", "found", "ratio"]]
    for t in found.transfers:
        ratio = f"{t.found / t.expected:.2f}" if t.expected else "-"
        rows.append([t.kind, t.what, str(t.arrays), size(t.expected), size(t.found), ratio])
    return table(rows, "<<>>>>")


def _ledger(found: Explanation) -> str:
    rows = [["collective", "axes", "dtype", "count", "bytes", "hosts", "hidden"]]
    groups: dict[tuple[Any, ...], list[Collective]] = {}
    for one in found.ledger:
        groups.setdefault((one.kind, one.axes, one.dtype), []).append(one)
    for (kind, axes, dtype), same in groups.items():
        total, hidden = sum(one.bytes for one in same), sum(one.bytes for one in same if one.overlapped)
        share = f"{hidden / total:.0%}" if any(one.asynchronous for one in same) else "-"
        where = "across" if axes in found.across else "inside"
        counts = [one.count for one in same]
        times = "?" if None in counts else str(sum(n or 0 for n in counts))
        rows.append([kind, "+".join(axes), dtype, times, size(total), where, share])
    total = sum(one.bytes for one in found.ledger)
    beside = f"exposed: {size(found.exposed)} of {size(total)}, sent while nothing is computed"
    return f"{table(rows, '<<<>>>>', whole=1)}\n{beside}"


def _checks(found: Explanation) -> str:
    rows = [
        ["expected v found", "", "times", "", "bytes", "", ""],
        ["", "axes", "formula", "jaxpr", "formula", "compiled", "ratio"],
    ]
    names = dict.fromkeys(c.strategy for c in found.checks)
    for name in sorted(names, key=lambda name: name == "scalars"):
        rows.append([name, "", "", "", "", "", ""])
        for c in (c for c in found.checks if c.strategy == name):
            ratio = "-" if c.ratio is None or name == "scalars" else f"{c.ratio:.2f}"
            written = "?" if c.written_count is None else str(c.written_count)
            counts = [str(c.expected_count), written]
            rows.append([f"  {c.kind}", "+".join(c.axes), *counts, size(c.expected), size(c.found), ratio])
    said = "formula: the closed form; jaxpr: what the step calls; compiled: what runs"
    return f"{table(rows, '<<>>>>>', whole=1)}\n{said}"


def _wrapped(notes: dict[str, str]) -> Iterable[str]:
    return (
        textwrap.fill(f"{path}  {note}", WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
        for path, note in notes.items()
    )
