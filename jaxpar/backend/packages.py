"""Optional packages, imported only by the functions that need them."""

import importlib
from typing import Any

# Module -> the package that contains it, if their names differ.
_DISTRIBUTIONS = {"PIL": "pillow", "sklearn": "scikit-learn", "upath": "universal-pathlib"}


def needed(module: str, subject: str) -> Any:
    """Import and return a module of an optional package.

    Raises:
      ValueError: the package is not installed. The error begins with `subject`, such as "images need", and says how to
        install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = _DISTRIBUTIONS.get(name := module.partition(".")[0], name)
        raise ValueError(f"{subject} {package}, which is not installed: pip install {package}") from error
