"""Tell the user's files from those of libraries, so that equations and errors name a line that the user wrote."""

import functools
import os
import sys

# Libraries that call the user's functions, or are called by them.
_NAMES = "jax flax optax equinox haiku haliax einops chex lineax optimistix diffrax jaxpar".split()


@functools.cache  # a library that is imported later cannot have called anything before
def of_library(file: str) -> bool:
    """Return whether a file belongs to a library rather than to the user.

    Libraries are JAX, those for modules, solvers and named dims, and jaxpar without its models, which are written as a
    user's model would be.
    """
    # A library that is not imported has no frames, and importing it to find its folder would be slow.
    for name in _NAMES:
        folder = os.path.dirname(os.path.abspath(getattr(sys.modules.get(name), "__file__", None) or os.devnull))
        if name in sys.modules and file.startswith(folder + os.sep):
            return name != "jaxpar" or not file.startswith(os.path.join(folder, "models", ""))
    return False
