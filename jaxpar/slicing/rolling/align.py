"""Cut the blocks of a loop apart, and decide whether they are one program.

    trace      before | round 0 | round 1 | round 2 | after
    template   the equations of round 1, for all rounds
    slots      what they read from outside: for each variable, the atom that each round reads in its place

A cut between two rounds may lie anywhere between the last equation that reads round k's parameters and the first that
reads round k+1's. It is put where the fewest bytes are live: on the residual stream.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.extend.core as jec
import numpy as np

from ...program import jaxpr as jx
from ...program.equal import differing, same_atom, short
from .readings import Pass, Readings


class NotAlike(Exception):
    """The blocks of a loop do not make a scan.

    Attributes:
      round_index: the number of the round that differs, among the rounds that were compared.
      everywhere: whether it differs wherever the blocks are cut apart.
    """

    def __init__(self, message: str, round_index: int = 0, everywhere: bool = False):
        super().__init__(message)
        self.round_index, self.everywhere = round_index, everywhere


@dataclass(frozen=True)
class Span:
    """Consecutive blocks of a loop, as rounds of a scan.

    Attributes:
      start: the first block.
      period: the number of blocks in a round.
      count: the number of rounds.
      last_block: as in `Readings`, for a loop over a list from its end.
    """

    start: int
    period: int
    count: int
    last_block: int | None = None

    @property
    def stop(self) -> int:
        """The block after the last."""
        return self.start + self.period * self.count

    def number(self, block: int) -> int:
        """Return the number that a block of the loop has in its list."""
        return block if self.last_block is None else self.last_block - block

    def round_name(self, round_index: int) -> str:
        """Name a round for an error: by the numbers of its blocks in the list."""
        block = self.start + self.period * round_index
        first, last = self.number(block), self.number(block + self.period - 1)
        return f"block {first}" if self.period == 1 else f"blocks {first} to {last}"


@dataclass(frozen=True)
class Round:
    """The equations of one round: first those that depend on its parameters alone, and then its part of the program."""

    eqns: list[Any]

    @functools.cached_property
    def defined(self) -> set[Any]:
        """The variables that the equations define."""
        return {v for e in self.eqns for v in e.outvars}


@dataclass(frozen=True)
class Template:
    """One program for all rounds.

    Attributes:
      eqns: its equations.
      var_maps: for each round, the round's variable for each variable that the template defines.
      slots: what the template reads from outside: a variable, and for each round the atom that it stands for.
    """

    eqns: list[Any]
    var_maps: list[dict[Any, Any]]
    slots: list[tuple[Any, list[Any]]]


def align(flat: jx.Flat, readings: Readings, loop_pass: Pass, span: Span) -> tuple[list[int], list[Round], Template]:
    """Cut the rounds apart so that they are one program.

    Returns:
      The positions in `readings.sequence` where each round begins, and where the last one ends; the rounds; and their
      template.

    Raises:
      NotAlike: there is no such cut. The error is the one of the best cut.
    """
    first_error: NotAlike | None = None
    is_within = lambda e: readings.is_within(e, loop_pass, span.start, span.stop)
    for bounds in _possible_bounds(readings, flat, loop_pass, span):
        rounds = [Round(readings.with_pure_eqns(readings.sequence[a:b])) for a, b in itertools.pairwise(bounds)]
        try:
            return bounds, rounds, _match(rounds, span, is_within)
        except NotAlike as error:
            # The error of the best cut is the plainest.
            first_error = first_error or error
            if error.everywhere:  # no other cut helps
                raise
    assert first_error is not None
    raise first_error


def _possible_bounds(readings: Readings, flat: jx.Flat, loop_pass: Pass, span: Span) -> list[list[int]]:
    """Return the ways to cut the rounds apart, those with the fewest live bytes at the cuts first.

    Each way is the positions in `readings.sequence` where each round begins, and where the last one ends. A round
    begins equally far before its first read in all rounds.

    Raises:
      NotAlike: two rounds have different operations between their first reads.
    """
    sequence, offset = readings.sequence, span.start - loop_pass.start
    first_reads = list(loop_pass.first_reads[offset : offset + span.period * span.count : span.period])
    last_reads = list(loop_pass.last_reads[offset + span.period - 1 : offset + span.period * span.count : span.period])

    # 1. Compare operations, and their number, from first read to first read. The last round has no next first read: it
    # is compared up to its last read, and taken to be as long as the others.
    size = first_reads[1] - first_reads[0]
    for k in range(1, span.count):
        for i in range(size):
            a, b = first_reads[0] + i, first_reads[k] + i
            is_in_round = b < len(sequence) and (k + 1 < span.count or b <= last_reads[k])
            if is_in_round and readings.tokens[a] != readings.tokens[b]:
                raise NotAlike(
                    f"{span.round_name(0)} has {sequence[a].primitive} ({jx.where(sequence[a])}) where "
                    f"{span.round_name(k)} has {sequence[b].primitive} ({jx.where(sequence[b])})"
                    f"{_difference(sequence[a], sequence[b])}",
                    k,
                    True,
                )
        if k + 1 < span.count and (surplus := first_reads[k + 1] - first_reads[k] - size):
            # The first equation behind the shorter of the two rounds.
            eqn = sequence[first_reads[k] + min(size, size + surplus)]
            count = f"{abs(surplus)} {'more' if surplus > 0 else 'fewer'} operation{'s' * (abs(surplus) > 1)}"
            raise NotAlike(
                f"{span.round_name(k)} has {count} than {span.round_name(0)}, at {eqn.primitive} ({jx.where(eqn)})",
                k + 1,
                True,
            )

    # 2. A cut lies after the last read of one round, at most at the first read of the next. The last round ends as far
    # before the first read of a round that would follow it.
    live_bytes = readings.live_bytes(flat.invars, flat.outvars)
    gap = min([first_reads[k] - last_reads[k - 1] - 1 for k in range(1, span.count)])
    leads = [  # how many equations before its first read a round may begin
        lead
        for lead in range(gap + 1)
        if first_reads[0] >= lead and last_reads[-1] < first_reads[-1] - lead + size <= len(sequence)
    ]
    if not leads:
        raise NotAlike("the first or the last block has fewer operations than the others", span.count - 1)
    leads.sort(key=lambda lead: (sum(live_bytes[first - lead] for first in first_reads[1:]), lead))
    return [[first - lead for first in [*first_reads, first_reads[-1] + size]] for lead in leads]


def _difference(e: Any, f: Any) -> str:
    """Describe in what two equations of one primitive differ; "" for different primitives."""
    if e.primitive is not f.primitive:
        return ""
    # A difference of shapes tells more than the parameters that follow from it.
    shapes = [(a.aval.str_short(), b.aval.str_short()) for a, b in zip(e.invars, f.invars, strict=False)]
    name = next((k for k in e.params if str(e.params[k]) != str(f.params.get(k))), None)
    different = next(((a, b) for a, b in shapes if a != b), None)
    if different is not None:
        return f": an operand is {different[0]}, and {different[1]}"
    return "" if name is None else f": {name}={short(e.params[name])}, and {short(f.params[name])}"


def _match(rounds: Sequence[Round], span: Span, is_within: Callable[[Any], bool]) -> Template:
    """Return one program for all rounds.

    The second round gives its equations. The first round cannot: two of the values that enter it may be one variable.

    Args:
      span: the blocks, for errors.
      is_within: whether an equation lies in the loop wherever the rounds are cut apart.

    Raises:
      NotAlike: two rounds differ.
    """
    # Not the first round: there a literal may stand for what other rounds take from the round before.
    model = rounds[1]
    var_maps: list[dict[Any, Any]] = []
    outside: dict[Any, list[Any]] = {}  # for each variable that the model reads from outside, each round's atom
    varying_literals: set[tuple[int, int]] = set()  # equation and operand
    for k, current in enumerate(rounds):
        var_map: dict[Any, Any] = {}
        for i, (e, f) in enumerate(zip(model.eqns, current.eqns, strict=False)):
            _check_operation(e, f, span, k, is_within)
            for j, (a, b) in enumerate(zip(e.invars, f.invars, strict=True)):
                # Literals may differ in value: then the scan gets one for each round (the layer's number, say).
                if jx.is_literal(a) and jx.is_literal(b) and _same_type(a, b):
                    if not np.array_equal(a.val, b.val):
                        varying_literals.add((i, j))
                elif not _stands_for(a, b, k, (model, current), var_map, outside):
                    raise NotAlike(
                        f"operand {j} of {e.primitive} ({jx.where(f)}) differs between {span.round_name(1)} and "
                        f"{span.round_name(k)}",
                        k,
                    )
            var_map.update(zip(e.outvars, f.outvars, strict=True))
        # `zip` stops at the shorter round.
        if len(current.eqns) != len(model.eqns):
            raise NotAlike(
                f"{span.round_name(k)} has {len(current.eqns)} equations, and {span.round_name(1)} has "
                f"{len(model.eqns)}",
                k,
            )
        var_maps.append(var_map)

    # A literal that differs between rounds becomes a slot, with each round's literal.
    eqns, slots = list(model.eqns), list(outside.items())
    for i, j in sorted(varying_literals):
        var = jec.Var(eqns[i].invars[j].aval)
        slots.append((var, [current.eqns[i].invars[j] for current in rounds]))
        eqns[i] = eqns[i].replace(invars=[var if position == j else a for position, a in enumerate(eqns[i].invars)])
    return Template(eqns, var_maps, slots)


def _check_operation(e: Any, f: Any, span: Span, k: int, is_within: Callable[[Any], bool]) -> None:
    """Raise NotAlike unless equation `f` of round k does the same as `e` of the second round."""
    if e.primitive is not f.primitive or len(e.invars) != len(f.invars):
        raise NotAlike(
            f"{span.round_name(1)} has {e.primitive} ({jx.where(e)}) where {span.round_name(k)} has {f.primitive} "
            f"({jx.where(f)})",
            k,
        )
    if (name := differing(e, f)) is not None:
        raise NotAlike(
            f"{e.primitive} ({jx.where(f)}) has {name}={short(e.params[name])} in {span.round_name(1)} and "
            f"{short(f.params[name])} in {span.round_name(k)}",
            k,
            # Every cut of these rounds has both equations, so that no other cut helps.
            is_within(e) and is_within(f),
        )


def _same_type(a: Any, b: Any) -> bool:
    """Whether two atoms have one shape and dtype."""
    return a.aval.shape == b.aval.shape and a.aval.dtype == b.aval.dtype


def _stands_for(
    a: Any,
    b: Any,
    k: int,
    rounds: tuple[Round, Round],
    var_map: Mapping[Any, Any],
    outside: dict[Any, list[Any]],
) -> bool:
    """Whether operand `b` of round k stands for operand `a` of the model.

    Either the rounds define both, by equations that correspond (`var_map`), or both come from outside; then `b` is
    recorded.

    Args:
      a: an operand of the model.
      b: the operand of round k in its place.
      rounds: the model (the round that gives the template), and round k.
      var_map: round k's variable for each variable of the model, so far.
      outside: the atoms of each variable that the model reads from outside, so far; updated.
    """
    model, current = rounds
    if jx.is_literal(a):
        return False
    if a in model.defined:
        return _same_type(a, b) and var_map[a] is b
    atoms = outside.setdefault(a, [])
    # A literal may stand for a variable: the zero with which a sum over blocks begins.
    fits = jx.is_literal(b) or b not in current.defined
    # If the model reads the variable in several places, round k must read one atom in all of them.
    fits = fits and _same_type(a, b) and (len(atoms) == k or same_atom(atoms[k], b))
    atoms[k:] = [b]
    return fits
