"""Kinds of blocks, by name: functions of a `Draw` that return the lines of one way to spell one."""

from __future__ import annotations

from collections.abc import Callable

from .programs import Block, Draw

Spell = Callable[[Draw], str]
FEATURES: dict[str, Spell] = {}  # what happens to the features of each position
POSITIONS: dict[str, Spell] = {}  # what mixes positions of a row
AROUND: dict[str, Spell] = {}  # what stands around other blocks: loops, branches, rules of differentiation
INNOCENT: dict[str, Spell] = {}  # rows one by one, in ways that look as if they met
COUPLING: dict[str, Spell] = {}  # rows that meet


def kind(of: dict[str, Spell]) -> Callable[[Spell], Spell]:
    """Registers a kind of block under the function's name."""
    return lambda spell: of.setdefault(spell.__name__, spell)


def joined(g: Draw, text: str) -> str:
    """`y`, which the text computes from `x`, put into `x`, so that numbers stay small through any number of blocks."""
    ways = ["x = jnp.tanh(y)", "x = x + jnp.tanh(y)", "x = x + 0.3 * jnp.tanh(y)", "x = jnp.sin(x + y)"]
    ways += ["x = 0.5 * (x + y) * lax.rsqrt(1 + jnp.square(y))", "x = x - jnp.arctan(y)", "x = jnp.add(jnp.tanh(y), x)"]
    return f"{text.strip()}\n{g.pick(*ways)}"


def spelled(g: Draw, of: dict[str, Spell], name: str = "") -> Block:
    """A block of a kind, or of any."""
    name = name or g.pick(*of)
    text = of[name](g)
    text = joined(g, text) if of in (FEATURES, POSITIONS) else text
    return Block(name, tuple(text.strip("\n").splitlines()), g.taken())
