"""A program's hundreds of equal draws of random numbers as one batched draw.

XLA compiles every draw anew, on CPUs in about 0.1 s each: a model of 300 small leaves took half a minute to
initialise, on any number of devices. JAX's own generator (threefry) gives the same numbers batched as one by one.
What becomes of draws element by element (a standard deviation, a cast), or in another shape, is batched with them, and
keys that are rows of one array are read at once: each of these would be a kernel of its own.

Small draws of one kind are one. So are large ones of layers that a step keeps as one leaf: XLA takes the batch for
their stack, and each device draws its part. Drawn one by one, each was drawn by all stages, and all layers of a leaf
were there before their stack was spread over stages.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np
from jax.dtypes import extended

from ..program import jaxpr as jx
from ..program import primitives

_DRAWS = ("random_bits", "random_fold_in", "random_split", "threefry2x32")
SMALL = 16_384  # elements: larger ones may be sharded, and two copies of them are memory


def draws_together(fun: Callable[[jax.Array], Any]) -> Callable[[jax.Array], Any]:
    """`fun` of a key, with equal small draws that do not wait for each other made together, and equal large ones that
    `fun` stacks.

    Other generators than threefry (`jax_default_prng_impl`) draw other numbers when they are batched; a program that
    uses one runs as it is.
    """

    def run(key: jax.Array) -> Any:
        closed, out = jax.make_jaxpr(fun, return_shape=True)(key)
        if jx.opened(closed)[0].effects:
            return fun(key)
        flat = jx.flatten(closed, calls=_is_late)
        return jax.tree.unflatten(jax.tree.structure(out), map(_value, _evaluated(flat, [key])))

    return run


class _Layer(NamedTuple):
    """What becomes of a value: layer `number` of the stack `of` (a variable), after so many more equations."""

    of: Any
    number: int
    layers: int
    before: int = 0


class _Kind(NamedTuple):
    """What equal draws have in common; of large ones also in which stacks their results end, and how far from there."""

    what: Any
    ends: tuple[tuple[Any, int], ...] = ()
    layers: int = 0

    def complete(self, members: Sequence[int]) -> bool:
        """Whether the layers `members` are all that it is of; small ones are of none."""
        return not self.ends or [*members] == [*range(self.layers)]


def _evaluated(flat: jx.Flat, args: Sequence[Any]) -> list[Any]:
    """The results of a program with equal draws together. Rows of batches are as they are."""
    # A literal keeps its dtype where it is stacked with others.
    env = jx.Environment[Any].of(flat, args, lambda atom: np.asarray(atom.val, atom.aval.dtype))
    made = {v: eqn for eqn in flat.eqns for v in eqn.outvars}
    for group in _groups(flat):
        eqn, *others = group
        if not others and (row := _row(eqn, made)):
            env[eqn.outvars[0]] = _Row(_value(env[row.of]), row.number)
            continue
        values = [env.read(one.invars) for one in group]
        with jx.source_info_of(eqn):
            if others:
                outs = _together(eqn, values)
            elif eqn.primitive.name == "stack" and eqn.params["axis"] == 0:
                outs = [[_stacked(values[0])]]
            else:
                outs = [jx.bind(eqn, [*map(_value, values[0])])]
        for one, results in zip(group, outs, strict=True):
            env.store(one, results)
    return [v.val if jx.is_literal(v) else env[v] for v in flat.outvars]


def _is_late(eqn: Any) -> bool:
    """Whether it is the call of a function jitted with `inline=True`, which newer jax inlines when it lowers it."""
    return getattr(eqn.params.get("inline"), "name", "") == "JAX_LATE"


class _Row(NamedTuple):
    """A row of an array (or of the variable that stands for one), which is not read before it is needed alone."""

    of: Any
    number: int


def _value(x: Any) -> Any:
    return x.of[x.number] if isinstance(x, _Row) else x


def _row(eqn: Any, made: dict[Any, Any]) -> _Row | None:
    """The row that an equation reads, as `x[3]` is traced: a slice of dim 0, and then `squeeze`."""
    cut = made.get(eqn.invars[0]) if eqn.primitive.name == "squeeze" and not jx.is_literal(eqn.invars[0]) else None
    if cut is None or cut.primitive.name != "slice" or eqn.params["dimensions"] != (0,):
        return None
    (x,), (y,) = cut.invars, cut.outvars
    if jx.is_literal(x) or y.aval.shape != (1, *x.aval.shape[1:]):
        return None
    return _Row(x, cut.params["start_indices"][0])


def _together(eqn: Any, values: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """The results of one equation on several lists of operands, as rows."""
    columns = list(zip(*values, strict=True))
    shared = [all(_same(x, column[0]) for x in column) for column in columns]
    if all(shared):
        return [jx.bind(eqn, [*map(_value, values[0])])] * len(values)
    operands = [_value(c[0]) if same else _stacked(c) for c, same in zip(columns, shared, strict=True)]
    outs = jax.vmap(lambda *xs: jx.bind(eqn, xs), in_axes=[None if same else 0 for same in shared])(*operands)
    return [[_Row(x, n) for x in outs] for n in range(len(values))]


def _same(x: Any, y: Any) -> bool:
    if isinstance(x, _Row) and isinstance(y, _Row):
        return x.of is y.of and x.number == y.number
    literals = isinstance(x, np.ndarray) and isinstance(y, np.ndarray) and x.shape == y.shape == ()
    return x is y or (literals and bool(x == y))


def _stacked(column: Sequence[Any]) -> Any:
    """Values on a new dim 0."""
    rows = [x for x in column if isinstance(x, _Row) and x.of is getattr(column[0], "of", None)]
    if len(rows) < len(column):
        return jnp.stack([_value(x) for x in column])
    of, numbers = rows[0].of, [row.number for row in rows]
    return of if numbers == [*range(len(of))] else of[np.array(numbers)]


def _groups(flat: jx.Flat) -> list[list[Any]]:
    """The equations in an order in which they can run, those that run as one together."""
    kinds = _kinds(flat.eqns)
    last: dict[_Kind, int] = {}  # keys that are split one after another have large draws one after another
    groups: dict[tuple[int, Any], list[tuple[int, Any]]] = {}
    for _ in range(2):
        groups.clear()
        # Of a variable one more than those that it follows from, if one is drawn: counts of draws are constants.
        level: dict[Any, int] = collections.defaultdict(int, dict.fromkeys(flat.invars, 1))
        for eqn, (kind, layer) in zip(flat.eqns, kinds, strict=True):
            after = max((level[v] for v in eqn.invars if not jx.is_literal(v)), default=0)
            at = after + 1 if after or kind else 0
            if kind and kind.ends:
                at = last[kind] = max(at, last.get(kind, 0))
            level.update((v, at) for v in eqn.outvars)
            groups.setdefault((at, kind or id(eqn)), []).append((layer, eqn))
    ordered: list[list[Any]] = []
    for (_, kind), members in sorted(groups.items(), key=lambda item: item[0][0]):
        members.sort(key=lambda member: member[0])
        together = isinstance(kind, _Kind) and kind.complete([layer for layer, _ in members])
        eqns = [eqn for _, eqn in members]
        ordered += [eqns] if together else [[eqn] for eqn in eqns]
    return ordered


def _layers(eqns: Sequence[Any]) -> dict[Any, _Layer]:
    """The variables that become layers of a stack."""
    found: dict[Any, _Layer] = {}
    for eqn in reversed(eqns):
        given = [v for v in eqn.invars if not jx.is_literal(v)]
        if eqn.primitive.name == "stack" and eqn.params["axis"] == 0:
            (out,) = eqn.outvars
            found |= {v: _Layer(out, number, len(eqn.invars)) for number, v in enumerate(given)}
        elif _follows(eqn) and (out := eqn.outvars[0]) in found:
            before = found[out]._replace(before=found[out].before + 1)
            found |= {v: before for v in given if v.aval.size == out.aval.size and v not in found}
    return found


def _kinds(eqns: Sequence[Any]) -> list[tuple[_Kind | None, int]]:
    """Of each equation what it has in common with equal draws, or with what follows from such element by element, None
    where it is neither; and its layer, 0 of small ones.
    """
    layers, drawn = _layers(eqns), set[Any]()
    kinds: list[tuple[_Kind | None, int]] = []
    for eqn in eqns:
        kind, number = None, 0
        if (what := _what(eqn, drawn)) is not None:
            drawn.update(eqn.outvars)
            ends = [layers[v] for v in eqn.outvars if v in layers]
            if sum(math.prod(v.aval.shape) for v in (*eqn.outvars, *eqn.invars)) <= SMALL:
                kind = _Kind(what)
            elif len(ends) == len(eqn.outvars) and len({(end.number, end.layers) for end in ends}) == 1:
                number = ends[0].number
                kind = _Kind(what, tuple((end.of, end.before) for end in ends), ends[0].layers)
        kinds.append((kind, number))
    return kinds


def _what(eqn: Any, drawn: Collection[Any]) -> Any:
    """What equal draws have in common, and what follows from `drawn` ones element by element; None for an equation that
    is neither.
    """
    follows = _follows(eqn) and any(v in drawn for v in eqn.invars if not jx.is_literal(v))
    if not follows and not (jx.communicates([eqn], _DRAWS) and _threefry(eqn)):
        return None
    params = tuple((name, _hashable(value)) for name, value in sorted(eqn.params.items()))
    return eqn.primitive.name, params, tuple((v.aval.shape, v.aval.dtype) for v in eqn.invars)


def _follows(eqn: Any) -> bool:
    """Whether an equation is computed element by element, or gives elements another shape."""
    return primitives.of(eqn).elementwise or eqn.primitive.name in ("reshape", "transpose")


def _hashable(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return id(value)  # lives as long as its equation
    return id(value) if isinstance(value, jec.Jaxpr | jec.ClosedJaxpr) else value


def _threefry(eqn: Any) -> bool:
    """Whether the keys that an equation draws from are threefry's, and it makes none of others."""
    given = [v.aval.dtype for v in eqn.invars if jnp.issubdtype(v.aval.dtype, extended)]
    return bool(given) and all(str(dtype) == "key<fry>" for dtype in given)
