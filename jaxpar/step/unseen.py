"""Steps with `trace_nonfinite=True` whose last calls have not been checked for NaN and infinity yet.

The latest call is checked when the next step is made, or when the process ends. Without this, a script that never
waits for its last state could end with status 0 although its parameters had stopped changing.
"""

import atexit
from collections.abc import Callable

from ..hosts import ending

# The check of each such step, as an ordered set. All processes have the same order, since a check may communicate.
_checks: dict[Callable[[], None], None] = {}


def expect(check: Callable[[], None]) -> None:
    """Register the check of a step until `forget`: it raises NonfiniteError if a call was not finite."""
    if not _checks:
        # Exit handlers run in reverse order. This one is registered after that of `jp.initialize`, which waits for the
        # other processes, so that all processes still run while they check.
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)
    _checks[check] = None


def forget(check: Callable[[], None]) -> None:
    """Remove the check of a step, all calls of which have been checked."""
    _checks.pop(check, None)


def check_all() -> None:
    """Check the calls of all registered steps. Raises NonfiniteError."""
    # A check that passes removes itself from the dict.
    for check in [*_checks]:
        check()


def _at_exit() -> None:
    """Check all steps before the process ends; a step that was not finite sets the exit status."""
    # After a failure the other processes do not check, and this one would wait for them.
    while _checks and not ending.has_failed():
        try:
            check_all()
        except FloatingPointError as error:
            ending.badly(error)
