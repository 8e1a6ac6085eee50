"""Loops of one iteration or none, in some iterations of the loop that they are in: how often is written in their name,
for whoever reads the program. XLA does not know.

    runs     iterations of the outer loop in which it runs, on one device
    paces    those in which it is what all devices wait for: one of the loops that run then on one of them
    rank     the rank that runs it, where ranks have loops of their own; None where all have it
"""

import re
from fractions import Fraction
from typing import NamedTuple

OVERFLOW = "where_tokens_overflow"  # the scope of a conditional that computes what finds no slot in experts' buffers

_NAME = re.compile(r"runs_(\d+)_paces_(\d+)_of_(\d+)(?:_on_(\d+))?(?:/while)?$")


class Share(NamedTuple):
    """What a loop's name says of it, as parts of the iterations of the loop around it, and the rank that has it."""

    runs: Fraction
    paces: Fraction
    rank: int | None = None


def name_of(runs: int, paces: int, of: int, rank: int | None = None) -> str:
    """The scope in which such a loop stands."""
    return f"runs_{runs}_paces_{paces}_of_{of}{'' if rank is None else f'_on_{rank}'}"


def share_of(name: str) -> Share | None:
    """From the names of scopes in which a `while` stands, of a jaxpr's equation or of an instruction; None of others.

    >>> share_of("jit(step)/while/body/runs_8_paces_3_of_20/while")
    Share(runs=Fraction(2, 5), paces=Fraction(3, 20), rank=None)
    >>> share_of("while/body/runs_8_paces_3_of_20_on_1").rank
    1
    """
    found = _NAME.search(name)
    if found is None:
        return None
    runs, paces, of = map(int, found.groups()[:3])
    return Share(Fraction(runs, of), Fraction(paces, of), None if found[4] is None else int(found[4]))


def times(outer: int, trips: int | Fraction) -> int:
    """Executions of a loop's body, from those of the loop around it."""
    return round(outer * trips)
