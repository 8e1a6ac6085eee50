"""Find the loops over alike blocks in a traced program, and roll them into scans.

A loop may run over several lists at once (`zip(layers, ffs)`), over rows of one stacked parameter (`weights[i]`), twice
in one loss, over a part of a list, from its end (`reversed(layers)`), or over blocks that alternate with a period of at
most 8: then so many blocks are one round of the scan. Blocks that fill no round stay as they are written, or are a scan
of their own.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jec

from ...program import jaxpr as jx
from .indexing import sliced
from .readings import Pass, Readings, Row, keys, rows
from .roll import NotAlike, Span, roll

StackMembers = Sequence[tuple[int, Sequence[int]]]
_PERIODS = range(1, 9)
_LEADING = ("broadcast_in_dim", "reshape")  # what may put a dim of size 1 in front


@dataclass(frozen=True)
class RolledLoop:
    """What became of one loop: `leaf` is its first, of `depth` blocks; `spans` the scans, of each pass in order; `why`
    the first difference where blocks are left that run one by one, which are `left`.
    """

    leaf: int
    depth: int
    spans: tuple[Span, ...]
    left: tuple[int, ...] = ()
    why: str | None = None


@dataclass(frozen=True)
class _Lists:
    """Lists that one loop runs over: families of leaves, and leaves whose rows it reads (with their dim)."""

    depth: int
    families: tuple[StackMembers, ...] = ()
    stacked: tuple[tuple[int, int], ...] = ()

    def rows(self, flat: jx.Flat) -> dict[Any, Row]:
        """The variables of a program that are one block's."""
        found = {
            flat.invars[i]: Row(flat.invars[stack], k)
            for family in self.families
            for stack, members in family
            for k, i in enumerate(members)
        }
        sources = {flat.invars[i]: dim for i, dim in self.stacked}
        taken = rows(flat.eqns, lambda v: v in sources)
        return found | {v: row for v, row in taken.items() if sources[row.source] == row.dim}


def roll_loops(
    flat: jx.Flat, families: Sequence[StackMembers], params: int, axes: dict[str, int], own: Sequence[bool] = ()
) -> tuple[jx.Flat, list[RolledLoop]]:
    """A program with its loops as scans, and what became of each.

    Args:
      flat: the program, of whose inputs the first `params` are parameters.
      families: the leaves of each list of blocks: the stack, which the program does not read, and its layers, which it
        reads.
      axes: mesh axes that the program may name, name -> size.
      own: for each leaf, whether the stages of a pipeline own its layers. Those that no scan reads are read from the
        stack.
    """
    found = []
    flat, single = join(sliced(flat, lambda fun, flat: _traced(fun, flat, axes)), families)
    for lists in _together(flat, params, [*_listed(single), *_stacked(flat, params)]):
        flat, loop = _rolled(flat, lists, params, axes)
        if loop is not None:
            found.append(loop)
    stage = {
        flat.invars[i]: (flat.invars[stack], k)
        for family in families
        for stack, members in family
        if own and own[stack]
        for k, i in enumerate(members)
    }
    if any(v in stage for v in jx.free(jx.live(flat.eqns, flat.outvars), flat.outvars)):
        program, inputs = flat, flat.invars

        def fun(*values: Any) -> list[Any]:
            env = dict(zip(inputs, values, strict=True))
            given = [env[stage[v][0]][stage[v][1]] if v in stage else env[v] for v in inputs]
            run = jx.run(program.eqns, [*program.constvars, *program.invars], program.outvars)
            return run(*program.consts, *given)

        flat = _traced(fun, flat, axes)
    return flat, found


def _traced(fun: Any, flat: jx.Flat, axes: dict[str, int]) -> jx.Flat:
    """A function of a program's inputs, as a program."""
    inputs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in flat.invars]
    return jx.trace(fun, *inputs, axes=axes)[0]


def _listed(families: Sequence[StackMembers]) -> list[_Lists]:
    return [_Lists(len(family[0][1]), (family,)) for family in families]


def _stacked(flat: jx.Flat, params: int) -> list[_Lists]:
    """Leaves that a program reads row by row, every row of a dim by its number."""
    index = {v: i for i, v in enumerate(flat.invars[:params])}
    read: dict[tuple[int, int], set[int]] = {}
    for row in rows(flat.eqns, lambda v: v in index).values():
        read.setdefault((index[row.source], row.dim), set()).add(row.at)
    whole = {at: len(numbers) for at, numbers in read.items() if len(numbers) == flat.invars[at[0]].aval.shape[at[1]]}
    return [_Lists(depth, (), (at,)) for at, depth in whole.items() if depth > 1]


