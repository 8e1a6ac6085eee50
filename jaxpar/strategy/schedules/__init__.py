"""The tables of pipelines: what each rank runs in each slot of time.

    1F1B (Narayanan et al. 2021, Megatron-LM, section 2.2.1), p = 4 ranks, m = 6 microbatches

    tick      0    1    2    3    4    5    6    7    8    9   10   11
    rank 0   F0   F1   F2   F3   F4   F5   B0   B1   B2   B3   B4   B5
    rank 1        F0   F1   F2   F3  F4B0 F5B1  B2   B3   B4   B5
    rank 2             F0   F1  F2B0 F3B1 F4B2 F5B3  B4   B5
    rank 3                 F0B0 F1B1 F2B2 F3B3 F4B4 F5B5
             warm-up, F    | steady, F and B       | cool-down, B

A schedule is a function of p ranks, m microbatches and v chunks a rank that writes its table, and an entry of
`SCHEDULES`. All else (time, bubble, messages, what is held where) is read from the table:
`parallel/pipeline/schedules.py`. A table is of one of two kinds:

- Lockstep, as above: messages wait nowhere. A chunk's forward runs in the tick after that of the chunk before it, a
  chunk's backward in the tick after that of the chunk behind it; in one tick a rank runs a forward or none, and then a
  backward or none. All ranks run one program, without branches.
- Any other: a rank runs one operation in a slot or none, each in a later slot than what it needs. Messages wait in
  buffers, and ranks branch.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from .halves import one_f_one_b_halves, zb_h1, zb_h2
from .operations import Op, Placement, Table
from .v_shaped import dualpipe_v, v_half, v_min, zb_v


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


class Recipe(NamedTuple):
    """A schedule before its numbers.

    Attributes:
      words: what it is, for the command line.
      table: `table(ranks, microbatches, chunks)` writes its table; it raises ValueError, with numbers that fit, where
        there is none for these.
      planned: whether `jp.plan` tries it; no need where another has the same bubble and keeps less.
      placement: which stages a rank's chunks are.
      near: whether `jp.plan` tries it in place of the schedule of the fastest pipeline that it has found: it is faster
        where microbatches are few, and slower where they are many.
      chunks: the fewest of a rank.
    """

    words: str
    table: Callable[[int, int, int], Table]
    planned: bool = True
    placement: Placement = "loop"
    near: bool = False
    chunks: int = 1


SCHEDULES = {
    "gpipe": Recipe("all forwards before all backwards", gpipe, planned=False),
    "1f1b": Recipe("a backward as soon as it can be", one_f_one_b),
    "1f1b-overlap": Recipe("1f1b whose forwards and backwards run side by side", one_f_one_b_beside, planned=False),
    "1f1b-halves": Recipe("1f1b in p activations, its backwards in halves", one_f_one_b_halves, planned=False),
    "zb-h1": Recipe("1f1b whose bubble is filled with gradients of weights", zb_h1, planned=False, near=True),
    "zb-h2": Recipe("the same with twice the memory", zb_h2, planned=False),
    "zb-v": Recipe("two chunks a rank, placed as a V, in the memory of 1f1b", zb_v, False, "V", near=True, chunks=2),
    "v-half": Recipe("the same in half the memory", v_half, planned=False, placement="V", chunks=2),
    "v-min": Recipe("the same in a third of the memory", v_min, planned=False, placement="V", chunks=2),
    "dualpipe-v": Recipe("forwards and backwards of a V in turn", dualpipe_v, planned=False, placement="V", chunks=2),
}


def is_schedule(value: Any) -> bool:
    """Whether a strategy takes this for its schedule, besides the names above: a file of torch's lines, or a
    `Schedule`.
    """
    return value.endswith(".csv") if isinstance(value, str) else hasattr(value, "label")
