"""Roll layers that a model writes as a Python loop into one `scan` over stacked parameters.

This takes two steps, since a layout is made before any batch is seen. `layout/families.py` finds, by paths and shapes
alone, parameters that look like those of alike blocks in a row: they are stored as one stack. `loops.py` then looks at
the traced loss. Where the equations of consecutive blocks are the same program, `roll` makes them a scan. So a strategy
fetches and reduces layer by layer, and the size of a program does not grow with depth.

    trace      before | block 0 | block 1 | block 2 | after

    template   the equations of block 1, for all blocks
    slots      what they read from outside:  a constant of all blocks      -> a const of the scan
                                             a result of the block before  -> the carry
                                             a value for each block        -> a scanned value (a row of a stack)

    rolled     before | scan(template, consts, carry, xs) | after

The trace of a loop is in program order, one block after another. A cut between two blocks may lie anywhere between the
last equation that reads block k's parameters and the first that reads block k+1's. It is put where the fewest bytes are
live: on the residual stream. Blocks that alternate with a period are rolled one period (a *round*) at a time.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...program import jaxpr as jx
from ...program.equal import differing, same_atom, short
from ...program.hoist import closure
from .readings import Pass, Readings, Row


class NotAlike(Exception):
    """The blocks of a loop do not make a scan.

    Attributes:
      block: the number, among the rounds that were compared, of the one that differs.
      everywhere: whether it differs wherever the blocks are cut apart.
    """

    def __init__(self, why: str, block: int = 0, everywhere: bool = False):
        super().__init__(why)
        self.block, self.everywhere = block, everywhere


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
class _Round:
    """The equations of one round: first those that depend on its parameters alone, and then its part of the program."""

    eqns: list[Any]

    @functools.cached_property
    def defined(self) -> set[Any]:
        """The variables that the equations define."""
        return {v for e in self.eqns for v in e.outvars}


@dataclass(frozen=True)
class _Template:
    """One program for all rounds.

    Attributes:
      eqns: its equations.
      var_maps: for each round, the round's variable for each variable that the template defines.
      slots: what the template reads from outside: a variable, and for each round the atom that it stands for.
    """

    eqns: list[Any]
    var_maps: list[dict[Any, Any]]
    slots: list[tuple[Any, list[Any]]]


@dataclass(frozen=True)
class _Scanned:
    """A slot that becomes a scanned value: either rows of an array, or one atom for each round.

    Attributes:
      var: the template's variable.
      row: the first row; None for atoms.
      stride: the distance from each row to the next.
      atoms: one for each round, in the order of the array that is scanned; None for rows.
    """

    var: Any
    row: Row | None
    stride: int
    atoms: list[Any] | None


@dataclass(frozen=True)
class _ScanInputs:
    """The slots of a template, sorted by how the scan gets them.

    Attributes:
      consts: the template's variable, and the atom that all rounds read.
      carry: the template's variable, the atom that the first round reads, and the template's variable whose result the
        next round reads.
      xs: the scanned values.
      is_forward: whether the scan runs from the first row to the last, or in reverse.
    """

    consts: list[tuple[Any, Any]]
    carry: list[tuple[Any, Any, Any]]
    xs: list[_Scanned]
    is_forward: bool

    @property
    def atoms(self) -> list[Any]:
        """The variables of the program that the scan reads."""
        sources = [x.row.source for x in self.xs if x.row is not None]
        atoms = [a for _, a in self.consts] + [a for _, a, _ in self.carry] + sources
        atoms += [a for x in self.xs for a in x.atoms or ()]
        return [a for a in atoms if not jx.is_literal(a)]


def roll(
    flat: jx.Flat, eqns: Sequence[Any], readings: Readings, rows: Mapping[Any, Row], loop_pass: Pass, span: Span
) -> Callable[..., list[Any]]:
    """Return a program as a function of the same inputs, with one scan in place of some blocks of one loop.

    Args:
      flat: the program.
      eqns: its live equations.
      readings: its equations, sorted by the blocks of the loop.
      rows: variables that are rows of an array: the scan slices the array instead.
      loop_pass: a run over the loop.
      span: which of its blocks to roll.

    Raises:
      NotAlike: the blocks are not the same program; the error names the first difference.
    """
    # 1. Cut the blocks apart, and find one template for all of them.
    bounds, rounds, template = _align(flat, readings, loop_pass, span)
    eqns_before, eqns_after = readings.sequence[: bounds[0]], readings.sequence[bounds[-1] :]
    inputs = _sort_slots(template, rounds, rows, readings)
    order = slice(None) if inputs.is_forward else slice(None, None, -1)  # of the rounds, along the scanned arrays

    # 2. Collect the equations that run before the scan: those before the loop, those that were moved out of its blocks
    # (keys, rows), and pure ones that the scan or the rest of the program reads.
    outside = closure([*jx.free([*eqns_before, *eqns_after], flat.outvars), *inputs.atoms], readings.pure_eqns)
    late_ids = {id(e) for e in readings.sequence[bounds[0] :]}
    early_ids = {id(e) for e in (*outside, *eqns_before)}
    early_ids |= {*readings.ahead, *map(id, row_eqns(eqns, rows))} - late_ids
    early = [e for e in eqns if id(e) in early_ids]
    available = {*flat.invars, *flat.constvars, *(v for e in early for v in e.outvars)}
    if any(v not in available for v in (*jx.free(early), *inputs.atoms)):
        raise NotAlike("a block reads a value that is not computed before the loop")

    # 3. Build the body. Besides the carry, it returns each value of a round that is read after the loop.
    used = {*inputs.atoms, *jx.free([*early, *eqns_after], flat.outvars)}
    results = [result for _, _, result in inputs.carry]
    defined = dict.fromkeys(v for e in template.eqns for v in e.outvars)
    # The last round's value of a carry is the final carry, and need not be stacked.
    maps_to_stack = lambda v: template.var_maps[:-1] if v in results else template.var_maps
    ys = [v for v in defined if any(var_map[v] in used for var_map in maps_to_stack(v))]
    slot_vars = [v for v, _ in inputs.consts] + [v for v, _, _ in inputs.carry] + [x.var for x in inputs.xs]
    body = jx.run(template.eqns, slot_vars, [*results, *ys])

    # 4. Run the program: what lies before the scan, the scan, what lies behind it.
    def rolled(*values: Any) -> list[Any]:
        env = jx.Environment[Any].of(flat, values, jx.array_of)
        _run_in(env, early)
        scanned, readers = [], []
        for x in inputs.xs:
            array, reader = _scanned_array(x, env.__getitem__, span.count)
            scanned.append(array)
            readers.append(reader)

        def step(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
            outputs = body(*consts, *carry, *(reader(x) for reader, x in zip(readers, slices, strict=True)))
            return outputs[: len(carry)], outputs[len(carry) :]

        consts = env.read(a for _, a in inputs.consts)
        init = env.read(a for _, a, _ in inputs.carry)
        final, stacked = lax.scan(step, init, scanned, length=span.count, reverse=not inputs.is_forward)
        # Later equations read the values of single rounds by the variables of the original program.
        for v, y in zip(ys, stacked, strict=True):
            env.update((var_map[v], y[k]) for k, var_map in enumerate(template.var_maps[order]) if var_map[v] in used)
        env.update((template.var_maps[-1][v], x) for v, x in zip(results, final, strict=True))
        _run_in(env, eqns_after)
        return env.read(flat.outvars)

    return rolled


def row_eqns(eqns: Sequence[Any], rows: Mapping[Any, Row]) -> list[Any]:
    """Return the equations that take rows."""
    return [e for e in eqns if any(v in rows for v in e.outvars)]


# ----------------------------------------------------------------------------------------------------------------------
# Step 1: cut the blocks apart, and compare them.


def _align(flat: jx.Flat, readings: Readings, loop_pass: Pass, span: Span) -> tuple[list[int], list[_Round], _Template]:
    """Cut the rounds apart so that they are one program.

    Returns:
      The positions in `readings.sequence` where each round begins, and where the last one ends; the rounds; and their
      template.

    Raises:
      NotAlike: there is no such cut. The error is that of the best cut.
    """
    first_error: NotAlike | None = None
    is_within = lambda e: readings.is_within(e, loop_pass, span.start, span.stop)
    for bounds in _possible_bounds(readings, flat, loop_pass, span):
        rounds = [_Round(readings.with_pure_eqns(readings.sequence[a:b])) for a, b in itertools.pairwise(bounds)]
        try:
            return bounds, rounds, _match(rounds, span, is_within)
        except NotAlike as error:
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
            eqn = sequence[first_reads[k] + min(size, size + surplus)]
            raise NotAlike(
                f"{span.round_name(k)} has {abs(surplus)} operations {'more' if surplus > 0 else 'less'} than "
                f"{span.round_name(0)}, at {eqn.primitive} ({jx.where(eqn)})",
                k + 1,
                True,
            )

    # 2. A cut lies after the last read of one round, at most at the first read of the next. The last round ends as far
    # before the first read of a round that would follow it.
    live_bytes = readings.live_bytes(flat.invars, flat.outvars)
    gap = min([first_reads[k] - last_reads[k - 1] - 1 for k in range(1, span.count)])
    leads = [  # how far before its first read a round may begin
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


def _match(rounds: Sequence[_Round], span: Span, is_within: Callable[[Any], bool]) -> _Template:
    """Return one program for all rounds.

    Its equations are those of the second round: in the first one, two of the values that enter may be one variable.

    Args:
      rounds: the equations of each round.
      span: the blocks, for errors.
      is_within: whether an equation lies in the loop wherever the rounds are cut apart.

    Raises:
      NotAlike: two rounds differ.
    """
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
                f"{span.round_name(k)} has {len(current.eqns)} equations, {span.round_name(1)} {len(model.eqns)}", k
            )
        var_maps.append(var_map)

    # A literal that differs between rounds becomes a slot, with each round's literal.
    eqns, slots = list(model.eqns), list(outside.items())
    for i, j in sorted(varying_literals):
        var = jec.Var(eqns[i].invars[j].aval)
        slots.append((var, [current.eqns[i].invars[j] for current in rounds]))
        eqns[i] = eqns[i].replace(invars=[var if position == j else a for position, a in enumerate(eqns[i].invars)])
    return _Template(eqns, var_maps, slots)


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
            is_within(e) and is_within(f),
        )


def _same_type(a: Any, b: Any) -> bool:
    """Whether two atoms have one shape and dtype."""
    return a.aval.shape == b.aval.shape and a.aval.dtype == b.aval.dtype


def _stands_for(
    a: Any,
    b: Any,
    k: int,
    rounds: tuple[_Round, _Round],
    var_map: Mapping[Any, Any],
    outside: dict[Any, list[Any]],
) -> bool:
    """Whether operand `b` of round k stands for operand `a` of the model.

    Either the rounds define both, by equations that correspond (`var_map`), or both come from outside; then `b` is
    recorded.

    Args:
      a: an operand of the model.
      b: the operand of round k in its place.
      k: the number of the round.
      rounds: the model, and round k.
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


