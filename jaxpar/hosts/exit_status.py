"""The exit status with which this process leaves by SystemExit, for its `atexit` handlers.

Python passes this status to no `atexit` handler, and calls `sys.excepthook` for every exception except SystemExit.
But before the handlers run, the interpreter reads the attribute `code` of the uncaught SystemExit (CPython,
pythonrun.c, `handle_system_exit`). So `watch_exit` replaces the attribute with a property, which notes the value when
no Python code asks for it. Everybody else sees the attribute as it was.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from typing import Any, NoReturn

_noted: list[Any] = []


def watch_exit() -> None:
    """Begin to note the exit status. Called once."""
    # A mapping proxy refers only to the type's dict, which Python code cannot reach otherwise.
    attributes = gc.get_referents(SystemExit.__dict__)[0]
    member = attributes["code"]

    def code(error: SystemExit) -> Any:
        value = member.__get__(error)
        try:
            sys._getframe(1)
        except ValueError:  # no Python frame called this: the interpreter is on its way out
            _noted.append(value)
        return value

    attributes["code"] = property(code, member.__set__, member.__delete__)
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))  # drops the type's cache of attribute look-ups
    sys.exit = _exit


def status_and_text() -> tuple[int, str]:
    """Return the status with which this process leaves, 0 without a SystemExit; and the text given as its status."""
    value = _noted[-1] if _noted else None
    if value is None:
        return 0, ""
    return (value & 0xFF, "") if isinstance(value, int) else (1, str(value))


def _exit(status: Any = None) -> NoReturn:
    """Replace `sys.exit`, for whose status Python 3.11 makes no exception object, unlike for `raise SystemExit`."""
    raise SystemExit(status)
