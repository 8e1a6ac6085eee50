"""One process of the run: programs and losses of some numbers, as lines of JSON on standard output."""

from __future__ import annotations

import collections
import functools
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from . import coupled, generate, parity
from .couplings import FAR_FETCHED
from .minimise import minimal
from .parity import Invalid, Outcome
from .printed import runnable
from .programs import Program, Recipe

LOSSES = 4  # for each program, which has as many strategies
ALIKE = 2  # failures alike that are made small


def work(seed: int, numbers: Iterator[int], until: float, minimise: float) -> None:
    """Each number's program under its strategies, and its losses, until the time is up.

    Args:
      minimise: seconds for making a failure small.
    """
    alike: collections.Counter[str] = collections.Counter()

    def failed(
        part: str, recipe: Recipe, strategy: str, devices: int, found: Outcome, fails: Callable[[Program], bool]
    ) -> None:
        title = f"{found.kind}: {strategy}: {' '.join(found.said.split())[:200]}"
        say(part=part, failure=title, program=runnable(recipe.program(), title, strategy, devices))
        alike[kind := f"{found.kind} {parity.category(found.said)}"] += 1
        if alike[kind] <= ALIKE:
            program = minimal(recipe, fails, minimise)
            say(part=part, failure=title, minimal=True, program=runnable(program, title, strategy, devices))

    for number in numbers:
        if time.time() > until:
            break
        programs(seed, number, until, failed)
        for i in range(LOSSES):
            if time.time() < until:
                losses(seed, LOSSES * number + i, failed)
        jax.clear_caches()
    say(done=True)


def programs(seed: int, number: int, until: float, failed: Callable[..., None]) -> None:
    """A program under its strategies."""
    recipe, strategies = generate.program(seed, number)
    program = recipe.program()
    say(at=f"program {number} on one device", program=program.source)
    try:
        one = parity.OneDevice(program)
    except Invalid as error:
        say(part="strategies", row="no program", kind="invalid", said=str(error)[:300], program=program.source)
        return
    for strategy, devices in strategies:
        if time.time() > until:
            return
        say(at=f"program {number} under {strategy}", program=runnable(program, strategy, strategy, devices))
        found = parity.outcome(program, strategy, devices, one)
        category = parity.category(found.said) if found.kind == parity.REFUSED else found.said[:300]
        say(part="strategies", row=parity.family(strategy), kind=found.kind, said=category)
        if found.kind in parity.FAILURES:
            failed("strategies", recipe, strategy, devices, found, functools.partial(fails, strategy, devices, found))


def fails(strategy: str, devices: int, found: Outcome, smaller: Program) -> bool:
    """Whether a smaller program fails alike under a strategy."""
    return same(found, lambda: parity.outcome(smaller, strategy, devices))


def losses(seed: int, number: int, failed: Callable[..., None]) -> None:
    """A loss, and whether its rows are coupled."""
    recipe, innocent, (strategy, devices) = generate.loss(seed, number)
    program = recipe.program()
    say(at=f"loss {number}", program=program.source)
    try:
        truth, found = coupled.verdict(program, strategy, devices)
    except Invalid as error:
        say(part="losses", row="no program", kind="invalid", said=str(error)[:300], program=program.source)
        return
    # A coupling by its text that no number shows, as a maximum that is never reached, is neither.
    row = "coupled" if truth else "innocent" if innocent else "coupled, unfelt"
    row += ", far-fetched" * (row == "innocent" and FAR_FETCHED in recipe.names())
    category = parity.category(found.said) if found.kind == parity.REFUSED else found.said[:300]
    say(part="losses", row=row, kind=found.kind, said=category)
    wrong = found.kind == parity.CRASHED or (found.kind == coupled.SILENT and truth)
    wrong = wrong or (found.kind == parity.REFUSED and row == "innocent")
    if wrong:

        def now(smaller: Program) -> Outcome:
            outcome = coupled.said(smaller, strategy, devices)
            alike = outcome.kind == found.kind and coupled.couples(smaller) == truth
            return outcome if alike else Outcome("otherwise")

        title = Outcome(f"{'coupled' if truth else 'innocent'}, {found.kind}", found.said)
        failed("losses", recipe, strategy, devices, title, lambda smaller: same(found, lambda: now(smaller)))


def same(found: Outcome, again: Callable[[], Outcome]) -> bool:
    """Whether a smaller program fails alike: in the same way, and where it crashes with the same words."""
    try:
        outcome = again()
    except Invalid:
        return False
    alike = found.kind != parity.CRASHED or parity.category(outcome.said)[:60] == parity.category(found.said)[:60]
    return outcome.kind == found.kind and alike


def say(**record: Any) -> None:
    """A line for the parent."""
    print(json.dumps(record), flush=True)
