"""Keys of rules as patterns: regular expressions for whole components at the end of a leaf's path.

Python's `re` goes back and tries again, and where one repetition stands in another, `(a+)+$`, the ways to split a path
among them double with each character. Such a pattern is refused before it is tried.
"""

import functools
import re

_TOKEN = re.compile(
    r"""
    (?P<single> \\. | \[ \^? \]? (?: \\. | [^\]\\] )* \] )                # an escape, a class of characters
  | (?P<open> \( (?: \? (?: P?<[=!]? [^>)]* >? | [:=!>#] | [a-zA-Z-]*:? ) )? )
  | (?P<close> \) )
  | (?P<repeat> (?: [*+?] | \{ \d* (?: , \d* )? \} ) [+?]? )
  | (?P<either> \| )
  | (?P<other> . )
    """,
    re.VERBOSE | re.DOTALL,
)
_FEW = 4  # repetitions that cost little: {1,3}, and as many unbounded ones with nothing between them


def pattern(what: str, key: str) -> re.Pattern[str]:
    """A key of a table of rules, compiled. `what` is whose the table is.

    Raises ValueError where it is no regular expression, or one that may take for ever.

    >>> pattern("rules", "ffn/(up|gate)/kernel").fullmatch("layers/0/ffn/up/kernel") is not None
    True
    """
    try:
        found = re.compile(f"(?:.*/)?(?:{key})")
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(
            f"{what}: {key[:100]!r} is no regular expression ({error}); escape what stands for itself: "
            f"{re.escape(key[:100])!r}"
        ) from None
    if part := _nested(key):
        raise ValueError(
            f"{what}: {key[:100]!r} repeats {part[:100]!r}, which repeats or chooses within, and may take for ever to "
            "match; write it without the outer or the inner repetition, such as 'layers/.*/kernel'"
        )
    return found


@functools.lru_cache(maxsize=1024)
def _nested(key: str) -> str:
    """The first group that is repeated and can be split in several ways; or all of it, with too many in a row."""
    starts, free = [], [False]  # by open group: where it began; whether its content can be split in several ways
    last = ("", False)  # the group that has just ended, and whether it can
    row, atom = 0, False  # repetitions with nothing between them; whether the last token is not repeated so far
    for token in _TOKEN.finditer(key):
        kind, text = token.lastgroup, token[0]
        row = 0 if atom and kind != "repeat" else row
        atom = kind in ("single", "other")
        if kind == "open":
            starts.append((token.start(), text))
            free.append(False)
        elif kind == "close" and starts:
            begin, opened = starts.pop()
            inside = free.pop() and opened != "(?>"  # an atomic group is not gone back into
            free[-1] |= inside
            last = (key[begin : token.end()], inside)
            continue
        elif kind == "either" and starts:
            free[-1] = True
        elif kind == "repeat" and _many(text):
            row += 1
            if last[1] and not text.endswith("+", 1):
                return last[0] + text
            if row > _FEW:
                return key
            free[-1] |= not text.endswith("+", 1)
        last = ("", False)
    return ""


def _many(repeat: str) -> bool:
    """Whether a quantifier allows for more than a few."""
    if repeat[0] != "{":
        return repeat[0] != "?"
    *_, most = repeat.rstrip("+?")[1:-1].split(",")
    return most == "" or int(most) > _FEW
