"""How the processes of a run learn what became of something that all of them did: whether one failed, and why."""

from __future__ import annotations

import json
import time

from .store import Store

LONGEST = 3600  # seconds that a process waits for one that says nothing; the watchdog ends most such runs earlier
_PAUSES = 0.002, 0.2  # seconds between looks at the table: the first, and the longest
_REMEMBERED = 100  # failures that a process leaves in the table, for others that are still behind


class Outcomes:
    """This process among those that do things together, in one order. No device takes part.

    Args:
      process, processes: its number, and how many there are.
      store: the coordinator's table; None for one process.
    """

    def __init__(self, process: int, processes: int, store: Store | None):
        self.process, self.processes, self._store = process, processes, store
        self._failures: dict[str, dict[str, str]] = {}  # what went wrong here, by name and number

    def shared(self, name: str, number: int, problem: str) -> str:
        """Tell the others what went wrong here, "" for nothing, and return what went wrong on the first that failed.

        A process that failed does not wait for the others, and nobody waits once one has failed.

        Args:
          name, number: what was done, and for which time: 1, 2, and so on, the same on all processes.
        """
        if self._store is None:
            return problem
        failures = self._failures.setdefault(name, {})
        if problem:
            failures[str(number)] = f"process {self.process}: {problem}"
            if len(failures) > _REMEMBERED:
                del failures[next(iter(failures))]
        self._store.set(f"{name}/{self.process}", json.dumps([number, failures]))
        if problem:
            return failures[str(number)]
        pause, end = _PAUSES[0], time.monotonic() + LONGEST
        while True:
            told = [json.loads(self._store.get(f"{name}/{host}") or "[0, {}]") for host in range(self.processes)]
            if failed := next((failures[str(number)] for _, failures in told if str(number) in failures), ""):
                return failed
            late = [host for host, (last, _) in enumerate(told) if last < number]
            if not late:
                return ""
            if time.monotonic() > end:
                return f"process {late[0]} has not said in {LONGEST} s how it fared; see what it is doing"
            time.sleep(pause)
            pause = min(2 * pause, _PAUSES[1])
