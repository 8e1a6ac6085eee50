"""Axes: those of the mesh, what their ranks share, and over which of them a gradient is summed."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh.

    Attributes:
      name: its name, and that of the field of `Strategy` (`strategy.py`) that gives its size.
      rows: whether its ranks share the rows of a batch; else each of them sees all rows.
      sums: over which leaves' gradients it sums; a leaf that the axis shards is scattered instead.
    """

    name: str
    rows: bool
    sums: Literal["every leaf", "leaves whole on it", "no leaf"]


# Outermost to innermost.
MESH = (
    Axis("pipe", rows=False, sums="leaves whole on it"),
    Axis("data", rows=True, sums="every leaf"),
    Axis("fsdp", rows=True, sums="every leaf"),
    Axis("expert", rows=True, sums="leaves whole on it"),  # experts get the tokens of all its ranks
    Axis("context", rows=False, sums="every leaf"),  # each rank has some of the positions of all rows
    Axis("tensor", rows=False, sums="no leaf"),  # the program of one rank sums what ranks have in parts
)
AXES = tuple(axis.name for axis in MESH)
ROWS = tuple(axis.name for axis in MESH if axis.rows)  # those that share the rows of a batch
SHARDS = ("fsdp", "expert", "context")  # those over which ZeRO shards; experts' own leaves not over `expert`


def summed_over(split: Collection[str]) -> tuple[str, ...]:
    """The axes over which the gradient of a leaf is summed, which is split over some: a stage's own over `pipe`, one of
    experts over `expert`.

    >>> summed_over(split=()), summed_over(split=("pipe", "expert"))
    (('pipe', 'data', 'fsdp', 'expert', 'context'), ('data', 'fsdp', 'context'))
    """
    summed = {"every leaf": lambda axis: True, "leaves whole on it": lambda axis: axis not in split}
    return tuple(axis.name for axis in MESH if axis.sums != "no leaf" and summed[axis.sums](axis.name))
