"""Tables whose ranks branch: dependencies, memory and messages; the papers' numbers; torch.

`simulate` is a second checker, which reads operations from `table()` alone. The library's numbers are compared with it.
"""

import dataclasses
import itertools
from collections import Counter
from pathlib import Path

import pytest
from schedule_cells import LOCKSTEP, kinds

from jaxpar.parallel.pipeline.buffers import CODES, WAYS
from jaxpar.parallel.pipeline.schedules import Schedule
from jaxpar.run.cli import timeline
from jaxpar.strategy import Strategy
from jaxpar.strategy.schedules import SCHEDULES
from jaxpar.strategy.schedules.checker import check_table
from jaxpar.strategy.schedules.operations import Op, place_of, stage_of
from jaxpar.strategy.schedules.orders import orders_of

PIPES = range(2, 9)
UNIT_TIMES = dict.fromkeys("FIW", 1)


def fewest_microbatches(kind: str, p: int) -> int:
    return 2 * p if kind == "dualpipe-v" else 1


def grid(p: int) -> list[Schedule]:
    """Return every schedule that branches, with few microbatches, about p and 2 p, and many."""
    return [
        Schedule(kind, p, m, v)
        for kind, v in kinds()
        if kind not in LOCKSTEP
        for m in sorted({1, 2, 3, p - 1, p, p + 1, 2 * p - 1, 2 * p, 2 * p + 1, 3 * p})
        if m >= fewest_microbatches(kind, p)
    ]


def stage_at(schedule: Schedule, rank: int, chunk: int) -> int:
    """Return the stage of a chunk, written out: the first chunks count up; a V's second chunks count down."""
    p = schedule.ranks
    if schedule.placement == "V" and chunk == 1:
        return 2 * p - 1 - rank
    return chunk * p + rank


def simulate(schedule: Schedule) -> list[int]:
    """Run the table; return the most activations that each rank holds. Fails if an input is missing."""
    p, m, stages = schedule.ranks, schedule.microbatches, schedule.ranks * schedule.chunks
    slot_of: dict[tuple[str, int, int], int] = {}
    in_flight, peaks = [0] * p, [0] * p
    for slot, column in enumerate(schedule.table()):
        assert len(column) == p
        for rank, ops in enumerate(column):
            assert len(ops) <= 1
            for kind, chunk, microbatch in ops:
                stage = stage_at(schedule, rank, chunk)
                needs = {
                    "F": [("F", stage - 1)] if stage else [],
                    "I": [("F", stage), *([("I", stage + 1)] if stage < stages - 1 else [])],
                    "W": [("I", stage)],
                }[kind]
                assert all(slot_of[needed, source, microbatch] < slot for needed, source in needs)
                assert (kind, stage, microbatch) not in slot_of
                slot_of[kind, stage, microbatch] = slot
                in_flight[rank] += {"F": 1, "I": 0, "W": -1}[kind]
                peaks[rank] = max(peaks[rank], in_flight[rank])
    assert len(slot_of) == 3 * stages * m
    assert in_flight == [0] * p
    return peaks


@pytest.mark.parametrize("p", PIPES)
def test_dependencies_and_memory(p: int) -> None:
    for schedule in grid(p):
        assert schedule.branches
        peaks = simulate(schedule)
        check_table(schedule.table(), schedule.placement, schedule.microbatches, schedule.chunks)
        assert [schedule.in_flight(rank) for rank in range(p)] == peaks
        assert schedule.slots == max(peaks)
        m, v = schedule.microbatches, schedule.chunks
        limits = {
            "1f1b-halves": p,
            "zb-h1": p,
            "zb-h2": 2 * p - 1,
            "zb-v": p,
            "v-half": (p + 2) // 2,
            "v-min": (p + 4) // 3,
        }
        if limit := limits.get(schedule.kind):
            assert max(peaks) <= v * limit
            if m >= 2 * p:  # as Qi et al. 2023 (sections 2.1, 2.2, 6) and 2024 say
                assert max(peaks) == v * limit
        if schedule.kind == "dualpipe-v":
            assert max(peaks) == 2 * p + 1


