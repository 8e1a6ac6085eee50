"""Where a traced program reads the layers of its loops: in which order, and what comes from parameters alone.

The trace of a Python loop stands in program order, one block after another. A *pass* is one run over the blocks; a list
that is run twice in one loss has two.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...program import jaxpr as jx
from ...program.hoist import closure
from ...program.primitives import having

_DERIVE = having("draws", "keys")
_MOVE = (*having("moves"), "dynamic_slice")  # keys, once derived


@dataclass(frozen=True)
class Row:
    """What a variable is of an array: number `at` on its dim `dim`, which is of size 1 there if `kept`, else gone."""

    source: Any
    at: int
    dim: int = 0
    kept: bool = False


@dataclass(frozen=True)
class Pass:
    """One run over blocks `start`, `start + 1`, ...: where each is read first and last, among `Readings.others`."""

    start: int
    first: tuple[int, ...]
    last: tuple[int, ...]

    @property
    def stop(self) -> int:
        """The block after the last."""
        return self.start + len(self.first)


def numbered(eqn: Any) -> dict[Any, Row]:
    """The results of an equation that takes single rows of an array, by static number: `mask[i]`."""
    name, params = eqn.primitive.name, eqn.params
    if name == "slice":
        shape, strides = eqn.invars[0].aval.shape, params["strides"] or (1,) * eqn.invars[0].aval.ndim
        cut = list(zip(params["start_indices"], params["limit_indices"], strides, strict=True))
        dims = [d for d, n in enumerate(shape) if cut[d] != (0, n, 1)]
        if len(dims) == 1 and cut[dims[0]][1] - cut[dims[0]][0] == 1:
            return {eqn.outvars[0]: Row(eqn.invars[0], cut[dims[0]][0], dims[0], kept=True)}
    if name == "dynamic_slice" and all(map(jx.is_literal, eqn.invars[1:])):
        shape, sizes = eqn.invars[0].aval.shape, params["slice_sizes"]
        dims = [d for d, n in enumerate(shape) if sizes[d] != n]
        if len(dims) == 1 and sizes[dims[0]] == 1:
            at = int(eqn.invars[1 + dims[0]].val)
            at = min(max(at + shape[dims[0]] if at < 0 else at, 0), shape[dims[0]] - 1)
            return {eqn.outvars[0]: Row(eqn.invars[0], at, dims[0], kept=True)}
    if name == "split" and set(params["sizes"]) == {1}:
        return {v: Row(eqn.invars[0], k, params["axis"], kept=True) for k, v in enumerate(eqn.outvars)}
    return {}


@dataclass(frozen=True)
class Readings:
    """The equations of a program, sorted out by the blocks of one loop.

    Attributes:
      reads: the block of each parameter of the loop, and of what is computed from one block's parameters alone.
      own: the equations of the latter, by the variables that they define.
      pure: all that need parameters alone, of several blocks too (a norm of all weights, say) or of none.
      others: the equations that do not need the loop's parameters alone, in order.
      last: of a loop over a list from its end, the number of the block that it reads first, and counts as 0; else None.
      ahead: by `id`, equations of the program that are in none of these, and run before the loop.
    """

    reads: dict[Any, int]
    own: dict[Any, Any]
    pure: dict[Any, Any]
    others: list[Any]
    last: int | None = None
    ahead: frozenset[int] = frozenset()

    @classmethod
    def of(
        cls, eqns: Sequence[Any], params: set[Any], members: Mapping[Any, int], last: int | None = None
    ) -> "Readings":
        """Those of a program whose loop has `members`, variables of a block each."""
        number = members if last is None else {v: last - k for v, k in members.items()}
        out = cls(dict(number), {}, {}, [], last)
        alone, several = set(params), set()
        for eqn in eqns:
            atoms = [v for v in eqn.invars if not jx.is_literal(v)]
            blocks = {out.reads[v] for v in atoms if v in out.reads}
            if all(v in alone for v in atoms) and not eqn.effects:
                alone.update(eqn.outvars)
                if len(blocks) == 1:
                    out.reads.update((v, next(iter(blocks))) for v in eqn.outvars)
                    out.own.update((v, eqn) for v in eqn.outvars)
                out.pure.update((v, eqn) for v in eqn.outvars)
                if any(v in members for v in eqn.outvars):  # the loop's own `stack[i]`
                    continue
                if blocks or any(v in several for v in atoms):
                    several.update(eqn.outvars)
                    continue
            out.others.append(eqn)
        return out

    def without(self, moved: set[int]) -> "Readings":
        """These readings with some equations (by `id`) moved out of the loop."""
        others, ahead = [e for e in self.others if id(e) not in moved], self.ahead | moved
        return dataclasses.replace(self, others=others, ahead=ahead)

    @functools.cached_property
    def passes(self) -> list[Pass]:
        """The runs over two blocks or more, in order."""
        runs: list[list[tuple[int, int, int]]] = []  # block, first, last
        for at, eqn in enumerate(self.others):
            for k in sorted({self.reads[v] for v in eqn.invars if not jx.is_literal(v) and v in self.reads}):
                if runs and k == runs[-1][-1][0]:
                    runs[-1][-1] = (k, runs[-1][-1][1], at)
                elif runs and k == runs[-1][-1][0] + 1 and at > runs[-1][-1][2]:
                    runs[-1].append((k, at, at))
                else:
                    runs.append([(k, at, at)])
        return [Pass(run[0][0], tuple(a for _, a, _ in run), tuple(b for *_, b in run)) for run in runs if len(run) > 1]

    @functools.cached_property
    def _places(self) -> dict[int, int]:
        return {id(e): at for at, e in enumerate(self.others)}

    def within(self, eqn: Any, run: Pass, start: int, stop: int) -> bool:
        """Whether an equation stands between the first and the last reading of some blocks, or is of one alone."""
        at = self._places.get(id(eqn))
        return at is None or run.first[start - run.start] <= at <= run.last[stop - 1 - run.start]

    @functools.cached_property
    def tokens(self) -> list[Any]:
        """For each of `others` what two equations that do the same have in common, as far as it is cheap to say."""
        avals = lambda atoms: tuple((a.aval.shape, str(a.aval.dtype)) for a in atoms)
        params = lambda e: tuple((k, v) for k, v in e.params.items() if _plain(v))
        return [(e.primitive.name, avals(e.invars), avals(e.outvars), params(e)) for e in self.others]

    def ordered(self, part: Sequence[Any]) -> list[Any]:
        """The equations of one block: what parameters alone determine and its own need first, then the rest."""
        here = {v for e in part for v in e.outvars}
        alone = closure(jx.free(part), {v: e for v, e in self.pure.items() if v in self.own or v in here})
        first = {id(e) for e in alone}
        return [*alone, *(e for e in part if id(e) not in first)]

    def alive(self, inputs: Sequence[Any], outvars: Sequence[Any]) -> np.ndarray:
        """Bytes alive before each of `others`, and after the last, of the program's inputs and what they compute."""
        born = dict.fromkeys(inputs, -1) | {v: at for at, e in enumerate(self.others) for v in e.outvars}
        ends = {v: at for at, e in enumerate(self.others) for v in e.invars if not jx.is_literal(v)}
        ends.update((v, len(self.others)) for v in outvars if not jx.is_literal(v))
        change = np.zeros(len(self.others) + 2, np.int64)
        for v, at in born.items():
            if ends.get(v, -1) > at:
                size = v.aval.size * getattr(v.aval.dtype, "itemsize", 8)
                change[at + 1] += size
                change[ends[v] + 1] -= size
        return np.cumsum(change)[:-1]


def keys(eqns: Sequence[Any], inputs: Iterable[Any]) -> set[int]:
    """The equations (by `id`) that derive random keys from inputs of the program alone, and draw nothing."""
    given, derived, found = set(inputs), set[Any](), set[int]()
    for eqn in eqns:
        atoms = {v for v in eqn.invars if not jx.is_literal(v)}
        name = eqn.primitive.name
        if atoms and ((name in _DERIVE and atoms <= given | derived) or (name in _MOVE and atoms <= derived)):
            derived.update(eqn.outvars)
            found.add(id(eqn))
    return found


def rows(eqns: Sequence[Any], wanted: Callable[[Any], bool]) -> dict[Any, Row]:
    """What equations take by static number from arrays that are `wanted`."""
    return {v: row for eqn in eqns for v, row in numbered(eqn).items() if wanted(row.source)}


def _plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_plain, value))
    return value is None or isinstance(value, int | str | float)
