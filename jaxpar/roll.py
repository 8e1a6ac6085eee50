"""Roll layers that a model writes as a Python loop into one `scan` over stacked parameters.

Two steps, since a layout is made before any batch is seen. `families.py` finds, by paths and shapes alone, parameters
that look like those of alike blocks in a row: they are stored as one stack. `roll` then looks at the traced loss: where
the equations of one block after another are the same program, they become a scan, so that a strategy fetches and
reduces layer by layer, and a program's size does not grow with depth.

The trace of a loop stands in program order, one block after another. Between the last equation that reads block k's
parameters and the first that reads block k+1's, the cut is where the fewest bytes are alive: on the residual stream.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import jaxpr as jx
from .same import differing, same_atom, short


class NotAlike(Exception):
    """Why the blocks of a family do not make a scan."""


@dataclass(frozen=True)
class _Block:
    """One block: what is computed from its parameters alone, and then its part of the program."""

    eqns: list[Any]

    @functools.cached_property
    def defined(self) -> set[Any]:
        return {v for e in self.eqns for v in e.outvars}


def roll(
    flat: jx.Flat, params: int, stacks: Sequence[Any], layers: Sequence[Sequence[Any]]
) -> Callable[..., list[Any]]:
    """A program as a function of the same inputs, with one scan in place of the blocks of one family.

    Args:
      flat: the program, of whose inputs the first `params` are parameters.
      stacks: inputs [layers, ...] that the scan will slice, and that nothing reads so far.
      layers: for each of them, the inputs that the blocks read so far, one a block.

    Raises NotAlike, naming the first difference, where the blocks are not the same program.
    """
    eqns = jx.live(flat.eqns, flat.outvars)
    depth = len(layers[0])
    place = {v: (stack, k) for stack, row in zip(stacks, layers, strict=True) for k, v in enumerate(row)}
    parts = _sorted(eqns, set(flat.invars[:params]), {v: k for v, (_, k) in place.items()})
    order = parts.others
    first: NotAlike | None = None
    for bounds in _bounds(order, parts.reads, flat.invars[params:], flat.outvars, depth):
        cuts = [order[a:b] for a, b in itertools.pairwise(bounds)]
        blocks = [_Block(_ordered(part, parts)) for part in cuts]
        try:
            template, maps, slots = _match(blocks)
            break
        except NotAlike as why:
            first = first or why
    else:
        assert first is not None
        raise first
    before, after = order[: bounds[0]], order[bounds[-1] :]
    inside = set().union(*(block.defined for block in blocks))
    consts, carry, xs = [], [], []
    for inner, atoms in slots:
        homes = [None if jx.is_literal(a) else place.get(a) for a in atoms]
        out = _carried(atoms, maps)
        if homes[0] is not None and homes == [(homes[0][0], k) for k in range(depth)]:
            xs.append((inner, homes[0][0], None))
        elif out is not None and (jx.is_literal(atoms[0]) or atoms[0] not in inside):
            carry.append((inner, atoms[0], out))
        elif any(not jx.is_literal(a) and a in inside for a in atoms):
            raise NotAlike(f"a block reads {inner.aval.str_short()} from another block than the one before it")
        elif all(a is atoms[0] for a in atoms):
            consts.append((inner, atoms[0]))
        elif any(homes):
            raise NotAlike(f"a block reads {inner.aval.str_short()} from another parameter than the one beside it")
        else:
            xs.append((inner, None, atoms))
    if not carry:
        raise NotAlike("no value goes from block to block")
    entering = [a for _, a, *_ in (*consts, *carry)] + [a for *_, atoms in xs for a in atoms or ()]
    entering = [a for a in entering if not jx.is_literal(a)]
    extra = _closure([*jx.free([*before, *after], flat.outvars), *entering], parts.pure)
    used = {*entering, *jx.free([*extra, *before, *after], flat.outvars)}
    results = [out for _, _, out in carry]
    made = dict.fromkeys(v for e in template for v in e.outvars)
    ys = [v for v in made if any(m[v] in used for m in (maps[:-1] if v in results else maps))]
    body = jx.run(template, [inner for inner, *_ in (*consts, *carry, *xs)], [*results, *ys])

    def fun(*values: Any) -> list[Any]:
        env: dict[Any, Any] = dict(zip((*flat.constvars, *flat.invars), (*flat.consts, *values), strict=True))
        env.update((v, env[stack][k]) for v, (stack, k) in place.items() if v in used)
        get = lambda a: jnp.asarray(a.val, a.aval.dtype) if jx.is_literal(a) else env[a]
        _run_in(env, {id(e): e for e in [*extra, *before]}.values())  # an equation may be in both

        def step(carried: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            outs = body(*fixed, *carried, *x)
            return outs[: len(carry)], outs[len(carry) :]

        fixed = [get(a) for _, a in consts]
        scanned = [env[stack] if atoms is None else jnp.stack([get(a) for a in atoms]) for _, stack, atoms in xs]
        final, stacked = lax.scan(step, [get(a) for _, a, _ in carry], scanned, length=depth)
        for v, x in zip(ys, stacked, strict=True):
            env.update((m[v], x[k]) for k, m in enumerate(maps) if m[v] in used)
        env.update((maps[-1][v], x) for v, x in zip(results, final, strict=True))
        _run_in(env, after)
        return [get(v) for v in flat.outvars]

    return fun


@dataclass(frozen=True)
class _Order:
    """The equations of a program, sorted out.

    Attributes:
      reads: the block of each parameter of the family, and of what is computed from one block's parameters alone.
      own: the equations of the latter, by the variables that they define.
      pure: all that need parameters alone, of several blocks too (a norm of all weights, say) or of none.
      others: the equations that do not need the family's parameters alone, in order.
    """

    reads: dict[Any, int]
    own: dict[Any, Any]
    pure: dict[Any, Any]
    others: list[Any]


def _sorted(eqns: Sequence[Any], params: set[Any], members: dict[Any, int]) -> _Order:
    out = _Order(dict(members), {}, {}, [])
    alone, several = set(params), set()
    for eqn in eqns:
        atoms = [v for v in eqn.invars if not jx.is_literal(v)]
        blocks = {out.reads[v] for v in atoms if v in out.reads}
        if all(v in alone for v in atoms) and not eqn.effects:
            alone.update(eqn.outvars)
            if len(blocks) == 1:
                out.reads.update((v, next(iter(blocks))) for v in eqn.outvars)
                out.own.update((v, eqn) for v in eqn.outvars)
            out.pure.update((v, eqn) for v in eqn.outvars)
            if blocks or any(v in several for v in atoms):
                several.update(eqn.outvars)
                continue
        out.others.append(eqn)
    return out


def _ordered(part: Sequence[Any], parts: _Order) -> list[Any]:
    """The equations of one block: first what comes from parameters alone and its own parameters need, then the rest."""
    here = {v for e in part for v in e.outvars}
    alone = _closure(jx.free(part), {v: e for v, e in parts.pure.items() if v in parts.own or v in here})
    first = {id(e) for e in alone}
    return [*alone, *(e for e in part if id(e) not in first)]


def _closure(wanted: Sequence[Any], own: dict[Any, Any]) -> list[Any]:
    """The equations of `own` that some variables need, in program order."""
    need: set[int] = set()
    todo = [v for v in wanted if v in own]
    while todo:
        eqn = own[todo.pop()]
        if id(eqn) not in need:
            need.add(id(eqn))
            todo += [v for v in eqn.invars if not jx.is_literal(v) and v in own]
    return list({id(e): e for e in own.values() if id(e) in need}.values())


def _bounds(
    order: Sequence[Any], reads: dict[Any, int], inputs: Sequence[Any], outvars: Sequence[Any], depth: int
) -> list[list[int]]:
    """Where each block begins, and where the last one ends: as far before its first reading in every block. All ways to
    cut, those with the fewest bytes on the cuts first.
    """
    first, last = [len(order)] * depth, [-1] * depth
    for at, eqn in enumerate(order):
        for k in {reads[v] for v in eqn.invars if not jx.is_literal(v) and v in reads}:
            first[k], last[k] = min(first[k], at), max(last[k], at)
    for k in range(1, depth):
        if last[k] < 0 or last[k - 1] >= first[k]:
            where = jx.where(order[min(last[k - 1], len(order) - 1)])
            raise NotAlike(f"block {k - 1} is still read ({where}) when block {k} begins, or one is never read")
    sizes = sorted({b - a for a, b in itertools.pairwise(first)})
    if len(sizes) > 1:
        raise NotAlike(f"from the first reading of one block to that of the next there are {sizes} operations")
    alive = _alive(order, inputs, outvars)
    gap = min(first[k] - last[k - 1] - 1 for k in range(1, depth))
    # The last block ends as far before the first reading of a block that would follow it.
    ways = [d for d in range(gap + 1) if first[0] >= d and first[-1] - d + sizes[0] <= len(order)]
    if not ways:
        raise NotAlike("the first or the last block has fewer operations than the others")
    ways.sort(key=lambda back: (sum(alive[at - back] for at in first[1:]), back))
    return [[at - back for at in [*first, first[-1] + sizes[0]]] for back in ways]


def _alive(order: Sequence[Any], inputs: Sequence[Any], outvars: Sequence[Any]) -> np.ndarray:
    """Bytes alive before each equation, and after the last, of the program's inputs and what the equations compute."""
    born = dict.fromkeys(inputs, -1) | {v: at for at, e in enumerate(order) for v in e.outvars}
    ends = {v: at for at, e in enumerate(order) for v in e.invars if not jx.is_literal(v)}
    ends.update((v, len(order)) for v in outvars if not jx.is_literal(v))
    change = np.zeros(len(order) + 2, np.int64)
    for v, at in born.items():
        if ends.get(v, -1) > at:
            size = v.aval.size * getattr(v.aval.dtype, "itemsize", 8)
            change[at + 1] += size
            change[ends[v] + 1] -= size
    return np.cumsum(change)[:-1]


