"""Failing programs, made small: what can be left out while they still fail is left out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

from .losses import PLAIN_ENDS, plain_start
from .programs import Block, Program, Recipe

Fails = Callable[[Program], bool]
T = TypeVar("T")


def minimal(recipe: Recipe, fails: Fails, seconds: float) -> Program:
    """The smallest program found in so much time that fails as the recipe's does: blocks go, then rules, then lines.

    `fails` is False for what is no program.
    """
    end = time.monotonic() + seconds
    recipe = _smallest(recipe, _fewer_blocks, lambda r: fails(r.program()), end)
    program = _smallest(recipe.program(), _fewer_rules, fails, end)
    return _smallest(program, _fewer_lines, fails, end)


def _smallest(found: T, smaller: Callable[[T], Iterator[T]], fails: Callable[[T], bool], end: float) -> T:
    """From one to the first smaller one that fails, and so on, until none does."""
    while True:
        for candidate in smaller(found):
            if time.monotonic() > end:
                return found
            if fails(candidate):
                found = candidate
                break
        else:
            return found


def _fewer_blocks(recipe: Recipe) -> Iterator[Recipe]:
    for blocks in _fewer(recipe.blocks):
        yield replace(recipe, blocks=blocks)
    if recipe.end not in PLAIN_ENDS:
        yield from (replace(recipe, end=end) for end in PLAIN_ENDS)
    if recipe.start != plain_start(recipe.sizes):
        yield replace(recipe, start=plain_start(recipe.sizes))


def _fewer(blocks: tuple[Block, ...]) -> Iterator[tuple[Block, ...]]:
    """Without a block, or with what is inside of it in its place, or with less inside."""
    for i, block in enumerate(blocks):
        before, after = blocks[:i], blocks[i + 1 :]
        yield (*before, *after)
        if block.inner:
            yield (*before, *block.inner, *after)
        for inner in _fewer(block.inner):
            yield (*before, replace(block, inner=inner), *after)


def _fewer_rules(program: Program) -> Iterator[Program]:
    if program.guessed:
        yield replace(program, guessed=False)
    for axis in ("tensor", "expert"):
        rules = getattr(program, axis)
        if rules:
            yield replace(program, **{axis: {}})
        for name in rules:
            yield replace(program, **{axis: {n: dim for n, dim in rules.items() if n != name}})


def _fewer_lines(program: Program) -> Iterator[Program]:
    """Without a line, or a definition; or with a line that computes nothing in the place of one that does."""
    lines = program.lines
    for i, line in enumerate(lines):
        depth = len(line) - len(line.lstrip())
        end = i + 1
        while end < len(lines) and len(lines[end]) - len(lines[end].lstrip()) > depth:
            end += 1
        for last in sorted({i + 1, end}, reverse=True):
            yield replace(program, lines=(*lines[:i], *lines[last:])).reading()
        for plain in ("x = y", "y = x", "y = h"):
            if line.lstrip().startswith(plain[:4]) and line.lstrip() != plain and "lambda" not in line[:4]:
                yield replace(program, lines=(*lines[:i], " " * depth + plain, *lines[i + 1 :])).reading()
