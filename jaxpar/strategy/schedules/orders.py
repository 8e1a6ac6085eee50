"""Tables from the order of each rank's operations, and the time that they take."""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from .operations import Kind, Op, Orders, Placement, Table, place_of, stage_of, toward

Number = int | float | Fraction


class Interval(NamedTuple):
    """When an operation runs."""

    start: Number
    end: Number


def needs(op: Op, stage: int, stages: int) -> list[tuple[str, int]]:
    """The operations, by kind and stage, that must have run before; "I" stands for B too."""
    if op.kind == "F":
        return [("F", stage - 1)] if stage else []
    if op.kind == "W":
        return [("I", stage)]
    return [("F", stage)] + ([("I", stage + 1)] if stage + 1 < stages else [])


def spans(
    orders: Sequence[Sequence[Op]], placement: Placement, chunks: int, times: Mapping[str, Number]
) -> list[list[Interval]]:
    """When each rank runs its operations, each as soon as the rank is free and its inputs are there.

    Args:
      orders: each rank's operations.
      placement: where its chunks lie.
      chunks: how many a rank holds.
      times: of F, B, I and W of one chunk.

    Raises ValueError where ranks wait for each other; it names what the first of them waits for.
    """
    ranks = len(orders)
    stages = ranks * chunks
    out: list[list[Interval]] = [[] for _ in orders]
    free: list[Number] = [0] * ranks
    done: dict[tuple[str, int, int], Number] = {}
    waiting: dict[tuple[str, int, int], int] = {}
    ready = list(range(ranks))
    while ready:
        rank = ready.pop()
        order = orders[rank]
        while len(out[rank]) < len(order):
            op = order[len(out[rank])]
            stage, start = stage_of(placement, ranks, rank, op.chunk), free[rank]
            for kind, of in needs(op, stage, stages):
                key = (kind, of, op.microbatch)
                if key not in done:
                    waiting[key] = rank
                    break
                start = max(start, done[key])
            else:
                free[rank] = end = start + times[op.kind]
                out[rank].append(Interval(start, end))
                made = ("I" if op.kind == "B" else op.kind, stage, op.microbatch)
                done[made] = end
                if made in waiting:
                    ready.append(waiting.pop(made))
                continue
            break
    stuck = next((rank for rank, order in enumerate(orders) if len(out[rank]) < len(order)), None)
    seen: set[int] = set()
    while stuck is not None:  # from rank to rank, until one waits for itself, or a circle closes
        seen.add(stuck)
        op = orders[stuck][len(out[stuck])]
        stage = stage_of(placement, ranks, stuck, op.chunk)
        kind, of = next(x for x in needs(op, stage, stages) if (*x, op.microbatch) not in done)
        owner = place_of(placement, ranks, of).rank
        if owner in seen or len(out[owner]) == len(orders[owner]):
            needed = f"{of}{kind}{op.microbatch}" + (f" or {of}B{op.microbatch}" if kind == "I" else "")
            raise ValueError(
                f"rank {stuck} cannot go on: {stage}{op.kind}{op.microbatch} needs {needed}, which rank {owner} does "
                "not run before it; keep the order of the layers"
            )
        stuck = owner
    return out


def as_soon_as_possible(orders: Sequence[Sequence[Op]], placement: Placement, chunks: int) -> Table:
    """The table in which each rank runs its operations in this order, each in the first slot in which it can."""
    each = spans(orders, placement, chunks, dict.fromkeys("FBIW", 1))
    slots = max((int(ran[-1].end) for ran in each if ran), default=0)
    table: list[list[tuple[Op, ...]]] = [[()] * len(orders) for _ in range(slots)]
    for rank, (order, ran) in enumerate(zip(orders, each, strict=True)):
        for op, span in zip(order, ran, strict=True):
            table[int(span.start)][rank] = (op,)
    return tuple(tuple(column) for column in table)


def orders_of(table: Table) -> Orders:
    """What each rank runs, one after the other."""
    return [[op for column in table for op in column[rank]] for rank in range(len(table[0]) if table else 0)]


def in_lockstep(table: Table, placement: Placement, chunks: int) -> bool:
    """Whether messages wait nowhere, so that ranks need not branch: each F and B runs in the tick after that of the
    stage before it or behind it, and there are no I and W.
    """
    if placement != "loop":
        return False
    ranks = len(table[0]) if table else 0
    ran: dict[tuple[Kind, int, int], int] = {
        (op.kind, stage_of(placement, ranks, rank, op.chunk), op.microbatch): tick
        for tick, column in enumerate(table)
        for rank, ops in enumerate(column)
        for op in ops
    }
    for (kind, stage, at), tick in ran.items():
        if kind in "IW":
            return False
        to = toward(kind, stage, ranks * chunks)
        if to is not None and (kind, to, at) in ran and ran[kind, to, at] != tick + 1:
            return False
    return True
