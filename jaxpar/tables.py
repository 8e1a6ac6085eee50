"""The tables of pipelines: which microbatch each rank runs forwards (F) and backwards (B) at each tick.

    1F1B (Narayanan et al. 2021, Megatron-LM, section 2.2.1), p = 4 ranks, m = 6 microbatches

    tick      0    1    2    3    4    5    6    7    8    9   10   11
    rank 0   F0   F1   F2   F3   F4   F5   B0   B1   B2   B3   B4   B5
    rank 1        F0   F1   F2   F3  F4B0 F5B1  B2   B3   B4   B5
    rank 2             F0   F1  F2B0 F3B1 F4B2 F5B3  B4   B5
    rank 3                 F0B0 F1B1 F2B2 F3B3 F4B4 F5B5
             warm-up, F    | steady, F and B       | cool-down, B

A schedule is a function of p ranks, m microbatches and v chunks a rank that writes its table, and an entry of
`SCHEDULES`. All else (slots, phases, time, bubble, messages) is read from the table: `parallel/pipeline/schedules.py`.
What a table must keep, for its messages wait nowhere: a chunk's forward runs in the tick after that of the chunk before
it, a chunk's backward in the tick after that of the chunk behind it; and in one tick a rank runs a forward or none, and
then a backward or none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

TIME = {"F": 1, "B": 2}  # of each kind of operation, with a chunk's forward as the unit


class Op(NamedTuple):
    """One rank's forward or backward of one microbatch through one of its chunks."""

    kind: Literal["F", "B"]
    chunk: int
    microbatch: int


MOST = 1 << 16  # ranks, microbatches, chunks: tables of more would fill the memory before anything is said
Table = tuple[tuple[tuple[Op, ...], ...], ...]  # [tick][rank]: none, one, or a forward and then a backward


class Recipe(NamedTuple):
    """A schedule before its numbers.

    Attributes:
      words: what it is, for the command line.
      table: `table(ranks, microbatches, chunks)` writes its table; it raises ValueError, with numbers that fit, where
        there is none for these.
      planned: whether `jp.plan` tries it; no need where another has the same bubble and keeps less.
    """

    words: str
    table: Callable[[int, int, int], Table]
    planned: bool = True


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


SCHEDULES = {
    "gpipe": Recipe("all forwards before all backwards", gpipe, planned=False),
    "1f1b": Recipe("a backward as soon as it can be", one_f_one_b),
}
