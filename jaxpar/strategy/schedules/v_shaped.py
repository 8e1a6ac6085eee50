"""Tables of ranks that hold two chunks each, placed as a V: rank s has stages s and 2 p - 1 - s.

A rank that has the first stage has the last one too, so that a microbatch's backward begins where its forward began,
and memory is even. Here F0 is the forward through chunk 0, I1 the gradient of chunk 1's inputs; a slot is the time of
one of them.
"""

import functools
from collections import Counter, deque
from collections.abc import Callable

from .operations import Kind, Op, Orders, Table
from .orders import as_soon_as_possible


class _Line:
    """What one rank runs; microbatches are counted."""

    def __init__(self) -> None:
        self.order: list[Op] = []
        self.ran: Counter[str] = Counter()
        self.owed: deque[Op] = deque()  # I's whose W has yet to run

    def run(self, *names: str) -> None:
        """Runs, each for the next microbatch: F0, F1, I0, I1; W0, W1; B0, B1, which is I and then W; or the W that has
        waited longest, if one does.
        """
        for name in names:
            kind, chunk = name[0], int(name[1:] or 0)
            if name == "W":
                if self.owed:
                    self._put("W", self.owed.popleft())
                continue
            if kind == "B":
                self.run(f"I{chunk}")
                self._put("W", self.owed.pop())
                continue
            op = Op("F", chunk, self.ran[name])
            self._put("I" if kind == "I" else "W" if kind == "W" else "F", op)
            if kind == "I":
                self.owed.append(op)

    def _put(self, kind: Kind, op: Op) -> None:
        self.order.append(op._replace(kind=kind))
        self.ran[f"{kind}{op.chunk}"] += 1


def _table(name: str, orders: Callable[[int, int], Orders], p: int, m: int, v: int) -> Table:
    """Of a pattern of p ranks and m microbatches."""
    if v != 2:
        raise ValueError(f"schedule={name!r} holds two chunks a rank, not chunks={v}; use chunks=2")
    return as_soon_as_possible(orders(p, m), "V", v)


def zb_v_orders(p: int, m: int) -> Orders:
    """Qi et al. 2023, section 6 and figure 7: the memory of 1F1B; from m = 2 p on, no rank waits once it works."""
    lines = []
    for s in range(p):
        line, most = _Line(), max(m, 2 * p - 1)  # of fewer microbatches, what there is of them
        line.run(*["F0"] * (2 * (p - s) - 1), *["F1", "F0"] * s, *["F1", "I1", "W1"] * (p - s))
        while line.ran["F1"] < most:
            line.run(*["F0"] * (line.ran["F0"] < most), "I0", "W0", "F1", "I1", "W1")
        line.run(*["I0", "I1"] * s, *["I0", "W0"] * (p - s))
        line.run(*["W1"] * (most - line.ran["W1"]), *["W0"] * (most - line.ran["W0"]))
        lines.append([op for op in line.order if op.microbatch < m])
    return lines


def dualpipe_v_orders(p: int, m: int) -> Orders:
    """DeepSeek-AI's DualPipe (DeepSeek-V3 2024, section 3.2.1) cut in half, by Sea AI Lab: a forward and a backward of
    the two chunks in turn, which may run at once where communication is to be hidden; here one after the other.
    """
    if m < 2 * p:
        raise ValueError(
            f"schedule='dualpipe-v' needs as many microbatches as stages: microbatches={m} is less than {2 * p}; use "
            f"{2 * p} or more, or zb-v"
        )
    lines = []
    for s in range(p):
        line, half = _Line(), (s + 1) // 2
        line.run(*["F0"] * (2 * (p - s - 1)), *["F0", "F1"] * (s + 1), *["I1", "W", "F1"] * (p - s - 1))
        line.run(*["F0", "B1", "F1", "B0"] * (m - 2 * p + s + 1), *["B1", "F1", "B0"] * (p - s - 1))
        whole = ["B1", "B0"] * half + ["B1"] * (1 - s % 2)
        line.run(*whole, *["I1", "I0"][1 - s % 2 :], *["I1", "I0"] * (s - half))
        line.run(*["W", "I0"] * (p - s - 1), *["W"] * len(line.owed))
        line.run(*["W"] * len(line.owed))
        lines.append(line.order)
    return lines


def repeated(m: int, blocks: list[tuple[int, int, int, int]]) -> Orders:
    """The orders in which every microbatch does the same 6 slots after the one before it (Qi et al. 2024, section 2).

    `blocks` says for each rank in which slots microbatch 0 runs F0, F1, I1 and I0; W runs in the slots between.
    """
    orders: Orders = []
    for block in blocks:
        names: tuple[tuple[Kind, int], ...] = (("F", 0), ("F", 1), ("I", 1), ("I", 0))
        at = {slot + 6 * i: Op(*name, i) for name, slot in zip(names, block, strict=True) for i in range(m)}
        assert len(at) == 4 * m
        order: list[Op] = []
        owed: deque[Op] = deque()
        for slot in range(max(at) + 1):
            if op := at.get(slot):
                order.append(op)
                if op.kind == "I":
                    owed.append(op._replace(kind="W"))
            elif owed:
                order.append(owed.popleft())
        orders.append([*order, *owed])
    return orders


def v_half_orders(p: int, m: int) -> Orders:
    """Qi et al. 2024, section 3, V-Half: half of 1F1B's memory, (p + 2) // 2 activations at most."""
    gap = 0 if p % 2 else 3  # so that no two operations fall into one slot
    return repeated(m, [(2 * s, 3 * p - s - 2, 3 * p + gap + 2 * s - 1, 6 * p + gap - s - 2) for s in range(p)])


def v_min_orders(p: int, m: int) -> Orders:
    """Qi et al. 2024, section 3, V-Min: a third of 1F1B's memory, (p + 4) // 3 activations at most."""
    gap = 0 if p % 3 else 2
    return repeated(m, [(s, 2 * p - s - 1, 2 * p + gap + s, 4 * p + gap - s - 1) for s in range(p)])


zb_v = functools.partial(_table, "zb-v", zb_v_orders)
dualpipe_v = functools.partial(_table, "dualpipe-v", dualpipe_v_orders)
v_half = functools.partial(_table, "v-half", v_half_orders)
v_min = functools.partial(_table, "v-min", v_min_orders)
