"""Checks of the machines that a run uses: `jaxpar doctor`."""
