"""Write into a loop's name how often it runs, for readers of jaxprs and compiled programs. XLA does not know it.

Some loops run one iteration or none, depending on the iteration of the loop around them. Their names count iterations:

    runs     iterations of the outer loop in which it runs, on one device
    paces    those of them in which all devices wait for it; if several such loops run at once, one of them paces
    rank     the rank that runs it, if each rank has different loops; None if all ranks run it

For example `runs_8_paces_3_of_20`: the loop runs in 8 of 20 iterations, and all devices wait for it in 3.

A loop over tokens that overflow their experts' slots has another name: `overflow_at_most_6` runs at most 6 iterations,
and none with a balanced load.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

# `named_scope` puts the name into the name stack of the loop, and JAX appends "/while".
_NAME = re.compile(r"runs_(\d+)_paces_(\d+)_of_(\d+)(?:_on_(\d+))?(?:/while)?$")
# Under a derivative the scope is written `transpose(jvp(overflow_at_most_6))`.
_OVERFLOW = re.compile(r"overflow_at_most_(\d+)\)*(?:/while)?$")


@dataclass(frozen=True)
class Runs:
    """How often a loop's body runs in one execution of the loop.

    Attributes:
      trips: the number of iterations; a fraction for a share of the outer loop's iterations, None if it is unknown.
      paces: the share of the outer loop's iterations in which all devices wait for the loop; None if it is unknown.
      rank: the rank of a pipeline that runs the loop; None if all do.
      is_upper_bound: whether there are at most `trips` iterations, and usually none.
    """

    trips: int | Fraction | None = None
    paces: Fraction | None = None
    rank: int | None = None
    is_upper_bound: bool = False


def name_of(runs: int, paces: int, iterations: int, rank: int | None = None) -> str:
    """Return the name of the scope for such a loop: it runs in `runs` of the iterations, and paces in `paces`."""
    return f"runs_{runs}_paces_{paces}_of_{iterations}{'' if rank is None else f'_on_{rank}'}"


def overflow_name(most: int) -> str:
    """Return the name of the scope for a loop over tokens that overflow: at most `most` iterations, and rarely one."""
    return f"overflow_at_most_{most}"


def runs_by_name(name: str) -> Runs:
    """Parse the scopes of a `while`, of a jaxpr's equation or of an instruction; all is None if they have no such name.

    >>> runs_by_name("jit(step)/while/body/runs_8_paces_3_of_20_on_1/while")
    Runs(trips=Fraction(2, 5), paces=Fraction(3, 20), rank=1, is_upper_bound=False)
    >>> runs_by_name("jit(step)/while/body/jvp(overflow_at_most_6)/while")
    Runs(trips=6, paces=None, rank=None, is_upper_bound=True)
    """
    if match := _OVERFLOW.search(name):
        return Runs(int(match[1]), is_upper_bound=True)
    if not (match := _NAME.search(name)):
        return Runs()
    runs, paces, iterations = map(int, match.groups()[:3])
    return Runs(Fraction(runs, iterations), Fraction(paces, iterations), None if match[4] is None else int(match[4]))


def runs_of(eqn: Any) -> Runs:
    """Return how often the body of a jaxpr's `scan` or `while` runs."""
    is_scan = eqn.primitive.name == "scan"
    return Runs(eqn.params["length"]) if is_scan else runs_by_name(str(eqn.source_info.name_stack))


def times(outer: int, trips: int | Fraction) -> int:
    """Return how often a loop's body is executed, if the loop around it executes its body `outer` times."""
    # Trips may be a share: an average over the outer loop's iterations.
    return round(outer * trips)