def _together(flat: jx.Flat, params: int, lists: Sequence[_Lists]) -> list[_Lists]:
    """The lists that one loop runs over as one: those of one length that together are still read in order."""
    merged: list[_Lists] = []
    for one in lists:
        alone = _readings(flat, params, one)[0].last
        for at, other in enumerate(merged):
            both = _Lists(one.depth, other.families + one.families, other.stacked + one.stacked)
            passes = _passes(flat, params, other)
            if one.depth == other.depth and _passes(flat, params, both) == passes and passes[0] == alone:
                merged[at] = both
                break
        else:
            merged.append(one)
    return merged


def _passes(flat: jx.Flat, params: int, lists: _Lists) -> tuple[int | None, list[tuple[int, int]]]:
    """Whether they are read from the end, and the passes."""
    readings = _readings(flat, params, lists)[0]
    return readings.last, [(run.start, run.stop) for run in readings.passes]


def _readings(flat: jx.Flat, params: int, lists: _Lists) -> tuple[Readings, tuple[Any, ...], dict[Any, Row]]:
    eqns = jx.live(flat.eqns, flat.outvars)
    members = lists.rows(flat)
    at = {v: row.at for v, row in members.items()}
    readings = Readings.of(eqns, set(flat.invars[:params]), at)
    if not readings.passes and (backwards := Readings.of(eqns, set(flat.invars[:params]), at, lists.depth - 1)).passes:
        readings = backwards
    return readings, eqns, members


def _rolled(flat: jx.Flat, lists: _Lists, params: int, axes: dict[str, int]) -> tuple[jx.Flat, RolledLoop | None]:
    """A program with every pass over some lists as scans, from the last pass to the first, and what became of it."""
    number = len(_passes(flat, params, lists)[1]) - 1
    leaf = lists.families[0][0][0] if lists.families else lists.stacked[0][0]
    spans: list[Span] = []
    left: list[int] = []
    why: str | None = None
    if number < 0:
        return flat, RolledLoop(leaf, lists.depth, (), (), "no block is read after another") if lists.families else None
    while number >= 0:
        chosen, alone, first = _spans(flat, lists, params, number)
        for at in reversed(range(len(chosen))):
            span, fun = chosen[at]
            if at < len(chosen) - 1:  # the program has changed behind it
                fun = _attempt(flat, _ways(flat, lists, params, number), number, span)
            flat = _traced(fun, flat, axes)
        spans = [span for span, _ in chosen] + spans
        left, why, number = alone + left, first or why, number - 1
    if not lists.families and not spans:  # rows of a parameter that happen to be read one after another
        return flat, None
    return flat, RolledLoop(leaf, lists.depth, tuple(spans), tuple(sorted({*left})), why)


