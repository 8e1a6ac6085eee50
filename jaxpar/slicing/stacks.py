"""What became of a model's layers, in words: how many each stack has, and why blocks that look alike are none."""

import math
import posixpath
from collections.abc import Sequence

from ..layout.leaves import Leaf
from ..layout.storage import Storage, list_name, uneven
from .pieces import Segment, Stack
from .program import Program
from .rolling.loops import RolledLoop
from .rolling.roll import Span


def described(program: Program, storage: Storage) -> dict[str, str]:
    """For each list of blocks, and each stack that the model scans itself, how its layers run: path -> words."""
    units, found = storage.units, {}
    for loop in program.loops:
        found[list_name(units[loop.leaf])] = f"{loop.depth} layers of a Python loop, {_runs(loop)}"
    for stack in program.stacks:
        if any(list_name(units[s.leaf]) in found for s in stack.slices):
            continue
        path = posixpath.commonpath([units[s.leaf].path for s in stack.slices])
        path = path.partition("*")[0] + "*" if "*" in path else path
        found[path or units[stack.slices[0].leaf].path] = f"{stack.length} layers, scanned by the model: one stack"
    for path, why in uneven(storage).items():
        found[path] = f"{found[path]}; other blocks are not alike: {why}" if path in found else why
    return found


def _runs(loop: RolledLoop) -> str:
    if loop.why is None and {(s.start, s.period) for s in loop.spans} == {(0, 1)}:
        times = len(loop.spans)
        return "one stack" if times == 1 else f"run {times} times: one stack"
    if not loop.spans:
        return f"kept as one stack and run one by one: {loop.why}"
    parts = [_part(span) for span in dict.fromkeys(loop.spans)]
    parts += [f"one by one {', '.join(map(str, loop.left))}"] if loop.left else []
    return (
        ("kept as one stack: " if loop.why else "one stack: ")
        + "; ".join(parts)
        + (f": {loop.why}" if loop.why else "")
    )


def _part(span: Span) -> str:
    layers = f"layers {span.number(span.start)} to {span.number(span.stop - 1)} scanned"
    return layers if span.period == 1 else f"{layers} in {span.count} rounds of {span.period}"


def gathered(pieces: Sequence[Segment | Stack], leaves: Sequence[Leaf]) -> tuple[int, list[Leaf]]:
    """Sharded elements, and leaves from the largest, of the piece that holds most of them whole at once."""

    def size(piece: Segment | Stack) -> tuple[int, list[Leaf]]:
        read = [(leaves[i], x) for i, x in zip(piece.unit.leaves, piece.unit.shapes, strict=True)]
        read = sorted(((leaf, math.prod(x.shape)) for leaf, x in read if leaf.dim is not None), key=lambda r: -r[1])
        return sum(n for _, n in read), [leaf for leaf, _ in read]

    return max(map(size, pieces), key=lambda found: found[0], default=(0, []))
