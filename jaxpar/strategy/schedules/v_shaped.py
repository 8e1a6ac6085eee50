"""Tables of ranks that hold two chunks each, placed as a V: rank s has stages s and 2 p - 1 - s.

Rank 0 has the first stage and the last, so that a microbatch's backward begins on the rank where its forward began, and
all ranks hold equally many activations. F, I and W are chunk 0's forward, gradient of inputs and gradient of weights;
f, i and w are chunk 1's. A slot is the time of one of them.

With p = 3 ranks and m = 4 microbatches:

    ZB-V
    slot    0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25
    rank 0  F0 F1 F2 F3    f0 i0 w0 f1 i1 w1 f2 i2 w2 I0 W0 f3 i3 w3 I1 W1    I2 W2 I3 W3
    rank 1     F0 F1 F2 f0 F3 f1 i0 w0 f2 i1 w1 I0 W0 f3 i2 w2 I1 W1 i3 w3 I2    I3 W2 W3
    rank 2        F0 f0 F1 f1 F2 f2 i0 w0 F3 I0 W0 f3 i1 w1 I1 W1 i2 w2 I2 i3 I3 W2 w3 W3

    V-Half: half the memory of 1F1B, since fewer microbatches are in flight
    slot    0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30
    rank 0  F0 F1          f0 i0 w0 F2    f1 i1 w1 I0 W0 F3 f2 i2 w2 I1 W1 f3 i3 w3 I2 W2          I3 W3
    rank 1     F0       f0 F1    i0 w0 f1 F2 I0 i1 W0 f2 w1 F3 I1 i2 W1 f3 w2    I2 i3 W2 w3    I3 W3
    rank 2        F0 f0       F1 f1 i0 w0 I0 W0 F2 f2 i1 w1 I1 W1 F3 f3 i2 w2 I2 W2    i3 w3 I3 W3

    V-Min: a third of the memory
    slot    0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32
    rank 0  F0             f0 F1 i0 w0       f1 F2 I0 i1 W0 w1 f2 F3 I1 i2 W1 w2 f3    I2 i3 W2 w3       I3 W3
    rank 1     F0       f0       F1 i0    f1 w0 I0 F2 W0 i1 f2 w1 I1 F3 W1 i2 f3 w2 I2 W2    i3 w3    I3 W3
    rank 2        F0 f0             F1 f1 i0 I0 w0 W0 F2 f2 i1 I1 w1 W1 F3 f3 i2 I2 w2 W2       i3 I3 w3 W3
"""

import functools
from collections import Counter, deque
from collections.abc import Callable

from .operations import Kind, Op, Orders, Table
from .orders import as_soon_as_possible


class _RankOrder:
    """The operations of one rank, which are appended by kind and chunk; the microbatches are counted here.

    Attributes:
      order: the operations so far.
      counts: the number of operations so far by kind and chunk, as "F0".
      pending_weights: the operations I whose W is not in the order yet, oldest first.
    """

    def __init__(self) -> None:
        self.order: list[Op] = []
        self.counts: Counter[str] = Counter()
        self.pending_weights: deque[Op] = deque()

    def append(self, *names: str) -> None:
        """Append operations by name, each for the next microbatch of its kind and chunk.

        Args:
          names: "F0", "F1", "I0", "I1", "W0" or "W1"; "B0" or "B1", which is I and then its W; or "W", the W that has
            been pending longest, and nothing if no W is pending.
        """
        for name in names:
            kind, chunk = name[0], int(name[1:] or 0)
            if name == "W":
                if self.pending_weights:
                    self._append_op("W", self.pending_weights.popleft())
                continue
            if kind == "B":
                self.append(f"I{chunk}")
                self._append_op("W", self.pending_weights.pop())
                continue
            op = Op("F", chunk, self.counts[name])
            self._append_op("I" if kind == "I" else "W" if kind == "W" else "F", op)
            if kind == "I":
                self.pending_weights.append(op)

    def _append_op(self, kind: Kind, op: Op) -> None:
        self.order.append(op._replace(kind=kind))
        self.counts[f"{kind}{op.chunk}"] += 1


def _table(name: str, orders: Callable[[int, int], Orders], p: int, m: int, v: int) -> Table:
    """Return the table of a pattern: its orders for p ranks and m microbatches, with v = 2 chunks per rank."""
    if v != 2:
        raise ValueError(f"schedule={name!r} holds two chunks a rank, not chunks={v}; use chunks=2")
    return as_soon_as_possible(orders(p, m), "V", v)


