"""Parameters that look like those of alike blocks in a row: written as a Python loop, `layers/0/...`, `layers/1/...`,
Linen's `Block_0/...`, or stacked. Found by paths and shapes alone, since a layout is made before any batch is seen.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from .leaves import LAYERS, may_stack

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Family:
    """Alike blocks' parameters: `members[pattern][layer]`, positions in the tree; `paths[pattern]`, numbers as `*`."""

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


def own_leaves(flat: Sequence[tuple[str, tuple[int, ...], bool]]) -> frozenset[str]:
    """The paths of the leaves that look like the model's largest stack of layers, from paths, shapes and `rolled`.

    They share their first dim, the number of layers, and the first part of their paths. Where some of these lie below
    a path all of whose leaves share that dim, the others have it by chance ([heads, head_dim], and as many layers as
    heads). The layout is made before any batch is seen, so that this is a guess; a leaf guessed wrongly is gathered
    where it is used.
    """
    inside = inside_stack([(path, shape) for path, shape, _ in flat])
    groups: dict[Any, list[tuple[str, tuple[int, ...]]]] = {}
    for path, shape, rolled in flat:
        if rolled or may_stack(shape):
            first = path.partition("*")[0] if rolled else path.partition("/")[0] if "/" in path else ""
            groups.setdefault((first, rolled, shape[0]), []).append((path, shape))
    groups = {key: [leaf for leaf in group if inside(leaf[0])] or group for key, group in groups.items()}
    # One matrix alone is no stack, and where there are stacked matrices, stacked vectors alone are none. Blocks of a
    # loop, and leaves below one path, come before a dim shared by chance: 7 in a convolution's [7, 7, in, out].
    sizes = {
        key: (
            key[1] or any(inside(path) for path, _ in group),
            any(key[1] or len(shape) > 2 for _, shape in group),
            sum(math.prod(shape) for _, shape in group),
        )
        for key, group in groups.items()
        if key[1] or len(group) > 1 or len(group[0][1]) > 2
    }
    largest = groups[max(sizes, key=lambda key: sizes[key])] if sizes else []
    return frozenset(path for path, _ in largest)


def inside_stack(
    flat: Sequence[tuple[str, tuple[int, ...]]], others: Mapping[str, int] = MappingProxyType({})
) -> Callable[[str], bool]:
    """Whether a path lies below one all of whose leaves, a stack of vectors among them, have one first dim: layers,
    unless it is one of the `others`, dims by path that are something else.
    """
    stacks = {
        name
        for name, shapes in _below(flat, others, 0).items()
        if len(shapes) > 1
        and all(map(may_stack, shapes))
        and len({shape[0] for shape in shapes}) == 1
        and any(len(shape) == 2 for shape in shapes)
    }
    return lambda path: any(path.startswith(f"{name}/") for name in stacks)


def _below(flat: Sequence[tuple[str, tuple[int, ...]]], others: Mapping[str, int], dim: int) -> dict[str, Any]:
    """The shapes of the leaves below each path; () for those whose `dim` is one of the `others`."""
    below: dict[str, list[tuple[int, ...]]] = {}
    for path, shape in flat:
        parts = path.split("/")
        for n in range(1, len(parts)):
            below.setdefault("/".join(parts[:n]), []).append(() if others.get(path) == dim else shape)
    return below


def on_second_dim(
    flat: Sequence[tuple[str, tuple[int, ...]]], others: Mapping[str, int] = MappingProxyType({})
) -> Callable[[str], bool]:
    """Whether a path lies below one all of whose leaves have one second dim, and neither one first nor one number of
    dims, or first and last: layers on dim 1, as by `nn.scan(variable_axes={"params": 1})`, unless it is one of the
    `others`, as S4's features are that `nn.vmap` put there.
    """
    varied = lambda values: len({*values}) > 1
    stacks = {
        name
        for name, shapes in _below(flat, others, 1).items()
        if all(len(shape) > 1 and shape[1] <= LAYERS for shape in shapes)
        and not varied(shape[1] for shape in shapes)
        and any(len(shape) > 2 for shape in shapes)
        and (varied(map(len, shapes)) or (varied(s[0] for s in shapes) and varied(s[-1] for s in shapes)))
    }
    return lambda path: any(path.startswith(f"{name}/") for name in stacks)
