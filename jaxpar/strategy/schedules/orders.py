"""Compute when operations run from the order of each rank's operations, and write the table.

A rank runs its operations in their order, each as soon as the rank is free and the inputs have arrived. Ranks may wait
for each other in a circle; no such order can run.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from .operations import Kind, Op, Orders, Placement, Table, place_of, stage_of, toward

Number = int | float | Fraction


class Interval(NamedTuple):
    """The time from the start of an operation to its end."""

    start: Number
    end: Number


def needs(op: Op, stage: int, stages: int) -> list[tuple[str, int]]:
    """Return the operations, by kind and stage, that must run before `op`; "I" stands for B too."""
    if op.kind == "F":
        return [("F", stage - 1)] if stage else []
    if op.kind == "W":
        return [("I", stage)]
    return [("F", stage)] + ([("I", stage + 1)] if stage + 1 < stages else [])


def spans(
    orders: Sequence[Sequence[Op]], placement: Placement, chunks: int, times: Mapping[str, Number]
) -> list[list[Interval]]:
    """Return when each rank runs its operations, each as soon as the rank is free and its inputs have arrived.

    Args:
      orders: each rank's operations.
      placement: which stages are a rank's chunks.
      times: the time that F, B, I and W of one chunk take.

    Returns:
      For each rank the intervals of its operations, in their order.

    Raises:
      ValueError: if ranks wait for each other, naming an operation in that circle.
    """
    ranks = len(orders)
    stages = ranks * chunks
    intervals: list[list[Interval]] = [[] for _ in orders]
    free_from: list[Number] = [0] * ranks
    end_of: dict[tuple[str, int, int], Number] = {}  # kind, stage, microbatch -> end of the operation
    waiting: dict[tuple[str, int, int], int] = {}  # operation that has not run -> the rank that waits for it
    # At most one rank waits for an operation of another rank, so that `waiting` needs no lists.
    # A rank runs until an input is missing, and is ready again when the missing operation has run.
    ready = list(range(ranks))
    while ready:
        rank = ready.pop()
        order = orders[rank]
        while len(intervals[rank]) < len(order):
            op = order[len(intervals[rank])]
            stage, start = stage_of(placement, ranks, rank, op.chunk), free_from[rank]
            # Start when the last input has arrived, or stop at the first input that is missing.
            for kind, needed_stage in needs(op, stage, stages):
                needed = (kind, needed_stage, op.microbatch)
                if needed not in end_of:
                    waiting[needed] = rank
                    break
                start = max(start, end_of[needed])
            else:
                # All inputs have arrived: run the operation.
                free_from[rank] = end = start + times[op.kind]
                intervals[rank].append(Interval(start, end))
                # The previous stage waits for the gradient of inputs, be it from I or from B.
                completed = ("I" if op.kind == "B" else op.kind, stage, op.microbatch)
                end_of[completed] = end
                if completed in waiting:
                    ready.append(waiting.pop(completed))
                continue
            break
    _check_no_deadlock(orders, [len(rank_intervals) for rank_intervals in intervals], placement, stages, end_of)
    return intervals


def _check_no_deadlock(
    orders: Sequence[Sequence[Op]],
    num_run: Sequence[int],
    placement: Placement,
    stages: int,
    end_of: Mapping[tuple[str, int, int], Number],
) -> None:
    """Raise ValueError if ranks wait for each other; name an operation in that circle.

    Args:
      orders: each rank's operations.
      num_run: how many operations each rank has run.
      placement: which stages are a rank's chunks.
      end_of: the end of each operation that ran, by kind ("I" for B too), stage and microbatch.
    """
    ranks = len(orders)
    stuck = next((rank for rank, order in enumerate(orders) if num_run[rank] < len(order)), None)
    visited: set[int] = set()
    # Follow what a stuck rank waits for from rank to rank, until a rank waits for itself or a circle closes.
    while stuck is not None:
        visited.add(stuck)
        op = orders[stuck][num_run[stuck]]
        stage = stage_of(placement, ranks, stuck, op.chunk)
        kind, needed_stage = next(need for need in needs(op, stage, stages) if (*need, op.microbatch) not in end_of)
        owner = place_of(placement, ranks, needed_stage).rank
        # If the owner has run all of its operations, the missing one comes nowhere in its order.
        if owner in visited or num_run[owner] == len(orders[owner]):
            names = f"{needed_stage}{kind}{op.microbatch}"
            names += f" or {needed_stage}B{op.microbatch}" if kind == "I" else ""
            raise ValueError(
                f"rank {stuck} cannot go on: {stage}{op.kind}{op.microbatch} needs {names}, which rank {owner} does "
                "not run before it; keep the order of the layers"
            )
        stuck = owner


def as_soon_as_possible(orders: Sequence[Sequence[Op]], placement: Placement, chunks: int) -> Table:
    """Return the table in which each rank runs its operations in order, each in the first slot in which it can run."""
    # Every kind takes one slot here, though B takes twice the time of F: `TIME` has the lengths of slots.
    intervals = spans(orders, placement, chunks, dict.fromkeys("FBIW", 1))
    slots = max((int(rank_intervals[-1].end) for rank_intervals in intervals if rank_intervals), default=0)
    table: list[list[tuple[Op, ...]]] = [[()] * len(orders) for _ in range(slots)]
    for rank, (order, rank_intervals) in enumerate(zip(orders, intervals, strict=True)):
        for op, interval in zip(order, rank_intervals, strict=True):
            table[int(interval.start)][rank] = (op,)
    return tuple(tuple(column) for column in table)


def orders_of(table: Table) -> Orders:
    """Return the operations of each rank in their order."""
    return [[op for column in table for op in column[rank]] for rank in range(len(table[0]) if table else 0)]


def in_lockstep(table: Table, placement: Placement, chunks: int) -> bool:
    """Return whether no message waits, so that ranks need not branch.

    In such a table each F and B runs in the tick after its sender's, the previous stage's or the next stage's, and
    there are no I and W.
    """
    if placement != "loop":
        return False
    ranks = len(table[0]) if table else 0
    tick_of: dict[tuple[Kind, int, int], int] = {
        (op.kind, stage_of(placement, ranks, rank, op.chunk), op.microbatch): tick
        for tick, column in enumerate(table)
        for rank, ops in enumerate(column)
        for op in ops
    }
    for (kind, stage, microbatch), tick in tick_of.items():
        if kind in "IW":
            return False
        receiver = toward(kind, stage, ranks * chunks)
        # A receiver that runs its backward in halves has an I instead of B, which returns False in its turn.
        if receiver is not None and tick_of.get((kind, receiver, microbatch), tick + 1) != tick + 1:
            return False
    return True
