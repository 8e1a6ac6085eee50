"""Follow the dims of some arrays through a program: which dims of a value they are, and which equations mix them.

    w [L, d, H, h]   reshape ->  [L, d, Hh]    dims L | d | H h
                     vmap(x @ x.T) ->          dims L | d | d    d is mixed: two dims of one value come from it

A dim of a value is a row of parts, outermost first; each part is a dim of a source, or a piece of one. A dim is mixed
if it is summed, sorted, factorised, cut, or combined with itself: a device that has a part of it cannot compute alone.
The other dims are batch dims: the program does the same for each of their indices.

The table of factors (`factors.py`) says which dims of an equation's results are its operands' dims. Programs inside
equations are followed too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from . import factors, primitives
from .environment import through
from .walk import is_literal, propagate, scan_parts, settled

LOOKED_UP = ("gather", "dynamic_slice")  # the result is a view of the first operand, of some of its elements


class DimPart(NamedTuple):
    """A dim of a source, or a piece of it.

    Attributes:
      source: the number of the source; -1 if the part comes from none.
      dim: the dim of the source.
      size: the number of elements.
    """

    source: int
    dim: int
    size: int


Dims = tuple[tuple[DimPart, ...], ...]
Mixed = set[tuple[int, int]]


class Followed(NamedTuple):
    """The relation of a value to the sources.

    Attributes:
      views: for each source whose dims the value has, the source's number and the value's dims.
      marks: marks of this value; every value that depends on it gets them too. A source's mark is its number.
    """

    views: tuple[tuple[int, Dims], ...] = ()
    marks: frozenset[int] = frozenset()


NOTHING = Followed()


def source(number: int, shape: Sequence[int]) -> Followed:
    """Return the value of a source: an array that is followed."""
    return Followed(((number, tuple((DimPart(number, d, n),) for d, n in enumerate(shape))),), frozenset({number}))


class Follower:
    """Follow values through equations.

    Attributes:
      mixed: the dims (source, dim) that the equations so far mix.
    """

    def __init__(
        self,
        note: Callable[[Any, Sequence[Followed]], frozenset[int]] = lambda eqn, ins: frozenset(),
        ends: int | None = None,
    ):
        """Initialize a follower.

        Args:
          note: is called with every equation that holds no program, and its operands; returns marks for its results.
          ends: a mark. A value with it has no views, once anything but a move is computed from it.
        """
        self.mixed: Mixed = set()
        self._note, self._ends = note, ends

    def run(self, jaxpr: Any, ins: Sequence[Followed], decides: Followed | None = None) -> list[Followed]:
        """Return the results of a program, open or closed."""
        return through(jaxpr, ins, self.results, NOTHING)

    def follow(self, eqns: Iterable[Any], env: dict[Any, Followed]) -> None:
        """Add the results of equations to `env`; a variable that is not in it depends on no source."""
        for eqn in eqns:
            ins = [NOTHING if is_literal(v) else env.get(v, NOTHING) for v in eqn.invars]
            env.update(zip(eqn.outvars, self.results(eqn, ins), strict=True))

    def results(self, eqn: Any, ins: Sequence[Followed]) -> list[Followed]:
        """Return the results of one equation."""
        # `propagate` would give a slice the dims of the scanned array.
        if eqn.primitive.name == "scan":
            return self._scan(eqn, ins)
        outs = propagate(eqn, ins, self.run, self._join)
        return self._flat_results(eqn, ins) if outs is None else outs

    def _scan(self, eqn: Any, ins: Sequence[Followed]) -> list[Followed]:
        """Return the results of a scan, which takes the first dim off its `xs` and adds one to its `ys`.

        Iterations exchange values through the carry alone. If it depends on a source, the scanned dims are mixed.
        """
        parts, ys = scan_parts(eqn), []
        n, k = len(parts.consts), len(parts.carry)
        slices = [Followed(tuple((i, dims[1:]) for i, dims in x.views), x.marks) for x in ins[n + k :]]

        def step(carry: list[Followed]) -> list[Followed]:
            next_carry, ys[:] = (outs := self.run(parts.body, [*ins[:n], *carry, *slices]))[:k], outs[k:]
            return next_carry

        carry = settled(list(ins[n : n + k]), step, self._join)
        # In front of each source's dims, a stacked result has the dim that was scanned; a new dim if none was.
        scanned_dims: dict[int, tuple[DimPart, ...]] = {i: dims[0] for x in ins[n + k :] for i, dims in x.views}
        # A carry takes values from one index of the scanned dim to the next, so that iterations depend on each other.
        if any(x.views for x in carry):
            self.mixed |= {(p.source, p.dim) for row in scanned_dims.values() for p in row}
        new_dim = (DimPart(-1, 0, parts.length),)
        outs = (Followed(tuple((i, (scanned_dims.get(i, new_dim), *dims)) for i, dims in y.views), y.marks) for y in ys)
        return [*carry, *outs]

    def _join(self, a: Followed, b: Followed) -> Followed:
        """Join the values of a variable that may be either of two."""
        views = dict(a.views)
        # A source that only one of the two has keeps its dims.
        for i, dims in b.views:
            views[i] = tuple(self._join_dim(p, q) for p, q in zip(views.get(i, dims), dims, strict=True))
        return Followed(tuple(sorted(views.items())), a.marks | b.marks)

    def _join_dim(self, p: tuple[DimPart, ...], q: tuple[DimPart, ...]) -> tuple[DimPart, ...]:
        """Join two rows of parts that are the same dim. A row without a source gives way; other rows are mixed."""
        if p == q or not _sources(q):
            return p
        if not _sources(p):
            return q
        self.mixed |= _sources(p) | _sources(q)
        # The smaller row may be a dim of size 1, which is broadcast.
        return p if _size(p) >= _size(q) else q

    def _flat_results(self, eqn: Any, ins: Sequence[Followed]) -> list[Followed]:
        """Return the results of an equation that holds no program."""
        shapes, outs = factors.shapes(eqn)
        name, properties = eqn.primitive.name, primitives.of(eqn)
        marks = frozenset().union(*(x.marks for x in ins), self._note(eqn, ins))
        # 1. Equations whose results are no views: those after the end mark, and unknown primitives, which mix all dims.
        # An equation that only moves shows elements of one array, and computes nothing.
        only_moves = name in LOOKED_UP or ((properties.moves or properties.view) and sum(map(bool, shapes)) == 1)
        if self._ends in marks and not only_moves:
            return [Followed((), marks)] * len(outs)
        if not properties.factors:
            self.mixed |= {s for x in ins for _, dims in x.views for row in dims for s in _sources(row)}
            return [Followed((), marks)] * len(outs)
        # 2. Join the dims that each operand gives to the results. Indices of a lookup give none.
        views: list[dict[int, list[tuple[DimPart, ...]]]] = [{} for _ in outs]
        for position, x in enumerate(ins[:1] if name in LOOKED_UP else ins):
            for i, dims in x.views:
                out_dims = self._out_dims(eqn, position, dims, shapes, outs)
                for out, view, rows in zip(outs, views, out_dims, strict=True):
                    # -1 stands for no source.
                    old_rows = view.setdefault(i, [(DimPart(-1, 0, n),) for n in out])
                    view[i] = [self._join_dim(p, q) for p, q in zip(old_rows, rows, strict=True)]
        # 3. A source's dim that occurs in two dims of one value is combined with itself.
        for view in views:
            for dims in view.values():
                occurrences = [s for row in dims for s in _sources(row)]
                self.mixed |= {s for s in occurrences if occurrences.count(s) > 1}
        views = [view if out else {} for view, out in zip(views, outs, strict=True)]  # a scalar has no dims to follow
        return [Followed(tuple(sorted((i, tuple(dims)) for i, dims in v.items())), marks) for v in views]

    def _out_dims(self, eqn: Any, position: int, dims: Dims, shapes: Any, outs: Any) -> list[list[tuple[DimPart, ...]]]:
        """Return the dims of each result that come from one operand; its other dims are of no source.

        Args:
          position: which operand.
          dims: the operand's dims.
          shapes: the shapes of all operands.
          outs: the shapes of all results.
        """
        if eqn.primitive.name == "reshape":
            return [self._reshape(dims, outs[0])]
        out_dims: list[list[tuple[DimPart, ...]]] = [[(DimPart(-1, 0, n),) for n in out] for out in outs]
        # A dim with a factor goes to the results as it is. A reduced dim is in no result, and counts as mixed below.
        free: set[int] = set()
        for factor in factors.of(eqn):
            d = factor.ins[position]
            if d is not None and not factor.reduced:
                free.add(d)
                for view, out_dim in zip(out_dims, factor.outs, strict=True):
                    if out_dim is not None:
                        view[out_dim] = dims[d]
        for d, row in enumerate(dims):
            if d not in free and shapes[position][d] > 1:
                self.mixed |= _sources(row)
                # A slice or a concatenation: the dim has some of the elements, or more, and stays in its place.
                if primitives.of(eqn).moves and len(outs[0]) == len(dims):
                    for view, out in zip(out_dims, outs, strict=True):
                        view[d] = tuple(p._replace(size=out[d]) for p in row) if len(row) == 1 else row
        return out_dims

    def _reshape(self, dims: Dims, out: Sequence[int]) -> list[tuple[DimPart, ...]]:
        """Deal the parts of all dims, one after another, out to the dims of the result; a part that is cut is mixed."""
        # Parts of size 1 have no place in a reshape.
        remaining = [p for row in dims for p in row if p.size > 1]
        out_dims: list[tuple[DimPart, ...]] = []
        for n in out:
            row: list[DimPart] = []
            while (size := _size(row)) < n and remaining:
                p = remaining.pop(0)
                missing = n // size
                if p.size <= missing:
                    row.append(p)
                    continue
                # The outer piece completes this dim, and the inner one begins the next.
                self.mixed |= _sources((p,))
                row.append(p._replace(size=missing))
                remaining.insert(0, p._replace(size=-(-p.size // missing)))
            out_dims.append(tuple(row) or (DimPart(-1, 0, n),))
        return out_dims


def _size(row: Iterable[DimPart]) -> int:
    """Return the size of a dim, from its parts."""
    return math.prod(p.size for p in row)


def _sources(row: Iterable[DimPart]) -> Mixed:
    """Return the dims of sources, (source, dim), from which a dim comes."""
    return {(p.source, p.dim) for p in row if p.source >= 0}
