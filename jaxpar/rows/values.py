"""What a value of a traced loss has to do with the rows of the batch.

A step runs the loss on blocks of rows (one replica's rows of one microbatch) and adds up `total` and `count` of the
blocks. That is the loss of all rows if and only if both are sums over rows of something that a row alone decides, times
the same power of the number n of rows in a block. So each value is one of

- `whole`: no row reaches it, or those of all replicas do (`jp.all_rows`); it is proportional to n^power;
- `rows`: its part along the row dim belongs to that row alone, and is proportional to n^power. The row dim may be
  merged with others, [B, T] -> [B*T], [2, B] -> [2*B], or split over several dims that follow one another. With `plus`
  a mean over rows has been added to it, which is right as long as all that follows is linear;
- `sum`: sum over rows of such parts, times n^power: power 0 is a sum, -1 a mean. What is linear in it is one again.
  A whole value c is the sum of c / n, so sums and whole values may be added where the powers agree;
- `extreme`: a maximum (or any, all) over rows. What it shifts for the sake of rounding may not depend on it;
- `coupled`: it depends on which rows share a block. `notes` say why, and travel with values of every kind, so that
  those which reach the loss are known. Some come apart again, see `apart.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..program import jaxpr as jx

STEP = -1  # `first` of some rows: those that one step of a scan over rows sees; and of sums over some rows
ROUTED = -2  # of tokens in an order of their own, as in the buffers of experts: each slot has at most one row's
ODD = math.nan  # a power: of what depends on the number of rows, and is no power of it
SMALL = 1e-4  # a constant below this beside a sum guards a division; what it adds is rounding

GATHER = "give it jp.all_rows(x) for one of them"
SCALES = "make means of both, or multiply what is no sum by the count of jp.Mean"


@dataclass(frozen=True)
class Note:
    """An equation that couples rows, or may: its line, what it does, and what to write."""

    line: str
    what: str
    certain: bool = True

    @classmethod
    def at(cls, eqn: Any, what: str, certain: bool = True) -> Note:
        """A note on an equation."""
        return cls(jx.where(eqn) or "a function of JAX", what, certain)


@dataclass(frozen=True)
class Value:
    """One value of the program; see the module.

    Attributes:
      kind: "whole", "rows", "sum", "extreme" or "coupled".
      dim, span: of rows, the first of the dims over which they go, and how many these are; span 0: no dim, the one row
        of a scan's step.
      outer: of rows, the size of what is merged with the rows outside of them.
      count, first: of rows, how many they are and, where not all, the first of them.
      power: see the module; None if not known, `ODD` if there is none, as of log(n).
      plus: of rows, whether a mean over rows has been added.
      size: of a sum, how many elements were added up, so that a division by their number is known for a mean.
      varies: of a whole value, the dims along which its elements differ.
      zero, scalar: whether a whole value is 0 everywhere (or NaN); its value, where known.
      counts: of a whole value, the dim along which it is 0, 1, 2, ...; or, of indices, `columns` of their last dim
        that count along the rows.
      eye: of a whole value, two dims off whose diagonal it is 0.
      valid: of rows, or a sum of them, what each element is where no value is NaN.
      root: of a coupled value that is the root of a sum over rows: that sum.
      pairs: of a coupled value that has rows with other rows: its diagonal.
      notes: what couples rows on the way to it.
    """

    kind: str = "whole"
    dim: int = 0
    span: int = 1
    outer: int = 1
    count: int = 0
    first: int | None = None
    power: float | None = 0
    plus: bool = False
    size: int = 1
    varies: frozenset[int] = frozenset()
    zero: bool = False
    scalar: float | None = None
    counts: int | None = None
    columns: frozenset[int] = frozenset()
    eye: tuple[int, int] | None = None
    valid: int | None = None
    root: Value | None = None
    pairs: Pairs | None = None
    notes: frozenset[Note] = frozenset()

    @property
    def dims(self) -> range:
        """The dims over which the rows go."""
        return range(self.dim, self.dim + self.span)

    @property
    def place(self) -> tuple[Any, ...]:
        """What two values must share for their elements to belong to the same rows."""
        return self.dim, self.span, self.outer, self.count, self.first

    @property
    def small(self) -> bool:
        """Whether it is a constant that guards a division."""
        return self.scalar is not None and abs(self.scalar) <= SMALL

    def noted(self, *notes: Note) -> Value:
        """The same with further notes."""
        return replace(self, notes=self.notes | frozenset(notes))

    def moved(self, to: Sequence[int | None]) -> Value | None:
        """Rows after their dims have got other numbers; None where they no longer follow one another."""
        dims = [to[d] for d in self.dims]
        start = dims[0] if dims else 0
        if start is None or dims != list(range(start, start + len(dims))):
            return None
        return replace(self, dim=start, columns=frozenset())


class Pairs(NamedTuple):
    """A product of each row with each row: those with themselves are the rows `own`, of which the dim `other` has no
    part; `alone`: all others are 0.
    """

    own: Value
    other: int
    alone: bool = False


def coupled(values: Iterable[Value], *notes: Note) -> Value:
    """What depends on the block's rows, for the reasons that the values have and these."""
    return Value("coupled", power=None, notes=reasons(values) | frozenset(notes))


def reasons(values: Iterable[Value]) -> frozenset[Note]:
    """The notes of some values."""
    return frozenset().union(*(v.notes for v in values))


