"""Where things wait in a table whose ranks branch: activations, what I leaves for W, and messages.

    1F1B, one operation in a slot, p = 2, m = 2       what rank 1 finds in its buffers
    slot      0    1    2    3    4    5    6
    rank 0   F0   F1        B0        B1
    rank 1        F0   B0   F1   B1                   slot 2: F1's message waits until slot 3

In a slot, a rank runs one operation or none; then messages move, one each way at most, and lie in their buffers when
the next slot begins.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ...strategy.schedules.operations import KINDS, Op, Placement, StagePlace, Table, neighbour, stage_of

CODES = {kind: code for code, kind in enumerate(KINDS, start=1)}  # F 1, B 2, I 3, W 4; 0 is idle


@dataclass(frozen=True)
class SlotTables:
    """What a branching program looks up, int32 [slot, rank], and how much room its buffers need.

    Attributes:
      kind: 0 idle, 1 F, 2 B, 3 I, 4 W (`CODES`).
      chunk, microbatch: of the operation; 0 where idle.
      stash: the stash slot of the operation's activations: F writes it, B, I and W read it. It is free again after B,
        or after W, whose activations and I's are the same.
      kept: the second slot: I writes there what it leaves for W, and W reads it. Free again after W.
      read: the message buffer that holds the operation's input: of F the activations from the stage before, of B and I
        the cotangents from the stage behind, or of the last stage from the epilogue. The first stage's F and every W
        have none (0).
      below, above, here, epilogue: the message buffer in which this rank puts, at the end of the slot, what comes from
        rank - 1 (around the ring), from rank + 1, from itself (at the turn of a V), and the cotangents that the
        epilogue makes of the microbatch that has left the last stage in this slot. Where nothing comes, a buffer in
        which nothing is held: it may be written, and need not. The four are distinct where two of them hold something,
        and what holds nothing never shares the buffer of what does.
      sent: bool [slot, 4], in that order: whether any rank gets something that way in the slot.
      stashes, keeps, buffers: how many there are of each, on every rank. A message is of one shape, forwards or
        backwards, so that both share the buffers.
    """

    kind: np.ndarray
    chunk: np.ndarray
    microbatch: np.ndarray
    stash: np.ndarray
    kept: np.ndarray
    read: np.ndarray
    below: np.ndarray
    above: np.ndarray
    here: np.ndarray
    epilogue: np.ndarray
    sent: np.ndarray
    stashes: int
    keeps: int
    buffers: int


WAYS = ("below", "above", "here", "epilogue")


class _Pool:
    """Numbered room on one rank: the lowest free number first, and the most that was held at once."""

    def __init__(self) -> None:
        self.free: list[int] = []
        self.held: dict[object, int] = {}
        self.size = 0

    def take(self, key: object) -> int:
        if not self.free:
            heapq.heappush(self.free, self.size)
            self.size += 1
        self.held[key] = heapq.heappop(self.free)
        return self.held[key]

    def give(self, key: object) -> int:
        number = self.held.pop(key)
        heapq.heappush(self.free, number)
        return number

    def spare(self) -> int:
        """A number at which nothing is held; it stays free."""
        return self.free[0] if self.free else self.size


@dataclass(frozen=True)
class Walk:
    """One walk through a table whose ranks branch; with `forwards_only` nothing is kept for a backward."""

    table: Table
    placement: Placement
    chunks: int
    forwards_only: bool

    @property
    def ranks(self) -> int:
        """How many there are."""
        return len(self.table[0])

    def rows(self) -> SlotTables:
        """What the program looks up."""
        p, shape = self.ranks, (len(self.table), self.ranks)
        out = {name: np.zeros(shape, np.int32) for name in ("kind", "chunk", "microbatch", "stash", "kept", "read")}
        ways = np.zeros((len(WAYS), *shape), np.int32)
        sent = np.zeros((shape[0], len(WAYS)), bool)
        stash, kept, messages = ([_Pool() for _ in range(p)] for _ in range(3))
        rooms = [0] * p  # of messages, spare ones included
        for slot, column in enumerate(self.table):
            ran = [(rank, op) for rank, ops in enumerate(column) for op in ops]
            assert len(ran) == sum(map(bool, column)), "a rank that branches runs one operation in a slot"
            for rank, op in ran:
                place = op.chunk, op.microbatch
                out["kind"][slot, rank] = CODES[op.kind]
                out["chunk"][slot, rank], out["microbatch"][slot, rank] = place
                if op.kind in "BI" or (op.kind == "F" and self._stage(rank, op) > 0):
                    out["read"][slot, rank] = messages[rank].give((op.kind == "F", *place))
                if self.forwards_only:
                    continue
                out["stash"][slot, rank] = stash[rank].take(place) if op.kind == "F" else stash[rank].held[place]
                if op.kind == "I":
                    out["kept"][slot, rank] = kept[rank].take(place)
                if op.kind == "W":
                    out["kept"][slot, rank] = kept[rank].give(place)
                if op.kind in "BW":
                    stash[rank].give(place)
            put = np.zeros((len(WAYS), p), bool)
            for rank, op in ran:
                for way, to in self._moves(rank, op):
                    key = (op.kind == "F" and WAYS[way] != "epilogue", to.chunk, op.microbatch)
                    ways[way, slot, to.rank] = messages[to.rank].take(key)
                    put[way, to.rank] = sent[slot, way] = True
            for rank in range(p):
                spare, nothing = messages[rank].spare(), ~put[:, rank]
                ways[nothing, slot, rank] = spare
                rooms[rank] = max(rooms[rank], messages[rank].size, spare + 1)
        most = lambda pools: max(pool.size for pool in pools)
        ways_of = dict(zip(WAYS, ways, strict=True))
        return SlotTables(**out, **ways_of, sent=sent, stashes=most(stash), keeps=most(kept), buffers=max(rooms))

    def _stage(self, rank: int, op: Op) -> int:
        return stage_of(self.placement, self.ranks, rank, op.chunk)

    def _moves(self, rank: int, op: Op) -> Iterator[tuple[int, StagePlace]]:
        """The way that an operation's message takes, as its place in `WAYS`, and the place that it is for."""
        to, way = neighbour(self.placement, self.ranks, self.chunks, op.kind, rank, op.chunk)
        if to is not None:
            yield WAYS.index({1: "below", -1: "above", 0: "here"}[way]), to
        elif op.kind == "F" and not self.forwards_only:
            yield WAYS.index("epilogue"), StagePlace(rank, op.chunk)
