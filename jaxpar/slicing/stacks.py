"""Describe in words how each list of a model's blocks runs, and why some blocks run one by one.

layers: 12 layers of a Python loop, one stack
blocks: 12 layers of a Python loop, kept as one stack: layers 1 to 11 scanned; one by one 0: <the first difference>
"""

import math
import posixpath
from collections.abc import Sequence

from ..layout.leaves import Leaf
from ..layout.storage import Storage, list_name, uneven
from .pieces import Segment, Stack
from .program import Program
from .rolling.align import Span
from .rolling.loops import RolledLoop


def described(program: Program, storage: Storage) -> dict[str, str]:
    """Return how the layers run, by path, for each list of blocks and each stack that the model scans itself."""
    units, descriptions = storage.units, {}
    for loop in program.loops:
        descriptions[list_name(units[loop.leaf])] = f"{loop.depth} layers of a Python loop, {_loop_text(loop)}"
    for stack in program.stacks:
        # A stack that was rolled from a loop has its description already.
        if any(list_name(units[s.leaf]) in descriptions for s in stack.slices):
            continue
        # Name the stack by the common path of its leaves, up to the place of the layer's number.
        path = posixpath.commonpath([units[s.leaf].path for s in stack.slices])
        path = path.partition("*")[0] + "*" if "*" in path else path
        path = path or units[stack.slices[0].leaf].path
        descriptions[path] = f"{stack.length} layers, scanned by the model: one stack"
    # A list whose blocks are only partly alike may be a stack in part.
    for path, reason in uneven(storage).items():
        if path in descriptions:
            descriptions[path] = f"{descriptions[path]}; other blocks are not alike: {reason}"
        else:
            descriptions[path] = reason
    return descriptions


def _loop_text(loop: RolledLoop) -> str:
    """Return how the blocks of one Python loop run."""
    if loop.difference is None and {(s.start, s.period) for s in loop.spans} == {(0, 1)}:
        num_passes = len(loop.spans)
        return "one stack" if num_passes == 1 else f"run {num_passes} times: one stack"
    if not loop.spans:
        return f"kept as one stack and run one by one: {loop.difference}"
    # Passes with the same spans are described once.
    parts = [_span_text(span) for span in dict.fromkeys(loop.spans)]
    parts += [f"one by one {', '.join(map(str, loop.unrolled))}"] if loop.unrolled else []
    return (
        ("kept as one stack: " if loop.difference else "one stack: ")
        + "; ".join(parts)
        + (f": {loop.difference}" if loop.difference else "")
    )


def _span_text(span: Span) -> str:
    """Return which layers one scan runs."""
    layers = f"layers {span.number(span.start)} to {span.number(span.stop - 1)} scanned"
    return layers if span.period == 1 else f"{layers} in {span.count} rounds of {span.period}"


def gathered(pieces: Sequence[Segment | Stack], leaves: Sequence[Leaf]) -> tuple[int, list[Leaf]]:
    """Return the largest amount of sharded parameters that one piece holds whole at once.

    Returns:
      The number of elements, and the leaves of that piece, largest first.
    """

    def gathered_by(piece: Segment | Stack) -> tuple[int, list[Leaf]]:
        leaf_shapes = [(leaves[i], x) for i, x in zip(piece.unit.leaf_indices, piece.unit.shapes, strict=True)]
        sharded = [(leaf, math.prod(x.shape)) for leaf, x in leaf_shapes if leaf.dim is not None]
        sharded = sorted(sharded, key=lambda pair: -pair[1])
        return sum(n for _, n in sharded), [leaf for leaf, _ in sharded]

    return max(map(gathered_by, pieces), key=lambda total: total[0], default=(0, []))
