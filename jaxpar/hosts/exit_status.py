"""The exit status with which this process leaves by SystemExit. Python tells it to no `atexit` handler, and calls
`sys.excepthook` for every exception but this one.

Before Python runs these handlers it reads the attribute `code` of the SystemExit that nobody has caught (CPython,
pythonrun.c, `handle_system_exit`). So the attribute becomes a property that also notes what is read, where no Python
code asks for it. Everybody else sees the attribute as it was.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from typing import Any, NoReturn

_noted: list[Any] = []


def watch_exit() -> None:
    """From now on `left` knows. Called once."""
    attributes = gc.get_referents(SystemExit.__dict__)[0]  # a mapping proxy refers to the dict of the type, and no more
    member = attributes["code"]

    def code(error: SystemExit) -> Any:
        value = member.__get__(error)
        try:
            sys._getframe(1)
        except ValueError:  # no Python code has asked: it is the interpreter, on its way out
            _noted.append(value)
        return value

    attributes["code"] = property(code, member.__set__, member.__delete__)
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))  # which keeps looked up attributes
    sys.exit = _exit


def left() -> tuple[int, str]:
    """The status with which this process leaves, 0 if by no SystemExit; and the text that was given as its status."""
    value = _noted[-1] if _noted else None
    if value is None:
        return 0, ""
    return (value & 0xFF, "") if isinstance(value, int) else (1, str(value))


def _exit(status: Any = None) -> NoReturn:
    """`sys.exit`. For that one's status, unlike for `raise SystemExit`, Python 3.11 makes no exception object."""
    raise SystemExit(status)
