"""Parsing of command lines: words to options, and errors in one sentence with the spelling of the command line.

tyro parses the words. This file adds what tyro does not do: help that terminals do not break, one sentence instead of a
box for an error (`_sentence`), hints for misspelt options, and `in_flags`, which rewrites the errors of the library.
"""

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
# Names of a strategy's options, as in fsdp,prefetch=1. Some are options of a command too. Errors spell all of them as
# the strategy does.
_STRATEGY_OPTIONS = {field.name for field in dataclasses.fields(Strategy)}
# Values in an error text: in quotes, or as a number, name or path.
_QUOTED, _BARE = r"'[^']*'|\"[^\"]*\"", r"-?[\w+]+(?:[.+/:-][\w+]+)*"
# Errors of Python about numbers, and how to say them here.
_NUMBER_ERRORS = {r"invalid literal for int\(\) with base 10: (.+)": "{} is not a whole number",
                  r"could not convert string to float: (.+)": "{} is not a number"}  # fmt: skip


def parse(options: type[Options], command: str, words: Sequence[str], default: Options | None = None) -> Options:
    """Parse the options of a command. Exits with 0 after `--help`.

    Args:
      options: a dataclass; its docstring is the command's description.
      command: the command's name, as behind `jaxpar`.
      words: the words behind that name.
      default: options that the words change; the defaults of the class if None.

    Raises:
      ValueError: with one sentence, if a word is no option, or a value is missing or wrong.
    """
    words = list(words)
    # 1. `--resume` may stand alone, as a flag does. tyro wants a value behind it.
    # From the last word to the first, so that the other positions stay valid.
    for i in reversed([i for i, word in enumerate(words) if word == "--resume"]):
        if words[i + 1 : i + 2] != ["latest-good"]:
            words = [*words[: i + 1], "True", *words[i + 1 :]]
    # 2. tyro leaves the breaking of lines to the terminal, which breaks words. Lines that begin with a blank it leaves
    # as they are.
    width = min(shutil.get_terminal_size().columns, 120)
    description = "\n\n".join(
        textwrap.fill(part, width, subsequent_indent=" ")
        for part in inspect.cleandoc(options.__doc__ or "").split("\n\n")
    )
    # 3. Parse without the checks of the class, whose errors tyro would put into a box. The last line runs them.
    unchecked: Any = type(options.__name__, (options,), {"__post_init__": lambda _: None, "__doc__": options.__doc__})
    extra = {} if default is None else {"default": unchecked(**vars(default))}
    stderr = io.StringIO()
    # tyro prints an error and exits. Here an error is an exception, and goes the way of all others.
    try:
        with contextlib.redirect_stderr(stderr):
            parsed, unknown = tyro.cli(
                unchecked,
                prog=f"jaxpar {command}",
                description=description,
                args=words,
                return_unknown_args=True,
                **extra,
            )
    except SystemExit as exit_:
        if not exit_.code:  # after --help
            raise
        # tyro names a missing value before an unknown option. The option is the more likely mistake.
        flags = list(map(_flag, _names(options)))
        _reject([word for word in words if word.startswith("--") and _flag(word[2:]) not in flags], options, command)
        raise ValueError(f"{_sentence(stderr.getvalue())}; {_help_hint(command)}") from None
    _reject(unknown, options, command)
    return options(**vars(parsed))


def _reject(unknown: Sequence[str], options: type, command: str) -> None:
    """Raise ValueError for the words that no option takes, if there are any: about options before other words."""
    # Words that look like options come first: what follows a misspelt option may be its value.
    for word in sorted(unknown, key=lambda word: not word.startswith("-")):
        if not word.startswith("-"):
            raise ValueError(f"{command} does not take {word!r}; {_help_hint(command)}")
        word = word.partition("=")[0]
        if message := removed(f"Loop.{word.lstrip('-').replace('-', '_')}"):
            raise ValueError(message)
        hint = did_you_mean(word, map(_flag, _names(options)))
        raise ValueError(f"{command} has no option {word!r}{hint}; {_help_hint(command)}")


def in_flags(text: str, options: Any) -> str:
    """Return an error text in which options have the spelling of the command line.

    >>> @dataclasses.dataclass
    ... class Example:
    ...     save_every: int = 1
    ...     resume: bool = False
    >>> in_flags("save_every=0 is too small; with resume=True use more, or another save_every=", Example)
    '--save-every 0 is too small; with --resume use more, or another --save-every'
    """

    def flag(match: re.Match[str]) -> str:
        value = match["value"]
        if value is None or value == "True":
            return _flag(match["name"])
        return (
            f"{_flag(match['name'])} {shlex.quote(ast.literal_eval(value)) if re.fullmatch(_QUOTED, value) else value}"
        )

    # Longest first, so that `save_every=` does not match a shorter name that it ends with.
    names = "|".join(sorted(set(_names(options)) - _STRATEGY_OPTIONS, key=len, reverse=True))
    value = rf"(?P<value>{_QUOTED}|{_BARE})"
    # A name right behind `word(` is an argument of a Python call, and one behind a comma or = is a strategy's: both
    # stay.
    return re.sub(rf"(?<![\w.,=/'\"-])(?<!\w\()(?P<name>{names})={value}?", flag, text) if names else text


def _flag(name: str) -> str:
    """Return the flag of an option: `--save-every` for `save_every` and for `save-every=3`."""
    return f"--{name.partition('=')[0].replace('_', '-')}"


def _names(options: Any) -> list[str]:
    """Return the names of the options that are shown in the help and have a flag: no hidden or positional ones."""
    # tyro marks hidden and positional options in the annotation. Take the marks from two examples.
    hints = typing.get_type_hints(options, include_extras=True)
    annotations: list[Any] = [tyro.conf.Suppress[int], tyro.conf.Positional[int]]
    markers = [marker for annotation in annotations for marker in annotation.__metadata__]
    has_flag = lambda hint: not any(marker in markers for marker in getattr(hint, "__metadata__", ()))
    return [field.name for field in dataclasses.fields(options) if has_flag(hints[field.name])]


def _help_hint(command: str) -> str:
    return f"jaxpar {command} --help explains each option"


def _sentence(box: str) -> str:
    """Return the sentence in a box that tyro prints, without the box, its title and the help below."""
    lines = [line.strip("│ ") for line in box.splitlines()[1:]]
    is_rule = lambda line: not line.strip("╰╯─-")
    # Blank lines and rules come first. The next rule ends the sentence.
    text = " ".join(itertools.takewhile(lambda x: not is_rule(x), itertools.dropwhile(is_rule, lines))).rstrip(".")
    text = text.removeprefix("Error parsing ")
    for pattern, template in _NUMBER_ERRORS.items():
        text = re.sub(pattern, lambda match, template=template: template.format(match[1]), text)
    return text
