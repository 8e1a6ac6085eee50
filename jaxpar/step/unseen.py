"""Steps with `trace_nonfinite=True` whose last calls nobody has looked at: somebody looks at the latest when the next
step is made, or when the process ends.

Without this a script that never waits for its last state could end with status 0 and parameters that had stopped.
"""

import atexit
from collections.abc import Callable

from ..hosts import ending

_looks: dict[Callable[[], None], None] = {}  # of each such step what looks, in order: of all processes the same


def expect(look: Callable[[], None]) -> None:
    """Keeps what raises NonfiniteError where one of a step's calls was not finite, until `forget`."""
    if not _looks:
        # After `jp.initialize` has registered what waits for the other processes, and so before that: they look too.
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)
    _looks[look] = None


def forget(look: Callable[[], None]) -> None:
    """All calls of this step have been looked at."""
    _looks.pop(look, None)


def look() -> None:
    """Look at the calls of all such steps. Raises NonfiniteError."""
    for each in [*_looks]:
        each()


def _at_exit() -> None:
    while _looks and not ending.has_failed():  # else the other processes do not look
        try:
            look()
        except FloatingPointError as error:
            ending.badly(error)
