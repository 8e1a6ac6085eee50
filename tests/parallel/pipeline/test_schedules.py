"""Schedules in lockstep meet every dependency and equal their closed forms. Operations are read from `table()`.

`test_tables.py` tests schedules whose ranks branch.
"""

import functools
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from jaxpar.parallel.pipeline.schedules import Schedule
from jaxpar.strategy.schedules import SCHEDULES, Recipe, lockstep
from jaxpar.strategy.schedules.operations import TIME

PIPES = range(2, 9)
# Closed forms: the tick of the first backward, and the most activations that a rank holds.
LAG = {
    "1f1b": lambda p, m, v: v * p - 1,
    "1f1b-overlap": lambda p, m, v: v * p,
    "gpipe": lambda p, m, v: m * v + p - 1,
}
IN_FLIGHT = {
    "1f1b": lambda p, m, v, rank: min(m * v, (v + 1) * p - 1 - 2 * rank),
    "1f1b-overlap": lambda p, m, v, rank: min(m * v, (v + 1) * p - 2 * rank),
    "gpipe": lambda p, m, v, rank: m * v,
}


@functools.cache
def of_pipe(p: int) -> list[Schedule]:
    """Return schedules with 1 to 4 chunks and up to 4 p microbatches: all m, or multiples of p if there are chunks."""
    return [
        Schedule(kind, p, m, v)
        for kind in ("gpipe", "1f1b", "1f1b-overlap")
        for v in range(1, 5)
        for m in range(p if v > 1 else 1, 4 * p + 1, p if v > 1 else 1)
    ]


def simulate(schedule: Schedule) -> tuple[dict[tuple[int, int], int], dict[tuple[int, int], int]]:
    """Run the table; return the tick of each forward and backward by (stage, microbatch). Fails if an input is missing.

    A rank holds one message of each kind: the one that its neighbour sent in the tick before.
    """
    p, stages = schedule.ranks, schedule.ranks * schedule.chunks
    forwards: dict[tuple[int, int], int] = {}
    backwards: dict[tuple[int, int], int] = {}
    for tick, column in enumerate(schedule.table()):
        assert len(column) == p
        for rank, ops in enumerate(column):
            assert "".join(op.kind for op in ops) in ("", "F", "B", "FB")
            for op in ops:
                stage, microbatch = op.chunk * p + rank, op.microbatch
                if op.kind == "F":
                    assert (stage, microbatch) not in forwards
                    assert stage == 0 or forwards[stage - 1, microbatch] == tick - 1
                    forwards[stage, microbatch] = tick
                else:
                    assert (stage, microbatch) not in backwards
                    assert (stage, microbatch) in forwards
                    assert stage == stages - 1 or backwards[stage + 1, microbatch] == tick - 1
                    backwards[stage, microbatch] = tick
    all_runs = {(stage, microbatch) for stage in range(stages) for microbatch in range(schedule.microbatches)}
    assert set(forwards) == set(backwards) == all_runs
    return forwards, backwards


@pytest.mark.parametrize("p", PIPES)
def test_dependencies(p: int) -> None:
    for schedule in of_pipe(p):
        forwards, backwards = simulate(schedule)
        use_slots(schedule)
        last = p * schedule.chunks - 1
        last_forwards = {microbatch: forwards[last, microbatch] for microbatch in range(schedule.microbatches)}
        assert {
            schedule.epilogue(t): t for t in range(schedule.ticks) if schedule.epilogue(t) is not None
        } == last_forwards
        assert bool(schedule.waiting) == (
            {microbatch: backwards[last, microbatch] for microbatch in last_forwards} != last_forwards
        )
        if schedule.kind == "1f1b":  # the loss's cotangent is used in the tick that makes it
            assert not schedule.waiting
        if schedule.kind == "1f1b-overlap":  # it is used in the next tick, before the next one is made
            assert schedule.waiting == 1
        if schedule.kind == "gpipe":
            assert min(backwards.values()) > max(forwards.values())


@pytest.mark.parametrize("p", PIPES)
def test_time_is_the_closed_form(p: int) -> None:
    """A forward through one chunk takes 1 / v, a backward 2 / v, and a tick as long as its busiest rank.

    Ticks cost no time: ranks that run each operation as soon as its input arrives take as long.
    """
    for schedule in of_pipe(p):
        m, v = schedule.microbatches, schedule.chunks
        time, busy = Fraction(), [Fraction()] * p
        for column in schedule.table():
            kinds = [{op.kind for op in ops} for ops in column]
            cost = {"F": Fraction(1, v), "B": Fraction(2, v)}
            time += sum(cost[kind] for kind in set().union(*kinds))
            busy = [b + sum(cost[kind] for kind in rank_kinds) for b, rank_kinds in zip(busy, kinds, strict=True)]
        assert schedule.time == time
        assert schedule.bubble == 1 - busy[0] / time
        assert set(busy) == {Fraction(3 * m)}
        assert schedule.timed(TIME)[0] == time * v
        if lag := LAG.get(schedule.kind):
            assert schedule.time == 3 * m + Fraction(3 * (p - 1), v)
            assert schedule.bubble == Fraction(p - 1) / (m * v + p - 1)
            assert schedule.ticks == len(schedule.table()) == lag(p, m, v) + m * v + p - 1


