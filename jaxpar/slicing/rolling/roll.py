"""Roll layers that a model writes as a Python loop into one `scan` over stacked parameters.

Two steps, since a layout is made before any batch is seen. `layout/families.py` finds, by paths and shapes alone,
parameters that look like those of alike blocks in a row: they are stored as one stack. `loops.py` then looks at the
traced loss: where the equations of one block after another are the same program, `roll` makes them a scan, so that a
strategy fetches and reduces layer by layer, and a program's size does not grow with depth. Blocks that alternate with a
period are rolled by so many blocks at once.

The trace of a loop stands in program order, one block after another. Between the last equation that reads block k's
parameters and the first that reads block k+1's, the cut is where the fewest bytes are alive: on the residual stream.
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
    """Why the blocks of a loop do not make a scan; `block` is the number, among those tried, of the one that differs,
    and `everywhere` whether it differs wherever the blocks are cut apart.
    """

    def __init__(self, why: str, block: int = 0, everywhere: bool = False):
        super().__init__(why)
        self.block, self.everywhere = block, everywhere


@dataclass(frozen=True)
class Span:
    """Blocks `start`, `start + 1`, ... of a loop as `count` rounds of `period` blocks each; `last` as of `Readings`."""

    start: int
    period: int
    count: int
    last: int | None = None

    @property
    def stop(self) -> int:
        """The block after the last."""
        return self.start + self.period * self.count

    def number(self, at: int) -> int:
        """The number in its list of the loop's block `at`."""
        return at if self.last is None else self.last - at

    def round(self, number: int) -> str:
        """What to call a round: a block by its number in the list, or several."""
        at = self.start + self.period * number
        first, last = self.number(at), self.number(at + self.period - 1)
        return f"block {first}" if self.period == 1 else f"blocks {first} to {last}"


@dataclass(frozen=True)
class _Block:
    """One round of a loop: what is computed from its parameters alone, and then its part of the program."""

    eqns: list[Any]

    @functools.cached_property
    def defined(self) -> set[Any]:
        return {v for e in self.eqns for v in e.outvars}