@pytest.mark.parametrize("p", PIPES)
def test_time_is_the_closed_form(p: int) -> None:
    """The time in slots, of the step and of the busiest rank from its first operation to its last."""
    for schedule in grid(p):
        m, v = schedule.microbatches, schedule.chunks
        busy = 3 * m * v
        step, longest = schedule.timed(UNIT_TIMES)
        assert schedule.ticks == len(schedule.table()) == step == schedule.time * v
        assert float(schedule.bubble) == pytest.approx(1 - busy / step)
        assert busy <= longest <= step
        forms = {
            "1f1b-halves": (m >= p, 2 * (p - 1), 2 * (p - 1)),
            "zb-h1": (m >= p, p - 1, p - 1),
            "zb-h2": (m >= 2 * p - 1, p - 1, 0),
            "zb-v": (m >= 2 * p, p - 1, 0),
            "dualpipe-v": (True, p - 1, p - 1),
        }
        holds, idle, idle_of_rank = forms.get(schedule.kind, (False, 0, 0))
        if holds:
            assert (step, longest) == (busy + idle, busy + idle_of_rank)


def test_bubbles_of_the_papers() -> None:
    """With p = 8 and m = 24: 1F1B's, DualPipe's bound (DeepSeek-V3 2024, table 2), and Qi et al. 2024, table 1."""
    assert Schedule("1f1b", 8, 24).bubble == pytest.approx(7 / 31)
    for kind, bound in (("dualpipe-v", 6 / 78), ("v-half", 8 / 48), ("v-min", 16 / 72)):
        assert 1 - 3 * 48 / Schedule(kind, 8, 24, 2).timed(UNIT_TIMES)[1] <= bound


def test_the_1f1b_of_the_papers_holds_p_activations() -> None:
    """With F and B in two slots, 1F1B holds p activations; jaxpar's, with F and B in one tick, 2 p - 1."""
    p, m = 8, 24
    lines = []
    for rank in range(p):
        ahead = p - 1 - rank
        pairs = [cell for i in range(m) for cell in (f"{rank}F{i + ahead}" * (i + ahead < m), f"{rank}B{i}")]
        lines.append(",".join([*(f"{rank}F{i}" for i in range(ahead)), *pairs]))
    schedule = Schedule.from_csv(lines)
    assert schedule.branches
    assert [schedule.in_flight(rank) for rank in range(p)] == [p - rank for rank in range(p)]
    assert schedule.slots == p
    step, _ = schedule.timed({"F": 1, "B": 2})
    assert 1 - 3 * m / step == pytest.approx(7 / 31)
    lockstep = Schedule("1f1b", p, m)
    assert (lockstep.time, lockstep.in_flight(0)) == (step, 2 * p - 1)
    # A slot lasts as long as its longest operation: a whole backward of some rank, in all but p of them.
    assert schedule.time == 4 * (m + p - 1) - p
    halves = Schedule("1f1b-halves", p, m)
    assert [halves.in_flight(rank) for rank in range(p)] == [p - rank for rank in range(p)]
    assert (halves.time, halves.rows.num_residual_slots) == (3 * m + 2 * (p - 1), 1)


# -- what a program looks up -------------------------------------------------------------------------------------------


def count_messages(schedule: Schedule) -> Counter[str]:
    """Run `rows` as a program would, on buffers that hold names; return how many messages went each way."""
    p, rows, sent = schedule.ranks, schedule.rows, Counter()
    kinds = {code: kind for kind, code in CODES.items()}
    stash, residuals, messages = (
        [[None] * n for _ in range(p)] for n in (rows.num_stash_slots, rows.num_residual_slots, rows.num_buffers)
    )  # type: ignore[var-annotated]
    last = p * schedule.chunks - 1
    for slot in range(schedule.ticks):
        results: list = [None] * p
        for rank in range(p):
            kind = kinds.get(int(rows.kind[slot, rank]))
            ops = schedule.table()[slot][rank]
            assert (ops[0].kind if ops else None) == kind
            if kind is None:
                continue
            chunk, microbatch = int(rows.chunk[slot, rank]), int(rows.microbatch[slot, rank])
            assert ops[0] == (kind, chunk, microbatch)
            stage, write = stage_at(schedule, rank, chunk), rows.stash[slot, rank]
            if kind == "F":
                assert stage == 0 or messages[rank][rows.read[slot, rank]] == ("F", stage - 1, microbatch)
            elif kind == "I":
                assert messages[rank][rows.read[slot, rank]] == ("I", stage + 1, microbatch)
            if schedule.forwards_only:
                pass
            elif kind == "F":
                stash[rank][write] = (stage, microbatch)
            else:
                assert stash[rank][write] == (stage, microbatch)
            if kind == "I":
                residuals[rank][rows.residuals[slot, rank]] = (stage, microbatch)
            if kind == "W":
                assert residuals[rank][rows.residuals[slot, rank]] == (stage, microbatch)
            results[rank] = (kind, stage, microbatch)
        for rank in range(p):
            epilogue = [("I", last + 1, x[2]) for x in results[rank : rank + 1] if x and x[:2] == ("F", last)]
            arriving = (results[rank - 1], results[(rank + 1) % p], results[rank], epilogue[0] if epilogue else None)
            # Messages that no rank needs go to free buffers, so that the order of writes does not matter.
            for way, message in zip(WAYS, arriving, strict=True):
                is_needed = _is_needed(schedule, rank, way, message)
                if not is_needed:
                    messages[rank][getattr(rows, way)[slot, rank]] = "garbage"
            for way, message in zip(WAYS, arriving, strict=True):
                if _is_needed(schedule, rank, way, message):
                    assert rows.sent[slot, WAYS.index(way)]
                    sent[way] += 1
                    messages[rank][getattr(rows, way)[slot, rank]] = message
    return sent