def _match(blocks: Sequence[_Block]) -> tuple[list[Any], list[dict[Any, Any]], list[tuple[Any, list[Any]]]]:
    """The equations of any block; for each block the variables that stand for those which they define; and what they
    read from outside: a variable and, for each block, the atom that it stands for.

    The second block is the model of the others: what enters the first may be one value in two roles.
    """
    model = blocks[1]
    maps: list[dict[Any, Any]] = []
    outside: dict[Any, list[Any]] = {}
    numbers: set[tuple[int, int]] = set()  # of equation and operand, where blocks have different literals
    for k, block in enumerate(blocks):
        same: dict[Any, Any] = {}
        for at, (e, f) in enumerate(zip(model.eqns, block.eqns, strict=False)):
            if e.primitive is not f.primitive or len(e.invars) != len(f.invars):
                raise NotAlike(
                    f"block 1 has {e.primitive} ({jx.where(e)}) where block {k} has {f.primitive} ({jx.where(f)})"
                )
            if (name := differing(e, f)) is not None:
                raise NotAlike(
                    f"{e.primitive} ({jx.where(f)}) has {name}={short(e.params[name])} in block 1 and "
                    f"{short(f.params[name])} in block {k}"
                )
            for j, (a, b) in enumerate(zip(e.invars, f.invars, strict=True)):
                fits = a.aval.shape == b.aval.shape and a.aval.dtype == b.aval.dtype
                if jx.is_literal(a) and jx.is_literal(b) and fits:
                    if not np.array_equal(a.val, b.val):
                        numbers.add((at, j))
                    continue
                if not jx.is_literal(a) and a in model.defined:
                    fits = fits and same[a] is b
                elif not jx.is_literal(a):  # a literal may stand for it: the zero that a sum over blocks begins with
                    row = outside.setdefault(a, [])
                    fits = fits and (jx.is_literal(b) or b not in block.defined)
                    fits = fits and (len(row) == k or same_atom(row[k], b))
                    row[k:] = [b]
                else:
                    fits = False
                if not fits:
                    raise NotAlike(f"operand {j} of {e.primitive} ({jx.where(f)}) differs between blocks 1 and {k}")
            same.update(zip(e.outvars, f.outvars, strict=True))
        if len(block.eqns) != len(model.eqns):
            raise NotAlike(f"block {k} has {len(block.eqns)} equations, block 1 {len(model.eqns)}")
        maps.append(same)
    eqns, slots = list(model.eqns), list(outside.items())
    for at, j in sorted(numbers):
        var = jec.Var(eqns[at].invars[j].aval)
        slots.append((var, [block.eqns[at].invars[j] for block in blocks]))
        eqns[at] = eqns[at].replace(invars=[var if i == j else a for i, a in enumerate(eqns[at].invars)])
    return eqns, maps, slots


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
