"""Check that a table can be run: every dependency and message, every operation once, one operation per slot.

    F of stage k   needs   F of stage k - 1
    B, I           need    F of the same stage, and B or I of stage k + 1
    W              needs   I of the same stage

The checker shares no code with the functions that write tables, so that a mistake there is found here.
"""

import itertools
from dataclasses import dataclass, field

from .operations import WORDS, Op, Placement, Table, place_of, stage_of


def check_table(table: Table, placement: Placement, microbatches: int, chunks: int) -> None:
    """Check that a table's operations can run in their slots, and that none is missing.

    An operation's dependencies must have run in an earlier slot. In one slot a rank may also run a forward and then a
    whole backward, which may need this forward. Each stage runs each microbatch once: F, and B or I and W.

    Args:
      table: the operations, [slot][rank].
      placement: which stages are a rank's chunks.

    Raises:
      ValueError: naming the slot and rank of the first operation whose dependency is not met, or the first stage that
        lacks an operation.
    """
    # Operations are added slot by slot, so that those of later slots are not there yet when an operation needs them.
    run = _Run(placement, len(table[0]) if table else 0, chunks, microbatches)
    for slot, column in enumerate(table):
        if len(column) != run.ranks:
            raise ValueError(
                f"slot {slot} has {len(column)} ranks, and slot 0 has {run.ranks}; give each slot all ranks"
            )
        for rank, ops in enumerate(column):
            if len(ops) > 1 and [op.kind for op in ops] != ["F", "B"]:
                names = [f"{run.stage(rank, op)}{op.kind}{op.microbatch}" for op in ops]
                raise ValueError(
                    f"slot {slot}, rank {rank} runs {' and '.join(names)} at once; a slot has one operation, or F and "
                    "then B: put them in separate slots"
                )
            for op in ops:
                run.add(op, rank, slot)
    run.check_complete()


@dataclass(frozen=True)
class _Run:
    """The operations of a table that have run so far.

    Attributes:
      placement: which stages are a rank's chunks.
      ranks, chunks, microbatches: their numbers.
      slot_of: the slot of each operation, by kind ("I" for B too), stage and microbatch.
    """

    placement: Placement
    ranks: int
    chunks: int
    microbatches: int
    slot_of: dict[tuple[str, int, int], int] = field(default_factory=dict)

    def stage(self, rank: int, op: Op) -> int:
        """Return the stage of a rank's operation."""
        return stage_of(self.placement, self.ranks, rank, op.chunk)

    def add(self, op: Op, rank: int, slot: int) -> None:
        """Run an operation; raise ValueError if it cannot run in its slot."""
        cell = f"slot {slot}, rank {rank}"
        kind, chunk, microbatch = op
        if kind not in WORDS or not 0 <= chunk < self.chunks or not 0 <= microbatch < self.microbatches:
            raise ValueError(
                f"{cell}: {tuple(op)} is no operation of this table; use kinds {', '.join(WORDS)}, chunks 0 to "
                f"{self.chunks - 1} and microbatches 0 to {self.microbatches - 1}"
            )
        stage = self.stage(rank, op)
        name = f"{stage}{kind}{microbatch}"
        # A whole backward is both halves: operations that need I or W accept it.
        kinds = ("B", "I", "W") if kind == "B" else (kind,)
        if any((part, stage, microbatch) in self.slot_of for part in kinds):
            raise ValueError(f"{cell}: {name} runs again; a stage runs each microbatch once: leave one of them out")
        # Lower ranks' operations of this slot are in `slot_of` already, so that the slots must be compared.
        for needed_kind, needed_stage, may_share_slot in self._needs(kind, stage):
            needed_slot = self.slot_of.get((needed_kind, needed_stage, microbatch))
            if needed_slot is None or (needed_slot == slot and not may_share_slot):
                words = WORDS[needed_kind] if needed_kind != "I" else "backward, or gradient of inputs,"
                reason = "has not run" if needed_slot is None else "runs in the same slot"
                raise ValueError(
                    f"{cell}: {name} needs the {words} of microbatch {microbatch} in stage {needed_stage}, which "
                    f"{reason}; it must run in an earlier slot"
                )
        self.slot_of.update({(part, stage, microbatch): slot for part in kinds})

    def _needs(self, kind: str, stage: int) -> list[tuple[str, int, bool]]:
        """Return the operations that must run first: kind, stage, and whether it may run in the same slot."""
        needs: list[tuple[str, int, bool]] = []
        if kind == "F" and stage > 0:
            needs.append(("F", stage - 1, False))
        if kind in "BI":
            # A slot may hold F and then B, so that a whole backward may share a slot with its forward.
            needs.append(("F", stage, kind == "B"))
            if stage < self.ranks * self.chunks - 1:
                needs.append(("I", stage + 1, False))
        if kind == "W":
            needs.append(("I", stage, False))
        return needs

    def check_complete(self) -> None:
        """Raise ValueError if a stage does not run a microbatch, forwards and backwards."""
        stages, microbatches = range(self.ranks * self.chunks), range(self.microbatches)
        # A whole backward is in `slot_of` as I and as W too, so that these three kinds cover all tables.
        for stage, microbatch, kind in itertools.product(stages, microbatches, ("F", "I", "W")):
            if (kind, stage, microbatch) not in self.slot_of:
                # Without I the whole backward is missing; with I, its W alone.
                missing = kind if ("I", stage, microbatch) in self.slot_of or kind == "F" else "B, or I and W,"
                raise ValueError(
                    f"stage {stage} (rank {place_of(self.placement, self.ranks, stage).rank}) never runs {missing} of "
                    f"microbatch {microbatch}; every stage runs each of {self.microbatches} microbatches once: add it"
                )
