"""Which line of the user's program an equation comes from.

An equation knows every frame of Python on the way to it. A loss of Optax or a layer of Flax may stand between it and
the line that somebody wrote for this model; outside of that line stands jaxpar, which traces.
"""

from __future__ import annotations

import os
from typing import Any

import flax
import jax.extend.source_info_util as source_info_util
import optax

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARIES = (*(os.path.dirname(os.path.abspath(str(package.__file__))) + os.sep for package in (flax, optax)), _HERE)
_MODELS = os.path.join(_HERE, "models", "")  # jaxpar's own are models like any other
_TRACE = os.path.join(_HERE, "program", "jaxpr.py")  # calls the user's program; further out are lines that call a step


def user_line(source: Any) -> str:
    """The innermost line that is not of JAX, Flax, Optax or jaxpar; "" if there is none."""
    seen, count = 0, 1
    while True:  # most equations need one frame, and few need all
        frames = source_info_util.summarize(source, count).split("\n")[::-1]
        for frame in frames[seen:]:
            if frame.startswith(_TRACE):
                return ""
            if not frame.startswith(_LIBRARIES) or frame.startswith(_MODELS):
                return frame
        if len(frames) < count:
            return ""
        seen, count = count, 8 * count


def line(source: Any) -> str:
    """The user's line, or where there is none the innermost one that is not of JAX; "" for a function of JAX alone."""
    return user_line(source) or source_info_util.summarize(source)


def source(eqn: Any, call: Any) -> Any:
    """Where an equation stands: as it says, or with the `call` that it is in (None: in none), since what a library
    wraps in `jax.jit` is traced once for all callers and knows no line of them.
    """
    return call if call is not None and not user_line(eqn.source_info) else eqn.source_info