def _spans(
    flat: jx.Flat, lists: _Lists, params: int, number: int
) -> tuple[list[tuple[Span, Any]], list[int], str | None]:
    """The scans in a pass, the program with each, the blocks left over, and the first difference between blocks."""
    ways = _ways(flat, lists, params, number)
    run, last = ways[0][1].passes[number], ways[0][1].last
    chosen: list[tuple[Span, Any]] = []
    left: list[int] = []
    why: str | None = None
    at = run.start
    while at < run.stop:
        best: tuple[Span, Any] | None = None
        for period in _PERIODS:
            span = Span(at, period, (run.stop - at) // period, last)
            while span.count > 1 and (best is None or span.stop > best[0].stop):
                try:
                    best = span, _attempt(flat, ways, number, span)
                except NotAlike as no:
                    why = why or str(no)
                    span = Span(at, period, min(no.block, span.count - 1) if no.block > 1 else 0, last)
            if best is not None and best[0].stop == run.stop:
                break
        if best is None:
            left.append(at if last is None else last - at)
        else:
            chosen.append(best)
        at = at + 1 if best is None else best[0].stop
    return chosen, left, why if left or len(chosen) > 1 else None


# Equations of a program, sorted out by the blocks of a loop, and the rows that a scan of it may slice.
_Ways = list[tuple[tuple[Any, ...], Readings, Mapping[Any, Row]]]


def _ways(flat: jx.Flat, lists: _Lists, params: int, number: int) -> _Ways:
    """How a pass may be read. Rows that are taken of one array, block by block (`mask[i]`), are what the scan slices;
    where that does not fit, they are equations like others. Where no block differs but in how it comes by its random
    key (the last of `key, mine = split(key)` has no use for the first half), all keys are derived before the loop.
    """
    readings, eqns, members = _readings(flat, params, lists)
    aside = _aside(readings, eqns, readings.passes[number])
    ways: _Ways = [(eqns, readings, members)]
    if aside:
        moved = readings.without({id(e) for e in eqns if any(v in aside for v in e.outvars)})
        ways = [(eqns, moved, {**members, **aside}), *ways]
    if derived := keys(readings.others, (*flat.invars, *flat.constvars)):
        ways += [(eqns, way.without(derived), taken) for _, way, taken in ways]
    return ways


def _attempt(flat: jx.Flat, ways: _Ways, number: int, span: Span) -> Any:
    """The program with a scan in place of some blocks of a pass. Raises NotAlike."""
    first: NotAlike | None = None
    for eqns, readings, taken in ways:
        try:
            return roll(flat, eqns, readings, taken, readings.passes[number], span)
        except NotAlike as why:
            first = first or why
    assert first is not None
    raise first


def _aside(readings: Readings, eqns: Sequence[Any], run: Pass) -> Mapping[Any, Row]:
    """Rows that a pass takes of arrays which are there before it begins, several of each."""
    born = {v: at for at, e in enumerate(readings.others) for v in e.outvars}
    taken = rows(eqns, lambda v: born.get(v, -1) < run.first[0])
    numbers: dict[Any, set[int]] = {}
    for row in taken.values():
        numbers.setdefault((row.source, row.dim), set()).add(row.at)
    return {v: row for v, row in taken.items() if len(numbers[row.source, row.dim]) > 1}


def join(flat: jx.Flat, families: Sequence[StackMembers]) -> tuple[jx.Flat, list[StackMembers]]:
    """The program with a stack itself in place of each equation that stacked all its layers in order; and the families
    whose layers it still reads one by one. Layers that a loss stacks itself before it scans them, by `jnp.stack`, are
    kept as one stack already: it reads this, or it would fetch all.

    Args:
      flat: the program.
      families: for each list of alike layers its leaves: the stack, and its layers, as positions of inputs.
    """
    places = {
        flat.invars[i]: (flat.invars[stack], k)
        for family in families
        for stack, members in family
        for k, i in enumerate(members)
    }
    made = {v: eqn for eqn in flat.eqns for v in eqn.outvars}
    same = jx.Environment[Any]({}, jx.itself)  # a stack that the program makes, and the one that is there
    eqns: list[Any] = []
    for eqn in flat.eqns:
        stack: Any
        stack, casts = _joined(eqn, made, places)
        if stack is None:
            eqns.append(eqn.replace(invars=same.read(eqn.invars)))
            continue
        for cast in casts:
            out: Any = jec.Var(cast.outvars[0].aval.update(shape=stack.aval.shape))
            eqns.append(cast.replace(invars=[stack], outvars=[out]))
            stack = out
        same[eqn.outvars[0]] = stack
    if not same:
        return flat, list(families)
    flat = dataclasses.replace(flat, eqns=tuple(eqns), outvars=tuple(same.read(flat.outvars)))
    read = set(jx.free(jx.live(flat.eqns, flat.outvars), flat.outvars))
    single = lambda family: any(flat.invars[i] in read for _, members in family for i in members)
    whole = lambda family: any(flat.invars[stack] in read for stack, _ in family)
    return flat, [family for family in families if single(family) or not whole(family)]


def _joined(eqn: Any, made: Mapping[Any, Any], places: Mapping[Any, tuple[Any, int]]) -> tuple[Any, list[Any]]:
    """The stack whose layers an equation stacks, and the casts of each; None if it does no such thing."""
    name, params = eqn.primitive.name, eqn.params
    if name not in ("concatenate", "stack") or params.get("dimension", params.get("axis")) != 0:
        return None, []
    rows = [_layer(v, made, places, name == "stack") for v in eqn.invars]
    first = rows[0]
    if first is None or first[0].aval.shape != eqn.outvars[0].aval.shape:
        return None, []
    types = lambda casts: [(e.params["new_dtype"], e.params["weak_type"]) for e in casts]
    for k, row in enumerate(rows):
        if row is None or row[0] is not first[0] or row[1] != k or types(row[2]) != types(first[2]):
            return None, []
    return first[0], first[2]


def _layer(
    at: Any, made: Mapping[Any, Any], places: Mapping[Any, tuple[Any, int]], leading: bool
) -> tuple[Any, int, list[Any]] | None:
    """Which layer of which stack a variable is, with a dim of size 1 in front (`leading`: without), and its casts."""
    casts: list[Any] = []
    while not jx.is_literal(at) and at not in places and at in made:
        eqn = made[at]
        if eqn.primitive.name == "convert_element_type":
            casts.insert(0, eqn)
        elif not leading and eqn.primitive.name in _LEADING and len(eqn.invars) == 1:
            shape = eqn.invars[0].aval.shape
            behind = tuple(range(1, len(shape) + 1))
            if at.aval.shape != (1, *shape) or eqn.params.get("broadcast_dimensions", behind) != behind:
                return None
            leading = True
        else:
            return None
        at = eqn.invars[0]
    if jx.is_literal(at) or at not in places or not leading:
        return None
    return (*places[at], casts)