def _is_needed(schedule: Schedule, rank: int, way: str, message: tuple | None) -> bool:
    """Return whether a rank needs the message that comes one way."""
    if message is None or message[0] == "W":
        return False
    if way == "from_epilogue":
        return not schedule.forwards_only
    kind, stage, _ = message
    target = stage + (1 if kind == "F" else -1)
    if not 0 <= target < schedule.ranks * schedule.chunks or schedule.place(target).rank != rank:
        return False
    place = schedule.place(stage)
    _, step = schedule.neighbour(kind, place.rank, place.chunk)
    return way == {1: "from_previous", -1: "from_next", 0: "from_self"}[step]


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_nothing_is_lost_in_buffers(p: int) -> None:
    for schedule in grid(p) if p < 8 else [s for s in grid(p) if s.microbatches == 2 * p]:
        m, v, rows = schedule.microbatches, schedule.chunks, schedule.rows
        sent = count_messages(schedule)
        # All stages but the last send activations, all but the first send cotangents. In a V, half of each goes up.
        per_chunk, v_turns = 2 * m * (p - 1), 2 * m if v == 2 else 0
        assert sent["from_self"] == v_turns
        assert sent["from_epilogue"] == m
        assert sent["from_previous"] + sent["from_next"] == 2 * m * (p * v - 1) - v_turns
        if v == 2:
            assert sent["from_previous"] == sent["from_next"] == 2 * m * (p - 1)
        assert (
            sent["from_previous"] + sent["from_next"] == v * per_chunk
        )  # a V sends twice as many as one chunk per rank
        assert rows.num_residual_slots <= rows.num_stash_slots == schedule.slots
        count_messages(schedule.forwards)
        assert schedule.forwards.ticks <= schedule.ticks
        assert not any(op.kind != "F" for column in schedule.forwards.table() for ops in column for op in ops)


def test_buffers_do_not_grow_with_the_microbatches() -> None:
    for kind, v in ((kind, v) for kind, v in kinds() if kind not in LOCKSTEP):
        room = {
            (s.rows.num_stash_slots, s.rows.num_residual_slots, s.rows.num_buffers)
            for s in (Schedule(kind, 4, m, v) for m in (16, 32, 64))
        }
        assert len(room) == 1, kind


def test_places_and_ways() -> None:
    for placement, p, v in itertools.product(("loop", "V"), PIPES, (1, 2)):
        for stage in range(p * v):
            place = place_of(placement, p, stage)  # type: ignore[arg-type]
            assert stage_of(placement, p, *place) == stage  # type: ignore[arg-type]
    schedule = Schedule("zb-v", 4, 8, 2)
    assert [[schedule.stage(rank, chunk) for chunk in (0, 1)] for rank in range(4)] == [[0, 7], [1, 6], [2, 5], [3, 4]]
    assert schedule.neighbour("F", 1, 0) == ((2, 0), 1)
    assert schedule.neighbour("F", 1, 1) == ((0, 1), -1)
    assert schedule.neighbour("F", 3, 0) == ((3, 1), 0)  # the turn
    assert schedule.neighbour("I", 1, 1) == ((2, 1), 1)
    assert schedule.neighbour("I", 0, 0) == (None, 0)
    assert Schedule("1f1b", 4, 8, 2).neighbour("F", 3, 0) == ((0, 1), 1)


# -- tables from elsewhere ---------------------------------------------------------------------------------------------

GOOD = {(0, 0): Op("F", 0, 0), (1, 1): Op("F", 0, 0), (2, 1): Op("I", 0, 0), (3, 0): Op("I", 0, 0)}
GOOD |= {(3, 1): Op("W", 0, 0), (4, 0): Op("W", 0, 0)}


def table(cells: dict[tuple[int, int], Op]) -> tuple:
    return tuple(tuple((cells[s, r],) if (s, r) in cells else () for r in range(2)) for s in range(5))


