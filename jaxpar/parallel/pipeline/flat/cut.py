"""Where a program is cut into stages of equal time (Kim et al. 2020, torchgpipe, balances layers; here equations).

    equations   e0 e1 e2 | e3 e4 e5 e6 | e7 e8       a stage takes the time of its equations, and of the message
    message              x, skip       y, skip       that it gets: what was made before the cut and is read behind it

The time of an equation is a closed form, of its operations and of the bytes that it reads and writes. What is computed
element by element is written where a product reads it, and else computed where it is read, as XLA fuses it. No device
is asked: what counts is the ratio of a device's operations to its bytes.
"""

import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from ....program import jaxpr as jx
from ....program import primitives
from ....program.collectives import PRIMITIVES as COLLECTIVES
from ....program.walk import fold, visit

# Operations in the time of one byte of memory: an H100 SXM's 989e12 / 3.35e12 (NVIDIA's data sheet, bf16).
FLOPS = 300.0
LINK = 7.0  # bytes of memory in the time of one byte of a message: 3.35e12 / 450e9 (NVLink 4, one way)
_PLACES = 3000  # at most so many equations are looked at as the first of a stage

# How often a collective of a stage sends its larger side, forwards and backwards together, on a ring of many.
_SENDS = dict.fromkeys(("tensor_enter", "tensor_leave", "tensor_gather", "tensor_scatter"), 2)
_SENDS |= dict.fromkeys(("tensor_all_gather_replicated", "tensor_take"), 1)  # one of a pair
_TWICE = ("all-gather", "reduce-scatter", "all-to-all")
_SENDS |= {"psum": 4} | {n: 2 for n, kind in COLLECTIVES.items() if kind in _TWICE and n not in _SENDS}


def bytes_of(var: Any) -> int:
    """Of a variable's value; 8 an element where it is a key."""
    aval = var.aval
    return math.prod(getattr(aval, "shape", ())) * getattr(getattr(aval, "dtype", None), "itemsize", 8)


def _fuses(eqn: Any) -> bool:
    """Whether XLA computes it where its results are read: element by element, or a sum."""
    held = (inner for inner, _ in visit([eqn]))
    return not any(primitives.of(inner).kernel or inner.primitive.name in _SENDS for inner in held)


def _forwards(eqns: Sequence[Any], held: Sequence[Sequence[list[float]]]) -> list[float]:
    """The time of each equation's forward, in bytes of memory, from those of the programs that each holds."""
    readers: dict[Any, list[Any]] = {}
    for eqn in eqns:
        for v in eqn.invars:
            if not jx.is_literal(v):
                readers.setdefault(v, []).append(eqn)
    written: dict[Any, bool] = {}  # whether a value is written to memory
    found = []
    for eqn, inner in zip(reversed(eqns), reversed(held), strict=True):
        for v in eqn.outvars:
            mine = readers.get(v, ())
            on = [written[r.outvars[0]] if primitives.of(r).view else not _fuses(r) for r in mine]
            # A sum is a kernel of its own: what others read too is written for both.
            summed = len(mine) > 1 and any(r.primitive.name.startswith("reduce_") for r in mine)
            written[v] = summed or any(on) or not on
        found.append(_forward(eqn, any(written[v] for v in eqn.outvars), inner))
    return found[::-1]


def _forward(eqn: Any, written: bool, inner: Sequence[list[float]]) -> float:
    name, known, made = eqn.primitive.name, primitives.of(eqn), float(sum(map(bytes_of, eqn.outvars)))
    read = sum(bytes_of(v) for v in eqn.invars)
    if name in _SENDS:
        return LINK * max(made, read) * _SENDS[name] / 3  # of `times`
    if name in primitives.PRODUCTS:
        ((flops, _),) = jx.matmuls([eqn]).values()
        return max(2 * flops / FLOPS, made + read)
    if known.view:
        return 0.0
    if name.startswith(("reduce_", "arg")):
        return made + read
    if inner and not _fuses(eqn) and (known.nested or not known.kernel):  # what a scatter adds by runs within it
        return max(map(sum, inner)) * (eqn.params["length"] if name == "scan" else 1)
    return 2 * made if written or not _fuses(eqn) else 0.0  # what it is made of is read


def times(eqns: Sequence[Any]) -> np.ndarray:
    """The time of each equation, forwards and backwards: a backward takes two forwards."""
    return 3 * np.array(fold(eqns, _forwards))


def crossing(eqns: Sequence[Any]) -> np.ndarray:
    """The bytes that cross a cut before each equation: made before it and read by it, or behind it."""
    first, last = {}, {}
    for at, eqn in enumerate(eqns):
        last.update((v, at) for v in eqn.invars if not jx.is_literal(v) and v in first)
        first.update((v, at) for v in eqn.outvars)
    change = np.zeros(len(eqns) + 1)
    for v, at in last.items():
        change[first[v] + 1] += bytes_of(v)
        change[at + 1] -= bytes_of(v)
    return np.cumsum(change)[:-1]


