"""Cut a program into stages of equal time, between equations (torchgpipe, Kim et al. 2020, balances layers instead).

    equations   e0 e1 e2 | e3 e4 e5 e6 | e7 e8
    stage           0    |      1      |   2          time of a stage: its equations, and the message that it receives
    message           x, skip       y, skip           values made before the cut and read after it

    minimize over cuts    max over stages (sum of times(eqns of the stage) + 2 LINK crossing(its first equation))

`stages_of` solves this by dynamic programming; `stages_at` cuts at modules that the user names.

Times are in bytes of memory traffic. They are closed forms of an equation's operations and of the bytes that it reads
and writes: no device is measured, and only the ratio of operations to bytes matters. Elementwise equations are counted
as XLA fuses them: a value is written if a matmul or another kernel reads it, else it is computed where it is read.
"""

import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from ....hardware.hardware import KINDS
from ....program import jaxpr as jx
from ....program import primitives
from ....program.collectives import PRIMITIVES as COLLECTIVES
from ....program.walk import fold, visit

# A program is cut as for an H100 whatever it is compiled for, so that its stages are the same everywhere.
_H100 = KINDS["H100"]
assert _H100.memory_bandwidth is not None
assert _H100.link_bandwidth is not None
FLOPS = _H100.peaks["bf16"] / _H100.memory_bandwidth  # operations in the time of one byte of memory: 295
LINK = _H100.memory_bandwidth / _H100.link_bandwidth  # bytes of memory in the time of one byte of a message: 7.4
# The search is quadratic in the number of places at which a stage may begin. Longer programs keep the places that the
# fewest bytes cross.
_MAX_PLACES = 3000

# How often a collective sends its larger side, forward and backward together, on a ring of many ranks. An all-reduce
# sends it twice; an all-gather, a reduce-scatter and an all-to-all send it once. So does the backward, if it sends.
_SENDS = dict.fromkeys(("tensor_enter", "tensor_leave", "tensor_all_gather", "tensor_reduce_scatter"), 2)
_SENDS |= dict.fromkeys(("tensor_all_gather_replicated", "tensor_take"), 1)  # one way only
_SENT_TWICE = ("all-gather", "reduce-scatter", "all-to-all")
_SENDS |= {"psum": 4} | {n: 2 for n, kind in COLLECTIVES.items() if kind in _SENT_TWICE and n not in _SENDS}


def bytes_of(var: Any) -> int:
    """Return the bytes of a variable's value, with 8 bytes per random key."""
    aval = var.aval
    return math.prod(getattr(aval, "shape", ())) * getattr(getattr(aval, "dtype", None), "itemsize", 8)


def _fuses(eqn: Any) -> bool:
    """Return whether XLA fuses an equation into its readers: it is elementwise or a sum, nested equations included."""
    eqns = (nested for nested, _ in visit([eqn]))
    return not any(primitives.of(nested).kernel or nested.primitive.name in _SENDS for nested in eqns)


def _forward_times(eqns: Sequence[Any], nested_times: Sequence[Sequence[list[float]]]) -> list[float]:
    """Return the time of each equation's forward, in bytes of memory.

    Args:
      nested_times: for each equation, the times of the equations in each of its nested programs.
    """
    readers = jx.readers(eqns)

    # From the last equation to the first: whether a value is written depends on its readers.
    is_written: dict[Any, bool] = {}
    times_reversed = []
    for eqn, inner in zip(reversed(eqns), reversed(nested_times), strict=True):
        for v in eqn.outvars:
            v_readers = readers.get(v, ())
            # A view, such as a reshape, is written if its result is.
            needs_write = [is_written[r.outvars[0]] if primitives.of(r).view else not _fuses(r) for r in v_readers]
            # A sum is a kernel: a value that it shares with other readers is written for both.
            is_summed = len(v_readers) > 1 and any(r.primitive.name.startswith("reduce_") for r in v_readers)
            is_written[v] = is_summed or any(needs_write) or not needs_write
        times_reversed.append(_forward_time(eqn, any(is_written[v] for v in eqn.outvars), inner))
    return times_reversed[::-1]