def test_from_table() -> None:
    schedule = Schedule.from_table(table(GOOD), name="mine")
    assert schedule.title == "mine, 2 ranks, 1 microbatches"
    assert (schedule.ticks, schedule.branches, simulate(schedule)) == (5, True, [1, 1])
    for kind in LOCKSTEP:
        named = Schedule(kind, 4, 8)
        from_table = Schedule.from_table(named.table())
        assert not from_table.branches
        assert (from_table.phases(), from_table.slots, from_table.time) == (named.phases(), named.slots, named.time)


BAD = (
    ({(1, 1): None, (0, 1): Op("F", 0, 0)}, r"slot 0, rank 1: 1F0 needs .* stage 0, which runs in the same slot"),
    ({(3, 0): None, (1, 0): Op("I", 0, 0)}, r"slot 1, rank 0: 0I0 needs the backward.* in stage 1, which has not"),
    ({(3, 1): None, (1, 0): Op("W", 0, 0)}, r"slot 1, rank 0: 0W0 needs .* in stage 0, which has not run"),
    ({(4, 0): None}, r"stage 0 \(rank 0\) never runs W of microbatch 0"),
    ({(4, 1): Op("W", 0, 0)}, r"slot 4, rank 1: 1W0 runs again"),
    ({(4, 1): Op("B", 0, 0)}, r"slot 4, rank 1: 1B0 runs again"),
    ({(1, 0): Op("X", 0, 0)}, r"slot 1, rank 0: .*is no operation of this table; use kinds F, B, I, W"),  # type: ignore[arg-type]
)


def test_bad_tables() -> None:
    for changes, message in BAD:
        cells = {cell: op for cell, op in (GOOD | changes).items() if op}
        with pytest.raises(ValueError, match=message):
            Schedule.from_table(table(cells))


def test_bad_tables_of_other_shapes() -> None:
    with pytest.raises(ValueError, match="the table is empty"):
        Schedule.from_table(())
    with pytest.raises(ValueError, match="slot 1 has 1 ranks, and slot 0 has 2; give each slot all ranks"):
        Schedule.from_table((((Op("F", 0, 0),), ()), ((),)))
    f_and_b = ((Op("F", 0, 0), Op("B", 0, 0)),)
    assert not Schedule.from_table((f_and_b,)).branches
    with pytest.raises(ValueError, match="slot 0, rank 0 runs 0F0 and 0I0 at once"):
        Schedule.from_table((((Op("F", 0, 0), Op("I", 0, 0)),),))
    waiting = ((Op("F", 0, 0),), ()), ((), ()), ((), f_and_b[0]), ((Op("B", 0, 0),), ())
    with pytest.raises(ValueError, match="F and B share a slot in a table whose messages wait"):
        Schedule.from_table(waiting)


def test_from_csv() -> None:
    for schedule in grid(4):
        parsed = Schedule.from_csv(schedule.csv(), schedule.kind)
        placement = schedule.placement if schedule.chunks > 1 else "loop"  # with one chunk they are the same
        assert (parsed.table(), parsed.placement) == (schedule.table(), placement)
    for schedule in (Schedule("1f1b", 4, 6), Schedule("1f1b", 2, 4, 3), Schedule("gpipe", 3, 5)):
        parsed = Schedule.from_csv(schedule.csv())  # whole backwards run beside forwards
        assert orders_of(parsed.table()) == orders_of(schedule.table())
    overlapped = Schedule.from_csv(["0F0,0F1,,(0F2;0B0)OVERLAP_F_B,0B1,0B2", "1F0,1B0,1F1,1B1,1F2,1B2"])
    assert overlapped.microbatches == 3
    for lines, message in (
        (["0F0,0B0", "1F0,1SEND_B0"], r"rank 1 has a cell '1SEND_B0'; write stage"),
        (["0F0,0B0,2F0,2B0", "1F0,1B0,2F1"], r"ranks hold stages \[0, 2\], \[1, 2\]"),
        (["0B0,0F0", "1F0,1B0"], r"rank 0 cannot go on: 0B0 needs 0F0, which rank 0 does not run before it"),
        (["0F0,0B0", "1F0"], r"rank 0 cannot go on: 0B0 needs 1I0 or 1B0, which rank 1 does not run before it"),
        (["0F0,0B0", "1F0,1I0"], r"stage 1 \(rank 1\) never runs W of microbatch 0"),
        (["0F0,0I0,0W0", "1F0,1W0,1I0"], r"rank 1 cannot go on: 1W0 needs 1I0"),  # rank 0 waits for it
        ([""], "the table is empty"),
        # 5,000 digits gave "Exceeds the limit (4300 digits)"; the other tables filled the memory.
        ([f"{'9' * 5000}F0"], r"rank 0 has a cell '9{40}'; write stage, .* up to six digits"),
        (["0F999999,0B0", "999999F0"], r"1,000,000 stages and 1,000,000 microbatches; use 4,096 ranks and"),
        ([f"{rank}F0,{rank}B0" for rank in range(5000)], "the table has 5,000 ranks"),
        (["0F0,0F1,0B0,0F1"], "rank 0 has 0F1 twice"),
    ):
        with pytest.raises(ValueError, match=message):
            Schedule.from_csv(lines)


