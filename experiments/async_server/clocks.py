"""Who may go on: the bound on staleness, and the leases of workers that may die. Nothing here knows of arrays or RPC.

A worker's clock is the number of gradients that it has pushed. With staleness s a worker may begin its next step while
it is at most s ahead of the slowest (Ho et al. 2013, stale synchronous parallel, section 2):

    s = 2          clock  0 1 2 3 4 5
    worker 0              = = = =         at 4: may not go on, 4 - 1 > 2
    worker 1              =               the slowest, at 1
    worker 2              = = =           at 3: may go on

Ho's bound is on clocks and not on updates, and a worker's wait ends for a reason that it can name: the slowest. Dean et
al. 2012 (Downpour SGD) have no bound, here `staleness=None`: fastest, and nothing is known of how old a gradient is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


class Lost(RuntimeError):
    """A worker of whom nothing was heard for too long, or who has been replaced."""


@dataclass
class _Worker:
    clock: int = 0
    token: int = -1  # which process has this number; -1: none yet
    seen: float = 0.0  # seconds: when it was last heard of
    moved: float = 0.0  # when it last pushed, or was last kept waiting for others


class Clocks:
    """The clocks of the workers 0 to `workers` - 1.

    Args:
      workers: how many take part; until one has joined it counts as standing at 0.
      staleness: s; None for no bound.
      lease: seconds after which a worker of whom nothing is heard is lost.
      patience: seconds that a worker may take for one step, or to join, however alive it is.
      now: seconds from some beginning.
    """

    def __init__(
        self,
        workers: int,
        staleness: int | None,
        lease: float,
        patience: float,
        now: Callable[[], float] = time.monotonic,
    ):
        if workers < 1:
            raise ValueError(f"workers={workers}: use 1 or more")
        if staleness is not None and staleness < 0:
            raise ValueError(f"staleness={staleness}: use 0 (synchronous) or more, or None for no bound")
        if not 0 < lease <= patience:
            raise ValueError(f"lease={lease}, patience={patience}: use 0 < lease <= patience, in seconds")
        self.workers, self.staleness, self.lease, self.patience, self._now = workers, staleness, lease, patience, now
        self._taken, self._reached = 0, 0
        self.live = {number: _Worker(seen=now(), moved=now()) for number in range(workers)}

    @property
    def slowest(self) -> int:
        """The clock of the slowest worker that still takes part."""
        return min((worker.clock for worker in self.live.values()), default=self._reached)

    def join(self, number: int) -> tuple[int, int]:
        """A process takes a worker's number: its token and its clock, which is the slowest's if it comes later.

        Raises ValueError for a number that does not exist or that a living worker has.
        """
        if not 0 <= number < self.workers:
            raise ValueError(f"worker {number} of workers={self.workers}: number them 0 to {self.workers - 1}")
        old = self.live.get(number)
        if old is not None and old.token >= 0:
            raise ValueError(f"worker {number} takes part already; give each worker a number of its own")
        clock = self.slowest
        self.live[number] = _Worker(clock, self._taken, self._now(), self._now())
        self._taken += 1
        return self._taken - 1, clock

    def heard(self, number: int, token: int) -> None:
        """A message has come from a worker. Raises `Lost` if it takes part no more."""
        worker = self.live.get(number)
        if worker is None or worker.token != token:
            raise Lost(
                f"worker {number} was given up after {self.lease:g} s without a sign of it or {self.patience:g} s "
                "without a step; start it again, or raise the server's lease= or patience="
            )
        worker.seen = self._now()

    def may_start(self, number: int) -> bool:
        """Whether the worker may begin its next step; if not, waiting is no fault of its own."""
        worker = self.live[number]
        if self.staleness is None or worker.clock - self.slowest <= self.staleness:
            return True
        worker.moved = self._now()
        return False

    def pushed(self, number: int) -> int:
        """The worker has pushed a gradient: the clock that it was of."""
        worker = self.live[number]
        worker.clock, worker.moved = worker.clock + 1, self._now()
        self._reached = max(self._reached, worker.clock)
        return worker.clock - 1

    def leave(self, number: int) -> None:
        """The worker takes part no more, and nobody waits for it."""
        self.live.pop(number, None)

    def expire(self) -> dict[int, str]:
        """Removes the workers that are lost; returns why, by their number."""
        now, gone = self._now(), {}
        for number, worker in list(self.live.items()):
            if worker.token >= 0 and now - worker.seen > self.lease:
                gone[number] = f"no sign of it for {self.lease:g} s, last at step {worker.clock}"
            elif now - worker.moved > self.patience:
                what = f"no step in {self.patience:g} s, last at step {worker.clock}"
                gone[number] = what if worker.token >= 0 else f"it has not joined in {self.patience:g} s"
        for number in gone:
            self.leave(number)
        return gone
