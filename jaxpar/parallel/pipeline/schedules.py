"""What follows from a schedule's table (`strategy/schedules/`): ticks and their phases, slots, time, bubble, messages.

All of it is read from the table, by walking through it; nothing here knows one schedule from another. A table of p
ranks, m microbatches and v chunks a rank cuts the layers into p v stages; which of them a rank holds is the placement.
A tick, or slot, is a column of the table.
"""

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import numpy as np

from ...backend.files import text_of
from ...backend.removed import removed
from ...backend.text import did_you_mean
from ...strategy.schedules import SCHEDULES, Recipe, operations, torch_csv
from ...strategy.schedules.checker import check_table
from ...strategy.schedules.operations import (
    KINDS,
    MOST,
    TIME,
    Given,
    Kind,
    Op,
    Placement,
    StagePlace,
    Table,
    neighbour,
    stage_of,
)
from ...strategy.schedules.orders import Number, as_soon_as_possible, in_lockstep, orders_of, spans
from .buffers import SlotTables, Walk
from .phases import Column, Phase, grouped, looked_up, places, stash_slots

BOTH: tuple[Kind, ...] = ("F", "B")  # in the order in which a tick runs them

_CELLS = 1 << 22  # of a table
_MOST_BYTES = 1 << 24  # of a table's text: of as many cells, 4 bytes each


