"""Tables as torch writes them: a line for each rank, cells such as `3F0`, stage 3's forward of microbatch 0.

Source: `torch.distributed.pipelining.schedules`, `_Action` and `_PipelineScheduleRuntime._load_csv`, format
"compute_only". Kinds: F, B (whole backward), I (input), W (weight). A cell that overlaps a forward with a backward,
`(0F3;7B1)OVERLAP_F_B`, is one after the other here.
"""

import collections
import re
from collections.abc import Iterable

from .operations import PLACEMENTS, Op, Orders, Placement, place_of

_ACTION = re.compile(r"(\d{1,6})(F|B|I|W)(\d{1,6})")
_MOST_RANKS = 1 << 12
_MOST_CELLS = 1 << 22  # stages times microbatches: a table of more would fill the memory before anything is said
_OVERLAP = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")


def read(lines: Iterable[str]) -> tuple[Orders, Placement, int, int]:
    """Each rank's operations in order; the placement; chunks a rank; microbatches.

    A cell's column says nothing: in torch ranks wait for messages, not for columns. Raises ValueError for a cell that
    is none of these, for one that is there twice, for more ranks, stages or microbatches than any pipeline has, and for
    stages that lie neither as a loop nor as a V.
    """
    given: list[list[tuple[str, int, int]]] = []
    for rank, line in enumerate(lines):
        cells = [cell.strip() for cell in line.strip().split(",")]
        cells = [part for cell in cells for part in _OVERLAP.sub(r"\1,\2", cell).split(",")]
        given.append([])
        for cell in filter(None, cells):
            match = _ACTION.fullmatch(cell)
            if match is None:
                raise ValueError(
                    f"rank {rank} has a cell {cell[:40]!r}; use stage, one of F, B, I, W, and microbatch, as in 3F0 "
                    'of up to six digits each (torch\'s format "compute_only", without sends and receives)'
                )
            given[-1].append((match[2], int(match[1]), int(match[3])))
    ranks, every = len(given), [x for row in given for x in row]
    if not every:
        raise ValueError("the table is empty; give a line for each rank, with cells such as 3F0")
    for rank, row in enumerate(given):
        if len(row) > len({*row}):
            (kind, stage, at), _ = collections.Counter(row).most_common(1)[0]
            raise ValueError(f"rank {rank} has {stage}{kind}{at} twice; a stage runs each microbatch once")
    stages, microbatches = 1 + max(x[1] for x in every), 1 + max(x[2] for x in every)
    if ranks > _MOST_RANKS or stages * microbatches > _MOST_CELLS:
        raise ValueError(
            f"the table has {ranks:,} ranks, {stages:,} stages and {microbatches:,} microbatches; use {_MOST_RANKS:,} "
            f"ranks and {_MOST_CELLS:,} stages times microbatches at most"
        )
    for placement in PLACEMENTS:
        if all(place_of(placement, ranks, x[1]).rank == rank for rank, row in enumerate(given) for x in row):
            orders = [[Op(k, place_of(placement, ranks, s).chunk, at) for k, s, at in row] for row in given]  # type: ignore[arg-type]
            return orders, placement, -(-stages // ranks), microbatches
    held = [sorted({x[1] for x in row}) for row in given]
    raise ValueError(
        f"ranks hold stages {', '.join(map(str, held))}; with {ranks} ranks, rank s holds s, s + {ranks}, ... (loop), "
        f"or s and {2 * ranks - 1} - s (V)"
    )
