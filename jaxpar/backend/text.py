"""Text for people: sizes and numbers with units, tables, lists of names, and suggestions for misspelled names."""

import difflib
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

WIDTH = 80  # columns of a line or table
_PREFIXES = {"P": 1e15, "T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3}


def size(n: float, digits: str = ".2f") -> str:
    """Return a number of bytes as text, in decimal units: "512 B", "3.41 MB"."""
    return f"{number(n, digits)}B"


def number(n: float, digits: str = ".2f") -> str:
    """Return a number with a decimal prefix: "3.41 G"."""
    for prefix, scale in _PREFIXES.items():
        if abs(n) >= scale:
            return f"{n / scale:{digits}} {prefix}"
    return f"{n:.0f} "


def amount(text: str, unit: str = "") -> float:
    """Parse a positive number with a decimal prefix and optionally a unit, as `size` and `number` write it.

    >>> amount("40GB", "B"), amount("1.5T")
    (40000000000.0, 1500000000000.0)

    Raises:
      ValueError: the text has another form, or the number is 0 or infinite.
    """
    match = re.fullmatch(rf"([\d_,]*\.?\d+(?:e\d+)?) ?([kMGTP]?)(?:{unit})?", text.strip())
    value = float(re.sub("[_,]", "", match[1])) * _PREFIXES.get(match[2], 1.0) if match else 0.0
    if not 0 < value < float("inf"):
        raise ValueError(f"{text!r} is no amount above 0; write it as 40G{unit} or 1.5T{unit}")
    return value


def did_you_mean(name: Any, valid_names: Iterable[Any], form: str = " ({})", least: float = 0.6) -> str:
    """Return the end of an error about an unknown name: " (did you mean 'fsdp'?)"; "" if no valid name is similar.

    Args:
      name: the unknown name.
      valid_names: the names to suggest.
      form: the text around the question.
      least: the smallest similarity of a suggestion, from 0 to 1, as in `difflib.get_close_matches`.
    """
    matches = difflib.get_close_matches(str(name), [str(valid) for valid in valid_names], 1, least)
    return form.format(f"did you mean {matches[0]!r}?") if matches else ""


def reason(error: BaseException, max_length: int = 300) -> str:
    """Return an error's text in one line, without the details that TensorStore appends in brackets.

    Of a longer text, the middle is left out: TensorStore writes its cause, such as a full disk, behind several paths.

    >>> reason(ValueError("no  such   key [tensorstore_spec='...']"))
    'no such key'
    >>> reason(ValueError("cannot open " + 100 * "path/" + ": disk full"), max_length=24)
    'cannot open  ... /: disk full'
    """
    # The details are the answer of a bucket's server and the description of the array: [http_response_code='403'].
    text = re.split(r" \[[\w-]+='", " ".join(str(error).split()), maxsplit=1)[0]
    return text if len(text) <= max_length else f"{text[: max_length // 2]} ... {text[-(max_length // 2) :]}"


def few(names: Sequence[str], max_names: int = 3) -> str:
    """Join up to `max_names` names by commas, and count the others.

    >>> few(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    count = f" and {len(names) - max_names} more" if len(names) > max_names else ""
    return ", ".join(names[:max_names]) + count


def heading(strategy: str, summary: str) -> str:
    """Return a strategy and a summary in one line, or wrapped if they are too long."""
    line = f"{strategy}: {summary}"
    if len(line) <= WIDTH:
        return line
    return textwrap.fill(f"{strategy.replace(',', ', ')}: {summary}", WIDTH, subsequent_indent="  ")


def table(rows: Sequence[Sequence[str]], align: str, cut: int | None = None) -> str:
    """Return rows as a table.

    Args:
      rows: the cells of each row.
      align: "<" or ">" for each column.
      cut: the column whose cells lose their beginnings if the table is wider than `WIDTH`.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if cut is not None:
        # The width that the other columns, with two blanks between each two, leave for this one.
        widths[cut] = min(widths[cut], WIDTH - sum(widths) + widths[cut] - 2 * (len(widths) - 1))
    # Keep the end of a cell: of a path, the end tells more.
    shorten = lambda cell, width: cell if len(cell) <= width else "..." + cell[3 - width :]
    return "\n".join(
        "  ".join(
            f"{shorten(cell, width):{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True)
        ).rstrip()
        for row in rows
    )
