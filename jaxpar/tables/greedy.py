"""Orders of F, I and W for ranks that hold one chunk each: a greedy scheduler's (Qi et al. 2023, section 3.1), 1F1B's.

    ZB-H1, p = 4, m = 6: what waits for the ranks behind is filled with W

    slot     0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15 16 17 18 19 20
    rank 0   F0 F1 F2 F3          I0 W0 F4 I1 W1 F5 I2 W2 I3 W3 I4 W4 I5 W5
    rank 1      F0 F1 F2 F3    I0 W0 I1 W1 F4 I2 W2 F5 I3 W3 I4 W4 I5 W5
    rank 2         F0 F1 F2 I0 F3 I1 W0 I2 W1 F4 I3 W2 F5 I4 W3 I5 W4 W5
    rank 3            F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5

As time goes on, each rank runs F and I in turn as they arrive, F only while its activations fit, and W when nothing
else is there.
"""

import heapq
import math
from typing import NamedTuple

from .operations import Kind, Op, Orders, Table
from .orders import as_soon_as_possible


class OpCosts(NamedTuple):
    """What a scheduler is told of one rank's layers and one microbatch.

    Attributes:
      forward, inputs, weights: times of F, I and W, in any unit.
      message: time from one rank to the next.
      freed: the part of an activation that is free again after I; the rest is after W.
    """

    forward: float = 1
    inputs: float = 1
    weights: float = 1
    message: float = 0
    freed: float = 0

    def times(self, chunks: int = 1) -> dict[str, float]:
        """By kind of operation, of one of so many equal chunks."""
        whole = {"F": self.forward, "B": self.inputs + self.weights, "I": self.inputs, "W": self.weights}
        return {kind: time / chunks for kind, time in whole.items()}


class Filling(NamedTuple):
    """When a rank whose next F or I will arrive soon runs a W, which may hold it up.

    Attributes:
      gap: if there is at least this part of W's time until then.
      even: also if waiting would make it the rank that has waited longest.
    """

    gap: float
    even: bool


class _Rank:
    """What a rank has done, and what it holds."""

    def __init__(self) -> None:
        self.order: list[Op] = []
        self.ran: dict[Kind, int] = {"F": 0, "I": 0, "W": 0}
        self.activations: list[float] = []  # when those of each microbatch arrive, as far as it is known
        self.cotangents: list[float] = []
        self.held, self.free, self.waited = 0.0, 0.0, 0.0
        self.turn: Kind = "F"


def greedy(ranks: int, microbatches: int, costs: OpCosts, limit: float, rule: Filling) -> Orders:
    """Each rank's operations, where no rank ever holds more than `limit` activations.

    Between F and I the rank that waits alternates, as in 1F1B. The limit is at least 1.
    """
    all_of = [_Rank() for _ in range(ranks)]
    all_of[0].activations = [0.0] * microbatches
    times, small = costs.times(), 1e-9
    longest = 0.0  # that a rank has waited, in all
    queue = [(0.0, 0)]  # when to look at which rank
    while queue:
        now, number = heapq.heappop(queue)
        rank = all_of[number]
        if now < rank.free or rank.ran["W"] == microbatches:
            continue
        arrives: dict[Kind, float] = {}
        if rank.ran["F"] < len(rank.activations) and rank.held + 1 <= limit + small:
            arrives["F"] = rank.activations[rank.ran["F"]]
        if rank.ran["I"] < len(rank.cotangents):
            arrives["I"] = rank.cotangents[rank.ran["I"]]
        there: list[Kind] = [kind for kind, at in arrives.items() if at <= now]
        if there:
            kind = rank.turn if rank.turn in there else there[0]
        else:
            gap = min(arrives.values(), default=math.inf) - now
            fits = gap >= rule.gap * times["W"] - small or (rule.even and rank.waited + gap > longest + small)
            if rank.ran["W"] == rank.ran["I"] or not fits:
                if arrives:
                    heapq.heappush(queue, (now + gap, number))
                continue
            kind = "W"
        rank.waited += now - rank.free if rank.order else 0
        longest = max(longest, rank.waited)
        rank.free = end = now + times[kind]
        rank.order.append(Op(kind, 0, rank.ran[kind]))
        rank.ran[kind] += 1
        rank.held += {"F": 1, "I": -costs.freed, "W": costs.freed - 1}[kind]
        heapq.heappush(queue, (end, number))
        if kind == "W":
            continue
        rank.turn = "I" if kind == "F" else "F"
        to = number + (1 if kind == "F" else -1)
        if to == ranks:
            rank.cotangents.append(end)
        elif to >= 0:
            other = all_of[to]
            (other.activations if kind == "F" else other.cotangents).append(end + costs.message)
            heapq.heappush(queue, (end + costs.message, to))
    return [rank.order for rank in all_of]


_AT_ONCE = Filling(gap=0, even=False)


def _one_chunk(name: str, v: int) -> None:
    if v > 1:
        raise ValueError(
            f"schedule={name!r} holds one chunk a rank, not chunks={v}; use chunks=1, or zb-v with chunks=2"
        )


def _zero_bubble(name: str, p: int, m: int, v: int, limit: float) -> Table:
    _one_chunk(name, v)
    return as_soon_as_possible(greedy(p, m, OpCosts(), limit, _AT_ONCE), "loop", 1)


def zb_h1(p: int, m: int, v: int) -> Table:
    """Qi et al. 2023, section 2.1: p activations, as 1F1B, and a third of its bubble."""
    return _zero_bubble("zb-h1", p, m, v, limit=p)


def zb_h2(p: int, m: int, v: int) -> Table:
    """Qi et al. 2023, section 2.2: 2 p - 1 activations; from m = 2 p - 1 on, no rank waits once it has begun."""
    return _zero_bubble("zb-h2", p, m, v, limit=2 * p - 1)


def one_f_one_b_halves(p: int, m: int, v: int) -> Table:
    """1F1B in its own order (Narayanan et al. 2021, section 2.2.1), so that rank s holds p - s activations, and its
    backwards in halves, W right behind I: what I leaves for W is there for one microbatch at a time.

    Whole backwards would make every slot of the steady state as long as one, since some rank runs one in it: 4 forwards
    a microbatch in place of 3.
    """
    _one_chunk("1f1b-halves", v)
    orders: list[list[Op]] = []
    for ahead in reversed(range(p)):  # forwards before a rank's first backward
        order = [Op("F", 0, at) for at in range(min(ahead, m))]
        for at in range(m):
            order += [Op("F", 0, at + ahead)] * (at + ahead < m) + [Op("I", 0, at), Op("W", 0, at)]
        orders.append(order)
    return as_soon_as_possible(orders, "loop", 1)