# ----------------------------------------------------------------------------------------------------------------------
# Step 2: the scan's inputs.


def _sort_slots(
    template: _Template, rounds: Sequence[_Round], rows: Mapping[Any, Row], readings: Readings
) -> _ScanInputs:
    """Sort the slots of a template into constants, carry and scanned values.

    Raises:
      NotAlike: a slot is none of them, or there is no carry.
    """
    inside = set().union(*(current.defined for current in rounds))
    slot_rows = [[None if jx.is_literal(a) else rows.get(a) for a in atoms] for _, atoms in template.slots]

    # Rows may be taken in descending order; a scan in reverse then slices the array. Choose the direction in which the
    # larger arrays are sliced.
    size = lambda all_rows: sum(row[0].source.aval.size for row in map(_evenly_spaced, all_rows) if row is not None)
    is_forward = size(slot_rows) >= size([round_rows[::-1] for round_rows in slot_rows])
    order = slice(None) if is_forward else slice(None, None, -1)

    consts, carry, xs = [], [], []
    for (var, atoms), round_rows in zip(template.slots, slot_rows, strict=True):
        result = _carried(atoms, template.var_maps)
        if (row := _evenly_spaced(round_rows[order])) is not None:
            xs.append(_Scanned(var, *row, None))
        elif result is not None and (jx.is_literal(atoms[0]) or atoms[0] not in inside):
            carry.append((var, atoms[0], result))
        elif any(not jx.is_literal(a) and a in inside for a in atoms):
            raise NotAlike(f"a block reads {var.aval.str_short()} from another block than the one before it")
        elif all(a is atoms[0] for a in atoms):
            consts.append((var, atoms[0]))
        elif any(not jx.is_literal(a) and a in readings.block_of for a in atoms):
            # The scan would stack these parameters, and fetch them all at once.
            raise NotAlike(f"the blocks read {var.aval.str_short()} from parameters that are no layers in a row")
        else:
            xs.append(_Scanned(var, None, 0, atoms[order]))
    # Without a carry, nothing runs through the blocks: they are no layers.
    if not carry:
        raise NotAlike("no value passes from one block to the next")
    return _ScanInputs(consts, carry, xs, is_forward)