def roll(
    flat: jx.Flat, eqns: Sequence[Any], readings: Readings, rows: Mapping[Any, Row], run: Pass, span: Span
) -> Callable[..., list[Any]]:
    """A program as a function of the same inputs, with one scan in place of some blocks of one loop.

    Args:
      flat: the program, and `eqns` what it needs of its equations.
      readings: its equations, sorted out by the blocks of the loop.
      rows: what is known to be a row of an array: the scan slices the array instead.
      run: a run over the loop, and `span` which of its blocks.

    Raises NotAlike, naming the first difference, where the blocks are not the same program.
    """
    order, depth = readings.others, span.count
    first: NotAlike | None = None
    for bounds in _bounds(readings, flat, run, span):
        blocks = [_Block(readings.ordered(order[a:b])) for a, b in itertools.pairwise(bounds)]
        try:
            template, maps, slots = _match(blocks, span, lambda e: readings.within(e, run, span.start, span.stop))
            break
        except NotAlike as why:
            first = first or why
            if why.everywhere:
                raise
    else:
        assert first is not None
        raise first
    before, after = order[: bounds[0]], order[bounds[-1] :]
    inside = set().union(*(block.defined for block in blocks))
    consts, carry, xs = [], [], []
    homes = [[None if jx.is_literal(a) else rows.get(a) for a in atoms] for _, atoms in slots]
    size = lambda rows: sum(row[0].source.aval.size for row in map(_regular, rows) if row is not None)
    forwards = size(homes) >= size([home[::-1] for home in homes])
    turned = slice(None) if forwards else slice(None, None, -1)  # a scan in reverse slices from the end
    for (inner, atoms), home in zip(slots, homes, strict=True):
        out = _carried(atoms, maps)
        if (row := _regular(home[turned])) is not None:
            xs.append((inner, *row, None))
        elif out is not None and (jx.is_literal(atoms[0]) or atoms[0] not in inside):
            carry.append((inner, atoms[0], out))
        elif any(not jx.is_literal(a) and a in inside for a in atoms):
            raise NotAlike(f"a block reads {inner.aval.str_short()} from another block than the one before it")
        elif all(a is atoms[0] for a in atoms):
            consts.append((inner, atoms[0]))
        elif any(not jx.is_literal(a) and a in readings.reads for a in atoms):
            raise NotAlike(f"a block reads {inner.aval.str_short()} from another parameter than the one beside it")
        else:
            xs.append((inner, None, 0, atoms[turned]))
    if not carry:
        raise NotAlike("no value goes from block to block")
    sources = [row.source for _, row, *_ in xs if row is not None]
    entering = [a for _, a, *_ in (*consts, *carry)] + sources + [a for *_, atoms in xs for a in atoms or ()]
    entering = [a for a in entering if not jx.is_literal(a)]
    extra = closure([*jx.free([*before, *after], flat.outvars), *entering], readings.pure)
    late = {id(e) for e in order[bounds[0] :]}
    early = {id(e) for e in (*extra, *before)} | ({*readings.ahead, *map(id, rows_of(eqns, rows))} - late)
    early = [e for e in eqns if id(e) in early]
    given = {*flat.invars, *flat.constvars, *(v for e in early for v in e.outvars)}
    if any(v not in given for v in (*jx.free(early), *entering)):
        raise NotAlike("a block reads what is made beside the loop")
    used = {*entering, *jx.free([*early, *after], flat.outvars)}
    results = [out for _, _, out in carry]
    made = dict.fromkeys(v for e in template for v in e.outvars)
    ys = [v for v in made if any(m[v] in used for m in (maps[:-1] if v in results else maps))]
    body = jx.run(template, [inner for inner, *_ in (*consts, *carry, *xs)], [*results, *ys])

    def fun(*values: Any) -> list[Any]:
        env = jx.Environment[Any].of(flat, values, jx.array_of)
        _run_in(env, early)
        scanned, readers = [], []
        for inner, row, stride, atoms in xs:
            array, reader = _per_round(inner, row, stride, atoms, env.__getitem__, depth)
            scanned.append(array)
            readers.append(reader)

        def step(carried: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            outs = body(*fixed, *carried, *(reader(v) for reader, v in zip(readers, x, strict=True)))
            return outs[: len(carry)], outs[len(carry) :]

        fixed = env.read(a for _, a in consts)
        init = env.read(a for _, a, _ in carry)
        final, stacked = lax.scan(step, init, scanned, length=depth, reverse=not forwards)
        for v, x in zip(ys, stacked, strict=True):
            env.update((m[v], x[k]) for k, m in enumerate(maps[turned]) if m[v] in used)
        env.update((maps[-1][v], x) for v, x in zip(results, final, strict=True))
        _run_in(env, after)
        return env.read(flat.outvars)

    return fun


def rows_of(eqns: Sequence[Any], rows: Mapping[Any, Row]) -> list[Any]:
    """The equations that take rows."""
    return [e for e in eqns if any(v in rows for v in e.outvars)]


def _regular(homes: Sequence[Row | None]) -> tuple[Row, int] | None:
    """The first of some rows and the distance from each to the next, if they are of one array, evenly apart."""
    first, second = homes[:2]
    if first is None or second is None:
        return None
    stride = second.at - first.at
    wanted = [Row(first.source, first.at + stride * k, first.dim, first.kept) for k in range(len(homes))]
    return (first, stride) if stride > 0 and list(homes) == wanted else None


def _per_round(
    inner: Any, row: Row | None, stride: int, atoms: Sequence[Any] | None, get: Callable[[Any], Any], depth: int
) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """What a scan slices, and what a round makes of its slice: a row of an array, or one of several values."""
    if row is not None:
        x, dim = get(row.source), row.dim
        if (row.at, stride, depth) != (0, 1, x.shape[dim]):
            x = lax.slice_in_dim(x, row.at, row.at + stride * (depth - 1) + 1, stride, dim)
        return jnp.moveaxis(x, dim, 0) if dim else x, lambda v: jnp.expand_dims(v, dim) if row.kept else v
    assert atoms is not None
    several = list({id(a): a for a in atoms}.values())
    if len(several) == depth or not inner.aval.shape:
        return jnp.stack([get(a) for a in atoms]), lambda v: v
    # As many as there are (the masks of local and of global attention), and which of them.
    table = jnp.stack([get(a) for a in several])
    which = [next(i for i, b in enumerate(several) if a is b) for a in atoms]
    return jnp.array(which, jnp.int32), lambda i: lax.dynamic_index_in_dim(table, i, keepdims=False)


def _bounds(readings: Readings, flat: jx.Flat, run: Pass, span: Span) -> list[list[int]]:
    """Where each round begins, and where the last one ends: as far before its first reading in every round. All ways to
    cut, those with the fewest bytes on the cuts first.
    """
    order, at = readings.others, span.start - run.start
    first = list(run.first[at : at + span.period * span.count : span.period])
    last = list(run.last[at + span.period - 1 : at + span.period * span.count : span.period])
    size = first[1] - first[0]
    for k in range(1, span.count):  # the last round is as long as the others
        for i in range(size):
            a, b = first[0] + i, first[k] + i
            if b < len(order) and (k + 1 < span.count or b <= last[k]) and readings.tokens[a] != readings.tokens[b]:
                raise NotAlike(
                    f"{span.round(0)} has {order[a].primitive} ({jx.where(order[a])}) where {span.round(k)} has "
                    f"{order[b].primitive} ({jx.where(order[b])}){_parameter(order[a], order[b])}",
                    k,
                    True,
                )
        if k + 1 < span.count and (longer := first[k + 1] - first[k] - size):
            eqn = order[first[k] + min(size, size + longer)]
            raise NotAlike(
                f"{span.round(k)} has {abs(longer)} operations {'more' if longer > 0 else 'less'} than "
                f"{span.round(0)}, at {eqn.primitive} ({jx.where(eqn)})",
                k + 1,
                True,
            )
    alive = readings.alive(flat.invars, flat.outvars)
    gap = min([first[k] - last[k - 1] - 1 for k in range(1, span.count)])
    # The last round ends as far before the first reading of a round that would follow it.
    ways = [d for d in range(gap + 1) if first[0] >= d and last[-1] < first[-1] - d + size <= len(order)]
    if not ways:
        raise NotAlike("the first or the last block has fewer operations than the others", span.count - 1)
    ways.sort(key=lambda back: (sum(alive[at - back] for at in first[1:]), back))
    return [[at - back for at in [*first, first[-1] + size]] for back in ways]


def _parameter(e: Any, f: Any) -> str:
    """In what two equations differ, if they have one primitive."""
    if e.primitive is not f.primitive:
        return ""
    pairs = [(a.aval.str_short(), b.aval.str_short()) for a, b in zip(e.invars, f.invars, strict=False)]
    name = next((k for k in e.params if str(e.params[k]) != str(f.params.get(k))), None)
    shapes = next(((a, b) for a, b in pairs if a != b), None)
    if shapes is not None:
        return f": an operand is {shapes[0]}, and {shapes[1]}"
    return "" if name is None else f": {name}={short(e.params[name])}, and {short(f.params[name])}"


def _match(
    blocks: Sequence[_Block], span: Span, within: Callable[[Any], bool]
) -> tuple[list[Any], list[dict[Any, Any]], list[tuple[Any, list[Any]]]]:
    """One program for all blocks.

    Returns its equations; for each block, the variable of its own that stands for each that they define; and what they
    read from outside: a variable, and for each block the atom that stands for it.

    The equations are the second block's: what enters the first may be one value in two roles. Equations that are
    `within` the loop stand in it wherever the blocks are cut apart.
    """
    model = blocks[1]
    maps: list[dict[Any, Any]] = []
    outside: dict[Any, list[Any]] = {}
    numbers: set[tuple[int, int]] = set()  # of equation and operand, where blocks have different literals
    for k, block in enumerate(blocks):
        same: dict[Any, Any] = {}
        for at, (e, f) in enumerate(zip(model.eqns, block.eqns, strict=False)):
            _same_operation(e, f, span, k, within)
            for j, (a, b) in enumerate(zip(e.invars, f.invars, strict=True)):
                if jx.is_literal(a) and jx.is_literal(b) and _alike(a, b):
                    if not np.array_equal(a.val, b.val):
                        numbers.add((at, j))
                elif not _stands_for(a, b, k, (model, block), same, outside):
                    raise NotAlike(
                        f"operand {j} of {e.primitive} ({jx.where(f)}) differs between {span.round(1)} and "
                        f"{span.round(k)}",
                        k,
                    )
            same.update(zip(e.outvars, f.outvars, strict=True))
        if len(block.eqns) != len(model.eqns):
            raise NotAlike(f"{span.round(k)} has {len(block.eqns)} equations, {span.round(1)} {len(model.eqns)}", k)
        maps.append(same)
    eqns, slots = list(model.eqns), list(outside.items())
    for at, j in sorted(numbers):
        var = jec.Var(eqns[at].invars[j].aval)
        slots.append((var, [block.eqns[at].invars[j] for block in blocks]))
        eqns[at] = eqns[at].replace(invars=[var if i == j else a for i, a in enumerate(eqns[at].invars)])
    return eqns, maps, slots


def _same_operation(e: Any, f: Any, span: Span, k: int, within: Callable[[Any], bool]) -> None:
    """Raise NotAlike unless equation `f` of block k does what `e` does in the second block."""
    if e.primitive is not f.primitive or len(e.invars) != len(f.invars):
        raise NotAlike(
            f"{span.round(1)} has {e.primitive} ({jx.where(e)}) where {span.round(k)} has {f.primitive} "
            f"({jx.where(f)})",
            k,
        )
    if (name := differing(e, f)) is not None:
        raise NotAlike(
            f"{e.primitive} ({jx.where(f)}) has {name}={short(e.params[name])} in {span.round(1)} and "
            f"{short(f.params[name])} in {span.round(k)}",
            k,
            within(e) and within(f),
        )


def _alike(a: Any, b: Any) -> bool:
    return a.aval.shape == b.aval.shape and a.aval.dtype == b.aval.dtype


def _stands_for(
    a: Any, b: Any, k: int, blocks: tuple[_Block, _Block], same: Mapping[Any, Any], outside: dict[Any, list[Any]]
) -> bool:
    """Whether operand `b` of block k, the second of `blocks`, stands for `a` of the first: their blocks make both, by
    equations that stand for one another (`same`), or both come from outside, which is written down.
    """
    model, block = blocks
    if jx.is_literal(a):
        return False
    if a in model.defined:
        return _alike(a, b) and same[a] is b
    atoms = outside.setdefault(a, [])
    fits = jx.is_literal(b) or b not in block.defined  # a literal may: the zero that a sum over blocks begins with
    fits = fits and _alike(a, b) and (len(atoms) == k or same_atom(atoms[k], b))
    atoms[k:] = [b]
    return fits


def _carried(atoms: Sequence[Any], maps: Sequence[dict[Any, Any]]) -> Any:
    """The variable of a block that the next block reads here, if every block does."""
    if jx.is_literal(atoms[1]):
        return None
    out = next((v for v, here in maps[0].items() if here is atoms[1]), None)
    return out if out is not None and all(m[out] is a for m, a in zip(maps, atoms[1:], strict=False)) else None


def _run_in(env: dict[Any, Any], eqns: Iterable[Any]) -> None:
    """Run equations, each once, with values by variable in `env`, which gets theirs."""
    eqns = list(eqns)
    given = jx.free(eqns)
    outs = [v for e in eqns for v in e.outvars if not isinstance(v, jec.DropVar)]
    env.update(zip(outs, jx.run(eqns, given, outs)(*(env[v] for v in given)), strict=True))
