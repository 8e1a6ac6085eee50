"""The words of a command line as its options, and errors in the spelling of the command line."""

import ast
import contextlib
import dataclasses
import inspect
import io
import itertools
import re
import shlex
import shutil
import textwrap
import typing
from collections.abc import Sequence
from typing import Any, TypeVar

import tyro

from ...backend.removed import removed
from ...backend.text import did_you_mean
from ...strategy import Strategy

Options = TypeVar("Options")
# Strategies have options of these names too, as in fsdp,prefetch=1. In errors about them they keep that spelling.
_OF_STRATEGIES = {field.name for field in dataclasses.fields(Strategy)}
_QUOTED, _BARE = r"'[^']*'|\"[^\"]*\"", r"-?[\w+]+(?:[.+/:-][\w+]+)*"
_NUMBERS = {r"invalid literal for int\(\) with base 10: (.+)": "{} is no whole number",
            r"could not convert string to float: (.+)": "{} is no number"}  # fmt: skip


def parse(options: type[Options], command: str, words: Sequence[str], default: Options | None = None) -> Options:
    """The options of a command. Exits with 0 after `--help`.

    Args:
      options: a dataclass; its docstring is the command's description.
      command: its name behind `jaxpar`.
      words: what stands behind that.
      default: what the words add to; without it the options' own defaults.

    Raises ValueError, with one sentence, where a word is no option, or a value is missing or wrong.
    """
    words = list(words)
    for at in reversed([at for at, word in enumerate(words) if word == "--resume"]):
        if words[at + 1 : at + 2] != ["latest-good"]:  # it may stand alone, as a flag does
            words = [*words[: at + 1], "True", *words[at + 1 :]]
    # tyro leaves this to the terminal, which breaks words; it keeps the ends of lines that begin with a blank.
    width = min(shutil.get_terminal_size().columns, 120)
    said = "\n\n".join(
        textwrap.fill(part, width, subsequent_indent=" ")
        for part in inspect.cleandoc(options.__doc__ or "").split("\n\n")
    )
    # What is wrong with the values, the class says itself, below: tyro would draw a box around the sentence.
    lenient: Any = type(options.__name__, (options,), {"__post_init__": lambda _: None, "__doc__": options.__doc__})
    extra = {} if default is None else {"default": lenient(**vars(default))}
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            found, unknown = tyro.cli(
                lenient,
                prog=f"jaxpar {command}",
                description=said,
                args=words,
                return_unknown_args=True,
                **extra,
            )
    except SystemExit as ended:
        if not ended.code:
            raise
        flags = list(map(_flag, _names(options)))
        _refuse([word for word in words if word.startswith("--") and _flag(word[2:]) not in flags], options, command)
        raise ValueError(f"{_sentence(box.getvalue())}; {_see(command)}") from None
    _refuse(unknown, options, command)
    return options(**vars(found))


def _refuse(unknown: Sequence[str], options: type, command: str) -> None:
    """Raises ValueError for words that no option takes, where there are any."""
    for word in sorted(unknown, key=lambda word: not word.startswith("-")):
        if not word.startswith("-"):
            raise ValueError(f"{command} does not take {word!r}; {_see(command)}")
        word = word.partition("=")[0]
        if says := removed(f"Loop.{word.lstrip('-').replace('-', '_')}"):
            raise ValueError(says)
        near = did_you_mean(word, map(_flag, _names(options)))
        raise ValueError(f"{command} has no option {word!r}{near}; {_see(command)}")


def in_flags(text: str, options: Any) -> str:
    """An error with the options that it names as a command line spells them.

    >>> @dataclasses.dataclass
    ... class Example:
    ...     save_every: int = 1
    ...     resume: bool = False
    >>> in_flags("save_every=0 is too small; with resume=True use more, or another save_every=", Example)
    '--save-every 0 is too small; with --resume use more, or another --save-every'
    """

    def flag(found: re.Match[str]) -> str:
        value = found["value"]
        if value is None or value == "True":
            return _flag(found["name"])
        return (
            f"{_flag(found['name'])} {shlex.quote(ast.literal_eval(value)) if re.fullmatch(_QUOTED, value) else value}"
        )

    names = "|".join(sorted(set(_names(options)) - _OF_STRATEGIES, key=len, reverse=True))
    value = rf"(?P<value>{_QUOTED}|{_BARE})"
    return re.sub(rf"(?<![\w.,=/'\"-])(?<!\w\()(?P<name>{names})={value}?", flag, text) if names else text


def _flag(name: str) -> str:
    """`save_every` and `save-every=3` are `--save-every`."""
    return f"--{name.partition('=')[0].replace('_', '-')}"


def _names(options: Any) -> list[str]:
    """The options of a command that its help shows, and that have a flag."""
    hints = typing.get_type_hints(options, include_extras=True)
    marks: list[Any] = [tyro.conf.Suppress[int], tyro.conf.Positional[int]]
    hidden = [mark for one in marks for mark in one.__metadata__]
    shown = lambda hint: not any(mark in hidden for mark in getattr(hint, "__metadata__", ()))
    return [field.name for field in dataclasses.fields(options) if shown(hints[field.name])]


def _see(command: str) -> str:
    return f"jaxpar {command} --help explains each option"


def _sentence(box: str) -> str:
    """What tyro says in a box, without its title and the help below."""
    lines = [line.strip("│ ") for line in box.splitlines()[1:]]
    is_rule = lambda line: not line.strip("╰╯─-")
    text = " ".join(itertools.takewhile(lambda x: not is_rule(x), itertools.dropwhile(is_rule, lines))).rstrip(".")
    text = text.removeprefix("Error parsing ")
    for pattern, says in _NUMBERS.items():
        text = re.sub(pattern, lambda found, says=says: says.format(found[1]), text)
    return text
