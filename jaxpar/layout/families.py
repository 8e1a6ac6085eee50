"""Find parameters that belong to alike blocks in a row, such as the layers of a transformer.

The blocks may be written as a Python loop (`layers/0/...`, `layers/1/...`), as Linen's `Block_0/...`, or be stacked
along a dim. A layout is made before any batch is seen, so that only paths and shapes are known here.
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
    """The parameters of alike blocks in a row.

    Attributes:
      paths: the path of each group of corresponding leaves, with `*` instead of the block's number.
      members: for each of these paths, the positions of its leaves in the tree, one per block, in order.
    """

    paths: tuple[str, ...]
    members: tuple[tuple[int, ...], ...]


def families(leaves: Sequence[tuple[str, Any]], stacked: Callable[[str], bool]) -> list[Family]:
    """Return the families among some leaves.

    Blocks are alike if they hold the same paths with the same properties. Where kinds of blocks alternate, one period
    of them counts as one block.

    Args:
      leaves: the path of each leaf, and the properties that must be equal in alike blocks (shape, dtype, ...).
      stacked: returns whether the layers of a path are stacked already; such paths are in no family.
    """
    result: list[Family] = []
    grouped_leaves: set[int] = set()
    # Outer loops first: for `blocks/0/layers/1/w`, try the number of the block before the number of the layer. Only the
    # first 8 numbers of a path are tried.
    for depth in range(8):
        # prefix -> block number -> suffix -> position of the leaf
        groups: dict[str, dict[int, dict[str, int]]] = {}
        for position, (path, _) in enumerate(leaves):
            numbers = list(_NUMBER.finditer(path))
            if position in grouped_leaves or depth >= len(numbers) or stacked(path):
                continue
            number_match = numbers[depth]
            blocks = groups.setdefault(path[: number_match.start()], {})
            blocks.setdefault(int(number_match[0]), {})[path[number_match.end() :]] = position
        for prefix, blocks in groups.items():
            signatures = {
                number: tuple(sorted((suffix, repr(leaves[i][1])) for suffix, i in block.items()))
                for number, block in blocks.items()
            }
            first, period, repeats = _longest_run(signatures)
            if repeats < 2:
                continue
            paths, members = [], []
            for offset in range(period):
                # With a period above 1, each kind of block has a separate stack: `*+0`, `*+1`, ...
                star = "*" if period == 1 else f"*+{offset}"
                for suffix in blocks[first + offset]:
                    numbers = range(first + offset, first + period * repeats, period)
                    paths.append(f"{prefix}{star}{suffix}")
                    members.append(tuple(blocks[number][suffix] for number in numbers))
            grouped_leaves.update(i for positions in members for i in positions)
            result.append(Family(tuple(paths), tuple(members)))
    return result


def _longest_run(signatures: dict[int, Any]) -> tuple[int, int, int]:
    """Return the run (first number, period, repeats) of alike blocks that covers most blocks.

    Among runs that cover equally many, the one with the shortest period is returned.
    """
    best = (0, 1, 1)
    # Blocks may alternate, such as layers with and without experts: a period is a group of blocks that repeats.
    # Shorter periods come first, and only a longer run replaces the best one.
    for period in range(1, 9):
        for first in signatures:
            repeats = 1
            # A missing block counts as unlike: its default, the int `first`, equals no signature.
            while all(
                signatures.get(first + period * repeats + i, first) == signatures.get(first + i) for i in range(period)
            ):
                repeats += 1
            if repeats > 1 and period * repeats > best[1] * best[2]:
                best = (first, period, repeats)
    return best


def unlike(leaves: Sequence[tuple[str, tuple[int, ...]]], prefix: str, member: str) -> str | None:
    """Describe the first leaf in which some block of a list differs from the block that holds `member`.

    Args:
      leaves: the model's paths and shapes.
      prefix: the common start of the paths of the list's blocks, up to their number.
      member: the path of a leaf in one of the blocks that form a family.

    Returns:
      A text such as "layers/3/w is [8, 8] and layers/0/w is [8, 4]", or None if all blocks are alike.
    """
    blocks: dict[int, dict[str, tuple[int, ...]]] = {}
    for path, shape in leaves:
        number = _NUMBER.match(path[len(prefix) :]) if path.startswith(prefix) else None
        if number is not None:
            blocks.setdefault(int(number[0]), {})[path[len(prefix) + number.end() :]] = shape
    member_number = _NUMBER.match(member[len(prefix) :])
    if member_number is None:
        return None
    reference_block = blocks[int(member_number[0])]
    for number, block in sorted(blocks.items()):
        for suffix in dict.fromkeys((*reference_block, *block)):
            shape, reference_shape = block.get(suffix), reference_block.get(suffix)
            if shape != reference_shape:
                describe = lambda n, shape, suffix=suffix: (
                    f"{prefix}{n}{suffix} is {list(shape)}" if shape is not None else f"{prefix}{n} has no {suffix[1:]}"
                )
                return f"{describe(number, shape)} and {describe(int(member_number[0]), reference_shape)}"
    return None


def largest_stack(flat: Sequence[tuple[str, tuple[int, ...], bool]]) -> frozenset[str]:
    """Return the paths of the leaves that look like the model's largest stack of layers.

    The leaves of a stack share their first dim, the number of layers, and the first part of their paths. Some of them
    may lie below a path whose leaves all share that dim. The remaining ones then have it by chance, such as
    [heads, head_dim] in a model with as many layers as heads. This is a guess. A leaf that it gets wrong is gathered
    where it is used.

    Args:
      flat: the path and shape of each leaf, and whether it is a stack of the layers of a Python loop (`Leaf.rolled`).
    """
    is_inside = inside_stack([(path, shape) for path, shape, _ in flat])
    # (first part of the path, rolled, number of layers) -> leaves
    groups: dict[Any, list[tuple[str, tuple[int, ...]]]] = {}
    for path, shape, rolled in flat:
        if rolled or may_stack(shape):
            first_part = path.partition("*")[0] if rolled else path.partition("/")[0] if "/" in path else ""
            groups.setdefault((first_part, rolled, shape[0]), []).append((path, shape))
    groups = {key: [leaf for leaf in group if is_inside(leaf[0])] or group for key, group in groups.items()}
    # The criteria, in this order. Blocks of a loop, or leaves below one path, come before a dim shared by chance (7 in
    # a convolution's [7, 7, in, out]). Stacks with matrices come before stacks of vectors alone. Then the size decides.
    # A single matrix is no candidate.
    ranking = {
        key: (
            key[1] or any(is_inside(path) for path, _ in group),
            any(key[1] or len(shape) > 2 for _, shape in group),
            sum(math.prod(shape) for _, shape in group),
        )
        for key, group in groups.items()
        if key[1] or len(group) > 1 or len(group[0][1]) > 2
    }
    largest = groups[max(ranking, key=lambda key: ranking[key])] if ranking else []
    return frozenset(path for path, _ in largest)


def inside_stack(
    flat: Sequence[tuple[str, tuple[int, ...]]], non_layer_dims: Mapping[str, int] = MappingProxyType({})
) -> Callable[[str], bool]:
    """Return a predicate on paths: does the path lie inside a stack with the layers on dim 0?

    All leaves below the path of such a stack share their first dim, and at least one of them is a stack of vectors.

    Args:
      flat: the model's paths and shapes.
      non_layer_dims: for some paths, a dim that is known not to be layers (of experts, for example).
    """
    # Matrices may share their first dim by chance. Stacked vectors, biases or scales of norms, show that it is layers.
    stack_paths = {
        name
        for name, shapes in _shapes_below(flat, non_layer_dims, 0).items()
        if len(shapes) > 1
        and all(map(may_stack, shapes))
        and len({shape[0] for shape in shapes}) == 1
        and any(len(shape) == 2 for shape in shapes)
    }
    return lambda path: any(path.startswith(f"{name}/") for name in stack_paths)


def _shapes_below(
    flat: Sequence[tuple[str, tuple[int, ...]]], non_layer_dims: Mapping[str, int], dim: int
) -> dict[str, Any]:
    """Return the shapes of the leaves below each path; () for a leaf whose `dim` is known not to be layers."""
    shapes_by_path: dict[str, list[tuple[int, ...]]] = {}
    for path, shape in flat:
        keys = path.split("/")
        for n in range(1, len(keys)):
            shapes_by_path.setdefault("/".join(keys[:n]), []).append(() if non_layer_dims.get(path) == dim else shape)
    return shapes_by_path


def on_second_dim(
    flat: Sequence[tuple[str, tuple[int, ...]]], non_layer_dims: Mapping[str, int] = MappingProxyType({})
) -> Callable[[str], bool]:
    """Return a predicate on paths: does the path lie inside a stack with the layers on dim 1?

    `nn.scan(variable_axes={"params": 1})` makes such stacks. All leaves below the path of one share their second dim.
    They differ in their number of dims, or in both their first and their last dim.

    Args:
      flat: the model's paths and shapes.
      non_layer_dims: for some paths, a dim that is known not to be layers, such as features that `nn.vmap` maps.
    """
    varies = lambda values: len({*values}) > 1
    stack_paths = {
        name
        for name, shapes in _shapes_below(flat, non_layer_dims, 1).items()
        if all(len(shape) > 1 and shape[1] <= LAYERS for shape in shapes)
        and not varies(shape[1] for shape in shapes)
        and any(len(shape) > 2 for shape in shapes)
        and (varies(map(len, shapes)) or (varies(s[0] for s in shapes) and varies(s[-1] for s in shapes)))
    }
    return lambda path: any(path.startswith(f"{name}/") for name in stack_paths)