def _evenly_spaced(rows: Sequence[Row | None]) -> tuple[Row, int] | None:
    """Return the first of some rows and the distance to the next, if all are rows of one array, evenly spaced."""
    first, second = rows[:2]
    if first is None or second is None:
        return None
    stride = second.index - first.index
    expected = [Row(first.source, first.index + stride * k, first.dim, first.keeps_dim) for k in range(len(rows))]
    return (first, stride) if stride > 0 and list(rows) == expected else None


def _carried(atoms: Sequence[Any], var_maps: Sequence[dict[Any, Any]]) -> Any:
    """Return the template's variable whose result the next round reads in this slot, if that holds in every round."""
    if jx.is_literal(atoms[1]):
        return None
    result = next((v for v, round_var in var_maps[0].items() if round_var is atoms[1]), None)
    is_carried = result is not None and all(m[result] is a for m, a in zip(var_maps, atoms[1:], strict=False))
    return result if is_carried else None


def _scanned_array(
    x: _Scanned, value_of: Callable[[Any], Any], num_rounds: int
) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """Return the array that a scan slices, [rounds, ...], and a function from its slice to the slot's value.

    Args:
      x: the slot.
      value_of: returns the value of an atom.
      num_rounds: the number of rounds.
    """
    row = x.row
    if row is not None:
        array, dim = value_of(row.source), row.dim
        # Slice only if the rounds do not read the complete array: else the scan reads the stack itself.
        if (row.index, x.stride, num_rounds) != (0, 1, array.shape[dim]):
            stop = row.index + x.stride * (num_rounds - 1) + 1
            array = lax.slice_in_dim(array, row.index, stop, x.stride, dim)
        array = jnp.moveaxis(array, dim, 0) if dim else array
        return array, lambda v: jnp.expand_dims(v, dim) if row.keeps_dim else v
    assert x.atoms is not None
    distinct = list({id(a): a for a in x.atoms}.values())
    # Every round has a value of its own, or they are scalars: stack them.
    if len(distinct) == num_rounds or not x.var.aval.shape:
        return jnp.stack([value_of(a) for a in x.atoms]), lambda v: v
    # Rounds share values (the masks of local and of global attention): stack each value once, and scan which it is.
    table = jnp.stack([value_of(a) for a in distinct])
    choices = [next(i for i, b in enumerate(distinct) if a is b) for a in x.atoms]
    return jnp.array(choices, jnp.int32), lambda i: lax.dynamic_index_in_dim(table, i, keepdims=False)


def _run_in(env: dict[Any, Any], eqns: Iterable[Any]) -> None:
    """Run equations on the values of an environment, and add their results to it."""
    eqns = list(eqns)
    free = jx.free(eqns)
    results = [v for e in eqns for v in e.outvars if not isinstance(v, jec.DropVar)]
    env.update(zip(results, jx.run(eqns, free, results)(*(env[v] for v in free)), strict=True))
