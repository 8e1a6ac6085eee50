"""Tables of ranks that hold one chunk each and run their backwards in halves: zero bubble (Qi et al. 2023), 1F1B's.

ZB-H1, p = 4, m = 6: what waits for the ranks behind is filled with W

slot     0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15 16 17 18 19 20
rank 0   F0 F1 F2 F3          I0 W0 F4 I1 W1 F5 I2 W2 I3 W3 I4 W4 I5 W5
rank 1      F0 F1 F2 F3    I0 W0 I1 W1 F4 I2 W2 F5 I3 W3 I4 W4 I5 W5
rank 2         F0 F1 F2 I0 F3 I1 W0 I2 W1 F4 I3 W2 F5 I4 W3 I5 W4 W5
rank 3            F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5
"""

from .operations import Kind, Op, Orders, Table
from .orders import as_soon_as_possible

# What a rank whose turn is F, or I, tries to run, in this order.
_ORDER: dict[Kind, tuple[Kind, ...]] = {"F": ("F", "I", "W"), "I": ("I", "F", "W")}


def _one_chunk(name: str, v: int) -> None:
    if v > 1:
        raise ValueError(
            f"schedule={name!r} holds one chunk a rank, not chunks={v}; use chunks=1, or zb-v with chunks=2"
        )


def _zero_bubble(name: str, p: int, m: int, v: int, limit: int) -> Table:
    _one_chunk(name, v)
    return as_soon_as_possible(_filled(p, m, limit), "loop", 1)


def _filled(p: int, m: int, limit: int) -> Orders:
    """Slot by slot, what each rank runs where F, I and W take as long as each other: F and I in turn as they arrive, F
    only while the rank holds fewer than `limit` activations, and W where neither can run (section 3.1).
    """
    orders: Orders = [[] for _ in range(p)]
    ran: list[dict[Kind, int]] = [{"F": 0, "I": 0, "W": 0} for _ in range(p)]
    arrived: list[dict[Kind, int]] = [{"F": 0 if rank else m, "I": 0} for rank in range(p)]
    turns: list[Kind] = ["F"] * p  # which of F and I runs where both can
    while any(done["W"] < m for done in ran):
        sent: list[tuple[int, Kind]] = []  # to which rank, for the next slot
        for rank, done in enumerate(ran):
            can_run: dict[Kind, bool] = {
                "F": done["F"] < arrived[rank]["F"] and done["F"] - done["W"] < limit,
                "I": done["I"] < arrived[rank]["I"],
                "W": done["W"] < done["I"],
            }
            kind: Kind | None = next((one for one in _ORDER[turns[rank]] if can_run[one]), None)
            if kind is None:
                continue
            orders[rank].append(Op(kind, 0, done[kind]))
            done[kind] += 1
            if kind == "F":
                turns[rank] = "I"
                sent.append((rank + 1, "F") if rank + 1 < p else (rank, "I"))
            elif kind == "I":
                turns[rank] = "F"
                if rank > 0:
                    sent.append((rank - 1, "I"))
        for to, message in sent:
            arrived[to][message] += 1
    return orders


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