@dataclass(frozen=True)
class Schedule:
    """A schedule for p ranks, m microbatches and v chunks a rank; with `forwards_only`, its forwards alone.

    Raises ValueError for an unknown kind, for a count below 1, and for numbers that the kind has no table for: with
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
    given: Given | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if says := removed(f"schedule={self.kind.partition(':')[0]}"):
            raise ValueError(says)
        if self.given is None and self.kind not in SCHEDULES:
            raise ValueError(
                f"schedule={self.kind!r} is unknown; use one of {', '.join(SCHEDULES)}; interleaved is 1f1b with "
                f"chunks=2 or more{did_you_mean(self.kind, SCHEDULES, '; {}')}"
            )
        for name, count in (("pipe", self.ranks), ("microbatches", self.microbatches), ("chunks", self.chunks)):
            if not 1 <= count <= MOST:
                raise ValueError(f"{name}={count} is not a count; use a whole number from 1 to {MOST:,}")
        if (cells := self.ranks * self.microbatches * self.chunks) > _CELLS:
            raise ValueError(
                f"pipe={self.ranks} x microbatches={self.microbatches} x chunks={self.chunks} makes {cells:,} cells; "
                f"use less, {_CELLS:,} at most"
            )
        self.table()

    @staticmethod
    def from_table(table: Table, placement: Placement = "loop", name: str = "table") -> "Schedule":
        """The schedule of a `table[slot][rank]` of operations, none or one in a cell, or F and then B.

        Chunks and microbatches are counted in it. Raises ValueError that names the first operation whose dependency is
        not met (`strategy/schedules/checker.py`).
        """
        every = [op for column in table for ops in column for op in ops]
        if not every:
            raise ValueError("the table is empty; give for each slot and rank its operations")
        chunks, microbatches = 1 + max(op.chunk for op in every), 1 + max(op.microbatch for op in every)
        check_table(table, placement, microbatches, chunks)
        if any(len(ops) > 1 for column in table for ops in column) and not in_lockstep(table, placement, chunks):
            raise ValueError(
                "F and B share a slot, and messages wait: a rank that branches runs one operation in a slot; put F and "
                "B in slots of their own"
            )
        return Schedule(name, len(table[0]), microbatches, chunks, given=Given(table, placement))

    @staticmethod
    def from_csv(lines: Iterable[str], name: str = "table") -> "Schedule":
        """The schedule of torch's lines, one for each rank: what `csv` writes, and `_PipelineScheduleRuntime._dump_csv`
        with `format="compute_only"`.

        Ranks keep their order; each operation runs in the first slot in which it can. Raises ValueError as
        `from_table`, and for cells that are no operations.
        """
        orders, placement, chunks, _ = torch_csv.read(lines)
        return Schedule.from_table(as_soon_as_possible(orders, placement, chunks), placement, name)

    @staticmethod
    def read(path: Path) -> "Schedule":
        """The schedule of a file of torch's lines (`from_csv`). Raises ValueError where it is no plain file, no UTF-8,
        or larger than 16 MiB, and as `from_csv`.
        """
        return Schedule.from_csv(text_of(path, _MOST_BYTES).splitlines(), path.stem)

    @staticmethod
    def of(given: "str | Schedule", ranks: int, microbatches: int, chunks: int) -> "Schedule":
        """A strategy's schedule: by name, from a file of torch's lines (`from_csv`), or itself.

        Raises ValueError where its table has other numbers than these, and where there is no such file.
        """
        if isinstance(given, str):
            if not given.endswith(".csv"):
                return Schedule(given, ranks, microbatches, chunks)
            if not Path(given).exists():
                raise ValueError(f"schedule={given}: there is no such file; write it with `jaxpar timeline --csv`")
            given = Schedule.read(Path(given))
        own, asked = (given.ranks, given.microbatches, given.chunks), (ranks, microbatches, chunks)
        if own != asked:
            said = [", ".join(map("{}={}".format, ("pipe", "microbatches", "chunks"), some)) for some in (own, asked)]
            raise ValueError(f"schedule={given.label} has {said[0]}, and the strategy {said[1]}; give what it has")
        return given

    def table(self) -> Table:
        """Operations by tick and rank: none, one, or a forward and then a backward."""
        return self._table

    @functools.cached_property
    def _table(self) -> Table:
        table = self.given.table if self.given else self._recipe.table(self.ranks, self.microbatches, self.chunks)
        if not self.forwards_only:
            return table
        orders = [[op for op in order if op.kind == "F"] for order in orders_of(table)]
        return as_soon_as_possible(orders, self.placement, self.chunks)

    @functools.cached_property
    def branches(self) -> bool:
        """Whether ranks run different kinds of operations in one slot, and messages wait: then `rows` says where."""
        return not in_lockstep(self.table(), self.placement, self.chunks)

    @functools.cached_property
    def rows(self) -> SlotTables:
        """What a program with branches looks up."""
        return Walk(self.table(), self.placement, self.chunks, self.forwards_only).rows()

    @property
    def forwards(self) -> "Schedule":
        """The schedule of an evaluation: the same forwards, without the ticks that have backwards alone."""
        return dataclasses.replace(self, forwards_only=True)

    def op(self, kinds: str, rank: int, tick: int) -> Op | None:
        """What a rank runs of these kinds at a tick, if anything."""
        return next((op for op in self.table()[tick][rank] if op.kind in kinds), None)

    @functools.cached_property
    def columns(self) -> list[Column]:
        """What ticks are made of, in order: in lockstep forwards, backwards, or both; else one operation a rank."""
        ran = [{op.kind for ops in column for op in ops} for column in self.table()]
        if not self.branches:
            return [Column(tick, k, TIME[k]) for tick, kinds in enumerate(ran) for k in BOTH if k in kinds]
        return [Column(tick, "FBIW", max((TIME[k] for k in kinds), default=1)) for tick, kinds in enumerate(ran)]

    @property
    def placement(self) -> Placement:
        """Which stages a rank's chunks are: "loop", c p + s of rank s, or "V", s and 2 p - 1 - s."""
        return self.given.placement if self.given else self._recipe.placement

    @property
    def _recipe(self) -> Recipe:
        return SCHEDULES[self.kind]

    def stage(self, rank: int, chunk: int) -> int:
        """The number of a rank's chunk among all, in the order of the layers."""
        return stage_of(self.placement, self.ranks, rank, chunk)

    def place(self, stage: int) -> StagePlace:
        """The rank and the chunk of a stage."""
        return operations.place_of(self.placement, self.ranks, stage)

    def neighbour(self, kind: Kind, rank: int, chunk: int) -> tuple[StagePlace | None, int]:
        """Who waits for what an operation makes, and the way: 1 next rank, -1 the one before, 0 the rank itself."""
        return neighbour(self.placement, self.ranks, self.chunks, kind, rank, chunk)

    @functools.cached_property
    def _last(self) -> dict[Kind, dict[int, int]]:
        """By kind and tick, the microbatch that passes through the last stage."""
        out: dict[Kind, dict[int, int]] = {kind: {} for kind in KINDS}
        for tick, column in enumerate(self.table()):
            for rank, op in ((rank, op) for rank, ops in enumerate(column) for op in ops):
                if self.stage(rank, op.chunk) == self.ranks * self.chunks - 1:
                    out[op.kind][tick] = op.microbatch
        return out

    @property
    def label(self) -> str:
        """Its name; of a table that stands in no list, with a digest of what it holds."""
        digest = hashlib.sha256("\n".join(self.csv()).encode()).hexdigest()[:8]
        return f"{self.kind}-{digest}" if self.given else self.kind

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
        """The time of a step, where a forward through all of a rank's layers takes 1, a backward 2, each half of it 1.

        All ranks run one program: in a tick in which one of them has a forward, all take the time of a forward; where
        they branch, a slot takes the time of its longest operation. For GPipe and 1F1B that is 3 m + 3 (p - 1) / v, no
        more than their ranks need that only wait for their messages.
        """
        return Fraction(sum(column.length for column in self.columns), self.chunks)

    @property
    def bubble(self) -> Fraction:
        """The part of a step's time that ranks are idle, on average."""
        busy = sum(TIME[op.kind] for column in self.table() for ops in column for op in ops)
        return 1 - Fraction(busy, self.ranks * self.chunks) / self.time

    def timed(self, times: Mapping[str, Number]) -> tuple[Number, Number]:
        """The time of a step, and that of its busiest rank from its first operation to its last, where ranks wait for
        nothing but their messages.

        Args:
          times: of F, B, I and W through one chunk, those that the table has.

        The second is what Qi et al. 2023 (section 5.3) call the cost of a schedule.
        """
        each = spans(orders_of(self.table()), self.placement, self.chunks, times)
        ran = [row for row in each if row]
        return max(row[-1].end for row in ran), max(row[-1].end - row[0].start for row in ran)

    def messages(self, kind: Kind) -> int:
        """How many messages each rank sends in a step: one in each tick with forwards, or with backwards."""
        assert not self.branches
        return sum(column.kinds == kind for column in self.columns)

    def phases(self) -> list[tuple[int, list[Phase]]]:
        """The ticks in order, as (repeats, phases): two phases that alternate stand there once."""
        assert not self.branches
        ran = {column[:2] for column in self.columns}

        def flags(tick: int) -> tuple[bool, bool, bool]:
            return (tick, "F") in ran, (tick, "B") in ran, self.epilogue(tick) is not None

        return grouped([flags(tick) for tick in range(self.ticks)])

    @property
    def beside(self) -> bool:
        """Whether a tick's forward and backward are of other microbatches, and run layer by layer side by side."""
        if self.branches or not self.waiting:
            return False
        return any(phase.forward and phase.backward for _, phases in self.phases() for phase in phases)

    @functools.cached_property
    def in_turn(self) -> bool:
        """Whether every rank's ticks run the same layers one after another, so that each knows which layer is next."""
        other = self.branches or self.chunks > 1 or self.waiting
        return not other and all(repeats == 1 for repeats, _ in self.phases())

    def epilogue(self, tick: int) -> int | None:
        """The microbatch that leaves the last layer at a tick, if one does: its loss is computed there and then."""
        return self._last["F"].get(tick)

    @functools.cached_property
    def waiting(self) -> int:
        """Room for the cotangents that an epilogue makes, where a backward begins in a later tick: microbatch b has the
        place b mod `waiting`. 0 where each begins in the tick of its epilogue.

        A tick in which a rank runs a forward and a backward reads before it writes, and runs them side by side.
        """
        made = {at: tick for tick, at in self._last["F"].items()}
        begun = {at: tick for kind in ("B", "I") for tick, at in self._last[kind].items()}
        if self.forwards_only or begun == made:
            return 0
        return places(made, begun)

    @functools.cached_property
    def _slots(self) -> tuple[np.ndarray, np.ndarray]:
        assert not self.branches
        return stash_slots(self.table())

    @property
    def slots(self) -> int:
        """Activations of one chunk and microbatch for which every rank has room.

        1F1B: min(m v + 1, (v + 1) p - 1). GPipe: m v + 1 (one rank: m v). That is `in_flight(0)`, and one to spare
        where the first rank holds all m v while others still run forwards. Where ranks branch, what the fullest holds.
        """
        return self.rows.stashes if self.branches else 1 + int(self._slots[0].max())

    def in_flight(self, rank: int) -> int:
        """The most activations, of one chunk and microbatch each, that a rank holds at once: from F to B, or to W.

        1F1B: min(m v, (v + 1) p - 1 - 2 rank). GPipe: m v.
        """
        return self._held[rank]

    @functools.cached_property
    def _held(self) -> list[int]:
        changes = [[{"F": 1, "I": 0}.get(op.kind, -1) for op in order] for order in orders_of(self.table())]
        return [max(itertools.accumulate(row, initial=0)) for row in changes]

    def arrays(self) -> dict[str, np.ndarray]:
        """A table in lockstep as int32 arrays [tick, rank]: for each kind `valid`, `chunk`, `microbatch`; and slots."""
        return {"write": self._slots[0], "read": self._slots[1], **looked_up(self.table())}

    def csv(self) -> Iterator[str]:
        """Lines, one a rank, of cells such as `0F0`: stage, kind, microbatch; empty where the rank is idle.

        `torch.distributed.pipelining.schedules._PipelineScheduleRuntime` reads a file of these lines:
        `_load_csv(path, format="compute_only")`.
        """
        for rank in range(self.ranks):
            ops = [self.op(column.kinds, rank, column.tick) for column in self.columns]
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
