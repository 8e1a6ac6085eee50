"""Random programs and random losses, each by a seed and a number."""

from __future__ import annotations

import random
from dataclasses import replace

from . import couplings, features, losses, operations, positions
from .around import around, blocks
from .parity import STRATEGIES
from .programs import Block, Draw, Recipe, Sizes, draw_rules
from .registry import COUPLING, FEATURES, INNOCENT, POSITIONS, spelled

# What may stand around blocks that look at the rows of their block.
_AROUND_ROWS = ("scanned", "listed", "recomputed", "called", "differentiated")
_ = features, operations, positions  # their blocks are registered


def program(seed: int, number: int) -> tuple[Recipe, list[tuple[str, int]]]:
    """A program, and strategies for it with their numbers of devices. Its rows do not know of each other."""
    chosen = random.Random(f"program {seed} {number}")
    # Sizes are often alike: who takes a dim for another by its size is found out.
    sizes = Sizes(8, chosen.choice([8, 8, 16]), chosen.choice([8, 8, 16]), chosen.choice([8, 16, 24]))
    g = Draw(chosen, sizes)
    start = losses.start(g)
    inside = blocks(g, chosen.choice([1, 1, 2, 2, 3]))
    recipe = Recipe(start, inside, losses.end(g, words=start.name == "lookup"), sizes, number)
    shapes = recipe.program().shapes
    tensor, expert = draw_rules(chosen, shapes, 0.6), draw_rules(chosen, shapes, 0.4)
    recipe = replace(recipe, tensor=tensor, expert=expert, guessed=chosen.random() < 0.2)
    names = recipe.names()

    def fits(strategy: str) -> bool:
        """Seldom the experts of a program without any, and the layers of one without layers."""
        if "expert" in strategy and "experts" not in names:
            return chosen.random() < 0.15
        return (
            "layers" not in strategy or not {"scanned", "listed", "indexed"}.isdisjoint(names) or chosen.random() < 0.15
        )

    strategies = [(strategy, devices) for strategy, devices in STRATEGIES if fits(strategy)]
    return recipe, chosen.sample(strategies, 4)


def loss(seed: int, number: int) -> tuple[Recipe, bool, tuple[str, int]]:
    """A loss; whether nothing in it is meant to couple rows; a strategy and its number of devices."""
    chosen = random.Random(f"loss {seed} {number}")
    sizes = Sizes(16, 8, 8, 16)
    g = Draw(chosen, sizes)
    start = losses.plain_start(g.sizes) if chosen.random() < 0.7 else losses.start(g)
    innocent = chosen.random() < 0.5
    inside = [spelled(g, g.pick(FEATURES, POSITIONS)) for _ in range(chosen.choice([0, 0, 0, 1]))]
    by_end = chosen.random() < 0.4
    if innocent or not by_end:
        inside += [_wrapped(g, spelled(g, INNOCENT if innocent else COUPLING))]
    if innocent and chosen.random() < 0.4:
        inside.append(spelled(g, INNOCENT))
    end = couplings.coupled_end(g, innocent) if innocent or by_end else losses.end(g, words=start.name == "lookup")
    chosen.shuffle(inside)
    strategy = chosen.choice([("data=4", 4), ("data=2,microbatches=2", 2), ("fsdp=2", 2), ("data=8", 8)])
    return Recipe(start, tuple(inside), end, sizes, number), innocent, strategy


def _wrapped(g: Draw, block: Block) -> Block:
    return around(g, g.pick(*_AROUND_ROWS), (block,)) if g.chance(0.15) else block
