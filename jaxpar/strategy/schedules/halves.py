"""Tables of ranks that hold one chunk each and run their backwards in halves, I and W: zero bubble, and 1F1B.

I is the gradient of inputs, for which the previous rank waits. W, the gradient of weights, fills slots in which a rank
would wait for others (Qi et al. 2023, Zero Bubble Pipeline Parallelism). A slot is the time of F, I or W. With p = 4
ranks and m = 6 microbatches:

    ZB-H1: the memory of 1F1B
    slot    0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15 16 17 18 19 20
    rank 0  F0 F1 F2 F3          I0 W0 F4 I1 W1 F5 I2 W2 I3 W3 I4 W4 I5 W5
    rank 1     F0 F1 F2 F3    I0 W0 I1 W1 F4 I2 W2 F5 I3 W3 I4 W4 I5 W5
    rank 2        F0 F1 F2 I0 F3 I1 W0 I2 W1 F4 I3 W2 F5 I4 W3 I5 W4 W5
    rank 3           F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5

    ZB-H2: more forwards in the warm-up, so that no rank waits from m = 2 p - 1 = 7 on
    slot    0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15 16 17 18 19 20
    rank 0  F0 F1 F2 F3 F4 F5    I0 W0 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5
    rank 1     F0 F1 F2 F3 F4 I0 F5 I1 W0 I2 W1 I3 W2 I4 W3 I5 W4 W5
    rank 2        F0 F1 F2 I0 F3 I1 F4 I2 F5 I3 W0 I4 W1 I5 W2 W3 W4 W5
    rank 3           F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 I5 W0 W1 W2 W3 W4 W5

    1F1B in halves
    slot    0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15 16 17 18 19 20 21 22 23
    rank 0  F0 F1 F2 F3          I0 W0 F4 I1 W1 F5 I2 W2    I3 W3    I4 W4    I5 W5
    rank 1     F0 F1 F2       I0 W0 F3 I1 W1 F4 I2 W2 F5 I3 W3    I4 W4    I5 W5
    rank 2        F0 F1    I0 W0 F2 I1 W1 F3 I2 W2 F4 I3 W3 F5 I4 W4    I5 W5
    rank 3           F0 I0 W0 F1 I1 W1 F2 I2 W2 F3 I3 W3 F4 I4 W4 F5 I5 W5
"""

from .operations import Kind, Op, Orders, Table
from .orders import as_soon_as_possible

# The kinds that a rank tries to run, in this order, if it prefers F, or I.
_PREFERENCE: dict[Kind, tuple[Kind, ...]] = {"F": ("F", "I", "W"), "I": ("I", "F", "W")}


def _require_one_chunk(name: str, v: int) -> None:
    """Raise ValueError if ranks hold several chunks."""
    if v > 1:
        raise ValueError(
            f"schedule={name!r} holds one chunk a rank, not chunks={v}; use chunks=1, or zb-v with chunks=2"
        )


def _zero_bubble(name: str, p: int, m: int, v: int, limit: int) -> Table:
    """Return the table of a zero-bubble schedule, whose ranks hold at most `limit` activations."""
    _require_one_chunk(name, v)
    return as_soon_as_possible(_zero_bubble_orders(p, m, limit), "loop", 1)


def _zero_bubble_orders(p: int, m: int, limit: int) -> Orders:
    """Return each rank's operations under zero bubble, by simulation slot by slot (Qi et al. 2023, section 3.1).

    F, I and W take one slot each. F and I alternate as their inputs arrive; W runs if neither can.

    Args:
      limit: the largest number of activations that a rank holds: F waits while it holds so many.
    """
    orders: Orders = [[] for _ in range(p)]
    num_run: list[dict[Kind, int]] = [{"F": 0, "I": 0, "W": 0} for _ in range(p)]
    num_arrived: list[dict[Kind, int]] = [{"F": 0 if rank else m, "I": 0} for rank in range(p)]
    preferred_kinds: list[Kind] = ["F"] * p  # which of F and I a rank runs if it can run both
    # Each iteration is one slot.
    while any(counts["W"] < m for counts in num_run):
        # A message that is sent in this slot can be used from the next slot on.
        messages: list[tuple[int, Kind]] = []  # (receiving rank, kind of the operation that it allows)
        for rank, counts in enumerate(num_run):
            # F needs room for one more activation: each is held from its F to its W.
            can_run: dict[Kind, bool] = {
                "F": counts["F"] < num_arrived[rank]["F"] and counts["F"] - counts["W"] < limit,
                "I": counts["I"] < num_arrived[rank]["I"],
                "W": counts["W"] < counts["I"],
            }
            kind: Kind | None = next((choice for choice in _PREFERENCE[preferred_kinds[rank]] if can_run[choice]), None)
            if kind is None:
                continue
            orders[rank].append(Op(kind, 0, counts[kind]))
            counts[kind] += 1
            # The last rank's forward is followed by its own backward, so that the message stays on the rank.
            if kind == "F":
                preferred_kinds[rank] = "I"
                messages.append((rank + 1, "F") if rank + 1 < p else (rank, "I"))
            elif kind == "I":
                preferred_kinds[rank] = "F"
                if rank > 0:
                    messages.append((rank - 1, "I"))
        for receiver, allowed_kind in messages:
            num_arrived[receiver][allowed_kind] += 1
    return orders


def zb_h1(p: int, m: int, v: int) -> Table:
    """Return the table of ZB-H1: p activations, as 1F1B, and a third of its bubble (Qi et al. 2023, section 2.1)."""
    return _zero_bubble("zb-h1", p, m, v, limit=p)


def zb_h2(p: int, m: int, v: int) -> Table:
    """Return the table of ZB-H2, which takes 2 p - 1 activations (Qi et al. 2023, section 2.2).

    From m = 2 p - 1 on, no rank waits between its first operation and its last.
    """
    return _zero_bubble("zb-h2", p, m, v, limit=2 * p - 1)


def one_f_one_b_halves(p: int, m: int, v: int) -> Table:
    """Return the table of 1F1B in the paper's order (Narayanan et al. 2021, section 2.2.1), backwards in halves.

    Rank s holds p - s activations. W follows its I immediately, so that the values that I saves for W exist for one
    microbatch at a time.

    Whole backwards would make each slot of the steady state as long as a backward, since in each of them some rank
    runs one. A microbatch would then take the time of 4 forwards instead of 3.
    """
    _require_one_chunk("1f1b-halves", v)
    orders: list[list[Op]] = []
    for num_warmup in reversed(range(p)):  # forwards before a rank's first round of F, I and W
        order = [Op("F", 0, i) for i in range(min(num_warmup, m))]
        for i in range(m):
            order += [Op("F", 0, i + num_warmup)] * (i + num_warmup < m) + [Op("I", 0, i), Op("W", 0, i)]
        orders.append(order)
    return as_soon_as_possible(orders, "loop", 1)
