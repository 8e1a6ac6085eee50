"""Where the dims of some arrays go in a program: which dims of a value they are, and which equations mix them.

    w [L, d, H, h]   reshape ->  [L, d, Hh]    dims L | d | H h
                     vmap(x @ x.T) ->          dims L | d | d    d is mixed: two dims of one value are made of it

A dim of a value is a row of parts, outermost first, each a dim of a source or part of one. A dim is mixed where it is
summed, sorted, factorised, cut, or met by itself: whoever holds a part of it cannot compute alone. The other dims are
batch dims: the program does the same for each of their indices. By the table of factors, and through all programs
inside equations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from . import factors, primitives
from .environment import through
from .walk import is_literal, propagate, scan_parts, settled

LOOKED_UP = ("gather", "dynamic_slice")  # their first operand is still what it was, if only some of it


class DimPart(NamedTuple):
    """A dim of a source, or a part of it, of so many elements; `source` is -1 where it is of none."""

    source: int
    dim: int
    size: int


Dims = tuple[tuple[DimPart, ...], ...]
Mixed = set[tuple[int, int]]


class Followed(NamedTuple):
    """What is known of a value: for each source that it is an array of, by its number, its dims; and any marks, which
    all that depends on it has as well.
    """

    views: tuple[tuple[int, Dims], ...] = ()
    marks: frozenset[int] = frozenset()


NOTHING = Followed()


def source(number: int, shape: Sequence[int]) -> Followed:
    """An array that is followed."""
    return Followed(((number, tuple((DimPart(number, d, n),) for d, n in enumerate(shape))),), frozenset({number}))


class Follower:
    """Follows values through equations.

    Attributes:
      mixed: the dims (source, dim) that are mixed by what was followed so far.
    """

    def __init__(
        self,
        note: Callable[[Any, Sequence[Followed]], frozenset[int]] = lambda eqn, ins: frozenset(),
        ends: int | None = None,
    ):
        """`note` is told every equation that holds no program, with what its operands are, and returns marks for its
        results. A value with the mark `ends` is no view any more, once anything is computed of it.
        """
        self.mixed: Mixed = set()
        self._note, self._ends = note, ends

    def run(self, jaxpr: Any, ins: Sequence[Followed], decides: Followed | None = None) -> list[Followed]:
        """The results of a program, open or closed."""
        return through(jaxpr, ins, self.results, NOTHING)

    def follow(self, eqns: Iterable[Any], env: dict[Any, Followed]) -> None:
        """What the results of equations are, into `env`; what is not in it is of no source."""
        for eqn in eqns:
            ins = [NOTHING if is_literal(v) else env.get(v, NOTHING) for v in eqn.invars]
            env.update(zip(eqn.outvars, self.results(eqn, ins), strict=True))

    def results(self, eqn: Any, ins: Sequence[Followed]) -> list[Followed]:
        """What the results of one equation are."""
        if eqn.primitive.name == "scan":
            return self._scan(eqn, ins)
        outs = propagate(eqn, ins, self.run, self._join)
        return self._one(eqn, ins) if outs is None else outs

    def _scan(self, eqn: Any, ins: Sequence[Followed]) -> list[Followed]:
        """A loop takes the first dim of what it scans apart: its iterations know of each other by the carry alone."""
        parts, ys = scan_parts(eqn), []
        n, k = len(parts.consts), len(parts.carry)
        rows = [Followed(tuple((i, dims[1:]) for i, dims in x.views), x.marks) for x in ins[n + k :]]

        def step(carry: list[Followed]) -> list[Followed]:
            carried, ys[:] = (outs := self.run(parts.body, [*ins[:n], *carry, *rows]))[:k], outs[k:]
            return carried

        carry = settled(list(ins[n : n + k]), step, self._join)
        first: dict[int, tuple[DimPart, ...]] = {i: dims[0] for x in ins[n + k :] for i, dims in x.views}
        if any(x.views for x in carry):
            self.mixed |= {(p.source, p.dim) for row in first.values() for p in row}
        new = (DimPart(-1, 0, parts.length),)
        return [*carry, *(Followed(tuple((i, (first.get(i, new), *dims)) for i, dims in y.views), y.marks) for y in ys)]

    def _join(self, a: Followed, b: Followed) -> Followed:
        """Of a value that may be either of two, or is made of both."""
        views = dict(a.views)
        for i, dims in b.views:
            views[i] = tuple(self._same(p, q) for p, q in zip(views.get(i, dims), dims, strict=True))
        return Followed(tuple(sorted(views.items())), a.marks | b.marks)

    def _same(self, p: tuple[DimPart, ...], q: tuple[DimPart, ...]) -> tuple[DimPart, ...]:
        """One dim that is two rows of parts: what is of no source gives way; else both are mixed."""
        if p == q or not _sources(q):
            return p
        if not _sources(p):
            return q
        self.mixed |= _sources(p) | _sources(q)
        return p if _size(p) >= _size(q) else q

    def _one(self, eqn: Any, ins: Sequence[Followed]) -> list[Followed]:
        """Of an equation that holds no program."""
        shapes, outs = factors.shapes(eqn)
        name, known = eqn.primitive.name, primitives.of(eqn)
        marks = frozenset().union(*(x.marks for x in ins), self._note(eqn, ins))
        alone = name in LOOKED_UP or ((known.moves or known.view) and sum(map(bool, shapes)) == 1)
        if self._ends in marks and not alone:
            return [Followed((), marks)] * len(outs)
        if not known.factors:
            self.mixed |= {s for x in ins for _, dims in x.views for row in dims for s in _sources(row)}
            return [Followed((), marks)] * len(outs)
        views: list[dict[int, list[tuple[DimPart, ...]]]] = [{} for _ in outs]
        for at, x in enumerate(ins[:1] if name in LOOKED_UP else ins):
            for i, dims in x.views:
                for out, view, made in zip(outs, views, self._through(eqn, at, dims, shapes, outs), strict=True):
                    old = view.setdefault(i, [(DimPart(-1, 0, n),) for n in out])
                    view[i] = [self._same(p, q) for p, q in zip(old, made, strict=True)]
        for view in views:
            for dims in view.values():
                met = [s for row in dims for s in _sources(row)]
                self.mixed |= {s for s in met if met.count(s) > 1}
        views = [view if out else {} for view, out in zip(views, outs, strict=True)]  # a scalar has no dims to follow
        return [Followed(tuple(sorted((i, tuple(dims)) for i, dims in v.items())), marks) for v in views]

    def _through(self, eqn: Any, at: int, dims: Dims, shapes: Any, outs: Any) -> list[list[tuple[DimPart, ...]]]:
        """The dims of each result that are those of one operand; the others are of no source."""
        if eqn.primitive.name == "reshape":
            return [self._reshaped(dims, outs[0])]
        made: list[list[tuple[DimPart, ...]]] = [[(DimPart(-1, 0, n),) for n in out] for out in outs]
        free: set[int] = set()
        for factor in factors.of(eqn):
            d = factor.ins[at]
            if d is not None and not factor.reduced:
                free.add(d)
                for view, to in zip(made, factor.outs, strict=True):
                    if to is not None:
                        view[to] = dims[d]
        for d, row in enumerate(dims):
            if d not in free and shapes[at][d] > 1:
                self.mixed |= _sources(row)
                if primitives.of(eqn).moves and len(outs[0]) == len(dims):  # a part of it, or more
                    for view, out in zip(made, outs, strict=True):
                        view[d] = tuple(p._replace(size=out[d]) for p in row) if len(row) == 1 else row
        return made

    def _reshaped(self, dims: Dims, out: Sequence[int]) -> list[tuple[DimPart, ...]]:
        """The parts of all dims, one after another, dealt out to the dims of the result; what is cut is mixed."""
        left = [p for row in dims for p in row if p.size > 1]
        made: list[tuple[DimPart, ...]] = []
        for n in out:
            row: list[DimPart] = []
            while (size := _size(row)) < n and left:
                p = left.pop(0)
                rest = n // size
                if p.size <= rest:
                    row.append(p)
                    continue
                self.mixed |= _sources((p,))
                row.append(p._replace(size=rest))
                left.insert(0, p._replace(size=-(-p.size // rest)))
            made.append(tuple(row) or (DimPart(-1, 0, n),))
        return made


def _size(row: Iterable[DimPart]) -> int:
    return math.prod(p.size for p in row)


def _sources(row: Iterable[DimPart]) -> Mixed:
    return {(p.source, p.dim) for p in row if p.source >= 0}
