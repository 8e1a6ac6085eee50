"""The best table for given times and memory (Qi et al. 2023, section 3; Qi et al. 2024): what the greedy scheduler
finds under each of its rules, and the patterns of the V, each timed by simulation.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from .greedy import Filling, OpCosts, greedy
from .operations import Orders, Placement, Table
from .orders import as_soon_as_possible, spans
from .v_shaped import dualpipe_v_orders, v_half_orders, v_min_orders, zb_v_orders

_RULES = [Filling(0, even=False), *(Filling(gap, even) for gap in (0.5, 1.0) for even in (False, True))]


class Found(NamedTuple):
    """The order of each rank's operations, and what it costs.

    Attributes:
      orders: the operations.
      placement: where the chunks lie.
      time: of a step, until the last rank has ended, in the unit of the costs.
      longest: of the rank that takes longest from its first operation to its last.
      held: the most activations of all its layers that a rank holds.
    """

    orders: Orders
    placement: Placement
    time: float
    longest: float
    held: float

    def bubble(self, microbatches: int, costs: OpCosts) -> float:
        """The part of `longest` in which that rank is idle: the bubble rate of Qi et al. 2023, section 5.3."""
        return 1 - microbatches * (costs.forward + costs.inputs + costs.weights) / self.longest


def best(
    ranks: int, microbatches: int, chunks: int, costs: OpCosts | None = None, limit: float = math.inf, ends: bool = True
) -> Found:
    """The order that takes least time, and among those the one that holds least.

    Args:
      ranks: p.
      microbatches: m.
      chunks: a rank's; 1, or 2 that lie as a V.
      costs: times of a rank's layers; F = I = W = 1 without messages, if not given.
      limit: activations of one microbatch and a rank's layers that a rank may hold.
      ends: whether the time counts until the last rank has ended, as in a step whose update waits for all of them, or
        else for each rank from its first operation to its last.

    Raises ValueError for other chunks, and where no order fits the limit.
    """
    costs = costs or OpCosts()
    if chunks not in (1, 2):
        raise ValueError(
            f"schedule='auto' holds one chunk a rank or two, not chunks={chunks}; use chunks=1 or chunks=2"
        )
    tried = _loops(ranks, microbatches, costs, limit) if chunks == 1 else _vs(ranks, microbatches)
    found = [_timed(orders, chunks, costs) for orders in tried]
    fitting = [one for one in found if one.held <= limit + 1e-9]
    if not fitting:
        least = f"{min(one.held for one in found):g}" if found else "1"
        raise ValueError(
            f"no order of {ranks} ranks with chunks={chunks} holds {limit:g} activations at most; the least found is "
            f"{least}: use limit={least} or more"
        )
    return min(fitting, key=lambda one: (round(one.time if ends else one.longest, 9), one.held))


def _loops(ranks: int, microbatches: int, costs: OpCosts, limit: float) -> Iterator[Orders]:
    """One chunk a rank: greedy orders under each rule, of the given times and of times that are simpler."""
    plans = {costs, costs._replace(message=0), OpCosts(freed=costs.freed)}
    limits = {min(limit, room) for room in (ranks, 2 * ranks - 1, 2 * ranks, limit) if not math.isinf(room)}
    for room, plan, rule in itertools.product(sorted(limits), sorted(plans), _RULES):
        if room >= 1:
            yield greedy(ranks, microbatches, plan, room, rule)


def _vs(ranks: int, microbatches: int) -> Iterator[Orders]:
    """Two chunks a rank: the patterns."""
    for orders in (zb_v_orders, v_half_orders, v_min_orders):
        yield orders(ranks, microbatches)
    if microbatches >= 2 * ranks:
        yield dualpipe_v_orders(ranks, microbatches)


def _timed(orders: Orders, chunks: int, costs: OpCosts) -> Found:
    each = spans(orders, "V", chunks, costs.times(chunks), costs.message)
    changes = {"F": 1.0, "I": -costs.freed, "W": costs.freed - 1}
    held = max(max(itertools.accumulate(changes[op.kind] for op in order)) for order in orders) / chunks
    longest = max(float(ran[-1].end - ran[0].start) for ran in each)
    return Found(orders, "V", max(float(ran[-1].end) for ran in each), longest, held)


@functools.lru_cache(maxsize=8)  # a step asks for its table more than once
def auto(p: int, m: int, v: int, costs: OpCosts | None = None, limit: float = math.inf) -> Table:
    """The best table for given times and memory; without them for F = I = W = 1, whatever it holds."""
    return as_soon_as_possible(best(p, m, v, costs, limit).orders, "V", v)


def name_of(costs: OpCosts, limit: float = math.inf) -> str:
    """The name of the best table for these times, to five digits, and this memory; `asked` reads it.

    >>> name_of(OpCosts(8.8, 10.6, 9.3, 1.4), limit=8), name_of(OpCosts())
    ('auto:8.8:10.6:9.3:1.4:8', 'auto')
    """
    if min(costs) < 0 or not 0 < costs.forward < math.inf:
        raise ValueError(f"{costs}: times are 0 or more, that of a forward more than 0")
    given, usual = [*costs[:4], limit, costs.freed], [*OpCosts()[:4], math.inf, 0.0]
    while given and given[-1] == usual[len(given) - 1]:
        given.pop()
    return ":".join(["auto", *(f"{x:.5g}" for x in given)])


def asked(name: str) -> tuple[OpCosts, float]:
    """The times and the limit of a name `auto:F:I:W:message:limit:freed`; what is left out is 1:1:1:0:inf:0.

    Raises ValueError for a name that is not of this form.
    """
    given = [1.0, 1.0, 1.0, 0.0, math.inf, 0.0]
    parts = name.split(":")[1:]
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = [math.nan]
    if len(numbers) > len(given) or not all(x >= 0 for x in numbers) or {0.0, math.inf} & {*numbers[:1]}:
        raise ValueError(
            f"schedule={name!r}: use auto:F:I:W:message:limit, times in any unit and the activations that a rank may "
            "hold, as in auto:8.8:10.6:9.3:1.4:8, or auto alone"
        )
    given[: len(numbers)] = numbers
    forward, inputs, weights, message, limit, freed = given
    return OpCosts(forward, inputs, weights, message, freed), limit