def test_a_file_that_is_no_table(tmp_path: Path) -> None:
    """A file that is not UTF-8 was once a UnicodeDecodeError, and a file of any size was read."""
    path = tmp_path / "mine.csv"
    path.write_bytes("0F0,0B0".encode("utf-16"))
    for read in (lambda: Schedule.of(str(path), 1, 1, 1), lambda: timeline.main(timeline.TimelineOptions(table=path))):
        with pytest.raises(ValueError, match=r"mine.csv is no UTF-8 text: .*; check that it is the right file"):
            read()
    path.write_bytes(b" " * ((1 << 24) + 1))
    with pytest.raises(ValueError, match=r"mine.csv has 16,777,217 bytes, and at most 16,777,216 are read"):
        Schedule.read(path)
    with pytest.raises(ValueError, match="is a folder; give a regular file"):
        Schedule.read(tmp_path)


# -- torch -------------------------------------------------------------------------------------------------------------


def all_schedules(p: int) -> list[Schedule]:
    """Return every schedule with each of its numbers of chunks, with few and many microbatches."""
    return [
        Schedule(kind, p, m, v)
        for kind, v in kinds()
        for m in (1, p - 1, p, 2 * p, 2 * p + 1, 3 * p)
        if m >= fewest_microbatches(kind, p) and not (kind in LOCKSTEP and v > 1 and m % p)
    ]


@pytest.mark.xdist_group("torch")
@pytest.mark.parametrize("p", [2, 4, 8])
def test_torch_accepts_the_tables(p: int) -> None:
    """torch's validator, its lowering to sends and receives, and its deadlock simulator accept every table."""
    torch = pytest.importorskip("torch.distributed.pipelining.schedules")
    for schedule in all_schedules(p):
        stages = p * schedule.chunks
        actions = {
            rank: [torch._Action.from_str(cell) for cell in line.split(",")] for rank, line in enumerate(schedule.csv())
        }
        mapping = torch._validate_schedule(actions, p, stages, schedule.microbatches)
        assert mapping == {stage: schedule.place(stage).rank for stage in range(stages)}
        rank_of = lambda stage, schedule=schedule: schedule.place(stage).rank
        lowered = torch._add_send_recv(
            {rank: [a for a in row if a is not None] for rank, row in actions.items()}, rank_of, stages
        )
        ran = torch._simulate_comms_compute(lowered, rank_of, stages)
        forwards = [a for row in ran.values() for a in row if a is not None and a.computation_type == torch.FORWARD]
        assert len(forwards) == stages * schedule.microbatches


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("zb-h1", 4, 8, 2), "schedule='zb-h1' holds one chunk a rank, not chunks=2; use chunks=1, or zb-v"),
        (("zb-v", 4, 8), "schedule='zb-v' holds two chunks a rank, not chunks=1; use chunks=2"),
        (("dualpipe-v", 4, 7, 2), "microbatches=7 is less than 8; use 8 or more, or zb-v"),
    ],
)
def test_errors(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Schedule(*arguments)


@pytest.mark.parametrize("kind", [kind for kind, recipe in SCHEDULES.items() if recipe.chunks > 1])
def test_a_strategy_has_the_chunks_that_its_schedule_needs(kind: str) -> None:
    """`schedule=zb-v` alone was once refused, since it lacked `chunks=2`."""
    strategy = Strategy.parse(f"pipe=2,microbatches=8,schedule={kind}")
    assert strategy.chunks == 2
    assert "chunks" not in str(strategy)
    assert Strategy.parse(str(strategy)) == strategy == dataclasses.replace(strategy, chunks=2)
    Schedule.of(kind, 2, 8, strategy.chunks)
    assert "chunks=1" in str(dataclasses.replace(strategy, chunks=1))
    with pytest.raises(ValueError, match=f"schedule={kind} without a pipeline; give pipe= a size, or leave schedule"):
        Strategy(schedule=kind)