def zb_v_orders(p: int, m: int) -> Orders:
    """Return each rank's operations under ZB-V, which takes the memory of 1F1B (Qi et al. 2023, section 6, figure 7).

    From m = 2 p on, no rank waits between its first operation and its last.
    """
    orders = []
    for s in range(p):
        # The pattern needs 2 p - 1 microbatches. With fewer, the operations of the missing ones are dropped at the end.
        rank_order, num_microbatches = _RankOrder(), max(m, 2 * p - 1)
        counts = rank_order.counts
        # 1. Warm-up: fill chunk 0, then let chunk 1 catch up; its first backwards begin.
        rank_order.append(*["F0"] * (2 * (p - s) - 1), *["F1", "F0"] * s, *["F1", "I1", "W1"] * (p - s))
        # 2. Steady state: one microbatch enters chunk 0 for each that leaves it.
        while counts["F1"] < num_microbatches:
            rank_order.append(*["F0"] * (counts["F0"] < num_microbatches), "I0", "W0", "F1", "I1", "W1")
        # 3. Cool-down: first the gradients for which other ranks wait, then the remaining gradients of weights.
        rank_order.append(*["I0", "I1"] * s, *["I0", "W0"] * (p - s))
        rank_order.append(*["W1"] * (num_microbatches - counts["W1"]), *["W0"] * (num_microbatches - counts["W0"]))
        orders.append([op for op in rank_order.order if op.microbatch < m])
    return orders


def dualpipe_v_orders(p: int, m: int) -> Orders:
    """Return each rank's operations under DualPipeV: DualPipe cut in half by Sea AI Lab.

    In its steady state a forward and a backward of the two chunks alternate. DualPipe (DeepSeek-AI, DeepSeek-V3 2024,
    section 3.2.1) runs such a pair at once to overlap communication with compute. Here they run one after the other.

    Raises:
      ValueError: if m < 2 p.
    """
    if m < 2 * p:
        raise ValueError(
            f"schedule='dualpipe-v' needs as many microbatches as stages: microbatches={m} is less than {2 * p}; use "
            f"{2 * p} or more, or zb-v"
        )
    orders = []
    for s in range(p):
        rank_order, half = _RankOrder(), (s + 1) // 2
        # Steps 1 to 3: chunk 0 fills, then both do, then chunk 1's backwards begin, in halves.
        rank_order.append(*["F0"] * (2 * (p - s - 1)), *["F0", "F1"] * (s + 1), *["I1", "W", "F1"] * (p - s - 1))
        # Steps 4 and 5: the steady state, until chunk 0 has run all forwards, then until chunk 1 has.
        rank_order.append(*["F0", "B1", "F1", "B0"] * (m - 2 * p + s + 1), *["B1", "F1", "B0"] * (p - s - 1))
        # Step 6: s + 1 pairs of backwards of both chunks: whole in the first half, I alone in the second, for which
        # other ranks wait. With an odd number of pairs, the middle pair is B1 and I0.
        whole_backwards = ["B1", "B0"] * half + ["B1"] * (1 - s % 2)
        rank_order.append(*whole_backwards, *["I1", "I0"][1 - s % 2 :], *["I1", "I0"] * (s - half))
        # Steps 7 and 8: the pending gradients of weights, first alternating with chunk 0's remaining I.
        rank_order.append(*["W", "I0"] * (p - s - 1))
        rank_order.append(*["W"] * len(rank_order.pending_weights))
        orders.append(rank_order.order)
    return orders


def repeat_block(m: int, blocks: list[tuple[int, int, int, int]]) -> Orders:
    """Return each rank's operations if every microbatch repeats the previous one's 6 slots later.

    A rank has six operations per microbatch, so that blocks 6 slots apart interlock (Qi et al. 2024, section 2).

    Args:
      blocks: for each rank, the slots in which microbatch 0 runs F0, F1, I1 and I0. The W run in the slots between.
    """
    orders: Orders = []
    for block in blocks:
        names: tuple[tuple[Kind, int], ...] = (("F", 0), ("F", 1), ("I", 1), ("I", 0))
        op_in_slot = {slot + 6 * i: Op(*name, i) for name, slot in zip(names, block, strict=True) for i in range(m)}
        # The slots of a block differ modulo 6, so that no two operations share a slot.
        assert len(op_in_slot) == 4 * m
        order: list[Op] = []
        pending_weights: deque[Op] = deque()
        for slot in range(max(op_in_slot) + 1):
            if op := op_in_slot.get(slot):
                order.append(op)
                if op.kind == "I":
                    pending_weights.append(op._replace(kind="W"))
            elif pending_weights:
                order.append(pending_weights.popleft())
        orders.append([*order, *pending_weights])
    return orders


def v_half_orders(p: int, m: int) -> Orders:
    """Return each rank's operations under V-Half (Qi et al. 2024, section 3).

    It takes half of 1F1B's memory, (p + 2) // 2 activations at most.
    """
    gap = 0 if p % 2 else 3  # so that no two operations fall into one slot
    return repeat_block(m, [(2 * s, 3 * p - s - 2, 3 * p + gap + 2 * s - 1, 6 * p + gap - s - 2) for s in range(p)])


def v_min_orders(p: int, m: int) -> Orders:
    """Return each rank's operations under V-Min (Qi et al. 2024, section 3).

    It takes a third of 1F1B's memory, (p + 4) // 3 activations at most.
    """
    gap = 0 if p % 3 else 2  # so that no two operations fall into one slot
    return repeat_block(m, [(s, 2 * p - s - 1, 2 * p + gap + s, 4 * p + gap - s - 1) for s in range(p)])


zb_v = functools.partial(_table, "zb-v", zb_v_orders)
dualpipe_v = functools.partial(_table, "dualpipe-v", dualpipe_v_orders)
v_half = functools.partial(_table, "v-half", v_half_orders)
v_min = functools.partial(_table, "v-min", v_min_orders)
