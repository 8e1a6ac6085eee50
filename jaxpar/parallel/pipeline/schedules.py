"""Pipeline schedules as data: which microbatch each rank runs forwards (F) and backwards (B) at each tick.

    1F1B (Narayanan et al. 2021, Megatron-LM, section 2.2.1), p = 4 ranks, m = 6 microbatches

    tick      0    1    2    3    4    5    6    7    8    9   10   11
    rank 0   F0   F1   F2   F3   F4   F5   B0   B1   B2   B3   B4   B5
    rank 1        F0   F1   F2   F3  F4B0 F5B1  B2   B3   B4   B5
    rank 2             F0   F1  F2B0 F3B1 F4B2 F5B3  B4   B5
    rank 3                 F0B0 F1B1 F2B2 F3B3 F4B4 F5B5
             warm-up, F    | steady, F and B       | cool-down, B

One rule makes every schedule. At tick t, rank s runs its forward number u = t - s and its backward number
w = t - lag - (p - 1 - s); with v chunks a rank (Narayanan et al. 2021, section 2.2.2) both count groups of p
microbatches that pass through one chunk after the other, backwards from the last chunk:

    lag = v p - 1           1F1B, and interleaved 1F1B for v > 1
    lag = m v + p - 1       GPipe (Huang et al. 2019, section 2.3): every forward, then every backward

With a forward through all of a rank's layers as 1 and a backward as 2, a step takes 3 m + 3 (p - 1) / v: the bubble is
(p - 1) / v of m microbatches' work. Every rank does its forward and its backward in one tick, so that 1F1B holds up to
2 p - 1 microbatches on the first rank where the paper's holds p.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, NamedTuple

import numpy as np

from ...text import did_you_mean

SCHEDULES = ("gpipe", "1f1b")


class Op(NamedTuple):
    """One rank's forward or backward of one microbatch through one of its chunks."""

    kind: Literal["F", "B"]
    chunk: int
    microbatch: int


class Phase(NamedTuple):
    """Ticks in a row that all run the same operations: forwards, backwards, and the epilogue after the last layer.

    `start` is the first tick of the first of `repeats` rounds of `inner` phases, or of `length` ticks.
    """

    start: int
    length: int
    forward: bool
    backward: bool
    epilogue: bool