def _forward_time(eqn: Any, is_written: bool, inner: Sequence[list[float]]) -> float:
    """Return the time of one equation's forward, in bytes of memory; the arguments are as in `_forward_times`."""
    name, primitive, written_bytes = eqn.primitive.name, primitives.of(eqn), float(sum(map(bytes_of, eqn.outvars)))
    read_bytes = sum(bytes_of(v) for v in eqn.invars)
    if name in _SENDS:
        return LINK * max(written_bytes, read_bytes) * _SENDS[name] / 3  # `times` multiplies by 3
    if name in primitives.PRODUCTS:
        ((flops, _),) = jx.matmuls([eqn]).values()
        return max(2 * flops / FLOPS, written_bytes + read_bytes)
    if primitive.view:
        return 0.0
    if name.startswith(("reduce_", "arg")):
        return written_bytes + read_bytes
    # A loop or a call takes the time of its longest program. A scatter's nested program is the addition in its kernel.
    if inner and not _fuses(eqn) and (primitive.nested or not primitive.kernel):
        return max(map(sum, inner)) * (eqn.params["length"] if name == "scan" else 1)
    # A fused equation is free, unless it writes its result: then it reads about as much.
    return 2 * written_bytes if is_written or not _fuses(eqn) else 0.0


def times(eqns: Sequence[Any]) -> np.ndarray:
    """Return the time of each equation, forward and backward together: a backward takes as long as two forwards."""
    return 3 * np.array(fold(eqns, _forward_times))


def crossing(eqns: Sequence[Any]) -> np.ndarray:
    """Return the bytes that cross a cut before each equation: values made before it and read by it or after it."""
    first, last = {}, {}  # variable -> the equation that makes it, the last equation that reads it
    for index, eqn in enumerate(eqns):
        last.update((v, index) for v in eqn.invars if not jx.is_literal(v) and v in first)
        first.update((v, index) for v in eqn.outvars)
    # The running sum of changes: a value adds its bytes after its equation, and removes them after its last reader.
    change = np.zeros(len(eqns) + 1)
    for v, index in last.items():
        change[first[v] + 1] += bytes_of(v)
        change[index + 1] -= bytes_of(v)
    return np.cumsum(change)[:-1]


def points(cuts: Sequence[str], stages: int, paths: Sequence[str]) -> tuple[str, ...]:
    """Return the modules at which all stages but the first begin.

    Args:
      cuts: paths of modules, returned as they are; or for each stage a number of blocks of one list.
      paths: the paths of all parameters.

    Raises:
      ValueError: a stage has no blocks, or not exactly one list of modules has as many blocks as the numbers add up to.

    >>> points(["1", "2"], 2, ["embed", "layers/0/w", "layers/1/w", "layers/2/w"])
    ('layers/1',)
    """
    if len(cuts) != stages or not all(cut.isdecimal() for cut in cuts):
        return tuple(cuts)

    # 1. Lists of modules: stems such as "layers/" whose numbers are 0, 1, 2, ...
    lists: dict[str, set[int]] = {}
    for path in paths:
        for end in re.finditer(r"\d+(?=/|$)", path):
            lists.setdefault(path[: end.start()], set()).add(int(end[0]))
    sizes = {stem: len(numbers) for stem, numbers in lists.items() if numbers == set(range(len(numbers)))}

    # 2. The list with the right number of blocks. Lists inside another list that has it do not count.
    counts = list(map(int, cuts))
    stems = [stem for stem, size in sizes.items() if size == sum(counts)]
    outer = [stem for stem in stems if not any(stem != prefix and stem.startswith(prefix) for prefix in stems)]
    if 0 in counts:
        raise ValueError(
            f"stages={':'.join(cuts)!r} leaves a stage without blocks; give each of the {stages} stages one at least"
        )
    if len(outer) != 1:
        choices = ", ".join(f"{size} ({stem.rstrip('/_')})" for stem, size in sizes.items() if "/" not in stem[:-1])
        raise ValueError(
            f"stages={':'.join(cuts)!r} gives {sum(counts)} blocks to {stages} stages, and {len(outer) or 'no'} lists "
            f"of modules have so many: {choices or 'there is none'}; use counts that add up to one of them, or paths "
            "of modules, or stages='cut'. Layers that a scan runs are dealt out evenly (stages='layers'): ranks run as "
            "many as the fullest, and share embedding and head, so that other counts win nothing"
        )
    return tuple(f"{outer[0]}{first}" for first in itertools.accumulate(counts[:-1]))


