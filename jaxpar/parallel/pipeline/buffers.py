"""Assign the slots of the stash and the message buffers, for tables whose ranks branch.

    1F1B, one operation in a slot, p = 2, m = 2

    slot                0    1    2    3    4    5    6
    rank 0             F0   F1        B0        B1
    rank 1                  F0   B0   F1   B1

    rank 1, stash           0    0    1    1             microbatch in stash slot 0: F writes it, B reads and frees it
    rank 1, buffer 0        f0   f1   f1   b1            f: activations from rank 0, b: cotangents from the epilogue
    rank 1, buffer 1             b0                      in slot 2, f1 waits, since rank 1 runs B0

In a slot, a rank runs one operation or none. At its end the messages move, at most one each way, so that they lie in
their buffers when the next slot begins. A table with I and W has a second stash: I leaves residuals there for W.

`Walk` goes through a table once and writes these numbers down as arrays, which the compiled program looks up.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ...strategy.schedules.operations import KINDS, Op, Placement, StagePlace, Table, neighbour, stage_of

CODES = {kind: code for code, kind in enumerate(KINDS, start=1)}  # F 1, B 2, I 3, W 4; 0 is idle


@dataclass(frozen=True)
class SlotTables:
    """The tables that a branching program looks up, int32 [slot, rank], and the sizes of its buffers on every rank.

    A message has one shape, whether it holds activations or cotangents, so that both share the message buffers.

    Attributes:
      kind: 0 idle, 1 F, 2 B, 3 I, 4 W (`CODES`).
      chunk: the operation's chunk; 0 if idle.
      microbatch: the operation's microbatch; 0 if idle.
      stash: the stash slot of the operation's activations. F writes it; B, I and W read it. B or W frees it.
      residuals: the slot of the second stash. I writes the residuals of its weight gradients there, and W reads and
        frees them.
      read: the message buffer that holds the operation's input. For F, the activations from the stage before. For B and
        I, the cotangents from the next stage; in the last stage, from the epilogue. 0 for the first stage's F and for
        W, which read no message.
      from_previous: the message buffer for the message from rank - 1 (around the ring), written at the end of the slot.
        Without a message, this is a free buffer, which may be overwritten. The four buffers of a slot differ where two
        of them receive messages, and a free buffer never equals one that receives a message.
      from_next: the same for the message from rank + 1.
      from_self: the same for the message from this rank itself, at the bend of a V.
      from_epilogue: the same for the cotangents that the epilogue makes of the microbatch that leaves the last stage.
      sent: bool [slot, 4], in the order of `WAYS`: whether any rank receives a message that way in the slot.
      num_stash_slots: the number of stash slots.
      num_residual_slots: the number of slots of the second stash, for `residuals`.
      num_buffers: the number of message buffers.
    """

    kind: np.ndarray
    chunk: np.ndarray
    microbatch: np.ndarray
    stash: np.ndarray
    residuals: np.ndarray
    read: np.ndarray
    from_previous: np.ndarray
    from_next: np.ndarray
    from_self: np.ndarray
    from_epilogue: np.ndarray
    sent: np.ndarray
    num_stash_slots: int
    num_residual_slots: int
    num_buffers: int


WAYS = ("from_previous", "from_next", "from_self", "from_epilogue")


class _Pool:
    """The numbered slots of one rank's buffer: allocates the lowest free number, and counts how many it needs."""

    def __init__(self) -> None:
        self.free: list[int] = []  # a heap
        self.allocated: dict[object, int] = {}
        self.size = 0

    def allocate(self, key: object) -> int:
        if not self.free:
            heapq.heappush(self.free, self.size)
            self.size += 1
        self.allocated[key] = heapq.heappop(self.free)
        return self.allocated[key]

    def release(self, key: object) -> int:
        number = self.allocated.pop(key)
        heapq.heappush(self.free, number)
        return number

    def spare(self) -> int:
        """Return a number that is free, without allocating it."""
        return self.free[0] if self.free else self.size


