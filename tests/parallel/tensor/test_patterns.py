"""Keys of rules: the patterns that people write are accepted; those that `re` would never finish are refused."""

import pytest

from jaxpar.parallel.tensor.dims import DIMS, ENDS, HEADS, PRESETS
from jaxpar.parallel.tensor.patterns import pattern

ACCEPTED = [
    "ffn/up/kernel", "(query|key|value)/kernel", r"layers/\d+/attn/.*kernel", ".*", "[+*]+/x", r"\(a+\)+", "(?i:Up)/w",
    r".*/layers_\d+/.*attn.*/.*(up|gate)_proj.*/kernel", "(?:a|b)?/kernel", "(ab){1,3}", "(?>a+)+x", "(a++)+x",
    "(?P<n>up|down)/w", "x(?=.*)y", "[^/]*/[^/]*/[^/]*/[^/]*/[^/]*/[^/]*", r"(self_|cross_)?attn/[a-z]+\d*/kernel",
]  # fmt: skip
REFUSED = [
    "(a+)+$", "(a|a)*b", "((a*)b)+", "(?:.*)+", "(a{1,9}){2,90}", "([a-z]+)*x", "(a*?)*?", "(?:a|b|ab)+", "(a+){5}",
    ".*.*.*.*.*x",
]  # fmt: skip


@pytest.mark.parametrize("key", [*ACCEPTED, *PRESETS, *ENDS, *HEADS, *DIMS])
def test_what_people_write_is_taken(key: str) -> None:
    pattern("rules", key)


@pytest.mark.parametrize("key", REFUSED)
def test_what_would_take_for_ever_is_refused(key: str) -> None:
    # (a+)+$ on a path with 40 times the letter a hung make_train_step.
    with pytest.raises(ValueError, match=r"rules: .* repeats .*, and may take for ever to match; write it without"):
        pattern("rules", key)


@pytest.mark.parametrize("key", ["(a+", "[", "*", "(" * 5000, "a{99999999999999999999}"])
def test_what_is_no_pattern_is_named(key: str) -> None:
    with pytest.raises(ValueError, match=r"is no regular expression .*; to match these characters themselves, use"):
        pattern("rules", key)
