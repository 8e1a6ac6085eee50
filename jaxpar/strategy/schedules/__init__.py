"""The tables of pipelines: the operations of each rank in each slot of time.

    GPipe (Huang et al. 2019, figure 2c), p = 4 ranks, m = 4 microbatches

    tick     0  1  2  3  4  5  6  7  8  9  10 11 12 13
    rank 0   F0 F1 F2 F3                   B0 B1 B2 B3
    rank 1      F0 F1 F2 F3             B0 B1 B2 B3
    rank 2         F0 F1 F2 F3       B0 B1 B2 B3
    rank 3            F0 F1 F2 F3 B0 B1 B2 B3

    1F1B (Narayanan et al. 2021, Megatron-LM, section 2.2.1), p = 4 ranks, m = 6 microbatches

    tick      0    1    2    3    4    5    6    7    8    9   10   11
    rank 0   F0   F1   F2   F3   F4   F5   B0   B1   B2   B3   B4   B5
    rank 1        F0   F1   F2   F3  F4B0 F5B1  B2   B3   B4   B5
    rank 2             F0   F1  F2B0 F3B1 F4B2 F5B3  B4   B5
    rank 3                 F0B0 F1B1 F2B2 F3B3 F4B4 F5B5
             warm-up, F    | steady, F and B       | cool-down, B

    Interleaved 1F1B (ibid., section 2.2.2), p = 2 ranks, v = 2 chunks each, m = 4; f and b are chunk 1

    tick      0    1    2    3    4    5    6    7    8    9   10   11
    rank 0   F0   F1   f0   f1  F2b0 F3b1 f2B0 f3B1  b2   b3   B2   B3
    rank 1        F0   F1  f0b0 f1b1 F2B0 F3B1 f2b2 f3b3  B2   B3

The tables of zero bubble are in `halves.py`, those with chunks in a V in `v_shaped.py`.

A schedule is a function of p ranks, m microbatches and v chunks per rank that writes its table, and an entry of
`SCHEDULES`. Everything else (time, bubble, messages, memory) is read from the table by
`parallel/pipeline/schedules.py`. There are two kinds of tables:

- In lockstep, as above, no message waits. A chunk's forward runs in the tick after the previous chunk's, its backward
  in the tick after the next chunk's. In one tick a rank runs at most one forward and then at most one backward. All
  ranks run one program without branches.
- In all other tables, a rank runs at most one operation per slot, in a later slot than the operations that it needs.
  Messages wait in buffers, and ranks branch.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from .halves import one_f_one_b_halves, zb_h1, zb_h2
from .operations import Op, Placement, Table
from .v_shaped import dualpipe_v, v_half, v_min, zb_v


def lockstep(p: int, m: int, v: int, lag: int) -> Table:
    """Return the table in which rank s runs forward number u at tick u + s, and backward w at tick w + lag + p - 1 - s.

    The numbers u and w run over groups of p microbatches, each of which passes through one chunk after another:
    forwards from the first chunk, backwards from the last (Narayanan et al. 2021, section 2.2.2).

    Args:
      lag: the tick of the first backward, which the last rank runs.

    Raises:
      ValueError: if v > 1 and m is not a multiple of p.
    """
    if v > 1 and m % p:
        raise ValueError(
            f"chunks={v} sends microbatches in groups of pipe={p}, and microbatches={m} is no multiple of it; use "
            f"{-(-m // p) * p} microbatches, or chunks=1"
        )
    # The last forward is at tick m v + p - 2, the last backward at tick m v - 1 + lag + p - 1.
    table: list[list[list[Op]]] = [[[] for _ in range(p)] for _ in range(m * v + lag + p - 1)]
    # A group of p microbatches has p operations per chunk. `offset` counts the p v operations of one group.
    # Forwards enter the table before backwards, since a slot with both is F and then B.
    entries = [(rank, number, *divmod(number, p * v)) for rank in range(p) for number in range(m * v)]
    for rank, number, group, offset in entries:
        table[number + rank][rank].append(Op("F", offset // p, group * p + offset % p))
    for rank, number, group, offset in entries:
        table[number + lag + p - 1 - rank][rank].append(Op("B", v - 1 - offset // p, group * p + offset % p))
    return tuple(tuple(tuple(ops) for ops in column) for column in table)


def gpipe(p: int, m: int, v: int) -> Table:
    """Return the table of GPipe: all forwards, then all backwards (Huang et al. 2019, section 2.3)."""
    # The last forward is at tick m v + p - 2, and the first backward in the next tick.
    return lockstep(p, m, v, lag=m * v + p - 1)


def one_f_one_b(p: int, m: int, v: int) -> Table:
    """Return the table of 1F1B, interleaved if v > 1: the last rank runs a forward and its backward in one tick.

    Since a tick holds a forward and a backward, the first rank holds up to 2 p - 1 microbatches. In the paper, where
    a slot holds one of the two, it holds p.
    """
    # Microbatch 0 enters the last chunk as forward number (v - 1) p. The last rank runs it p - 1 ticks later.
    return lockstep(p, m, v, lag=v * p - 1)


def one_f_one_b_overlap(p: int, m: int, v: int) -> Table:
    """Return the table of 1F1B in which the last rank's backward runs one tick later.

    No backward then needs a forward of its own tick, so that each rank runs the two side by side, layer by layer (the
    idea of DualPipe, DeepSeek-AI 2024, section 3.2.1). There are as many ticks with forwards, and with backwards, as in
    1F1B, and one more microbatch is in flight.
    """
    return lockstep(p, m, v, lag=v * p)


class Recipe(NamedTuple):
    """A schedule for any number of ranks, microbatches and chunks.

    Attributes:
      words: a description for the command line.
      table: `table(ranks, microbatches, chunks)` returns the table. If there is none for these numbers, it raises
        ValueError with numbers that fit.
      planned: whether `jp.plan` tries it for every pipeline; false if another schedule has the same bubble and takes
        less memory.
      placement: which stages are a rank's chunks.
      near: whether `jp.plan` also tries it for the fastest pipeline found, as it is faster with few microbatches and
        slower with many.
      chunks: the smallest number of chunks per rank.
    """

    words: str
    table: Callable[[int, int, int], Table]
    planned: bool = True
    placement: Placement = "loop"
    near: bool = False
    chunks: int = 1


# The schedules by the name that `Strategy.schedule` takes.
SCHEDULES = {
    "gpipe": Recipe("all forwards before all backwards", gpipe, planned=False),
    "1f1b": Recipe("a backward as soon as it can be", one_f_one_b),
    "1f1b-overlap": Recipe("1f1b whose forwards and backwards run side by side", one_f_one_b_overlap, planned=False),
    "1f1b-halves": Recipe("1f1b in p activations, its backwards in halves", one_f_one_b_halves, planned=False),
    "zb-h1": Recipe("1f1b whose bubble is filled with gradients of weights", zb_h1, planned=False, near=True),
    "zb-h2": Recipe("the same with twice the memory", zb_h2, planned=False),
    "zb-v": Recipe("two chunks a rank, placed as a V, in the memory of 1f1b", zb_v, False, "V", near=True, chunks=2),
    "v-half": Recipe("the same in half the memory", v_half, planned=False, placement="V", chunks=2),
    "v-min": Recipe("the same in a third of the memory", v_min, planned=False, placement="V", chunks=2),
    "dualpipe-v": Recipe("forwards and backwards of a V alternate", dualpipe_v, planned=False, placement="V", chunks=2),
}


def is_schedule(value: Any) -> bool:
    """Return whether a strategy takes a value as its schedule though `SCHEDULES` does not name it.

    Such a value is the path of a file of torch's lines, or a `Schedule`.
    """
    return value.endswith(".csv") if isinstance(value, str) else hasattr(value, "label")
