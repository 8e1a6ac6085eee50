"""Numbers and tables as text."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

WIDTH = 80


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
