"""Parameters that look like those of alike blocks in a row, written as a Python loop: `layers/0/...`, `layers/1/...`;
Linen's `Block_0/...`. Found by paths and shapes alone, since a layout is made before any batch is seen.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Family:
    """Parameters of alike blocks: `members[pattern][layer]` are positions in the model's tree, `paths[pattern]` have a
    `*` for the block's number.
    """

    paths: tuple[str, ...]
    members: tuple[tuple[int, ...], ...]


def families(leaves: Sequence[tuple[str, Any]], stacked: Callable[[str], bool]) -> list[Family]:
    """The families among some leaves, each a path and whatever must be alike (shape, dtype, ...).

    Blocks are alike if they hold the same paths with the same properties; `period` blocks that alternate count as one.
    Paths for which `stacked` is true are left alone: their layers are stacked already.
    """
    found: list[Family] = []
    taken: set[int] = set()
    for depth in range(8):
        groups: dict[str, dict[int, dict[str, int]]] = {}
        for at, (path, _) in enumerate(leaves):
            numbers = list(_NUMBER.finditer(path))
            if at in taken or depth >= len(numbers) or stacked(path):
                continue
            here = numbers[depth]
            groups.setdefault(path[: here.start()], {}).setdefault(int(here[0]), {})[path[here.end() :]] = at
        for prefix, blocks in groups.items():
            signature = {
                number: tuple(sorted((suffix, repr(leaves[at][1])) for suffix, at in block.items()))
                for number, block in blocks.items()
            }
            first, period, repeats = _run(signature)
            if repeats < 2:
                continue
            paths, members = [], []
            for offset in range(period):
                star = "*" if period == 1 else f"*+{offset}"
                for suffix in blocks[first + offset]:
                    numbers = range(first + offset, first + period * repeats, period)
                    paths.append(f"{prefix}{star}{suffix}")
                    members.append(tuple(blocks[number][suffix] for number in numbers))
            taken.update(at for row in members for at in row)
            found.append(Family(tuple(paths), tuple(members)))
    return found


def _run(signature: dict[int, Any]) -> tuple[int, int, int]:
    """The run (first number, period, repeats) of alike blocks that covers most; of those the shortest period."""
    best = (0, 1, 1)
    for period in range(1, 9):
        for first in signature:
            repeats = 1
            while all(
                signature.get(first + period * repeats + i, first) == signature.get(first + i) for i in range(period)
            ):
                repeats += 1
            if repeats > 1 and period * repeats > best[1] * best[2]:
                best = (first, period, repeats)
    return best


def unlike(leaves: Sequence[tuple[str, tuple[int, ...]]], prefix: str, member: str) -> str | None:
    """How a block of a list differs from those of the family that `member`, a leaf's path, is in: the first leaf.

    Args:
      leaves: the model's paths and shapes.
      prefix: the paths of the list's blocks up to their number.
    """
    blocks: dict[int, dict[str, tuple[int, ...]]] = {}
    for path, shape in leaves:
        number = _NUMBER.match(path[len(prefix) :]) if path.startswith(prefix) else None
        if number is not None:
            blocks.setdefault(int(number[0]), {})[path[len(prefix) + number.end() :]] = shape
    own = _NUMBER.match(member[len(prefix) :])
    if own is None:
        return None
    mine = blocks[int(own[0])]
    for number, block in sorted(blocks.items()):
        for suffix in dict.fromkeys((*mine, *block)):
            here, there = block.get(suffix), mine.get(suffix)
            if here != there:
                name = lambda n, shape, suffix=suffix: (
                    f"{prefix}{n}{suffix} is {list(shape)}" if shape is not None else f"{prefix}{n} has no {suffix[1:]}"
                )
                return f"{name(number, here)} and {name(int(own[0]), there)}"
    return None
