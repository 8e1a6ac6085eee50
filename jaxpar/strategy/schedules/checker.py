"""Check that a table can be run: every dependency and message, every operation once, one operation per slot.

    F of stage k   needs   F of stage k - 1
    B, I           need    F of the same stage, and B or I of stage k + 1
    W              needs   I of the same stage

The checker shares no code with the functions that write tables, so that a mistake there is found here.
"""

from collections.abc import Mapping

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
    ranks = len(table[0]) if table else 0
    stages = ranks * chunks
    slot_of: dict[tuple[str, int, int], int] = {}  # kind ("I" for B too), stage, microbatch -> slot

    def check(op: Op, rank: int, slot: int) -> None:
        """Raise ValueError if one operation cannot run in its slot."""
        cell = f"slot {slot}, rank {rank}"
        kind, chunk, microbatch = op
        if kind not in WORDS or not 0 <= chunk < chunks or not 0 <= microbatch < microbatches:
            raise ValueError(
                f"{cell}: {tuple(op)} is not of kinds {', '.join(WORDS)}, chunks 0 to {chunks - 1}, microbatches 0 to "
                f"{microbatches - 1}"
            )
        stage = stage_of(placement, ranks, rank, chunk)
        name = f"{stage}{kind}{microbatch}"
        # A whole backward is both halves.
        kinds = ("B", "I", "W") if kind == "B" else (kind,)
        if any((part, stage, microbatch) in slot_of for part in kinds):
            raise ValueError(f"{cell}: {name} runs again; a stage runs each microbatch once")
        needs: list[tuple[str, int, bool]] = []  # kind, stage, whether it may run in this slot too
        if kind == "F" and stage > 0:
            needs.append(("F", stage - 1, False))
        if kind in "BI":
            needs.append(("F", stage, kind == "B"))
            if stage < stages - 1:
                needs.append(("I", stage + 1, False))
        if kind == "W":
            needs.append(("I", stage, False))
        # Lower ranks' operations of this slot are in `slot_of` already, so that the slots must be compared.
        for needed_kind, needed_stage, may_share_slot in needs:
            needed_slot = slot_of.get((needed_kind, needed_stage, microbatch))
            if needed_slot is None or (needed_slot == slot and not may_share_slot):
                words = WORDS[needed_kind] if needed_kind != "I" else "backward, or gradient of inputs,"
                reason = "has not run" if needed_slot is None else "runs in the same slot"
                raise ValueError(
                    f"{cell}: {name} needs the {words} of microbatch {microbatch} in stage {needed_stage}, which "
                    f"{reason}; it must run in an earlier slot"
                )

    for slot, column in enumerate(table):
        if len(column) != ranks:
            raise ValueError(f"slot {slot} has {len(column)} ranks, slot 0 {ranks}; give every rank its operations")
        for rank, ops in enumerate(column):
            if len(ops) > 1 and [op.kind for op in ops] != ["F", "B"]:
                names = [f"{stage_of(placement, ranks, rank, op.chunk)}{op.kind}{op.microbatch}" for op in ops]
                raise ValueError(
                    f"slot {slot}, rank {rank} runs {' and '.join(names)} at once; a slot has one operation, or F and "
                    "then B: put them in separate slots"
                )
            for op in ops:
                check(op, rank, slot)
                stage = stage_of(placement, ranks, rank, op.chunk)
                slot_of[op.kind, stage, op.microbatch] = slot
                # Operations that need I or W accept a whole backward.
                if op.kind == "B":
                    slot_of["I", stage, op.microbatch] = slot_of["W", stage, op.microbatch] = slot
    _check_complete(slot_of, placement, ranks, chunks, microbatches)


def _check_complete(
    slot_of: Mapping[tuple[str, int, int], int], placement: Placement, ranks: int, chunks: int, microbatches: int
) -> None:
    """Raise ValueError if a stage does not run a microbatch, forwards and backwards.

    Args:
      slot_of: the slot of each operation that runs, by kind ("I" for B too), stage and microbatch.
      placement: which stages are a rank's chunks.
    """
    for stage, microbatch in (
        (stage, microbatch) for stage in range(ranks * chunks) for microbatch in range(microbatches)
    ):
        for kind in ("F", "I", "W"):
            if (kind, stage, microbatch) not in slot_of:
                missing = kind if ("I", stage, microbatch) in slot_of or kind == "F" else "B, or I and W,"
                raise ValueError(
                    f"stage {stage} (rank {place_of(placement, ranks, stage).rank}) never runs {missing} of microbatch "
                    f"{microbatch}; every stage runs each of {microbatches} microbatches once"
                )