def points(cuts: Sequence[str], stages: int, paths: Sequence[str]) -> tuple[str, ...]:
    """The modules at which a program is cut: `cuts` themselves, or, where these are the blocks of a list that each of
    the stages has, the first of each stage but the first. Raises ValueError where no one list has so many.

    >>> points(["1", "2"], 2, ["embed", "layers/0/w", "layers/1/w", "layers/2/w"])
    ('layers/1',)
    """
    if len(cuts) != stages or not all(cut.isdecimal() for cut in cuts):
        return tuple(cuts)
    lists: dict[str, set[int]] = {}
    for path in paths:
        for end in re.finditer(r"\d+(?=/|$)", path):
            lists.setdefault(path[: end.start()], set()).add(int(end[0]))
    sizes = {stem: len(found) for stem, found in lists.items() if found == set(range(len(found)))}
    counts = list(map(int, cuts))
    of = [stem for stem, size in sizes.items() if size == sum(counts)]
    outer = [stem for stem in of if not any(stem != other and stem.startswith(other) for other in of)]
    if 0 in counts:
        raise ValueError(
            f"stages={':'.join(cuts)!r} leaves a stage without blocks; give each of the {stages} one at least"
        )
    if len(outer) != 1:
        known = ", ".join(f"{size} ({stem.rstrip('/_')})" for stem, size in sizes.items() if "/" not in stem[:-1])
        raise ValueError(
            f"stages={':'.join(cuts)!r} gives {sum(counts)} blocks to {stages} stages, and {len(outer) or 'no'} lists "
            f"of modules have so many: {known or 'there is none'}; use counts that add up to one of them, or paths of "
            "modules, or cut. Layers that a scan runs are dealt out evenly (stages='layers'): ranks run as many as the "
            "fullest, and share embedding and head, so that other counts win nothing"
        )
    return tuple(f"{outer[0]}{first}" for first in itertools.accumulate(counts[:-1]))


def stages_at(
    eqns: Sequence[Any], reads: Sequence[frozenset[int]], points: Sequence[tuple[str, frozenset[int]]]
) -> list[list[Any]]:
    """The equations, in order, as groups; each but the first begins where a parameter of its point is read.

    `reads` are the numbers of the parameters that each equation reads, `points` names of modules and the numbers of
    theirs. Raises ValueError where they do not follow one another in the program.
    """
    bounds, before = [0], "the loss"
    for name, leaves in points:
        at = next((at for at, read in enumerate(reads) if read & leaves), None)
        if at is None:
            raise ValueError(f"stages: the loss reads no parameter below {name!r}; cut at a module that it runs")
        if at <= bounds[-1]:
            raise ValueError(
                f"stages: no stage can begin at {name!r}, whose parameters the loss reads no later than those at which "
                f"the stage before it begins ({before}); name modules in the order in which the loss runs them, "
                "without the first"
            )
        bounds.append(at)
        before = repr(name)
    return [list(eqns[a:b]) for a, b in itertools.pairwise([*bounds, len(eqns)])]


def stages_of(eqns: Sequence[Any], stages: int) -> list[list[Any]]:
    """The equations, in order, as so many groups, the longest as short as can be.

    The best of all cuts between equations, by dynamic programming; in a program of more than 3,000 equations, of those
    that few bytes cross.
    """
    each, messages = times(eqns), crossing(eqns)
    places = np.arange(len(eqns))
    if len(places) > _PLACES:
        places = np.sort(np.argsort(messages, kind="stable")[:_PLACES])
    if len(places) and places[0] != 0:
        places = np.concatenate([[0], places])
    sums = np.concatenate([[0.0], np.cumsum(each)])
    # The time before each place, and before the one behind it.
    starts, ends = sums[places], np.append(sums[places[1:]], sums[-1:])
    enter = 2 * LINK * messages[places]  # there as activations, back as cotangents
    n = len(places)
    best = ends - starts[0] if n else np.zeros(0)  # best[j]: the longest of the first stages, which end with place j
    back = []
    for _ in range(1, stages):
        # A stage from place i to place j, behind stages that end with place i - 1.
        new, chosen = np.full(n, np.inf), np.zeros(n, int)
        for j in range(1, n):
            here = np.maximum(best[:j], ends[j] - starts[1 : j + 1] + enter[1 : j + 1])
            chosen[j] = 1 + int(np.argmin(here))
            new[j] = here[chosen[j] - 1]
        best = new
        back.append(chosen)
    cuts, at = [], n - 1
    for chosen in reversed(back):
        at = int(chosen[at])
        cuts.insert(0, int(places[at]))
        at -= 1
    bounds = [0, *cuts, len(eqns)]
    return [list(eqns[a:b]) for a, b in itertools.pairwise(bounds)]
