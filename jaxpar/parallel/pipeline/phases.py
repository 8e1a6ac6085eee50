"""The phases of a table in lockstep, the slots of its stash, and its lookups as arrays.

    1F1B, 2 ranks, 3 microbatches

    tick       0     1     2     3     4
    rank 0    F0    F1   F2B0   B1    B2
    rank 1         F0B0  F1B1  F2B2
    phase    | F | F, B and epilogue | B |      one scan each: its ticks run the same operations

    rank 0's stash
    writes     0     1     2                    a forward writes the lowest free slot
    reads                  0     1     2        its backward reads the slot, which is free after the tick

A phase is a loop of the compiled program. If two phases alternate, a loop over both contains theirs (`group_phases`).
"""

import heapq
import itertools
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from ...strategy.schedules.operations import Table


class Column(NamedTuple):
    """A part of a tick: the kinds of operations that may run in it, and its length in forwards of one chunk."""

    tick: int
    kinds: str
    length: int


class Phase(NamedTuple):
    """Consecutive ticks that all run the same operations: forwards, backwards, and the epilogue after the last layer.

    Attributes:
      start: the first tick. If the phase alternates with another, the first tick of its first repetition.
      length: the number of ticks, in one repetition.
      forward: whether its ticks run forwards.
      backward: whether its ticks run backwards.
      epilogue: whether a microbatch leaves the last stage in each of its ticks.
    """

    start: int
    length: int
    forward: bool
    backward: bool
    epilogue: bool


def group_phases(flags: Iterable[tuple[bool, bool, bool]]) -> list[tuple[int, list[Phase]]]:
    """Group ticks into phases, in order, and alternating phases into rounds.

    Args:
      flags: for each tick, whether it has forwards, backwards, an epilogue.

    Returns:
      Pairs (repeats, phases): one phase that runs once, or two phases that alternate `repeats` times.
    """
    # 1. Consecutive ticks with the same flags are one phase.
    phases = []
    for (f, b, e), ticks in itertools.groupby(enumerate(flags), key=lambda pair: pair[1]):
        first, *rest = [tick for tick, _ in ticks]
        phases.append(Phase(first, 1 + len(rest), f, b, e))

    # 2. A pair of phases that repeats, lengths included, becomes one entry, so that the program has its body once.
    rounds: list[tuple[int, list[Phase]]] = []
    while phases:
        repeats = 1
        # Without the start, in which the repetitions differ.
        pattern = [phase[1:] for phase in phases[:2]]
        while len(pattern) == 2 and [phase[1:] for phase in phases[2 * repeats : 2 * repeats + 2]] == pattern:
            repeats += 1
        size = 2 if repeats > 1 else 1
        rounds.append((repeats, phases[:size]))
        phases = phases[size * repeats :]
    return rounds


def stash_slots(table: Table) -> tuple[np.ndarray, np.ndarray]:
    """Return the stash slots [tick, rank] that forwards write, and the slots that backwards read.

    A forward's slot is free again after the tick of its backward. In a tick with forwards on other ranks, an idle rank
    writes as well, to a slot that is free.
    """
    shape = len(table), len(table[0])
    writes, reads = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for rank in range(shape[1]):
        forwards = sum(op.kind == "F" for column in table for op in column[rank])
        # A heap, so that the lowest number comes first. It has one more than forwards, for an idle rank to write.
        free = list(range(forwards + 1))
        slots: dict[tuple[int, int], int] = {}  # (chunk, microbatch) -> its slot, from F to B
        for tick, column in enumerate(table):
            # An idle rank writes as well, to a slot that no microbatch has.
            if any(op.kind == "F" for ops in column for op in ops):
                writes[tick, rank] = free[0]
            # F comes before B in a cell: it takes a slot before B frees one, since the tick writes before B reads.
            for kind, chunk, microbatch in column[rank]:
                if kind == "F":
                    slots[chunk, microbatch] = heapq.heappop(free)
                else:
                    reads[tick, rank] = slot = slots.pop((chunk, microbatch))
                    heapq.heappush(free, slot)
    return writes, reads


def operation_tables(table: Table) -> dict[str, np.ndarray]:
    """Return the operations of ranks as int32 arrays [tick, rank]: for F and B, `valid`, `chunk` and `microbatch`.

    Names have the kind as prefix, as in `F_valid`.
    """
    shape, arrays = (len(table), len(table[0])), {}
    for kind in "FB":
        ops = [next((op for op in table[tick][rank] if op.kind == kind), None) for tick, rank in np.ndindex(shape)]
        for name, values in (
            ("valid", [op is not None for op in ops]),
            # An idle rank computes chunk 0 of microbatch 0, and the result is dropped.
            ("chunk", [op.chunk if op else 0 for op in ops]),
            ("microbatch", [op.microbatch if op else 0 for op in ops]),
        ):
            arrays[f"{kind}_{name}"] = np.array(values, np.int32).reshape(shape)
    return arrays


def num_waiting_positions(write_ticks: Mapping[int, int], read_ticks: Mapping[int, int]) -> int:
    """Return the smallest n for which microbatch b can wait at position b mod n from its write to its read.

    Args:
      write_ticks: for each microbatch, the tick in which its value is written.
      read_ticks: for each microbatch, the tick in which its value is read. A tick reads before it writes.
    """

    def is_enough(n: int) -> bool:
        free_from = dict.fromkeys(range(n), 0)
        for microbatch, tick in sorted(write_ticks.items(), key=lambda item: item[1]):
            if free_from[microbatch % n] > tick:
                return False
            free_from[microbatch % n] = read_ticks[microbatch]
        return True

    # All values that are written before the first read wait at once, so that n is no smaller than their number.
    first_read = min(read_ticks.values())
    lower_bound = sum(tick < first_read for tick in write_ticks.values())
    return next(n for n in itertools.count(max(1, lower_bound)) if is_enough(n))
