"""`Schedule`: a pipeline's table, and its phases, stash slots, time, bubble and messages.

    table           tick 0     1     2     3     4     5           2 ranks, 2 microbatches
    rank 0          F0    F1    .     .     B0    B1
    rank 1          .     F0    F1    B0    B1    .

    time            the sum over ticks: 1 if any rank runs F, plus 2 if any rank runs B
    bubble          1 - (time of all operations) / (ranks x time)
    in flight       the activations that a rank stores at once, each from its F to its B
    slots           the room for them on every rank
    messages        one from each rank per tick with forwards, one per tick with backwards

All these numbers follow from the table alone, which functions of `strategy/schedules/` write: nothing here depends on a
schedule's name. A table of p ranks, m microbatches and v chunks per rank cuts the layers into p v stages. The placement
says which of them each rank holds. A column of the table is a tick. If ranks branch, it is also called a slot, and it
takes the time of its longest operation.
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
from .phases import Column, Phase, group_phases, num_waiting_positions, operation_tables, stash_slots

TICK_KINDS: tuple[Kind, ...] = ("F", "B")  # in the order in which a tick runs them

# Larger tables would fill the memory before any error.
_MAX_CELLS = 1 << 22
_MAX_BYTES = 1 << 24  # the size of a table's text: 4 bytes per cell


@dataclass(frozen=True)
class Schedule:
    """A schedule for p ranks, m microbatches and v chunks per rank.

    Attributes:
      kind: its name in `SCHEDULES`, or any name if the table is `given`.
      ranks: the number of pipeline ranks, p.
      microbatches: the number of microbatches per step, m.
      chunks: the number of chunks of layers per rank, v.
      forwards_only: whether the table has the forwards alone, for an evaluation.
      given: the table and its placement, if they come from a value or a file.

    Raises:
      ValueError: the kind is unknown, a count is below 1, or the kind has no table for these numbers. Lockstep
        schedules with v > 1, for example, need m to be a multiple of p.

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
        if (cells := self.ranks * self.microbatches * self.chunks) > _MAX_CELLS:
            raise ValueError(
                f"pipe={self.ranks} x microbatches={self.microbatches} x chunks={self.chunks} makes {cells:,} cells; "
                f"use smaller numbers, for {_MAX_CELLS:,} cells at most"
            )
        self.table()  # raises if the kind has no table for these numbers

    @staticmethod
    def from_table(table: Table, placement: Placement = "loop", name: str = "table") -> "Schedule":
        """Return the schedule of a table.

        Args:
          table: `table[slot][rank]`, a tuple of operations: none, one, or F and then B. The numbers of chunks and
            microbatches follow from it.
          placement: the stages that ranks hold, "loop" or "V".
          name: the schedule's kind.

        Raises:
          ValueError: an operation's dependency is not met; the error names the first such operation
            (`strategy/schedules/checker.py`).
        """
        table_ops = [op for column in table for ops in column for op in ops]
        if not table_ops:
            raise ValueError("the table is empty; give the operations of each slot and rank")
        chunks, microbatches = 1 + max(op.chunk for op in table_ops), 1 + max(op.microbatch for op in table_ops)
        check_table(table, placement, microbatches, chunks)
        # Only in lockstep can a rank run F and B in one slot: the slots of a branching program hold one operation.
        if any(len(ops) > 1 for column in table for ops in column) and not in_lockstep(table, placement, chunks):
            raise ValueError(
                "F and B share a slot in a table whose messages wait: its ranks branch, and run one operation in a "
                "slot; put F and B in separate slots"
            )
        return Schedule(name, len(table[0]), microbatches, chunks, given=Given(table, placement))

    @staticmethod
    def from_csv(lines: Iterable[str], name: str = "table") -> "Schedule":
        """Return the schedule of lines in torch's format, one line per rank.

        Ranks keep their order of operations, and each operation runs in the first slot in which it can.

        Args:
          lines: the output of `csv`, or of torch's `_PipelineScheduleRuntime._dump_csv` with `format="compute_only"`.
          name: the schedule's kind.

        Raises:
          ValueError: as `from_table`, and for a cell that is not an operation.
        """
        orders, placement, chunks, _ = torch_csv.read(lines)
        return Schedule.from_table(as_soon_as_possible(orders, placement, chunks), placement, name)

    @staticmethod
    def read(path: Path) -> "Schedule":
        """Return the schedule of a file in torch's format (`from_csv`).

        Raises:
          ValueError: as `from_csv`, and if the path is not a regular file of UTF-8 text of at most 16 MiB.
        """
        return Schedule.from_csv(text_of(path, _MAX_BYTES).splitlines(), path.stem)

    @staticmethod
    def of(schedule: "str | Schedule", ranks: int, microbatches: int, chunks: int) -> "Schedule":
        """Return a strategy's schedule.

        Args:
          schedule: a name, the path of a file in torch's format (`from_csv`), or a schedule.
          ranks, microbatches, chunks: the strategy's numbers.

        Raises:
          ValueError: the table has other numbers than the strategy, or the file does not exist.
        """
        if isinstance(schedule, str):
            if not schedule.endswith(".csv"):
                return Schedule(schedule, ranks, microbatches, chunks)
            if not Path(schedule).exists():
                raise ValueError(f"schedule={schedule}: there is no such file; write it with `jaxpar timeline --csv`")
            schedule = Schedule.read(Path(schedule))
        # A name takes the strategy's numbers; a table has numbers already, which must be the same.
        counts = schedule.ranks, schedule.microbatches, schedule.chunks
        if counts != (requested := (ranks, microbatches, chunks)):
            texts = ["pipe={}, microbatches={}, chunks={}".format(*numbers) for numbers in (counts, requested)]
            raise ValueError(
                f"schedule={schedule.label} has {texts[0]}, and the strategy has {texts[1]}; use the table's numbers"
            )
        return schedule

    def table(self) -> Table:
        """Return the operations by tick and rank: none, one, or a forward and then a backward."""
        return self._table

    @functools.cached_property
    def _table(self) -> Table:  # cached, since every property walks through it
        table = self.given.table if self.given else self._recipe.table(self.ranks, self.microbatches, self.chunks)
        if not self.forwards_only:
            return table
        # Without backwards to wait for, forwards move up to the first tick in which they can run.
        orders = [[op for op in order if op.kind == "F"] for order in orders_of(table)]
        return as_soon_as_possible(orders, self.placement, self.chunks)

    # ------------------------------------------------------------------------------------------------------------------
    # Operations and stages.

    @functools.cached_property
    def branches(self) -> bool:
        """Return whether ranks run different kinds of operations in one slot, and messages wait in buffers (`rows`)."""
        return not in_lockstep(self.table(), self.placement, self.chunks)

    @functools.cached_property
    def rows(self) -> SlotTables:
        """Return the arrays [slot, rank] that a program with branches looks up, and the sizes of its buffers."""
        return Walk(self.table(), self.placement, self.chunks, self.forwards_only).slot_tables()

    @property
    def forwards(self) -> "Schedule":
        """Return the schedule of an evaluation: the same forwards, without the ticks that have only backwards."""
        return dataclasses.replace(self, forwards_only=True)

    def op(self, kinds: str, rank: int, tick: int) -> Op | None:
        """Return the operation of one of these kinds that a rank runs in a tick; None if it runs none."""
        return next((op for op in self.table()[tick][rank] if op.kind in kinds), None)

    @functools.cached_property
    def columns(self) -> list[Column]:
        """Return the parts of ticks, in order.

        In lockstep, a tick has a column for its forwards, for its backwards, or for each. If ranks branch, a slot is
        one column, as long as its longest operation.
        """
        tick_kinds = [{op.kind for ops in column for op in ops} for column in self.table()]
        if not self.branches:
            return [Column(tick, k, TIME[k]) for tick, kinds in enumerate(tick_kinds) for k in TICK_KINDS if k in kinds]
        return [Column(tick, "FBIW", max((TIME[k] for k in kinds), default=1)) for tick, kinds in enumerate(tick_kinds)]

    @property
    def placement(self) -> Placement:
        """Return how stages are dealt to ranks: rank s has stages c p + s ("loop"), or s and 2 p - 1 - s ("V")."""
        return self.given.placement if self.given else self._recipe.placement

    @property
    def _recipe(self) -> Recipe:
        return SCHEDULES[self.kind]

    def stage(self, rank: int, chunk: int) -> int:
        """Return the stage of a rank's chunk: its number among all chunks, in the order of the layers."""
        return stage_of(self.placement, self.ranks, rank, chunk)

    def place(self, stage: int) -> StagePlace:
        """Return the rank and the chunk of a stage."""
        return operations.place_of(self.placement, self.ranks, stage)

    def neighbour(self, kind: Kind, rank: int, chunk: int) -> tuple[StagePlace | None, int]:
        """Return the place that waits for an operation's result, and the direction.

        The direction is 1 for the next rank, -1 for the rank before, and 0 for the rank itself.
        """
        return neighbour(self.placement, self.ranks, self.chunks, kind, rank, chunk)

    @functools.cached_property
    def _last_stage(self) -> dict[Kind, dict[int, int]]:
        """Return, by kind and tick, the microbatch on which the last stage runs."""
        microbatches: dict[Kind, dict[int, int]] = {kind: {} for kind in KINDS}
        for tick, column in enumerate(self.table()):
            for rank, op in ((rank, op) for rank, ops in enumerate(column) for op in ops):
                if self.stage(rank, op.chunk) == self.ranks * self.chunks - 1:
                    microbatches[op.kind][tick] = op.microbatch
        return microbatches

    # ------------------------------------------------------------------------------------------------------------------
    # Names, time and bubble.

    @property
    def label(self) -> str:
        """Return the schedule's name; for a given table, with a digest of its operations."""
        # The name of a table need not be unique: the digest tells strategies with different tables apart.
        digest = hashlib.sha256("\n".join(self.csv()).encode()).hexdigest()[:8]
        return f"{self.kind}-{digest}" if self.given else self.kind

    @property
    def title(self) -> str:
        """Return a description of the schedule: its name and its numbers."""
        chunks = f", {self.chunks} chunks a rank" if self.chunks > 1 else ""
        forwards = ", forwards alone" if self.forwards_only else ""
        return f"{self.kind}, {self.ranks} ranks, {self.microbatches} microbatches{chunks}{forwards}"

    @property
    def ticks(self) -> int:
        """Return the number of ticks."""
        return len(self.table())

    @property
    def time(self) -> Fraction:
        """Return the time of a step, in forwards through all of a rank's layers.

        A forward takes 1, a backward 2, I and W 1 each. In lockstep, all ranks take the time of a forward in a tick in
        which any rank has one. If ranks branch, a slot takes the time of its longest operation.

        For GPipe and 1F1B this is 3 m + 3 (p - 1) / v, the same as for ranks that wait for nothing but their messages.
        """
        return Fraction(sum(column.length for column in self.columns), self.chunks)

    @property
    def bubble(self) -> Fraction:
        """Return the fraction of a step's time in which ranks are idle, averaged over ranks."""
        # Operations take the time of one chunk, `time` counts all of a rank's chunks.
        busy = sum(TIME[op.kind] for column in self.table() for ops in column for op in ops)
        return 1 - Fraction(busy, self.ranks * self.chunks) / self.time

    def timed(self, times: Mapping[str, Number]) -> tuple[Number, Number]:
        """Return the time of a step whose ranks wait for nothing but their messages.

        Args:
          times: the time of each kind of operation in the table, through one chunk.

        Returns:
          The time of the step, and the longest time of a rank from its first operation to its last. Qi et al. 2023
          (section 5.3) call the second the cost of a schedule.
        """
        # Unlike `time`, ranks do not wait for each other's operations here: a rank that is free starts its next one.
        rank_spans = spans(orders_of(self.table()), self.placement, self.chunks, times)
        rows = [row for row in rank_spans if row]  # a rank without operations has no span
        return max(row[-1].end for row in rows), max(row[-1].end - row[0].start for row in rows)

    # ------------------------------------------------------------------------------------------------------------------
    # Messages, phases and stash slots: what the compiled program needs.

    def messages(self, kind: Kind) -> int:
        """Return how many messages of a kind each rank sends per step, in lockstep.

        Every rank sends one in each tick that has forwards (F) or backwards (B) on any rank, idle ranks included.
        """
        assert not self.branches
        return sum(column.kinds == kind for column in self.columns)

    def phases(self) -> list[tuple[int, list[Phase]]]:
        """Return the ticks in order, as pairs (repeats, phases): one phase, or two that alternate."""
        assert not self.branches
        tick_kinds = {column[:2] for column in self.columns}

        def flags(tick: int) -> tuple[bool, bool, bool]:
            return (tick, "F") in tick_kinds, (tick, "B") in tick_kinds, self.epilogue(tick) is not None

        return group_phases(map(flags, range(self.ticks)))

    @property
    def beside(self) -> bool:
        """Return whether a tick's forward and backward are independent, so that their layers run side by side."""
        if self.branches or not self.waiting:
            return False
        return any(phase.forward and phase.backward for _, phases in self.phases() for phase in phases)

    @functools.cached_property
    def in_turn(self) -> bool:
        """Return whether every forward and backward runs the rank's one chunk, so that a tick knows the next layer."""
        # Chunks have different layers; with `waiting`, the loops of a forward and a backward are one.
        has_other_layers = self.branches or self.chunks > 1 or self.waiting
        return not has_other_layers and all(repeats == 1 for repeats, _ in self.phases())

    def epilogue(self, tick: int) -> int | None:
        """Return the microbatch that leaves the last stage in a tick, or None; its epilogue runs in the same tick."""
        return self._last_stage["F"].get(tick)

    @functools.cached_property
    def waiting(self) -> int:
        """Return the size of the ring buffer in which cotangents of epilogues wait for backwards of later ticks.

        Those of microbatch b wait at position b mod `waiting`. A tick with a forward and a backward reads the
        cotangents before it writes the epilogue's, and so it can run the two side by side. 0 if every backward begins
        in the tick of its epilogue.
        """
        ticks_of = lambda kind: {microbatch: tick for tick, microbatch in self._last_stage[kind].items()}
        # The stage's own cotangents are read by B, or by I if its backward has halves.
        epilogue_ticks, backward_ticks = ticks_of("F"), ticks_of("B") | ticks_of("I")
        if self.forwards_only or backward_ticks == epilogue_ticks:
            return 0
        return num_waiting_positions(epilogue_ticks, backward_ticks)

    @functools.cached_property
    def _stash_slots(self) -> tuple[np.ndarray, np.ndarray]:
        assert not self.branches
        return stash_slots(self.table())

    @property
    def slots(self) -> int:
        """Return the number of stash slots on every rank: one slot holds the activations of one chunk and microbatch.

        1F1B: min(m v + 1, (v + 1) p - 1). GPipe: m v + 1 (one rank: m v). This is `in_flight(0)`, plus one slot to
        spare if the first rank holds all m v while other ranks still run forwards. If ranks branch, it is the largest
        `in_flight` of all ranks.
        """
        return self.rows.num_stash_slots if self.branches else 1 + int(self._stash_slots[0].max())

    def in_flight(self, rank: int) -> int:
        """Return how many activations of one chunk and microbatch a rank holds at once, from F to B or W.

        1F1B: min(m v, (v + 1) p - 1 - 2 rank). GPipe: m v.
        """
        return self._peaks[rank]

    @functools.cached_property
    def _peaks(self) -> list[int]:
        # F adds an activation and B or W frees it; I leaves it for W.
        changes = [[{"F": 1, "I": 0}.get(op.kind, -1) for op in order] for order in orders_of(self.table())]
        return [max(itertools.accumulate(row, initial=0)) for row in changes]

    def arrays(self) -> dict[str, np.ndarray]:
        """Return a table in lockstep as int32 arrays [tick, rank], which the program looks up.

        They are `valid`, `chunk` and `microbatch` of forwards and backwards (`operation_tables`), and the stash slots
        that forwards `write` and backwards `read`.
        """
        return {"write": self._stash_slots[0], "read": self._stash_slots[1], **operation_tables(self.table())}

    # ------------------------------------------------------------------------------------------------------------------
    # The table as text.

    def csv(self) -> Iterator[str]:
        """Yield one line per rank, of cells such as `0F0`: stage, kind, microbatch. An idle rank has an empty cell.

        `torch.distributed.pipelining.schedules._PipelineScheduleRuntime` reads a file of these lines:
        `_load_csv(path, format="compute_only")`.
        """
        for rank in range(self.ranks):
            # A tick in lockstep gives two cells, one for F and one for B.
            ops = [self.op(column.kinds, rank, column.tick) for column in self.columns]
            yield ",".join(f"{self.stage(rank, op.chunk)}{op.kind}{op.microbatch}" if op else "" for op in ops)

    def __str__(self) -> str:
        """Return a line per rank and a column per tick: `F3` or `B3`, with chunks `F3.1`; a dot if the rank is idle."""
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
