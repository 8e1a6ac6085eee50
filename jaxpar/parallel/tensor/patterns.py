"""Compile the keys of rules: regular expressions for whole components at the end of a leaf's path.

Python's `re` backtracks. Where one repetition stands inside another, as in `(a+)+$`, the number of ways to divide a
path among them doubles with each character. `pattern` refuses such a key before it is matched.
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
# Repetitions that cost little: counts up to {1,4}, and as many unbounded repetitions with nothing between them.
_CHEAP_REPEATS = 4


def pattern(table: str, key: str) -> re.Pattern[str]:
    """Compile a key of a table of rules, a regular expression for the last components of a path.

    Raises:
      ValueError: if the key is not a regular expression, or may take exponential time to match.

    >>> pattern("rules", "ffn/(up|gate)/kernel").fullmatch("layers/0/ffn/up/kernel") is not None
    True
    """
    try:
        compiled = re.compile(f"(?:.*/)?(?:{key})")
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(
            f"{table}: {key[:100]!r} is no regular expression ({error}); to match these characters themselves, use "
            f"{re.escape(key[:100])!r}"
        ) from None
    if part := _ambiguous_repetition(key):
        raise ValueError(
            f"{table}: {key[:100]!r} repeats {part[:100]!r}, which itself repeats or has alternatives, and may "
            "take for ever to match; write it without the outer or the inner repetition, such as 'layers/.*/kernel'"
        )
    return compiled


@functools.lru_cache(maxsize=1024)
def _ambiguous_repetition(key: str) -> str:
    """Return the first repeated group that can match one text in several ways; "" if there is none.

    With too many repetitions in a row, return the whole key.
    """
    # For each open group, the outermost (no group) first: its start and opening, and whether its content is ambiguous,
    # that is, can match one text in several ways.
    starts, is_ambiguous = [], [False]
    last_group = ("", False)  # the group that ended with the previous token, and whether it is ambiguous
    adjacent_repeats, is_atom = 0, False  # repetitions with nothing between them; whether the last token is an atom
    for token in _TOKEN.finditer(key):
        kind, text = token.lastgroup, token[0]
        # An atom that the current token does not repeat stands between two repetitions.
        adjacent_repeats = 0 if is_atom and kind != "repeat" else adjacent_repeats
        is_atom = kind in ("single", "other")
        if kind == "open":
            starts.append((token.start(), text))
            is_ambiguous.append(False)
        elif kind == "close" and starts:
            begin, opening = starts.pop()
            is_group_ambiguous = is_ambiguous.pop() and opening != "(?>"  # `re` does not backtrack into atomic groups
            is_ambiguous[-1] |= is_group_ambiguous
            last_group = (key[begin : token.end()], is_group_ambiguous)
            continue
        elif kind == "either" and starts:
            is_ambiguous[-1] = True
        elif kind == "repeat" and _repeats_often(text):
            adjacent_repeats += 1
            # A second `+` makes a repetition possessive: it does not backtrack.
            if last_group[1] and not text.endswith("+", 1):
                return last_group[0] + text
            if adjacent_repeats > _CHEAP_REPEATS:
                return key
            is_ambiguous[-1] |= not text.endswith("+", 1)
        last_group = ("", False)
    return ""


def _repeats_often(quantifier: str) -> bool:
    """Return whether a quantifier allows more than `_CHEAP_REPEATS` repetitions."""
    if quantifier[0] != "{":
        return quantifier[0] != "?"
    *_, upper = quantifier.rstrip("+?")[1:-1].split(",")
    return upper == "" or int(upper) > _CHEAP_REPEATS
