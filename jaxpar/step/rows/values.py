"""What a value of a traced loss has to do with the rows of the batch.

A step runs the loss on blocks of rows (one replica's rows of one microbatch) and adds up `total` and `count` of the
blocks. That is the loss of all rows if and only if both are sums over rows of something that a row alone decides, times
the same power of the number n of rows in a block. So each value is one of

- `whole`: no row reaches it, or those of all replicas do (`jp.all_rows`); it is proportional to n^power;
- `rows`: each element belongs to one row (`at` says to which), follows from that row alone by the same function for
  all, and is proportional to n^power. After a sort over rows each element is still one row's, and the other rows decide
  which (`places`, `sorts.py`). With `plus` a mean over rows has been added, which is right as long as all that follows
  is linear;
- `sum`: a sum over rows of such elements, times n^power: power 0 is a sum, -1 a mean. What is linear in it is one too.
  A whole value c is the sum of c / n, so sums and whole values may be added where the powers agree. Along the dims
  that it `varies` in it is the sum of some rows, and is one of all when these are summed too;
- `coupled`: it depends on which rows share a block. `notes` say why, and travel with values of every kind, so that
  those which reach the loss are known.

What is not known is none of the first: it is coupled, or has the power `ODD`, with a note of its line.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ...program import jaxpr as jx
from .labels import NOWHERE, Labels, alike
from .numbers import Number

ODD = math.nan  # a power: of what depends on the number of rows and is no power of it, or in a way that is not known
# From here on, numbers of tokens in an order of their own, as in buffers of experts; from each further multiple on,
# numbers of the places of another sort.
ROUTED = 1 << 40
SMALL = 1e-4  # a constant below this beside a sum guards a division; what it adds is rounding

UNNAMED = "a function of JAX"  # in place of a line, where none is the user's
GATHER = "give it jp.all_rows(x) for one of them"
FROM_ALL = "compute it from jp.all_rows(x)"
PICKS = f"picks rows by computed indices; {FROM_ALL}"
SOME = "takes some of the rows"
RATIO = "divides one sum over rows by another; return jp.Mean(total, count), or use sums of jp.all_rows(x)"
RATIOS = (  # what has been divided on each replica, and then averaged over them
    "averages over replicas what each divides by its own number of rows, as BatchNorm does with mask=; leave mask= "
    "out, or divide sums over jp.all_rows(x) and jp.all_rows(mask) in a norm of your own (docs/losses.md)"
)
SCALES = "make means of both, or multiply what is no sum by the count of jp.Mean"
NUMBER = "what depends on how many rows a block has, fewer than the batch; use a number that is given"


@dataclass(frozen=True)
class Note:
    """An equation that couples rows, or may: its line, what it does, and what to write.

    Attributes:
      backward: whether it is in a derivative.
      scale: whether no rows meet, and the result is no mean over them but a sum, say.
      of_nan: whether rows meet only if a later line tells NaN from numbers.
    """

    line: str
    what: str
    certain: bool = True
    backward: bool = False
    scale: bool = False
    of_nan: bool = False

    @classmethod
    def at(cls, eqn: Any, what: str, certain: bool = True) -> Note:
        """A note on an equation."""
        return cls(jx.where(eqn) or UNNAMED, what, certain)


@dataclass(frozen=True)
class Value:
    """One value of the program; see the module.

    Attributes:
      kind: "whole", "rows", "sum" or "coupled".
      at: of rows, the row of each element.
      power: see the module; `ODD` if there is none.
      plus: of rows, whether a mean over rows has been added.
      places, lines: of rows that have been sorted, how many places a line of the sort has, and how many lines were
        sorted side by side; 0 and 1 of other rows. `at` then numbers the elements, place by place.
      varies: of a whole value, the dims along which its elements may differ; of a sum, those along which it has some
        rows each.
      keyed: whether it follows from the block's own key.
      number: of a whole value, what it is, if that follows from sizes and literals; of others, if nothing is NaN.
      columns: of indices that are rows, what is known of their columns.
      root: of a coupled value that is the root of a sum over rows, that sum.
      pairs: of a coupled value, whether each element is of two rows, of which those on a diagonal may be one.
      part: of a coupled value that is a sum over some of the rows, these rows.
      pick: what to say of the equation that has picked rows, or drawn numbers, should that couple rows.
      notes: what couples rows on the way to it.
    """

    kind: str = "whole"
    at: Labels = NOWHERE
    power: float = 0
    plus: bool = False
    places: int = 0
    lines: int = 1
    varies: frozenset[int] = frozenset()
    keyed: bool = False
    number: Number | None = field(default=None, compare=False)
    columns: tuple[tuple[int, Number], ...] = field(default=(), compare=False)
    root: Value | None = None
    pairs: bool = False
    part: frozenset[int] = frozenset()
    pick: Note | None = None
    notes: frozenset[Note] = frozenset()

    @property
    def routed(self) -> bool:
        """Whether rows are tokens in an order of their own: each slot has at most one row's."""
        return self.kind == "rows" and self.at.array.flat[0] >= ROUTED

    @property
    def order(self) -> Labels:
        """Of rows, the place of each element: that of its row in the block, or the one that a sort has given it."""
        return Labels(self.at.array % ROUTED // self.lines) if self.places else self.at

    def of_all(self, rows: int) -> bool:
        """Whether each of all rows has as many elements; of sorted rows, each place of a line as many as another."""
        if not self.places:
            return self.at.equally(rows)
        found, often = np.unique(self.at.array % ROUTED, return_counts=True)
        lines, line_of = np.unique(found % self.lines, return_inverse=True)
        if len(found) != len(lines) * self.places:
            return False
        often = often[np.argsort(line_of, kind="stable")].reshape(len(lines), self.places)
        return bool((often == often[:, :1]).all())

    def column(self, c: int) -> list[np.ndarray]:
        """Column c of indices, of the program and of its twin, where it is known."""
        number, c = (self.number, c) if self.kind == "whole" else (dict(self.columns).get(c), 0)
        pair = () if number is None else number.pair
        return [a[..., c] if np.ndim(a) else np.asarray(a) for a in pair if a is not None]

    @property
    def known(self) -> tuple[Any, ...]:
        """All that is known of it, also what its equality leaves out."""
        columns = [(c, number.key) for c, number in self.columns]
        return (self, self.number and self.number.key, self.root and self.root.known, *columns)

    @property
    def scalar(self) -> float | None:
        """What all elements of a whole value are, where that is known."""
        if self.kind != "whole" or self.number is None or not self.number.uniform:
            return None
        return float(np.real(self.number.pair[0]))

    @property
    def zero(self) -> bool:
        """Whether a whole value is 0 everywhere (or NaN), as far as that is known."""
        return self.scalar is not None and (self.scalar == 0 or math.isnan(self.scalar))

    @property
    def negligible(self) -> bool:
        """Whether it is 0, or a constant that guards a division."""
        return self.zero or (self.scalar is not None and abs(self.scalar) <= SMALL)

    @property
    def unknown(self) -> bool:
        """Whether notes say already how it depends on the number of rows."""
        return math.isnan(self.power) and not all(note.of_nan for note in self.notes)

    def noted(self, *notes: Note) -> Value:
        """The same with further notes."""
        return self if self.notes.issuperset(notes) else replace(self, notes=self.notes.union(notes))

    def plain(self, **changes: Any) -> Value:
        """The same, changed, without what is known of single elements."""
        return replace(
            self, **{"number": None, "columns": (), "root": None, "pairs": False, "part": frozenset()} | changes
        )


def coupled(values: Iterable[Value], *notes: Note) -> Value:
    """What depends on the block's rows, for the reasons that the values have and these."""
    return Value("coupled", power=ODD, notes=reasons(values).union(notes))


def reasons(values: Iterable[Value]) -> frozenset[Note]:
    """The notes of some values."""
    return frozenset().union(*(v.notes for v in values))


def picks(values: Iterable[Value]) -> Note | None:
    """The first pick of some values."""
    return next((x.pick for x in values if x.pick is not None), None)


def mixed(eqn: Any, ins: Sequence[Value], what: str = "", certain: bool = True) -> Value:
    """A result that is not linear in what was summed over rows."""
    if some := [x for x in ins if x.kind == "sum" and x.varies]:
        return coupled(ins, *(x.pick or some_rows(eqn) for x in some))
    what = what or eqn.primitive.name + " of"
    return coupled(ins, Note.at(eqn, f"{what} a sum or mean over rows; {FROM_ALL}", certain))


def others(eqn: Any, ins: Sequence[Value], what: str = "") -> Value:
    """A result of rows and other rows."""
    pick = picks(x for x in ins if x.kind != "whole")
    write = GATHER if what else f"{GATHER}; if a row was to meet itself alone, [rows] beside [rows, 1] is the mistake"
    return coupled(ins, pick or Note.at(eqn, f"{what or eqn.primitive.name + ' of'} rows with other rows; {write}"))


def some_rows(eqn: Any) -> Note:
    """Groups of rows, as a reshape makes them, may or may not be parted by blocks."""
    what = f"{eqn.primitive.name} of sums over groups of rows, which blocks may part; give groups a dim of their own"
    return Note.at(eqn, what, certain=False)


def position(eqn: Any, whole: Value, rows: Value, what: str = "") -> list[Note]:
    """What is to be said where rows meet a whole value of as many dims, which may differ from row to row by nothing but
    the row's place in the block, or by draws that all blocks have alike.
    """
    at = rows.order
    if (rows.routed and not rows.places) or not at.dims & whole.varies:
        return []  # tokens in an order of their own have what is at the place that they were sent to
    known = whole.number.pair if whole.number is not None and whole.number.array.ndim == at.array.ndim else None
    if known is not None and rows.lines == 1 and alike(at.array, *known):
        return []
    if rows.places and rows.pick is not None:
        return [rows.pick]
    said = "with a value that depends on a row's place in its block; put it into the batch"
    return [whole.pick or Note.at(eqn, what or f"{eqn.primitive.name} {said}", certain=False)]
