"""Whose lines equations, compiled programs and errors name: the user's, and not those of the libraries between."""

import functools
import os
import sys

_NAMES = (
    "jax",
    "flax",
    "optax",
    "equinox",
    "haiku",
    "haliax",
    "einops",
    "chex",
    "lineax",
    "optimistix",
    "diffrax",
    "jaxpar",
)


@functools.cache  # who loads a library later has no line of it before
def of_library(file: str) -> bool:
    """Whether a file is of a library that calls what the user wrote, or is called by it: JAX, those of modules, solvers
    and named dims, and jaxpar but for its models, which are like any other.
    """
    for name in _NAMES:
        home = os.path.dirname(os.path.abspath(getattr(sys.modules.get(name), "__file__", None) or os.devnull))
        if name in sys.modules and file.startswith(home + os.sep):
            return name != "jaxpar" or not file.startswith(os.path.join(home, "models", ""))
    return False
