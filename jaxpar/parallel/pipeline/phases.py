"""What ticks are made of; of tables in lockstep the phases, a scan each, and where activations wait for backwards."""

import heapq
import itertools
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from ...strategy.schedules.operations import Table


class Column(NamedTuple):
    """A part of a tick: which kinds of operations may run in it, and how long it takes, in forwards of a chunk."""

    tick: int
    kinds: str
    length: int


class Phase(NamedTuple):
    """Ticks in a row that all run the same operations: forwards, backwards, and the epilogue after the last layer.

    `start` is the first tick of the first of `repeats` rounds of `inner` phases, or of `length` ticks.
    """

    start: int
    length: int
    forward: bool
    backward: bool
    epilogue: bool


def grouped(flags: Iterable[tuple[bool, bool, bool]]) -> list[tuple[int, list[Phase]]]:
    """Ticks by what they run (forward, backward, epilogue), as (repeats, phases that alternate), in order."""
    runs = []
    for (f, b, e), ticks in itertools.groupby(enumerate(flags), key=lambda pair: pair[1]):
        first, *rest = [tick for tick, _ in ticks]
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


def stash_slots(table: Table) -> tuple[np.ndarray, np.ndarray]:
    """The slots [tick, rank] that forwards write, and that backwards read.

    A forward's slot is free again after the tick of its backward. Where a rank has no forward in a tick that others
    use, it writes all the same, where nothing is held.
    """
    shape = len(table), len(table[0])
    writes, reads = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for rank in range(shape[1]):
        forwards = sum(op.kind == "F" for column in table for op in column[rank])
        free = list(range(forwards + 1))  # a heap: the lowest first
        held: dict[tuple[int, int], int] = {}
        for tick, column in enumerate(table):
            if any(op.kind == "F" for ops in column for op in ops):
                writes[tick, rank] = free[0]
            for kind, chunk, microbatch in column[rank]:
                if kind == "F":
                    held[chunk, microbatch] = heapq.heappop(free)
                else:
                    reads[tick, rank] = slot = held.pop((chunk, microbatch))
                    heapq.heappush(free, slot)
    return writes, reads


def looked_up(table: Table) -> dict[str, np.ndarray]:
    """What a rank runs, int32 [tick, rank]: for F and B `valid`, `chunk`, `microbatch`."""
    shape, out = (len(table), len(table[0])), {}
    for kind in "FB":
        ops = [next((op for op in table[tick][rank] if op.kind == kind), None) for tick, rank in np.ndindex(shape)]
        for name, values in (
            ("valid", [op is not None for op in ops]),
            ("chunk", [op.chunk if op else 0 for op in ops]),
            ("microbatch", [op.microbatch if op else 0 for op in ops]),
        ):
            out[f"{kind}_{name}"] = np.array(values, np.int32).reshape(shape)
    return out


def places(made: Mapping[int, int], read: Mapping[int, int]) -> int:
    """The least n such that microbatch b, made in one tick and read in another, can wait at b mod n."""

    def free(n: int) -> bool:
        until = dict.fromkeys(range(n), 0)
        for at, tick in sorted(made.items(), key=lambda item: item[1]):
            if until[at % n] > tick:
                return False
            until[at % n] = read[at]
        return True

    first = min(read.values())
    least = sum(tick < first for tick in made.values())
    return next(n for n in itertools.count(max(1, least)) if free(n))