@pytest.mark.parametrize("p", PIPES)
def test_activations_in_flight_are_the_closed_form(p: int) -> None:
    for schedule in of_pipe(p):
        m, v, table = schedule.microbatches, schedule.chunks, schedule.table()
        for rank in range(p):
            in_flight = peak = 0
            for column in table:
                counts = Counter(op.kind for op in column[rank])
                in_flight += counts["F"]
                peak = max(peak, in_flight)
                in_flight -= counts["B"]
            assert in_flight == 0
            assert schedule.in_flight(rank) == peak
            if form := IN_FLIGHT.get(schedule.kind):
                assert peak == form(p, m, v, rank)
        if schedule.kind in IN_FLIGHT:
            peak = {"gpipe": m * v + 1, "1f1b": (v + 1) * p - 1, "1f1b-overlap": (v + 1) * p}[schedule.kind]
            assert schedule.slots == min(m * v + 1, peak)


@pytest.mark.parametrize("p", PIPES)
def test_phases_say_what_ticks_run(p: int) -> None:
    for schedule in of_pipe(p):
        tick_flags = []
        for repeats, phases in schedule.phases():
            assert phases[0].start == len(tick_flags)
            tick_flags += [phase[2:] for phase in phases for _ in range(phase.length)] * repeats
        kinds = [{op.kind for ops in column for op in ops} for column in schedule.table()]
        assert tick_flags == [("F" in k, "B" in k, schedule.epilogue(t) is not None) for t, k in enumerate(kinds)]
        assert [(t, kind) for t, k in enumerate(kinds) for kind in "FB" if kind in k] == [
            c[:2] for c in schedule.columns
        ]


def use_slots(schedule: Schedule) -> None:
    """Run the lookups of stash slots.

    Every rank writes in a tick with forwards on any rank, and an idle rank writes garbage.
    """
    arrays, table = schedule.arrays(), schedule.table()
    assert all(a.shape == (schedule.ticks, schedule.ranks) and a.dtype == np.int32 for a in arrays.values())
    assert arrays["write"].max() < schedule.slots
    rows = {name: array.tolist() for name, array in arrays.items()}
    for rank in range(schedule.ranks):
        memory: list[tuple[int, int] | None] = [None] * schedule.slots
        for tick, column in enumerate(table):
            cell = {op.kind: (op.chunk, op.microbatch) for op in column[rank]}
            if any(op.kind == "F" for ops in column for op in ops):
                memory[rows["write"][tick][rank]] = cell.get("F")
            if "B" in cell:
                assert memory[rows["read"][tick][rank]] == cell["B"]
            for kind in "FB":
                assert rows[f"{kind}_valid"][tick][rank] == (kind in cell)
                names = "chunk", "microbatch"
                assert tuple(rows[f"{kind}_{name}"][tick][rank] for name in names) == cell.get(kind, (0, 0))


def test_an_evaluation_runs_the_forwards_alone() -> None:
    for schedule in of_pipe(4):
        forwards, m, v = schedule.forwards, schedule.microbatches, schedule.chunks
        assert forwards.ticks == forwards.messages("F") == m * v + 3
        assert forwards.messages("B") == 0
        assert [forwards.epilogue(t) for t in range(forwards.ticks)] == [
            schedule.epilogue(t) for t in range(forwards.ticks)
        ]
        assert not any(phase.backward for _, phases in forwards.phases() for phase in phases)
        assert not forwards.waiting


# -- the registry ------------------------------------------------------------------------------------------------------


def test_a_schedule_is_a_function_and_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new schedule, whose backwards run two ticks later than 1F1B's, needs its table alone."""
    later = Recipe("1F1B, two ticks late", lambda p, m, v: lockstep(p, m, v, lag=v * p + 1))
    monkeypatch.setitem(SCHEDULES, "later", later)
    schedule, one_f_one_b = Schedule("later", 4, 8, 2), Schedule("1f1b", 4, 8, 2)
    simulate(schedule)
    use_slots(schedule)
    assert (schedule.waiting, one_f_one_b.waiting) == (2, 0)
    assert schedule.ticks == one_f_one_b.ticks + 2
    assert [schedule.in_flight(rank) - one_f_one_b.in_flight(rank) for rank in range(4)] == [2] * 4
    assert (schedule.time, schedule.messages("B")) == (one_f_one_b.time, one_f_one_b.messages("B"))
    assert schedule.title.startswith("later, 4 ranks")


def test_docs_have_a_row_for_every_schedule() -> None:
    page = (Path(__file__).parents[3] / "docs" / "strategies" / "pipe-all.md").read_text()
    assert [name for name in SCHEDULES if f"| `{name}`" not in page] == []


def test_csv_of_a_small_schedule() -> None:
    """Cells are as torch's `_Action` reads them, and rows are of one length."""
    assert list(Schedule("1f1b", 2, 2).csv()) == ["0F0,0F1,,,0B0,0B1", ",1F0,1B0,1F1,1B1,"]


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f2b", 4, 8), rf"schedule='1f2b' is unknown; use one of {', '.join(SCHEDULES)};.*; did you mean '1f1b'\?"),
        (("interleaved", 4, 8), "interleaved is 1f1b with chunks=2 or more"),
        (("1f1b", 4, 0), "microbatches=0 is not a count; use a whole number from 1"),
        (("1f1b", 0, 8), "pipe=0 is not a count"),
        (("1f1b", 4, 8, 0), "chunks=0 is not a count"),
        (
            ("1f1b", 4, 6, 2),
            "groups of pipe=4, and microbatches=6 is no multiple of it; use 8 microbatches, or chunks=1",
        ),
    ],
)
def test_errors(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Schedule(*arguments)
