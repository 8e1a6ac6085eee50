"""The stages of a cut program: what each reads and sends, and how long it takes.

    stage 0                     stage 1                     stage 2
    e0 e1 e2    - x, skip ->    e3 e4 e5 e6    - y, skip ->    e7 e8

Stage 1 receives `skip` and sends it on, since stage 2 reads it: a message goes to the next stage alone.
"""

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
    """One stage of a cut program.

    Attributes:
      number: its number among all stages, in the order of the program.
      piece: its equations.
      incoming: the variables of the message from the stage before: made before this stage, and read by it or later.
      outgoing: the variables of the message to the next stage: made by this stage or before, and read later.
      results: the positions of the program's outputs that it makes.
    """

    number: int
    piece: Segment
    incoming: tuple[Any, ...]
    outgoing: tuple[Any, ...]
    results: tuple[int, ...]

    @functools.cached_property
    def incoming_packing(self) -> Packing:
        """Return the packing of the message that the stage receives, and of the cotangents that it sends back."""
        return Packing.of_avals(v.aval for v in self.incoming)

    @functools.cached_property
    def outgoing_packing(self) -> Packing:
        """Return the packing of the message that the stage sends, and of the cotangents that it receives."""
        return Packing.of_avals(v.aval for v in self.outgoing)


def stages(program: Program) -> list[Stage]:
    """Return the stages of a cut program, one for each of its segments."""
    # A cut program has one segment for each stage, and no stacks.
    pieces = [piece for piece in program.pieces if isinstance(piece, Segment)]
    assert len(pieces) == len(program.pieces)
    source = {v: number for number, piece in enumerate(pieces) for v in piece.outputs}
    last_reader = {v: number for number, piece in enumerate(pieces) for v in piece.inputs if v in source}
    # A message carries its variables through every stage between source and last reader.
    live = lambda cut: tuple(v for v, number in source.items() if number < cut <= last_reader.get(v, 0))
    results: list[list[int]] = [[] for _ in pieces]
    for position, atom in enumerate(program.outputs):
        # Outputs that no stage makes, such as constants and unchanged inputs, belong to the last stage.
        results[-1 if jx.is_literal(atom) else source.get(atom, -1)].append(position)
    return [
        Stage(number, piece, live(number), live(number + 1), tuple(results[number]))
        for number, piece in enumerate(pieces)
    ]


class SlotOrder(Protocol):
    """The part of a `Schedule` (`parallel/pipeline/schedules.py`) that stages need."""

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        ...

    @property
    def microbatches(self) -> int:
        """Return the number of microbatches of a step."""
        ...

    def place(self, stage: int) -> StagePlace:
        """Return the rank and the chunk of a stage."""
        ...


def used(program: Program, schedule: SlotOrder) -> list[list[int]]:
    """Return the leaves that each rank's stages read, in order."""
    # Dicts as ordered sets: a leaf that several stages of a rank read is listed once.
    leaves_by_rank: list[dict[int, None]] = [{} for _ in range(schedule.ranks)]
    for number, piece in enumerate(program.pieces):
        leaves_by_rank[schedule.place(number).rank].update(dict.fromkeys(piece.unit.leaf_indices))
    return [list(leaves) for leaves in leaves_by_rank]


def described(program: Program, held: Sequence[int]) -> str:
    """Return a sentence on the stages: their shares of the predicted time, their weights and their messages.

    Args:
      held: the bytes of each leaf.
    """
    stage_times = [float(times(group).sum()) for group in program.groups]
    program_stages = stages(program)
    weights = [size(sum(held[i] for i in dict.fromkeys(stage.piece.unit.leaf_indices))) for stage in program_stages]
    # A skip is in both messages of a stage.
    carried = [sum(bytes_of(v) for v in stage.incoming if v in stage.outgoing) for stage in program_stages]
    shares = ", ".join(f"{x / sum(stage_times):.0%}" for x in stage_times)
    return (
        f"the program is cut into {len(program_stages)} stages of {shares} of the predicted time, with "
        f"{', '.join(weights)} of weights; the largest message has "
        f"{size(max(stage.incoming_packing.bytes for stage in program_stages))}, and skips carry "
        f"{size(sum(carried))} of a microbatch through stages that do not make them"
    )


def paces(
    program: Program, numbers: Mapping[StagePlace, int], kinds: np.ndarray, chunks: np.ndarray
) -> dict[tuple[str, int], int]:
    """Return, for each operation of each stage, the number of slots whose length it determines.

    A slot lasts as long as the longest operation of any rank, by the predicted times.

    Args:
      numbers: the number of the stage at each place.
      kinds: the kinds of operations as codes, [slots, ranks]; 0 if a rank is idle.
      chunks: the chunks of the operations, [slots, ranks].
    """
    stage_times = [float(times(group).sum()) for group in program.groups]
    num_slots = {(kind, number): 0 for number in numbers.values() for kind in KINDS}
    for slot in range(len(kinds)):
        slot_ops = [
            (KINDS[kinds[slot, rank] - 1], numbers[StagePlace(int(rank), int(chunks[slot, rank]))])
            for rank in np.flatnonzero(kinds[slot])
        ]
        # B takes twice as long as F, I or W of the same stage.
        num_slots[max(slot_ops, key=lambda op: stage_times[op[1]] * (2 if op[0] == "B" else 1))] += 1
    return num_slots


def is_linear(program: Program, v: Any) -> bool:
    """Return whether a variable of a message has a cotangent."""
    # Variables are compared by identity, as the variables of a jaxpr are.
    return any(
        is_active
        for p in program.pieces
        for output, is_active in zip(p.outputs, p.unit.active, strict=True)
        if output is v
    )