@dataclass(frozen=True)
class Schedule:
    """A schedule for p ranks, m microbatches and v chunks a rank.

    Raises ValueError for an unknown kind, for a count below 1, and where m is no multiple of p and v > 1.

    >>> schedule = Schedule("1f1b", ranks=4, microbatches=8)
    >>> schedule.ticks, schedule.slots, f"{float(schedule.bubble):.1%}"
    (14, 7, '27.3%')
    >>> print(Schedule("gpipe", ranks=2, microbatches=2))
    rank 0  F0    F1    .     .     B0    B1
    rank 1  .     F0    F1    B0    B1    .
    """

    kind: str
    ranks: int
    microbatches: int
    chunks: int = 1

    def __post_init__(self) -> None:
        p, m, v = self.ranks, self.microbatches, self.chunks
        if self.kind not in SCHEDULES:
            raise ValueError(
                f"schedule={self.kind!r} is unknown; use one of {', '.join(SCHEDULES)}; interleaved is 1f1b with "
                f"chunks=2 or more{did_you_mean(self.kind, SCHEDULES, '; {}')}"
            )
        for name, count in (("pipe", p), ("microbatches", m), ("chunks", v)):
            if count < 1:
                raise ValueError(f"{name}={count} is not a count; use a whole number from 1")
        if v > 1 and m % p:
            raise ValueError(
                f"chunks={v} sends microbatches in groups of pipe={p}, and microbatches={m} is no multiple of it; use "
                f"{-(-m // p) * p} microbatches, or chunks=1"
            )

    @property
    def title(self) -> str:
        """The schedule in words."""
        chunks = f", {self.chunks} chunks a rank" if self.chunks > 1 else ""
        return f"{self.kind}, {self.ranks} ranks, {self.microbatches} microbatches{chunks}"

    @property
    def lag(self) -> int:
        """Ticks from the last rank's first forward of a group to its first backward, as the rule counts them."""
        p, m, v = self.ranks, self.microbatches, self.chunks
        return v * p - 1 if self.kind == "1f1b" else m * v + p - 1

    @property
    def ticks(self) -> int:
        """The number of ticks: m v + lag + p - 1."""
        return self.microbatches * self.chunks + self.lag + self.ranks - 1

    @property
    def time(self) -> Fraction:
        """The time of a step, 3 m + 3 (p - 1) / v, where a forward through all of a rank's layers takes 1, and a
        backward 2.
        """
        return 3 * (self.microbatches + Fraction(self.ranks - 1, self.chunks))

    @property
    def bubble(self) -> Fraction:
        """The part of a step's time that each rank is idle."""
        return 1 - 3 * self.microbatches / self.time

    def op(self, kind: Literal["F", "B"], rank: int, tick: int) -> Op | None:
        """What a rank runs at a tick, if anything."""
        p, v = self.ranks, self.chunks
        number = tick - rank if kind == "F" else tick - self.lag - (p - 1 - rank)
        if not 0 <= number < self.microbatches * v:
            return None
        group, rest = divmod(number, p * v)
        chunk = rest // p if kind == "F" else v - 1 - rest // p
        return Op(kind, chunk, group * p + rest % p)

    def table(self) -> list[list[tuple[Op, ...]]]:
        """Operations by tick and rank: none, one, or a forward and then a backward."""
        both = ("F", "B")
        return [
            [tuple(op for kind in both if (op := self.op(kind, rank, tick))) for rank in range(self.ranks)]
            for tick in range(self.ticks)
        ]

    def epilogue(self, tick: int) -> int | None:
        """The microbatch that leaves the last layer at a tick, if one does: its loss is computed there and then."""
        op = self.op("F", self.ranks - 1, tick)
        return op.microbatch if op and op.chunk == self.chunks - 1 else None

    def phases(self) -> list[tuple[int, list[Phase]]]:
        """The ticks in order, as (repeats, phases): two phases that alternate stand there once."""
        p, m, v = self.ranks, self.microbatches, self.chunks

        def flags(tick: int) -> tuple[bool, bool, bool]:
            return tick < m * v + p - 1, tick >= self.lag, self.epilogue(tick) is not None

        runs = []
        for (f, b, e), ticks in itertools.groupby(range(self.ticks), key=flags):
            first, *rest = ticks
            runs.append(Phase(first, 1 + len(rest), f, b, e))
        out: list[tuple[int, list[Phase]]] = []
        while runs:
            repeats = 1
            kind = [phase[1:] for phase in runs[:2]]
            while len(kind) == 2 and [phase[1:] for phase in runs[2 * repeats : 2 * repeats + 2]] == kind:
                repeats += 1
            size = 2 if repeats > 1 else 1
            out.append((repeats, runs[:size]))
            runs = runs[size * repeats :]
        return out

    @functools.cached_property
    def _slots(self) -> tuple[int, np.ndarray, np.ndarray]:
        """The number of slots, and the slot [tick, rank] that a forward writes and a backward reads.

        A forward's slot is free again after the tick of its backward. Where a rank has no forward in a tick that
        others use, it writes all the same, where nothing is held.
        """
        p, forwards = self.ranks, self.microbatches * self.chunks
        writes, reads = np.zeros((self.ticks, p), np.int32), np.zeros((self.ticks, p), np.int32)
        for rank in range(p):
            free = list(range(forwards + 1))  # a heap: the lowest first
            held: dict[tuple[int, int], int] = {}
            for tick in range(self.ticks):
                forward, backward = self.op("F", rank, tick), self.op("B", rank, tick)
                if tick < forwards + p - 1:
                    writes[tick, rank] = free[0]
                if forward:
                    held[forward[1:]] = heapq.heappop(free)
                if backward:
                    reads[tick, rank] = held.pop(backward[1:])
                    heapq.heappush(free, int(reads[tick, rank]))
        return 1 + int(writes.max()), writes, reads

    @property
    def slots(self) -> int:
        """Activations of one chunk and microbatch for which every rank has room.

        1F1B: min(m v + 1, (v + 1) p - 1). GPipe: m v + 1 (one rank: m v). That is `in_flight(0)`, and one to spare
        where the first rank holds all m v while others still run forwards.
        """
        return self._slots[0]

    def in_flight(self, rank: int) -> int:
        """The most activations, of one chunk and microbatch each, that a rank holds at once.

        1F1B: min(m v, (v + 1) p - 1 - 2 rank). GPipe: m v.
        """
        every = self.microbatches * self.chunks
        return every if self.kind == "gpipe" else min(every, (self.chunks + 1) * self.ranks - 1 - 2 * rank)

    def arrays(self) -> dict[str, np.ndarray]:
        """The table as int32 arrays [tick, rank]: for each kind `valid`, `chunk`, `microbatch`; and slots."""
        shape = (self.ticks, self.ranks)
        out = {"write": self._slots[1], "read": self._slots[2]}
        for kind in ("F", "B"):
            ops = [self.op(kind, rank, tick) for tick, rank in np.ndindex(shape)]  # type: ignore[arg-type]
            for name, values in (
                ("valid", [op is not None for op in ops]),
                ("chunk", [op.chunk if op else 0 for op in ops]),
                ("microbatch", [op.microbatch if op else 0 for op in ops]),
            ):
                out[f"{kind}_{name}"] = np.array(values, np.int32).reshape(shape)
        return out

    def columns(self) -> list[tuple[int, Literal["F", "B"]]]:
        """What ticks are made of, in order: a forward, a backward, or a forward and then a backward."""
        end = self.microbatches * self.chunks + self.ranks - 1
        both: tuple[Literal["F", "B"], ...] = ("F", "B")
        return [(t, kind) for t in range(self.ticks) for kind in both if (t < end if kind == "F" else t >= self.lag)]

    def csv(self) -> Iterator[str]:
        """Lines, one a rank, of cells such as `0F0`: stage, kind, microbatch; empty where the rank is idle.

        Stage c p + s is chunk c of rank s. `torch.distributed.pipelining.schedules._PipelineScheduleRuntime` reads a
        file of these lines: `_load_csv(path, format="compute_only")`.
        """
        for rank in range(self.ranks):
            ops = [self.op(kind, rank, tick) for tick, kind in self.columns()]
            yield ",".join(f"{op.chunk * self.ranks + rank}{op.kind}{op.microbatch}" if op else "" for op in ops)

    def __str__(self) -> str:
        """One line a rank, one column a tick: `F3` or `B3`, with chunks `F3.1`, a dot where the rank is idle."""
        cells = [
            [
                "".join(f"{op.kind}{op.microbatch}" + (f".{op.chunk}" if self.chunks > 1 else "") for op in ops) or "."
                for ops in column
            ]
            for column in self.table()
        ]
        width = max(5, *(len(cell) for column in cells for cell in column)) + 1
        lines = ("".join(f"{column[rank]:<{width}}" for column in cells) for rank in range(self.ranks))
        return "\n".join(f"rank {rank}  {line}".rstrip() for rank, line in enumerate(lines))
