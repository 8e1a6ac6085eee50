"""Packages that are needed only by some."""

import importlib
from typing import Any

# Packages whose modules have other names.
_DISTRIBUTIONS = {"PIL": "pillow", "sklearn": "scikit-learn", "upath": "universal-pathlib"}


def needed(module: str, who: str) -> Any:
    """A module of a package of which jaxpar needs no more than its users have, imported when they call for it.

    Raises ValueError where it is not installed; `who` begins it, as in "images need".
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = _DISTRIBUTIONS.get(name := module.partition(".")[0], name)
        raise ValueError(f"{who} {package}, which is not installed: pip install {package}") from error
