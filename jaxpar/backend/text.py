"""What people read: sizes, tables, and the name that they may have meant."""

import difflib
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

WIDTH = 80
_PREFIXES = {"P": 1e15, "T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3}


def size(n: float, digits: str = ".2f") -> str:
    """Bytes as text, in decimal units: "512 B", "3.41 MB"."""
    return f"{number(n, digits)}B"


def number(n: float, digits: str = ".2f") -> str:
    """A number with a decimal prefix: "3.41 G"."""
    for prefix, scale in _PREFIXES.items():
        if abs(n) >= scale:
            return f"{n / scale:{digits}} {prefix}"
    return f"{n:.0f} "


def amount(text: str, unit: str = "") -> float:
    """What `size` and `number` write, read: decimal prefixes, the unit or none. Raises ValueError for anything else.

    >>> amount("40GB", "B"), amount("1.5T")
    (40000000000.0, 1500000000000.0)
    """
    found = re.fullmatch(rf"([\d_,]*\.?\d+(?:e\d+)?) ?([kMGTP]?)(?:{unit})?", text.strip())
    value = float(re.sub("[_,]", "", found[1])) * _PREFIXES.get(found[2], 1.0) if found else 0.0
    if not 0 < value < float("inf"):
        raise ValueError(f"{text!r} is no amount above 0; write it as 40G{unit} or 1.5T{unit}")
    return value


def did_you_mean(given: Any, known: Iterable[Any], form: str = " ({})", least: float = 0.6) -> str:
    """The end of an error about a name that is not known: " (did you mean 'fsdp'?)"; "" where none is near.

    Args:
      given: the name.
      known: the names that there are.
      form: what the question stands in.
      least: how alike the two must be, from 0 to 1.
    """
    near = difflib.get_close_matches(str(given), [str(name) for name in known], 1, least)
    return form.format(f"did you mean {near[0]!r}?") if near else ""


def reason(error: BaseException, most: int = 300) -> str:
    """Return what an error says in one line, without the description of the array that TensorStore puts behind it.

    >>> reason(ValueError("no  such   key [tensorstore_spec='...']"))
    'no such key'
    """
    return " ".join(str(error).split()).partition(" [tensorstore_spec")[0][:most]


def few(names: Sequence[str], most: int = 3) -> str:
    """Names joined by commas, abbreviated after `most`.

    >>> few(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def heading(strategy: str, rest: str) -> str:
    """A strategy and more, in one line where it fits."""
    line = f"{strategy}: {rest}"
    if len(line) <= WIDTH:
        return line
    return textwrap.fill(f"{strategy.replace(',', ', ')}: {rest}", WIDTH, subsequent_indent="  ")


def table(rows: Sequence[Sequence[str]], align: str, cut: int | None = None) -> str:
    """Rows in columns, aligned by "<" and ">"; where a row is too long, the column `cut` keeps the ends of cells."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if cut is not None:
        widths[cut] = min(widths[cut], WIDTH - sum(widths) + widths[cut] - 2 * (len(widths) - 1))
    end = lambda cell, width: cell if len(cell) <= width else "..." + cell[3 - width :]
    return "\n".join(
        "  ".join(f"{end(cell, w):{a}{w}}" for cell, a, w in zip(row, align, widths, strict=True)).rstrip()
        for row in rows
    )