@dataclass(frozen=True)
class Walk:
    """A walk through a table whose ranks branch; with `forwards_only`, it stashes nothing for backwards."""

    table: Table
    placement: Placement
    chunks: int
    forwards_only: bool

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return len(self.table[0])

    def slot_tables(self) -> SlotTables:
        """Walk through the table, and return the tables that the program looks up."""
        p, shape = self.ranks, (len(self.table), self.ranks)
        # 0 for idle ranks and unread buffers: a rank that runs nothing reads buffer 0, and drops it.
        tables = {
            name: np.zeros(shape, np.int32) for name in ("kind", "chunk", "microbatch", "stash", "residuals", "read")
        }
        ways = np.zeros((len(WAYS), *shape), np.int32)
        sent = np.zeros((shape[0], len(WAYS)), bool)
        # One pool for each rank: what a rank stores does not depend on other ranks.
        stash, residuals, messages = ([_Pool() for _ in range(p)] for _ in range(3))
        num_buffers = [0] * p  # with the spare one
        for slot, column in enumerate(self.table):
            rank_ops = [(rank, op) for rank, ops in enumerate(column) for op in ops]
            assert len(rank_ops) == sum(map(bool, column)), "a rank that branches runs one operation in a slot"

            # 1. Operations read their message, and allocate or free their slots of both stashes.
            for rank, op in rank_ops:
                # A rank may hold activations of one microbatch in several chunks.
                place = op.chunk, op.microbatch
                tables["kind"][slot, rank] = CODES[op.kind]
                tables["chunk"][slot, rank], tables["microbatch"][slot, rank] = place
                if op.kind in "BI" or (op.kind == "F" and stage_of(self.placement, self.ranks, rank, op.chunk)):
                    tables["read"][slot, rank] = messages[rank].release((op.kind == "F", *place))
                if self.forwards_only:
                    continue
                stash_of = stash[rank].allocate if op.kind == "F" else stash[rank].allocated.__getitem__
                tables["stash"][slot, rank] = stash_of(place)
                if op.kind == "I":
                    tables["residuals"][slot, rank] = residuals[rank].allocate(place)
                if op.kind == "W":
                    tables["residuals"][slot, rank] = residuals[rank].release(place)
                # I and W read the same activations: they are free after W.
                if op.kind in "BW":
                    stash[rank].release(place)

            # 2. Messages arrive. All ranks have read theirs, so that a buffer freed in this slot can be written again.
            receives = np.zeros((len(WAYS), p), bool)
            for rank, op in rank_ops:
                for way, target in self._moves(rank, op):
                    # The epilogue turns an F into cotangents, which a B or I will read.
                    key = (op.kind == "F" and WAYS[way] != "from_epilogue", target.chunk, op.microbatch)
                    ways[way, slot, target.rank] = messages[target.rank].allocate(key)
                    receives[way, target.rank] = sent[slot, way] = True

            # 3. The program writes a buffer for every way, whether a message came or not: give the others a spare one.
            for rank in range(p):
                spare, is_unused = messages[rank].spare(), ~receives[:, rank]
                ways[is_unused, slot, rank] = spare
                num_buffers[rank] = max(num_buffers[rank], messages[rank].size, spare + 1)
        # All ranks run one program, so that their buffers have the size that the fullest rank needs.
        largest = lambda pools: max(pool.size for pool in pools)
        return SlotTables(
            **tables,
            **dict(zip(WAYS, ways, strict=True)),
            sent=sent,
            num_stash_slots=largest(stash),
            num_residual_slots=largest(residuals),
            num_buffers=max(num_buffers),
        )

    def _moves(self, rank: int, op: Op) -> Iterator[tuple[int, StagePlace]]:
        """Yield the way that an operation's message takes, as an index into `WAYS`, and its target."""
        target, direction = neighbour(self.placement, self.ranks, self.chunks, op.kind, rank, op.chunk)
        if target is not None:
            yield WAYS.index({1: "from_previous", -1: "from_next", 0: "from_self"}[direction]), target
        elif op.kind == "F" and not self.forwards_only:
            yield WAYS.index("from_epilogue"), StagePlace(rank, op.chunk)
