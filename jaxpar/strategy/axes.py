"""The axes of the mesh: what their ranks share, and over which axes a gradient is summed."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh.

    Attributes:
      name: its name, which is the field of `Strategy` that gives its size.
      rows: whether its ranks share the rows of a batch; if not, each of them sees all rows.
      sums: the leaves whose gradients are summed over this axis. A leaf that the axis shards is reduce-scattered
        instead of summed.
    """

    name: str
    rows: bool
    sums: Literal["every leaf", "leaves whole on it", "no leaf"]


# The axes from outermost to innermost. `tensor` communicates most, and its ranks are neighbours.
MESH = (
    Axis("pipe", rows=False, sums="leaves whole on it"),
    Axis("data", rows=True, sums="every leaf"),
    Axis("fsdp", rows=True, sums="every leaf"),
    Axis("expert", rows=True, sums="leaves whole on it"),  # its ranks' tokens travel to the experts
    Axis("context", rows=False, sums="every leaf"),  # each rank has some positions of all rows
    Axis("tensor", rows=False, sums="no leaf"),  # a rank's program sums partial results
)
AXES = tuple(axis.name for axis in MESH)
ROWS = tuple(axis.name for axis in MESH if axis.rows)  # the axes whose ranks share the rows of a batch
SHARDS = ("fsdp", "expert", "context")  # the axes over which ZeRO shards; it does not shard experts over `expert`


def summed_over(split: Collection[str]) -> tuple[str, ...]:
    """Return the axes over which the gradient of a leaf is summed.

    Args:
      split: the axes whose ranks hold different parts of the model: `pipe` for a stage's own leaf, `expert` for an
        expert's.

    >>> summed_over(split=()), summed_over(split=("pipe", "expert"))
    (('pipe', 'data', 'fsdp', 'expert', 'context'), ('data', 'fsdp', 'context'))
    """
    is_summed = lambda axis: axis.sums == "every leaf" or (axis.sums == "leaves whole on it" and axis.name not in split)
    return tuple(axis.name for axis in MESH if is_summed(axis))
