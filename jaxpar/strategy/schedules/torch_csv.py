"""Read tables as torch writes them: a line for each rank, with a cell such as `3F0`, stage 3's forward of microbatch 0.

    0F0,0F1,,0B0,0B1        rank 0
    ,1F0,1B0,1F1,1B1        rank 1

Source: `torch.distributed.pipelining.schedules`, `_Action` and `_PipelineScheduleRuntime._load_csv`, format
"compute_only". Kinds: F, B (whole backward), I (input), W (weight). A cell that overlaps a forward with a backward,
`(0F3;7B1)OVERLAP_F_B`, is read as the one and then the other.
"""

import collections
import re
from collections.abc import Iterable

from .operations import PLACEMENTS, Op, Orders, Placement, place_of

_ACTION = re.compile(r"(\d{1,6})(F|B|I|W)(\d{1,6})")
_MOST_RANKS = 1 << 12
_MOST_CELLS = 1 << 22  # stages times microbatches: a larger table would fill the memory before an error could be raised
_OVERLAP = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")


def _parse(rank: int, line: str) -> list[tuple[str, int, int]]:
    """Return the operations of a rank's line, (kind, stage, microbatch) of each."""
    cells = [cell.strip() for cell in line.strip().split(",")]
    # Two operations that overlap in torch become two cells, which run one after the other.
    cells = [part for cell in cells for part in _OVERLAP.sub(r"\1,\2", cell).split(",")]
    actions: list[tuple[str, int, int]] = []
    for cell in filter(None, cells):
        match = _ACTION.fullmatch(cell)
        if match is None:
            raise ValueError(
                f"rank {rank} has a cell {cell[:40]!r}; write stage, one of F, B, I, W, and microbatch, as in 3F0, "
                'with up to six digits each (torch\'s format "compute_only", without sends and receives)'
            )
        actions.append((match[2], int(match[1]), int(match[3])))
    return actions


def read(lines: Iterable[str]) -> tuple[Orders, Placement, int, int]:
    """Read a table from torch's lines.

    The column of a cell is ignored: in torch ranks wait for messages, not for columns.

    Args:
      lines: one line per rank.

    Returns:
      (orders, placement, chunks, microbatches): each rank's operations in order, which stages are a rank's chunks, the
      number of chunks per rank and the number of microbatches.

    Raises:
      ValueError: for a cell that is no operation, for one that occurs twice, for more ranks, stages or microbatches
        than any pipeline has, and for stages that lie neither as a loop nor as a V.
    """
    # 1. Parse the cells, check the operations, and count stages and microbatches.
    actions = [_parse(rank, line) for rank, line in enumerate(lines)]
    ranks, flat_actions = len(actions), [action for rank_actions in actions for action in rank_actions]
    if not flat_actions:
        raise ValueError("the table is empty; give a line for each rank, with cells such as 3F0")
    for rank, rank_actions in enumerate(actions):
        if len(rank_actions) > len({*rank_actions}):
            (kind, stage, microbatch), _ = collections.Counter(rank_actions).most_common(1)[0]
            name = f"{stage}{kind}{microbatch}"
            raise ValueError(f"rank {rank} has {name} twice; a stage runs each microbatch once: leave one of them out")
    stages = 1 + max(stage for _, stage, _ in flat_actions)
    microbatches = 1 + max(microbatch for _, _, microbatch in flat_actions)
    if ranks > _MOST_RANKS or stages * microbatches > _MOST_CELLS:
        raise ValueError(
            f"the table has {ranks:,} ranks, {stages:,} stages and {microbatches:,} microbatches; use {_MOST_RANKS:,} "
            f"ranks and {_MOST_CELLS:,} stages times microbatches at most"
        )

    # 2. Find the placement under which every rank holds the stages that it runs.
    for placement in PLACEMENTS:
        # With one chunk a rank both placements fit, and the first, a loop, is taken.
        if all(
            place_of(placement, ranks, stage).rank == rank
            for rank, rank_actions in enumerate(actions)
            for _, stage, _ in rank_actions
        ):
            orders = [
                [
                    Op(kind, place_of(placement, ranks, stage).chunk, microbatch)  # type: ignore[arg-type]
                    for kind, stage, microbatch in rank_actions
                ]
                for rank_actions in actions
            ]
            # Rounded up: the table's checker then names the stages that are missing.
            return orders, placement, -(-stages // ranks), microbatches
    stages_of_ranks = [sorted({stage for _, stage, _ in rank_actions}) for rank_actions in actions]
    raise ValueError(
        f"ranks hold stages {', '.join(map(str, stages_of_ranks))}; with {ranks} ranks, let rank s hold s, s + "
        f"{ranks}, ... (a loop), or s and {2 * ranks - 1} - s (a V)"
    )
