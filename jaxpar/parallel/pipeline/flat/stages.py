"""The stages of a cut program: what each reads and hands on, and how long it takes."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ....backend.text import size
from ....program import jaxpr as jx
from ....slicing.pieces import Segment
from ....slicing.program import Program
from ....strategy.schedules.operations import KINDS, StagePlace
from .cut import bytes_of, times
from .packing import Packing


@dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes:
      number: among all, in the order of the program.
      piece: its equations.
      incoming, outgoing: variables that the messages before and behind it hold: made before, read behind.
      results: positions of the program's outputs that it makes.
    """

    number: int
    piece: Segment
    incoming: tuple[Any, ...]
    outgoing: tuple[Any, ...]
    results: tuple[int, ...]

    @functools.cached_property
    def before(self) -> Packing:
        """The message that it gets, and the cotangents that it sends."""
        return Packing.of(v.aval for v in self.incoming)

    @functools.cached_property
    def behind(self) -> Packing:
        """The message that it sends, and the cotangents that it gets."""
        return Packing.of(v.aval for v in self.outgoing)


def stages(program: Program) -> list[Stage]:
    """The stages of a program of as many segments."""
    pieces = [piece for piece in program.pieces if isinstance(piece, Segment)]
    assert len(pieces) == len(program.pieces)
    home = {v: at for at, piece in enumerate(pieces) for v in piece.outputs}
    last = {v: at for at, piece in enumerate(pieces) for v in piece.inputs if v in home}
    live = lambda cut: tuple(v for v, at in home.items() if at < cut <= last.get(v, 0))
    results: list[list[int]] = [[] for _ in pieces]
    for position, atom in enumerate(program.outputs):
        results[-1 if jx.is_literal(atom) else home.get(atom, -1)].append(position)  # the last has the program's inputs
    return [Stage(at, piece, live(at), live(at + 1), tuple(results[at])) for at, piece in enumerate(pieces)]


class SlotOrder(Protocol):
    """A schedule, as far as it is asked (`parallel/pipeline/schedules.py`)."""

    @property
    def ranks(self) -> int:
        """How many there are."""
        ...

    @property
    def microbatches(self) -> int:
        """How many a step has."""
        ...

    def place(self, stage: int) -> StagePlace:
        """The rank and the chunk of a stage."""
        ...


def used(program: Program, schedule: SlotOrder) -> list[list[int]]:
    """The leaves that each rank's stages read, in order."""
    found: list[dict[int, None]] = [{} for _ in range(schedule.ranks)]
    for number, piece in enumerate(program.pieces):
        found[schedule.place(number).rank].update(dict.fromkeys(piece.unit.leaves))
    return [list(some) for some in found]


def described(program: Program, held: Sequence[int]) -> str:
    """The stages' shares of the predicted time, weights and messages; `held` are the bytes of each leaf."""
    each = [float(times(group).sum()) for group in program.groups]
    every = stages(program)
    weights = [size(sum(held[i] for i in dict.fromkeys(stage.piece.unit.leaves))) for stage in every]
    carried = [sum(bytes_of(v) for v in stage.incoming if v in stage.outgoing) for stage in every]
    parts = ", ".join(f"{x / sum(each):.0%}" for x in each)
    return (
        f"the program is cut into {len(every)} stages of {parts} of the predicted time, with {', '.join(weights)} of "
        f"weights; the largest message has {size(max(stage.before.bytes for stage in every))}, and skips carry "
        f"{size(sum(carried))} of a microbatch through stages that do not make them"
    )


def paces(
    program: Program, numbers: Mapping[StagePlace, int], kinds: np.ndarray, chunks: np.ndarray
) -> dict[tuple[str, int], int]:
    """The slots in which all ranks wait for a stage's F, B, I or W: the longest that runs, of the predicted times.

    `numbers` are those of the stages by their place, `kinds` and `chunks` [slots, ranks] of operations, 0 where a rank
    is idle.
    """
    each = [float(times(group).sum()) for group in program.groups]
    found = {(kind, number): 0 for number in numbers.values() for kind in KINDS}
    for slot in range(len(kinds)):
        ran = [
            (KINDS[kinds[slot, rank] - 1], numbers[StagePlace(int(rank), int(chunks[slot, rank]))])
            for rank in np.flatnonzero(kinds[slot])
        ]
        found[max(ran, key=lambda one: each[one[1]] * (2 if one[0] == "B" else 1))] += 1
    return found


def is_linear(program: Program, v: Any) -> bool:
    """Whether a variable of a message has a cotangent."""
    return any(on for p in program.pieces for out, on in zip(p.outputs, p.unit.active, strict=True) if out is v)
