"""Write into a loop's name how often it runs, for readers of jaxprs and compiled programs. XLA does not know it.

These are loops that run one iteration or none, depending on the iteration of the loop around them:

    runs     iterations of the outer loop in which it runs, on one device
    paces    those of them in which all devices wait for it; if several such loops run at once, one of them paces
    rank     the rank that runs it, if each rank has different loops; None if all ranks run it

For example `runs_8_paces_3_of_20`: the loop runs in 8 of 20 iterations, and all devices wait for it in 3.

A loop over tokens that overflow their experts' slots has another name: `overflow_at_most_6` runs at most 6 iterations,
and none with a balanced load.
"""

import re
from fractions import Fraction
from typing import Any, NamedTuple

# `named_scope` puts the name into the name stack of the loop, and JAX appends "/while".
_NAME = re.compile(r"runs_(\d+)_paces_(\d+)_of_(\d+)(?:_on_(\d+))?(?:/while)?$")
# Under a derivative the scope is written `transpose(jvp(overflow_at_most_6))`.
_OVERFLOW = re.compile(r"overflow_at_most_(\d+)\)*(?:/while)?$")


class Share(NamedTuple):
    """How often a loop runs and paces, as shares of the outer loop's iterations, and the rank that runs it."""

    runs: Fraction
    paces: Fraction
    rank: int | None = None


def name_of(runs: int, paces: int, iterations: int, rank: int | None = None) -> str:
    """Return the name of the scope for such a loop: it runs in `runs` of the iterations, and paces in `paces`."""
    return f"runs_{runs}_paces_{paces}_of_{iterations}{'' if rank is None else f'_on_{rank}'}"


def share_of(name: str) -> Share | None:
    """Parse the scopes of a `while`, of a jaxpr's equation or of an instruction; return None for other loops.

    >>> share_of("jit(step)/while/body/runs_8_paces_3_of_20/while")
    Share(runs=Fraction(2, 5), paces=Fraction(3, 20), rank=None)
    >>> share_of("while/body/runs_8_paces_3_of_20_on_1").rank
    1
    """
    match = _NAME.search(name)
    if match is None:
        return None
    runs, paces, iterations = map(int, match.groups()[:3])
    return Share(Fraction(runs, iterations), Fraction(paces, iterations), None if match[4] is None else int(match[4]))


def overflow_name(most: int) -> str:
    """Return the name of the scope for a loop over tokens that overflow: at most `most` iterations, and rarely one."""
    return f"overflow_at_most_{most}"


def most_overflow_trips(name: str) -> int | None:
    """Parse the scopes of a `while`: return the most iterations of a loop over tokens that overflow, else None.

    >>> most_overflow_trips("jit(step)/while/body/jvp(overflow_at_most_6)/while")
    6
    """
    match = _OVERFLOW.search(name)
    return int(match[1]) if match else None


class Runs(NamedTuple):
    """How often a loop's body runs in one execution of the loop.

    Attributes:
      trips: the number of iterations; a fraction for a share of the outer loop's iterations, None if it is unknown.
      rank: the rank of a pipeline that runs the loop; None if all do.
      is_upper_bound: whether there are at most `trips` iterations, and usually none.
    """

    trips: int | Fraction | None
    rank: int | None = None
    is_upper_bound: bool = False


def runs_of(eqn: Any) -> Runs:
    """Return how often the body of a jaxpr's `scan` or `while` runs."""
    if eqn.primitive.name == "scan":
        return Runs(eqn.params["length"])
    name = str(eqn.source_info.name_stack)
    if (most_trips := most_overflow_trips(name)) is not None:
        return Runs(most_trips, is_upper_bound=True)
    share = share_of(name)
    return Runs(share.runs, share.rank) if share else Runs(None)


def times(outer: int, trips: int | Fraction) -> int:
    """Return how often a loop's body is executed, if the loop around it executes its body `outer` times."""
    # Trips may be a share: an average over the outer loop's iterations.
    return round(outer * trips)
