"""How the processes of a run learn whether an action that all of them took failed on one of them, and why.

Each process writes [number of its last action, its failures] under its own key, and polls the keys of the others.
"""

from __future__ import annotations

import json
import time

from .store import Store

LONGEST = 3600  # seconds to wait for a silent process; the watchdog ends most such runs earlier
_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.2  # seconds between looks at the table
_MAX_FAILURES = 100  # failures that a process leaves in the table, for others that are several actions behind


class Outcomes:
    """This process among those that take the same actions in the same order. No device takes part.

    `store` is the coordinator's table; None for one process.
    """

    def __init__(self, process: int, processes: int, store: Store | None):
        self.process, self.processes, self._store = process, processes, store
        self._failures: dict[str, dict[str, str]] = {}  # this process's failures: action -> number -> problem

    def shared(self, name: str, number: int, problem: str) -> str:
        """Publish whether an action failed on this process, and return the problem of the first process that failed.

        A process that failed does not wait for the others, and nobody waits once one has failed.

        Args:
          name: the action.
          number: counts the calls for this action, 1, 2 and so on, equally on all processes.
          problem: what failed on this process; "" if nothing did.

        Returns:
          "process N: problem"; "" if the action succeeded on all processes.
        """
        if self._store is None:
            return problem
        failures = self._failures.setdefault(name, {})
        if problem:
            failures[str(number)] = f"process {self.process}: {problem}"
            if len(failures) > _MAX_FAILURES:
                del failures[next(iter(failures))]  # the oldest
        # All failures so far, not only this one: others may still be several actions behind.
        self._store.set(f"{name}/{self.process}", json.dumps([number, failures]))
        if problem:
            return failures[str(number)]
        pause, deadline = _FIRST_PAUSE, time.monotonic() + LONGEST
        while True:
            reports = [json.loads(self._store.get(f"{name}/{rank}") or "[0, {}]") for rank in range(self.processes)]
            if failure := next((failures[str(number)] for _, failures in reports if str(number) in failures), ""):
                return failure
            # Success is known only once every process has reported this action, or a later one.
            late = [rank for rank, (last, _) in enumerate(reports) if last < number]
            if not late:
                return ""
            if time.monotonic() > deadline:
                return f"process {late[0]} has not said in {LONGEST} s how it fared; see what it is doing"
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