def stages_at(
    eqns: Sequence[Any], reads: Sequence[frozenset[int]], points: Sequence[tuple[str, frozenset[int]]]
) -> list[list[Any]]:
    """Group the equations into stages that begin at given modules.

    Args:
      reads: for each equation, the numbers of the parameters that it reads.
      points: for each stage but the first, the name of its first module and the numbers of the module's parameters.

    Returns:
      The equations of each stage: a stage begins at the first equation that reads a parameter of its module.

    Raises:
      ValueError: the program does not read a module's parameters, or not in the order of `points`.
    """
    bounds, last_name = [0], "the loss"
    for name, leaves in points:
        index = next((index for index, read in enumerate(reads) if read & leaves), None)
        if index is None:
            raise ValueError(f"stages: the loss reads no parameter below {name!r}; cut at a module that it runs")
        if index <= bounds[-1]:
            raise ValueError(
                f"stages: no stage can begin at {name!r}, whose parameters the loss reads no later than those at which "
                f"the stage before it begins ({last_name}); name modules in the order in which the loss runs them, "
                "without the first"
            )
        bounds.append(index)
        last_name = repr(name)
    return [list(eqns[a:b]) for a, b in itertools.pairwise([*bounds, len(eqns)])]


def stages_of(eqns: Sequence[Any], stages: int) -> list[list[Any]]:
    """Group the equations into stages so that the longest stage is as short as possible.

    This is the optimum over all cuts between equations, by dynamic programming: for stages k = 1, 2, ...

        best_k[j] = min over i <= j of max(best_(k-1)[i - 1], time of the stage from place i to place j)

    In a program of more than 3,000 equations, it is the optimum over the 3,000 places that the fewest bytes cross.

    Returns:
      The equations of each stage, in order.
    """
    # 1. The places at which a stage may begin, the first equation among them.
    eqn_times, message_bytes = times(eqns), crossing(eqns)
    places = np.arange(len(eqns))
    if len(places) > _MAX_PLACES:
        places = np.sort(np.argsort(message_bytes, kind="stable")[:_MAX_PLACES])
    if len(places) and places[0] != 0:
        places = np.concatenate([[0], places])

    # 2. A stage from place i to place j takes ends[j] - starts[i] + enter[i].
    sums = np.concatenate([[0.0], np.cumsum(eqn_times)])
    starts, ends = sums[places], np.append(sums[places[1:]], sums[-1:])
    enter = 2 * LINK * message_bytes[places]  # activations one way, cotangents the other

    # 3. best[j]: the longest of the first k stages, which end with place j, for the best cuts between them.
    n = len(places)
    best = ends - starts[0] if n else np.zeros(0)
    first_places = []
    for _ in range(1, stages):
        longer, first_place = np.full(n, np.inf), np.zeros(n, int)
        for j in range(1, n):
            longest = np.maximum(best[:j], ends[j] - starts[1 : j + 1] + enter[1 : j + 1])
            first_place[j] = 1 + int(np.argmin(longest))
            longer[j] = longest[first_place[j] - 1]
        best = longer
        first_places.append(first_place)

    # 4. From the last stage to the first, the places at which stages begin.
    cuts, place = [], n - 1
    for first_place in reversed(first_places):
        place = int(first_place[place])
        cuts.insert(0, int(places[place]))
        place -= 1
    bounds = [0, *cuts, len(eqns)]
    return [list(eqns[a:b]) for a, b in itertools.pairwise(bounds)]
