"""What follows from a schedule's table (`jaxpar/tables.py`): ticks and their phases, slots, time, bubble, messages.

All of it is read from the table, by walking through it; nothing here knows one schedule from another. A table of p
ranks, m microbatches and v chunks a rank cuts the layers into p v stages, and stage c p + s is chunk c of rank s.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, NamedTuple

import numpy as np

from ...tables import MOST, SCHEDULES, TIME, Op, Table
from ...text import did_you_mean

Kind = Literal["F", "B"]
BOTH: tuple[Kind, ...] = ("F", "B")  # in the order in which a tick runs them

_CELLS = 1 << 22  # of a table


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
    """A schedule for p ranks, m microbatches and v chunks a rank; with `forwards_only`, its forwards alone.

    Raises ValueError for an unknown kind, for a count below 1, and for numbers of which the kind has no table: with
    v > 1 those have m a multiple of p.

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
    forwards_only: bool = False

    def __post_init__(self) -> None:
        if self.kind not in SCHEDULES:
            raise ValueError(
                f"schedule={self.kind!r} is unknown; use one of {', '.join(SCHEDULES)}; interleaved is 1f1b with "
                f"chunks=2 or more{did_you_mean(self.kind, SCHEDULES, '; {}')}"
            )
        for name, count in (("pipe", self.ranks), ("microbatches", self.microbatches), ("chunks", self.chunks)):
            if count < 1:
                raise ValueError(f"{name}={count} is not a count; use a whole number from 1")
            if count > MOST:
                raise ValueError(f"{name}={count} is more than a table can have; use a whole number from 1 to {MOST:,}")
        if (cells := self.ranks * self.microbatches * self.chunks) > _CELLS:
            raise ValueError(
                f"pipe={self.ranks} x microbatches={self.microbatches} x chunks={self.chunks} makes {cells:,} cells; "
                f"use less, {_CELLS:,} at most"
            )
        self.table()

    # -- the table -----------------------------------------------------------------------------------------------------

    def table(self) -> Table:
        """Operations by tick and rank: none, one, or a forward and then a backward."""
        return self._table

    @functools.cached_property
    def _table(self) -> Table:
        table = SCHEDULES[self.kind].table(self.ranks, self.microbatches, self.chunks)
        if not self.forwards_only:
            return table
        forwards = (tuple(tuple(op for op in ops if op.kind == "F") for ops in column) for column in table)
        return tuple(column for column in forwards if any(column))

    @property
    def forwards(self) -> Schedule:
        """The schedule of an evaluation: the same forwards, without the ticks that have backwards alone."""
        return dataclasses.replace(self, forwards_only=True)

    def op(self, kind: Kind, rank: int, tick: int) -> Op | None:
        """What a rank runs at a tick, if anything."""
        return next((op for op in self.table()[tick][rank] if op.kind == kind), None)

    def columns(self) -> list[tuple[int, Kind]]:
        """What ticks are made of, in order: a forward, a backward, or a forward and then a backward."""
        ran = [{op.kind for ops in column for op in ops} for column in self.table()]
        return [(tick, kind) for tick, kinds in enumerate(ran) for kind in BOTH if kind in kinds]

    def stage(self, rank: int, chunk: int) -> int:
        """The number of a rank's chunk among all, in the order of the layers."""
        return chunk * self.ranks + rank

    @functools.cached_property
    def _last(self) -> dict[Kind, dict[int, int]]:
        """By kind and tick, the microbatch that passes through the last stage."""
        out: dict[Kind, dict[int, int]] = {kind: {} for kind in BOTH}
        for tick, column in enumerate(self.table()):
            for rank, op in ((rank, op) for rank, ops in enumerate(column) for op in ops):
                if self.stage(rank, op.chunk) == self.ranks * self.chunks - 1:
                    out[op.kind][tick] = op.microbatch
        return out

    # -- time ----------------------------------------------------------------------------------------------------------

    @property
    def title(self) -> str:
        """The schedule in words."""
        chunks = f", {self.chunks} chunks a rank" if self.chunks > 1 else ""
        alone = ", forwards alone" if self.forwards_only else ""
        return f"{self.kind}, {self.ranks} ranks, {self.microbatches} microbatches{chunks}{alone}"

    @property
    def ticks(self) -> int:
        """The number of ticks."""
        return len(self.table())

    @property
    def time(self) -> Fraction:
        """The time of a step, where a forward through all of a rank's layers takes 1, and a backward 2.

        All ranks run one program: in a tick in which one of them has a forward, all take the time of a forward. For
        GPipe and 1F1B that is 3 m + 3 (p - 1) / v, no more than their ranks need that only wait for their messages.
        """
        return Fraction(sum(TIME[kind] for _, kind in self.columns()), self.chunks)

    @property
    def bubble(self) -> Fraction:
        """The part of a step's time that ranks are idle, on average."""
        busy = sum(TIME[op.kind] for column in self.table() for ops in column for op in ops)
        return 1 - Fraction(busy, self.ranks * self.chunks) / self.time

    def messages(self, kind: Kind) -> int:
        """How many messages each rank sends in a step: one in each tick with forwards, or with backwards."""
        return sum(ran == kind for _, ran in self.columns())

    def phases(self) -> list[tuple[int, list[Phase]]]:
        """The ticks in order, as (repeats, phases): two phases that alternate stand there once."""
        ran = set(self.columns())

        def flags(tick: int) -> tuple[bool, bool, bool]:
            return (tick, "F") in ran, (tick, "B") in ran, self.epilogue(tick) is not None

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

    # -- the last stage ------------------------------------------------------------------------------------------------

    def epilogue(self, tick: int) -> int | None:
        """The microbatch that leaves the last layer at a tick, if one does: its loss is computed there and then."""
        return self._last["F"].get(tick)

    @property
    def late(self) -> bool:
        """Whether a microbatch's backward begins in a later tick than its epilogue, whose cotangents wait for it."""
        return not self._last["B"].items() <= self._last["F"].items()

    # -- what ranks hold -----------------------------------------------------------------------------------------------

    @functools.cached_property
    def _slots(self) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """The slot [tick, rank] that a forward writes and a backward reads, and the most that each rank holds at once.

        A forward's slot is free again after the tick of its backward. Where a rank has no forward in a tick that
        others use, it writes all the same, where nothing is held.
        """
        ran, most = set(self.columns()), [0] * self.ranks
        writes, reads = (np.zeros((self.ticks, self.ranks), np.int32) for _ in BOTH)
        frees = [list(range(self.microbatches * self.chunks + 1)) for _ in most]  # heaps: the lowest first
        helds: list[dict[tuple[int, int], int]] = [{} for _ in most]
        for tick, column in enumerate(self.table()):
            for rank, (ops, free, held) in enumerate(zip(column, frees, helds, strict=True)):
                if (tick, "F") in ran:
                    writes[tick, rank] = free[0]
                for kind, chunk, microbatch in ops:
                    if kind == "F":
                        held[chunk, microbatch] = heapq.heappop(free)
                        most[rank] = max(most[rank], len(held))
                    else:
                        reads[tick, rank] = slot = held.pop((chunk, microbatch))
                        heapq.heappush(free, slot)
        return writes, reads, most

    @property
    def slots(self) -> int:
        """Activations of one chunk and microbatch for which every rank has room.

        1F1B: min(m v + 1, (v + 1) p - 1). GPipe: m v + 1 (one rank: m v). That is `in_flight(0)`, and one to spare
        where the first rank holds all m v while others still run forwards.
        """
        return 1 + int(self._slots[0].max())

    def in_flight(self, rank: int) -> int:
        """The most activations, of one chunk and microbatch each, that a rank holds at once.

        1F1B: min(m v, (v + 1) p - 1 - 2 rank). GPipe: m v.
        """
        return self._slots[2][rank]

    # -- other forms of the table --------------------------------------------------------------------------------------

    def arrays(self) -> dict[str, np.ndarray]:
        """The table as int32 arrays [tick, rank]: for each kind `valid`, `chunk`, `microbatch`; and slots."""
        shape = (self.ticks, self.ranks)
        out = {"write": self._slots[0], "read": self._slots[1]}
        for kind in BOTH:
            ops = [self.op(kind, rank, tick) for tick, rank in np.ndindex(shape)]
            for name, values in (
                ("valid", [op is not None for op in ops]),
                ("chunk", [op.chunk if op else 0 for op in ops]),
                ("microbatch", [op.microbatch if op else 0 for op in ops]),
            ):
                out[f"{kind}_{name}"] = np.array(values, np.int32).reshape(shape)
        return out

    def csv(self) -> Iterator[str]:
        """Lines, one a rank, of cells such as `0F0`: stage, kind, microbatch; empty where the rank is idle.

        `torch.distributed.pipelining.schedules._PipelineScheduleRuntime` reads a file of these lines:
        `_load_csv(path, format="compute_only")`.
        """
        for rank in range(self.ranks):
            ops = [self.op(kind, rank, tick) for tick, kind in self.columns()]
            yield ",".join(f"{self.stage(rank, op.chunk)}{op.kind}{op.microbatch}" if op else "" for op in ops)

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
