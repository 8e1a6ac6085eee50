"""One entry of a ledger: a collective, and its position in the program."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Any

from ...program.collectives import KINDS, on_the_wire
from ...program.trip_counts import times


@dataclasses.dataclass(frozen=True)
class Collective:
    """Equal collectives of one program, merged.

    Attributes:
      kind: one of `KINDS`, in HLO's spelling: "all-reduce" (pmax and pmin too), "all-gather", "reduce-scatter", ...
      axes: the mesh axes it runs over, in mesh order; ("2 of data+fsdp",) for groups of 2 devices that lie within
        those axes without filling any set of them.
      dtype: numpy's name: "float32", "bfloat16".
      count: executions per step; None in a loop of unknown length. A combined instruction counts once per dtype.
      bytes: the buffer, in bytes per device and step, over all executions (over one execution if `count` is None).
      asynchronous: it starts at one position of the schedule and is waited for at another (HLO only).
      overlapped: compute, not only copies and casts, is scheduled between the two (HLO only).
      in_loop: it runs in the body of a loop.
      conditional: it runs in one branch of a conditional and not in the others; count and bytes are upper bounds.
      ranks: number of devices of one group, which follows from `axes` and the mesh; comparisons ignore it.
      instruction: its name in HLO; "" for several merged ones.
    """

    kind: str
    axes: tuple[str, ...]
    dtype: str
    count: int | None
    bytes: int
    asynchronous: bool = False
    overlapped: bool = False
    in_loop: bool = False
    conditional: bool = False
    ranks: int | None = dataclasses.field(default=None, compare=False)
    instruction: str = dataclasses.field(default="", compare=False)

    @property
    def sent(self) -> int:
        """Bytes that a device sends per step, by the ring convention: see `on_the_wire`."""
        if self.ranks is None:
            raise ValueError(f"{self.kind} over {self.axes} has no number of ranks; make it with ranks=...")
        return round(self.bytes * on_the_wire(self.kind, self.ranks))


def merged(collectives: Iterable[Collective]) -> list[Collective]:
    """Merge collectives that differ only in count, bytes and instruction; sort by kind, axes and dtype."""
    groups: dict[tuple[Any, ...], list[Collective]] = {}
    for collective in collectives:
        # Collectives with an unknown count are merged among each other only.
        key = dataclasses.replace(collective, count=None if collective.count is None else 0, bytes=0, instruction="")
        groups.setdefault(dataclasses.astuple(key), []).append(collective)
    rows = (
        dataclasses.replace(
            group[0],
            count=None if group[0].count is None else sum(collective.count or 0 for collective in group),
            bytes=sum(collective.bytes for collective in group),
            instruction="",
        )
        for group in groups.values()
    )
    return sorted(rows, key=lambda row: (list(KINDS).index(row.kind), str(dataclasses.astuple(row))))


@dataclasses.dataclass(frozen=True)
class Nesting:
    """The loops and conditionals around an equation or instruction.

    Attributes:
      times: how often it runs per step; None in a loop of unknown length.
      asynchronous, overlapped, in_loop, conditional: as in `Collective`.
    """

    times: int | None = 1
    asynchronous: bool = False
    overlapped: bool = False
    in_loop: bool = False
    conditional: bool = False

    def loop(self, trips: int | Fraction | None) -> "Nesting":
        """Return the nesting within the body of a loop of `trips` iterations; None means an unknown number."""
        total = None if trips is None or self.times is None else times(self.times, trips)
        return dataclasses.replace(self, times=total, in_loop=True)

    def collectives(
        self, kind: str, axes: tuple[str, ...], ranks: int, buffers: Mapping[str, int], name: str = ""
    ) -> Iterator[Collective]:
        """Yield one collective per dtype, unless it never runs; `buffers`: dtype -> bytes of one execution."""
        nesting = dataclasses.asdict(self)
        if (count := nesting.pop("times")) != 0:
            for dtype, nbytes in buffers.items():
                total = nbytes * (1 if count is None else count)
                yield Collective(kind, axes, dtype, count, total, **nesting, ranks=ranks, instruction=name)

    def branches(self, walks: Iterable[Callable[["Nesting"], Iterator[Collective]]]) -> Iterator[Collective]:
        """Return the collectives of the branch that sends most; each walk yields one branch's, given their nesting.

        They are `conditional` unless all branches run the same collectives.
        """
        ledgers = [list(walk(self)) for walk in walks]
        heaviest = max(range(len(ledgers)), key=lambda i: sum(collective.bytes for collective in ledgers[i]))
        # If every branch communicates alike, it does not matter which one runs.
        are_equal = all(merged(ledger) == merged(ledgers[0]) for ledger in ledgers)
        return (
            collective if are_equal else dataclasses.replace(collective, conditional=True)
            for collective in ledgers[heaviest]
        )


def buffer_bytes(kind: str, group: int, buffers: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Return the bytes, by dtype, of the whole buffer that a device takes part in.

    This is the output of an all-gather, and the input of every other kind.

    Args:
      kind, group: the collective's kind, and its devices. A group of one sends nothing, and the result is empty.
      buffers: (dtype, bytes) of each input.
    """
    sizes: dict[str, int] = {}
    for dtype, nbytes in buffers if group > 1 else ():
        sizes[dtype] = sizes.get(dtype, 0) + nbytes * (group if kind == "all-gather" else 1)
    return sizes
