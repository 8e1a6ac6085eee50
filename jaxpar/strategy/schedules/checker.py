"""Whether a table can be run: every dependency, messages included; every operation once; one in a slot.

It shares nothing with the functions that write tables.
"""

from .operations import WORDS, Op, Placement, Table, place_of, stage_of


def check_table(table: Table, placement: Placement, microbatches: int, chunks: int) -> None:
    """Raises ValueError that names the first operation, by slot and rank, whose dependency is not met.

    What an operation needs must have run in an earlier slot: for a forward that of the stage before, for B and I the
    forward of the same stage and B or I of the stage behind, for W its own I. In one slot a rank may also run a forward
    and then a whole backward that needs no more than that. Each stage runs each microbatch once: F, and B or I and W.
    """
    ranks = len(table[0]) if table else 0
    stages = ranks * chunks
    done: dict[tuple[str, int, int], int] = {}  # kind ("I" for B too), stage, microbatch -> slot

    def check(op: Op, rank: int, slot: int) -> None:
        """Raises ValueError if one operation cannot run in its slot."""
        where = f"slot {slot}, rank {rank}"
        kind, chunk, at = op
        if kind not in WORDS or not 0 <= chunk < chunks or not 0 <= at < microbatches:
            raise ValueError(
                f"{where}: {tuple(op)} is not of kinds {', '.join(WORDS)}, chunks 0 to {chunks - 1}, microbatches 0 to "
                f"{microbatches - 1}"
            )
        stage = stage_of(placement, ranks, rank, chunk)
        name = f"{stage}{kind}{at}"
        parts = ("B", "I", "W") if kind == "B" else (kind,)
        if any((part, stage, at) in done for part in parts):
            raise ValueError(f"{where}: {name} runs again; a stage runs each microbatch once")
        needs: list[tuple[str, int, bool]] = []  # kind, stage, whether it may be of this slot
        if kind == "F" and stage > 0:
            needs.append(("F", stage - 1, False))
        if kind in "BI":
            needs.append(("F", stage, kind == "B"))
            if stage < stages - 1:
                needs.append(("I", stage + 1, False))
        if kind == "W":
            needs.append(("I", stage, False))
        for needed, of, same in needs:
            ran = done.get((needed, of, at))
            if ran is None or (ran == slot and not same):
                before = WORDS[needed] if needed != "I" else "backward, or gradient of inputs,"
                when = "has not run" if ran is None else "runs in the same slot"
                raise ValueError(
                    f"{where}: {name} needs the {before} of microbatch {at} in stage {of}, which {when}; it must run "
                    "in an earlier slot"
                )

    for slot, column in enumerate(table):
        if len(column) != ranks:
            raise ValueError(f"slot {slot} has {len(column)} ranks, slot 0 {ranks}; give every rank its operations")
        for rank, ops in enumerate(column):
            if len(ops) > 1 and [op.kind for op in ops] != ["F", "B"]:
                names = [f"{stage_of(placement, ranks, rank, op.chunk)}{op.kind}{op.microbatch}" for op in ops]
                raise ValueError(
                    f"slot {slot}, rank {rank} runs {' and '.join(names)} at once; a slot has one operation, or F and "
                    "then B: put them in slots of their own"
                )
            for op in ops:
                check(op, rank, slot)
                stage = stage_of(placement, ranks, rank, op.chunk)
                done[op.kind, stage, op.microbatch] = slot
                if op.kind == "B":
                    done["I", stage, op.microbatch] = done["W", stage, op.microbatch] = slot
    for stage, at in ((stage, at) for stage in range(stages) for at in range(microbatches)):
        for kind in ("F", "I", "W"):
            if (kind, stage, at) not in done:
                lost = kind if ("I", stage, at) in done or kind == "F" else "B, or I and W,"
                raise ValueError(
                    f"stage {stage} (rank {place_of(placement, ranks, stage).rank}) never runs {lost} of microbatch "
                    f"{at}; every stage runs each of {microbatches} microbatches once"
                )
