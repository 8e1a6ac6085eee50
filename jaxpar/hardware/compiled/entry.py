"""One entry of a ledger: a collective, and where in the program it stands."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Any

from ...program.collectives import KINDS, on_the_wire
from ...program.trip_counts import times


@dataclasses.dataclass(frozen=True)
class Collective:
    """Equal collectives of one program, taken together.

    Attributes:
      kind: one of `KINDS`, in HLO's spelling: "all-reduce" (pmax and pmin too), "all-gather", "reduce-scatter", ...
      axes: the mesh axes it runs over, in mesh order; ("2 of data+fsdp",) for groups of 2 devices that lie within
        those axes without filling any set of them.
      dtype: as numpy names it: "float32", "bfloat16".
      count: executions per step; None in a loop of unknown length. A combined instruction counts once per dtype.
      bytes: the buffer, in bytes per device and step, over all executions (of one execution where `count` is None).
      asynchronous: it starts in one place of the schedule and is waited for in another (HLO only).
      overlapped: compute, not only copies and casts, is scheduled between the two (HLO only).
      in_loop: it runs in the body of a loop.
      conditional: it runs in one branch of a conditional and not in the others; count and bytes are upper bounds.
      ranks: the devices of one group, which follow from `axes` and the mesh; equal entries may leave them out.
      instruction: its name in HLO; "" of several taken together.
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
        """What a device sends, in bytes per step, by the ring convention: see `on_the_wire`."""
        if self.ranks is None:
            raise ValueError(f"{self.kind} over {self.axes} says nothing of its ranks; make it with ranks=...")
        return round(self.bytes * on_the_wire(self.kind, self.ranks))


def merged(collectives: Iterable[Collective]) -> list[Collective]:
    """Alike ones added up, sorted by kind, axes and dtype."""
    groups: dict[tuple[Any, ...], list[Collective]] = {}
    for one in collectives:
        key = dataclasses.replace(one, count=None if one.count is None else 0, bytes=0, instruction="")
        groups.setdefault(dataclasses.astuple(key), []).append(one)
    rows = (
        dataclasses.replace(
            same[0],
            count=None if same[0].count is None else sum(one.count or 0 for one in same),
            bytes=sum(one.bytes for one in same),
            instruction="",
        )
        for same in groups.values()
    )
    return sorted(rows, key=lambda one: (list(KINDS).index(one.kind), str(dataclasses.astuple(one))))


@dataclasses.dataclass(frozen=True)
class Nesting:
    """Where in the program an equation or instruction stands."""

    times: int | None = 1
    asynchronous: bool = False
    overlapped: bool = False
    in_loop: bool = False
    conditional: bool = False

    def loop(self, trips: int | Fraction | None) -> "Nesting":
        """The nesting of what stands in the body of a loop; `trips` None where their number is unknown."""
        known = None if trips is None or self.times is None else times(self.times, trips)
        return dataclasses.replace(self, times=known, in_loop=True)

    def collectives(
        self, kind: str, axes: tuple[str, ...], ranks: int, buffers: Mapping[str, int], name: str = ""
    ) -> Iterator[Collective]:
        """One for each dtype of the buffers of one execution (dtype -> bytes), unless it never runs."""
        nesting = dataclasses.asdict(self)
        if (count := nesting.pop("times")) != 0:
            for dtype, nbytes in buffers.items():
                total = nbytes * (1 if count is None else count)
                yield Collective(kind, axes, dtype, count, total, **nesting, ranks=ranks, instruction=name)

    def branches(self, walks: Iterable[Callable[["Nesting"], Iterator[Collective]]]) -> Iterator[Collective]:
        """The branch that sends most; `conditional` unless all branches run the same collectives."""
        ledgers = [list(walk(self)) for walk in walks]
        most = max(range(len(ledgers)), key=lambda i: sum(one.bytes for one in ledgers[i]))
        same = all(merged(ledger) == merged(ledgers[0]) for ledger in ledgers)
        return (one if same else dataclasses.replace(one, conditional=True) for one in ledgers[most])


def whole(kind: str, group: int, buffers: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Bytes by dtype of the whole buffer that a device takes part in, of input `buffers` (dtype, bytes): output for
    all-gather, input for every other kind; {} of a collective that is alone in its group.
    """
    found: dict[str, int] = {}
    for dtype, nbytes in buffers if group > 1 else ():
        found[dtype] = found.get(dtype, 0) + nbytes * (group if kind == "all-gather" else 1)
    return found
