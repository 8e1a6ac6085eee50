"""Equal small draws of random numbers, of which a program has hundreds, as one batched draw.

XLA compiles every draw anew, on CPUs in about 0.1 s each: a model of 300 small leaves took half a minute to
initialise, on any number of devices. JAX's own generator (threefry) gives the same numbers batched as one by one.
What becomes of draws element by element (a standard deviation, a cast) is batched with them, and keys that are rows of
one array are read at once: each of these would be a kernel of its own.
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

from ..jaxprs import jaxpr as jx

_DRAWS = ("random_bits", "random_fold_in", "random_split", "threefry2x32")
_ELEMENTWISE = "add sub mul div neg abs max min integer_pow pow sqrt exp log tanh convert_element_type".split()
SMALL = 16_384  # elements: larger ones may be sharded, and two copies of them are memory


def draws_together(fun: Callable[[jax.Array], Any]) -> Callable[[jax.Array], Any]:
    """`fun` of a key, with equal small draws that do not wait for each other made together.

    Other generators than threefry (`jax_default_prng_impl`) draw other numbers when they are batched; a program that
    uses one runs as it is.
    """

    def run(key: jax.Array) -> Any:
        closed, out = jax.make_jaxpr(fun, return_shape=True)(key)
        outs = None if jx.opened(closed)[0].effects else _evaluated(closed, [key])
        return fun(key) if outs is None else jax.tree.unflatten(jax.tree.structure(out), outs)

    return run


def _evaluated(closed: Any, args: Sequence[Any]) -> list[Any] | None:
    """The results of a program with equal draws together; None where none are equal."""
    jaxpr, consts = jx.opened(closed)
    env: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    read = lambda v: _literal(v) if jx.is_literal(v) else env[v]
    if len(jaxpr.eqns) == 1 and jaxpr.eqns[0].params.get("inline"):  # newer jax inlines a call when it lowers it
        (call,) = jaxpr.eqns
        outs = _evaluated(call.params["jaxpr"], [read(v) for v in call.invars])
        if outs is None:
            return None
        env.update(zip(call.outvars, outs, strict=True))
    else:
        groups = _groups(jaxpr.eqns)
        if not any(len(group) > 1 for group in groups):
            return None
        made = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        for group in groups:
            if len(group) == 1 and (row := _row(group[0], made)):
                env[group[0].outvars[0]] = _Row(_value(env[row.of]), row.number)
                continue
            values = [[read(v) for v in eqn.invars] for eqn in group]
            with jx.standing(group[0]):
                outs = (
                    [jx.bind(group[0], [*map(_value, values[0])])] if len(group) == 1 else _together(group[0], values)
                )
            for eqn, results in zip(group, outs, strict=True):
                env.update(zip(eqn.outvars, results, strict=True))
    return [v.val if jx.is_literal(v) else _value(env[v]) for v in jaxpr.outvars]


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


def _groups(eqns: Sequence[Any]) -> list[list[Any]]:
    """The equations in an order in which they can run, those that run as one together."""
    level: dict[Any, int] = collections.defaultdict(int)  # of a variable: one more than those that it follows from
    drawn: set[Any] = set()
    groups: dict[Any, list[Any]] = {}
    for number, eqn in enumerate(eqns):
        at = 1 + max((level[v] for v in eqn.invars if not jx.is_literal(v)), default=0)
        level.update((v, at) for v in eqn.outvars)
        if kind := _kind(eqn, drawn):
            drawn.update(eqn.outvars)
        groups.setdefault((at, kind or number), []).append(eqn)
    return [group for _, group in sorted(groups.items(), key=lambda item: item[0][0])]


def _kind(eqn: Any, drawn: Collection[Any]) -> Any:
    """What equal draws have in common, and what follows from `drawn` ones element by element; None for an equation that
    is neither, or not small.
    """
    follows = eqn.primitive.name in _ELEMENTWISE and any(v in drawn for v in eqn.invars if not jx.is_literal(v))
    draws = follows or (jx.communicates([eqn], _DRAWS) and _threefry(eqn))
    if not draws or sum(math.prod(v.aval.shape) for v in (*eqn.outvars, *eqn.invars)) > SMALL:
        return None
    params = tuple((name, _hashable(value)) for name, value in sorted(eqn.params.items()))
    return eqn.primitive.name, params, tuple((v.aval.shape, v.aval.dtype) for v in eqn.invars)


def _literal(atom: Any) -> Any:
    """Its value, in its own dtype when it is stacked."""
    return np.asarray(atom.val, atom.aval.dtype)


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
