"""jaxpar: train any Flax model under any parallelism strategy, chosen by one value.

`__init__.pyi` lists the public names. Each is imported from its room when it is first used, so that a program pays for
the rooms that it uses.
"""

import importlib.util
import sys
from typing import Any

from .backend.quiet import filter_start, is_command

if is_command():
    filter_start()

import lazy_loader

from .backend.cpu_compiler import set_flag
from .backend.moved import MovedModules
from .backend.removed import removed
from .layout.mesh import enough_threads

__version__ = "0.1.0"
_imported, _, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, and say what to use instead of a name that was removed."""
    if says := removed(f"jp.{name}"):
        raise ImportError(says)  # of an AttributeError `from jaxpar import name` does not show the text
    if name in __all__:
        return _imported(name)
    # A room, as in `jp.data.Rows`, which works in other packages once any part of the room is imported.
    if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


sys.meta_path.append(MovedModules())
set_flag()
enough_threads()  # where XLA_FLAGS simulates devices; the backend reads both when it starts
