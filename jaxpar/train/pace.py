"""Which process keeps the others waiting, and since when.

All processes take as long for a step, as they meet in its collectives. What tells them apart is how long each of them
is away from its devices between two steps: in its data, its hooks, its checkpoints. Every process says so of itself in
the coordinator's table, which needs no device, and waits for nobody; process 0 reads what is there.
"""

from __future__ import annotations

import json
import socket
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from ..buckets import Place
from ..hosts.store import Coordinator, Store
from .folder import write_whole
from .picture import plot_pace
from .recorder import read, until

FILE = "pace.jsonl"
_MUCH = 0.1  # of a step, by which a process is away for longer than half of the others
_ROUNDS = 2  # in a row, before it is said: a file that was read once is no pace


class Pace:
    """Takes the times of each step, and shares their means every so many steps.

    Args:
      every: how many steps.
      store: what all processes share.
      rank, ranks: which process this is, of how many.
    """

    def __init__(self, every: int, store: Store, rank: int, ranks: int):
        self._every, self._store, self._rank, self._ranks = every, store, rank, ranks
        self._sums, self._many = [0.0, 0.0, 0.0], 0
        self._slow, self._since, self._rounds = -1, 0, 0  # the slowest, from which round on, for how many
        self._path: Path | None = None

    @classmethod
    def of_run(cls, every: int | None) -> Pace | None:
        """That of this process; None where there is no other, or nothing is recorded."""
        if every is None or jax.process_count() == 1:
            return None
        return cls(every, Coordinator(), jax.process_index(), jax.process_count())

    def begin(self, number: int, out: Place, folder: Path) -> None:
        """Before the first step of a start, after step `number`; process 0 writes."""
        if self._rank == 0:
            self._path = folder / FILE
            write_whole(self._path, until(out / FILE, number))

    def add(self, number: int, seconds: float, away: float, waited: float) -> str:
        """What is to be told after step `number`: "" for nothing.

        Args:
          seconds: from the step before to this one.
          away: of them, outside the step and not waiting for its results.
          waited: of these, for a batch, while the devices had nothing to do.
        """
        self._sums = [total + x for total, x in zip(self._sums, (seconds, away, waited), strict=True)]
        self._many += 1
        if number % self._every:
            return ""
        means = [total / self._many for total in self._sums]
        self._sums, self._many = [0.0, 0.0, 0.0], 0
        own = dict(zip(("seconds", "away", "input"), means, strict=True), step=number, host=socket.gethostname())
        self._store.set(f"pace/{self._rank}", json.dumps(own))
        if self._rank:
            return ""
        said = {int(rank): json.loads(text) for rank, text in self._store.folder("pace").items()}
        return self._told(number, said) if len(said) == self._ranks else ""  # some have not come so far yet

    def _told(self, number: int, said: Mapping[int, Mapping[str, Any]]) -> str:
        if self._path is not None:
            by_rank = {name: [said[rank][name] for rank in sorted(said)] for name in ("seconds", "away", "input")}
            with self._path.open("a") as file:
                file.write(f"{json.dumps({'step': number, **by_rank})}\n")
        slow = slowest({rank: one["away"] for rank, one in said.items()}, said[0]["seconds"])
        if slow != self._slow:
            self._slow, self._since, self._rounds = slow, max(1, number - self._every + 1), 0
        self._rounds += 1
        if slow < 0 or self._rounds != _ROUNDS:
            return ""
        one, others = said[slow], [x["away"] for rank, x in said.items() if rank != slow]
        ms = lambda seconds: f"{1e3 * seconds:.0f} ms"
        return (
            f"rank {slow} on {one['host']} keeps the others waiting since step {self._since} or so: between two steps "
            f"it is away from its devices for {ms(one['away'])}, {ms(one['input'])} of them in its data; the "
            f"others' median is {ms(statistics.median_high(others))}, a step takes {ms(one['seconds'])}"
        )

    def end(self) -> None:
        """Draws `pace.png`."""
        if self._path is not None and (lines := read(self._path)):
            plot_pace(lines, self._path.with_suffix(".png"))


def slowest(away: Mapping[int, float], seconds: float) -> int:
    """The process that is away for longest, where that is much longer than half of the others; else -1."""
    slow = max(away, key=lambda rank: away[rank])
    others = [x for rank, x in away.items() if rank != slow]
    return slow if away[slow] - statistics.median_high(others) > _MUCH * seconds else -1
