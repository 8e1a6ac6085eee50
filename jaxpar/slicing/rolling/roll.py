"""Roll layers that a model writes as a Python loop into one `scan` over stacked parameters.

This takes two steps, since a layout is made before any batch is seen. `layout/families.py` finds, by paths and shapes
alone, parameters that seem to belong to alike blocks in a row: they are stored as one stack. `loops.py` then looks at
the traced loss. Where the equations of consecutive blocks are the same program, `roll` makes them a scan. So a strategy
fetches and reduces layer by layer, and the size of a program does not grow with depth.

    trace      before | block 0 | block 1 | block 2 | after

    template   the equations of block 1, for all blocks
    slots      what they read from outside:  a constant of all blocks      -> a const of the scan
                                             a result of the block before  -> the carry
                                             a value for each block        -> a scanned value (a row of a stack)

    rolled     before | scan(template, consts, carry, xs) | after

`align.py` cuts the blocks apart and finds the template. Blocks that alternate with a period are rolled one period (a
*round*) at a time.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp
from jax import lax

from ...program import jaxpr as jx
from ...program.hoist import closure
from .align import NotAlike, Round, Span, Template, align
from .readings import Pass, Readings, Row


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
    """Return a program as a function of the same inputs, with one scan instead of some blocks of one loop.

    Args:
      eqns: its live equations.
      readings: its equations, sorted by the blocks of the loop.
      rows: variables that are rows of an array: the scan slices the array instead.
      span: which of its blocks to roll.

    Raises:
      NotAlike: the blocks are not the same program; the error names the first difference.
    """
    # 1. Cut the blocks apart, and find one template for all of them.
    bounds, rounds, template = align(flat, readings, loop_pass, span)
    eqns_before, eqns_after = readings.sequence[: bounds[0]], readings.sequence[bounds[-1] :]
    inputs = _sort_slots(template, rounds, rows, readings)
    order = slice(None) if inputs.is_forward else slice(None, None, -1)  # of the rounds, along the scanned arrays

    # 2. Collect the equations that run before the scan.
    sources = [*jx.free([*eqns_before, *eqns_after], flat.outvars), *inputs.atoms]
    early = _early_eqns(eqns, readings, bounds[0], sources, row_eqns(eqns, rows))
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
        xs = [_scanned_array(x, env.__getitem__, span.count) for x in inputs.xs]

        def step(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
            outputs = body(*consts, *carry, *(reader(x) for (_, reader), x in zip(xs, slices, strict=True)))
            return outputs[: len(carry)], outputs[len(carry) :]

        consts = env.read(a for _, a in inputs.consts)
        init = env.read(a for _, a, _ in inputs.carry)
        arrays = [array for array, _ in xs]
        final, stacked = lax.scan(step, init, arrays, length=span.count, reverse=not inputs.is_forward)
        # Later equations read the values of single rounds by the variables of the original program.
        for v, y in zip(ys, stacked, strict=True):
            env.update((var_map[v], y[k]) for k, var_map in enumerate(template.var_maps[order]) if var_map[v] in used)
        env.update((template.var_maps[-1][v], x) for v, x in zip(results, final, strict=True))
        _run_in(env, eqns_after)
        return env.read(flat.outvars)

    return rolled


def _early_eqns(
    eqns: Sequence[Any], readings: Readings, start: int, sources: Sequence[Any], rows: Sequence[Any]
) -> list[Any]:
    """Return the equations that run before the scan.

    They are those before the loop, those that were moved out of its blocks (keys, rows), and pure ones that the scan or
    the rest of the program reads.

    Args:
      start: the position at which the loop begins.
      sources: the variables that the scan or the rest of the program reads.
      rows: the equations that take rows.
    """
    early_ids = {id(e) for e in (*closure(sources, readings.pure_eqns), *readings.sequence[:start])}
    early_ids |= {*readings.ahead, *map(id, rows)} - {id(e) for e in readings.sequence[start:]}
    return [e for e in eqns if id(e) in early_ids]


def row_eqns(eqns: Sequence[Any], rows: Mapping[Any, Row]) -> list[Any]:
    """Return the equations that take rows."""
    return [e for e in eqns if any(v in rows for v in e.outvars)]


# ----------------------------------------------------------------------------------------------------------------------
# The scan's inputs.


def _sort_slots(
    template: Template, rounds: Sequence[Round], rows: Mapping[Any, Row], readings: Readings
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
    # The first round may read anything, such as the loop's input. The second reads the first one's result.
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
      value_of: returns the value of an atom.
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
    # Every round has another value, or they are scalars: stack them.
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
