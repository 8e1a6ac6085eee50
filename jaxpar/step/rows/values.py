"""The abstract values of the interpretation: how a value of a traced loss depends on the rows of the batch.

A step runs the loss on blocks of rows (one replica's rows of one microbatch) and adds up `total` and `count` of the
blocks. The result equals the loss of all rows if and only if both are sums over rows of a function of one row.
Both may be multiplied by the same power of n, the number of rows in a block. So each value has one of four kinds:

- `whole`: no row reaches the value, or the rows of all replicas do (`jp.all_rows`). It is proportional to n^power.
- `rows`: each element belongs to one row (`labels`), is a function of that row alone, the same function for all rows,
  and is proportional to n^power. After a sort over rows each element still belongs to one row, but the other rows
  decide to which (`num_places`, `sorts.py`). With `has_mean`, a mean over rows has been added to each row. That is
  right as long as everything computed from the value is linear.
- `sum`: a sum of such elements over rows, times n^power: power 0 is a sum, -1 a mean. A linear function of a sum is a
  sum too. A whole value c is the sum of c / n, so sums and whole values may be added if the powers agree. Along its
  `varying_dims` the value holds sums over some rows each, which together make a sum over all rows.
- `coupled`: the value depends on which rows share a block.

Values of every kind carry `notes`, which say why rows are coupled, or may be. The notes that reach the loss are
reported. The interpretation is sound: a value that it cannot follow is coupled, or has the power `UNKNOWN_POWER` and a
note that names the line.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from ...program import jaxpr as jx
from .labels import NO_LABELS, Labels, same_in_all_rows
from .numbers import Number

UNKNOWN_POWER = math.nan  # the value depends on the number of rows in another way than by a power, or may
# Labels from here on do not number rows, but the slots of tokens in another order, as in the buffers of experts. From
# each further multiple on, they number the places of another sort.
ROUTED_BASE = 1 << 40
GUARD_LIMIT = 1e-4  # a smaller constant that is added to a sum guards a division, and changes it by rounding only

UNNAMED_LINE = "a function of JAX"  # stands for the line of an equation if no line of the user's is known
ADVISE_GATHER = "pass jp.all_rows(x) for one of the two"
ADVISE_ALL_ROWS = "compute this from jp.all_rows(x)"
PICKS_ROWS = f"picks rows by computed indices; {ADVISE_ALL_ROWS}"
TAKES_SOME_ROWS = "takes some of the rows"
RATIO_OF_SUMS = (
    "divides one sum over rows by another; return jp.Mean(total, count), or compute both sums from jp.all_rows(x)"
)
# The note on a ratio that each replica computes on its rows, if the ratios are then averaged over replicas.
RATIO_PER_REPLICA = (
    "averages over replicas the ratios that each computes from its own number of rows, as BatchNorm does with mask=; "
    "leave mask= out, or write a norm that computes its sums from jp.all_rows(x) and jp.all_rows(mask) "
    "(docs/recipes/coupled-rows.md)"
)
ADVISE_SAME_SCALE = "take means of both, or multiply the term that is no sum by the count of jp.Mean"
FUNCTION_OF_BLOCK_SIZE = (
    "a value that depends on how many rows a block has, and a block has fewer than the batch; use a fixed number"
)
# Continues a message on a sort: tokens are sorted by their experts, say, and put back.
FINE_IF_UNDONE = f"which is fine if its results are put back into the order of the rows; otherwise {ADVISE_ALL_ROWS}"


@dataclass(frozen=True)
class Note:
    """A message about an equation that couples rows, or may couple them.

    Attributes:
      line: the user's line.
      message: what the equation does, a phrase whose subject is the line; and what to write instead.
      is_certain: whether the equation couples rows for certain.
      in_backward: whether the equation is part of a derivative.
      only_scale: whether no rows meet, and only the scale is wrong: the result is a sum over rows, say, and no mean.
      only_if_nan_tested: whether rows meet only if a later line tells NaN from numbers.
    """

    line: str
    message: str
    is_certain: bool = True
    in_backward: bool = False
    only_scale: bool = False
    only_if_nan_tested: bool = False

    @classmethod
    def of_eqn(cls, eqn: Any, message: str, is_certain: bool = True) -> Note:
        """Return a note on an equation."""
        return cls(jx.where(eqn) or UNNAMED_LINE, message, is_certain)


@dataclass(frozen=True)
class Value:
    """One abstract value of the program; the module's docstring defines the kinds.

    Attributes:
      kind: "whole", "rows", "sum" or "coupled".
      labels: for rows, the row of each element.
      power: the value is proportional to n^power; `UNKNOWN_POWER` if there is no such power.
      has_mean: for rows, whether a mean over rows has been added.
      num_places: for sorted rows, the number of places of each sorted line; 0 for other rows. The labels then number
        the elements, place by place.
      num_lines: for sorted rows, the number of lines that were sorted side by side; 1 for other rows.
      varying_dims: for a whole value, the dims along which its elements may differ; for a sum, the dims along which
        each element is a sum over some rows only.
      is_keyed: whether the value follows from the block's own random key.
      number: for a whole value, its number if that follows from sizes and literals; for others, the number that the
        value has if nothing is NaN.
      columns: for indices that are rows, the known columns: (position, number) each.
      radicand: for a coupled value that is the square root of a sum over rows, that sum.
      is_pairwise: for a coupled value, whether each element belongs to two rows, which are the same on a diagonal.
      summed_rows: for a coupled value that is a sum over some of the rows, these rows.
      pick_note: the note to give if the equation that picked rows, or drew random numbers, turns out to couple rows.
      notes: what couples rows on the way to this value.
    """

    kind: str = "whole"
    labels: Labels = NO_LABELS
    power: float = 0
    has_mean: bool = False
    num_places: int = 0
    num_lines: int = 1
    varying_dims: frozenset[int] = frozenset()
    is_keyed: bool = False
    # Numbers are computed only if a rule asks, so that two values must not be compared by them.
    number: Number | None = field(default=None, compare=False)
    columns: tuple[tuple[int, Number], ...] = field(default=(), compare=False)
    radicand: Value | None = None
    is_pairwise: bool = False
    summed_rows: frozenset[int] = frozenset()
    pick_note: Note | None = None
    notes: frozenset[Note] = frozenset()

    def __post_init__(self) -> None:
        if math.isnan(self.power):  # arithmetic on an unknown power makes another NaN
            object.__setattr__(self, "power", UNKNOWN_POWER)

    def __eq__(self, other: object) -> bool:
        # A fixpoint of a loop compares values. NaN differs from itself, but tuples compare identities first. From
        # Python 3.13 on, the `__eq__` of a dataclass compares field by field, without tuples.
        return self is other or (isinstance(other, Value) and self._compared_fields == other._compared_fields)

    @property
    def _compared_fields(self) -> tuple[Any, ...]:
        return tuple(getattr(self, f.name) for f in fields(self) if f.compare)

    @property
    def is_routed(self) -> bool:
        """Whether rows are tokens in an order that the model chose: each slot holds a token of one row, or none."""
        # A value has either labels of rows or labels of slots, so that one element tells.
        return self.kind == "rows" and self.labels.array.flat[0] >= ROUTED_BASE

    @property
    def order(self) -> Labels:
        """For rows, the place of each element: its row's position in the block, or the place that a sort gave it."""
        return Labels(self.labels.array % ROUTED_BASE // self.num_lines) if self.num_places else self.labels

    def covers_equally(self, num_rows: int) -> bool:
        """Return whether all rows have equally many elements; for sorted rows, whether all places of a line have."""
        if not self.num_places:
            return self.labels.covers_equally(num_rows)
        # Count the elements of every slot (place and line), and compare the places of each line.
        slots, counts = np.unique(self.labels.array % ROUTED_BASE, return_counts=True)
        lines, line_of_slot = np.unique(slots % self.num_lines, return_inverse=True)
        if len(slots) != len(lines) * self.num_places:
            return False
        counts = counts[np.argsort(line_of_slot, kind="stable")].reshape(len(lines), self.num_places)
        return bool((counts == counts[:, :1]).all())

    def column(self, c: int) -> list[np.ndarray]:
        """Return column `c` of indices, in the program and in its twin, as far as it is known."""
        # A known column of rows is a separate array, [..., 1].
        number, c = (self.number, c) if self.kind == "whole" else (dict(self.columns).get(c), 0)
        pair = () if number is None else number.pair
        return [array[..., c] if np.ndim(array) else np.asarray(array) for array in pair if array is not None]

    @property
    def identity_key(self) -> tuple[Any, ...]:
        """Everything that is known of the value, with the numbers that equality ignores."""
        columns = [(c, number.key) for c, number in self.columns]
        return (self, self.number and self.number.key, self.radicand and self.radicand.identity_key, *columns)

    @property
    def scalar(self) -> float | None:
        """The real number to which all elements of a whole value are equal; None if unknown."""
        if self.kind != "whole" or self.number is None or not self.number.uniform:
            return None
        number = self.number.pair[0]
        return None if np.imag(number) else float(np.real(number))

    @property
    def is_zero(self) -> bool:
        """Whether a whole value is known to be 0 (or NaN) everywhere."""
        return self.scalar is not None and (self.scalar == 0 or math.isnan(self.scalar))

    @property
    def is_negligible(self) -> bool:
        """Whether the value is 0, or a constant so small that it only guards a division."""
        return self.is_zero or (self.scalar is not None and abs(self.scalar) <= GUARD_LIMIT)

    @property
    def has_noted_power(self) -> bool:
        """Whether the power is unknown and notes already report that; a note on NaN tests does not report it."""
        return math.isnan(self.power) and not all(note.only_if_nan_tested for note in self.notes)

    def with_notes(self, *notes: Note) -> Value:
        """Return the value with further notes."""
        return self if self.notes.issuperset(notes) else replace(self, notes=self.notes.union(notes))

    def derive(self, **changes: Any) -> Value:
        """Return a changed copy without the facts that hold for these very elements, such as known numbers."""
        element_facts = {
            "number": None,
            "columns": (),
            "radicand": None,
            "is_pairwise": False,
            "summed_rows": frozenset(),
        }
        return replace(self, **element_facts | changes)


def reason_of(error: Exception) -> str:
    """Return the type and the first line of an error of the user's code, for a note."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:120]}"


def coupled(values: Iterable[Value], *notes: Note) -> Value:
    """Return a coupled value with the notes of the values that it is computed from, and further notes."""
    return Value("coupled", power=UNKNOWN_POWER, notes=notes_of(values).union(notes))


def notes_of(values: Iterable[Value]) -> frozenset[Note]:
    """Return the notes of all values."""
    return frozenset().union(*(x.notes for x in values))


def first_pick_note(values: Iterable[Value]) -> Note | None:
    """Return the first pick note of some values; None if they have none."""
    return next((x.pick_note for x in values if x.pick_note is not None), None)


def nonlinear_in_sum(eqn: Any, ins: Sequence[Value], action: str = "", is_certain: bool = True) -> Value:
    """Return the coupled result of an equation that is not linear in an operand that holds a sum over rows.

    Args:
      action: what the equation does, up to the object "a sum or mean over rows"; by default "applies <primitive> to".
      is_certain: whether the equation couples rows for certain.
    """
    # Sums over groups of rows: a block that holds whole groups gives the right result.
    if partial_sums := [x for x in ins if x.kind == "sum" and x.varying_dims]:
        return coupled(ins, *(x.pick_note or row_groups_note(eqn) for x in partial_sums))
    action = action or f"applies {eqn.primitive.name} to"
    return coupled(ins, Note.of_eqn(eqn, f"{action} a sum or mean over rows; {ADVISE_ALL_ROWS}", is_certain))


def coupled_with_other_rows(eqn: Any, ins: Sequence[Value], action: str = "") -> Value:
    """Return the coupled result of an equation in which rows meet other rows.

    Args:
      action: what the equation does, up to the object "rows with other rows"; by default the message names the
        primitive.
    """
    # Rows that were picked meet other rows because of the pick: name that equation instead.
    pick_note = first_pick_note(x for x in ins if x.kind != "whole")
    usual_mistake = "if each row should meet itself alone, look for shapes [rows] and [rows, 1], which broadcast"
    advice = ADVISE_GATHER if action else f"{ADVISE_GATHER}; {usual_mistake}"
    message = f"{action} rows with other rows" if action else f"combines rows with other rows by {eqn.primitive.name}"
    return coupled(ins, pick_note or Note.of_eqn(eqn, f"{message}; {advice}"))


def row_groups_note(eqn: Any) -> Note:
    """Return the note on sums over groups of rows, as a reshape makes them: a block may end within a group."""
    message = (
        f"computes with sums over groups of rows ({eqn.primitive.name}), and a block may end within a group; make each "
        "group one row of the batch"
    )
    return Note.of_eqn(eqn, message, is_certain=False)


def position_notes(eqn: Any, whole_value: Value, rows: Value, message: str = "") -> list[Note]:
    """Return notes if rows meet a whole value that may depend on a row's place in its block.

    Args:
      eqn: the equation in which they meet.
      whole_value: a value with as many dims as the rows. It may differ from row to row only by the place in the block,
        or by random draws that are the same in all blocks.
      message: the note's message; by default one that names the primitive.
    """
    labels = rows.order
    if (rows.is_routed and not rows.num_places) or not labels.dims & whole_value.varying_dims:
        return []  # tokens in an order of their own meet the element at the slot that they were sent to
    pair = (
        whole_value.number.pair
        if whole_value.number is not None and whole_value.number.array.ndim == labels.array.ndim
        else None
    )
    # A number that is the same for all rows, here and for twice the rows, does not depend on the place.
    if pair is not None and rows.num_lines == 1 and same_in_all_rows(labels.array, *pair):
        return []
    # Sorted rows: the place is the sort's, so that the sort is named.
    if rows.num_places and rows.pick_note is not None:
        return [rows.pick_note]
    default_message = (
        f"combines rows by {eqn.primitive.name} with a value that depends on a row's place in its block; put that "
        "value into the batch"
    )
    return [whole_value.pick_note or Note.of_eqn(eqn, message or default_message, is_certain=False)]