def reshaped(value: Value, old: Sequence[int], new: Sequence[int]) -> Value:
    """Rows after a reshape: always along dims that follow one another, perhaps merged with what is beside them."""
    before = math.prod(old[: value.dim]) * value.outer
    prefix = [math.prod(new[:i]) for i in range(len(new) + 1)]
    starts = [i for i, p in enumerate(prefix[:-1]) if p <= before and before % p == 0]
    # One row alone might stand in any dim of size 1: it stays in front.
    start = prefix.index(before) if value.count == 1 and before in prefix[:-1] else max(starts)
    stop = next(i for i, p in enumerate(prefix) if i > start and p % (before * value.count) == 0)
    return replace(value, dim=start, span=stop - start, outer=before // prefix[start], columns=frozenset())


def spread(dims: Iterable[int], old: Sequence[int], new: Sequence[int]) -> frozenset[int]:
    """The dims, after a reshape, along which something varies that did along `dims` before."""
    if not new:
        return frozenset()
    found: set[int] = set()
    for d in dims:
        if old[d] > 1:
            found.update(reshaped(Value("rows", dim=d, count=old[d]), old, new).dims)
    return frozenset(found)


def combine(eqn: Any, values: Sequence[Value]) -> Value:
    """What is linear in several values and adds them up, lays them side by side, or chooses between them."""
    notes = reasons(values)
    found = values[0]
    for other in values[1:]:
        found = _pair(eqn, found, other)
        if found.kind == "coupled":
            break
    return replace(found, notes=found.notes | notes)


def _pair(eqn: Any, a: Value, b: Value) -> Value:
    if "coupled" in (a.kind, b.kind):
        return coupled([a, b])
    if b.kind == "whole" or (a.kind, b.kind) == ("rows", "sum"):
        a, b = b, a
    if a.kind == "whole" == b.kind:
        power = a.power if a.power == b.power or b.zero else b.power if a.zero else None
        return Value(power=power, varies=a.varies | b.varies, zero=a.zero and b.zero)
    if a.kind == "whole" and b.kind == "rows":
        return replace(position(eqn, a, b), power=b.power if a.zero or a.small else sum_power(a.power, b.power))
    if a.kind == "whole":
        what = "is the same for all rows" if a.power in (None, 0) else "depends on how many rows a block has"
        return b if a.zero or a.small else _added(eqn, b, a.power, -1, f"a value that {what}")
    if b.kind == "sum":
        return replace(_added(eqn, a, b.power, 0, named(b.power)), size=max(a.size, b.size))
    if a.kind == "sum" and not b.span:  # a scan over rows adds them up, one in each step
        return _added(eqn, a, b.power, 0, "rows")
    if a.kind == "sum" and a.first == STEP:
        return coupled([a, b], some_rows(eqn))
    if a.kind == "sum":
        mean = _added(eqn, a, b.power, -1, "each row")
        return coupled([mean]) if mean.kind == "coupled" else replace(b, plus=True, power=_both(mean.power, b.power))
    if a.place != b.place:
        return coupled([a, b], Note.at(eqn, f"{eqn.primitive.name} of rows with other rows; {GATHER}"))
    return replace(a, plus=a.plus or b.plus, power=sum_power(a.power, b.power), columns=frozenset())


def position(eqn: Any, whole: Value, rows: Value) -> Value:
    """Rows beside a whole value, which may differ from row to row by nothing but the row's place in the block."""
    # One row has one place; which of the dims of size 1 is its own is not known. Where tokens are in an order of their
    # own, that place is where they were sent (the leaves of their expert).
    if rows.count == 1 or rows.first == ROUTED or not whole.varies & set(rows.dims):
        return rows
    what = f"{eqn.primitive.name} with a value that depends on a row's place in its block; put it into the batch"
    return rows.noted(Note.at(eqn, what, certain=False))


def some_rows(eqn: Any) -> Note:
    """Groups of rows, as a reshape makes them, may or may not be parted by blocks."""
    what = f"{eqn.primitive.name} of sums over groups of rows, which blocks may part; give groups a dim of their own"
    return Note.at(eqn, what, certain=False)


def _added(eqn: Any, total: Value, power: float | None, shift: int, what: str) -> Value:
    """A sum over rows and something else that, as a sum over rows, has the power `power + shift`."""
    if total.power is None or power is None or (math.isnan(total.power) and math.isnan(power)):
        return replace(total, power=None)
    if total.power == power + shift:
        return total
    note = Note.at(eqn, f"adds up {named(total.power)} and {what}; {SCALES}")
    if math.isnan(total.power) or math.isnan(power):  # as linear as another, whatever else becomes of it
        return replace(total, power=None).noted(note)
    return coupled([total], note)


def _both(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else b


def product_power(a: float | None, b: float | None, sign: int = 1) -> float | None:
    """The power of a product or, `sign` -1, of a quotient. Where both are odd, that may cancel."""
    if a is None or b is None or (math.isnan(a) and math.isnan(b)):
        return None
    return ODD if math.isnan(a) or math.isnan(b) else a + sign * b


def sum_power(a: float | None, b: float | None) -> float | None:
    """The power of two values of one kind that are added up."""
    if a is None or b is None or (math.isnan(a) and math.isnan(b)):
        return None
    return a if a == b else ODD


def named(power: float | None) -> str:
    """What a sum over rows with this power is called."""
    if power is None:
        return "a sum over rows, perhaps times their number"
    if math.isnan(power):
        return "a sum over rows times what depends on their number"
    usual = "a sum over rows" if power == 0 else "a mean over rows" if power == -1 else None
    return usual or f"a sum over rows times rows^{power:g}"
