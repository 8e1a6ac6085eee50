"""GPipe and 1F1B, plain and interleaved, in lockstep: what one rank runs in a tick, the next runs in the tick after."""

from __future__ import annotations

from .operations import Op, Table


def lockstep(p: int, m: int, v: int, lag: int) -> Table:
    """Forward number u of rank s at tick u + s, backward number w at tick w + lag + (p - 1 - s).

    Both count groups of p microbatches that pass through one chunk after the other, backwards from the last chunk
    (Narayanan et al. 2021, section 2.2.2). `lag` is the tick of the first backward, which is the last rank's.
    """
    if v > 1 and m % p:
        raise ValueError(
            f"chunks={v} sends microbatches in groups of pipe={p}, and microbatches={m} is no multiple of it; use "
            f"{-(-m // p) * p} microbatches, or chunks=1"
        )
    table: list[list[list[Op]]] = [[[] for _ in range(p)] for _ in range(m * v + lag + p - 1)]
    places = [(rank, number, *divmod(number, p * v)) for rank in range(p) for number in range(m * v)]
    for rank, number, group, rest in places:
        table[number + rank][rank].append(Op("F", rest // p, group * p + rest % p))
    for rank, number, group, rest in places:
        table[number + lag + p - 1 - rank][rank].append(Op("B", v - 1 - rest // p, group * p + rest % p))
    return tuple(tuple(tuple(ops) for ops in column) for column in table)


def gpipe(p: int, m: int, v: int) -> Table:
    """Huang et al. 2019, section 2.3: every forward, then every backward."""
    return lockstep(p, m, v, lag=m * v + p - 1)


def one_f_one_b(p: int, m: int, v: int) -> Table:
    """1F1B, for v > 1 interleaved: the last rank's backward runs in the tick of the forward that it needs.

    Every rank does its forward and its backward in one tick, so that 1F1B holds up to 2 p - 1 microbatches on the first
    rank where the paper's holds p.
    """
    return lockstep(p, m, v, lag=v * p - 1)


def one_f_one_b_beside(p: int, m: int, v: int) -> Table:
    """1F1B in which the last rank's backward runs one tick later: then no backward of a tick needs what a forward of it
    makes, and each rank runs the two side by side, layer by layer (the idea of DualPipe, DeepSeek-AI 2024, section
    3.2.1). No tick more than 1F1B has forwards or backwards, and one microbatch more in flight.
    """
    return lockstep(p, m, v, lag=v * p)
